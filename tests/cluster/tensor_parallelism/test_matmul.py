"""`MatMul` against NumPy on the whole arrays: values, gradients, and what is communicated."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

from parallelism import Mesh, TensorSharding
from parallelism.recorder import record
from parallelism.resharding import plan_resharding
from tensor_parallelism import Contraction, MatMul, MatMulSharding, MatMulShardingPolicy, Seconds
from tensor_parallelism.products import moved
from vcluster import DeviceFailedError, Sharded

T, P = TensorSharding, MatMulShardingPolicy
WHOLE = T(None, None)
MANY = int(os.environ.get("VCLUSTER_TRIPLES", "500"))
MESHES = [
    Mesh(x=1), Mesh(x=2), Mesh(x=4), Mesh(x=2, y=2), Mesh(x=2, y=4), Mesh(x=3, y=2), Mesh(x=2, y=1, z=3),
    Mesh(x=2, y=2, z=2),
]


def integers(seed, shape):
    """Small integers as floats: sums are exact, in any order."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float64)


def some_layout(rng, ndim, mesh):
    """Each axis over a dim, in any order, partial, or over nothing."""
    dims = [[] for _ in range(ndim + 2)]
    for axis in rng.sample(mesh.axes, len(mesh.axes)):
        rng.choice(dims).append(axis)
    op = rng.choice(["sum", "sum", "sum", "max"])
    return T(*map(tuple, dims[:ndim]), partial=tuple(dims[ndim]), op=op)


def summed_to(x, shape):
    """The sum over the batch dims that an operand has not."""
    return x.sum(axis=tuple(range(x.ndim - len(shape))))


def step(device, a, b, grad, operation):
    out, saved = operation.forward(device, a, b)
    return out, *operation.backward(device, saved, grad)


def check(cluster, mesh, seed):
    rng = random.Random(seed)
    lhs_ndim, rhs_ndim = rng.choice([(2, 2), (2, 2), (3, 2), (3, 3), (2, 3)])
    batch, m, k, n = (rng.choice([0, 1, 2, 3, 5, 7, 8, 11]) for _ in range(4))
    a = integers(seed, [batch][: lhs_ndim - 2] + [m, k])
    b = integers(seed + 1, [batch][: rhs_ndim - 2] + [k, n])
    c = a @ b
    sharding = MatMulSharding(*(some_layout(rng, x.ndim, mesh) for x in (a, b, c)))
    operation, grad = MatMul(sharding), integers(seed + 2, c.shape)
    # Before: threads that all come to the plans at once would each search for them.
    plans = operation.plan((a.shape, b.shape), mesh), *operation.gradient_plans((a.shape, b.shape), mesh)
    run = cluster.run(
        step, Sharded(a, sharding.lhs), Sharded(b, sharding.rhs), Sharded(grad, sharding.out), operation
    )
    layouts = sharding.out, sharding.lhs, sharding.rhs
    wanted = c, summed_to(grad @ np.swapaxes(b, -1, -2), a.shape), summed_to(np.swapaxes(a, -1, -2) @ grad, b.shape)
    for i, (layout, expected) in enumerate(zip(layouts, wanted, strict=True)):
        shards = [out[i] for out in run]
        assert [shard.shape for shard in shards] == [
            layout.local_shape(expected.shape, mesh, rank) for rank in range(mesh.size)
        ]
        np.testing.assert_array_equal(layout.unshard(shards, mesh), expected, err_msg=f"{operation} on {mesh}")
    for rank in range(mesh.size):
        assert run.trace.bytes_received(rank) == sum(plan.bytes_received[rank] for plan in plans)
        assert run.trace.flops(rank) == sum(plan.flops[rank] for plan in plans)


def add_up(device, a, b, plan):
    """The sum of everybody's products, twice; whether it left the product alone, and whether it took its place."""
    found = Contraction.matmul(2, 2).run(device, a, b, shared=True)
    before = found.copy()
    kept = moved(device, plan, found)
    unchanged = np.array_equal(found, before)
    spent = moved(device, plan, found, spent=True)
    return kept, spent, unchanged, np.shares_memory(kept, found), np.shares_memory(spent, found)


@pytest.mark.parametrize("rows", [2, 700])
def test_a_product_is_summed_where_it_lies_only_if_nobody_needs_it(cluster_of, rows):
    a, b = integers(1, (rows, 5)), integers(2, (5, 300))
    cluster = cluster_of(Mesh(x=3))
    plan = plan_resharding(T(None, None, partial="x"), WHOLE, (rows, 300), np.float64, cluster.mesh)
    for kept, spent, *said in cluster.run(add_up, a, b, plan):
        np.testing.assert_array_equal(kept, 3 * (a @ b))
        np.testing.assert_array_equal(spent, 3 * (a @ b))
        assert said == [True, False, True]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(i, marks=pytest.mark.slow) for i in range(12, 24))])
