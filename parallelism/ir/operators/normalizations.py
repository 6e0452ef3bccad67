"""Operators that need a whole dim at once: softmax, and the normalizations along the last dim.

The gradient of each is one operator.  It computes the statistics of its rows again, so that none are kept.
"""

from typing import Any

import numpy as np

from parallelism.ir.core import Operator, Rule, TensorType, along_whole, letters, register, rule
from parallelism.ir.core.rules import along
from parallelism.ir.operators.activations import floating
from parallelism.ir.tracing import apply
from parallelism.kernels import layer_norm, layer_norm_backward, rms_norm, rms_norm_backward
from parallelism.kernels.normalization import gated_rms_norm, gated_rms_norm_backward


def softmax(x: Any, axis: int) -> Any:
    """``exp(x)`` divided by its sum along ``axis``."""
    powers = np.exp(x - x.max(axis=axis, keepdims=True, initial=-np.inf))
    return powers / powers.sum(axis=axis, keepdims=True)


def log_softmax(x: Any, axis: int) -> Any:
    """The logarithm of the softmax of ``x`` along ``axis``."""
    shifted = x - x.max(axis=axis, keepdims=True, initial=-np.inf)
    return shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True))


def _softmax_gradient(grad: Any, y: Any, axis: int, scale: float) -> Any:
    product = grad * y
    product -= y * product.sum(axis=axis, keepdims=True)
    return product if scale == 1 else product * y.dtype.type(scale)


def _softmax_gradient_rule(grad: TensorType, y: TensorType, axis: int, scale: float) -> Rule:
    term = along(y.ndim, axis, "z!")
    return rule(f"{term},{term}->{term}", [grad.shape, y.shape])


def _normalization(*types: TensorType, epsilon: float) -> Rule:
    if not types[0].ndim:
        raise ValueError("the input must have at least one dim")
    names = letters(types[0].ndim - 1, "z")
    return rule(f"{names}z!{',z!' * (len(types) - 1)}->{names}z!", [type.shape for type in types])


def _normalization_gradient(*types: TensorType, weights: int) -> Rule:
    """``grad, x, weight -> gradients of x and of the weights``; those of the weights are sums over the rows."""
    if not types[0].ndim:
        raise ValueError("the input must have at least one dim")
    names = letters(types[0].ndim - 1, "z")
    return rule(f"{names}z!,{names}z!,z!->{names}z!{',z!' * weights}", [type.shape for type in types])


def _gated(*types: TensorType, given: int) -> Rule:
    """``[grad,] x, gate, weight``, to the result, or to the gradients of the three; the weight has last dims of x."""
    x, weight = types[0], types[-1]
    if not 0 < weight.ndim < x.ndim:
        raise ValueError(
            f"the weight must have at least one dim, and fewer than the input, got {x} and {weight}"
        )
    rows = f"{letters(x.ndim - 1, 'z')}z!"
    last = rows[-1 - weight.ndim :]
    found = f"{rows},{rows},{last}" if given else rows
    return rule(f"{f'{rows},' * (len(types) - 1)}{last}->{found}", [type.shape for type in types])


def _softmax_second(g: Any, h: Any, grad: Any, y: Any, axis: int, scale: float) -> list[Any]:
    """The gradient is ``scale (grad y - y sum(grad y))``, in which grad and another gradient can change places."""
    of_g, of_grad = (np.sum(each * y, axis=axis, keepdims=True) for each in (g, grad))
    to_y = g * grad - grad * of_g - g * of_grad
    return [apply("softmax_gradient", g, y, axis=axis, scale=scale), to_y if scale == 1 else to_y * scale]


