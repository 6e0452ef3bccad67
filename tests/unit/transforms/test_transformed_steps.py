"""Transformed steps on all devices of a mesh, collectives in plain NumPy: they train as the untransformed step does."""

from __future__ import annotations

import os
from functools import cache

import pytest
from hypothesis import given, settings, strategies as st
from localized_runs import run_everywhere
from transformed import MODELS, assert_trained, interpreted, model_step, trained

from parallelism import Mesh
from parallelism.layouts import localize
from parallelism.transforms import SGD, Adam, AdamW, Strategy

MANY = int(os.environ.get("VCLUSTER_COMPOSITIONS", "300"))
OPTIMIZERS = {"sgd": (SGD(0.1), None), "momentum": (SGD(0.1, 0.5), 1.0), "adam": (Adam(0.01), None),
              "adamw": (AdamW(0.01), 0.5)}


@cache
def step_of(model, rows, optimizer):
    rule, clip = OPTIMIZERS[optimizer]
    return model_step(model, rows, rule, clip=clip)


@cache
def expected(model, rows, optimizer):
    return interpreted(step_of(model, rows, optimizer))


def check(model, rows, optimizer, text):
    if not MODELS[model](1).regions:
        text = text.replace("recompute=*", "")
    strategy, mesh = Strategy.parse_on_mesh(text)
    if model == "factored" and "sp" in text.split():
        with pytest.raises(ValueError, match=r"no activation of @factored\.step is left to be split over 'tp'"):
            strategy(step_of(model, rows, optimizer))
        return
    step = strategy(step_of(model, rows, optimizer))
    localized = localize(step, mesh)
    assert {value.name: layout for value, layout in zip(step.inputs, localized.inputs, strict=True)} | {
        value.name.removeprefix("next."): layout
        for value, layout in zip(step.outputs[1:], localized.outputs[1:], strict=True)
    } == {value.name: layout for value, layout in zip(step.inputs, localized.inputs, strict=True)}
    assert_trained(trained(step, lambda inputs: run_everywhere(localized, inputs)), expected(model, rows, optimizer))


@st.composite
def texts(draw):
    """The text of a strategy on at most 8 devices."""
    sizes = draw(st.sampled_from(
        [(1, 2), (2, 1), (2, 2), (3, 1), (1, 3), (4, 1), (2, 3), (3, 2), (1, 4), (4, 2), (2, 4), (1, 1), (8, 1)]))
    words = [f"dp={sizes[0]}", f"tp={sizes[1]}"]
    words += ["sp"] * draw(st.booleans()) + ["recompute=*"] * draw(st.booleans())
    words += draw(st.sampled_from([[], ["zero=1"], ["zero=2"], ["zero=3"]]))
    return " ".join(draw(st.permutations(words)))


@pytest.mark.slow
@settings(max_examples=2)
@given(st.sampled_from([*MODELS]), st.sampled_from([4, 5, 7]), st.sampled_from([*OPTIMIZERS]), texts())
def test_any_composition_trains_as_the_step_alone(model, rows, optimizer, text):
    check(model, rows, optimizer, text)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=MANY)
@given(st.sampled_from([*MODELS]), st.sampled_from([1, 2, 3, 4, 5, 7, 8]), st.sampled_from([*OPTIMIZERS]), texts())
def test_hundreds_of_compositions_train_as_the_step_alone(model, rows, optimizer, text):
    check(model, rows, optimizer, text)


@pytest.mark.sampled(90)
@pytest.mark.parametrize("text", ["dp=2 tp=2 sp zero=1", "dp:outer=2 dp=2 tp=2 zero=3", "dp:outer=2 dp=3 zero=2"])
@pytest.mark.parametrize("model", MODELS)
def test_every_model_is_split_in_several_ways_at_once(model, text):
    check(model, 6, "adamw", text)


@pytest.mark.slow
def test_parts_of_a_model_may_have_strategies_of_their_own():
    text = "dp=2 tp@block.0.feed_forward=2 tp:x@embedding,head=2 zero=1"
    check("gpt", 5, "adam", text)
    strategy, mesh = Strategy.parse_on_mesh(text)
    assert mesh == Mesh(dp=2, x=2, tp=2)
    laid = {value.name: value.layout.short() for value in strategy(step_of("gpt", 5, "adam")).inputs if value.layout}
    assert laid["p.0.up"] == "[None, tp]" and laid["p.0.qkv"] == "[None, None]" and laid["p.tokens"] == "[x, None]"
