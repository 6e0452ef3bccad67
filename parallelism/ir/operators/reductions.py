"""Operators that reduce along some dims, and those that find or accumulate along one."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from parallelism.arrays import reduced_shape
from parallelism.dtypes import like_half
from parallelism.ir.core import (
    Linear,
    Operator,
    Rule,
    TensorType,
    along_whole,
    checked_axis,
    letters,
    register,
    rule,
    terms_along,
)
from parallelism.ir.tracing import apply


def _rule(x: TensorType, axes: tuple[int, ...], keepdims: bool, name: str, op: str) -> Rule:
    if list(axes) != sorted(set(axes)):
        raise ValueError(f"axes must be listed once each, in order, got {list(axes)}")
    for axis in axes:
        checked_axis(axis, x.ndim)
    if name in ("max", "min"):
        _check_some(x, axes)
    names = letters(x.ndim)
    kept = reduced_shape(names, axes, keepdims=keepdims)
    return rule(f"{names}->{''.join(map(str, kept))}", [x.shape], op=op)


def _check_some(x: TensorType, axes: Sequence[int]) -> None:
    if any(x.shape[axis] == 0 for axis in axes):
        raise ValueError(f"an empty array has no largest or smallest element: {x} along {list(axes)}")


@lru_cache(maxsize=256)
def _reduced_dtype(kernel: Any, dtype: np.dtype[Any]) -> np.dtype[Any]:
    reduced: np.dtype[Any] = like_half(lambda given: np.asarray(kernel(np.ones(1, given))).dtype, dtype)
    return reduced


def _reduction(
    name: str, kernel: Any, op: str, derivative: Callable[..., Sequence[Any]] | None, linear: Linear = ()
) -> None:
    register(
        Operator(
            name,
            lambda x, axes, keepdims: _rule(x, axes, keepdims, name, op),
            lambda x, axes, keepdims: _reduced_dtype(kernel, x.dtype),
            lambda x, axes, keepdims: kernel(x, axis=axes, keepdims=keepdims),
            derivative,
            1,
            {"axes": "a list of integers", "keepdims": "a bool"},
            linear=linear,
        )
    )


def _kept(y: Any, x: Any, axes: tuple[int, ...]) -> Any:
    """``y`` with the reduced dims as dims of extent 1."""
    return y.reshape(reduced_shape(x.shape, axes, keepdims=True))


def _extreme_derivative(g: Any, y: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> list[Any]:
    """The gradient goes to the extreme elements, in equal parts."""
    chosen = (x == _kept(y, x, axes)).astype(x.dtype)
    return [_kept(g, x, axes) * chosen / np.sum(chosen, axis=axes, keepdims=True)]


def _prod_derivative(g: Any, y: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> list[Any]:
    """The product of all other elements.  It is not zero at an element that is the only zero."""
    one, none = np.ones((), x.dtype), np.zeros((), x.dtype)
    zero = x == none
    zeros = np.sum(zero.astype(x.dtype), axis=axes, keepdims=True)
    divisor = np.where(zero, one, x)
    product = np.prod(divisor, axis=axes, keepdims=True)
    of_zero, of_others = (
        np.where(zeros == one, product, none),
        np.where(zeros == none, product / divisor, none),
    )
    return [_kept(g, x, axes) * np.where(zero, of_zero, of_others)]


_reduction(
    "sum",
    np.sum,
    "sum",
    lambda g, y, x, axes, keepdims: [apply("broadcast_to", _kept(g, x, axes), shape=x.shape)],
    "together",
)
_reduction("prod", np.prod, "prod", _prod_derivative)
_reduction("max", np.max, "max", _extreme_derivative)
_reduction("min", np.min, "min", _extreme_derivative)
_reduction("any", np.any, "max", None)
_reduction("all", np.all, "min", None)


def _argument_rule(x: TensorType, axis: int) -> Rule:
    _check_some(x, [checked_axis(axis, x.ndim)])
    return rule("->".join(terms_along(x.ndim, axis, "z!", "")), [x.shape])


for _name, _kernel in (("argmax", np.argmax), ("argmin", np.argmin)):
    register(
        Operator(
            _name,
            _argument_rule,
            lambda x, axis: np.dtype(np.int64),
            lambda x, axis, kernel=_kernel: kernel(x, axis=axis),
            None,
            1,
            {"axis": "an integer"},
        )
    )

register(
    Operator(
        "cumsum",
        along_whole,
        lambda x, axis: _reduced_dtype(np.sum, x.dtype),
        lambda x, axis: np.cumsum(x, axis=axis),
        lambda g, y, x, axis: [
            apply("flip", apply("cumsum", apply("flip", g, axis=axis), axis=axis), axis=axis)
        ],
        1,
        {"axis": "an integer"},
        linear="together",
    )
)