def _second(g: Any, grad: Any, x: Any, weight: Any, epsilon: float, *, centred: bool) -> list[Any]:
    """The derivative of the gradient of a normalization, whose outputs have the gradients ``g``.

    With the normalized rows n = (x - mean) r, and P(v) = v - mean(v) - n mean(v n), a symmetric map, the gradient of x
    is r P(grad weight).  The derivative by n is q, and r depends on x, too: dr/dx = -r^2 n / extent.
    """

    def mean(v: Any) -> Any:
        return np.mean(v, axis=-1, keepdims=True)

    away = x - mean(x) if centred else x
    r = 1 / np.sqrt(mean(away * away) + epsilon)
    n = away * r

    def projected(v: Any) -> Any:
        return (v - mean(v) if centred else v) - n * mean(v * n)

    of_x = np.zeros_like(x) if g[0] is None else g[0]
    of_weight = np.zeros_like(weight) if g[1] is None else g[1]
    weighted = grad * weight
    back = r * projected(of_x)
    q = of_weight * grad - r * (of_x * mean(weighted * n) + weighted * mean(of_x * n))
    to_x = r * projected(q) - r * r * n * mean(of_x * projected(weighted))
    to_grad = weight * back + of_weight * n
    if centred and g[2] is not None:
        to_grad = to_grad + g[2]
    return [to_grad, to_x, grad * back]


_EPSILON = {"epsilon": "a number"}

register(
    Operator(
        "softmax",
        along_whole,
        floating,
        softmax,
        lambda g, y, x, axis: [apply("softmax_gradient", g, y, axis=axis, scale=1.0)],
        4,
        {"axis": "an integer"},
    )
)
register(
    Operator(
        "softmax_gradient",
        _softmax_gradient_rule,
        floating,
        _softmax_gradient,
        _softmax_second,
        4,
        {"axis": "an integer", "scale": "a number"},
        linear=(0,),
    )
)
register(
    Operator(
        "log_softmax",
        along_whole,
        floating,
        log_softmax,
        lambda g, y, x, axis: [g - np.exp(y) * np.sum(g, axis=axis, keepdims=True)],
        4,
        {"axis": "an integer"},
    )
)
register(
    Operator(
        "layer_norm",
        lambda x, weight, bias, epsilon: _normalization(x, weight, bias, epsilon=epsilon),
        floating,
        layer_norm,
        lambda g, y, x, weight, bias, epsilon: apply("layer_norm_gradient", g, x, weight, epsilon=epsilon),
        8,
        _EPSILON,
    )
)
register(
    Operator(
        "layer_norm_gradient",
        lambda grad, x, weight, epsilon: _normalization_gradient(grad, x, weight, weights=2),
        floating,
        layer_norm_backward,
        lambda g, y, grad, x, weight, epsilon: _second(g, grad, x, weight, epsilon, centred=True),
        18,
        _EPSILON,
        linear=(0,),
    )
)
register(
    Operator(
        "rms_norm",
        lambda x, weight, epsilon: _normalization(x, weight, epsilon=epsilon),
        floating,
        rms_norm,
        lambda g, y, x, weight, epsilon: apply("rms_norm_gradient", g, x, weight, epsilon=epsilon),
        5,
        _EPSILON,
    )
)
register(
    Operator(
        "rms_norm_gradient",
        lambda grad, x, weight, epsilon: _normalization_gradient(grad, x, weight, weights=1),
        floating,
        rms_norm_backward,
        lambda g, y, grad, x, weight, epsilon: _second(g, grad, x, weight, epsilon, centred=False),
        13,
        _EPSILON,
        linear=(0,),
    )
)
register(
    Operator(
        "gated_rms_norm",
        lambda x, gate, weight, **_: _gated(x, gate, weight, given=0),
        floating,
        gated_rms_norm,
        lambda g, y, *inputs, **attributes: apply("gated_rms_norm_gradient", g, *inputs, **attributes),
        11,
        _EPSILON | {"gate_first": "a bool"},
    )
)
register(
    Operator(
        "gated_rms_norm_gradient",
        lambda grad, x, gate, weight, **_: _gated(grad, x, gate, weight, given=1),
        floating,
        gated_rms_norm_backward,
        flops=24,
        attributes=_EPSILON | {"gate_first": "a bool"},
        linear=(0,),
    )
)
