"""`Attention` against the same in one process, in NumPy: values, gradients, and what is communicated."""

from __future__ import annotations

import os
import random
import weakref

import numpy as np
import pytest

from parallelism import Mesh
from parallelism.kernels import Mask
from parallelism.recorder import record
from tensor_parallelism import Attention, AttentionSharding, AttentionShardingPolicy, zigzag_order
from tensor_parallelism.attention import ring as attention_ring
from vcluster import Sharded

A, P = AttentionSharding, AttentionShardingPolicy
NAMES = ("x", "wq", "wk", "wv", "wo")
ONE_AXIS = {
    "unsharded": (A.unsharded(), None),
    "a batch": (A.unsharded("x"), None),
    "megatron": (A.megatron("x"), None),
    "megatron, whole keys": (A.megatron("x", whole_keys=True), None),
    "sequence": (A.sequence("x"), None),
    "ring": (A.ring("x"), None),
    "zigzag": (A.ring("x"), None),
    "ulysses": (A.ring("x"), P.ULYSSES),
}
TWO_AXES = {
    "megatron of a batch": (A.megatron("y", "x"), None),
    "megatron over two axes": (A.megatron(("y", "x")), None),
    "sequence of a batch, whole keys": (A.sequence("y", "x", whole_keys=True), None),
    "ring of a batch": (A.ring("y", "x"), None),
    "zigzag over two axes": (A.ring(("y", "x")), None),
    "ulysses of a batch": (A.ring("x", "y"), P.ULYSSES),
    "ulysses over two axes": (A.ring(("x", "y")), P.ULYSSES),
    "megatron ring": (A.megatron_ring("x", "y"), None),
    "megatron ring, zigzag, whole keys": (A.megatron_ring("y", "x", whole_keys=True), None),
}
MESHES = [Mesh(x=1), Mesh(x=2), Mesh(x=4), Mesh(x=8), Mesh(x=2, y=2), Mesh(x=2, y=3)]
CASES = [
    pytest.param(mesh, name, *case, id=f"{mesh!r}-{name}")
    for mesh in MESHES for name, case in (TWO_AXES if len(mesh.axes) == 2 else ONE_AXIS).items()
]


def arrays(seed, batch=3, sequence=11, model=7, heads=6, kv_heads=6, head_dim=4, outputs=5):
    rng = np.random.default_rng(seed)
    keys = (model, kv_heads, head_dim)
    shapes = (batch, sequence, model), (model, heads, head_dim), keys, keys, (heads, head_dim, outputs)
    return [rng.standard_normal(shape) for shape in shapes], rng.standard_normal((batch, sequence, outputs))


