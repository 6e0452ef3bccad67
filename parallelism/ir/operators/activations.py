"""Activations, each with its gradient as one operator.

The gradient of ``gelu`` is ``gelu_gradient(grad, x)``.  ``swiglu(gate, x)`` is ``silu(gate) * x``, ``geglu`` and ``reglu``
are the like; their gradients have two outputs.

``weighted_swiglu(gate, x, weights)`` is ``swiglu(gate, x) * weights[..., None]``, for experts: each of their rows has a
weight.  Its gradient computes the activation again, so that the inputs alone are kept.  ``geglu``, ``clamped_swiglu``
and ``relu2`` have such operators, too, as in Megatron-Core 0.16 (`megatron/core/fusions`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from parallelism.dtypes import is_floating
from parallelism.ir.core import Operator, TensorType
from parallelism.ir.core.rules import Rule, elementwise, letters, rule
from parallelism.ir.core.table import operator, register
from parallelism.ir.tracing.tracing import apply
from parallelism.kernels import ACTIVATIONS, swiglu, swiglu_backward
from parallelism.kernels.activations import (
    FURTHER_ACTIVATIONS,
    clamped_swiglu,
    clamped_swiglu_backward,
    gated,
    gated_backward,
)
from parallelism.kernels.error_function import erf


def floating(x: TensorType, *others: TensorType, **_: Any) -> np.dtype[Any]:
    """The dtype of the first input; ``TypeError`` unless all inputs are floating-point and of this dtype."""
    if not is_floating(x.dtype):
        raise TypeError(f"the inputs must be floating-point, got {x.dtype}")
    for type in others:
        if type.dtype != x.dtype:
            raise TypeError(f"the inputs must be of one dtype, got {x.dtype} and {type.dtype}")
    return x.dtype


def sigmoid(x: Any) -> Any:
    """``1 / (1 + exp(-x))``, rounded once: its steps are those of 4 bytes at least."""
    wide = x.astype(np.float32) if x.dtype.itemsize < 4 else x
    return np.exp(-np.logaddexp(0, -wide)).astype(x.dtype)


def one_shape(*types: TensorType, outputs: int = 1) -> Rule:
    """The rule of an elementwise operator whose inputs and outputs all have one shape."""
    names = letters(types[0].ndim)
    return rule(
        f"{','.join([names] * len(types))}->{','.join([names] * outputs)}", [type.shape for type in types]
    )


def _activation(name: str, flops: int, gradient_flops: int, second: Callable[[Any], Any]) -> None:
    """Register an activation and its gradient; ``second`` is the second derivative, of traced arrays."""
    kernels, gradient = (ACTIVATIONS | FURTHER_ACTIVATIONS)[name], f"{name}_gradient"
    register(
        Operator(
            name,
            lambda x: elementwise([x.shape]),
            lambda x: floating(x),
            kernels.forward,
            lambda g, y, x: [apply(gradient, g, x)],
            flops,
        )
    )
    register(
        Operator(
            gradient,
            lambda grad, x: one_shape(grad, x),
            floating,
            lambda grad, x: kernels.backward(x, grad),
            lambda g, y, grad, x: [apply(gradient, g, x), g * grad * second(x)],
            gradient_flops,
            linear=(0,),
        )
    )


def _gelu_second(x: Any) -> Any:
    """With t = tanh(u) and u = a x + b x^3: (1 - t^2) (u' + x (u'' / 2 - t u'^2))."""
    a = math.sqrt(2 / math.pi)
    b = a * 0.044715
    t, slope = np.tanh(a * x + b * x * x * x), a + 3 * b * x * x
    return (1 - t * t) * (slope + x * (3 * b * x - t * slope * slope))


def _silu_second(x: Any) -> Any:
    share = apply("sigmoid", x)
    return share * (1 - share) * (2 + x * (1 - 2 * share))


def _gelu_exact_second(x: Any) -> Any:
    return np.exp(-0.5 * x * x) * (2 - x * x) * (1 / math.sqrt(2 * math.pi))


_SECOND: dict[str, Callable[[Any], Any]] = {
    "gelu": _gelu_second,
    "silu": _silu_second,
    "relu2": lambda x: 2 * (x > 0).astype(x.dtype),
    "gelu_exact": _gelu_exact_second,
    "relu": np.zeros_like,
}
"""The second derivatives of activations."""

_activation("gelu", 8, 14, _SECOND["gelu"])
_activation("silu", 5, 9, _SECOND["silu"])
_activation("relu2", 2, 3, _SECOND["relu2"])
_activation("gelu_exact", 16, 24, _SECOND["gelu_exact"])
register(
    Operator(
        "relu",
        lambda x: elementwise([x.shape]),
        lambda x: floating(x),
        ACTIVATIONS["relu"].forward,
        lambda g, y, x: [g * (x > 0)],
        1,
    )
)
register(
    Operator(
        "erf",
        lambda x: elementwise([x.shape]),
        lambda x: floating(x),
        erf,
        lambda g, y, x: [g * np.exp(-x * x) * (2 / math.sqrt(math.pi))],
        12,
    )
)
register(
    Operator(
        "sigmoid",
        lambda x: elementwise([x.shape]),
        lambda x: floating(x),
        sigmoid,
        lambda g, y, x: [g * y * (1 - y)],
        4,
    )
)


def _gated(
    name: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    flops: int,
    gradient_flops: int,
    of_gate: str | None = None,
) -> None:
    """Register an activation with a gate, and its gradient, which has two outputs.

    ``of_gate`` names the activation of the gate if the other factor is the input as it is."""
    gradient = f"{name}_gradient"
    register(
        Operator(
            name,
            lambda gate, x: one_shape(gate, x),
            floating,
            forward,
            lambda g, y, gate, x: apply(gradient, g, gate, x),
            flops,
        )
    )
    register(
        Operator(
            gradient,
            lambda grad, gate, x: one_shape(grad, gate, x, outputs=2),
            floating,
            lambda grad, gate, x: backward(gate, x, grad),
            partial(_gated_second, of_gate) if of_gate else None,
            gradient_flops,
            linear=(0,),
        )
    )


def _gated_second(of_gate: str, g: Any, y: Any, grad: Any, gate: Any, x: Any) -> list[Any]:
    """The derivative of the gradient of ``a(gate) x``, which is ``grad x a'(gate), grad a(gate)``."""
    to_gate, to_x = (np.zeros_like(x) if part is None else part for part in g)
    slope = partial(_times_slope, of_gate, gate)
    return [
        slope(to_gate * x) + to_x * apply(of_gate, gate),
        to_gate * grad * x * _SECOND[of_gate](gate) + slope(to_x * grad),
        slope(to_gate * grad),
    ]


