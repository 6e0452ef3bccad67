"""Every schedule run on clusters: the gradients of the full batch, by exactly the actions and messages it lists."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from emptied import emptied
from numpy.testing import assert_allclose, assert_array_equal

from parallelism.mesh import Mesh
from parallelism.pipelining import Pipeline
from parallelism.pipelining.generators import SCHEDULES
from pipeline_parallelism import MLP, SGD, Adam, Training

SIZES = (5, 7, 6, 4, 8, 9, 3)  # six layers
ROWS = 12
FLUSHED = [name for name in SCHEDULES if name not in ("inference", "local", "pipedream", "pipedream_2bw")]


def sizes_of(name):
    """Ranks, microbatches and chunks: one of each, fewer microbatches than stages, uneven microbatches."""
    if SCHEDULES[name].is_v_shaped:
        return [(1, 3, 2), (3, 2, 2), (2, 6, 2), (3, 5, 2)]
    if SCHEDULES[name].is_interleaved:
        return [(2, 1, 3), (3, 2, 2), (2, 5, 2), (3, 6, 1)]
    return [(1, 1, 1), (4, 3, 1), (3, 6, 1), (2, 5, 1)]


CASES = [(name, *sizes) for name in FLUSHED for sizes in sizes_of(name)]


cluster_of = emptied("thread")


def mlp_of(name, ranks, microbatches, chunks, **options):
    return MLP(layer_sizes=SIZES, pipeline=Pipeline(ranks * chunks, microbatches, name, chunks), **options)


def batch(rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, SIZES[0])), rng.standard_normal((rows, SIZES[-1]))


def arrays_of(layers):
    return [array for pair in layers for array in pair]


def assert_same(layers, expected, **tolerance):
    for array, other in zip(arrays_of(layers), arrays_of(expected), strict=True):
        assert_allclose(array, other, **tolerance)


def ran(trace, rank):
    return [e.name for e in trace.filter(rank=rank, kind="compute") if e.phase]


def rows_of(microbatches):
    return [len(part) for part in np.array_split(np.arange(ROWS), microbatches)]


def expected_peaks(mlp):
    """By rank, the most bytes of inputs and sums kept at once, from each forward to its B or W, in the order."""
    rows, last, peaks = rows_of(mlp.pipeline.microbatches), mlp.pipeline.stages - 1, []
    for works in mlp.pipeline.schedule.works:
        held, peak = {}, 0
        for stage, kind, k in works:
            numbers = mlp.layers_of(stage)
            kept = sum(SIZES[i] + SIZES[i + 1] for i in numbers)
            if kind in "FI":
                held[stage, k] = 8 * rows[k] * (kept + (SIZES[-1] if stage == last and kind == "F" else 0))
            else:
                del held[stage, k]
            peak = max(peak, sum(held.values()))
        peaks.append(peak)
    return peaks


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"), CASES)
def test_every_schedule_gives_the_gradients_of_the_full_batch_by_its_own_actions(
    cluster_of, name, ranks, microbatches, chunks
):
    mlp, (x, targets) = mlp_of(name, ranks, microbatches, chunks), batch()
    cluster = cluster_of(Mesh(pp=ranks))
    run = cluster.run(mlp.train_step(SGD(0.1)), x, targets)
    schedule, trace = mlp.pipeline.schedule, run.trace

    whole = mlp.reference_step(x, targets, SGD(0.1))
    assert_allclose(run.result.loss, whole.loss, rtol=1e-12)
    scale = max(np.abs(array).max() for array in arrays_of(whole.gradients))
    assert_same(run.result.gradients, whole.gradients, rtol=1e-12, atol=1e-12 * scale)
    same_order = mlp.reference_step(x, targets, SGD(0.1), microbatches=microbatches)
    assert_same(run.result.gradients, same_order.gradients, rtol=0)

    assert [ran(trace, rank) for rank in range(ranks)] == [list(map(str, works)) for works in schedule.works]
    crossings = [s for s, (a, b) in enumerate(pairwise(schedule.placement)) if a != b]
    assert len(trace.filter(kind="send")) == 2 * microbatches * len(crossings)
    matrix = np.zeros((ranks, ranks), int)
    for s in crossings:
        here, there = schedule.placement[s : s + 2]
        nbytes = 8 * ROWS * SIZES[mlp.layers_of(s + 1).start]
        matrix[here, there] += nbytes
        matrix[there, here] += nbytes
    assert_array_equal(trace.communication_matrix(), matrix)
    peaks = [trace.filter(name="activations").peak_bytes(rank) for rank in range(ranks)]
    assert peaks == expected_peaks(mlp)
    products = sum(2 * ROWS * a * b for a, b in pairwise(SIZES))
    assert trace.flops() == 3 * products - 2 * ROWS * SIZES[0] * SIZES[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", FLUSHED)
def test_every_schedule_of_up_to_six_stages_and_ten_microbatches_runs(cluster_of, name):
    x, targets = batch()
    for chunks in (1, 2, 3) if SCHEDULES[name].is_interleaved else (SCHEDULES[name].fewest_chunks,):
        for ranks in range(1, 6 // chunks + 1):
            for microbatches in range(1, 11):
                mlp = mlp_of(name, ranks, microbatches, chunks)
                run = cluster_of(Mesh(pp=ranks)).run(mlp.train_step(), x, targets)
                reference = mlp.reference_step(x, targets, microbatches=microbatches)
                assert_same(run.result.gradients, reference.gradients, rtol=0)
                works = mlp.pipeline.schedule.works
                assert [ran(run.trace, rank) for rank in range(ranks)] == [list(map(str, row)) for row in works]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["zero_bubble_v", "interleaved_zero_bubble", "dual_pipe_v", "looped_bfs"])
def test_live_activations_are_as_many_as_the_schedule_counts(cluster_of, name):
    mlp = MLP(layer_sizes=(4,) * 7, pipeline=Pipeline(6, 6, name, 2), activation="identity")
    x, targets = np.ones((6, 4)), np.ones((6, 4))
    trace = cluster_of(Mesh(pp=3)).run(mlp.train_step(), x, targets).trace
    holder, each = mlp.pipeline.schedule.placement[-1], 8 * (4 + 4)
    for rank, live in enumerate(mlp.pipeline.schedule.peak_live()):
        peak = trace.filter(name="activations").peak_bytes(rank)
        if rank == holder:      # the last stage keeps the gradient of its output too
            assert each * live <= peak <= each * live + 8 * 4 * 6
        else:
            assert peak == each * live


USUAL = ("zero_bubble_v", "dual_pipe_v", "zero_bubble_h2")


@pytest.mark.sampled(2)
@pytest.mark.slow_for("zero_bubble_v")
@pytest.mark.parametrize(
    "name", [*USUAL, *(pytest.param(name, marks=pytest.mark.slow) for name in FLUSHED if name not in USUAL)]
)
def test_processes_give_the_same_bits(cluster_of, name):
    """With fewer microbatches than stages, and with more."""
    ranks, chunks = 3, 2 if SCHEDULES[name].is_interleaved else SCHEDULES[name].fewest_chunks
    cluster, (x, targets) = cluster_of(Mesh(pp=ranks), "process"), batch()
    for microbatches in (2, 5):
        mlp, reference = mlp_of(name, ranks, microbatches, chunks), None
        cluster.run(lambda device: device.state.clear())
        for _ in range(2):
            run = cluster.run(mlp.train_step(Adam(0.01)), x, targets)
            reference = mlp.reference_step(x, targets, Adam(0.01), previous=reference, microbatches=microbatches)
        assert_same(run.result.parameters, reference.parameters, rtol=0)
        works = mlp.pipeline.schedule.works
        assert [ran(run.trace, rank) for rank in range(ranks)] == [list(map(str, w)) for w in works]


def test_messages_that_a_schedule_lists_are_sent_where_it_says(cluster_of):
    listed = Pipeline(4, 3, "zero_bubble_v").schedule.with_messages()
    mlp = MLP(layer_sizes=SIZES, pipeline=Pipeline(4, 3, listed))
    x, targets = batch()
    run = cluster_of(Mesh(pp=2), "thread").run(mlp.train_step(), x, targets)
    assert_same(run.result.gradients, mlp.reference_step(x, targets, microbatches=3).gradients, rtol=0)
    for rank, row in enumerate(listed.works):
        told = [e.kind if e.kind == "send" else e.name for e in run.trace.filter(rank=rank)
                if (e.kind == "send" or (e.kind == "compute" and e.phase))]
        assert told == ["send" if w.kind[0] == "S" else str(w) for w in row if w.kind[0] != "R"]


def test_a_receive_is_posted_an_action_ahead_and_waited_for_where_it_is_used(cluster_of):
    mlp, (x, targets) = mlp_of("gpipe", 2, 3, 1), batch()
    trace = cluster_of(Mesh(pp=2), "process").run(mlp.train_step(), x, targets).trace
    told = [e.name if e.phase else e.kind for e in trace.filter(rank=1) if (e.phase or e.kind in ("recv", "wait"))]
    # (Its sends are waited for at the end.)
    assert told[:9] == ["recv", "recv", "1F0", "wait", "recv", "1F1", "wait", "1F2", "1B0"]


def test_an_order_of_forwards_alone_predicts_and_does_not_train(cluster_of):
    mlp = mlp_of("inference", 3, 4, 1)
    x, _ = batch()
    run = cluster_of(Mesh(pp=3)).run(mlp.predict_step(), x)
    assert_allclose(run.result, mlp.forward(mlp.initial_parameters(), x), rtol=1e-12)
    with pytest.raises(ValueError, match="schedule 'inference' has forwards only, and cannot train"):
        mlp.train_step()
    split = mlp_of("zero_bubble_v", 3, 4, 2)
    assert_allclose(cluster_of(Mesh(pp=3)).run(split.predict_step(), x).result, run.result, rtol=1e-12)


def test_memory_is_noted_by_what_it_is_for_and_activations_by_microbatch(cluster_of):
    mlp, (x, targets) = mlp_of("zero_bubble_v", 2, 3, 2), batch()
    trace = cluster_of(Mesh(pp=2)).run(mlp.train_step(Adam(0.01)), x, targets).trace
    for rank, works in enumerate(mlp.pipeline.schedule.works):
        here = [i for s, holder in enumerate(mlp.pipeline.schedule.placement) if holder == rank
                for i in mlp.layers_of(s)]
        parameters = 8 * sum((SIZES[i] + 1) * SIZES[i + 1] for i in here)
        for category, times in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
            assert trace.filter(name=category).peak_bytes(rank) == times * parameters
        notes = trace.filter(name="activations", rank=rank)
        # A note for each F, I and W, and nothing left of any microbatch.
        assert [(e.stage, e.microbatch) for e in notes] == [(w.stage, w.microbatch) for w in works]
        for k in range(3):
            assert sum(e.nbytes for e in notes.filter(microbatch=k)) == 0
            assert notes.filter(microbatch=k).peak_bytes(rank) > 0


# -- recomputation -----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("name", "ranks", "chunks"), [("gpipe", 3, 1), ("zero_bubble_v", 2, 2), ("1f1b", 1, 1)])
@pytest.mark.parametrize("recompute", ["full", [1], [0, 1, 4, 5], range(3, 6)])
def test_recomputation_gives_the_same_bits_for_the_flops_of_the_layers(cluster_of, name, ranks, chunks, recompute):
    mlp, (x, targets) = mlp_of(name, ranks, 4, chunks), batch()
    cluster = cluster_of(Mesh(pp=ranks))
    plain = cluster.run(mlp.train_step(), x, targets)
    cluster.run(mlp.reset_step())
    again = cluster.run(mlp.train_step(recompute=recompute), x, targets)
    assert again.result.loss == plain.result.loss
    assert_same(again.result.gradients, plain.result.gradients, rtol=0)
    layers = range(6) if recompute == "full" else recompute
    extra = sum(2 * ROWS * SIZES[i] * SIZES[i + 1] for i in layers)
    assert again.trace.flops() == plain.trace.flops() + extra
    assert [ran(again.trace, rank) for rank in range(ranks)] == [ran(plain.trace, rank) for rank in range(ranks)]
    for rank in range(ranks):
        kept = [run.trace.filter(name="activations").peak_bytes(rank) for run in (plain, again)]
        assert kept[1] <= kept[0]


def test_full_recomputation_keeps_the_stage_inputs_and_one_microbatch(cluster_of):
    mlp, microbatches = mlp_of("gpipe", 2, 4, 1), 4
    trace = cluster_of(Mesh(pp=2)).run(mlp.train_step(recompute="full"), *batch()).trace
    rows = ROWS // microbatches
    for rank, numbers in enumerate((range(3), range(3, 6))):
        inputs = 8 * ROWS * SIZES[numbers[0]]
        one = 8 * rows * (sum(SIZES[i] + SIZES[i + 1] for i in numbers) - SIZES[numbers[0]])
        loss = 8 * rows * SIZES[-1] if rank == 1 else 0
        assert trace.filter(name="activations").peak_bytes(rank) == inputs + one + loss


def test_layers_to_recompute_are_checked():
    mlp = mlp_of("1f1b", 2, 2, 1)
    with pytest.raises(ValueError, match="recompute is 'none', 'full' or a list of layers; got 'half'"):
        mlp.train_step(recompute="half")
    with pytest.raises(ValueError, match="recompute names layers 0 to 5; got 6"):
        mlp.train_step(recompute=[0, 6])


# -- replicas ----------------------------------------------------------------------------------------------------------


def test_gradients_are_reduced_while_other_backwards_go_on(cluster_of):
    mlp, (x, targets) = mlp_of("looped_bfs", 2, 3, 3), batch()
    run = cluster_of(Mesh(dp=2, pp=2), "process").run(mlp.train_step(SGD(0.1)), x, targets)
    reference = mlp.reference_step(x, targets, SGD(0.1), microbatches=3, replicas=2)
    assert_same(run.result.gradients, reference.gradients, rtol=0)
    for rank in range(4):
        told = [e for e in run.trace.filter(rank=rank) if (e.name == "all_reduce" or e.phase == "B")]
        names = [e.name for e in told]
        # A reduction after the last backward of each of the rank's three stages, and before those of the next.
        position = rank % 2
        expected = [name for stage in (4, 2, 0) for name in [
            *(f"{stage + position}B{k}" for k in (2, 1, 0)), "all_reduce"]]
        assert names[: len(expected)] == expected
    assert run.trace.count("all_reduce") == 2 * 3 + 1   # for each pair of replicas, a stage's; and the loss


@pytest.mark.not_on_mpi("what the host replaces is not replaced in another process")
def test_buckets_split_a_stage_s_gradients(cluster_of, monkeypatch):
    from pipeline_parallelism import gradients

    monkeypatch.setattr(gradients, "BUCKET_BYTES", 8 * 7 * 6)
    sizes = [(5, 7), (7,), (7, 6), (6,), (6, 4), (4,)]
    split = gradients.buckets([np.zeros(shape) for shape in sizes])
    assert [[array.shape for array in bucket] for bucket in split] == [[(5, 7), (7,)], [(7, 6)], [(6,), (6, 4), (4,)]]
    mlp, (x, targets) = mlp_of("1f1b", 1, 2, 1), batch()
    run = cluster_of(Mesh(dp=2)).run(mlp.train_step(SGD(0.1)), x, targets)
    assert run.trace.count("all_reduce") > 2
    reference = mlp.reference_step(x, targets, SGD(0.1), microbatches=2, replicas=2)
    assert_same(run.result.gradients, reference.gradients, rtol=0)


# -- weights that change under way -------------------------------------------------------------------------------------


def test_pipedream_uses_the_weights_of_the_papers_by_hand(cluster_of):
    # Two stages of one weight each, three microbatches of a row; stage 0 is one update behind, stage 1 none.
    mlp = MLP(layer_sizes=(1, 1, 1), pipeline=Pipeline(2, 3, "pipedream"), activation="identity")
    x, targets, lr = np.array([[1.0], [2.0], [-1.0]]), np.array([[0.5], [1.0], [3.0]]), 0.1
    ((w0, b0), (w1, b1)) = (tuple(array.item() for array in layer) for layer in mlp.initial_parameters())
    first, second, losses = [(w0, b0)], [(w1, b1)], []
    for k in range(3):
        (w0, b0), (w1, b1) = first[max(0, k - 1)], second[k]
        a = w0 * x[k, 0] + b0
        error = w1 * a + b1 - targets[k, 0]
        losses.append(error**2)
        first.append((first[k][0] - lr * 2 * error * w1 * x[k, 0], first[k][1] - lr * 2 * error * w1))
        second.append((second[k][0] - lr * 2 * error * a, second[k][1] - lr * 2 * error))
    run = cluster_of(Mesh(pp=2)).run(mlp.train_step(SGD(lr)), x, targets)
    got = [(w.item(), b.item()) for w, b in run.result.parameters]
    assert_allclose(got, [first[-1], second[-1]], rtol=1e-13)
    assert_allclose(run.result.loss, np.mean(losses), rtol=1e-13)


@pytest.mark.sampled(2, 1)
@pytest.mark.slow_for("dp2_pp3")
@pytest.mark.parametrize(("mesh", "stages"), [(Mesh(pp=4), 4), (Mesh(dp=2, pp=3), 3), (Mesh(pp=1), 1)])
def test_stashed_weights_make_the_steps_of_one_process_that_keeps_every_version(cluster_of, mesh, stages):
    mlp, reference = mlp_of("pipedream", stages, 10, 1), None
    cluster, replicas = cluster_of(mesh, "process" if stages == 3 else "thread"), mesh.shape.get("dp", 1)
    for step in range(2):
        x, targets = batch(seed=step)
        run = cluster.run(mlp.train_step(Adam(0.01)), x, targets)
        reference = mlp.reference_step(x, targets, Adam(0.01), previous=reference, replicas=replicas)
        assert_allclose(run.result.loss, reference.loss, rtol=1e-15)
        assert_same(run.result.parameters, reference.parameters, rtol=0)
        assert_same(run.result.gradients, reference.gradients, rtol=0)
    # A stage keeps a version for each microbatch under way beside its own, and none at the end.
    for rank in range(stages):
        stashed = run.trace.filter(name="stashed weights")
        nbytes = 8 * sum((SIZES[i] + 1) * SIZES[i + 1] for i in mlp.layers_of(rank))
        assert stashed.peak_bytes(mesh.rank(pp=rank, **({"dp": 0} if replicas > 1 else {}))) == nbytes * max(
            0, stages - rank - 1)


def test_microbatches_without_rows_change_no_weights(cluster_of):
    mlp, (x, targets) = mlp_of("pipedream", 2, 5, 1), batch(rows=3)
    run = cluster_of(Mesh(pp=2)).run(mlp.train_step(SGD(0.1, momentum=0.9)), x, targets)
    short = mlp_of("pipedream", 2, 3, 1).reference_step(x, targets, SGD(0.1, momentum=0.9))
    assert_same(run.result.parameters, short.parameters, rtol=1e-15)


def test_double_buffered_weights_are_a_step_late(cluster_of):
    mlp, lr = mlp_of("pipedream_2bw", 3, 4, 1), 0.1
    plain = mlp_of("1f1b", 3, 4, 1)
    cluster, reference = cluster_of(Mesh(pp=3)), None
    versions = [mlp.initial_parameters()] * 2
    for step in range(4):
        x, targets = batch(seed=step)
        run = cluster.run(mlp.train_step(SGD(lr)), x, targets)
        reference = mlp.reference_step(x, targets, SGD(lr), previous=reference, microbatches=4)
        assert_same(run.result.parameters, reference.parameters, rtol=0)
        # W(t + 1) = W(t) - lr * gradient(W(t - 1))
        late = plain.reference_step(x, targets, SGD(lr), previous=Training(0, versions[-2], None), microbatches=4)
        assert run.result.loss == late.loss
        moved = [tuple(a - lr * g for a, g in zip(*pair, strict=True))
                 for pair in zip(versions[-1], late.gradients, strict=True)]
        assert_same(run.result.parameters, moved, rtol=0)
        versions.append(moved)


# -- losses of each stage's own ----------------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("mesh", "stages"), [(Mesh(pp=3), 3), (Mesh(dp=2, pp=2), 2), (Mesh(pp=1), 1)])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_stages_with_a_loss_of_their_own_send_no_gradient(cluster_of, mesh, stages, recompute):
    mlp, (x, targets) = mlp_of("local", stages, 4, 1), batch()
    cluster, replicas, reference = cluster_of(mesh), mesh.shape.get("dp", 1), None
    for _ in range(2):
        run = cluster.run(mlp.train_step(SGD(0.1), recompute=recompute), x, targets)
        reference = mlp.reference_step(x, targets, SGD(0.1), previous=reference, microbatches=4, replicas=replicas)
        assert run.result.loss == reference.loss
        assert_same(run.result.gradients, reference.gradients, rtol=0)
        assert_same(run.result.parameters, reference.parameters, rtol=0)
    assert len(run.trace.filter(kind="send")) == (stages - 1) * 4 * replicas
    matrix = run.trace.communication_matrix()
    assert not any(matrix[mesh.rank(pp=s + 1, **d), mesh.rank(pp=s, **d)] for s in range(stages - 1)
                   for d in ([{"dp": 0}, {"dp": 1}] if replicas > 1 else [{}]))


def test_a_local_gradient_is_that_of_the_stage_s_own_loss(cluster_of):
    mlp, (x, targets) = mlp_of("local", 2, 3, 1), batch()
    result = cluster_of(Mesh(pp=2)).run(mlp.train_step(SGD(0.1)), x, targets).result
    lower = mlp.initial_parameters()[:3]

    def loss(w):
        y = x
        for i, (weights, bias) in enumerate(lower):
            y = np.maximum(y @ (w if i == 0 else weights) + bias, 0)
        return np.mean((y @ mlp.local_head(0) - targets) ** 2)

    w, step = lower[0][0], 1e-6
    for index in ((0, 0), (3, 2), (4, 6)):
        up, down = w.copy(), w.copy()
        up[index] += step
        down[index] -= step
        assert_allclose(result.gradients[0][0][index], (loss(up) - loss(down)) / (2 * step), rtol=1e-6, atol=1e-9)
    assert not np.allclose(result.gradients[0][0], mlp_of("1f1b", 2, 3, 1).reference_step(x, targets).gradients[0][0])
