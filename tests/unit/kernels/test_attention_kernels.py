"""Attention in NumPy, whole and in blocks, against the formula; and which rows and heads fall to whom."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from parallelism.kernels import (
    Mask,
    attend,
    attend_backward,
    attend_backward_flops,
    attend_flops,
    causal_mask,
    gather_heads,
    merge,
    row_products,
    spread_heads,
)
from tensor_parallelism.attention import zigzag_order
from tensor_parallelism.attention.shares import heads_of, runs_of, tiles

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def drawn(seed, rows=5, columns=7, batch=2, heads=3, head_dim=4, dtype=np.float64):
    rng = np.random.default_rng(seed)
    shapes = [(batch, rows, heads, head_dim), *[(batch, columns, heads, head_dim)] * 2]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def formula(q, k, v, mask):
    """Row by row: the softmax of a row's scores weighs the values."""
    out = np.zeros(q.shape, q.dtype)
    for b, i, h, _ in np.ndindex(*q.shape[:3], 1):
        seen = np.flatnonzero(mask[i])
        if len(seen):
            scores = k[b, seen, h] @ q[b, i, h] / np.sqrt(q.shape[3])
            weights = np.exp(scores - scores.real.max())
            out[b, i, h] = weights / weights.sum() @ v[b, seen, h]
    return out


def lse_of(q, k, mask):
    scores = np.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(q.shape[3])
    with np.errstate(divide="ignore"):
        return np.log((np.exp(scores) * mask).sum(-1))


MASKS = {
    "everything": np.ones((5, 7), bool),
    "causal": causal_mask(range(2, 7), range(7)),
    "rows that see nothing": causal_mask(range(5), range(3, 10)),
    "nothing": np.zeros((5, 7), bool),
}


@pytest.mark.parametrize("name", MASKS)
def test_attention_is_its_formula(name):
    q, k, v = drawn(0)
    out, lse = attend(q, k, v, MASKS[name])
    np.testing.assert_allclose(out, formula(q, k, v, MASKS[name]), **CLOSE)
    np.testing.assert_allclose(lse, lse_of(q, k, MASKS[name]), **CLOSE)


def test_no_mask_is_a_mask_of_everything():
    q, k, v = drawn(1)
    for one, other in zip(attend(q, k, v), attend(q, k, v, MASKS["everything"]), strict=True):
        np.testing.assert_array_equal(one, other)


def test_scores_far_from_zero_do_not_overflow():
    q, k, v = drawn(2)
    out, lse = attend(q * 1e3, k * 1e3, v)
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()
    np.testing.assert_allclose(out, formula(q * 1e3, k * 1e3, v, MASKS["everything"]), **CLOSE)


@pytest.mark.parametrize("extents", [{"rows": 0}, {"columns": 0}, {"batch": 0}, {"heads": 0}], ids=str)
def test_an_empty_part_attends_to_nothing(extents):
    q, k, v = drawn(3, **extents)
    out, lse = attend(q, k, v)
    np.testing.assert_array_equal(out, np.zeros(q.shape))
    np.testing.assert_array_equal(lse, np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf))
    grads = attend_backward(q, k, v, lse, row_products(out, out), out)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
    assert not any(grad.any() for grad in grads)


def test_the_dtype_is_kept():
    q, k, v = drawn(4, dtype=np.float32)
    whole = merge(attend(q, k[:, :3], v[:, :3], MASKS["causal"][:, :3]), attend(q, k[:, 3:], v[:, 3:]))
    grads = attend_backward(q, k, v, whole.lse, row_products(whole.out, q), q)
    assert {array.dtype for array in (*whole, *grads)} == {np.dtype(np.float32)}


@given(st.lists(st.integers(0, 7), max_size=3), st.sampled_from(sorted(MASKS)), st.randoms(use_true_random=False))
def test_blocks_in_any_order_make_the_whole_forward_and_backward(cuts, name, random):
    q, k, v = drawn(5)
    grad, mask = drawn(6)[0], MASKS[name]
    whole = attend(q, k, v, mask)
    delta = row_products(whole.out, grad)
    of_whole = attend_backward(q, k, v, whole.lse, delta, grad, mask)
    places = [0, *sorted(cuts), 7]
    blocks = [slice(a, b) for a, b in pairwise(places)]
    random.shuffle(blocks)
    joined = None
    grads = [np.zeros_like(x) for x in (q, k, v)]
    for at in blocks:
        part = attend(q, k[:, at], v[:, at], mask[:, at])
        joined = part if joined is None else merge(joined, part)
        by_q, by_k, by_v = attend_backward(q, k[:, at], v[:, at], whole.lse, delta, grad, mask[:, at])
        grads[0] += by_q
        grads[1][:, at] += by_k
        grads[2][:, at] += by_v
    for one, other in zip([*joined, *grads], [*whole, *of_whole], strict=True):
        np.testing.assert_allclose(one, other, **CLOSE)


