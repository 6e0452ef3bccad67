"""The user's line is found through our frames, with few steps for each."""

from __future__ import annotations

import sys

import pytest

from parallelism.operation import ROOT
from vcluster.code import call_sites
from vcluster.code.call_sites import call_site

OURS = """
def deep(frames):
    return deep(frames - 1) if frames else call_site()"""


@pytest.fixture
def ours():
    """Functions that count as our packages' code."""
    names = {"call_site": call_site}
    exec(compile(OURS, f"{ROOT}/parallelism/deep.py", "exec"), names)
    return names


def test_the_site_is_the_users_line_however_deep_the_library_calls(ours):
    sites = [ours["deep"](frames) for frames in (0, 3, 14) for _ in range(2)]
    (site,) = set(sites)
    assert site.is_users and site.location.startswith(f"{__file__}:") and not site.drops_result


def test_a_repeated_call_enters_no_function_of_python(ours):
    def called():
        entered = []
        sys.setprofile(lambda frame, event, argument: entered.append(frame.f_code.co_name) if event == "call" else None)
        try:
            site = ours["deep"](10)
        finally:
            sys.setprofile(None)
        return site, entered.count("call_site"), len(entered)

    (first, _, _), (again, calls, entered) = called(), called()
    assert first.location == again.location
    assert (calls, entered) == (1, 12)      # ten frames and the first, and call_site


def test_new_code_in_the_place_of_old_code_has_its_own_sites_and_leaves_none(ours):
    ours["deep"](2)     # from this line, whose code stays
    before = dict(call_sites.known_sites), dict(call_sites._known)
    for number in range(20):
        names = dict(ours)
        code = compile("\n" * number + "first = deep(2)\nagain = deep(2)", f"user{number}.py", "exec")
        exec(code, names)
        assert [names[each].location for each in ("first", "again")] == [
            f"user{number}.py:{number + 1}", f"user{number}.py:{number + 2}"]
        assert len(call_sites.known_sites[id(code)]) == 2
        del code
        assert (call_sites.known_sites, call_sites._known) == before
