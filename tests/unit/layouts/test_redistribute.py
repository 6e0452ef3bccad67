"""`redistribute` in recorded NumPy: an op with a text, a gradient, a place on every device, and a price."""

from __future__ import annotations

import numpy as np
import pytest
from localized_runs import COLLECTIVES, run_everywhere
from transformed import assert_trained, interpreted, trained

from parallelism import Mesh, TensorSharding, ir, simulate
from parallelism.execution import Executable
from parallelism.layouts import annotate, localize, redistribute
from parallelism.resharding import plan_resharding
from parallelism.transforms import SGD, Adam, MixedPrecision, Parts, Strategy, train_step

T = ir.TensorType
B, = ir.symbols("B")
LAYOUTS = ["[None, None]", "[a, None]", "[None, a]", "[b, a]", "[(a, b), None]", "[None, (b, a)]"]
MESH = Mesh(a=2, b=3)


def moved(before, after):
    return annotate(ir.record(lambda x: redistribute(x, after), T("f8", (5, 7)), name="moved"), {"x": before})


@pytest.mark.sampled(10)
@pytest.mark.parametrize("after", LAYOUTS)
@pytest.mark.parametrize("before", LAYOUTS)
def test_it_moves_and_costs_what_a_plan_between_the_layouts_does(before, after):
    localized = localize(moved(before, after), MESH)
    assert localized.outputs == (TensorSharding.parse(after),)
    x = np.arange(35.0).reshape(5, 7)
    np.testing.assert_array_equal(run_everywhere(localized, [x])[0], x)
    plan = plan_resharding(TensorSharding.parse(before), TensorSharding.parse(after), (5, 7), np.float64, MESH)
    assert tuple(sum(localized.received(rank)) for rank in range(6)) == plan.bytes_received
    trace = simulate(Executable(localized), "dgx-h100", priced_dtype="bfloat16")
    calls = [event for event in trace if event.kind == "collective" and event.rank == 0]
    assert len(calls) == len([op for op in localized.program(0).ops if op.kind in COLLECTIVES - {"all_slice"}])
    assert trace.makespan_seconds > 0 or not any(plan.bytes_received)


def layered(batch):
    """Two layers, with the activation between them on another dim than before, and a weight that is kept in parts."""
    def loss(p, x, targets):
        with ir.region("one"):
            a = redistribute(np.tanh(x @ p["a"]), "[None, tp]")
        with ir.region("two"):
            b = a @ redistribute(p["b"], "[...]")
        return np.mean((redistribute(b, "[tp, None]") - targets) ** 2)

    types = {"a": T("f8", (4, 6)), "b": T("f8", (6, 3))}
    return ir.record(loss, types, T("f8", (batch, 4)), T("f8", (batch, 3)), name="layered")


def test_it_is_printed_and_read_and_interpreted_as_nothing():
    function = layered(B)
    assert ir.parse(str(function)) == function
    assert [op["layout"] for op in function.ops if op.kind == "reshard"] == [
        "[None, tp]", "[None, None]", "[tp, None]"]
    x = np.ones((2, 3))
    assert redistribute(x, "[a, b]") is x or np.array_equal(redistribute(x, "[a, b]"), x)
    with pytest.raises(ir.RecordError, match="the operator reshard"):
        ir.record(lambda x: ir.apply("reshard", x, layout="[a, b, c]"), T("f8", (2, 3)))
    with pytest.raises(ValueError, match="3 dims"):
        ir.record(lambda x: redistribute(x, "[a, b, c]"), T("f8", (2, 3)))
    with pytest.raises(ValueError, match="names axis 'tp', but the axes of"):
        localize(layered(6), Mesh(dp=2))


@pytest.mark.sampled(6, 1)
@pytest.mark.parametrize("text", [
    "tp=2", "dp=2 tp=2", "dp=3 tp=2 zero=1", "dp=2 tp=2 zero=3", "dp=2 tp=2 zero=2 recompute=one",
])
def test_it_stays_in_a_step_that_is_transformed(text):
    alone = train_step(layered(5), Adam(0.01))
    strategy, mesh = Strategy.parse_on_mesh(text)
    step = strategy(alone)
    localized = localize(step, mesh)
    rows = "dp" if "dp" in mesh.axes else None
    laid = {op.outputs[0].name: op["layout"] for op in Parts.of(step).forward.ops if op.kind == "reshard"}
    assert [*laid.values()] == [f"[{rows}, tp]", "[None, None]", "[(dp, tp), None]" if rows else "[tp, None]"]
    assert_trained(trained(step, lambda inputs: run_everywhere(localized, inputs)), interpreted(alone))


def test_it_stays_in_the_stages_of_a_pipeline_and_under_mixed_precision():
    step = Strategy.parse("dp tp pp@two 1f1b:2")(train_step(layered(B), SGD(0.1)))
    ops = [op["layout"] for stage in step.stages(2).functions for op in stage.forward.ops if op.kind == "reshard"]
    assert ops == ["[None, tp]", "[None, None]", "[tp, None]"]       # replicas are around the stages
    narrow = MixedPrecision("float16")(train_step(layered(4), SGD(0.1)))
    assert [op["layout"] for op in Parts.of(narrow).forward.ops if op.kind == "reshard"] == ops
    with pytest.raises(ValueError, match=r"no activation of @layered\.step is left to be split over 'tp'"):
        Strategy.parse("tp sp")(train_step(layered(4), SGD(0.1)))      # what redistribute says stays
