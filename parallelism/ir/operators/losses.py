"""Losses: the cross-entropy of logits whose classes may be split over devices, and those of whole rows.

They are divided by the rows of the whole batch, so the losses of its parts add up.

    largest = max(logits)                                       along the last dim
    sums    = exponential_sums(logits, largest)
    loss    = cross_entropy(logits, classes, largest, sums)     the sum over all rows of log(sum exp(logit)) - logit of
                                                                the class, divided by ``rows``

If the last dim is split, `largest` and `sums` are reduced over its parts, one number for each row, and the loss, a
single number; no logits move (Shoeybi et al., *Megatron-LM*, 2019, arXiv:1909.08053, section 3).  The gradient of the
logits is one operator and communicates nothing.  A row's loss is added where its class lies: ``first`` is the number of
the first class of a part, ``whole`` the number of all classes.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    letters,
    product,
    register,
    rule,
)
from parallelism.ir.operators.activations import floating
from parallelism.ir.operators.indexing import places
from parallelism.ir.tracing.tracing import apply
from parallelism.kernels import (
    cross_entropy_backward,
    exponentials,
    mean_squared_error,
    softmax_cross_entropy,
    target_logits,
)

FUSED_LOSS = "fused_cross_entropy"
"""The attribute of a program whose loss reads logits in their own dtype, also where all else of it is in a wider one."""
READING_LOGITS = frozenset(("max", "exponential_sums", "cross_entropy"))
"""The operators of the loss that read logits, their first input."""


def _rows(logits: TensorType) -> str:
    if not logits.ndim:
        raise ValueError("logits must have a dim of classes, the last one")
    return letters(logits.ndim - 1, "z")


def _sums_rule(logits: TensorType, largest: TensorType) -> Rule:
    names = _rows(logits)
    return rule(f"{names}z,{names}->{names}", [logits.shape, largest.shape])


def _sums_derivative(g: Any, y: Any, logits: Any, largest: Any) -> list[Any]:
    powers = np.exp(logits - largest.reshape((*largest.shape, 1)))
    return [powers * g.reshape((*g.shape, 1)), -(g * y)]


def _check(logits: TensorType, classes: TensorType, rows: Extent) -> None:
    if classes.dtype.kind not in "iu":
        raise TypeError(f"classes must be integers, got {classes.dtype}")
    if isinstance(rows, int) and rows < 1:
        raise ValueError(f"the whole batch must have at least one row, got rows={rows}")


def _loss_rule(
    logits: TensorType,
    classes: TensorType,
    largest: TensorType,
    sums: TensorType,
    rows: Extent,
    first: Extent,
    whole: Extent,
) -> Rule:
    _check(logits, classes, rows)
    names = _rows(logits)
    return rule(f"{names}z,{names},{names},{names}->", [x.shape for x in (logits, classes, largest, sums)])


def _at_least_1(sums: Any) -> Any:
    """The sums: each has the term exp(0) of the largest logit.  They are zero only where no device moved its terms."""
    return np.maximum(sums, 1)


def _loss(logits: Any, classes: Any, largest: Any, sums: Any, rows: int, first: int, whole: int) -> Any:
    place = places(classes, whole)
    here = (place >= first) & (place < first + logits.shape[-1])
    each = np.log(_at_least_1(sums)) + largest - target_logits(logits, place, first)
    return np.asarray(np.sum(each, where=here) / rows, np.result_type(logits, largest))


def _gradient_rule(
    grad: TensorType,
    logits: TensorType,
    classes: TensorType,
    largest: TensorType,
    sums: TensorType,
    rows: Extent,
    first: Extent,
    whole: Extent,
) -> Rule:
    _check(logits, classes, rows)
    names = _rows(logits)
    types = (grad, logits, classes, largest, sums)
    return rule(f",{names}z,{names},{names},{names}->{names}z", [x.shape for x in types])


def _gradient(
    grad: Any, logits: Any, classes: Any, largest: Any, sums: Any, rows: int, first: int, whole: int
) -> Any:
    flat, place = logits.reshape(classes.size, logits.shape[-1]), places(classes, whole).reshape(-1)
    powers = exponentials(flat, largest.reshape(-1))
    sums = _at_least_1(sums.reshape(-1))
    found = cross_entropy_backward(powers, sums, place, grad / rows, first)
    return found.reshape(logits.shape).astype(logits.dtype, copy=False)


def _derivative(g: Any, y: Any, *inputs: Any, **attributes: Any) -> list[Any]:
    """The gradient of the logits includes the ways through ``largest`` and ``sums``, which therefore have none."""
    return [apply("cross_entropy_gradient", g, *inputs, **attributes), None, None, None]


def _loss_bytes(types: Sequence[TensorType], outputs: Sequence[TensorType]) -> Extent:
    """One logit of each row is read."""
    logits, *others = types
    picked = product(logits.shape[:-1]) * logits.dtype.itemsize
    return picked + sum((type.nbytes for type in (*others, *outputs)), 0)


def _dtype_of_rows(logits: TensorType, *rows: TensorType) -> np.dtype[Any]:
    """That of what there is of each row.  Logits may be narrower: then each is widened where it is read."""
    floating(logits)
    dtype = floating(*rows)
    if dtype.itemsize < logits.dtype.itemsize:
        raise TypeError(f"what there is of each row must be as wide as logits, {logits.dtype}; got {dtype}")
    return dtype


def _loss_dtype(logits: TensorType, classes: TensorType, *rows: TensorType, **_: Any) -> np.dtype[Any]:
    return _dtype_of_rows(logits, *rows)


def _gradient_dtype(grad: TensorType, logits: TensorType, *others: TensorType, **_: Any) -> np.dtype[Any]:
    """That of the logits, of which it is the gradient."""
    _loss_dtype(logits, *others)
    return logits.dtype


_PART = {"rows": "an extent", "first": "an extent", "whole": "an extent"}

register(
    Operator(
        "exponential_sums",
        _sums_rule,
        _dtype_of_rows,
        lambda logits, largest: exponentials(logits, largest).sum(axis=-1),
        _sums_derivative,
        3,
    )
)
register(
    Operator(
        "cross_entropy",
        _loss_rule,
        _loss_dtype,
        _loss,
        _derivative,
        lambda rule, **_: 4 * product(n for letter, n in rule.extents.items() if letter != "z"),
        _PART,
        nbytes=_loss_bytes,
        indexed="z",
    )
)
register(
    Operator(
        "cross_entropy_gradient",
        _gradient_rule,
        _gradient_dtype,
        _gradient,
        flops=4,
        attributes=_PART,
        linear=(0,),
        indexed="z",
    )
)


# -- losses of whole rows ----------------------------------------------------------------------------------------------


def _dtype(predictions: TensorType, targets: TensorType, rows: Extent) -> np.dtype[Any]:
    if not is_floating(predictions.dtype):
        raise TypeError(f"predictions must be floating-point numbers, got {predictions.dtype}")
    return predictions.dtype


def _check_rows(rows: Extent) -> None:
    if is_negative(rows - 1):
        raise ValueError(f"the whole batch must have at least one row, got rows={rows}")


def _squared_rule(predictions: TensorType, targets: TensorType, rows: Extent) -> Rule:
    _check_rows(rows)
    # The mean divides by the width of the whole prediction, so the width cannot be split.
    return rule("nz!,nz!->", [predictions.shape, targets.shape])


def _squared_derivative(g: Any, y: Any, predictions: Any, targets: Any, rows: Extent) -> list[Any]:
    grad = g * (predictions - targets) * 2 / (rows * predictions.shape[1])
    return [grad, -grad]


def _entropy_rule(logits: TensorType, classes: TensorType, rows: Extent) -> Rule:
    if classes.dtype.kind not in "iu":
        raise TypeError(f"classes must be integers, got {classes.dtype}")
    _check_rows(rows)
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
