"""Activations, each with its gradient as one operator.

The gradient of ``gelu`` is ``gelu_gradient(grad, x)``.  ``swiglu(gate, x)`` is ``silu(gate) * x``; its gradient has two
outputs.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from parallelism.dtypes import is_floating
from parallelism.ir.core import Operator, TensorType
from parallelism.ir.core.rules import Rule, elementwise, letters, rule
from parallelism.ir.core.table import register
from parallelism.ir.tracing.tracing import apply
from parallelism.kernels import ACTIVATIONS, swiglu, swiglu_backward
from parallelism.kernels.error_function import erf


def floating(x: TensorType, *others: TensorType, **_: Any) -> np.dtype[Any]:
    """The dtype of the first input; ``TypeError`` unless all inputs are floating-point and of this dtype."""
    if not is_floating(x.dtype):
        raise TypeError(f"the inputs must be floating-point, got {x.dtype}")
    for type in others:
        if type.dtype != x.dtype:
            raise TypeError(f"the inputs must be of one dtype, got {x.dtype} and {type.dtype}")
    return x.dtype


def one_shape(*types: TensorType, outputs: int = 1) -> Rule:
    """The rule of an elementwise operator whose inputs and outputs all have one shape."""
    names = letters(types[0].ndim)
    return rule(
        f"{','.join([names] * len(types))}->{','.join([names] * outputs)}", [type.shape for type in types]
    )


def _activation(name: str, flops: int, gradient_flops: int) -> None:
    """Register an activation and its gradient."""
    kernels, gradient = ACTIVATIONS[name], f"{name}_gradient"
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
            flops=gradient_flops,
            linear=(0,),
        )
    )


_activation("gelu", 8, 14)
_activation("silu", 5, 9)
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
        lambda x: np.exp(-np.logaddexp(0, -x)),
        lambda g, y, x: [g * y * (1 - y)],
        4,
    )
)
register(
    Operator(
        "swiglu",
        lambda gate, x: one_shape(gate, x),
        floating,
        swiglu,
        lambda g, y, gate, x: apply("swiglu_gradient", g, gate, x),
        6,
    )
)
register(
    Operator(
        "swiglu_gradient",
        lambda grad, gate, x: one_shape(grad, gate, x, outputs=2),
        floating,
        lambda grad, gate, x: swiglu_backward(gate, x, grad),
        flops=13,
        linear=(0,),
    )
)
