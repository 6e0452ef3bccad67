"""The kernels of layers in pieces: what they make of slices is what NumPy makes of the whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from parallelism import Mesh, TensorSharding, kernels as k


def rows(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


# -- vocabulary --------------------------------------------------------------------------------------------------------

def test_lookups_of_the_slices_of_a_table_add_up_to_that_of_the_table():
    table, tokens = np.arange(1.0, 22).reshape(7, 3), np.array([[0, 6, 3, 3], [5, 2, 6, 0]])
    parts = [k.lookup(table[first:last], tokens, first) for first, last in ((0, 3), (3, 3), (3, 6), (6, 7))]
    np.testing.assert_array_equal(sum(parts), table[tokens])
    assert not parts[1].any()


def test_the_backward_of_a_lookup_adds_the_rows_of_each_token():
    tokens, grad = np.array([[0, 6, 3, 3], [3, 2, 6, 0]]), np.arange(1.0, 25).reshape(2, 4, 3)
    expected = np.zeros((7, 3))
    np.add.at(expected, tokens, grad)
    np.testing.assert_array_equal(k.lookup_backward(grad, tokens, 7), expected)
    np.testing.assert_array_equal(k.lookup_backward(grad, tokens, 3, first=2), expected[2:5])
    np.testing.assert_array_equal(k.lookup_backward(grad[:0], tokens[:0], 2), np.zeros((2, 3)))


def test_cross_entropy_in_pieces_is_that_of_all_logits():
    logits, targets = 300 * rows(5, 11), np.array([0, 10, 4, 4, 7])     # too large for exp without the largest
    loss, grad = k.softmax_cross_entropy(logits, targets, 5)
    slices = [(0, 4), (4, 4), (4, 9), (9, 11)]
    parts = [logits[:, first:last] for first, last in slices]
    largest = np.max([k.largest_logits(part) for part in parts], axis=0)
    exps = [k.exponentials(part, largest) for part in parts]
    sums = sum(part.sum(axis=-1) for part in exps)
    target = sum(k.target_logits(part, targets, first) for part, (first, _) in zip(parts, slices, strict=True))
    np.testing.assert_allclose((np.log(sums) + largest - target).mean(), loss, rtol=1e-13)
    found = [k.cross_entropy_backward(part, sums, targets, 1 / 5, first)
             for part, (first, _) in zip(exps, slices, strict=True)]
    np.testing.assert_allclose(np.concatenate(found, axis=1), grad, rtol=1e-13, atol=1e-16)


# -- normalisation -----------------------------------------------------------------------------------------------------

def test_normalised_rows_have_mean_0_and_variance_1_or_mean_square_1():
    x = 5 + 3 * rows(2, 4, 6)
    y = k.layer_norm(x, np.ones(6), np.zeros(6), epsilon=1e-12)
    np.testing.assert_allclose(y.mean(axis=-1), 0, atol=1e-12)
    np.testing.assert_allclose(y.var(axis=-1), 1, rtol=1e-10)
    np.testing.assert_allclose((k.rms_norm(x, np.ones(6), 1e-12) ** 2).mean(axis=-1), 1, rtol=1e-10)
    moved = k.layer_norm(x, np.full(6, 3.0), np.arange(6.0), 1e-12)
    np.testing.assert_allclose(moved, 3 * y + np.arange(6), rtol=1e-12)


# -- dropout -----------------------------------------------------------------------------------------------------------

def test_the_random_bits_are_those_of_splitmix64_as_published():
    # the first outputs of Vigna's reference implementation, https://prng.di.unimi.it/splitmix64.c, seed 1234567
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    np.testing.assert_array_equal(k.splitmix64(1234567, np.arange(5)), np.array(known, np.uint64))
    assert int(k.splitmix64(1234567, 4)) == known[4]
    assert k.splitmix64(2**64 - 1, np.array([[0], [2**64 - 1]], np.uint64)).shape == (2, 1)


@given(st.tuples(*[st.integers(0, 6)] * 3), st.integers(0, 2**64 - 1), st.integers(0, 5), st.data())
def test_the_mask_of_a_block_is_the_block_of_the_mask(shape, seed, step, data):
    mesh = Mesh(x=2, y=3)
    axes = data.draw(st.permutations(["x", "y", None]))
    layout = TensorSharding(*axes)
    whole = k.dropout_mask(0.4, seed, step, shape)
    assert whole.shape == shape
    for rank, part in enumerate(layout.shard(whole, mesh)):
        block = layout.slices(shape, mesh, rank)
        np.testing.assert_array_equal(k.dropout_mask(0.4, seed, step, shape, block), part)


def test_a_mask_keeps_its_share_in_every_seed_and_step_and_these_do_not_agree_by_more_than_chance():
    masks = [k.dropout_mask(0.3, seed, step, (100, 100)) for seed in (0, 1, 2) for step in (0, 1)]
    for i, mask in enumerate(masks):
        assert abs(mask.mean() - 0.7) < 0.02               # of 10,000: more than four standard deviations
        for other in masks[:i]:
            assert abs((mask == other).mean() - (0.7**2 + 0.3**2)) < 0.02
    assert k.dropout_mask(0.0, 0, 0, (50,)).all()
    assert k.dropout_mask(0.3, 0, 0, ()).shape == ()


def test_what_stays_is_scaled_and_keeps_its_dtype():
    x, mask = np.array([1, 2, np.inf, 4], np.float32), np.array([True, False, False, True])
    y = k.dropout(x, mask, 0.5)
    np.testing.assert_array_equal(y, [2, 0, 0, 8])
    assert y.dtype == np.float32


# -- rotary positions --------------------------------------------------------------------------------------------------

def test_a_pair_of_features_turns_by_its_speed_times_the_position():
    x = np.zeros((1, 3, 2, 4))
    x[..., 0] = x[..., 2] = 1
    y = k.rotate(x, [0, 5, 7], base=100.0)
    for place, position in enumerate([0, 5, 7]):
        expected = [np.cos(position), np.sin(position), np.cos(position / 10), np.sin(position / 10)]
        for head in range(2):
            np.testing.assert_allclose(y[0, place, head], expected, atol=1e-15)


def test_only_the_distance_of_positions_counts_in_a_product_and_turning_back_undoes_it():
    q, key = rows(2, 1, 1, 1, 6)
    products = [(k.rotate(q, [m]) * k.rotate(key, [m + 3])).sum() for m in (0, 4, 1000)]
    np.testing.assert_allclose(products, products[0], rtol=1e-10)
    x, places = rows(2, 5, 3, 4), np.array([0, 9, 2, 7, 1])
    np.testing.assert_allclose(k.rotate_backward(k.rotate(x, places), places), x, rtol=1e-12)
    np.testing.assert_array_equal(k.rotate(x, places)[:, 2:4], k.rotate(x[:, 2:4], places[2:4]))
    assert k.rotate(x.astype(np.float32), places).dtype == np.float32


@pytest.mark.parametrize(
    ("shape", "positions", "reason"),
    [((5, 3, 3), 5, "an even head_dim, got shape (5, 3, 3)"), ((3, 4), 3, "got shape (3, 4)"),
     ((2, 5, 3, 4), 4, "positions must have the shape of the sequence, (5,), got (4,)")],
)
def test_what_cannot_be_rotated_is_refused(shape, positions, reason):
    with pytest.raises(ValueError) as caught:
        k.rotate(np.zeros(shape), np.arange(positions))
    assert reason in str(caught.value)


# -- routing -----------------------------------------------------------------------------------------------------------

def test_a_token_goes_to_its_best_experts_and_equal_ones_go_by_number():
    logits = np.log([[1.0, 4, 3, 2], [2, 3, 3, 2], [1, 1, 1, 1]])
    choice = k.choose_experts(logits, 2)
    np.testing.assert_array_equal(choice.experts, [[1, 2], [1, 2], [0, 1]])
    np.testing.assert_allclose(choice.probabilities[0], [0.1, 0.4, 0.3, 0.2])
    np.testing.assert_allclose(choice.gates, [[4 / 7, 3 / 7], [0.5, 0.5], [0.5, 0.5]])
    np.testing.assert_allclose(k.choose_experts(logits, 1).gates, [[0.4], [0.3], [0.25]])


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 4), st.integers(1, 3), st.integers(0, 2**32))
def test_places_are_by_rank_of_the_choice_and_then_by_token(runs, experts, length, most, seed):
    best = min(most, experts)
    rng = np.random.default_rng(seed)
    chosen = np.array([rng.permutation(experts)[:best] for _ in range(runs * length)], int).reshape(-1, best)
    counts, preceding = k.count_choices(chosen, runs, experts)
    run = np.repeat(np.arange(runs), length)
    places = k.places_before(counts)[run[:, None], np.arange(best), chosen] + preceding
    used = [0] * experts
    for rank in range(best):
        for token in range(runs * length):
            assert places[token, rank] == used[chosen[token, rank]]
            used[chosen[token, rank]] += 1
    assert counts.sum(axis=(0, 1)).tolist() == used


def test_capacity_is_a_share_rounded_up_and_never_more_than_there_are_tokens():
    assert k.expert_capacity(10, 4, 1, 1.0) == 3
    assert k.expert_capacity(10, 4, 2, 1.25) == 7
    assert k.expert_capacity(10, 2, 2, 5.0) == 10
    assert k.expert_capacity(10, 4, 1, None) == 10
    assert k.expert_capacity(0, 4, 1, 1.0) == 0


def test_the_balance_loss_is_1_where_all_is_even_and_the_number_of_experts_where_one_gets_all():
    assert k.balance_loss(np.array([3, 3]), np.array([3.0, 3.0]), 6)[0] == 1
    loss, grad = k.balance_loss(np.array([6, 0, 0]), np.array([6.0, 0, 0]), 6)
    assert loss == 3
    np.testing.assert_array_equal(grad, [0.5, 0, 0])
