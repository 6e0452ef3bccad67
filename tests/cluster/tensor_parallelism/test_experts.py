"""`MixtureOfExperts` against a loop over tokens in one process: values, gradients, who is dropped, what is sent."""

from __future__ import annotations

import os
import random
from functools import cache

import numpy as np
import pytest
from differences import assert_close, central, complex_step, run_whole

from parallelism import Mesh, TensorSharding
from parallelism.recorder import record
from tensor_parallelism import MixtureOfExperts, MixtureOfExpertsSharding
from tensor_parallelism.experts import kept_by_expert, rows_received
from vcluster.code import DeviceFailedError

T = TensorSharding
BATCH, SEQUENCE, MODEL, HIDDEN, EXPERTS = 3, 6, 4, 2, 5
ALPHA = 0.3
GELU = np.sqrt(2 / np.pi), 0.044715
RANDOM = int(os.environ.get("VCLUSTER_LAYERS", "60"))


def routed(x, router, k, factor):
    """Written anew: probabilities, who goes where [(token, expert, gate)] in the order of the rule, and who is kept."""
    tokens = x.reshape(-1, x.shape[-1])
    exps = np.exp(tokens @ router)
    probabilities = exps / exps.sum(axis=1, keepdims=True)
    chosen = np.argsort(-probabilities.real, axis=1, kind="stable")[:, :k].tolist()
    room = len(tokens) if factor is None else int(np.ceil(factor * k * len(tokens) / router.shape[1]))
    used, kept = [0] * router.shape[1], []
    for rank in range(k):
        for t, experts in enumerate(chosen):
            e = experts[rank]
            if used[e] < room:
                used[e] += 1
                gate = probabilities[t, e] / (sum(probabilities[t, other] for other in experts) if k > 1 else 1)
                kept.append((t, e, gate, rank))
    return probabilities, chosen, kept


def mixture(k, factor):
    """The output and the load-balance loss, as one array."""
    def function(x, router, w1, b1, w2, b2):
        probabilities, chosen, kept = routed(x, router, k, factor)
        tokens = x.reshape(-1, x.shape[-1])
        out = np.zeros((len(tokens), w2.shape[-1]), np.result_type(x, router, w1, b1, w2, b2))
        for e in range(router.shape[1]):
            mine, gates = [t for t, at, *_ in kept if at == e], [[gate] for _, at, gate, _ in kept if at == e]
            if mine:
                z = tokens[mine] @ w1[e] + b1[e]
                h = 0.5 * z * (1 + np.tanh(GELU[0] * (z + GELU[1] * z**3)))
                out[mine] += gates * (h @ w2[e] + b2[e])
        first = np.bincount([experts[0] for experts in chosen], minlength=router.shape[1]) / max(1, len(tokens))
        balance = router.shape[1] * (first * probabilities.sum(axis=0) / max(1, len(tokens))).sum()
        return np.append(out.reshape(-1), balance)

    return function


def arrays(seed=1, batch=BATCH, sequence=SEQUENCE, model=MODEL, hidden=HIDDEN, experts=EXPERTS):
    rng = np.random.default_rng(seed)
    shapes = ((batch, sequence, model), (model, experts), (experts, model, hidden), (experts, hidden),
              (experts, hidden, model), (experts, model))
    return [rng.standard_normal(shape) for shape in shapes], rng.standard_normal(shapes[0])


def whole(values, grad, k, factor, differences=complex_step):
    function = mixture(k, factor)
    gradients = differences(function, values, np.append(grad.reshape(-1), ALPHA))
    *out, balance = function(*values)
    return np.reshape(out, grad.shape), balance, gradients


@cache
def expected(k, factor):
    return whole(*arrays(), k, factor)


def step(device, operation, grad, *shards):
    out, saved = operation.forward(device, *shards)
    seen = saved.balance_loss, saved.dispatch.kept, kept_by_expert(saved.dispatch, saved.choice.experts,
                                                                 saved.plan.shapes[1][1])
    return out, *operation.backward(device, saved, grad, ALPHA), seen


def seen(run):
    """By rank: the balance loss, which choices are kept, and how many by expert."""
    return [out[-1] for out in run]


