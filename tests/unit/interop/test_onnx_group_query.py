"""Layers of language models as ONNX Runtime generates with them: grouped queries, keys of the past, tables in 4 bits."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from numpy.testing import assert_allclose, assert_array_equal  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from parallelism import ir  # noqa: E402
from parallelism.interop import UnsupportedError, from_onnx  # noqa: E402

RNG = np.random.default_rng(3)
BATCH, ROWS, HEADS, GROUPS, WIDTH, PAST = 2, 5, 4, 2, 16, 6
ANGLES = np.arange(32.0)[:, None] * 0.3 ** np.arange(WIDTH // 2)
TABLES = [np.cos(ANGLES).astype(np.float32), np.sin(ANGLES).astype(np.float32)]
NONE = np.zeros((BATCH, GROUPS, 0, WIDTH), np.float32)
ALL_ROWS, TOTAL = np.full(BATCH, ROWS - 1, np.int32), np.array(ROWS, np.int32)


def floats(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def model(kind, arrays, attributes, results=1, held=()):
    """A model of one node, and the arrays that it is fed; those at the places in ``held`` are its own."""
    names = ["" if x is None else f"x{i}" for i, x in enumerate(arrays)]
    given = {name: x for name, x in zip(names, arrays, strict=True) if name}
    own = {name: given.pop(name) for name in [f"x{i}" for i in held] if name in given}
    for name, x in own.items():
        own[name] = x if isinstance(x, onnx.TensorProto) else numpy_helper.from_array(x)
        own[name].name = name
    inputs = [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
              for name, x in given.items()]
    outputs = [helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, None) for i in range(results)]
    node = helper.make_node(kind, names, [each.name for each in outputs], domain="com.microsoft", **attributes)
    graph = helper.make_graph([node], "g", inputs, outputs, list(own.values()))
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10), given


def run(made, given):
    program, weights = from_onnx(made)
    return ir.interpret(program, {value.name: (weights | given)[value.name] for value in program.inputs}).outputs


def turned(x, positions, interleaved=False):
    """``(tokens, heads, width)``, with pairs of features turned by the angles of the tokens' positions."""
    cos, sin = (table[positions][:, None] for table in TABLES)
    left, right = (x[..., ::2], x[..., 1::2]) if interleaved else np.split(x, 2, axis=-1)
    parts = [left * cos - right * sin, right * cos + left * sin]
    return np.stack(parts, -1).reshape(x.shape) if interleaved else np.concatenate(parts, -1)


def expected(q, k, v, past, first, *, rotary=False, interleaved=False, window=-1, cap=0.0, scale=WIDTH**-0.5, added=None,
             sinks=None):
    """The result and the keys and values of the present, one sequence and one row after another."""
    rows, results, keys, values = q.shape[1], [], [], []
    for b in range(len(q)):
        own_q, own_k, own_v = (x[b].reshape(rows, -1, WIDTH) for x in (q, k, v))
        positions = first[b] + np.arange(rows)
        if rotary:
            own_q, own_k = turned(own_q, positions, interleaved), turned(own_k, positions, interleaved)
        own_k, own_v = (np.concatenate([old[b].swapaxes(0, 1)[: first[b]], new])
                        for old, new in zip(past, (own_k, own_v), strict=True))
        mixed = np.zeros_like(own_q)
        for row, position in enumerate(positions):
            begin = 0 if window < 0 else max(0, position + 1 - window)
            for head in range(HEADS):
                group = head * GROUPS // HEADS
                scores = own_k[begin : position + 1, group] @ own_q[row, head] * scale
                scores = cap * np.tanh(scores / cap) if cap else scores
                if added is not None:
                    scores = scores + added[b % len(added), head % added.shape[1], row, begin : position + 1]
                terms = np.exp(scores)
                shares = terms / (terms.sum() + (0 if sinks is None else np.exp(sinks[head])))
                mixed[row, head] = shares @ own_v[begin : position + 1, group]
        results.append(mixed.reshape(rows, -1))
        keys.append(own_k)
        values.append(own_v)
    return np.stack(results), keys, values


