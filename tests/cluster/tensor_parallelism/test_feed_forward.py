"""`FeedForward` against the same block in one process, in NumPy: values, gradients, and what is communicated."""

from __future__ import annotations

import random

import numpy as np
import pytest

from parallelism import Mesh, TensorSharding
from parallelism.recorder import record
from tensor_parallelism import FeedForward, FeedForwardSharding, FeedForwardShardingPolicy
from vcluster import Sharded

T, F = TensorSharding, FeedForwardShardingPolicy
NAMES = ("x", "w1", "b1", "w2", "b2")
LAYOUTS = {
    "unsharded": FeedForwardSharding.unsharded(),
    "megatron": FeedForwardSharding.megatron("x"),
    "sequence": FeedForwardSharding.sequence("x"),
    "megatron of a batch": FeedForwardSharding.megatron("y", "x"),
    "sequence of a batch": FeedForwardSharding.sequence("y", "x"),
    "rows": FeedForwardSharding.rows("x"),
    "rows of a batch": FeedForwardSharding.rows("x", (), "y"),
    "rows, and megatron": FeedForwardSharding.rows("x", "y"),
    "gspmd_2d": FeedForwardSharding.gspmd_2d("x", "y"),
    "megatron over two axes": FeedForwardSharding.megatron(("y", "x")),
    "a pipeline of reductions": FeedForwardSharding(
        T(None, None, "x"), T("x", "y"), T("y"), T("y", "x"), T("x"), T(None, "y", "x"),
    ),
    "partial everywhere": FeedForwardSharding(
        T("y", None, None, partial="x"), T(None, "y", partial="x"), T(None, partial="y"), T("x", None), T(None),
        T(None, "y", None, partial="x"),
    ),
}
ONE_AXIS = ("unsharded", "megatron", "sequence", "rows")
MESHES = [Mesh(x=1, y=1), Mesh(x=2), Mesh(x=4), Mesh(x=2, y=2), Mesh(x=2, y=4), Mesh(x=3, y=2)]
CASES = [
    pytest.param(mesh, name, id=f"{mesh!r}-{name}", marks=[pytest.mark.slow] * (mesh.size == 8 and i % 2))
    for mesh in MESHES for i, name in enumerate(LAYOUTS if len(mesh.axes) == 2 else ONE_AXIS)
]
GELU = np.sqrt(2 / np.pi), 0.044715


def block(x, w1, b1, w2, b2, activation):
    """The global function, written anew."""
    z = x @ w1 + b1
    h = np.maximum(z, 0) if activation == "relu" else 0.5 * z * (1 + np.tanh(GELU[0] * (z + GELU[1] * z**3)))
    return h @ w2 + b2


def arrays(seed, batch=5, sequence=7, model=6, hidden=9, outputs=3):
    rng = np.random.default_rng(seed)
    shapes = (batch, sequence, model), (model, hidden), (hidden,), (hidden, outputs), (outputs,)
    return [rng.standard_normal(shape) for shape in shapes], rng.standard_normal((batch, sequence, outputs))


def gradients(values, grad, activation):
    """Of the sum of ``grad`` times the block, in one process."""
    x, w1, b1, w2, _ = values
    z = x @ w1 + b1
    step = 1e-30                    # a complex step has no rounding to speak of
    slope = (z > 0) * 1.0
    h = np.maximum(z, 0)
    if activation == "gelu":
        c = z + 1j * step
        turned = 0.5 * c * (1 + np.tanh(GELU[0] * (c + GELU[1] * c**3)))
        slope, h = turned.imag / step, turned.real
    back = grad @ w2.T * slope
    return [
        back @ w1.T, np.einsum("bsm,bsf->mf", x, back), back.sum((0, 1)), np.einsum("bsf,bsn->fn", h, grad),
        grad.sum((0, 1)),
    ]


def step(device, operation, grad, *shards):
    out, saved = operation.forward(device, *shards)
    return out, *operation.backward(device, saved, grad)


def run_step(cluster, operation, values, grad):
    """The plan is there before: threads that all come to it at once would each search for it."""
    operation.plan(tuple(values[i].shape for i in (0, 1, 3)), cluster.mesh)
    sharding = operation.sharding
    inputs = [Sharded(x, getattr(sharding, name)) for name, x in zip(NAMES, values, strict=True)]
    return cluster.run(step, operation, Sharded(grad, sharding.out), *inputs)


def joined(run, sharding):
    """The output and the gradients as whole arrays; their shards are of the shapes that the layouts say."""
    names = ("out", *NAMES)
    return [getattr(sharding, name).unshard([out[i] for out in run], run.mesh) for i, name in enumerate(names)]


@pytest.mark.sampled(28)
@pytest.mark.parametrize(("mesh", "name"), CASES)
def test_a_sharded_block_is_that_of_one_process_forward_and_backward(cluster_of, mesh, name):
    values, grad = arrays(7)
    for activation in ("relu", "gelu"):
        operation = FeedForward(LAYOUTS[name], activation=activation)
        run = run_step(cluster_of(mesh, "thread"), operation, values, grad)
        found = joined(run, operation.sharding)
        expected = [block(*values, activation), *gradients(values, grad, activation)]
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10 * np.abs(other).max())
        shapes = tuple(values[i].shape for i in (0, 1, 3))
        plan = operation.plan(shapes, mesh)
        assert run.trace.bytes_received() == sum(plan.bytes_received) + sum(plan.backward_bytes_received)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_any_layouts_do(cluster_of, seed):
    rng = random.Random(seed)
    mesh = [Mesh(x=2, y=3), Mesh(x=3), Mesh(x=2, y=2)][seed % 3]

    def layout(ndim):
        dims = [[] for _ in range(ndim + 2)]
        for axis in rng.sample(mesh.axes, len(mesh.axes)):
            rng.choice(dims).append(axis)
        return T(*map(tuple, dims[:ndim]), partial=tuple(dims[ndim]))

    sharding = FeedForwardSharding(*map(layout, (3, 2, 1, 2, 1, 3)))
    values, grad = arrays(seed, *(rng.choice([1, 2, 3, 5]) for _ in range(5)))
    operation = FeedForward(sharding, F.GENERAL)
    run = run_step(cluster_of(mesh, "thread"), operation, values, grad)
    expected = [block(*values, "gelu"), *gradients(values, grad, "gelu")]
    for one, other in zip(joined(run, sharding), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10 * np.abs(other).max())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["megatron of a batch", "sequence of a batch", "gspmd_2d"])
