"""Steps cut into pipelines as values: their text, their updates, what they move and hold, and what is refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from transformed import MODELS, assert_trained, interpreted, model_step, transformer

from parallelism import Mesh, ir, models
from parallelism.execution import TrainedPipeline
from parallelism.simulation import simulate
from parallelism.transforms import (
    SGD,
    Adam,
    DataParallel,
    Parts,
    Pipeline,
    Recompute,
    Step,
    Strategy,
    train_step,
)

B, = ir.symbols("B")
ON = {"hardware": "dgx-h100", "priced_dtype": "bfloat16"}


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize(("text", "pipeline"), [
    ("pp 1f1b:8", Pipeline(microbatches=8)), ("pp:stage gpipe:2", Pipeline("stage", 2, "gpipe")),
    ("pp interleaved_1f1b:4x2", Pipeline(microbatches=4, schedule="interleaved_1f1b", chunks=2)),
    ("pp@block.1,head zero_bubble_h1:3", Pipeline("pp", 3, "zero_bubble_h1", begin=("block.1", "head"))),
])
def test_the_text_of_a_pipeline(text, pipeline):
    assert str(pipeline) == text and Strategy.parse(text) == Strategy(pipeline)
    strategy, mesh = Strategy.parse_on_mesh(text.replace(" ", "=3 ", 1) + " dp=2")
    assert mesh == Mesh(**{pipeline.axis: 3, "dp": 2}) and strategy == Strategy(pipeline, DataParallel())
    assert Strategy.parse_on_mesh(strategy.text_on(mesh)) == (strategy, mesh)
    step = Strategy.parse(f"dp zero=1 {text}")(model_step("mlp", B, Adam()))
    assert Step.parse(str(step)) == step


def test_the_function_of_a_step_is_interpreted_as_the_step_alone():
    alone = model_step("mlp", B, Adam())
    step = Strategy.parse("pp 1f1b:2 dp tp zero=1")(alone)
    small = model_step("mlp", 4, Adam())
    assert_trained(interpreted(step.function, like=small), interpreted(small), 0)


@pytest.mark.parametrize("text", ["zero=1", "zero=2"])
def test_the_update_of_a_stage_sums_its_gradients_once_and_splits_its_state(text):
    step = Strategy.parse(f"dp {text} pp 1f1b:4")(train_step(models.mlp((8, 12, 4), B), Adam()))
    update = step.update(["p.w0", "p.b0"], replicas=("dp",))
    laid = {value.name: str(value.layout) for value in update.inputs}
    assert set(laid) == {f"{kind}p.{name}" for kind in ("", "grad.", "mean.", "square.") for name in ("w0", "b0")} | {
        "updates"}
    assert [op.kind for op in update.ops[:2]] == ["reshard"] * 2
    assert all("partial='dp'" in laid[f"grad.p.{name}"] for name in ("w0", "b0"))
    assert laid["mean.p.w0"] == "TensorSharding(None, 'dp')"


def deep():
    return models.mlp((16, 32, 8), B)


def measured(text, rows=32, loss=None, rule=None):
    strategy, mesh = Strategy.parse_on_mesh(text)
    program = TrainedPipeline(strategy(train_step(loss or deep(), rule or Adam())), mesh)
    trace = simulate(program, mesh=mesh, batch=rows, **ON)
    received = Counter()
    for event in trace:
        if event.kind == "collective" and event.bytes_received > 8 * 8:
            received[event.rank, event.name] += event.bytes_received
    return program, trace, received


@pytest.mark.takes_seconds
@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_h1"])
def test_a_stage_of_a_float32_step_holds_sixteen_bytes_a_parameter_and_one_gradient(schedule):
    loss = models.mlp((16, 32, 8, 4), B, dtype="float32")
    program = TrainedPipeline(Strategy.parse(f"pp {schedule}:4")(train_step(loss, Adam())), Mesh(pp=2))
    trace = simulate(program, mesh=Mesh(pp=2), batch=8, **ON)
    for rank, stage in enumerate(program.stages.functions):
        types = {value.name: value.type for value in stage.forward.inputs}
        counts = [types[name].size for name in stage.trained]
        held = {kind: trace.peak_bytes(rank, kind) for kind in ("weights", "gradients", "optimizer", "outputs")}
        assert held == {
            "weights": 4 * sum(counts), "gradients": 4 * (sum(counts) + max(counts)),
            "optimizer": 8 * sum(counts) + 8, "outputs": 0}


@pytest.mark.takes_seconds
@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("microbatches", [1, 4])
def test_zero_in_a_pipeline_moves_and_holds_the_same_for_any_number_of_microbatches(microbatches):
    # Rajbhandari et al. 2020, sections 5.1 and 7: 2 Psi in all, and a half of the state on each of 2 replicas.
    program, trace, _ = measured(f"pp=2 dp=2 zero=1 1f1b:{microbatches}")
    for rank in range(4):
        stage = program.stages.functions[rank // 2]
        types = {value.name: value.type for value in stage.forward.inputs}
        whole = sum(types[name].nbytes for name in stage.trained)
        assert trace.peak_bytes(rank, "optimizer") == 2 * whole // 2 + 8
        assert trace.peak_bytes(rank, "weights") == whole
        assert trace.peak_bytes(rank, "outputs") == 0
        moved = Counter()
        for event in trace.by_rank()[rank]:
            if event.kind == "collective" and event.name != "all_reduce":
                moved[event.name] += event.bytes_received
        assert moved == {"reduce_scatter": whole // 2, "all_gather": whole // 2}


@pytest.mark.slow
@pytest.mark.parametrize("zero", ["zero=1", ""])
@pytest.mark.parametrize("text", ["pp=1 1f1b:3", "pp=2 1f1b:3"])
def test_gradients_are_summed_over_replicas_and_over_context_at_once(text, zero):
    """One collective over both axes for all gradients, also of a table that two stages share, whatever the number of
    microbatches; ZeRO splits the state over both: 2 P (n - 1) / n received, with n = 2 * 3 devices."""
    strategy, mesh = Strategy.parse_on_mesh(f"{text} dp=2 cp=3 {zero}")
    loss = transformer(layers=2, width=24, vocabulary=18, positions="rotary").function(B)
    program = TrainedPipeline(strategy(train_step(loss, Adam())), mesh)
    trace = simulate(program, mesh=mesh, batch=12, **ON)
    for rank, events in enumerate(trace.by_rank()):
        stages = [stage for number, stage in enumerate(program.stages.functions)
                  if program.pipeline.schedule.placement[number] == rank // 6]
        names = {name for stage in stages for name in stage.trained}
        types = {value.name: value.type for stage in stages for value in stage.forward.inputs}
        assert {program.endings.pending[name] for name in names} == {("cp",)}
        sums = [event for event in events if event.kind == "collective" and event.axes == ("dp", "cp")]
        of_gradients = [event for event in sums if event.payload_bytes > 8]
        calls = Counter(event.name for event in of_gradients)
        expected = ["reduce_scatter", "all_gather"] if zero else ["all_reduce"]
        assert calls == dict.fromkeys(expected, 1)
        whole = sum(types[name].nbytes for name in names)
        assert sum(event.bytes_received for event in of_gradients) == 2 * whole * 5 // 6
        if zero:
            assert trace.peak_bytes(rank, "optimizer") == 2 * whole // 6 + 8
        others = [event for event in events if event.kind == "collective" and event.axes == ("cp",)]
        assert not any(event.dtype == "float64" and event.payload_bytes in {types[name].nbytes for name in names}
                       and event.name == "all_reduce" and event.payload_bytes > 8 for event in others)


@pytest.mark.takes_seconds
def test_without_zero_each_gradient_is_summed_once():
    program, _, received = measured("pp=2 dp=2 gpipe:3", 12, rule=SGD(0.1))
    for rank in range(4):
        stage = program.stages.functions[rank // 2]
        types = {value.name: value.type for value in stage.forward.inputs}
        whole = sum(types[name].nbytes for name in stage.trained)
        assert received[rank, "all_reduce"] == whole        # 2 P (n - 1) / n with n = 2


@pytest.mark.takes_seconds
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("text", "axis", "loss"), [("tp=2 sp", "tp", 3), ("cp=2", "cp", 1)])
def test_gradients_that_devices_of_a_stage_have_terms_of_are_summed_once(text, axis, loss):
    """Of norms and biases under sequence parallelism, of all weights under context parallelism.  The loss of each
    microbatch has sums of its own."""
    counted = []
    for microbatches in (1, 2):
        strategy, mesh = Strategy.parse_on_mesh(f"pp=1 1f1b:{microbatches} {text}")
        program = TrainedPipeline(strategy(model_step("gpt", B, SGD(0.1))), mesh)
        sums = [event for event in simulate(program, mesh=mesh, batch=6, **ON)
                if (event.kind, event.name, event.rank) == ("collective", "all_reduce", 0)]
        assert all(event.axes == (axis,) for event in sums)
        found = program.endings.pending
        pending = [name for stage in program.stages.functions for name in stage.trained if name in found]
        assert set(found.values()) == {(axis,)} and len(sums) == 1 + loss * microbatches
        counted.append(pending)
    assert counted[0] == counted[1] and len(counted[0]) > 7


@pytest.mark.takes_seconds
def test_equal_devices_stand_for_each_other_and_uneven_state_tells_replicas_apart():
    for text, classes in (("pp=2 dp=4 zero=1 1f1b:2", 2), ("pp=2 dp=3 zero=1 1f1b:2", 6)):
        strategy, mesh = Strategy.parse_on_mesh(text)
        program = TrainedPipeline(strategy(train_step(models.mlp((8, 12, 4), B), SGD(0.1, 0.5))), mesh)
        folded, whole = (simulate(program, mesh=mesh, batch=12, fold=fold, **ON) for fold in (True, False))
        assert folded.makespan_seconds == pytest.approx(whole.makespan_seconds, rel=1e-9)
        assert len(folded.ranks) <= classes
        assert {rank: folded.peak_bytes(rank) for rank in folded.ranks} == {
            rank: whole.peak_bytes(rank) for rank in folded.ranks}


@pytest.mark.takes_seconds
@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_zero_3_in_a_pipeline_gathers_parameters_twice_for_each_microbatch(microbatches):
    # Rajbhandari et al. 2020, section 7.2.2: each pass gathers, and the backward reduce-scatters, (n - 1) / n of Psi.
    # The backward reads no bias, and not the first weight of the model.
    program, trace, _ = measured(f"pp=2 dp=2 zero=3 1f1b:{microbatches}")
    assert program.replicas == () and program.inside == ("dp",)
    for rank in range(4):
        stage = program.stages.functions[rank // 2]
        sizes = {value.name: value.type.nbytes for value in stage.forward.inputs if value.name in stage.weights}
        again = {value.name for value in stage.backward.inputs} & {*sizes}
        assert trace.peak_bytes(rank, "weights") * 2 == sum(sizes.values())
        assert trace.peak_bytes(rank, "optimizer") * 2 == 2 * sum(sizes.values()) + 2 * 8
        moved = Counter()
        for event in trace.by_rank()[rank]:
            if event.kind == "collective" and event.name != "all_reduce":
                moved[event.name] += event.bytes_received
        read_twice = sum(sizes[name] for name in again)
        assert moved == {
            "all_gather": microbatches * (sum(sizes.values()) + read_twice) // 2,
            "reduce_scatter": microbatches * sum(sizes.values()) // 2}


@pytest.mark.slow
def test_replicas_lie_on_the_axes_of_rows_that_split_no_parameter():
    for text, replicas, inside, groups in (
        ("pp=2 dp:data=2 1f1b:2", ("data",), (), {("data",)}),
        ("pp=2 dp:outer=2 dp=2 zero=3 1f1b:2", ("outer",), ("dp",), {("outer",), ("dp",)}),
        ("pp=2 dp:outer=2 dp=2 zero=1 1f1b:2", ("outer", "dp"), (), {("outer",), ("dp",), ("outer", "dp")}),
        ("pp=2 dp=2 1f1b:2 tp=2", ("dp",), ("tp",), {("dp",), ("tp",)}),
    ):
        program, trace, _ = measured(text, 8, models.mlp((8, 12, 4), B), SGD(0.1))
        assert (program.replicas, program.inside) == (replicas, inside)
        assert {event.axes for event in trace if event.kind == "collective"} == groups


@pytest.mark.takes_seconds
@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize(("text", "over"), [
    ("dp=2", 1), pytest.param("dp=2 zero=2", 2, marks=pytest.mark.slow), ("dp=2 zero=3", 2)])
def test_the_norm_of_all_gradients_is_one_number_summed_over_the_stages(text, over):
    strategy, mesh = Strategy.parse_on_mesh(f"pp=2 1f1b:2 {text}")
    alone, clipped = (
        simulate(strategy(train_step(models.mlp((8, 12, 4), B), SGD(0.1), clip=clip)), mesh=mesh, batch=8, **ON)
        for clip in (None, 1.0))
    for rank in range(4):
        more = Counter()
        for trace, sign in ((clipped, 1), (alone, -1)):
            for event in trace.by_rank()[rank]:
                if event.kind == "collective":
                    more[event.name, event.axes, event.payload_bytes] += sign
        assert {key: count for key, count in more.items() if count} == {
            ("all_reduce", ("pp",), 8): 1, **({("all_reduce", ("dp",), 8): 1} if over > 1 else {})}
    assert clipped.ranks == alone.ranks


def product_of_norms():
    """A step whose update multiplies the gradients of two parameters."""
    types = {"w": ir.TensorType("f64", (3,)), "v": ir.TensorType("f64", (3,))}
    loss = ir.record(lambda p, x: np.sum((x * p["w"] + x * p["v"]) ** 2), types, ir.TensorType("f64", (B, 3)), name="f")
    step = train_step(loss, SGD(0.1))
    update = Parts.of(step).update
    other, = (value for value in update.inputs if value.name == "grad.p.v")
    ops = tuple(
        replace(op, inputs=tuple(other if value.name == "grad.p.w" else value for value in op.inputs))
        for op in update.ops)
    return replace(Parts.of(step), update=replace(update, ops=ops)).joined()


STEP = model_step("gpt", B, Adam())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("build", "error", "message"), [
    (lambda: Pipeline()(MODELS["gpt"](B)), ValueError, "pp 1f1b:1: @transformer has no optimizer"),
    (lambda: Pipeline()(model_step("gpt", 4, SGD(1))), ValueError, "has no symbol B for the rows"),
    (lambda: Pipeline()(product_of_norms()), ValueError,
     "pp 1f1b:1: %next.p.w of @f.step depends on what belongs to %p.v and to %p.w, which different stages may have"),
    (lambda: Pipeline()(Strategy.parse("recompute=block.*")(STEP)), ValueError, "must be in one Strategy"),
    (lambda: Strategy(Recompute("block.*"), Pipeline(recompute=True))(STEP), ValueError, "has nothing to do"),
    (lambda: Strategy.parse("recompute=blok.* pp 1f1b:2")(STEP), ValueError, r"has no region 'blok.\*'"),
    (lambda: Strategy(Pipeline(), Pipeline("qq"))(STEP), ValueError, "a step is cut into one pipeline, got pp 1f1b:1"),
    (lambda: Pipeline()(Pipeline()(STEP)), ValueError, "the step is cut into a pipeline already, pp 1f1b:1"),
    (lambda: DataParallel()(Pipeline()(STEP)), TypeError, "a Function can be transformed, got Step; a Pipeline comes last"),
    (lambda: Pipeline(schedule="2f2b"), ValueError, "2f2b"),
    (lambda: Pipeline(chunks=3), ValueError, "chunks"),
    (lambda: Strategy.parse("dp:x pp:x 1f1b:2")(STEP), ValueError,
     "pp:x 1f1b:2: %.* is split over 'x', too; the axis of the stages has no other role"),
    (lambda: Strategy.parse("tp:pp pp 1f1b:2")(STEP), ValueError, "is split over 'pp', too"),
    (lambda: TrainedPipeline(Strategy.parse("tp pp 1f1b:2")(STEP), Mesh(pp=2, dp=2)), ValueError,
     r"is split over axis 'tp', but the axes of Mesh\(pp=2, dp=2\) are 'pp', 'dp'"),
    (lambda: TrainedPipeline(Pipeline()(STEP), Mesh(dp=2)), ValueError, "pp 1f1b:1 needs an axis 'pp'; the axes of"),
    (lambda: TrainedPipeline(Pipeline(begin=["head"])(STEP), Mesh(pp=3)), ValueError, "2 stages begin at the start"),
    (lambda: TrainedPipeline(Pipeline()(STEP), Mesh(pp=2)).inputs(Mesh(pp=1), {}), ValueError, "is cut for Mesh"),
    (lambda: Strategy.parse("pp"), ValueError, "got 1 pp and 0 schedules in 'pp'"),
    (lambda: Strategy.parse("dp 1f1b:2"), ValueError, "got 0 pp and 1 schedules"),
    (lambda: Step.parse("dp\nfunc"), ValueError, "begins with its pipeline and what runs again, such as"),
])
def test_a_pipeline_that_does_not_fit_is_refused(build, error, message):
    with pytest.raises(error, match=message):
        build()


@pytest.mark.slow
@pytest.mark.parametrize(("text", "units", "blocks"), [
    ("recompute=block.*.attention.core", 34, (2, 2)), ("recompute=block.*", 2, (2, 2)),
    ("recompute=block.2", 2, (0, 1)),
])
def test_a_region_keeps_in_a_pipeline_what_it_keeps_in_one_program(text, units, blocks):
    # Korthikanti et al. 2022, table 2: a block keeps 34 sbh and 5 a s s b; without the scores 34 sbh; its input 2 sbh.
    spec = models.TransformerSpec(layers=4, width=32, heads=4, vocabulary=8, sequence=16, dropout=0.1, dtype="f16",
                                  fused_attention=False)
    b, s, h, a = 3, spec.sequence, spec.width, spec.heads
    whole = 34 * s * b * h + 5 * a * s * s * b
    alone = train_step(spec.function(B), SGD(0.1))
    held = []
    for words in ("pp@block.2 1f1b:2", f"pp@block.2 1f1b:2 {text}"):
        step = Strategy.parse(words)(alone)
        assert Step.parse(str(step)) == step
        stages = step.stages(2).functions
        numbers = {"B": b, "B_whole": 2 * b, "B_first": 0}
        held.append([
            sum(value.type.specialize(numbers).nbytes for value in stage.forward.outputs if value.name in stage.saved)
            for stage in stages])
    assert [before - after for before, after in zip(*held, strict=True)] == [
        count * (whole - units * s * b * h) for count in blocks]


@pytest.mark.takes_seconds
def test_a_stage_may_keep_its_inputs_alone():
    step = Pipeline(microbatches=2, recompute=True)(train_step(transformer(layers=2).function(B), SGD(0.1)))
    kept, all_kept = (
        simulate(TrainedPipeline(each, Mesh(pp=2)), mesh=Mesh(pp=2), batch=4, **ON).peak_bytes(0, "activations")
        for each in (step, Step(step.function, Pipeline(microbatches=2))))
    assert kept < all_kept and np.isfinite(kept)