def parts(x, wq, wk, wv, mask):
    """Queries, keys and values with a head for each query, (batch, heads, rows, head_dim), and the weights."""
    share = wq.shape[1] // wk.shape[1]
    q, k, v = (np.einsum("bsm,mhd->bhsd", x, w) for w in (wq, np.repeat(wk, share, 1), np.repeat(wv, share, 1)))
    scores = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[3])
    rows, columns = np.indices(scores.shape[2:])
    if mask.causal:
        scores = np.where(columns <= rows, scores, -np.inf)
    if mask.window is not None:
        scores = np.where(rows - columns < mask.window, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return q, k, v, weights / weights.sum(-1, keepdims=True)


def attention(x, wq, wk, wv, wo, mask):
    """The global function, written anew."""
    _, _, v, weights = parts(x, wq, wk, wv, mask)
    return np.einsum("bhsd,hdm->bsm", weights @ v, wo)


def gradients(values, grad, mask):
    """Of the sum of ``grad`` times attention, in one process."""
    x, wq, wk, wv, wo = values
    q, k, v, weights = parts(x, wq, wk, wv, mask)
    mixed = np.einsum("bsm,hdm->bhsd", grad, wo)
    by_weights = mixed @ v.swapaxes(2, 3)
    scores = weights * (by_weights - (by_weights * weights).sum(-1, keepdims=True)) / np.sqrt(q.shape[3])
    made = scores @ k, scores.swapaxes(2, 3) @ q, weights.swapaxes(2, 3) @ mixed
    share = wq.shape[1] // wk.shape[1]
    all_heads = wq, np.repeat(wk, share, 1), np.repeat(wv, share, 1)
    of_x = sum(np.einsum("bhsd,mhd->bsm", g, w) for g, w in zip(made, all_heads, strict=True))
    of_q, of_k, of_v = (np.einsum("bsm,bhsd->mhd", x, g) for g in made)
    of_k, of_v = (g.reshape(*wk.shape[:2], share, wk.shape[2]).sum(2) for g in (of_k, of_v))
    return [of_x, of_q, of_k, of_v, np.einsum("bhsd,bsm->hdm", weights @ v, grad)]


def step(device, operation, grad, *shards):
    out, saved = operation.forward(device, *shards)
    return out, *operation.backward(device, saved, grad)


def order_of(operation, sequence, mesh):
    """In which the rows lie."""
    if not operation.zigzag:
        return np.arange(sequence)
    return zigzag_order(sequence, [mesh.shape[axis] for axis in operation.sharding.split.rows])


def dealt(operation, values, grad, mesh):
    """The arguments of `step`, for the whole cluster."""
    order, sharding = order_of(operation, grad.shape[1], mesh), operation.sharding
    layouts = [sharding.out, *(getattr(sharding, name) for name in NAMES)]
    whole = [grad[:, order], values[0][:, order], *values[1:]]
    return list(zip(whole, layouts, strict=True))


def run_step(cluster, operation, values, grad):
    inputs = [Sharded(x, layout) for x, layout in dealt(operation, values, grad, cluster.mesh)]
    return cluster.run(step, operation, *inputs)


def joined(run, operation):
    """The output and the gradients as whole arrays, their rows in order."""
    layouts = [getattr(operation.sharding, name) for name in ("out", *NAMES)]
    whole = [layout.unshard([out[i] for out in run], run.mesh) for i, layout in enumerate(layouts)]
    back = np.argsort(order_of(operation, whole[0].shape[1], run.mesh))
    return [whole[0][:, back], whole[1][:, back], *whole[2:]]


def check(cluster, operation, values, grad):
    """Everything equals one process; the bytes are those of the plan."""
    plan = operation.plan([x.shape for x in values], cluster.mesh)      # before: else each thread searches for it
    run = run_step(cluster, operation, values, grad)
    expected = [attention(*values, operation.mask), *gradients(values, grad, operation.mask)]
    for one, other in zip(joined(run, operation), expected, strict=True):
        # Of a sequence with one key the gradients of scores are 0, but for rounding.
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10 * max(1e-2, np.abs(other).max(initial=0)))
    assert run.trace.bytes_received() == sum(plan.bytes_received) + sum(plan.backward_bytes_received)
    return run


@pytest.mark.sampled(28)
@pytest.mark.parametrize(("mesh", "name", "sharding", "policy"), CASES)
def test_attention_is_that_of_one_process_forward_and_backward(cluster_of, mesh, name, sharding, policy):
    cluster = cluster_of(mesh, "thread")
    grouped = "ring" in name or "zigzag" in name or "ulysses" in name or "whole" in name
    values, grad = arrays(7, kv_heads=3 if grouped and sharding.split.kv_heads == () else 6)
    for causal in (True, False) if mesh.size == 4 and "zigzag" not in name else (True,):
        check(cluster, Attention(sharding, policy, causal=causal, zigzag="zigzag" in name), values, grad)
    check(cluster, Attention(sharding, policy, causal=True, window=4, zigzag="zigzag" in name), values, grad)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", ["ring", "zigzag", "ulysses", "sequence", "megatron, whole keys"])
@pytest.mark.parametrize(
    "extents",
    [{"sequence": 1, "batch": 1}, {"sequence": 3, "heads": 2, "kv_heads": 2, "head_dim": 1},
     {"heads": 1, "kv_heads": 1}],
    ids=str,
)
def test_devices_without_rows_or_heads_take_part(cluster_of, name, extents):
    sharding, policy = ONE_AXIS[name]
    values, grad = arrays(2, **extents)
    operation = Attention(sharding, policy, causal=True, zigzag=name == "zigzag")
    check(cluster_of(Mesh(x=4), "thread"), operation, values, grad)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("extents", [{"sequence": 0}, {"batch": 0}, {"model": 0}, {"head_dim": 0}], ids=str)