S = MixtureOfExpertsSharding
EVERYTHING_MOVES = S(
    T(None, None, "x"), T("x", None), T("x", None, None), T(None, "x"), T(None, None, "x"), T(None, None),
    T("x", None, None),
)
ONE_AXIS = [
    (S.expert_parallel("x"), 2, 1.0), (S.expert_parallel("x"), 1, 0.6), (EVERYTHING_MOVES, 2, None),
    (S.expert_parallel((), "x"), 3, 0.8),
]
TWO_AXES = [
    (S.expert_parallel("y", "x"), 2, 1.0), (S.expert_parallel(("y", "x")), 1, 0.6),
    (S.expert_parallel("x"), 2, None), (S.expert_parallel("y", ("x", "y")[:1]), 3, 0.8),
    (S(T("y", None, None), T(None, "y"), T("x", "y", None), T("x", None), T("x", None, "y"), T("y", "x"),
       T(None, "y", None, partial="x")), 2, 1.0),
]
MESHES = [Mesh(x=1), Mesh(x=2), Mesh(x=4), Mesh(x=8), Mesh(x=2, y=2), Mesh(x=2, y=3)]


def row_bytes(kept, operation, mesh, model=MODEL):
    to, back = rows_received(kept, T(operation.sharding.experts), mesh)
    return [8 * model * (one + other) for one, other in zip(to, back, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=repr)
@pytest.mark.parametrize("half", [0, 1])
def test_a_mixture_on_a_mesh_is_that_of_one_process_forward_and_backward(cluster_of, mesh, half):
    values, grad = arrays()
    for sharding, k, factor in (ONE_AXIS if len(mesh.axes) == 1 else TWO_AXES)[half::2]:
        operation = MixtureOfExperts(sharding, top_k=k, capacity_factor=factor)
        run, (out, *gradients) = run_whole(cluster_of(mesh, "thread"), operation, values, grad, step)
        wanted_out, balance, wanted = expected(k, factor)
        assert_close([out, *gradients], [wanted_out, *wanted])
        assert_close([found for found, _, _ in seen(run)], [balance] * mesh.size)
        plan = operation.plan([x.shape for x in values], mesh)
        rows = row_bytes([kept for _, _, kept in seen(run)], operation, mesh)
        for rank in range(mesh.size):
            assert run.trace.bytes_received(rank=rank) == (
                plan.bytes_received[rank] + plan.backward_bytes_received[rank] + 2 * rows[rank]
            )


@pytest.mark.slow
def test_who_is_dropped_is_the_first_come_rule_of_the_whole_batch_on_every_mesh(cluster_of):
    values, grad = arrays()
    values[1][:] = 0
    values[1][:, 3] = 1                    # equal logits but of one expert: it overflows, and ties go by number
    values[0][:] = np.abs(values[0])
    _, _, kept = routed(values[0], values[1], 2, 1.0)
    wanted = np.zeros((BATCH, SEQUENCE, 2), bool)
    for t, _, _, rank in kept:
        wanted[t // SEQUENCE, t % SEQUENCE, rank] = True
    assert wanted.sum() == 2 * 8           # of 18 tokens, which all choose experts 3 and 0, each keeps ceil(2 * 18 / 5)
    assert wanted[0].all()
    for mesh in (Mesh(x=1), Mesh(x=4), Mesh(x=2, y=3)):
        sharding = S.expert_parallel(mesh.axes[-1], mesh.axes[:-1])
        run, _ = run_whole(cluster_of(mesh, "thread"), MixtureOfExperts(sharding, capacity_factor=1.0), values, grad,
                           step)
        layout = T(mesh.axes[:-1], mesh.axes[-1], None)
        shards = [kept.reshape(layout.local_shape(wanted.shape, mesh, rank))
                  for rank, (_, kept, _) in enumerate(seen(run))]
        np.testing.assert_array_equal(layout.unshard(shards, mesh), wanted)


@pytest.mark.parametrize(("k", "factor"), [pytest.param(2, 1.0, marks=pytest.mark.slow), (1, 0.6)])
def test_gradients_are_the_central_differences_of_the_global_function(cluster_of, k, factor):
    values, grad = arrays()
    operation = MixtureOfExperts(S.expert_parallel("y", "x"), top_k=k, capacity_factor=factor)
    _, (_, *found) = run_whole(cluster_of(Mesh(x=2, y=3), "thread"), operation, values, grad, step)
    _, _, wanted = whole(values, grad, k, factor, central)
    assert_close(found, wanted, relative=1e-7)


@pytest.mark.slow
def test_processes_run_the_collectives_of_expert_parallelism_and_no_others(cluster_of):
    values, grad = arrays()
    mesh, operation = Mesh(x=2, y=2), MixtureOfExperts(S.expert_parallel("y", "x"), capacity_factor=1.0)
    cluster = cluster_of(mesh)
    run, (out, *_) = run_whole(cluster, operation, values, grad, step)
    np.testing.assert_array_equal(cluster.run(operation, *values).result, out)
    assert_close([out], expected(2, 1.0)[:1])
    for rank in range(mesh.size):
        ran = [(event.name, event.axes) for event in run.trace.filter(kind="collective", rank=rank)]
        assert ran == [
            ("all_gather", ("x", "y")), ("all_reduce", ("x", "y")), ("all_to_all", ("y",)), ("all_to_all", ("y",)),
            ("all_to_all", ("y",)), ("all_to_all", ("y",)), *[("all_reduce", ("x",))] * 4, ("all_reduce", ("x", "y")),
        ]
    rows = row_bytes([kept for _, _, kept in seen(run)], operation, mesh)
    assert run.trace.filter(name="all_to_all").bytes_received() == 2 * sum(rows) > 0
    held = run.trace.filter(kind="memory", rank=3)
    assert sum(event.nbytes for event in held) == 0 < run.trace.peak_bytes(3)


def test_an_even_router_sends_what_is_not_for_oneself():
    to_experts, back = rows_received(np.full((4, 8), 3), T("x"), Mesh(x=4))      # 24 choices on each of 4 devices
    assert to_experts == back == (18,) * 4                                       # three quarters of them
    mesh, uneven = Mesh(x=2, y=2), np.arange(12).reshape(4, 3)                   # experts 0 and 1 at y=0, 2 at y=1
    assert rows_received(uneven, T("y"), mesh) == ((3 + 4, 2, 9 + 10, 8), (2, 3 + 4, 8, 9 + 10))


def test_a_recorder_that_only_counts_is_told_that_the_sizes_depend_on_the_data():
    values, _ = arrays()
    with pytest.raises(RuntimeError, match="a recorder that counts only cannot run it"):
        record(MixtureOfExperts(S.expert_parallel("x")), Mesh(x=2), *values)
    assert record(MixtureOfExperts(S.expert_parallel("x")), Mesh(x=1), *values).outputs[0].shape == values[0].shape


def test_x_of_other_dims_does_as_well(cluster_of):
    values, grad = arrays()
    rows = T("x", None)
    sharding = S(rows, T(None, None), T("x", ...), rows, T("x", ...), rows, rows)
    flat, flat_grad = [values[0].reshape(-1, MODEL), *values[1:]], grad.reshape(-1, MODEL)
    _, (out, *_) = run_whole(cluster_of(Mesh(x=4), "thread"), MixtureOfExperts(sharding, capacity_factor=1.0), flat,
                             flat_grad, step)
    assert_close([out.reshape(grad.shape)], expected(2, 1.0)[:1])


def test_a_gradient_of_another_shape_is_refused_in_the_device(cluster_of):
    values, _ = arrays()
    with pytest.raises(DeviceFailedError, match="the gradient of y must have the shape of its shard"):
        cluster_of(Mesh(x=2), "thread").run(_wrong_gradient, MixtureOfExperts(S.expert_parallel("x")), *values)


def _wrong_gradient(device, operation, *values):
    shards = operation.inputs(device.mesh, *values)[device.rank]
    _, saved = operation.forward(device, *shards)
    operation.backward(device, saved, values[0])


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(RANDOM))
def test_any_layouts_do(cluster_of, seed):
    rng = random.Random(seed)
    mesh = MESHES[seed % len(MESHES)]

    def layout(ndim):
        dims = [[] for _ in range(ndim + 1)]
        for axis in rng.sample(mesh.axes, len(mesh.axes)):
            rng.choice(dims).append(axis)
        return T(*map(tuple, dims[:ndim]))

    k, factor = rng.choice([1, 2]), rng.choice([None, 0.5, 1.0])
    values, grad = arrays(seed, *(rng.choice([1, 2, 3, 5]) for _ in range(4)), experts=rng.choice([2, 3, 5]))
    operation = MixtureOfExperts(S(*map(layout, (3, 2, 3, 2, 3, 2, 3))), top_k=k, capacity_factor=factor)
    _, (out, *gradients) = run_whole(cluster_of(mesh, "thread"), operation, values, grad, step)
    wanted_out, _, wanted = whole(values, grad, k, factor)
    assert_close([out, *gradients], [wanted_out, *wanted])