def test_the_gradients_are_the_central_differences_of_the_global_function(cluster_of, name):
    values, grad = arrays(3, batch=2, sequence=3, model=2, hidden=5, outputs=2)
    operation = FeedForward(LAYOUTS[name], activation="gelu")
    _, *found = joined(run_step(cluster_of(Mesh(x=3, y=2), "thread"), operation, values, grad), operation.sharding)
    for i, gradient in enumerate(found):
        for place in np.ndindex(values[i].shape):
            changed = []
            for sign in (1, -1):
                moved = [x.copy() for x in values]
                moved[i][place] += sign * 1e-5
                changed.append((block(*moved, "gelu") * grad).sum())
            np.testing.assert_allclose(gradient[place], (changed[0] - changed[1]) / 2e-5, rtol=1e-6, atol=1e-8)


X, Y, BYTES = 2, 3, 8
EXTENTS = {"batch": 6, "sequence": 12, "model": 18, "hidden": 24, "outputs": 30}
_B, _S, _M, _H, _N = EXTENTS.values()
IN, OUT, W1, W2, B1, B2 = (BYTES * n for n in (_B * _S * _M, _B * _S * _N, _M * _H, _H * _N, _H, _N))
OVER_BATCH = 2 * (X - 1) * (W1 + B1 + W2 + Y * B2)
OVER_ROWS = 2 * (X * Y - 1) * (W1 + B1 + W2 + B2)
FORMULAS = {
    "megatron of a batch": (2 * (Y - 1) * OUT, 2 * (Y - 1) * IN + OVER_BATCH),
    "sequence of a batch": ((Y - 1) * (IN + OUT), (Y - 1) * (OUT + IN + IN) + OVER_BATCH),
    "rows of a batch": (0, OVER_ROWS),
    "rows, and megatron": (2 * (Y - 1) * OUT, 2 * (Y - 1) * IN + OVER_BATCH),
    "gspmd_2d": (
        (Y - 1) * IN + (X - 1) * (W1 + W2) + (Y - 1) * OUT,
        (Y - 1) * (OUT + IN + IN) + 2 * (X - 1) * (W1 + W2) + 2 * (X - 1) * (B1 + B2),
    ),
    "unsharded": (0, 0),
}
COLLECTIVES = {
    "unsharded": [],
    "megatron of a batch": [("all_reduce", ("y",))],
    "sequence of a batch": [("all_gather", ("y",)), ("reduce_scatter", ("y",))],
    "rows of a batch": [],
    "rows, and megatron": [("all_reduce", ("y",))],
    "gspmd_2d": [("all_gather", ("y",)), ("all_gather", ("x",)), ("all_gather", ("x",)), ("reduce_scatter", ("y",))],
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", FORMULAS)
def test_a_policy_runs_the_collectives_it_names_with_the_bytes_of_its_formula(cluster_of, name):
    values, grad = arrays(1, **EXTENTS)
    operation, cluster = FeedForward(LAYOUTS[name]), cluster_of(Mesh(x=X, y=Y), "process")
    forward = cluster.run(operation, *values)
    np.testing.assert_allclose(forward.result, block(*values, "gelu"), rtol=1e-10, atol=1e-10)
    for rank in range(X * Y):
        ran = [(event.name, event.axes) for event in forward.trace.filter(kind="collective", rank=rank)]
        assert ran == COLLECTIVES[name]
    both = run_step(cluster, operation, values, grad)
    backward = both.trace.bytes_received() - forward.trace.bytes_received()
    assert (forward.trace.bytes_received(), backward) == FORMULAS[name]


@pytest.mark.sampled(2)
@pytest.mark.slow_for("partial everywhere")
@pytest.mark.parametrize("name", ["sequence of a batch", "gspmd_2d", "partial everywhere"])
def test_the_recorder_counts_what_the_devices_did(cluster_of, name):
    mesh = Mesh(x=2, y=3)
    values, grad = arrays(5)
    operation = FeedForward(LAYOUTS[name])
    run = run_step(cluster_of(mesh, "thread"), operation, values, grad)
    layouts = [getattr(operation.sharding, field) for field in ("out", *NAMES)]
    shards = zip(*(layout.shard(x, mesh) for layout, x in zip(layouts, [grad, *values], strict=True)), strict=True)
    recorded = record(step, mesh, inputs=[(operation, *mine) for mine in shards])
    for rank in range(mesh.size):
        did, would = (
            [(event.name, event.bytes_received, event.axes) for event in trace.filter(kind="collective", rank=rank)]
            for trace in (run.trace, recorded.trace)
        )
        assert would == did
        assert recorded.trace.flops(rank) == run.trace.flops(rank)
        assert [x.shape for x in recorded.outputs[rank]] == [x.shape for x in run[rank]]
