"""What transforms and pipelines do once and not for each layer or transform: counts of the work, and equal results."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, strategies as st
from transformed import MODELS, transformer

from parallelism import ir
from parallelism.execution import TrainedPipeline, step_updates
from parallelism.ir.core import TensorType, Value
from parallelism.ir.passes import Form
from parallelism.layouts.stages.joint_sums import JointSums
from parallelism.transforms import (
    SGD,
    Adam,
    AdamW,
    Parts,
    Recompute,
    Strategy,
    parts,
    splits,
    train_step,
    training,
)

B, = ir.symbols("B")
STRATEGIES = ["dp tp sp zero=1", "dp zero=2", "tp precision=bf16 dp zero=3", "precision=f32,f32 dp zero=1"]


@pytest.fixture
def calls(monkeypatch):
    """Counts the calls of a function of a module."""
    def counted(module, name):
        made = []
        of = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **options: made.append(args) or of(*args, **options))
        return made
    return counted


def test_several_transforms_derive_one_gradient_when_an_op_is_used(calls):
    gradients = calls(parts, "gradient")
    step = Strategy.parse("dp tp sp precision=bf16 zero=1")(train_step(transformer(layers=2).function(4), Adam()))
    assert not gradients and step.name == "transformer.step"
    assert step.ops and step.inputs and len(gradients) == 1


def test_a_step_with_another_recompute_is_the_step_made_with_it(calls):
    both = [Strategy.parse(f"tp sp {text}pp@block.1 1f1b:4")(train_step(transformer(layers=2).function(B), Adam()))
            for text in ("", "recompute=block.* ")]
    sums = calls(JointSums, "of")
    again = both[0].with_recompute(both[1].recompute)
    assert not sums and again == both[1] and again != both[0] and str(again) == str(both[1])
    assert again.stages(2) == both[1].stages(2) != both[0].stages(2)
    assert again.with_recompute(()) == both[0] and again.with_recompute(()).stages(2) == both[0].stages(2)
    with pytest.raises(ValueError, match="has no region 'blok"):
        both[0].with_recompute((Recompute("blok.*"),))


def test_a_step_of_a_pipeline_derives_the_gradients_of_its_stages_alone(calls):
    gradients = calls(parts, "gradient")
    strategy, mesh = Strategy.parse_on_mesh("dp=2 zero=1 precision=bf16 tp=2 sp pp=2 1f1b:4")
    pipeline = TrainedPipeline(strategy(train_step(transformer(layers=2).function(B), Adam())), mesh)
    assert pipeline.updates.at(1).program(0).steps and not gradients


@pytest.mark.sampled(12)
@pytest.mark.parametrize("model", ["gpt", "llama", "residual"])
@pytest.mark.parametrize("text", STRATEGIES)
def test_a_step_that_is_derived_later_is_that_of_its_text(model, text):
    if model == "residual":
        text = text.replace("sp ", "")
    step = Strategy.parse(text)(train_step(MODELS[model](4), Adam()))
    held, read = Parts.of(step), ir.parse(str(step))
    assert Parts.of(read) == held and read == step and hash(read) == hash(step)
    assert held.joined() == step and copy.deepcopy(step) == step
    first, rest = text.split(" ", 1)
    half = Strategy.parse(first)(train_step(MODELS[model](4), Adam()))
    assert Strategy.parse(rest)(ir.parse(str(half))) == Strategy.parse(rest)(half)


def test_a_missing_derivative_is_refused_at_once():
    def total(p, x):
        return np.sum(ir.apply("clamped_swiglu_gradient", p["w"] * x, x, x)[0])

    loss = ir.record(total, {"w": ir.TensorType("f64", (3,))}, ir.TensorType("f64", (3,)))
    with pytest.raises(ValueError, match="the operator clamped_swiglu_gradient has no derivative"):
        train_step(loss, Adam())


TYPES = [TensorType(dtype, shape) for dtype, shape in (
    ("f32", (2, 3)), ("f64", (2, 3)), ("f32", (3,)), ("f32", (5,)), ("bf16", (3,)))]


@given(st.lists(st.sampled_from(TYPES), min_size=1, max_size=12),
       st.sampled_from([SGD(0.1), SGD(0.1, 0.9), Adam(), AdamW()]), st.sampled_from([None, 1.0]),
       st.sampled_from([None, 1024.0]))
def test_the_update_of_many_parameters_is_as_it_would_be_recorded(types, optimizer, clip, loss_scale):
    parameters = [Value(f"p.{i}.w", type) for i, type in enumerate(types)]
    made, recorded = (
        make(parameters, optimizer, clip, loss_scale) for make in (training._update, training._recorded_update))
    assert Form([made]) == Form([recorded])
    for side in ("inputs", "outputs"):
        assert [value.name for value in getattr(made, side)] == [value.name for value in getattr(recorded, side)]


def test_the_update_is_recorded_for_two_parameters_of_a_type(calls):
    recorded = calls(training, "_recorded_update")
    step = train_step(transformer(layers=6).function(4), AdamW())
    (few, *_), = recorded
    types = [value.type for value in few]
    assert len(few) < len(Parts.of(step).parameters) and max(map(types.count, types)) == 2


def test_tensor_parallelism_looks_at_each_dim_once_in_programs_of_any_depth(monkeypatch):
    looked = []
    uses = splits.Splits._uses
    monkeypatch.setattr(splits.Splits, "_uses", lambda self, *place: looked.append(place) or uses(self, *place))

    def loss(p, x, depth):
        h = x @ p["up"]
        for _ in range(depth):
            h = np.tanh(h + h)
        return np.sum(h @ p["down"])

    types = {"up": ir.TensorType("f64", (3, 4)), "down": ir.TensorType("f64", (4, 2))}
    for depth in (50, 600):
        looked.clear()
        whole = ir.record(lambda p, x, depth=depth: loss(p, x, depth), types, ir.TensorType("f64", (2, 3)))
        laid = {value.name: value.layout for value in Strategy.parse("tp")(whole).inputs}
        assert [str(laid[name].short()) for name in ("p.up", "p.down")] == ["[None, tp]", "[tp, None]"]
        assert len(looked) <= 2 * depth + 3


@pytest.mark.slow
def test_stages_that_differ_in_names_alone_have_one_update(calls):
    localized = calls(step_updates, "localize")
    strategy, mesh = Strategy.parse_on_mesh("dp=2 zero=1 tp=2 pp@block.1,block.2,block.3=4 1f1b:8")
    pipeline = TrainedPipeline(strategy(train_step(transformer(layers=4).function(B), Adam())), mesh)
    names = [{value.name for value in pipeline.updates.at(position).function.inputs} for position in range(4)]
    assert all(names[i].isdisjoint(names[j] - {"updates"}) for i in range(1, 3) for j in range(i))
    assert len(localized) == 3
    assert pipeline.updates.at(1).program(1) is pipeline.updates.at(2).program(1)
