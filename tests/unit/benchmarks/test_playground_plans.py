"""The plans of the playground are those that a search finds today."""

import json

import pytest

from benchmarks.playground_plans import PAGE, QUESTIONS, answer, title

KEPT = json.loads(PAGE.read_text())


def test_the_file_has_every_question() -> None:
    assert list(KEPT) == [title(*question) for question in QUESTIONS]
    for each in KEPT.values():
        assert all(len(plan) == len(each["names"]) + 2 for plan in each["plans"])
        assert all(plan[-1] <= each["memory_bytes"] for plan in each["plans"])


@pytest.mark.slow
def test_a_search_finds_the_same_today() -> None:
    kept, found = KEPT[title(*QUESTIONS[0])], json.loads(json.dumps(answer(*QUESTIONS[0])))
    assert {**found, "plans": None} == {**kept, "plans": None}
    for plan, before in zip(found["plans"], kept["plans"], strict=True):
        assert plan[:-2] == before[:-2] and plan[-1] == before[-1]
        assert plan[-2] == pytest.approx(before[-2], rel=1e-12)
