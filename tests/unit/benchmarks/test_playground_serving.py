"""The steps of serving on the playground are those that are priced today."""

import json
from itertools import chain, pairwise

import pytest

from benchmarks.playground_serving import (
    BATCHES,
    CONTEXTS,
    PAGE,
    QUESTIONS,
    TENSOR_DEVICES,
    answer,
    fit_of,
    title,
)
from parallelism.models import transformer

KEPT = json.loads(PAGE.read_text())


def test_the_file_has_every_question() -> None:
    assert list(KEPT) == [title(*question) for question in QUESTIONS]
    for each in KEPT.values():
        assert [len(of_contexts) for of_contexts in each["steps"]] == [len(CONTEXTS)] * len(TENSOR_DEVICES)
        assert all(len(steps) == len(BATCHES) for of_contexts in each["steps"] for steps in of_contexts)


def test_a_token_has_the_bytes_of_its_cache_and_a_device_its_share_of_the_weights() -> None:
    for model, precision in QUESTIONS:
        spec, kept = transformer(model), KEPT[title(model, precision)]
        dtype = "float8_e4m3fn" if precision == "fp8" else "bfloat16"
        assert kept["token_bytes"] == [spec.cache_bytes(1, dtype) / tp for tp in TENSOR_DEVICES]
        for tp, nbytes in zip(TENSOR_DEVICES, kept["weights_bytes"], strict=True):
            assert nbytes >= spec.parameters * (1 if precision == "fp8" else 2) / tp


def test_what_fits_on_some_devices_fits_on_more_and_with_fewer_requests() -> None:
    for each in KEPT.values():
        fits = [[[step is not None for step in steps] for steps in of_contexts] for of_contexts in each["steps"]]
        for of_contexts in fits:
            assert all(steps == sorted(steps, reverse=True) for steps in of_contexts)
        assert all(sum(map(sum, fewer)) <= sum(map(sum, more)) for fewer, more in pairwise(fits))


def test_a_step_is_priced_so_today() -> None:
    place = TENSOR_DEVICES.index(2), CONTEXTS.index(4096), BATCHES.index(16)
    kept = KEPT[title("llama3.1-8b", "bf16")]["steps"][place[0]][place[1]][place[2]]
    assert kept == pytest.approx(list(fit_of("llama3.1-8b", "bf16", 2, 4096).parts(16)), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS, ids=[title(*question) for question in QUESTIONS])
def test_all_steps_are_priced_so_today(question: tuple[str, str]) -> None:
    kept, found = KEPT[title(*question)], json.loads(json.dumps(answer(*question)))
    assert {**found, "steps": None} == {**kept, "steps": None}
    for before, now in zip(kept["steps"], found["steps"], strict=True):
        for old, new in zip(chain(*before), chain(*now), strict=True):
            assert new is old is None or new == pytest.approx(old, rel=1e-9)
