"""Programs cut into stages, run on a cluster: under any schedule, with replicas, with stages on several devices."""

from __future__ import annotations

import re
from collections import Counter
from math import prod

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from parallelism import Mesh, TensorSharding, ir, models
from parallelism.execution import PipelinedProgram
from parallelism.layouts import annotate, partition
from parallelism.layouts.stages.batches import dealt
from parallelism.layouts.stages.microbatches import microbatched
from parallelism.pipelining import Pipeline

B, S = ir.symbols("B S")
ROWS = 11


def chain(x, targets, w):
    """Integers in, integers out; ``a`` passes through the stages between."""
    a = np.maximum(x @ w["0"], 0)
    b = np.maximum(a @ w["1"], 0)
    c = np.maximum(b @ w["2"], 0)
    return np.sum((c + a - targets) ** 2)


def dropped(x, targets, w, count):
    """What is left out goes by the row's place in the whole batch."""
    def some(a, seed):
        places = {"whole": a.shape, "starts": (0, 0), "shape": a.shape}
        return np.where(ir.apply("dropout_mask", count, rate=0.5, seed=seed, **places), a, 0.0)

    for layer in range(3):
        x = np.maximum(some(x, layer) @ w[str(layer)], 0)
    return np.sum((x - targets) ** 2)


def tensor(*shape):
    return ir.TensorType("f8", shape)


WEIGHTS = {"0": tensor(3, 4), "1": tensor(4, 5), "2": tensor(5, 4)}
MODELS = {
    "chain": (ir.record(chain, tensor(B, 3), tensor(B, 4), WEIGHTS), {}),
    "mlp": (models.mlp((5, 8, 6, 4, 3), B), {}),
    "convolutional": (models.convolutional((8, 7, 2), (3, 4), 5, B), {}),
    "gpt": (models.gpt(11, 8, 2, 2, S, B), {"S": 3}),
    "dropped": (ir.record(dropped, tensor(B, 3), tensor(B, 4), WEIGHTS, ir.TensorType("i64", ())), {}),
    "mixture": (models.mixture(6, 5, 4, 2, 3, B, S), {"S": 7}),
}
SCHEDULES = [
    ("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble_h1", 1), ("zero_bubble_v", 2), ("dual_pipe_v", 2),
]


def arrays(function, rows=ROWS, **numbers):
    """Small integers."""
    rng = np.random.default_rng(0)
    return [
        rng.integers(-2, 3, v.type.shape).astype(v.type.dtype) if v.type.dtype.kind == "f"
        else rng.integers(0, 5, v.type.shape)
        for v in function.specialize(B=rows, **numbers).inputs
    ]


def weights(function):
    return [v.name for v in function.inputs if "B" not in v.type.symbols and v.type.dtype.kind == "f"]


def assert_as_in_one_process(result, function, inputs, *, exactly=False):
    names = weights(function)
    wanted = ir.interpret(ir.gradient(function, names, keep_outputs=True), inputs).outputs
    assert list(result.gradients) == names
    for found, array in zip([result.loss, *result.gradients.values()], wanted, strict=True):
        assert found.dtype == array.dtype and found.shape == array.shape
        if exactly:
            assert_array_equal(found, array)
        else:
            assert_allclose(found, array, rtol=1e-10, atol=1e-10 * max(1.0, float(np.abs(array).max())))


def bytes_of(functions, names, **numbers):
    values = {value.name: value for value in (*functions.forward.inputs, *functions.forward.outputs)}
    return [int(values[name].type.specialize(numbers).nbytes) for name in names]


@pytest.mark.sampled(24)
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize(("ranks", "replicas", "microbatches"), [(1, 1, 1), (2, 1, 3), (2, 2, 4), (4, 1, 5)])
def test_every_schedule_makes_the_loss_and_the_gradients(cluster_of, schedule, chunks, ranks, replicas, microbatches):
    function, _ = MODELS["chain"]
    pipeline = Pipeline(ranks * chunks, microbatches, schedule, chunks)
    inputs = arrays(function)
    cluster = cluster_of(Mesh(dp=replicas, pp=ranks), "thread")
    result = cluster.run(PipelinedProgram(partition(function, pipeline.stages), pipeline), inputs).result
    assert_as_in_one_process(result, function, inputs, exactly=True)


