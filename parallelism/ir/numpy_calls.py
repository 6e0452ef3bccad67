"""What NumPy's functions that compute become when they are recorded: mostly one operator each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from parallelism.ir.extents import Expression, product
from parallelism.ir.numpy_shapes import axes_of, axis_of, stands_for
from parallelism.ir.tracing import CALLS, Traced, apply, lift, refuse
from parallelism.ir.types import checked_dtype


def _alike(*operands: Any) -> list[Traced]:
    """Operands of one dtype: that of the arrays, scalars of Python following them."""
    weak = [isinstance(x, int | float | Expression) for x in operands]
    dtype = np.result_type(*(
        (1 if isinstance(x, Expression) else x) if w else x.dtype if isinstance(x, Traced) else np.asarray(x)
        for x, w in zip(operands, weak, strict=True)
    ))
    return [lift(x, dtype=dtype if w else None).astype(dtype) for x, w in zip(operands, weak, strict=True)]


# -- reductions --------------------------------------------------------------------------------------------------------


def _reduction(kind: str) -> Callable[..., Any]:
    def call(x: Any, axis: Any = None, dtype: Any = None, out: None = None, keepdims: Any = False) -> Any:
        if out is not None:
            refuse(f"numpy.{kind} into an array that is there already (out=)")
        x = x if dtype is None else x.astype(dtype)
        return apply(kind, x, axes=axes_of(axis, x.ndim), keepdims=bool(keepdims))

    return call


for _kind, _functions in {
    "sum": (np.sum,), "prod": (np.prod,), "max": (np.max, np.amax), "min": (np.min, np.amin), "any": (np.any,),
    "all": (np.all,),
}.items():
    stands_for(*_functions)(_reduction(_kind))
for _function in (np.max, np.amax, np.min, np.amin, np.any, np.all):
    # these have no dtype, so what comes third is out
    CALLS[_function] = lambda x, axis=None, out=None, keepdims=False, call=CALLS[_function]: call(
        x, axis, None, out, keepdims)


@stands_for(np.mean)
def _mean(x: Any, axis: Any = None, dtype: Any = None, out: None = None, keepdims: Any = False) -> Any:
    if x.dtype.kind in "biu" and dtype is None:
        dtype = np.float64
    axes = axes_of(axis, x.ndim)
    total = CALLS[np.sum](x, axes, dtype, out, keepdims)
    return total / product(x.shape[d] for d in axes)


@stands_for(np.var)
def _var(x: Any, axis: Any = None, *, ddof: int = 0, keepdims: Any = False) -> Any:
    axes = axes_of(axis, x.ndim)
    centred = x - _mean(x, axes, keepdims=True)
    return CALLS[np.sum](centred * centred, axes, None, None, keepdims) / (product(x.shape[d] for d in axes) - ddof)


@stands_for(np.std)
def _std(x: Any, axis: Any = None, *, ddof: int = 0, keepdims: Any = False) -> Any:
    return np.sqrt(_var(x, axis, ddof=ddof, keepdims=keepdims))


@stands_for(np.argmax)
def _argmax(x: Any, axis: Any = None) -> Any:
    return _extreme("argmax", x, axis)


@stands_for(np.argmin)
def _argmin(x: Any, axis: Any = None) -> Any:
    return _extreme("argmin", x, axis)


def _extreme(kind: str, x: Any, axis: Any) -> Any:
    return apply(kind, x.reshape(-1), axis=0) if axis is None else apply(kind, x, axis=axis_of(axis, x.ndim))


@stands_for(np.cumsum)
def _cumsum(x: Any, axis: Any = None) -> Any:
    return apply("cumsum", x.reshape(-1), axis=0) if axis is None else apply("cumsum", x, axis=axis_of(axis, x.ndim))


# -- products ----------------------------------------------------------------------------------------------------------


@stands_for(np.matmul)
def _matmul(a: Any, b: Any) -> Any:
    a, b = lift(a), lift(b)
    if a.ndim >= 2 and b.ndim >= 2:
        return apply("matmul", a, b)
    if not a.ndim or not b.ndim:
        refuse("numpy.matmul of a scalar")
    if b.ndim == 1:
        found = apply("matmul", a.reshape(1, -1) if a.ndim == 1 else a, b.reshape(-1, 1))
        return found.reshape(a.shape[:-1])
    return apply("matmul", a.reshape(1, -1), b).reshape((*b.shape[:-2], b.shape[-1]))


@stands_for(np.dot)
def _dot(a: Any, b: Any) -> Any:
    a, b = lift(a), lift(b)
    if not a.ndim or not b.ndim:
        return a * b
    if b.ndim > 2:
        refuse("numpy.dot with more than two dims on the right", "say it with einsum")
    return _matmul(a, b)


@stands_for(np.outer)
def _outer(a: Any, b: Any) -> Any:
    return apply("einsum", lift(a).reshape(-1), lift(b).reshape(-1), equation="i,j->ij")


@stands_for(np.einsum)
def _einsum(equation: Any, *operands: Any, optimize: Any = False) -> Any:
    if not isinstance(equation, str):
        refuse("numpy.einsum without an equation in letters")
    arrays = [lift(x) for x in operands]
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(arrays):
        raise ValueError(f"{equation} takes {len(terms)} operands, got {len(arrays)}")
    spare = iter(c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz" if c not in equation)
    hidden = [array.ndim - len(term.replace("...", "")) for term, array in zip(terms, arrays, strict=True)]
    dots = [next(spare) for _ in range(max((n for n, t in zip(hidden, terms, strict=True) if "..." in t), default=0))]
    terms = [term.replace("...", "".join(dots[len(dots) - n:])) for n, term in zip(hidden, terms, strict=True)]
    if arrow:
        right = right.replace("...", "".join(dots))
    else:
        joined = "".join(terms)
        right = "".join(dots) + "".join(sorted({c for c in joined if joined.count(c) == 1} - set(dots)))
    return apply("einsum", *arrays, equation=f"{','.join(terms)}->{right}")


# -- elements ----------------------------------------------------------------------------------------------------------


@stands_for(np.where)
def _where(condition: Any, x: Any = None, y: Any = None) -> Any:
    if x is None or y is None:
        refuse("numpy.where with a condition only", "the shape of its result depends on the numbers")
    a, b = _alike(x, y)
    return apply("where", lift(condition), a, b)


@stands_for(np.clip)
def _clip(x: Any, a_min: Any = None, a_max: Any = None) -> Any:
    x = x if a_min is None else np.maximum(x, a_min)
    return x if a_max is None else np.minimum(x, a_max)


@stands_for(np.positive)
def _positive(x: Any) -> Any:
    return x


@stands_for(np.astype)
def _astype(x: Any, dtype: Any, *, copy: bool = True) -> Any:
    return x.astype(dtype)


@stands_for(np.take)
def _take(x: Any, indices: Any, axis: Any = None) -> Any:
    x = lift(x)
    return apply("take", x.reshape(-1), indices, axis=0) if axis is None else apply(
        "take", x, indices, axis=axis_of(axis, x.ndim))


@stands_for(np.take_along_axis)
def _take_along_axis(x: Any, indices: Any, axis: int = -1) -> Any:
    x = lift(x)
    return apply("take_along", x, indices, axis=axis_of(axis, x.ndim))


def _like(value: int) -> Callable[..., Any]:
    return lambda x, dtype=None: apply(
        "constant", value=value, shape=x.shape, dtype=checked_dtype(x.dtype if dtype is None else dtype))


stands_for(np.zeros_like)(_like(0))
stands_for(np.ones_like)(_like(1))
stands_for(np.shape)(lambda x: x.shape)
stands_for(np.ndim)(lambda x: x.ndim)
stands_for(np.size)(lambda x: x.size)


@stands_for(np.tril)
def _tril(x: Any, k: int = 0) -> Any:
    return np.where(_places(x, -2) + k >= _places(x, -1), x, 0)


@stands_for(np.triu)
def _triu(x: Any, k: int = 0) -> Any:
    return np.where(_places(x, -2) + k <= _places(x, -1), x, 0)


def _places(x: Any, axis: int) -> Any:
    shape = x.shape[-2:]
    return apply("iota", dim=axis + 2, shape=shape, starts=(0, 0), dtype=np.dtype(np.int64))
