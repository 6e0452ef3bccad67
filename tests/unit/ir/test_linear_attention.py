"""Linear attention is the loop over tokens, whatever the chunk; and its kernels compute and move what is counted."""

from __future__ import annotations

import numpy as np
import pytest
from drawn import up_to
from hypothesis import given, strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from parallelism import ir
from parallelism.ir.core.extents import specialized
from parallelism.ir.passes.donation import owners
from parallelism.kernels.linear_attention import short_convolution


def by_tokens(q, k, v, g, beta, *, delta, unit, scale, **_):
    """The recurrence, token by token and head by head."""
    batch, tokens, heads, _ = v.shape
    out = np.zeros(v.shape)
    for b in range(batch):
        for h in range(heads):
            group, state = h // (heads // k.shape[2]), np.zeros((k.shape[3], v.shape[3]))
            for t in range(tokens):
                key, query = k[b, t, group], q[b, t, group]
                if unit:
                    key, query = (x / np.sqrt((x * x).sum() + 1e-6) for x in (key, query))
                state = state * np.exp(g[b, t, h])
                lost = key @ state if delta else 0
                state = state + beta[b, t, h] * np.outer(key, v[b, t, h] - lost)
                out[b, t, h] = scale * query @ state
    return out


def arrays_of(batch, tokens, groups, served, width, values, seed=0):
    rng = np.random.default_rng(seed)
    heads = (batch, tokens, groups * served)
    q, k = rng.standard_normal((2, batch, tokens, groups, width))
    return q, k, rng.standard_normal((*heads, values)), -rng.random(heads), rng.random(heads)


@up_to(12)
@given(st.tuples(*[st.integers(1, 2), st.integers(1, 9), *[st.integers(1, 3)] * 4]), st.integers(1, 10), st.booleans(),
       st.booleans(), st.integers(0, 9))