@pytest.mark.sampled(18, 3)
@pytest.mark.parametrize("name", ["mlp", "convolutional", "gpt", "mixture", "dropped"])
@pytest.mark.parametrize(("stages", "schedule", "chunks", "microbatches", "recompute"), [
    (3, "1f1b", 1, 2, False), (4, "zero_bubble_v", 2, 5, [1, 3]), (2, "gpipe", 1, 3, True), (1, "1f1b", 1, 4, False),
])
def test_models_are_trained_in_stages(cluster_of, name, stages, schedule, chunks, microbatches, recompute):
    function, numbers = MODELS[name]
    inputs = arrays(function, **numbers)
    cut = partition(function, stages, sizes=numbers, recompute=recompute)
    pipeline = Pipeline(stages, microbatches, schedule, chunks)
    mesh = Mesh(dp=2 if stages < 3 and microbatches < 4 else 1, pp=stages // chunks)
    result = cluster_of(mesh, "thread").run(PipelinedProgram(cut, pipeline), inputs).result
    assert_as_in_one_process(result, function, inputs)


def test_a_stage_may_be_a_single_op_and_a_message_a_single_number(cluster_of):
    function, _ = MODELS["mlp"]
    inputs = arrays(function)
    stages = partition(function, ["4", "8", "15", "16", "18"])
    assert [len(stage.forward.ops) for stage in stages.functions[3:]] == [1, 1, 2]
    assert stages.functions[4].forward.outputs[0].type.shape == ()
    program = PipelinedProgram(stages, Pipeline(6, 3, "interleaved_1f1b", 2))
    assert_as_in_one_process(cluster_of(Mesh(pp=3), "thread").run(program, inputs).result, function, inputs)


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_h1"])
def test_gradients_are_summed_in_the_order_of_the_backwards(cluster_of, schedule):
    """To the bit, in float32, whose sums depend on their order."""
    function = models.mlp((5, 8, 6, 4), B, dtype="float32")
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=v.type.shape).astype(v.type.dtype) for v in function.specialize(B=ROWS).inputs]
    program = PipelinedProgram(partition(function, 2), Pipeline(2, 4, schedule))
    found = cluster_of(Mesh(pp=2), "thread").run(program, inputs).result.gradients
    gradient = ir.gradient(microbatched(function), weights(function))
    sums = [np.zeros_like(array) for array in found.values()]
    for first, rows in dealt(0, ROWS, 4):
        part = gradient.specialize(B=rows, B_whole=ROWS)
        given = [array[first:first + rows] if v.name in ("x", "targets") else array
                 for v, array in zip(function.inputs, inputs, strict=True)]
        for total, term in zip(sums, ir.interpret(part, given).outputs, strict=True):
            total += term
    for array, total in zip(found.values(), sums, strict=True):
        assert array.dtype == np.float32
        assert_array_equal(array, total)


def test_stages_run_on_processes(cluster_of):
    function, numbers = MODELS["mlp"]
    inputs = dict(zip((v.name for v in function.inputs), arrays(function, **numbers), strict=True))
    program = PipelinedProgram(partition(function, 2, sizes=numbers), Pipeline(2, 3))
    assert_as_in_one_process(cluster_of(Mesh(pp=2)).run(program, inputs).result, function, inputs)


def split(name, **layouts):
    function, numbers = MODELS[name]
    return annotate(function, {n.replace("__", "."): layout for n, layout in layouts.items()}), numbers


