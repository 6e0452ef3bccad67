"""A dense layer: forward, backward, and their floating-point operations."""

from math import prod

import numpy as np

from parallelism.arrays import Array


def dense(x: Array, weights: Array, bias: Array) -> Array:
    """``x @ weights + bias``: ``(rows, inputs), (inputs, outputs), (outputs,) -> (rows, outputs)``."""
    y: Array = x @ weights
    y += bias
    return y


def dense_backward_input(weights: Array, grad: Array) -> Array:
    """The gradient of a dense layer's input, ``grad @ weights.T``, given the gradient of its output."""
    return grad @ weights.T


def dense_backward_weights(x: Array, grad: Array) -> tuple[Array, Array]:
    """The gradients of weights and bias, ``x.T @ grad`` and ``grad`` summed over its rows."""
    return x.T @ grad, grad.sum(axis=0)


def sum_of_rows(x: Array) -> Array:
    """``x`` summed over all dims but the last, in the dtype of ``x``."""
    rows = x.reshape(prod(x.shape[:-1]), x.shape[-1])
    sums: Array = np.ones(len(rows), x.dtype) @ rows  # The BLAS takes half the time of numpy.sum.
    return sums


def dense_forward_flops(rows: int, inputs: int, outputs: int) -> int:
    """Floating-point operations of `dense`: two for each multiply-add of the product.  The bias is not counted."""
    return 2 * rows * inputs * outputs


def dense_backward_flops(rows: int, inputs: int, outputs: int, *, input_gradient: bool = True) -> int:
    """Floating-point operations of the backward: two products, or one without ``input_gradient`` (the first layer)."""
    return (4 if input_gradient else 2) * rows * inputs * outputs
