"""Losses as operators.  They are divided by the rows of the whole batch, so the losses of its parts add up."""

from typing import Any

import numpy as np

from parallelism.dtypes import is_floating
from parallelism.ir.core import (
    Extent,
    Operator,
    Rule,
    TensorType,
    elementwise,
    first_dtype,
    is_negative,
    register,
    rule,
)
from parallelism.ir.tracing import apply
from parallelism.kernels import mean_squared_error, softmax_cross_entropy


def _dtype(predictions: TensorType, targets: TensorType, rows: Extent) -> np.dtype[Any]:
    if not is_floating(predictions.dtype):
        raise TypeError(f"predictions must be floating-point numbers, got {predictions.dtype}")
    return predictions.dtype


def _rows(rows: Extent) -> None:
    if is_negative(rows - 1):
        raise ValueError(f"the whole batch must have at least one row, got rows={rows}")


def _squared_rule(predictions: TensorType, targets: TensorType, rows: Extent) -> Rule:
    _rows(rows)
    # The mean divides by the width of the whole prediction, so the width cannot be split.
    return rule("nz!,nz!->", [predictions.shape, targets.shape])


def _squared_derivative(g: Any, y: Any, predictions: Any, targets: Any, rows: Extent) -> list[Any]:
    grad = g * (predictions - targets) * 2 / (rows * predictions.shape[1])
    return [grad, -grad]


def _entropy_rule(logits: TensorType, classes: TensorType, rows: Extent) -> Rule:
    if classes.dtype.kind not in "iu":
        raise TypeError(f"classes must be integers, got {classes.dtype}")
    _rows(rows)
    return rule("nz!,n->", [logits.shape, classes.shape])


def _entropy_derivative(g: Any, y: Any, logits: Any, classes: Any, rows: Extent) -> list[Any]:
    chosen = apply("one_hot", classes, extent=logits.shape[1], dtype=logits.dtype)
    return [g / rows * (apply("softmax", logits, axis=1) - chosen), None]


register(
    Operator(
        "mean_squared_error",
        _squared_rule,
        _dtype,
        lambda predictions, targets, rows: np.asarray(
            mean_squared_error(predictions, targets, rows)[0], predictions.dtype
        ),
        _squared_derivative,
        3,
        {"rows": "an extent"},
    )
)
register(
    Operator(
        "softmax_cross_entropy",
        _entropy_rule,
        _dtype,
        lambda logits, classes, rows: np.asarray(
            softmax_cross_entropy(logits, classes, rows)[0], logits.dtype
        ),
        _entropy_derivative,
        5,
        {"rows": "an extent"},
    )
)


# -- losses of single layers -------------------------------------------------------------------------------------------


def _number(x: TensorType) -> Rule:
    if x.shape:
        raise ValueError(f"a loss is one number, got {x}")
    return elementwise([x.shape])


# Both give out their input.  No gradient passes them.  `local_loss` marks a number as a loss, whose gradient is 1,
# whatever is done with the number: a step may add such losses up in order to report them.
register(
    Operator(
        "stop_gradient",
        lambda x: elementwise([x.shape]),
        first_dtype,
        lambda x: x,
        view=True,
        linear="moves",
        gradient="stops",
    )
)
register(
    Operator(
        "local_loss",
        _number,
        first_dtype,
        lambda x: x,
        lambda g, y, x: [apply("constant", value=1, shape=(), dtype=x.dtype)],
        view=True,
        linear="moves",
        gradient="starts",
    )
)