def _times_slope(activation: str, x: Any, factor: Any) -> Any:
    return factor * (x > 0) if activation == "relu" else apply(f"{activation}_gradient", factor, x)


def _weighted(
    name: str, flops: int, gradient_flops: int, second: Callable[..., list[Any]] | None = None
) -> None:
    """Register an activation of the table that is multiplied by a weight for each row, and its gradient.

    The gradient has an output for each input, that of the weights last; it computes the activation again.  ``second`` is
    the derivative of the gradient without weights, if it has one.
    """
    forward, backward = operator(name), operator(f"{name}_gradient")
    gradient = f"weighted_{name}_gradient"
    register(
        Operator(
            f"weighted_{name}",
            lambda *inputs: _weighted_rule(inputs, gradient=False),
            floating,
            lambda *inputs: forward.kernel(*inputs[:-1]) * inputs[-1][..., None],
            lambda g, y, *inputs: apply(gradient, g, *inputs),
            flops,
        )
    )
    register(
        Operator(
            gradient,
            lambda *inputs: _weighted_rule(inputs, gradient=True),
            floating,
            partial(_weighted_backward, forward.kernel, backward.kernel),
            partial(_weighted_second, name, second) if second else None,
            gradient_flops,
            linear=(0,),
        )
    )


def _weighted_rule(inputs: Sequence[TensorType], *, gradient: bool) -> Rule:
    """The rule of an elementwise operator whose last input has a number for each row.

    The first input of a ``gradient`` is that of the output; there is an output for each of the others.
    """
    if not inputs[0].ndim:
        raise ValueError("rows with weights have a dim of features, and a scalar has none")
    names = letters(inputs[0].ndim)
    terms = [names] * (len(inputs) - 1) + [names[:-1]]
    outputs = terms[1:] if gradient else [names]
    return rule(f"{','.join(terms)}->{','.join(outputs)}", [type.shape for type in inputs])


def _weighted_backward(
    forward: Callable[..., Any], backward: Callable[..., Any], grad: Any, *inputs: Any
) -> tuple[Any, ...]:
    *given, weights = inputs
    of_weights = np.einsum("...f,...f->...", grad, forward(*given))
    of_given = backward(grad * weights[..., None], *given)
    return *(of_given if len(given) > 1 else [of_given]), of_weights


def _weighted_second(
    name: str, second: Callable[..., list[Any]], g: Any, y: Any, grad: Any, *inputs: Any
) -> list[Any]:
    """The derivative of ``b(grad * weights), sum(grad * a)``, of an activation a and its gradient b."""
    *given, weights = inputs
    to_weights = np.zeros_like(weights) if g[-1] is None else g[-1]
    of_all, *of_given = second(g[:-1], y[:-1], grad * weights[..., None], *given)
    through = apply(f"{name}_gradient", to_weights[..., None] * grad, *given)
    through = through if len(given) > 1 else [through]
    return [
        of_all * weights[..., None] + to_weights[..., None] * apply(name, *given),
        *(a + b for a, b in zip(of_given, through, strict=True)),
        np.sum(of_all * grad, axis=-1),
    ]


def _relu2_second(g: Any, y: Any, grad: Any, x: Any) -> list[Any]:
    """The derivative of the gradient of ``relu(x)^2``."""
    to_x = np.zeros_like(x) if g[0] is None else g[0]
    return [apply("relu2_gradient", to_x, x), to_x * grad * _SECOND["relu2"](x)]


_gated("swiglu", swiglu, swiglu_backward, 6, 13, "silu")
_gated("clamped_swiglu", clamped_swiglu, clamped_swiglu_backward, 10, 18)
for _name, _of_gate, _flops, _gradient_flops in (
    ("geglu", "gelu", 9, 24),
    ("geglu_exact", "gelu_exact", 17, 42),
    ("reglu", "relu", 2, 4),
):
    _gated(
        _name, partial(gated, _of_gate), partial(gated_backward, _of_gate), _flops, _gradient_flops, _of_gate
    )
_weighted("swiglu", 7, 22, partial(_gated_second, "silu"))
_weighted("geglu", 10, 36, partial(_gated_second, "gelu"))
_weighted("clamped_swiglu", 11, 31)
_weighted("relu2", 3, 8, _relu2_second)
