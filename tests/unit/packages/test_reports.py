"""These tests report less than pytest does, but every failure and every skip."""

from __future__ import annotations

pytest_plugins = ["pytester"]

TESTS = """
import pytest

@pytest.fixture
def broken():
    raise ValueError("in the set-up")

@pytest.fixture
def broken_later():
    yield
    raise ValueError("in the tear-down")

@pytest.fixture
def skipped():
    pytest.skip("in the set-up")

def test_passes(): pass
def test_fails(): assert False
def test_set_up(broken): pass
def test_tear_down(broken_later): pass
def test_skip(skipped): pass
"""


def test_set_ups_and_tear_downs_that_fail_or_skip_are_reported(pytester):
    pytester.makeconftest("from reports import pytest_runtest_protocol")
    pytester.makepyfile(TESTS)
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=2, failed=1, errors=2, skipped=1)
