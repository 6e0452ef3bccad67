"""Layers, losses and optimizers: worked cases, and gradients against central differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from parallelism.kernels import (
    ACTIVATIONS,
    LOSSES,
    SGD,
    Adam,
    AdamW,
    clipped,
    dense,
    dense_backward_flops,
    dense_backward_input,
    dense_backward_weights,
    dense_forward_flops,
    mean_squared_error,
    softmax_cross_entropy,
    sum_of_rows,
)


def central_difference(f, x, step=1e-6):
    grad = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[i] += step
        down[i] -= step
        grad[i] = (f(up) - f(down)) / (2 * step)
    return grad


def test_dense_and_its_gradients_by_hand():
    x = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    weights, bias = np.array([[1.0, 0.0, 2.0, 1.0], [0.0, 1.0, 1.0, -1.0]]), np.array([10.0, 20.0, 30.0, 40.0])
    assert_array_equal(dense(x, weights, bias), [[11, 22, 34, 39], [13, 24, 40, 39], [15, 26, 46, 39]])
    grad = np.array([[1.0, 0.0, 0.0, 2.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
    assert_array_equal(dense_backward_input(weights, grad), [[3, -2], [0, 1], [2, 1]])
    grad_weights, grad_bias = dense_backward_weights(x, grad)
    assert_array_equal(grad_weights, [[1, 3, 5, 2], [2, 4, 6, 4]])
    assert_array_equal(grad_bias, [1, 1, 1, 2])


def test_flops_are_two_for_each_multiply_add_of_each_product():
    assert dense_forward_flops(3, 5, 7) == 2 * 3 * 5 * 7
    assert dense_backward_flops(3, 5, 7) == 2 * dense_forward_flops(3, 5, 7)
    assert dense_backward_flops(3, 5, 7, input_gradient=False) == dense_forward_flops(3, 5, 7)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_gradient_is_the_central_difference(name):
    activation = ACTIVATIONS[name]
    rng = np.random.default_rng(1)
    z, grad = rng.standard_normal((4, 3)) * 2, rng.standard_normal((4, 3))
    expected = central_difference(lambda v: float((activation.forward(v) * grad).sum()), z)
    assert_allclose(activation.backward(z, grad), expected, atol=1e-8)


def test_activations_at_points_worked_by_hand():
    z = np.array([[-2.0, 0.0, 3.0]])
    assert_array_equal(ACTIVATIONS["relu"].forward(z), [[0, 0, 3]])
    assert_array_equal(ACTIVATIONS["relu"].backward(z, np.ones_like(z)), [[0, 0, 1]])
    assert_array_equal(ACTIVATIONS["tanh"].forward(z), [[math.tanh(-2), 0, math.tanh(3)]])
    assert_array_equal(ACTIVATIONS["identity"].forward(z), z)
    exact = [[v * (1 + math.erf(v / math.sqrt(2))) / 2 for v in z[0]]]
    assert_allclose(ACTIVATIONS["gelu"].forward(z), exact, atol=1e-3)  # the tanh form is that close to the exact one


def test_mean_squared_error_by_hand():
    loss, grad = mean_squared_error(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[0.0, 2.0], [3.0, 1.0]]), rows=2)
    assert loss == (1 + 0 + 0 + 9) / 4
    assert_array_equal(grad, [[0.5, 0], [0, 1.5]])


def test_softmax_cross_entropy_by_hand_takes_classes_or_probabilities():
    logits = np.log(np.array([[1.0, 3.0, 4.0], [2.0, 2.0, 4.0]]))
    loss, grad = softmax_cross_entropy(logits, np.array([1, 2]), rows=2)
    assert loss == pytest.approx(-(math.log(3 / 8) + math.log(1 / 2)) / 2)
    assert_allclose(grad, [[1 / 16, -5 / 16, 4 / 16], [1 / 8, 1 / 8, -1 / 4]])
    same_loss, same_grad = softmax_cross_entropy(logits, np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]), rows=2)
    assert same_loss == loss
    assert_array_equal(same_grad, grad)


def test_softmax_cross_entropy_of_large_logits_is_finite():
    loss, grad = softmax_cross_entropy(np.array([[1000.0, -1000.0]]), np.array([1]), rows=1)
    assert loss == 2000
    assert_array_equal(grad, [[1, -1]])


@pytest.mark.parametrize("name", LOSSES)
def test_loss_gradient_is_the_central_difference(name):
    rng = np.random.default_rng(2)
    predictions, targets = rng.standard_normal((5, 3)), rng.random((5, 3))
    grad = LOSSES[name](predictions, targets, 7)[1]
    expected = central_difference(lambda v: LOSSES[name](v, targets, 7)[0], predictions)
    assert_allclose(grad, expected, atol=1e-8)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("parts", [1, 2, 3, 9])
def test_losses_of_the_parts_add_up_to_that_of_the_batch_some_parts_being_empty(name, parts):
    rng = np.random.default_rng(3)
    predictions, targets = rng.standard_normal((5, 4)), rng.integers(0, 4, 5)
    if name == "mean_squared_error":
        targets = rng.standard_normal((5, 4))
    whole, grad = LOSSES[name](predictions, targets, 5)
    pieces = zip(np.array_split(predictions, parts), np.array_split(targets, parts), strict=True)
    split = [LOSSES[name](p, t, 5) for p, t in pieces]
    assert sum(loss for loss, _ in split) == pytest.approx(whole, rel=1e-14)
    assert_array_equal(np.concatenate([g for _, g in split]), grad)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_dtype_is_kept(dtype):
    x, w, b = np.ones((2, 3), dtype), np.ones((3, 4), dtype), np.ones(4, dtype)
    y = dense(x, w, b)
    arrays = [y, dense_backward_input(w, y), *dense_backward_weights(x, y)]
    arrays += [a.forward(y) for a in ACTIVATIONS.values()] + [a.backward(y, y) for a in ACTIVATIONS.values()]
    arrays += [loss(y, y, 2)[1] for loss in LOSSES.values()] + [softmax_cross_entropy(y, np.array([0, 3]), 2)[1]]
    arrays += [rule.update([w], [w], None)[0][0] for rule in (SGD(0.1), SGD(0.1, 0.5), Adam())]
    assert {array.dtype for array in arrays} == {np.dtype(dtype)}


def test_sgd_steps_against_the_gradient_and_momentum_remembers():
    p, g = np.array([4.0, 8.0]), np.array([1.0, -2.0])
    assert_array_equal(SGD(0.5).update([p], [g], None)[0][0], [3.5, 9])
    rule, state, q = SGD(0.5, momentum=0.5), None, p
    for expected in ([3.5, 9.0], [2.75, 10.5], [1.875, 12.25]):  # v = g, 1.5 g, 1.75 g
        (q,), state = rule.update([q], [g], state)
        assert_array_equal(q, expected)
    assert_array_equal(p, [4, 8])


def test_adam_follows_its_algorithm():
    rule, state, p = Adam(lr=0.1, beta1=0.5, beta2=0.75, epsilon=1e-8), None, np.array([1.0])
    m = v = 0.0
    expected = 1.0
    for t, g in enumerate((2.0, -1.0, 4.0), start=1):
        (p,), state = rule.update([p], [np.array([g])], state)
        m, v = 0.5 * m + 0.5 * g, 0.75 * v + 0.25 * g * g
        expected -= 0.1 * (m / (1 - 0.5**t)) / (math.sqrt(v / (1 - 0.75**t)) + 1e-8)
        assert p[0] == pytest.approx(expected, rel=1e-14)
    assert state.updates == 3


def test_first_step_of_adam_is_the_learning_rate_whatever_the_gradient():
    (p,), _ = Adam(lr=0.25).update([np.zeros(2)], [np.array([1e-3, -50.0])], None)
    assert_allclose(p, [-0.25, 0.25], rtol=1e-4)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SGD(0), "lr must be above 0 and finite, got 0"),
        (lambda: SGD(math.nan), "got nan"),
        (lambda: SGD(0.1, momentum=1.0), "momentum must be at least 0 and below 1, got 1.0"),
        (lambda: Adam(beta2=-0.1), "beta2 must be at least 0 and below 1, got -0.1"),
        (lambda: Adam(epsilon=0), "epsilon must be above 0, got 0"),
    ],
)
def test_an_optimizer_that_cannot_work_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("shape", [(3, 5, 4), (7, 1), (0, 4), (2, 0), (6,)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_rows_are_summed_in_their_dtype(shape, dtype):
    x = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    found = sum_of_rows(x)
    assert_array_equal(found, x.sum(axis=tuple(range(x.ndim - 1))))
    assert found.dtype == dtype


def test_adamw_decays_parameters_apart_from_the_gradients():
    p, g = np.array([2.0, -4.0]), np.array([1.0, 3.0])
    (plain,), _ = Adam(lr=0.25).update([p], [g], None)
    (decayed,), _ = AdamW(lr=0.25, weight_decay=0.5).update([p], [g], None)
    assert_array_equal(decayed, plain - 0.125 * p)


def test_gradients_are_clipped_by_the_norm_of_all_of_them():
    gradients = [np.array([3.0]), np.array([[0.0, 4.0]])]
    for most, factor in ((10, 1), (5.000001, 1), (2.5, 0.5)):
        for g, found in zip(gradients, clipped(gradients, most), strict=True):
            np.testing.assert_allclose(found, factor * g, rtol=1e-6)