COLUMNS, LINES = TensorSharding(None, "tp"), TensorSharding("tp", None)
SHARDED = {
    "mlp": split("mlp", p__w0=COLUMNS, p__w1=LINES, p__w2=COLUMNS, p__w3=LINES),
    "gpt": split("gpt", **{f"p__{i}__{n}": layout for i in range(2)
                           for n, layout in (("up", COLUMNS), ("down", LINES))}, p__tokens=LINES),
    "chain": split("chain", w__0=COLUMNS, w__1=LINES),
}


@pytest.mark.slow_for("gpt")
@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "replicas", "ranks", "devices", "schedule", "chunks"), [
    ("chain", 1, 2, 2, "1f1b", 1), ("chain", 2, 2, 2, "zero_bubble_v", 2), ("mlp", 2, 2, 2, "zero_bubble_h1", 1),
    ("mlp", 1, 2, 3, "1f1b", 1), ("gpt", 1, 2, 2, "interleaved_1f1b", 2), ("gpt", 1, 2, 3, "gpipe", 1),
    ("mlp", 1, 2, 1, "1f1b", 1),
])
def test_stages_are_spread_over_devices(cluster_of, name, replicas, ranks, devices, schedule, chunks):
    function, numbers = SHARDED[name]
    inputs = arrays(function, **numbers)
    program = PipelinedProgram(
        partition(function, ranks * chunks, sizes=numbers), Pipeline(ranks * chunks, 4, schedule, chunks),
        Mesh(tp=devices))
    run = cluster_of(Mesh(dp=replicas, pp=ranks, tp=devices), "thread").run(program, inputs)
    assert_as_in_one_process(run.result, MODELS[name][0], inputs, exactly=name == "chain")
    inside = {event.axes for event in run.trace if event.kind == "collective" and event.phase is None}
    assert inside <= {("tp",), ("dp",)} and (("tp",) in inside) == (devices > 1)


# -- what is sent and what is held -------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_h1"])
def test_messages_have_the_bytes_of_what_crosses_and_no_more(cluster_of, schedule):
    function, _ = MODELS["chain"]
    stages = partition(function, ["3", "5"])        # the second layer; the third
    cuts = [functions.sent for functions in stages.functions[:-1]]
    assert [len(sent) for sent in cuts] == [1, 2]
    program = PipelinedProgram(stages, Pipeline(3, 4, schedule))
    trace = cluster_of(Mesh(pp=3), "thread").run(program, arrays(function)).trace
    wanted = Counter()
    for _, rows in dealt(0, ROWS, 4):
        for rank, sent in enumerate(cuts):
            nbytes = sum(bytes_of(stages.functions[rank], sent, B=rows))
            wanted[rank, rank + 1, nbytes] += 1
            wanted[rank + 1, rank, nbytes] += 1      # of each a gradient comes back
    found = Counter((e.rank, e.peer, e.bytes_sent) for e in trace if e.kind == "send" and e.peer >= 0)
    assert found == wanted
    assert not [event for event in trace if event.kind == "collective"]


@pytest.mark.slow
def test_replicas_and_shared_weights_are_summed_once_a_step(cluster_of):
    function, numbers = MODELS["gpt"]
    stages = partition(function, 2, sizes=numbers)
    program = PipelinedProgram(stages, Pipeline(2, 3))
    trace = cluster_of(Mesh(dp=2, pp=2), "thread").run(program, arrays(function, **numbers)).trace
    exchange, = program.endings.exchanges
    assert (exchange.positions, exchange.names, exchange.dtype) == ((0, 1), ("p.tokens",), np.float64)
    for rank in range(4):
        position = rank % 2
        trained = sum(prod(v.type.specialize(numbers).shape) for v in stages.functions[position].forward.inputs
                      if v.name in stages.functions[position].trained)
        sums = [e for e in trace if e.rank == rank and e.kind == "collective"]
        assert [(e.name, e.axes, e.bytes_received) for e in sums] == [
            ("all_reduce", ("dp",), 8 * n) for n in ([trained, 1] if position else [trained])]
        last = [e for e in trace if e.rank == rank and e.kind == "send"][-1]
        assert last.bytes_sent == 8 * 11 * 8 and last.peer == rank - position + 1 - position