def test_an_extent_of_zero_is_one_like_any_other(cluster_of, extents):
    for name in ("megatron of a batch", "zigzag over two axes", "ulysses of a batch"):
        sharding, policy = TWO_AXES[name]
        operation = Attention(sharding, policy, causal=True, zigzag="zigzag" in name)
        values, grad = arrays(1, **extents)
        run = run_step(cluster_of(Mesh(x=2, y=2), "thread"), operation, values, grad)
        assert [x.shape for x in joined(run, operation)] == [grad.shape, *(x.shape for x in values)]
        assert all(np.isfinite(x).all() for out in run for x in out)


def test_the_result_of_a_run_has_its_rows_in_order(cluster_of):
    values, _ = arrays(4, kv_heads=2)
    for policy, zigzag in ((P.RING, False), (P.RING, True), (P.ULYSSES, False)):
        run = cluster_of(Mesh(x=4), "thread").run(Attention(A.ring("x"), policy, causal=True, zigzag=zigzag), *values)
        np.testing.assert_allclose(run.result, attention(*values, Mask(causal=True)), rtol=1e-10, atol=1e-10)


def test_single_precision_stays_so_and_integers_become_double(cluster_of):
    values, grad = arrays(5, kv_heads=2)
    operation = Attention(A.ring("x"), causal=True)
    single = [x.astype(np.float32) for x in values]
    run = run_step(cluster_of(Mesh(x=4), "thread"), operation, single, grad.astype(np.float32))
    assert {x.dtype for out in run for x in out} == {np.dtype(np.float32)}
    np.testing.assert_allclose(joined(run, operation)[0], attention(*values, Mask(causal=True)), rtol=1e-3, atol=1e-4)
    whole = [np.rint(x).astype(np.int64) for x in values]
    run = cluster_of(Mesh(x=4), "thread").run(operation, *whole)
    expected = attention(*map(np.float64, whole), Mask(causal=True))
    np.testing.assert_allclose(run.result, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["megatron of a batch", "zigzag over two axes", "ulysses of a batch", "megatron ring"])
def test_the_gradients_are_the_central_differences_of_the_global_function(cluster_of, name):
    values, grad = arrays(3, batch=2, sequence=5, model=2, heads=4, kv_heads=2, head_dim=2, outputs=2)
    sharding, policy = TWO_AXES[name]
    operation = Attention(sharding, policy, causal=True, zigzag="zigzag" in name)
    _, *found = joined(run_step(cluster_of(Mesh(x=2, y=2), "thread"), operation, values, grad), operation)
    for i, gradient in enumerate(found):
        for place in np.ndindex(values[i].shape):
            changed = []
            for sign in (1, -1):
                moved = [x.copy() for x in values]
                moved[i][place] += sign * 1e-5
                changed.append((attention(*moved, Mask(causal=True)) * grad).sum())
            np.testing.assert_allclose(gradient[place], (changed[0] - changed[1]) / 2e-5, rtol=1e-6, atol=1e-8)


FORWARD = {
    "megatron": ["all_reduce"],
    "sequence": ["all_gather", "reduce_scatter"],
    "zigzag": ["permute"] * 3,
    "ulysses": ["all_to_all"] * 4,
}
WEIGHTS = ["all_reduce"]                # of the gradient of one
BACKWARD = {
    "megatron": ["all_reduce"],
    "sequence": ["all_gather", "all_gather", "reduce_scatter"],
    "zigzag": [*WEIGHTS, *["permute"] * 6, *WEIGHTS * 3],
    "ulysses": [*WEIGHTS, *["all_to_all"] * 4, *WEIGHTS * 3],
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FORWARD)
def test_processes_run_the_collectives_of_a_policy_and_the_recorder_counts_them(cluster_of, name):
    mesh = Mesh(x=4)
    values, grad = arrays(5, heads=5, kv_heads=5)
    sharding, policy = ONE_AXIS[name]
    operation = Attention(sharding, policy, causal=True, zigzag=name == "zigzag")
    run = check(cluster_of(mesh), operation, values, grad)
    cut = [layout.shard(x, mesh) for x, layout in dealt(operation, values, grad, mesh)]
    recorded = record(step, mesh, inputs=[(operation, *mine) for mine in zip(*cut, strict=True)])
    plan = operation.plan([x.shape for x in values], mesh)
    for rank in range(mesh.size):
        did, would = (
            [(event.name, event.bytes_received, event.axes) for event in trace.filter(kind="collective", rank=rank)]
            for trace in (run.trace, recorded.trace)
        )
        assert would == did
        assert [kind for kind, _, _ in did] == FORWARD[name] + BACKWARD[name]
        assert recorded.trace.flops(rank) == run.trace.flops(rank)
        assert run.trace.filter(name="attention").flops(rank) == plan.flops[rank]
        assert [x.shape for x in recorded.outputs[rank]] == [x.shape for x in run[rank]]
        assert recorded.trace.peak_bytes(rank) == run.trace.peak_bytes(rank)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("zigzag", [False, True])