def test_any_layouts_on_any_mesh_give_numpys_product_and_gradients(cluster_of, seed):
    mesh = MESHES[seed % len(MESHES)]
    check(cluster_of(mesh, "thread"), mesh, seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_layouts_on_any_mesh_give_numpys_product_and_gradients(cluster_of):
    for seed in range(100, 100 + MANY):
        mesh = MESHES[seed % len(MESHES)]
        check(cluster_of(mesh, "thread" if seed % 5 else "process"), mesh, seed)


X, Y, M, K, N = 2, 3, 12, 18, 24
A_BYTES, B_BYTES, C_BYTES, DEVICES = 8 * M * K, 8 * K * N, 8 * M * N, X * Y
NAMED = [
    (P.UNSHARDED, WHOLE, WHOLE, WHOLE, [], 0),
    (P.MATCHED_INNER, T(None, "x"), T("x", None), WHOLE, [("all_reduce", ("x",))],
     2 * (X - 1) * DEVICES * C_BYTES // X),
    (P.MATCHED_INNER, T(None, "x"), T("x", None), T("x", None), [("reduce_scatter", ("x",))],
     (X - 1) * DEVICES * C_BYTES // X),
    (P.MATCHED_INNER, T(None, ("y", "x")), T(("y", "x"), None), WHOLE, [("all_reduce", ("x", "y"))],
     2 * (X * Y - 1) * C_BYTES),
    (P.UNMATCHED_INNER, T(None, "x"), T("y", None), WHOLE, [("all_gather", ("x",)), ("all_gather", ("y",))],
     (X - 1) * DEVICES * A_BYTES // X + (Y - 1) * DEVICES * B_BYTES // Y),
    (P.OUTER, T("x", "y"), T("x", None), T("x", None), [("all_gather", ("y",)), ("all_gather", ("x",))],
     (Y - 1) * DEVICES * A_BYTES // X // Y + (X - 1) * DEVICES * B_BYTES // X),
    (P.FULL, T("x", "y"), T("x", "y"), T("x", "y"), [("all_gather", ("y",)), ("all_gather", ("x",))],
     (Y - 1) * DEVICES * A_BYTES // X // Y + (X - 1) * DEVICES * B_BYTES // X // Y),
]


@pytest.mark.sampled(4, 3)
@pytest.mark.slow_for("thread")
@pytest.mark.parametrize("backend", ["process", "thread"])
@pytest.mark.parametrize(("policy", "lhs", "rhs", "out", "collectives", "nbytes"), NAMED)
def test_a_named_policy_runs_the_collectives_it_names_with_the_bytes_of_its_formula(
    cluster_of, backend, policy, lhs, rhs, out, collectives, nbytes
):
    mesh = Mesh(x=X, y=Y)
    a, b = integers(1, (M, K)), integers(2, (K, N))
    run = cluster_of(mesh, backend).run(MatMul(MatMulSharding(lhs, rhs, out), policy=policy), a, b)
    np.testing.assert_array_equal(run.result, a @ b)
    for rank in range(mesh.size):
        ran = [(event.name, event.axes) for event in run.trace.filter(kind="collective", rank=rank)]
        assert ran == collectives
    assert run.trace.bytes_received() == nbytes


def test_a_policy_is_followed_by_the_reshard_to_out(cluster_of):
    mesh = Mesh(x=2, y=3)
    a, b = integers(1, (5, 7)), integers(2, (7, 8))
    sharding = MatMulSharding(T("x", "y"), T("x", "y"), T("y", "x"))
    run = cluster_of(mesh, "thread").run(MatMul(sharding, policy=P.FULL), a, b)
    np.testing.assert_array_equal(run.result, a @ b)
    assert [event.name for event in run.trace.filter(kind="collective", rank=0)][:2] == ["all_gather"] * 2
    assert [out.shape for out in run] == [sharding.out.local_shape((5, 8), mesh, rank) for rank in range(6)]


def test_m_and_n_on_swapped_axes_is_the_right_product(cluster_of):
    """FULL with the axes of m and n swapped is where a count of pieces in place of axes goes wrong without a word."""
    mesh = Mesh(x=2, y=4)
    a, b = integers(1, (9, 10)), integers(2, (10, 11))
    for lhs, rhs, out in ((T("y", "x"), T("y", "x"), T("y", "x")), (T("x", "y"), T("x", "y"), T("y", "x"))):
        run = cluster_of(mesh, "thread").run(MatMul(MatMulSharding(lhs, rhs, out)), a, b)
        np.testing.assert_array_equal(run.result, a @ b)


@pytest.mark.slow_for("process")
@pytest.mark.parametrize("backend", ["process", "thread"])
def test_a_product_chosen_by_seconds_is_the_same_product_with_fewer_flops(cluster_of, backend):
    mesh = Mesh(x=2, y=3)
    sharding = MatMulSharding(T(None, "x"), T("y", None), WHOLE)
    operation = MatMul(sharding, cost=Seconds(flops_per_second=1.0, bytes_per_second=1e6))
    a, b = integers(1, (7, 18)), integers(2, (18, 11))
    run = cluster_of(mesh, backend).run(operation, a, b)
    np.testing.assert_array_equal(run.result, a @ b)
    assert run.trace.flops() == 2 * 7 * 18 * 11
    assert run.trace.bytes_received() == sum(operation.plan((a.shape, b.shape), mesh).bytes_received)
    arrays = Sharded(a, sharding.lhs), Sharded(b, sharding.rhs), integers(3, (7, 11))
    run = cluster_of(mesh, backend).run(step, *arrays, operation)
    np.testing.assert_array_equal(sharding.lhs.unshard([out[1] for out in run], mesh), arrays[2] @ b.T)
    np.testing.assert_array_equal(sharding.rhs.unshard([out[2] for out in run], mesh), a.T @ arrays[2])


def test_operands_of_other_dtypes_are_multiplied_as_numpy_does(cluster_of):
    mesh = Mesh(x=2, y=2)
    sharding = MatMulSharding(T("x", "y"), T("x", "y"), T("x", "y"))
    for a, b in ((np.int32, np.float32), (np.int16, np.int64), (bool, bool), (np.float32, np.complex64)):
        left, right = integers(1, (5, 6)).astype(a), integers(2, (6, 7)).astype(b)
        result = cluster_of(mesh, "thread").run(MatMul(sharding), left, right).result
        assert result.dtype == (left @ right).dtype
        np.testing.assert_array_equal(result, left @ right)


def test_what_is_said_to_agree_on_shapes_leaves_no_trace(cluster_of, recwarn):
    sharding = MatMulSharding(T("x", None), WHOLE, T("x", None))
    operation = MatMul(sharding)

    def kernel(device, a, b):
        operation(device, a, b)

    run = cluster_of(Mesh(x=2), "thread").run(kernel, Sharded(np.ones((5, 3)), sharding.lhs), np.ones((3, 4)))
    assert len(run.trace.filter(kind="collective")) == 0
    assert not recwarn.list


def test_a_gradient_of_another_shape_is_refused(cluster_of):
    operation = MatMul(MatMulSharding(T("x", None), WHOLE, T("x", None)))

    def kernel(device, a, b):
        _, saved = operation.forward(device, a, b)
        return operation.backward(device, saved, np.zeros((5, 4)))

    with pytest.raises(DeviceFailedError, match=r"the shape of its shard, \(3, 4\) on rank 0, got \(5, 4\)"):
        cluster_of(Mesh(x=2), "thread").run(kernel, Sharded(np.zeros((5, 3)), T("x", None)), np.zeros((3, 4)))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(200, 208))
def test_the_recorder_counts_what_the_devices_did(cluster_of, seed):
    check_recorder(cluster_of, seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_so_it_does_for_many_layouts(cluster_of):
    for seed in range(1000, 1000 + MANY):
        check_recorder(cluster_of, seed)


def check_recorder(cluster_of, seed):
    rng = random.Random(seed)
    mesh = rng.choice(MESHES)
    a, b = integers(seed, (rng.randrange(12), 7)), integers(seed, (7, rng.randrange(12)))
    sharding = MatMulSharding(*(some_layout(rng, 2, mesh) for _ in range(3)))
    grad = integers(seed, (len(a), b.shape[1]))
    arrays = (a, sharding.lhs), (b, sharding.rhs), (grad, sharding.out)
    operation = MatMul(sharding)
    operation.gradient_plans((a.shape, b.shape), mesh)
    run = cluster_of(mesh, "thread").run(step, *(Sharded(x, layout) for x, layout in arrays), operation)
    shards = zip(*(layout.shard(x, mesh) for x, layout in arrays), strict=True)
    recorded = record(step, mesh, inputs=[(*mine, operation) for mine in shards])
    told = ("name", "bytes_sent", "bytes_received", "messages", "axes", "group", "sources", "sequence")
    for rank in range(mesh.size):
        did, would = (
            [tuple(getattr(event, field) for field in told) for event in trace.filter(kind="collective", rank=rank)]
            for trace in (run.trace, recorded.trace)
        )
        assert would == did
        assert recorded.trace.flops(rank) == run.trace.flops(rank)
        assert [x.shape for x in recorded.outputs[rank]] == [x.shape for x in run[rank]]
    np.testing.assert_array_equal(recorded.trace.communication_matrix(), run.trace.communication_matrix())