NEW = floats(BATCH, ROWS, HEADS * WIDTH), floats(BATCH, ROWS, GROUPS * WIDTH), floats(BATCH, ROWS, GROUPS * WIDTH)
ONE = tuple(x[:, :1] for x in NEW)
OLD = floats(BATCH, GROUPS, PAST, WIDTH), floats(BATCH, GROUPS, PAST, WIDTH)
SINKS, ADDED, LATER = floats(HEADS), floats(BATCH, HEADS, ROWS, ROWS), floats(1, 1, 1, PAST + 1)
COUNTS = {"num_heads": HEADS, "kv_num_heads": GROUPS}
TURNED = COUNTS | {"do_rotary": 1}
FULL, UNEVEN, SEVEN = np.full(BATCH, PAST, np.int32), np.array([PAST, 3], np.int32), np.array(PAST + 1, np.int32)
START, LATE = [NONE, NONE, ALL_ROWS, TOTAL], [*OLD, FULL, SEVEN]
CASES = {
    "a prompt": ([*NEW, None, None, ALL_ROWS, TOTAL], COUNTS, {}),
    "a prompt beside an empty past": ([*NEW, *START], COUNTS, {}),
    "rotary positions": ([*NEW, *START, *TABLES], TURNED, {"rotary": True}),
    "positions of neighbours": ([*NEW, *START, *TABLES], TURNED | {"rotary_interleaved": 1},
                                {"rotary": True, "interleaved": True}),
    "one array": ([np.concatenate(NEW, -1), None, None, *START, *TABLES], TURNED, {"rotary": True}),
    "a window": ([*NEW, *START], COUNTS | {"local_window_size": 2}, {"window": 2}),
    "a cap and a scale": ([*NEW, *START], COUNTS | {"softcap": 1.5, "scale": 0.7}, {"cap": 1.5, "scale": 0.7}),
    "a smooth softmax": ([*NEW, *START], COUNTS | {"smooth_softmax": 1}, {"sinks": np.zeros(HEADS)}),
    "sinks": ([*NEW, *START, None, None, None, None, SINKS], COUNTS, {"sinks": SINKS}),
    "terms of scores": ([*NEW, *START, None, None, None, ADDED], COUNTS, {"added": ADDED}),
    "a further token": ([*ONE, *LATE, *TABLES], TURNED, {"rotary": True}),
    "a further token in a window": ([*ONE, *LATE], COUNTS | {"local_window_size": 3, "softcap": 2.0},
                                    {"window": 3, "cap": 2.0}),
    "sinks and terms of a further token": ([*ONE, *LATE, *TABLES, None, LATER, SINKS], TURNED,
                                           {"rotary": True, "sinks": SINKS, "added": LATER}),
    "sequences of several lengths": ([*ONE, *OLD, UNEVEN, SEVEN, *TABLES], TURNED, {"rotary": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_grouped_queries_are_the_sums_of_values_by_the_softmax_of_scores(name):
    arrays, attributes, more = CASES[name]
    made, given = model("GroupQueryAttention", arrays, attributes, 3, held=(6,))
    found = run(made, given)
    new = NEW if arrays[0].shape[1] == ROWS else ONE
    first = np.zeros(BATCH, int) if new is NEW else arrays[5]
    result, keys, values = expected(*new, OLD if new is ONE else (NONE, NONE), first, **more)
    assert found[0].dtype == np.float32 and found[0].shape == result.shape
    assert_allclose(found[0], result, rtol=1e-4, atol=1e-5)
    for present, wanted in zip(found[1:], (keys, values), strict=True):
        assert present.shape == (BATCH, GROUPS, ROWS if new is NEW else PAST + 1, WIDTH)
        for own, each in zip(present, wanted, strict=True):
            assert_allclose(own.swapaxes(0, 1)[: len(each)], each, rtol=1e-5, atol=1e-6)
            assert not own[:, len(each) :].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_they_have_the_numbers_of_onnx_runtime(name):
    runtime = pytest.importorskip("onnxruntime")
    arrays, attributes, _ = CASES[name]
    made, given = model("GroupQueryAttention", arrays, attributes, 3, held=(6,))
    theirs = runtime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, given)
    for ours, each in zip(run(made, given), theirs, strict=True):
        assert ours.dtype == each.dtype and ours.shape == each.shape
        assert_allclose(ours, each, rtol=1e-4, atol=1e-5)


def test_a_prompt_and_further_tokens_give_what_the_whole_gives():
    made, given = model("GroupQueryAttention", [*NEW, *START, *TABLES], TURNED, 3, held=(6,))
    whole = run(made, given)
    begin = [x[:, :3] for x in NEW]
    counts, total = np.full(BATCH, 2, np.int32), np.array(3, np.int32)
    made, given = model("GroupQueryAttention", [*begin, NONE, NONE, counts, total, *TABLES], TURNED, 3, held=(6,))
    result, *past = run(made, given)
    assert_allclose(result, whole[0][:, :3], rtol=1e-5, atol=1e-6)
    for row in range(3, ROWS):
        token, counts, total = [x[:, row : row + 1] for x in NEW], np.full(BATCH, row, np.int32), np.array(row + 1, np.int32)
        made, given = model("GroupQueryAttention", [*token, *past, counts, total, *TABLES], TURNED, 3, held=(6,))
        result, *past = run(made, given)
        assert_allclose(result[:, 0], whole[0][:, row], rtol=1e-4, atol=1e-5)
    for ours, each in zip(past, whole[1:], strict=True):
        assert_allclose(ours, each, rtol=1e-5, atol=1e-6)


def test_a_prompt_is_one_operator_and_a_total_that_is_not_known_is_the_sum():
    made, _ = model("GroupQueryAttention", [*NEW, *START], COUNTS | {"local_window_size": 2}, 3)
    op, = (op for op in from_onnx(made)[0].ops if op.kind == "attention")
    assert op["mask"] == "causal:2"
    made, given = model("GroupQueryAttention", [*ONE, *LATE, *TABLES], TURNED, 3)
    known, _ = model("GroupQueryAttention", [*ONE, *LATE, *TABLES], TURNED, 3, held=(6,))
    del_total = {name: x for name, x in given.items() if name != "x6"}
    for ours, each in zip(run(made, given), run(known, del_total), strict=True):
        assert_array_equal(ours, each)


def heads(x):
    return x.reshape(*x.shape[:2], HEADS, -1).swapaxes(1, 2)


@pytest.mark.parametrize("causal", [0, 1])
def test_keys_of_the_past_stand_in_front(causal):
    query, key, value = floats(BATCH, 3, 64), floats(BATCH, 3, 64), floats(BATCH, 3, 40)
    old = floats(BATCH, HEADS, PAST, 16), floats(BATCH, HEADS, PAST, 10)
    made, given = model("MultiHeadAttention", [query, key, value, None, None, None, *old],
                        {"num_heads": HEADS, "unidirectional": causal}, 3)
    k, v = (np.concatenate([past, heads(new)], axis=2) for past, new in zip(old, (key, value), strict=True))
    scores = heads(query) @ k.swapaxes(2, 3) / 4
    scores = np.where(causal and np.arange(PAST + 3) > PAST + np.arange(3)[:, None], -np.inf, scores)
    shares = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    result, *present = run(made, given)
    assert_allclose(result, (shares @ v).swapaxes(1, 2).reshape(BATCH, 3, 40), rtol=1e-4, atol=1e-5)
    assert_array_equal(present[0], k)
    assert_array_equal(present[1], v)


def test_keys_and_values_may_be_packed_or_by_heads():
    query, key, value = floats(BATCH, 3, 64), floats(BATCH, 7, 64), floats(BATCH, 7, 64)
    of = {"num_heads": HEADS}
    wanted, = run(*model("MultiHeadAttention", [query, key, value], of))
    pairs = np.stack([key.reshape(BATCH, 7, HEADS, 16), value.reshape(BATCH, 7, HEADS, 16)], 3)
    for arrays in ([query, pairs], [query, heads(key), heads(value)]):
        assert_array_equal(run(*model("MultiHeadAttention", arrays, of))[0], wanted)
    alone, = run(*model("MultiHeadAttention", [key, key, value], of))
    three = np.concatenate([key.reshape(BATCH, 7, HEADS, 1, 16), pairs], 3)
    assert_array_equal(run(*model("MultiHeadAttention", [three], of))[0], alone)


def test_biases_are_added_to_packed_queries_and_to_keys_by_heads():
    query, key, value, bias = floats(BATCH, 3, 64), floats(BATCH, 7, 64), floats(BATCH, 7, 40), floats(168)
    of = {"num_heads": HEADS}
    terms = np.split(bias, [64, 128])
    plain = [part + term for part, term in zip((query, key, value), terms, strict=True)]
    wanted, = run(*model("MultiHeadAttention", plain, of))
    for keys, values in ((key, value), (heads(key), heads(value))):
        given, = run(*model("MultiHeadAttention", [query, keys, values, bias], of))
        assert_allclose(given, wanted, rtol=1e-5, atol=1e-6)


def test_attention_from_one_product_takes_and_gives_a_past():
    x, weights, old = floats(BATCH, 3, 12), floats(12, 192), floats(2, BATCH, HEADS, PAST, 16)
    made, given = model("Attention", [x, weights, None, None, old], {"num_heads": HEADS, "unidirectional": 1}, 2)
    q, k, v = np.split(x @ weights, 3, axis=-1)
    plain, more = model("MultiHeadAttention", [q, k, v, None, None, None, *old], {"num_heads": HEADS, "unidirectional": 1}, 3)
    (result, present), (wanted, keys, values) = run(made, given), run(plain, more)
    assert_allclose(result, wanted, rtol=1e-4, atol=1e-5)
    assert_allclose(present, np.stack([keys, values]), rtol=1e-5, atol=1e-6)


def test_a_part_of_the_features_is_turned():
    x, tables = floats(BATCH, ROWS, 2 * 24), TABLES
    made, given = model("RotaryEmbedding", [x, np.tile(np.arange(ROWS), (BATCH, 1)), *tables],
                        {"num_heads": 2, "rotary_embedding_dim": 16})
    each = x.reshape(BATCH, ROWS, 2, 24)
    wanted = [np.concatenate([turned(own[..., :16], np.arange(ROWS)), own[..., 16:]], -1) for own in each]
    assert_allclose(run(made, given)[0], np.reshape(wanted, x.shape), rtol=1e-5, atol=1e-6)


BYTES, PAIRS = (RNG.integers(0, 256, (11, n)).astype(np.uint8) for n in (80, 40))
SCALES, PLACES = floats(11, 5), np.array([[0, 10, 3], [3, 7, 7]])
ZEROS, ZEROS_IN_PAIRS = (RNG.integers(0, 256, (11, n)).astype(np.uint8) for n in (5, 3))


def of_pairs(packed):
    return np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1).astype(int)


def four_bits(dtype):
    return helper.make_tensor("table", dtype, (11, 80), PAIRS.tobytes(), raw=True)


@pytest.mark.parametrize(("table", "numbers", "zeros", "centre", "bits"), [
    (BYTES, BYTES.astype(int), None, np.full((11, 5), 128), 8),
    (BYTES, BYTES.astype(int), ZEROS, ZEROS.astype(int), 8),
    (PAIRS, of_pairs(PAIRS), None, np.full((11, 5), 8), 4),
    (PAIRS, of_pairs(PAIRS), ZEROS_IN_PAIRS, of_pairs(ZEROS_IN_PAIRS)[:, :5], 4),
    (four_bits(TensorProto.UINT4), of_pairs(PAIRS), None, np.zeros((11, 5)), 4),
    (four_bits(TensorProto.INT4), (of_pairs(PAIRS) ^ 8) - 8, None, np.zeros((11, 5)), 4),
], ids=["bytes", "bytes with zeros", "pairs", "pairs with zeros", "uint4", "int4"])
def test_rows_of_a_table_in_few_bits_are_looked_up(table, numbers, zeros, centre, bits):
    attributes = {"bits": bits, "block_size": 16, "gather_axis": 0, "quantize_axis": 1}
    made, given = model("GatherBlockQuantized", [table, PLACES, SCALES, zeros], attributes, held=(0, 2, 3))
    wanted = (numbers - np.repeat(centre, 16, axis=1)) * np.repeat(SCALES, 16, axis=1).astype(np.float64)
    found, = run(made, given)
    assert found.dtype == np.float32
    assert_allclose(found, wanted[PLACES], rtol=1e-6)


@pytest.mark.parametrize(("kind", "arrays", "attributes", "results", "message"), [
    ("GroupQueryAttention", [*NEW, *OLD, ALL_ROWS, TOTAL], COUNTS, 3, "first tokens of a sequence beside a buffer"),
    ("GroupQueryAttention", [*NEW, *START], COUNTS | {"k_quant_type": "PER_TENSOR"}, 3, "keys in 8 bits"),
    ("GroupQueryAttention", [*NEW, *START], COUNTS | {"sliding_window_cache": 1}, 3, "sliding_window_cache"),
    ("GatherBlockQuantized", [BYTES, PLACES, SCALES], {"bits": 8, "quantize_axis": 0}, 1, "along their last dim"),
])
def test_what_is_not_read_is_refused(kind, arrays, attributes, results, message):
    made, _ = model(kind, arrays, attributes, results, held=(0, 2, 6) if results == 1 else (6,))
    with pytest.raises(UnsupportedError, match=message):
        from_onnx(made)


def test_what_a_file_says_of_values_between_nodes_may_be_wrong():
    """The builder of ONNX Runtime's language models declares constants of one dim as single numbers."""
    node = helper.make_node("Constant", [], ["one"], value=numpy_helper.from_array(np.ones(1, np.float32)))
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in "xy")
    graph = helper.make_graph([node, helper.make_node("Add", ["x", "one"], ["y"])], "g", [x], [y],
                              value_info=[helper.make_tensor_value_info("one", TensorProto.FLOAT, [])])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    assert_array_equal(run(made, {"x": np.arange(3, dtype=np.float32)})[0], [1, 2, 3])
