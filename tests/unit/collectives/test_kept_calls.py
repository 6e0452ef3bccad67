"""A device keeps so many calls; a loop over a few more finds most of them again."""

from __future__ import annotations

import pytest

from vcluster.collectives import kept_calls
from vcluster.collectives.kept_calls import KeptCalls


@pytest.mark.parametrize(("different", "fewest_found"), [(100, 100), (107, 60), (150, 15)])
def test_a_loop_over_more_calls_than_are_kept_finds_some_of_them(monkeypatch, different, fewest_found):
    monkeypatch.setattr(kept_calls, "MOST_CALLS", 100)
    kept: KeptCalls = KeptCalls()
    found = []
    for _ in range(8):
        found.append(0)
        for number in range(different):
            if kept.get(("call", number)) == number:
                found[-1] += 1
            else:
                kept.keep(("call", number), number)
            assert len(kept) <= 100
    assert min(found[1:]) >= fewest_found


def test_cleared_calls_are_forgotten_whole(monkeypatch):
    monkeypatch.setattr(kept_calls, "MOST_CALLS", 3)
    kept: KeptCalls = KeptCalls()
    for _ in range(2):
        for number in range(5):
            kept.keep(number, number)
        assert len(kept) == 3
        kept.clear()
        assert not kept