@pytest.mark.sampled(2)
@pytest.mark.slow_for("gpipe-False")
@pytest.mark.parametrize(("schedule", "recompute"), [("gpipe", False), ("1f1b", False), ("gpipe", True)])
def test_a_stage_holds_what_it_saved_by_microbatch(cluster_of, schedule, recompute):
    function, _ = MODELS["mlp"]
    stages, pipeline = partition(function, 2, recompute=recompute), Pipeline(2, 4, schedule)
    inputs = arrays(function, rows=12)
    trace = cluster_of(Mesh(pp=2), "thread").run(PipelinedProgram(stages, pipeline), inputs).trace
    for rank, functions in enumerate(stages.functions):
        names = [name for name in functions.saved if name not in functions.data]
        saved = sum(bytes_of(functions, names, B=3))
        assert (saved > 0) == (rank > 0 or not recompute)
        held, live = Counter(), []
        for event in trace.by_rank()[rank]:
            if re.fullmatch("recompute .*" if recompute else "[0-9]+[FB][0-9]+", event.name) and not event.part:
                live.append(sum(held.values()))
            if event.kind == "memory" and event.name == "activations":
                held[event.microbatch] += int(event.nbytes)
        assert not any(held.values())
        assert set(live) <= {n * saved for n in range(5)}
        assert max(live) == saved * pipeline.schedule.peak_live()[rank]
        shapes = [v.type.shape for v in functions.forward.inputs if v.name in functions.trained]
        assert trace.peak_bytes(rank, "weights") == 8 * sum(map(prod, shapes))


@pytest.mark.slow
def test_a_step_takes_the_same_modelled_time_every_time(cluster_of):
    function, numbers = SHARDED["mlp"]
    program = PipelinedProgram(partition(function, 2), Pipeline(2, 3), Mesh(tp=2))
    cluster = cluster_of(Mesh(pp=2, tp=2), "thread", hardware="dgx-h100", compute="modelled")
    traces = [cluster.run(program, arrays(function, **numbers)).trace for _ in range(2)]
    assert traces[0].makespan_seconds == traces[1].makespan_seconds > 0
    whole = ir.gradient(MODELS["mlp"][0], weights(function), keep_outputs=True).specialize(B=ROWS)
    matmuls = sum(op.flops for op in whole.ops if op.kind in ("matmul", "einsum"))
    found = sum(event.flops for event in traces[0] if event.name in ("matmul", "einsum"))
    assert found == matmuls


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_axes_of_the_pipeline_are_not_inside_its_stages():
    function, _ = MODELS["mlp"]
    with pytest.raises(ValueError, match=r"Mesh\(dp=2, tp=2\) is to be inside a stage and names 'dp'"):
        PipelinedProgram(partition(function, 2), Pipeline(2, 2), Mesh(dp=2, tp=2))


@pytest.mark.parametrize(("pipeline", "mesh", "rows", "told"), [
    (Pipeline(3, 2), Mesh(pp=3), ROWS, r"@mlp is cut into 2 stages; Pipeline\(stages=3, .* has 3"),
    (Pipeline(2, 2, "forward_only"), Mesh(pp=2), ROWS, r"schedule 'inference' has no backward"),
    (Pipeline(2, 4), Mesh(dp=2, pp=2), 7, r"a batch of 7 rows cannot be dealt to 2 x 4 microbatches: some would have"),
    (Pipeline(2, 2), Mesh(pp=2, tp=2), ROWS, r"Mesh\(pp=2, tp=2\) also has 'tp' of size 2"),
])
def test_what_does_not_fit_is_told_before_anything_runs(pipeline, mesh, rows, told):
    function, _ = MODELS["mlp"]
    with pytest.raises(ValueError, match=told):
        PipelinedProgram(partition(function, 2), pipeline).inputs(mesh, arrays(function, rows))
