"""`TransformerBlock` as values: policies, what is planned, counted, held and refused.  No device is started."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest

from parallelism import Mesh, TensorSharding
from parallelism.recorder import record
from tensor_parallelism import TransformerBlock, TransformerBlockPolicy, TransformerBlockSharding

T, B, P = TensorSharding, TransformerBlockSharding, TransformerBlockPolicy
PLAIN = TransformerBlock(B.unsharded())


def step(device, operation, *shards):
    out, saved = operation.forward(device, *shards)
    return operation.backward(device, saved, np.ones_like(out))


def recorded(operation, mesh, shapes, program=step, dtype=np.float64):
    """What forward and backward of zeros would communicate, compute and hold."""
    shards = operation.inputs(mesh, *(np.zeros(shape, dtype) for shape in shapes))
    return record(program, mesh, inputs=[(operation, *mine) for mine in shards]).trace


def forward(device, operation, *shards):
    return operation.forward(device, *shards)[0]


# -- layouts and their policies ----------------------------------------------------------------------------------------


def test_the_named_layouts_have_their_policies():
    made = {
        B.unsharded(): (P.UNSHARDED,),
        B.unsharded("dp"): (P.UNSHARDED,),
        B.megatron("tp"): (P.MEGATRON,),
        B.megatron(("tp", "pp"), "dp", whole_keys=True): (P.MEGATRON,),
        B.sequence("tp", ("dp", "pp")): (P.SEQUENCE,),
        B.ring("cp"): (P.RING, P.ULYSSES),
        B.megatron_ring("tp", "cp", "dp"): (P.MEGATRON_RING,),
    }
    for sharding, policies in made.items():
        assert (sharding.policies, sharding.policy) == (policies, policies[0])
        for policy in (None, *policies):
            operation = TransformerBlock(sharding, policy)
            assert operation.policy is (policy or policies[0])
            assert operation.attention.policy.value == operation.policy.value
        assert copy.deepcopy(sharding) == sharding
    assert B.ulysses("cp", "dp") == B.ring("cp", "dp")


def test_the_shapes_of_the_weights_follow_from_heads_and_widths():
    assert PLAIN.shapes((2, 5, 12), 4) == {
        "x": (2, 5, 12), "norm1": (12,), "norm1_bias": (12,), "wq": (12, 4, 3), "wk": (12, 4, 3), "wv": (12, 4, 3),
        "wo": (4, 3, 12), "norm2": (12,), "norm2_bias": (12,), "w1": (12, 48), "b1": (48,), "w2": (48, 12),
        "b2": (12,),
    }
    found = TransformerBlock(B.unsharded(), norm="rms_norm").shapes((2, 5, 7), 4, kv_heads=2, head_dim=3, hidden=9)
    assert list(found) == ["x", "norm1", "wq", "wk", "wv", "wo", "norm2", "w1", "b1", "w2", "b2"]
    assert (found["wk"], found["wo"], found["w2"]) == ((7, 2, 3), (4, 3, 7), (9, 7))
    with pytest.raises(ValueError, match=r"head_dim must be given .* x of shape \(2, 5, 7\) and 4 heads"):
        PLAIN.shapes((2, 5, 7), 4)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "error", "text"),
    [
        (lambda: TransformerBlock("tp"), TypeError, "takes a TransformerBlockSharding, got 'tp'"),
        (lambda: TransformerBlock(B.megatron("tp"), P.RING), ValueError,
         "policy=RING needs layouts of that policy, .* is MEGATRON"),
        (lambda: TransformerBlock(B.ring("cp"), norm="batch_norm"), ValueError,
         "norm is one of layer_norm, rms_norm, got 'batch_norm'"),
        (lambda: TransformerBlock(B.ring("cp"), zigzag=True), ValueError, "zigzag is an order of the rows of causal"),
        (lambda: TransformerBlock(B.ring("cp"), dropout=1.0), ValueError, r"the rate of Dropout must .* got 1\.0"),
        (lambda: TransformerBlock(B.ring("cp"), seed=-1), ValueError, "the seed of Dropout is an integer .* got -1"),
        (lambda: TransformerBlock(B.ring("cp"), rotary_base=0), ValueError, "rotary_base must be above 0, got 0"),
        (lambda: TransformerBlock(B.ring("cp"), activation="swish"), ValueError, "activation is one of .*'swish'"),
        (lambda: replace(B.megatron("tp"), w1=T("tp", None)), ValueError,
         r"the layouts of no TransformerBlockPolicy: with attention MEGATRON w1 is TensorSharding\(None, 'tp'\), got "
         r"TensorSharding\('tp', None\)"),
        (lambda: replace(B.ring("cp"), norm2=T("cp"), b1=T("cp")), ValueError, "norm2 is .*, b1 is "),
        (lambda: replace(B.ring("cp"), w2="cp"), TypeError, "w2 of a TransformerBlockSharding is a TensorSharding"),
        (lambda: replace(B.ring("cp"), b2=T(None, None)), ValueError, "b2 of a TransformerBlockSharding is of 1 dim,"),
        (lambda: replace(B.ring("cp"), wq=T("cp", None, None)), ValueError, "the layouts of no Attention"),
    ],
)
def test_what_is_no_block_is_refused_when_made(made, error, text):
    with pytest.raises(error, match=text):
        made()


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"x": (5, 12)}, r"x is \(batch, sequence, model\), got shape \(5, 12\)"),
        ({"wq": (12, 4, 2)}, "wq and wk must have the same head_dim"),
        ({"wk": (12, 3, 3), "wv": (12, 3, 3)}, "the query heads are a multiple of the key-value heads"),
        ({"wo": (4, 3, 11)},
         r"the last extent of wo is that of x, .* got x of shape \(2, 5, 12\) and wo of \(4, 3, 11\)"),
        ({"w2": (48, 13), "b2": (13,)}, r"the last extent of w2 is that of x, .* w2 of \(48, 13\)"),
        ({"w1": (11, 48)}, "the last extent of x is the first of w1"),
        ({"b1": (12,)}, r"b1 is of shape \(48,\) beside weights of shape \(12, 48\), got \(12,\)"),
        ({"norm1": (1,)}, r"norm1 must have the shape of the last dim of x, \(12,\), got \(1,\)"),
        ({"norm2_bias": (48,)}, r"norm2_bias must have the shape of the last dim of x, \(12,\), got \(48,\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_on_the_host(changed, text):
    shapes = {**PLAIN.shapes((2, 5, 12), 4), **changed}
    for sharding in (B.megatron("x"), B.ring("x")):
        with pytest.raises(ValueError, match=text):
            TransformerBlock(sharding).inputs(Mesh(x=2), *map(np.zeros, shapes.values()))


def test_arguments_heads_steps_and_axes_that_cannot_be_are_refused_on_the_host():
    arrays = [np.zeros(shape) for shape in PLAIN.shapes((2, 5, 12), 4, kv_heads=1).values()]
    with pytest.raises(TypeError, match=r"takes x, norm1, .*, b2 and, if it likes, a step, got 3 arguments"):
        PLAIN.inputs(Mesh(x=2), *arrays[:3])
    with pytest.raises(ValueError, match=r"the step of Dropout is an integer .* got 0\.5"):
        PLAIN.inputs(Mesh(x=2), *arrays, 0.5)
    with pytest.raises(ValueError, match=r"4 query heads and 1 key-value heads cannot be shared over x: .*whole_keys"):
        TransformerBlock(B.sequence("x")).inputs(Mesh(x=2), *arrays)
    with pytest.raises(ValueError, match=r"'x'.*Mesh"):
        TransformerBlock(B.ring("x")).inputs(Mesh(y=2), *arrays)
    with pytest.raises(ValueError, match=r"rotary positions turn pairs of features, got wq .* head_dim of 3"):
        TransformerBlock(B.ring("x"), rotary_base=10.0).inputs(Mesh(x=2), *arrays)
    with pytest.raises(ValueError, match=r"a plan is for the shapes of x, norm1, .* got 1 shapes"):
        PLAIN.plan([(2, 5, 12)], Mesh(x=2))


def test_shards_and_a_gradient_of_other_shapes_are_refused():
    def wrong(device, operation, *shards):
        with pytest.raises(ValueError, match=r"w2 must have the shape of its shard, \(24, 12\) on rank \d, got \(48, 12\)"):
            operation.forward(device, *shards[:-2], np.zeros((48, 12)), shards[-1])
        _, saved = operation.forward(device, *shards)
        with pytest.raises(ValueError, match=r"have the shape of its shard, \(2, 5, 12\) on rank \d, got \(5, 12\)"):
            operation.backward(device, saved, np.zeros((5, 12)))

    operation = TransformerBlock(B.megatron("x"))
    values = [np.zeros(shape) for shape in PLAIN.shapes((2, 5, 12), 4).values()]
    shards = [(operation, *mine[:-1]) for mine in operation.inputs(Mesh(x=2), *values)]
    record(wrong, Mesh(x=2), inputs=shards)


# -- what is planned is what is counted, and its closed forms ----------------------------------------------------------

D, G, BYTES = 2, 3, 8
X = BYTES * 6 * 12 * 18                                 # batch, sequence, model
K = BYTES * 6 * 12 * 3 * 5                              # three key-value heads of 5
Q, HIDDEN = 2 * K, 24
NORMS, HEADS = BYTES * 4 * 18, BYTES * (2 * 18 * 6 * 5 + 2 * 18 * 3 * 5)
FEED_FORWARD = BYTES * (2 * 18 * HIDDEN + HIDDEN)
B2 = BYTES * 18
WEIGHTS = NORMS + HEADS + FEED_FORWARD + B2
REPLICATED = 2 * (D - 1) * (HEADS + FEED_FORWARD + G * (NORMS + B2))
"""Gradients over D of weights that lie over G, and of those that each of G has."""
FORMULAS = {
    "unsharded": (B.unsharded("d"), None, 0, 2 * (D - 1) * WEIGHTS * G),
    "megatron": (B.megatron("g", "d"), None, 4 * (G - 1) * X, 4 * (G - 1) * X + REPLICATED),
    "sequence": (
        B.sequence("g", "d"), None, 4 * (G - 1) * X,
        6 * (G - 1) * X + 2 * (D - 1) * (HEADS + FEED_FORWARD + G * B2) + 2 * (D * G - 1) * NORMS),
    "ring": (B.ring("g", "d"), None, (G - 1) * 2 * K, (G - 1) * 4 * K + 2 * (D * G - 1) * WEIGHTS),
    "ulysses": (B.ring("g", "d"), P.ULYSSES, (G - 1) * (2 * Q + 2 * K) // G,
                (G - 1) * (2 * Q + 2 * K) // G + 2 * (D * G - 1) * WEIGHTS),
    "megatron_ring": (B.megatron_ring("g", "d"), None, (D - 1) * 2 * K + 4 * (G - 1) * X,
                      (D - 1) * 4 * K + 4 * (G - 1) * X + REPLICATED),
}
SHAPES = tuple(PLAIN.shapes((6, 12, 18), 6, kv_heads=3, head_dim=5, hidden=HIDDEN).values())
OVER_G = {                                              # forward and backward, along the axis of the policy
    "unsharded": ([], []),
    "megatron": (["all_reduce"] * 2, ["all_reduce"] * 2),
    "sequence": (["all_gather", "reduce_scatter"] * 2, ["all_gather", "all_gather", "reduce_scatter"] * 2),
    "ring": (["permute"] * (G - 1), ["permute"] * 2 * (G - 1)),
    "ulysses": (["all_to_all"] * 4, ["all_to_all"] * 4),
    "megatron_ring": (["all_reduce"] * 2, ["all_reduce"] * 2),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", FORMULAS)
def test_bytes_and_collectives_of_a_policy_are_its_formula(name):
    sharding, policy, ahead, back = FORMULAS[name]
    operation, mesh = TransformerBlock(sharding, policy), Mesh(d=D, g=G)
    plan = operation.plan(SHAPES, mesh)
    assert (sum(plan.bytes_received), sum(plan.backward_bytes_received)) == (ahead, back)
    traces = [recorded(operation, mesh, SHAPES, program) for program in (forward, step)]
    assert [trace.bytes_received() for trace in traces] == [ahead, ahead + back]
    for trace, expected in zip(traces, (OVER_G[name][0], [*OVER_G[name][0], *OVER_G[name][1]]), strict=True):
        over_g = [event.name for event in trace.filter(kind="collective", rank=0) if event.axes == ("g",)]
        assert sorted(over_g) == sorted(expected)
    moves = (*plan.forward_moves, *plan.backward_moves)
    ran = [(event.name, event.axes) for event in traces[1].filter(kind="collective", rank=0)]
    assert sorted(ran) == sorted((move.kind, move.axes) for move in moves for _ in range(move.times))


def test_a_block_over_one_axis_moves_activations_only():
    """Megatron: two all_reduces forward and two backward, of the size of x; nothing else."""
    shapes = PLAIN.shapes((1, 8, 12), 4).values()
    trace = recorded(TransformerBlock(B.megatron("tp")), Mesh(tp=4), shapes)
    for event in trace.filter(kind="collective"):
        assert (event.name, event.bytes_received) == ("all_reduce", 2 * 3 * 8 * 12 * BYTES // 4)
    assert trace.count("all_reduce") == 4


def test_a_plan_tells_what_runs():
    plan = TransformerBlock(B.sequence("tp"), norm="rms_norm").plan(
        TransformerBlock(B.unsharded(), norm="rms_norm").shapes((1, 8, 12), 4).values(), Mesh(tp=2))
    assert str(plan).splitlines() == [
        "a block of x[1, 8, 12], 4 heads on Mesh(tp=2): sequence",
        "  forward",
        "    attention: x     1 all_gather      over tp  768 bytes",
        "    attention: y     1 reduce_scatter  over tp  768 bytes",
        "    feed-forward: x  1 all_gather      over tp  768 bytes",
        "    feed-forward: y  1 reduce_scatter  over tp  768 bytes",
        "  backward",
        "    feed-forward: gradient of y  1 all_gather      over tp  768 bytes",
        "    feed-forward: gradient of x  1 reduce_scatter  over tp  768 bytes",
        "    feed-forward: x              1 all_gather      over tp  768 bytes",
        "    norm 2: weight's gradient    1 all_reduce      over tp  192 bytes",
        "    attention: gradient of y     1 all_gather      over tp  768 bytes",
        "    attention: x, once more      1 all_gather      over tp  768 bytes",
        "    attention: gradient of x     1 reduce_scatter  over tp  768 bytes",
        "    norm 1: weight's gradient    1 all_reduce      over tp  192 bytes",
        "  in all 3072 bytes forward, 4992 backward",
    ]


# -- memory and balance ------------------------------------------------------------------------------------------------

T_, C_ = 2, 2
KEPT = {                    # norm; x, queries, attended; mask; norm; x and hidden, before and after; mask: in s b h
    "unsharded": (B.unsharded(), None, [2, 2, 2, 2, 1, 2, 18, 1], 4, 34),
    "megatron": (B.megatron("t"), None, [2, 2, 2 / T_, 2 / T_, 1, 2, 2 + 16 / T_, 1], 4 / T_, 10 + 24 / T_),
    "sequence": (B.sequence("t"), None, [n / T_ for n in (2, 2, 2, 2, 1, 2, 18, 1)], 4 / T_, 34 / T_),
    "ring": (B.ring("t"), None, [n / T_ for n in (2, 2, 2, 2, 1, 2, 18, 1)], 4 / T_, 34 / T_),
    "ulysses": (B.ring("t"), P.ULYSSES, [n / T_ for n in (2, 2, 2, 4, 1, 2, 18, 1)], 4 / T_, 36 / T_),
    "megatron_ring": (
        B.megatron_ring("t", "c"), None,
        [n / C_ for n in (2, 2, 2 / T_, 2 / T_, 1, 2, 2 + 16 / T_, 1)], 4 / T_ / C_, (10 + 24 / T_) / C_),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", KEPT)
def test_activation_memory_is_the_published_formula_term_by_term(name):
    """Korthikanti et al., 2022, section 4.1, table 2: in elements of two bytes 34 s b h bytes a layer (and 5 a s^2 b of
    scores, not kept here), with tensor parallelism 10 + 24/t, with sequence parallelism 34/t."""
    sharding, policy, activations, keys, whole = KEPT[name]
    s, b, h, heads = 8, 2, 12, 4
    mesh = Mesh(t=T_, c=C_) if name == "megatron_ring" else Mesh(t=T_)
    operation = TransformerBlock(sharding, policy, dropout=0.1)
    trace = recorded(operation, mesh, PLAIN.shapes((b, s, h), heads).values(), forward, np.float16)
    for rank in range(mesh.size):
        held = trace.filter(kind="memory", rank=rank)
        assert [event.nbytes for event in held if event.name == "activations"] == [n * s * b * h for n in activations]
        of_keys = sum(event.nbytes for event in held if event.name == "keys and values")
        assert of_keys == keys * s * b * h
        assert sum(activations) + keys == whole
        passing = sum(event.nbytes for event in held if event.name in ("scores", "gathered"))
        assert passing == 0
        rows = b * s if name in ("unsharded", "megatron") else b * s // (C_ if name == "megatron_ring" else T_)
        assert sum(event.nbytes for event in held if event.name == "statistics") == 2 * 2 * rows
    back = recorded(operation, mesh, PLAIN.shapes((b, s, h), heads).values(), step, np.float16)
    assert sum(event.nbytes for event in back.filter(kind="memory")) == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("zigzag", [False, True])
def test_a_ring_of_eight_holds_two_blocks_and_zigzag_balances_its_work_within_one(zigzag):
    operation = TransformerBlock(B.ring("cp"), causal=True, zigzag=zigzag, rotary_base=10000.0)
    shapes = PLAIN.shapes((1, 67, 8), 2, kv_heads=1).values()
    trace = recorded(operation, Mesh(cp=8), shapes)
    block = 2 * 9 * 4 * BYTES                           # keys and values of nine rows
    assert max(trace.peaks("keys and values").values()) == 2 * block
    flops = [trace.filter(name="attention").flops(rank) for rank in range(8)]
    assert (max(flops) - min(flops) <= 4 * 2 * 9 * 9 * 4) == zigzag