def test_it_is_the_loop_over_tokens(sizes, chunk, delta, unit, seed):
    arrays, how = arrays_of(*sizes, seed=seed), {"chunk": chunk, "delta": delta, "unit": unit, "scale": 0.5}
    assert_allclose(ir.apply("linear_attention", *arrays, **how), by_tokens(*arrays, **how), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("decay", [-60.0, -800.0])
def test_states_that_are_forgotten_at_once_overflow_nothing(decay):
    """Powers of differences only: exp(800) is none of them."""
    q, k, v, g, beta = arrays_of(1, 6, 1, 1, 2, 3)
    arrays, how = (q, k, v, g + decay, beta), {"chunk": 3, "unit": False, "scale": 1.0}
    for delta in (False, True):
        found = ir.apply("linear_attention", *arrays, delta=delta, **how)
        own = (q * k).sum(axis=-1)[..., None] * beta[..., None] * v
        assert_allclose(found, own, atol=1e-12)
        function = ir.record(lambda *x, delta=delta: np.sum(ir.apply("linear_attention", *x, delta=delta, **how)),
                             *(ir.TensorType(x.dtype, x.shape) for x in arrays))
        assert all(np.isfinite(x).all() for x in ir.interpret(ir.gradient(function), arrays).outputs)


def test_the_convolution_sees_the_last_tokens_alone():
    x = np.arange(12.0).reshape(1, 6, 2)
    weight = np.array([[1.0, 0.0, 100.0], [0.0, 10.0, 0.0]])
    summed = np.zeros((1, 6, 2))
    for t in range(6):
        for tap in range(3):
            if t - 2 + tap >= 0:
                summed[0, t] += weight[:, tap] * x[0, t - 2 + tap]
    assert_allclose(short_convolution(x, weight), summed / (1 + np.exp(-summed)))
    assert_allclose(short_convolution(x[:, :1], weight), (weight[:, -1] * x[:, :1]) / (1 + np.exp(-weight[:, -1] * x[:, :1])))


def test_plain_sums_have_no_activation():
    rng = np.random.default_rng(3)
    x, weight, bias = (rng.normal(size=shape) for shape in ((2, 5, 3), (3, 2), (3,)))
    sums = x * weight[:, 1] + bias
    sums[:, 1:] += x[:, :-1] * weight[:, 0]
    assert_allclose(ir.apply("short_convolution", x, weight, bias, plain=True), sums, rtol=1e-12)
    assert_allclose(ir.apply("short_convolution", x, weight, bias), sums / (1 + np.exp(-sums)), rtol=1e-12)
    types = [ir.TensorType("f64", each.shape) for each in (x, weight, bias)]
    plain, silu = (ir.record(lambda *x, how=how: ir.apply("short_convolution", *x, **how), *types).ops[0].flops
                   for how in ({"plain": True}, {}))
    assert (plain, silu) == (4 * 30, 9 * 30)


def op_of(kind="linear_attention", sizes=(2, 512, 2, 4, 16, 8), dtype="bf16", **how):
    batch, tokens, groups, served, width, values = sizes
    keys, heads = (batch, tokens, groups, width), (batch, tokens, groups * served)
    shapes = [keys, keys, (*heads, values), heads, heads]
    shapes = [shapes[2], *shapes] if kind.endswith("gradient") else shapes
    how = {"chunk": 64, "delta": False, "unit": False, "scale": 1.0} | how
    types = [ir.TensorType(dtype if len(shape) == 4 else "f32", shape) for shape in shapes]
    return ir.record(lambda *x: ir.apply(kind, *x, **how), *types).ops[0]


def test_the_flops_are_those_of_the_products_inside_chunks_and_with_states():
    """Of a chunk of c tokens (c + 1) c / 2 scores: of each group without the delta rule, of each head with it."""
    tokens, groups, heads, n, p, pairs, chunk = 1024, 2, 8, 16, 8, 65 / 2, {"chunk": 64}
    found = op_of(**chunk).flops
    assert found == 2 * tokens * (pairs * (groups * n + heads * p) + 2 * heads * n * p)
    found = op_of(delta=True, **chunk).flops
    assert found == 2 * tokens * heads * (pairs * (3 * n + 2 * p) + 3 * n * p)
    assert op_of("linear_attention_gradient").flops == 2 * tokens * (pairs * (3 * groups * n + 3 * heads * p)
                                                                     + 5 * heads * n * p)
    short = op_of(sizes=(2, 3, 2, 4, 16, 8))
    assert short.flops == 2 * 6 * (2 * (2 * n + heads * p) + 2 * heads * n * p)


def test_the_bytes_are_those_of_the_kernels():
    tokens, groups, heads, n, p = 1024, 2, 8, 16, 8
    keys, values, numbers = 2 * tokens * groups * n, 2 * tokens * heads * p, 4 * tokens * heads
    states, scores = tokens // 64 * heads * n * p, 64 * tokens
    assert op_of().nbytes == 4 * keys + 3 * values + 7 * numbers + (2 * 4 + 2 * 2) * states + 2 * 4 * scores * groups
    # of heads with the delta rule, which has a key of its own for each head in memory
    assert op_of(delta=True).nbytes == (9 * keys + 6 * values + 2 * 2 * tokens * heads * n + 8 * numbers + 2 * 2 * states
                                        + 3 * 2 * scores * heads)
    gradient = op_of("linear_attention_gradient").nbytes
    assert gradient == (27 * keys + 11 * values + 42 * numbers + (6 * 4 + 5 * 2) * states + 8 * 4 * scores * groups)
    gradient = op_of("linear_attention_gradient", delta=True).nbytes
    assert gradient == (21 * keys + 15 * values + 13 * 2 * tokens * heads * n + 20 * numbers + 4 * 2 * states
                        + 2 * 2 * scores * heads)


def test_with_symbols_they_are_those_of_the_numbers():
    batch, tokens = ir.symbols("B S")
    for delta in (False, True):
        symbolic, number = (op_of(sizes=(b, s, 2, 4, 16, 8), delta=delta) for b, s in ((batch, tokens), (3, 100)))
        given = {"B": 3, "S": 100}
        assert specialized(symbolic.flops, given) == number.flops
        assert specialized(symbolic.nbytes, given) == number.nbytes


def test_the_gradient_keeps_the_inputs_alone():
    function = ir.record(lambda *x: np.sum(ir.apply("linear_attention", *x, chunk=2, delta=True, unit=True, scale=1.0)),
                         *(ir.TensorType("f64", x.shape) for x in arrays_of(1, 4, 1, 2, 3, 2)))
    (op,) = [op for op in ir.gradient(function).ops if op.kind == "linear_attention_gradient"]
    assert_array_equal([value.name for value in op.inputs[1:]], [value.name for value in function.inputs])


@pytest.mark.parametrize("delta", [False, True])
def test_decays_of_features_are_those_of_heads_where_they_are_equal(delta):
    q, k, v, g, beta = arrays_of(2, 7, 2, 2, 3, 4)
    how = {"chunk": 3, "delta": delta, "unit": True, "scale": 0.5}
    wide = np.repeat(g[..., None], 3, axis=3)
    assert_allclose(ir.apply("linear_attention", q, k, v, wide, beta, **how),
                    ir.apply("linear_attention", q, k, v, g, beta, **how), rtol=1e-9)
    grad = np.random.default_rng(8).normal(size=v.shape)
    *same, of_wide, of_beta = ir.apply("linear_attention_gradient", grad, q, k, v, wide, beta, **how)
    *others, of_g, of_other = ir.apply("linear_attention_gradient", grad, q, k, v, g, beta, **how)
    for found, expected in zip((*same, of_wide.sum(axis=3), of_beta), (*others, of_g, of_other), strict=True):
        assert_allclose(found, expected, rtol=1e-8, atol=1e-12)


def test_decays_of_features_forget_each_feature_by_itself():
    q, k, v, _, beta = arrays_of(1, 6, 1, 2, 3, 4)
    g = -np.random.default_rng(4).random((1, 6, 2, 3))
    states, out = np.zeros((1, 2, 3, 4)), np.zeros(v.shape)
    for t in range(6):
        keys, queries = (np.repeat(x[:, t], 2, axis=1) for x in (k, q))
        states = np.exp(g[:, t])[..., None] * states
        lost = np.einsum("bhn,bhnp->bhp", keys, states)
        states = states + np.einsum("bh,bhn,bhp->bhnp", beta[:, t], keys, v[:, t] - lost)
        out[:, t] = np.einsum("bhn,bhnp->bhp", queries, states)
    how = {"chunk": 4, "delta": True, "unit": False, "scale": 1.0}
    assert_allclose(ir.apply("linear_attention", q, k, v, g, beta, **how), out, rtol=1e-9)


def test_the_bytes_with_decays_of_features_are_those_of_the_kernels():
    """fla/ops/kda: a decay of each feature is read in float32, 6 times forward."""
    tokens, heads, n, p = 2 * 512, 8, 16, 8
    keys = [(2, 512, heads, n)] * 2 + [(2, 512, heads, p)]
    for kind, passes in (("linear_attention", (10 + 4, 6, 3, 6, 2, 1, 5)),
                         ("linear_attention_gradient", (12 + 8, 15, 8, 14, 4, 4, 3))):
        shapes = [*keys, (2, 512, heads, n), (2, 512, heads)]
        shapes = [keys[2], *shapes] if kind.endswith("gradient") else shapes
        types = [ir.TensorType("f32" if i >= len(shapes) - 2 else "bf16", shape) for i, shape in enumerate(shapes)]
        how = {"chunk": 64, "delta": True, "unit": True, "scale": 1.0}
        op = ir.record(lambda *x, kind=kind, how=how: ir.apply(kind, *x, **how), *types).ops[0]
        of_keys, values, numbers, decays, states, wide, narrow = passes
        assert op.nbytes == tokens * heads * (2 * of_keys * n + 2 * values * p + 4 * numbers + 4 * decays * n) + (
            2 * states * heads * n * p * tokens // 64) + 64 * tokens * heads * (4 * wide + 2 * narrow)


# -- states in slots ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [False, True])
def test_steps_that_go_on_from_states_read_what_whole_sequences_do(delta):
    """Two sequences in steps of 3, 0 and 1 tokens, and 2 and 4: beside them places for tokens that are none."""
    how = {"chunk": 2, "delta": delta, "unit": delta, "scale": 0.5}
    given = arrays_of(2, 7, 2, 2, 3, 4)
    whole = ir.apply("linear_attention", *given, **how)
    weight, bias, x = (np.random.default_rng(5).normal(size=shape) for shape in ((4, 5, 3), (4, 5), (2, 7, 4, 5)))
    convolved = short_convolution(x, weight, bias)
    states, last = np.full((1, 3, 4, 3, 4), np.nan), np.full((1, 3, 2, 4, 5), np.nan)
    at, slots = [0, 0], (2, 0)
    for counts in ((3, 2), (0, 1), (1, 4), (3, 0)):
        rows = [(s, at[s] + n) for s in (0, 1) for n in range(counts[s])]
        of, places = (np.array(each) for each in zip(*rows, (0, -1), strict=True))
        where = np.where(places < 0, -1, places)[None], np.array(slots)[of][None, :, None]
        own = [array[of, places][None] for array in given]
        states, read = ir.apply("cached_linear_attention", states, *own, *where, **how, read=2, scored=1)
        last, found = ir.apply("cached_short_convolution", last, x[of, places][None], weight, bias, *where, read=2)
        assert_allclose(read[0, :-1], whole[of, places][:-1], rtol=1e-9, atol=1e-12)
        assert_allclose(found[0, :-1], convolved[of, places][:-1], rtol=1e-12)
        assert not read[0, -1].any() and not found[0, -1].any()
        at = [start + count for start, count in zip(at, counts, strict=True)]
    assert at == [7, 7] and np.isnan(states[0, 1]).all() and not np.isnan(states[0, [0, 2]]).any()


def test_states_are_written_in_their_place_and_results_have_memory_of_their_own():
    op = cached_op()
    function = ir.record(lambda *x: ir.apply(op.kind, *x, **dict(op.attributes)), *(value.type for value in op.inputs))
    (made,), states = function.ops, function.inputs[0]
    assert [owners(function)[value] is states for value in made.outputs] == [True, False]
    assert owners(function)[made.outputs[1]] is made.outputs[1]
    held = sum(value.type.nbytes for value in function.inputs)
    assert ir.peak_bytes(function) == held + made.outputs[1].type.nbytes


def test_taps_of_one_token_keep_nothing():
    x, weight = np.ones((1, 2, 3)), np.full((3, 1), 2.0)
    last, found = ir.apply("cached_short_convolution", np.empty((1, 1, 0, 3)), x, weight, np.array([[4, 5]]),
                           np.zeros((1, 2, 1), np.int64), read=1)
    assert last.shape == (1, 1, 0, 3)
    assert_allclose(found, short_convolution(x, weight))


def cached_op(*, delta=False, read=7, scored=0, tokens=8, of_features=False):
    replicas, slots, groups, heads, n, p = 2, 9, 2, 8, 16, 8
    keys, of_heads = (replicas, tokens, groups, n), (replicas, tokens, heads)
    keys = (*of_heads, n) if of_features else keys
    shapes = [(replicas, slots, heads, n, p), keys, keys, (*of_heads, p), keys if of_features else of_heads, of_heads]
    types = [ir.TensorType("f32" if i in (0, 4, 5) else "bf16", shape) for i, shape in enumerate(shapes)]
    where = ir.TensorType("i64", (replicas, tokens)), ir.TensorType("i64", (replicas, tokens, 1))
    how = {"chunk": 64, "delta": delta, "unit": False, "scale": 1.0, "read": read, "scored": scored}
    return ir.record(lambda *x: ir.apply("cached_linear_attention", *x, **how), *types, *where).ops[0]


def test_a_decode_reads_each_state_once_and_writes_it():
    """selective_state_update of mamba_ssm, fused_recurrent_gated_delta_rule of flash-linear-attention."""
    tokens, groups, heads, n, p = 2 * 8, 2, 8, 16, 8
    inputs = 2 * tokens * (2 * groups * n + 2 * heads * p) + 2 * 4 * tokens * heads + 8 * 2 * tokens
    for delta, products in ((False, 2), (True, 3)):
        op = cached_op(delta=delta)
        assert op.nbytes == inputs + 2 * 2 * 7 * heads * n * p * 4
        assert op.flops == 2 * tokens * products * heads * n * p


def test_chunks_cost_what_whole_sequences_do():
    """With 3 chunks a replica beside: what the kernels of whole sequences move, but inputs and results, and compute."""
    for delta in (False, True):
        more, plain = cached_op(delta=delta, scored=3, tokens=192), cached_op(delta=delta, tokens=192)
        whole = op_of(sizes=(2, 192, 2, 4, 16, 8), delta=delta)
        once = 2 * 2 * 192 * (2 * 2 * 16 + 2 * 8 * 8) + 2 * 4 * 2 * 192 * 8
        assert more.nbytes - plain.nbytes == whole.nbytes - once
        assert more.flops == whole.flops


def test_chunks_with_decays_of_features_cost_what_whole_sequences_do():
    more, plain = (cached_op(delta=True, scored=each, tokens=192, of_features=True) for each in (3, 0))
    whole = ir.record(lambda *x: ir.apply("linear_attention", *x, chunk=64, delta=True, unit=False, scale=1.0),
                      *(value.type for value in plain.inputs[1:6])).ops[0]
    once = sum(value.type.nbytes for value in (*plain.inputs[1:6], plain.outputs[1]))
    assert more.nbytes - plain.nbytes == whole.nbytes - once and more.flops == whole.flops


@pytest.mark.parametrize(("shapes", "message"), [
    ({0: (2, 3, 4)}, r"what is kept must have dims \(replicas, slots, ...\), got"),
    ({0: (2, 9, 8, 16, 7)}, "dim p of"), ({6: (2, 8, 1)}, "positions must be integers of 2 dims, got"),
])
def test_slots_that_do_not_fit_are_refused(shapes, message):
    types = [value.type for value in cached_op().inputs]
    types = [ir.TensorType(type.dtype, shapes.get(i, type.shape)) for i, type in enumerate(types)]
    how = {"chunk": 64, "delta": False, "unit": False, "scale": 1.0, "read": 1, "scored": 0}
    with pytest.raises((ValueError, TypeError), match=message):
        ir.record(lambda *x: ir.apply("cached_linear_attention", *x, **how), *types)


def test_last_tokens_are_one_fewer_than_taps():
    types = [ir.TensorType("f64", shape) for shape in ((1, 2, 2, 3), (1, 4, 3), (3, 4))]
    where = ir.TensorType("i64", (1, 4)), ir.TensorType("i64", (1, 4, 1))
    with pytest.raises(ValueError, match="4 taps need 3 last tokens, got"):
        ir.record(lambda *x: ir.apply("cached_short_convolution", *x, read=1), *types, *where)


@pytest.mark.parametrize(("shapes", "how", "message"), [
    ([(2, 3, 2, 4)] * 2 + [(2, 3, 3, 5)] + [(2, 3, 3)] * 2, {}, "the 3 heads of the values must be a multiple of the 2"),
    ([(2, 3, 4)] * 2 + [(2, 3, 2, 5)] + [(2, 3, 2)] * 2, {}, "queries, keys and values must have 4 dims, got"),
    ([(2, 3, 2, 4)] * 2 + [(2, 3, 2, 5)] + [(2, 3, 2)] * 2, {"chunk": 0}, "a chunk must have at least 1 token, got 0"),
    ([(2, 3, 2, 4)] * 2 + [(2, 3, 2, 5)] + [(2, 3, 2), (2, 2, 2)], {}, "dim t of"),
])
def test_what_does_not_fit_is_refused(shapes, how, message):
    how = {"chunk": 2, "delta": False, "unit": False, "scale": 1.0} | how
    with pytest.raises(ValueError, match=message):
        ir.record(lambda *x: ir.apply("linear_attention", *x, **how), *(ir.TensorType("f64", shape) for shape in shapes))
