"""What plans have in common is made once inside of a block, and nothing is kept outside of it."""

from __future__ import annotations

import pytest

from parallelism.shared_results import MOST, shared, shared_results


@pytest.fixture
def made():
    """A list, and a function that makes a new list and puts its argument into the first one."""
    calls = []

    def ask(what, *of, by=(), most=MOST):
        return shared(what, lambda: calls.append((what, by)) or [by], *of, by=by, most=most)

    return calls, ask


def test_outside_of_a_block_each_call_makes_its_own(made):
    calls, ask = made
    assert ask("a", by=1) is not ask("a", by=1) and len(calls) == 2
    with shared_results():
        inside = ask("a", by=1)
    assert ask("a", by=1) is not inside


def test_it_is_made_once_for_the_same_objects_and_equal_values(made):
    calls, ask = made
    one, equal = [1], [1]
    with shared_results():
        first = ask("a", one, by=(2, "x"))
        assert ask("a", one, by=(2, "x")) is first
        others = [ask("a", equal, by=(2, "x")), ask("a", one, by=(3, "x")), ask("b", one, by=(2, "x")), ask("a", by=(2, "x"))]
        assert all(other is not first for other in others) and len(calls) == 5


def test_those_that_were_asked_for_last_are_kept(made):
    calls, ask = made
    with shared_results():
        for by in (1, 2, 1, 3):
            ask("a", by=by, most=2)
        assert [by for _, by in calls] == [1, 2, 3]
        ask("a", by=1, most=2), ask("a", by=2, most=2)
        assert [by for _, by in calls] == [1, 2, 3, 2]


def test_an_object_that_is_gone_is_not_taken_for_a_new_one(made):
    calls, ask = made
    with shared_results():
        for number in range(3):
            ask("a", [number])      # nobody else keeps the list, whose memory the next one would get
    assert len(calls) == 3


def test_a_block_inside_of_a_block_has_its_own(made):
    calls, ask = made
    with shared_results():
        outer = ask("a")
        with shared_results():
            assert ask("a") is not outer
        assert ask("a") is outer and len(calls) == 2
