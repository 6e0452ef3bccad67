"""``x[bools]``, whose number of elements depends on the values: what programs do with it without needing the number.

The elements are computed on, reduced, and written back: ``x[x > 0] *= 2``, ``x[mask] = y[mask]``, ``x[mask].mean()``.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from parallelism.dtypes import is_floating, limits_of
from parallelism.ir.core import Op, Value
from parallelism.ir.tracing import Traced, lift, refuse
from parallelism.ir.tracing.refusing import recorded_line


class Selected(np.lib.mixins.NDArrayOperatorsMixin):
    """The elements of an array where bools are true.  The others are 1, so that no function of them is nan.

    Reductions of no elements give what the other elements stand for: 0 for a sum, the smallest number for a maximum.
    """

    __hash__ = object.__hash__

    def __init__(self, whole: Any, mask: Any) -> None:
        self.mask, self.line = mask, recorded_line()
        wide = mask.reshape((*mask.shape, *[1] * (whole.ndim - mask.ndim)))
        self.whole: Any = np.where(wide, whole, lift(1, dtype=whole.dtype))

    @property
    def dtype(self) -> Any:
        return self.whole.dtype

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        target = options.pop("out", (None,))[0]
        if method != "__call__" or options or (target is not None and target is not self):
            _refuse_selected(f"numpy.{ufunc.__name__}")
        wholes = [self._whole_of(x) for x in inputs]
        result = ufunc(*wholes)
        if not isinstance(result, Traced):
            _refuse_selected(f"numpy.{ufunc.__name__}")
        if target is None:
            return Selected(result, self.mask)
        if not np.can_cast(result.dtype, self.dtype, "same_kind"):
            refuse(f"changing elements of {self.dtype} in place into ones of {result.dtype}")
        self.whole = result.astype(self.dtype)
        return self

    def _whole_of(self, x: Any) -> Any:
        """An operand for all elements: of another selection by the same bools, or a number."""
        if isinstance(x, Selected):
            if not _is_same(x.mask, self.mask):
                refuse("a function of elements that different bools select", "use numpy.where")
            return x.whole
        if np.ndim(x) == 0:
            return x
        return _refuse_selected(f"a function of an array of shape {list(np.shape(x))}")

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        if function not in _REDUCED or len(args) > 1 or [*options] not in ([], ["axis"]):
            _refuse_selected(f"numpy.{function.__name__}")
        return self._reduced(function, options.get("axis"))

    def _reduced(self, function: Any, axis: Any = None) -> Any:
        if axis not in (None, 0):
            _refuse_selected(f"numpy.{function.__name__} along axis {axis}")
        axes = tuple(range(self.whole.ndim if axis is None else self.mask.ndim))
        mask = self.mask.reshape((*self.mask.shape, *[1] * (self.whole.ndim - self.mask.ndim)))
        if function is not np.mean:
            neutral = lift(_neutral(function, self.dtype), dtype=self.dtype)
            return function(np.where(mask, self.whole, neutral), axis=axes)
        counted = np.broadcast_to(mask, self.whole.shape)
        total = self._reduced(np.sum, axis)
        total = total if is_floating(self.dtype) else total.astype(np.float64)
        return total / np.sum(counted, axis=axes).astype(total.dtype)

    def astype(self, dtype: Any) -> "Selected":
        return Selected(self.whole.astype(dtype), self.mask)

    def copy(self) -> "Selected":
        return Selected(self.whole, self.mask)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        refuse("indexing by bools", _WHY, self.line)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(np.ndarray, name):
            raise AttributeError(f"selected elements have no attribute {name!r}")
        function = getattr(np, name, None)
        if function not in _REDUCED:
            _refuse_selected(f"their {name}")
        return lambda axis=None: self._reduced(function, axis)

    def __getitem__(self, key: Any) -> NoReturn:
        _refuse_selected("an index")

    def written_into(self, x: Any, mask: Any) -> Any:
        """``x`` with these elements where the bools are true, which must be those that selected them."""
        if not _is_same(lift(mask), self.mask):
            refuse("writing elements that other bools have selected", "use numpy.where")
        wide = lift(mask).reshape((*mask.shape, *[1] * (x.ndim - mask.ndim)))
        if self.whole.shape != x.shape:
            refuse(f"writing elements of an array of shape {self.whole.shape} into one of shape {x.shape}")
        return np.where(wide, self.whole.astype(x.dtype), x)


_WHY = "the shape of the result depends on the values; use numpy.where"
_REDUCED = {np.sum, np.prod, np.max, np.min, np.amax, np.amin, np.any, np.all, np.mean}


def _neutral(function: Any, dtype: np.dtype[Any]) -> Any:
    """What does not change the result of a reduction."""
    if function in (np.sum, np.prod, np.any, np.all):
        return {np.sum: 0, np.prod: 1, np.any: False, np.all: True}[function]
    limits = limits_of(dtype) if is_floating(dtype) else np.iinfo(dtype)
    least, most = (-np.inf, np.inf) if is_floating(dtype) else (int(limits.min), int(limits.max))
    return least if function in (np.max, np.amax) else most


def _refuse_selected(what: str) -> NoReturn:
    refuse(f"{what} of the elements that bools select", _WHY)


def _is_same(a: Traced, b: Traced) -> bool:
    """Whether two arrays are the same for sure: one value, or equal ops of such."""
    makers = {value: op for op in a.builder.ops for value in op.outputs}

    def same(one: Value, other: Value) -> bool:
        if one is other or one == other:
            return True
        return _alike(makers.get(one), makers.get(other)) and all(
            same(*pair) for pair in zip(makers[one].inputs, makers[other].inputs, strict=True)
        )

    return same(a.value, b.value)


def _alike(one: Op | None, other: Op | None) -> bool:
    if one is None or other is None:
        return False
    kinds: Sequence[Any] = (one.kind, one.attributes, len(one.inputs), len(one.outputs))
    return list(kinds) == [other.kind, other.attributes, len(other.inputs), 1]
