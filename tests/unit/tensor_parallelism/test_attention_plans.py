"""`Attention` as values: which policy layouts are, what is planned, counted and refused.  No device is started."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from parallelism import Mesh, TensorSharding
from parallelism.recorder import record
from tensor_parallelism import Attention, AttentionSharding, AttentionShardingPolicy

T, A, P = TensorSharding, AttentionSharding, AttentionShardingPolicy


def shapes_of(batch=3, sequence=13, model=7, heads=6, kv_heads=3, head_dim=4, outputs=5):
    keys = (model, kv_heads, head_dim)
    return (batch, sequence, model), (model, heads, head_dim), keys, keys, (heads, head_dim, outputs)


def step(device, operation, *shards):
    out, saved = operation.forward(device, *shards)
    return operation.backward(device, saved, np.ones_like(out))


def recorded(operation, mesh, program=None, **extents):
    """What forward and backward of zeros would communicate, compute and hold."""
    shards = operation.inputs(mesh, *map(np.zeros, shapes_of(**extents)))
    if program is None:
        return record(operation, mesh, inputs=shards).trace
    return record(program, mesh, inputs=[(operation, *mine) for mine in shards]).trace


def by_rank(trace, what, size):
    """The sum over the events of each rank."""
    found = [0] * size
    for event in trace:
        found[event.rank] += getattr(event, what)
    return found


# -- layouts and their policies ----------------------------------------------------------------------------------------


def test_the_named_layouts_have_their_policies():
    made = {
        A.unsharded(): (P.UNSHARDED,),
        A.unsharded("dp"): (P.UNSHARDED,),
        A.megatron("tp"): (P.MEGATRON,),
        A.megatron(("tp", "pp"), "dp", whole_keys=True): (P.MEGATRON,),
        A.sequence("tp", ("dp", "pp")): (P.SEQUENCE,),
        A.ring("cp"): (P.RING, P.ULYSSES),
        A.megatron_ring("tp", "cp", "dp"): (P.MEGATRON_RING,),
    }
    for sharding, policies in made.items():
        assert (sharding.policies, sharding.policy) == (policies, policies[0])
        assert [Attention(sharding, policy).policy for policy in (None, *policies)] == [policies[0], *policies]
        assert copy.deepcopy(sharding) == sharding


def test_a_layout_is_the_same_with_its_dims_written_out():
    short = A(T("dp", ...), T(...), T(...), T(...), T(...), T("dp", None, None))
    assert short == A.unsharded("dp")
    assert hash(short) == hash(A.unsharded("dp"))


WHOLE, ROWS = T(None, None, None), T(None, "x", None)


@pytest.mark.parametrize(
    ("made", "kind", "text"),
    [
        (lambda: A("x", WHOLE, WHOLE, WHOLE, WHOLE, WHOLE), TypeError,
         "x of an AttentionSharding is a TensorSharding, got 'x'"),
        (lambda: A(WHOLE, WHOLE, T(None, None), WHOLE, WHOLE, WHOLE), ValueError,
         r"wk of an AttentionSharding is of 3 dims, got TensorSharding\(None, None\)"),
        (lambda: A(ROWS, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE), ValueError,
         "no AttentionShardingPolicy: .*out=.*; x is split along batch and sequence, out as x"),
        (lambda: A(T(None, None, "x"), *[WHOLE] * 4, T(None, None, "x")), ValueError, "no AttentionShardingPolicy"),
        (lambda: A(WHOLE, ROWS, T(None, "y", None), T(None, "y", None), T("x", None, None), WHOLE), ValueError,
         "no AttentionShardingPolicy"),
        (lambda: A(WHOLE, ROWS, ROWS, WHOLE, T("x", None, None), WHOLE), ValueError, "no AttentionShardingPolicy"),
        (lambda: A(*[T(None, None, None, partial="x")] * 6), ValueError, "no AttentionShardingPolicy"),
        (lambda: A.megatron("x", batch="x"), ValueError, "no AttentionShardingPolicy"),
        (lambda: A.megatron_ring(("x", "y"), "y"), ValueError, "the heads by the same axes or by different ones"),
        (lambda: Attention(WHOLE), TypeError, "Attention takes an AttentionSharding, got TensorSharding"),
        (lambda: Attention(A.ring("x"), P.MEGATRON), ValueError,
         "policy=MEGATRON needs layouts of that policy, .* is RING or ULYSSES"),
        (lambda: Attention(A.ring("x"), P.ULYSSES, causal=True, zigzag=True), ValueError,
         "zigzag is an order of the rows of causal ring attention, got policy=ULYSSES and causal=True"),
        (lambda: Attention(A.ring("x"), zigzag=True), ValueError, "got policy=RING and causal=False"),
    ],
)
def test_a_description_that_cannot_be_is_refused_when_it_is_made(made, kind, text):
    with pytest.raises(kind, match=text):
        made()


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({0: (3, 13)}, r"x is \(batch, sequence, model\), got shape \(3, 13\)"),
        ({4: (24, 5)}, r"wo is \(heads, head_dim, model\), got shape \(24, 5\)"),
        ({1: (8, 6, 4)}, r"the last extent of x is the first of wq, got x of shape \(3, 13, 7\) and wq of \(8, 6, 4\)"),
        ({3: (7, 3, 5)}, r"wv is of the shape of wk, \(7, 3, 4\), got \(7, 3, 5\)"),
        ({1: (7, 6, 5), 4: (6, 5, 5)}, r"the same head_dim, got wq of shape \(7, 6, 5\) and wk of \(7, 3, 4\)"),
        ({4: (5, 4, 5)}, r"of the heads of wq, got wq of shape \(7, 6, 4\) and wo of \(5, 4, 5\)"),
        ({1: (7, 4, 4), 4: (4, 4, 5)}, r"a multiple of the key-value heads, got wq .* with 4 heads and wk .* with 3"),
        ({2: (7, 0, 4), 3: (7, 0, 4)}, r"a multiple of the key-value heads, .* 6 heads and wk .* with 0"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_on_the_host(changed, text):
    arrays = [np.zeros(changed.get(i, shape)) for i, shape in enumerate(shapes_of())]
    with pytest.raises(ValueError, match=text):
        Attention(A.unsharded()).inputs(Mesh(x=2), *arrays)


def test_an_axis_that_the_mesh_has_not_is_refused_on_the_host():
    arrays = list(map(np.zeros, shapes_of()))
    with pytest.raises(ValueError, match=r"x of shape \(3, 13, 7\) and x=TensorSharding\(None, 'cp', None\): .*'cp'"):
        Attention(A.ring("cp")).inputs(Mesh(x=2), *arrays)
    with pytest.raises(TypeError, match="Attention takes x, wq, wk, wv, wo, got 4 arrays"):
        Attention(A.ring("x")).inputs(Mesh(x=2), *arrays[:4])
    with pytest.raises(TypeError, match="attention is of real numbers, got arrays whose common dtype is complex128"):
        Attention(A.ring("x")).inputs(Mesh(x=2), *arrays[:4], arrays[4] * 1j)
    with pytest.raises(ValueError, match="a plan is for the shapes of x, wq, wk, wv, wo, got 4 shapes"):
        Attention(A.ring("x")).plan(shapes_of()[:4], Mesh(x=2))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "text"),
    [
        (6, 3, "6 query heads and 3 key-value heads cannot be shared over x: rank 2 has query heads 3 to 5, which "
               "attend with key-value heads 1 to 2, and key-value head 2; whole_keys=True lays wk and wv whole"),
        (4, 1, "rank 2 has query heads 2 to 3, which attend with key-value head 0, and no key-value head;"),
    ],
)
def test_heads_that_cannot_be_shared_are_refused_on_the_host(heads, kv_heads, text):
    shapes = shapes_of(heads=heads, kv_heads=kv_heads)
    for sharding in (A.megatron("x"), A.sequence("x"), A.megatron_ring("x", "y")):
        with pytest.raises(ValueError, match=text):
            Attention(sharding).plan(shapes, Mesh(x=2, y=2))
    for sharding in (A.megatron("x", whole_keys=True), A.ring("x")):
        assert Attention(sharding).plan(shapes, Mesh(x=2, y=2))


def test_a_gradient_of_another_shape_and_a_second_backward_of_a_ring_are_refused():
    def wrong(device, operation, *shards):
        out, saved = operation.forward(device, *shards)
        with pytest.raises(ValueError, match=r"have the shape of its shard, \(3, \d, 5\) on rank \d, got \(3, 9, 5\)"):
            operation.backward(device, saved, np.zeros((3, 9, 5)))
        operation.backward(device, saved, out)
        if operation.policy is P.RING:
            with pytest.raises(ValueError, match="once for each forward: the keys and values that were saved"):
                operation.backward(device, saved, out)
        else:
            operation.backward(device, saved, out)

    for policy in (P.RING, P.ULYSSES):
        recorded(Attention(A.ring("x"), policy), Mesh(x=2), wrong)


# -- what is planned is what is counted --------------------------------------------------------------------------------

OPERATIONS = {
    "unsharded": (A.unsharded(), None, {}),
    "a batch": (A.unsharded("x"), None, {}),
    "megatron": (A.megatron("y"), None, {}),
    "megatron of a batch": (A.megatron("y", "x"), None, {"causal": True}),
    "megatron, whole keys": (A.megatron(("x", "y"), whole_keys=True), None, {}),
    "sequence": (A.sequence("y", "x"), None, {}),
    "ring": (A.ring(("y", "x")), None, {"causal": True}),
    "ring of a batch, zigzag": (A.ring("x", "y"), None, {"causal": True, "zigzag": True}),
    "ulysses": (A.ring(("x", "y")), P.ULYSSES, {}),
    "ulysses of a batch": (A.ring("y", "x"), P.ULYSSES, {"causal": True}),
    "megatron ring": (A.megatron_ring("y", "x"), None, {"causal": True, "zigzag": True}),
    "megatron ring, whole keys": (A.megatron_ring("x", "y", whole_keys=True), None, {"causal": True}),
}
EXTENTS = {
    "what does not divide": {},
    "ones": {"batch": 1, "sequence": 1, "model": 1, "heads": 3, "kv_heads": 3, "head_dim": 1, "outputs": 1},
    "empty shards": {"batch": 1, "sequence": 4, "heads": 3, "kv_heads": 3, "head_dim": 2},
}


@pytest.mark.sampled(26)
@pytest.mark.parametrize("extents", EXTENTS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_collectives_bytes_flops_and_memory_are_those_of_the_plan(name, extents):
    sharding, policy, options = OPERATIONS[name]
    operation, mesh = Attention(sharding, policy, **options), Mesh(x=2, y=3)
    plan = operation.plan(shapes_of(**EXTENTS[extents]), mesh)
    trace = recorded(operation, mesh, step, **EXTENTS[extents])
    expected = zip(plan.bytes_received, plan.backward_bytes_received, strict=True)
    assert [trace.bytes_received(rank) for rank in range(mesh.size)] == [sum(both) for both in expected]
    if extents == "what does not divide":
        forward = recorded(operation, mesh, **EXTENTS[extents])
        assert [forward.bytes_received(rank) for rank in range(mesh.size)] == list(plan.bytes_received)
    assert by_rank(trace.filter(kind="memory"), "nbytes", mesh.size) == [0] * mesh.size     # all is given back
    assert by_rank(trace.filter(name="attention"), "flops", mesh.size) == list(plan.flops)
    assert by_rank(trace.filter(name="attention_backward"), "flops", mesh.size) == list(plan.backward_flops)
    ran = [(event.name, event.axes) for event in trace.filter(kind="collective", rank=0)]
    moves = (*plan.forward_moves, *plan.backward_moves)
    assert sorted(ran) == sorted((move.kind, move.axes) for move in moves for _ in range(move.times))


def test_a_plan_tells_what_runs():
    operation = Attention(A.megatron_ring("tp", "cp"), causal=True, zigzag=True)
    plan = operation.plan(shapes_of(batch=2, sequence=8, model=6, heads=4, kv_heads=2, head_dim=3, outputs=6),
                          Mesh(cp=2, tp=2))
    assert str(plan).splitlines() == [
        "attention of x[2, 8, 6], 4 heads of 3 by 2 key-value heads, causal in zigzag order, on Mesh(cp=2, tp=2): "
        "megatron_ring",
        "  forward",
        "    keys and values  1 permute     over cp  1536 bytes",
        "    y                1 all_reduce  over tp  1536 bytes",
        "  backward",
        "    gradient of wo   1 all_reduce  over cp  1152 bytes",
        "    keys and values  1 permute     over cp  1536 bytes",
        "    their gradients  1 permute     over cp  1536 bytes",
        "    gradient of wq   1 all_reduce  over cp  1152 bytes",
        "    gradient of wk   1 all_reduce  over cp  576 bytes",
        "    gradient of wv   1 all_reduce  over cp  576 bytes",
        "    gradient of x    1 all_reduce  over tp  1536 bytes",
        "  in all 3072 bytes forward, 8064 backward; 3840 and 9600 flops while they attend",
    ]
    assert "nothing moves" in str(Attention(A.unsharded()).plan(shapes_of(), Mesh(x=2)))


def test_the_places_of_rows_are_known_to_each_rank():
    mesh = Mesh(tp=2, cp=2)
    zigzag = Attention(A.megatron_ring("tp", "cp"), causal=True, zigzag=True).plan(
        shapes_of(sequence=7, heads=4, kv_heads=2), mesh)
    assert [zigzag.rows(rank).tolist() for rank in range(4)] == [[0, 1, 5, 6], [2, 3, 4]] * 2
    sequence = Attention(A.sequence("cp")).plan(shapes_of(heads=4, kv_heads=2), mesh)
    assert sequence.rows(1).tolist() == list(range(13))                                  # gathered, when they are used


# -- the closed forms, for extents that divide -------------------------------------------------------------------------

D, G, BYTES = 2, 3, 8
EVEN = {"batch": 6, "sequence": 12, "model": 9, "heads": 6, "kv_heads": 3, "head_dim": 5, "outputs": 7}
X, Y = (BYTES * 6 * 12 * n for n in (9, 7))
Q, K = (BYTES * 6 * 12 * n * 5 for n in (6, 3))
WEIGHTS = BYTES * (9 * 6 * 5 + 2 * 9 * 3 * 5 + 6 * 5 * 7)
OVER_BATCH, OVER_ROWS = 2 * (D - 1) * WEIGHTS, 2 * (D * G - 1) * WEIGHTS
FORMULAS = {
    P.UNSHARDED: (A.unsharded("dp"), 0, OVER_BATCH * G),        # replicas of the batch's devices, G times
    P.MEGATRON: (A.megatron("g", "dp"), 2 * (G - 1) * Y, 2 * (G - 1) * X + OVER_BATCH),
    P.SEQUENCE: (A.sequence("g", "dp"), (G - 1) * (X + Y), (G - 1) * (Y + X + X) + OVER_BATCH),
    P.RING: (A.ring("g", "dp"), (G - 1) * 2 * K, (G - 1) * 4 * K + OVER_ROWS),
    P.ULYSSES: (A.ring("g", "dp"), (G - 1) * (2 * Q + 2 * K) // G, (G - 1) * (2 * Q + 2 * K) // G + OVER_ROWS),
    P.MEGATRON_RING: (
        A.megatron_ring("g", "dp"), (D - 1) * 2 * K + 2 * (G - 1) * Y,
        (D - 1) * 4 * K + 2 * (G - 1) * X + OVER_BATCH,
    ),
}


@pytest.mark.parametrize("policy", P)
def test_the_bytes_of_a_policy_are_its_formula(policy):
    sharding, forward, backward = FORMULAS[policy]
    plan = Attention(sharding, policy).plan(shapes_of(**EVEN), Mesh(dp=D, g=G))
    assert sum(plan.bytes_received) == forward
    assert sum(plan.backward_bytes_received) == backward
    if policy in (P.RING, P.ULYSSES):
        assert len(set(plan.bytes_received)) == 1


# -- memory and balance ------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("zigzag", [False, True])
def test_a_ring_of_eight_never_holds_more_than_two_blocks_of_keys_and_values(zigzag):
    extents = {"batch": 2, "sequence": 43, "heads": 4, "kv_heads": 2, "head_dim": 3}
    operation, mesh = Attention(A.ring("cp"), causal=True, zigzag=zigzag), Mesh(cp=8)
    trace = recorded(operation, mesh, step, **extents)
    block = 2 * 8 * 2 * 6 * 2 * 3                       # keys and values, float64, of 6 of the rows
    for rank in range(8):
        assert 0 < trace.peak_bytes(rank, "keys and values") <= 2 * block
        assert trace.peak_bytes(rank, "gradients of keys and values") <= 2 * block
    assert max(trace.peaks("keys and values").values()) == 2 * block
    whole = recorded(Attention(A.ring("cp"), P.ULYSSES, causal=True), mesh, step, **extents)
    assert max(whole.peaks("scores").values()) > 4 * max(trace.peaks("scores").values())


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("sequence", [64, 61])
def test_causal_work_in_zigzag_order_is_balanced_within_one_block(sequence):
    extents = {"batch": 1, "sequence": sequence, "heads": 2, "kv_heads": 1, "head_dim": 3}
    block = 4 * 1 * 2 * 8 * 8 * 3                       # flops of 8 rows with 8 columns
    spread = {}
    for zigzag in (True, False):
        trace = recorded(Attention(A.ring("cp"), causal=True, zigzag=zigzag), Mesh(cp=8), step, **extents)
        flops = by_rank(trace.filter(name="attention"), "flops", 8)
        spread[zigzag] = max(flops) - min(flops)
    assert spread[True] <= (0 if sequence == 64 else block)
    assert spread[False] >= 5 * block


def test_activation_memory_is_the_published_formula():
    """Korthikanti et al., 2022, section 4.1 and table 2: 10 s b h bytes of the attention block, in two-byte elements,
    without its dropout and the scores, and with tensor parallelism 2 + 8/t, with sequence parallelism 10/t."""
    s, b, h, t = 8, 2, 12, 2
    extents = {"batch": b, "sequence": s, "model": h, "heads": 4, "kv_heads": 4, "head_dim": 3, "outputs": h}
    shares = {
        A.unsharded(): 10 * s * b * h, A.megatron("x"): (2 + 8 / t) * s * b * h, A.sequence("x"): 10 * s * b * h / t,
        A.ring("x"): 10 * s * b * h / t,
    }
    for sharding, expected in shares.items():
        def kept(device, operation, *shards):
            return operation.forward(device, *(shard.astype(np.float32) for shard in shards))[0]

        trace = recorded(Attention(sharding), Mesh(x=t), kept, **extents)
        for rank in range(t):
            held = trace.filter(kind="memory", rank=rank)
            now = sum(event.nbytes for event in held if event.name in ("activations", "keys and values"))
            assert now == 2 * expected                  # of four bytes here