@pytest.mark.parametrize("name", MASKS)
def test_the_backward_is_the_derivative_of_the_formula(name):
    arrays, mask, step = drawn(7), MASKS[name], 1e-30
    grad = drawn(8)[0]
    out, lse = attend(*arrays, mask)
    found = attend_backward(*arrays, lse, row_products(out, grad), grad, mask)
    for i, gradient in enumerate(found):
        direction = drawn(9 + i)[i]
        moved = [x + 1j * step * direction if j == i else x.astype(complex) for j, x in enumerate(arrays)]
        slope = (formula(*moved, mask).imag / step * grad).sum()        # a complex step has no rounding to speak of
        np.testing.assert_allclose((gradient * direction).sum(), slope, **CLOSE)


def test_flops_are_those_of_the_products():
    assert attend_flops(2, 3, 5, 7, 11) == 2 * 2 * (2 * 3) * 5 * 7 * 11                 # q k and weights v
    assert attend_backward_flops(2, 3, 5, 7, 11) == 5 * 2 * (2 * 3) * 5 * 7 * 11


@pytest.mark.parametrize("serves", [(0, 0, 1, 1, 2, 2), (0, 1, 2), (1, 1, 2), (2, 0), ()])
def test_grouped_queries_spread_heads_and_gather_their_gradients(serves):
    rng = np.random.default_rng(0)
    x = rng.integers(-9, 9, (2, 4, 3, 5)).astype(float)
    y = rng.integers(-9, 9, (2, 4, len(serves), 5)).astype(float)
    spread = spread_heads(x, serves)
    np.testing.assert_array_equal(spread, np.stack([x[:, :, i] for i in serves], 2) if serves else y)
    assert (spread is x) == (serves == (0, 1, 2))
    assert (spread * y).sum() == (x * gather_heads(y, serves, 3)).sum()                 # the transpose


# -- who has which rows and heads --------------------------------------------------------------------------------------


@given(st.integers(0, 40), st.lists(st.integers(1, 4), max_size=2), st.booleans())
def test_every_row_falls_to_one_device_and_shards_are_those_of_array_split(extent, factors, zigzag):
    runs = runs_of(extent, factors, zigzag=zigzag)
    sizes = [len(part) for part in _parts(extent, factors)]
    assert [sum(map(len, mine)) for mine in runs] == sizes
    assert sorted(place for mine in runs for run in mine for place in run) == list(range(extent))
    if zigzag:
        assert zigzag_order(extent, factors).tolist() == [place for mine in runs for run in mine for place in run]
        assert all(len(front) - len(back) in (0, 1) for front, back in runs)


def _parts(extent, factors):
    parts = [np.arange(extent)]
    for factor in factors:
        parts = [piece for part in parts for piece in np.array_split(part, factor)]
    return parts


documents = st.lists(st.integers(1, 6), max_size=3).map(tuple)
masks = st.builds(Mask, st.booleans(), st.none(), documents) | st.builds(Mask, st.just(True), st.integers(1, 9), documents)


def numbers_of(lengths, count):
    """The document of each of so many positions; one for all if there are no lengths."""
    numbers = [i for i, length in enumerate(lengths * count) for _ in range(length)]
    return numbers[:count] if lengths else [0] * count