def test_a_ring_of_eight_devices_holds_two_blocks_and_zigzag_balances_its_work(cluster_of, zigzag):
    values, grad = arrays(6, batch=1, sequence=35, heads=2, kv_heads=1)
    run = check(cluster_of(Mesh(x=8), "thread"), Attention(A.ring("x"), causal=True, zigzag=zigzag), values, grad)
    block = 2 * 5 * 4 * 8                               # keys and values of five rows
    peaks = [run.trace.peak_bytes(rank, "keys and values") for rank in range(8)]
    assert max(peaks) == 2 * block
    flops = [0] * 8
    for event in run.trace.filter(name="attention"):
        flops[event.rank] += event.flops
    of_a_block = 4 * 2 * 5 * 5 * 4                      # two heads
    assert (max(flops) - min(flops) <= of_a_block) == zigzag


def blocks_alive(device, operation, grad, *shards):
    """How many of the blocks that were worked on are in memory at most, when the next one is; forward and backward."""
    seen = []
    most = 0

    def noting(add):
        def noted(self, k, *others, **options):
            nonlocal most
            seen.append(weakref.ref(k.base))
            most = max(most, len({id(block()) for block in seen if block() is not None}))
            return add(self, k, *others, **options)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for name in ("BlockwiseAttention", "BlockwiseBackward"):
            patch.setattr(getattr(attention_ring, name), "add", noting(getattr(attention_ring, name).add))
        grads = step(device, operation, grad, *shards)
    return most, len(seen), grads


def test_what_a_ring_says_it_holds_is_what_is_in_memory(cluster_of):
    values, grad = arrays(8, sequence=64, kv_heads=2)
    operation, mesh = Attention(A.ring("x"), causal=True, zigzag=True), Mesh(x=4)
    inputs = [Sharded(x, layout) for x, layout in dealt(operation, values, grad, mesh)]
    run = cluster_of(mesh).run(blocks_alive, operation, *inputs)
    assert [(most, seen) for most, seen, _ in run] == [(1, 8)] * 4       # and another one is on its way


def test_a_ring_keeps_nothing_of_what_it_has_stacked():
    operation, mesh = Attention(A.ring("x")), Mesh(x=2)
    plan = operation.plan([(3, 8, 6), (6, 4, 5), (6, 4, 5), (6, 4, 5), (4, 5, 6)], mesh)
    made = [[np.ones((3, 4, 4, 5)) for _ in range(3)] for _ in range(2)]
    record(lambda device: attention_ring.ring_forward(device, plan, made[device.rank]) and None, mesh)
    assert made == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(int(os.environ.get("VCLUSTER_ATTENTION_RUNS", "60"))))
def test_any_extents_do_under_any_policy(cluster_of, seed):
    rng = random.Random(seed)
    mesh = rng.choice(MESHES)
    name, (sharding, policy) = rng.choice(list((TWO_AXES if len(mesh.axes) == 2 else ONE_AXIS).items()))
    kv_heads = rng.randint(1, 5)
    same = sharding.split.kv_heads != ()                # those that can be shared, whatever the number
    values, grad = arrays(
        seed, batch=rng.randint(1, 4), sequence=rng.randint(1, 30), model=rng.randint(1, 5), kv_heads=kv_heads,
        heads=kv_heads if same else kv_heads * rng.randint(1, 3), head_dim=rng.randint(1, 4), outputs=rng.randint(1, 4),
    )
    causal = "zigzag" in name or rng.random() < 0.5
    window = rng.choice([None, rng.randint(1, 30)]) if causal else None
    operation = Attention(sharding, policy, causal=causal, window=window, zigzag="zigzag" in name)
    check(cluster_of(mesh, rng.choice(["thread", "process"])), operation, values, grad)
