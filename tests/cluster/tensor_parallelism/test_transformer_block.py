"""`TransformerBlock` against the same block in one process, in NumPy: values, gradients, and what is communicated."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pytest
from differences import assert_close, central, complex_step

from parallelism import Mesh
from parallelism.kernels import dropout_mask, splitmix64
from parallelism.recorder import record
from tensor_parallelism import (
    TransformerBlock,
    TransformerBlockPolicy,
    TransformerBlockSharding,
    zigzag_order,
)
from vcluster import Sharded

B, P = TransformerBlockSharding, TransformerBlockPolicy
STEP = 3


def norm(x, weight, bias=None):
    if bias is not None:
        x = x - x.mean(-1, keepdims=True)
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight
    return y if bias is None else y + bias


def turned(x, base):
    """Rotary positions, a pair of features at a time."""
    if base is None:
        return x
    y = x.copy()
    for i in range(x.shape[3] // 2):
        angle = np.arange(x.shape[1])[:, None] * base ** (-2 * i / x.shape[3])
        even, odd = x[..., 2 * i], x[..., 2 * i + 1]
        y[..., 2 * i], y[..., 2 * i + 1] = (
            even * np.cos(angle) - odd * np.sin(angle), even * np.sin(angle) + odd * np.cos(angle))
    return y


def gelu(z):
    return 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))


@dataclass(frozen=True)
class Case:
    """A block in one process; a function that complex numbers go through."""

    shape: tuple[int, int, int] = (3, 7, 4)
    heads: int = 5
    kv_heads: int = 5
    head_dim: int = 2
    hidden: int = 6
    options: dict = field(default_factory=dict)

    def operation(self, sharding, policy=None, **options):
        return TransformerBlock(sharding, policy, **self.options, **options)

    @cached_property
    def values(self):
        rng = np.random.default_rng(self.shape[1])
        shapes = self.operation(B.unsharded()).shapes(
            self.shape, self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim, hidden=self.hidden)
        return [rng.standard_normal(shape) for shape in shapes.values()]

    @cached_property
    def grad(self):
        return np.random.default_rng(8).standard_normal(self.shape)

    @cached_property
    def expected(self):
        """The output, and the gradients of the inputs."""
        return [self(*self.values), *complex_step(self, self.values, self.grad)]

    def __call__(self, x, *weights):
        n = 2 if self.options.get("norm", "layer_norm") == "layer_norm" else 1
        a = x + self.kept(self.attention(norm(x, *weights[:n]), *weights[n : n + 4]), 0)
        w1, b1, w2, b2 = weights[2 * n + 4 :]
        inner = norm(a, *weights[n + 4 : 2 * n + 4]) @ w1 + b1
        act = gelu if self.options.get("activation", "gelu") == "gelu" else np.tanh
        return a + self.kept(act(inner) @ w2 + b2, 1)

    def attention(self, x, wq, wk, wv, wo):
        share = wq.shape[1] // wk.shape[1]
        q, k, v = (np.einsum("bsm,mhd->bshd", x, w) for w in (wq, np.repeat(wk, share, 1), np.repeat(wv, share, 1)))
        q, k = (turned(one, self.options.get("rotary_base")) for one in (q, k))
        weights = np.exp(np.einsum("bshd,bthd->bhst", q, k) / np.sqrt(q.shape[3]))
        if self.options.get("causal"):
            weights = weights * np.tri(x.shape[1])
        weights = weights / weights.sum(-1, keepdims=True)
        return np.einsum("bhst,bthd,hdm->bsm", weights, v, wo, optimize=True)

    def kept(self, x, which):
        rate = self.options.get("dropout", 0)
        seed = int(splitmix64(self.options.get("seed", 0), [which])[0])
        return x * dropout_mask(rate, seed, STEP, x.shape) / (1 - rate)


MULTI_HEAD = Case(options={"causal": True, "rotary_base": 100.0, "dropout": 0.3, "seed": 5})
GROUPED = Case(heads=6, kv_heads=3, options={"norm": "rms_norm", "causal": True, "rotary_base": 10.0, "dropout": 0.2})
BOTH_WAYS = Case(heads=4, kv_heads=2, options={"activation": "tanh"})
SMALL = Case((2, 4, 3), 3, 3, 2, 5, options={"causal": True, "rotary_base": 9.0, "dropout": 0.2})
ONE_AXIS = {
    "unsharded": (B.unsharded(), None),
    "a batch": (B.unsharded("x"), None),
    "megatron": (B.megatron("x"), None),
    "megatron, whole keys": (B.megatron("x", whole_keys=True), None),
    "sequence": (B.sequence("x"), None),
    "ring": (B.ring("x"), None),
    "zigzag": (B.ring("x"), None),
    "ulysses": (B.ulysses("x"), P.ULYSSES),
}
TWO_AXES = {
    "megatron of a batch": (B.megatron("y", "x"), None),
    "megatron over two axes": (B.megatron(("y", "x")), None),
    "sequence of a batch": (B.sequence("y", "x"), None),
    "sequence, whole keys": (B.sequence(("x", "y"), whole_keys=True), None),
    "ring of a batch": (B.ring("y", "x"), None),
    "zigzag over two axes": (B.ring(("y", "x")), None),
    "ulysses of a batch": (B.ring("x", "y"), P.ULYSSES),
    "megatron ring": (B.megatron_ring("x", "y"), None),
    "megatron ring, zigzag, whole keys": (B.megatron_ring("y", "x", whole_keys=True), None),
}
MESHES = [Mesh(x=1), Mesh(x=2), Mesh(x=4), Mesh(x=8), Mesh(x=2, y=2), Mesh(x=2, y=3)]
ALL = [(mesh, name) for mesh in MESHES for name in (TWO_AXES if len(mesh.axes) == 2 else ONE_AXIS)]
FEW = [
    (Mesh(x=1), "sequence"), (Mesh(x=2), "a batch"), (Mesh(x=2), "ulysses"), (Mesh(x=4), "megatron"),
    (Mesh(x=4), "ring"), (Mesh(x=8), "zigzag"), (Mesh(x=8), "sequence"), (Mesh(x=2, y=2), "megatron ring"),
    (Mesh(x=2, y=3), "sequence, whole keys"), (Mesh(x=2, y=3), "megatron ring, zigzag, whole keys"),
]


def named(name):
    return {**ONE_AXIS, **TWO_AXES}[name]


def step(device, operation, grad, *shards):
    out, saved = operation.forward(device, *shards)
    return out, *operation.backward(device, saved, grad)


def dealt(operation, case, mesh):
    """The arguments of `step`, rows in the order in which they lie, each with its layout."""
    order = order_of(operation, case.shape[1], mesh)
    layouts = [operation.sharding.out, *(getattr(operation.sharding, name) for name in operation.NAMES)]
    x, *weights = case.values
    return list(zip([case.grad[:, order], x[:, order], *weights], layouts, strict=True))


def order_of(operation, sequence, mesh):
    if not operation.attention.zigzag:
        return np.arange(sequence)
    return zigzag_order(sequence, [mesh.shape[axis] for axis in operation.sharding.x.dims[1].axes])


def check(cluster, operation, case):
    """Output and gradients are those of one process; the bytes are those of the plan; all memory is given back."""
    mesh = cluster.mesh
    plan = operation.plan([x.shape for x in case.values], mesh)     # before: else each thread searches for it
    pairs = dealt(operation, case, mesh)
    run = cluster.run(step, operation, *(Sharded(x, layout) for x, layout in pairs), STEP)
    found = [layout.unshard([out[i] for out in run], mesh) for i, (_, layout) in enumerate(pairs)]
    back = np.argsort(order_of(operation, case.shape[1], mesh))
    assert_close([found[0][:, back], found[1][:, back], *found[2:]], case.expected)
    both = zip(plan.bytes_received, plan.backward_bytes_received, strict=True)
    assert [run.trace.bytes_received(rank) for rank in range(mesh.size)] == [sum(one) for one in both]
    assert sum(event.nbytes for event in run.trace.filter(kind="memory")) == 0
    return run


def check_named(cluster_of, mesh, name, backend="thread"):
    sharding, policy = named(name)
    shared = "whole" in name or not sharding.attention.split.heads
    case = GROUPED if shared else MULTI_HEAD
    return check(cluster_of(mesh, backend), case.operation(sharding, policy, zigzag="zigzag" in name), case)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "name"), FEW, ids=str)
def test_a_sharded_block_is_that_of_one_process_forward_and_backward(cluster_of, mesh, name):
    check_named(cluster_of, mesh, name)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "name"), [pair for pair in ALL if pair not in FEW], ids=str)
def test_every_policy_on_every_mesh(cluster_of, mesh, name):
    check_named(cluster_of, mesh, name)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(int(os.environ.get("VCLUSTER_BLOCK_RUNS", "40"))))
def test_any_extents_do_under_any_policy(cluster_of, seed):
    rng = random.Random(seed)
    mesh, name = rng.choice(ALL)
    sharding, policy = named(name)
    kv_heads = rng.randint(1, 4)
    same = sharding.attention.split.kv_heads != ()
    zigzag = "zigzag" in name
    case = Case(
        (rng.randint(1, 3), rng.randint(1, 14), rng.randint(1, 5)), kv_heads if same else kv_heads * rng.randint(1, 3),
        kv_heads, 2 * rng.randint(1, 2), rng.randint(1, 6),
        {"norm": rng.choice(["layer_norm", "rms_norm"]), "causal": zigzag or rng.random() < 0.5,
         "rotary_base": rng.choice([None, 20.0]), "dropout": rng.choice([0.0, 0.4]), "seed": seed},
    )
    if case.shape[2] == 1 and case.options["norm"] == "layer_norm":
        case.options["norm"] = "rms_norm"               # one number less its mean is zero, and what is left noise
    check(cluster_of(mesh, rng.choice(["thread", "process"])), case.operation(sharding, policy, zigzag=zigzag), case)


@pytest.mark.slow
def test_without_dropout_masks_and_positions_and_with_other_parts_it_is_the_same_block(cluster_of):
    check(cluster_of(Mesh(x=2, y=2), "thread"), BOTH_WAYS.operation(B.megatron_ring("x", "y")), BOTH_WAYS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["megatron", "zigzag"])
def test_the_result_of_a_run_has_its_rows_in_order_and_the_same_elements_dropped(cluster_of, name):
    case, (sharding, policy) = MULTI_HEAD, named(name)
    operation = case.operation(sharding, policy, zigzag=name == "zigzag")
    run = cluster_of(Mesh(x=4), "thread").run(operation, *case.values, STEP)
    assert_close([run.result], case.expected[:1])
    other = cluster_of(Mesh(x=4), "thread").run(operation, *case.values, STEP + 1)
    assert not np.allclose(other.result, run.result)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sequence of a batch", pytest.param("ulysses of a batch", marks=pytest.mark.slow)])
def test_the_gradients_are_the_central_differences_of_the_global_function(cluster_of, name):
    assert_close(SMALL.expected[1:], central(SMALL, SMALL.values, SMALL.grad), 1e-6)
    check(cluster_of(Mesh(x=2, y=2), "thread"), SMALL.operation(*named(name)), SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["megatron", "sequence", "zigzag", "ulysses"])
def test_processes_do_what_the_recorder_counts(cluster_of, name):
    mesh, case = Mesh(x=4), MULTI_HEAD
    operation = case.operation(*named(name), zigzag=name == "zigzag")
    run = check(cluster_of(mesh), operation, case)
    cut = zip(*(layout.shard(x, mesh) for x, layout in dealt(operation, case, mesh)), strict=True)
    recorded = record(step, mesh, inputs=[(operation, *mine, STEP) for mine in cut])
    for rank in range(mesh.size):
        did, would = (
            [(event.name, event.bytes_received, event.axes) for event in trace.filter(kind="collective", rank=rank)]
            for trace in (run.trace, recorded.trace)
        )
        assert would == did
        assert recorded.trace.flops(rank) == run.trace.flops(rank)
        assert recorded.trace.peak_bytes(rank) == run.trace.peak_bytes(rank)
        assert [x.shape for x in recorded.outputs[rank]] == [x.shape for x in run[rank]]


def test_single_precision_stays_so_and_integers_become_double(cluster_of):
    cluster, operation = cluster_of(Mesh(x=4), "thread"), MULTI_HEAD.operation(B.sequence("x"))
    single = cluster.run(operation, *(x.astype(np.float32) for x in MULTI_HEAD.values), STEP).result
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, MULTI_HEAD.expected[0], rtol=1e-3, atol=1e-3)
    whole = [np.rint(x).astype(np.int64) for x in MULTI_HEAD.values]
    assert_close([cluster.run(operation, *whole, STEP).result], [MULTI_HEAD(*map(np.float64, whole))])
