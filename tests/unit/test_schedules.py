"""The orders of the named schedules: as published, as drawn, and as their closed forms say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelism.pipelining import Pipeline
from parallelism.schedules import SCHEDULES

PUBLISHED = json.loads((Path(__file__).parent / "data" / "pipeline_schedules.json").read_text())["schedules"]
LENGTHS = {"F": 1, "B": 2}

stages = st.integers(1, 9)
microbatches = st.integers(1, 14)


@pytest.mark.parametrize("key", PUBLISHED)
def test_order_makespan_and_live_activations_are_the_published_ones(key):
    name, ranks, count = re.fullmatch(r"(\w+)_P(\d+)_M(\d+)", key).groups()
    schedule = Pipeline(int(ranks), int(count), name).schedule
    if "order" in PUBLISHED[key]:
        assert [" ".join(map(str, row)) for row in schedule.actions] == PUBLISHED[key]["order"]
    assert schedule.makespan(LENGTHS) == PUBLISHED[key]["makespan"]
    assert list(schedule.peak_live()) == PUBLISHED[key]["peak_live"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_picture_in_the_docstring_is_the_schedule(name):
    drawn = [line.strip() for line in SCHEDULES[name].__doc__.splitlines() if line.strip().startswith("rank ")]
    assert drawn == str(Pipeline(4, 4, name)).splitlines()[2:]


@given(name=st.sampled_from(sorted(SCHEDULES)), s=stages, m=microbatches)
def test_every_size_is_valid_and_has_the_makespan_of_the_closed_form(name, s, m):
    schedule = Pipeline(s, m, name).schedule
    schedule.validate()
    assert schedule.makespan() == 2 * (m + s - 1)
    assert schedule.makespan(LENGTHS) == 3 * (m + s - 1)
    assert schedule.idle_fraction(LENGTHS) == pytest.approx((s - 1) / (m + s - 1))


@given(s=stages, m=microbatches)
def test_gpipe_keeps_every_microbatch_and_1f1b_no_more_than_the_stages_to_come(s, m):
    assert Pipeline(s, m, "gpipe").schedule.peak_live() == (m,) * s
    assert Pipeline(s, m, "1f1b").schedule.peak_live() == tuple(min(s - rank, m) for rank in range(s))


def test_1f1b_with_fewer_microbatches_than_stages_has_one_shape_on_all_but_the_last():
    *rows, last = (" ".join(map(str, row)) for row in Pipeline(4, 2, "1f1b").schedule.actions)
    assert rows == [f"{r}F0 {r}F1 {r}B0 {r}B1" for r in range(3)]
    assert last == "3F0 3B0 3F1 3B1"