@given(masks, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_a_mask_says_of_blocks_what_it_says_of_their_scores(mask, row, rows, column, columns):
    block = range(row, row + rows), range(column, column + columns)
    of = numbers_of(mask.documents, 20)
    scores = [[of[i] == of[j] and (not mask.causal or (j <= i and (mask.window is None or i - j < mask.window)))
               for j in block[1]] for i in block[0]]
    allowed = mask.allowed(*block)
    assert (allowed is None) == (not mask.causal and not mask.documents)
    assert allowed is None or allowed.tolist() == scores
    assert mask.hides_all(*block) == (not np.any(scores))
    assert mask.hides_some(*block) == (not np.all(scores))
    assert Mask.parse(str(mask)) == mask


@pytest.mark.parametrize(("arguments", "error"), [
    ((False, 3), "it needs causal=True; got window=3"), ((True, 0), "at least 1, or None, got 0"),
    ((True, True), "got True"), ((True, 2.0), "got 2.0"),
    ((True, None, (2, 0)), "documents must have lengths of at least 1, got 0"), ((False, None, (True,)), "got True"),
])
def test_a_window_has_columns_up_to_a_row(arguments, error):
    with pytest.raises(ValueError, match=error):
        Mask(*arguments)


@pytest.mark.parametrize("text", [
    "", "Causal", "causal:", "causal:0", "causal:-1", "whole:2", "causal:2:3", "causal:" + "9" * 50, "causal/", "causal/0",
    "causal/2,", "causal/2,-1", "whole/x", "causal/3:2", "causal/" + "9" * 50])
def test_a_text_that_is_no_mask_is_refused_in_a_short_line(text):
    with pytest.raises(ValueError, match=r"a mask is|at least 1") as error:
        Mask.parse(text)
    assert len(str(error.value)) < 120


@given(st.integers(1, 24), st.integers(1, 5), st.booleans(), masks)
def test_pieces_are_every_score_that_counts_once_and_none_that_is_wholly_masked(extent, devices, zigzag, mask):
    runs = runs_of(extent, (devices,), zigzag=zigzag)
    seen = np.zeros((extent, extent), int)
    for rows in runs:
        for columns in runs:
            row_places, column_places = ([place for run in mine for place in run] for mine in (rows, columns))
            for piece in tiles(rows, columns, mask):
                block = np.ix_(row_places[piece.rows], column_places[piece.columns])
                allowed = mask.allowed(row_places[piece.rows], column_places[piece.columns])
                allowed = True if allowed is None else allowed
                assert np.any(allowed)
                assert piece.masked == (not np.all(allowed))
                assert list(rows[piece.run]) == row_places[piece.rows]
                seen[block] += allowed
    whole = mask.allowed(range(extent), range(extent))
    np.testing.assert_array_equal(seen, 1 if whole is None else whole)


def causal_work(extent, devices, zigzag):
    """The scores that each device computes."""
    runs = runs_of(extent, (devices,), zigzag=zigzag)
    return [
        sum((piece.rows.stop - piece.rows.start) * (piece.columns.stop - piece.columns.start)
            for other in runs for piece in tiles(mine, other, Mask(causal=True))) for mine in runs
    ]


@given(st.integers(1, 80), st.integers(1, 9))
def test_causal_work_in_zigzag_order_differs_by_at_most_a_block_of_enough_rows(extent, devices):
    work, block = causal_work(extent, devices, zigzag=True), -(-extent // devices)
    assert max(work) - min(work) <= block * max(block, devices)
    if extent % (2 * devices) == 0:
        assert len(set(work)) == 1


def test_causal_work_in_order_does_not():
    assert causal_work(24, 4, zigzag=False) == [36, 72, 108, 144]
    assert causal_work(24, 4, zigzag=True) == [81] * 4


@given(st.integers(1, 4), st.integers(1, 5), st.lists(st.integers(1, 4), max_size=2))
def test_query_heads_are_served_by_the_key_value_heads_of_their_group(share, kv_heads, factors):
    heads = share * kv_heads
    found = heads_of(heads, kv_heads, factors)
    assert [list(mine.queries) for mine in found] == [part.tolist() for part in _parts(heads, factors)]
    for mine in found:
        assert [mine.keys[i] for i in mine.serves] == [head // share for head in mine.queries]
        assert {mine.keys[i] for i in mine.serves} == set(mine.keys)


def test_gradients_are_written_where_they_belong_if_one_says_where():
    q, k, v = drawn(5)
    grad = np.random.default_rng(6).standard_normal(q.shape)
    out, lse = attend(q, k, v)
    expected = attend_backward(q, k, v, lse, row_products(out, grad), grad)
    joined = np.full((2, 12, 3, 8), 7.0)
    where = joined[:, :5, :, :4], joined[:, 5:, :, :4], joined[:, 5:, :, 4:]
    found = attend_backward(q, k, v, lse, row_products(out, grad), grad, out=where)
    assert all(one is other for one, other in zip(found, where, strict=True))
    for one, other in zip(where, expected, strict=True):
        np.testing.assert_array_equal(one, other)
