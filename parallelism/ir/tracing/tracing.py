"""Traced arrays: NumPy's operations on them are recorded as ops.

A `Traced` array has a shape and a dtype, but no values.  NumPy calls its ``__array_ufunc__`` and
``__array_function__`` (NEP 13 and 18).  The modules ``numpy_*`` define how functions that are not ufuncs are recorded.
The derivatives in the table of operators are written with traced arrays, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from inspect import signature
from typing import Any, NoReturn

import numpy as np

from parallelism.dtypes import is_floating, is_narrow, limits_of
from parallelism.ir.core import (
    OPERATORS,
    Builder,
    Expression,
    Extent,
    IRError,
    RecordError,
    TensorType,
    Value,
    checked_dtype,
    dtype_text,
    frozen_attributes,
    operator,
    resolved,
)
from parallelism.ir.tracing.current import current
from parallelism.ir.tracing.in_place import Writable
from parallelism.ir.tracing.refusing import CONVERSIONS, REASONS, refuse, warn_of_promotion

MOST_CONSTANT = 4096
"""The largest number of elements of an array that may be a constant of a program."""

CALLS: dict[Any, Callable[..., Any]] = {}
"""How calls of NumPy's functions are recorded, except most ufuncs."""
VIEWS: set[Any] = set()
"""Those of the functions whose results share the memory of their first argument."""


class Traced(Writable, np.lib.mixins.NDArrayOperatorsMixin):
    """An array of a program that is being recorded."""

    __slots__ = ("builder",)
    __hash__ = object.__hash__

    def __init__(self, builder: Builder, value: Value) -> None:
        super().__init__(value)
        self.builder = builder

    # -- attributes ----------------------------------------------------------------------------------------------------

    @property
    def type(self) -> TensorType:
        return self._value.type         # Writing in place never changes the type.

    @property
    def shape(self) -> tuple[Extent, ...]:
        return self.type.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.type.dtype

    @property
    def ndim(self) -> int:
        return self.type.ndim

    @property
    def size(self) -> Extent:
        return self.type.size

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> Extent:
        return self.type.nbytes

    @property
    def mT(self) -> Any:  # noqa: N802
        return np.matrix_transpose(self)

    @property
    def T(self) -> Any:  # noqa: N802  (as NumPy calls it)
        return self.transpose()

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("len() of an array without dims")
        extent = self.shape[0]
        return extent if isinstance(extent, int) else refuse(f"len() of an array of shape {self.shape}")

    def __repr__(self) -> str:
        return f"<recorded %{self.value.name}: {self.type}>"

    # -- NumPy's protocols ---------------------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        name = f"numpy.{ufunc.__name__}"
        if "out" in options:
            out, = options.pop("out")
            return _target(name, out).become(self.__array_ufunc__(ufunc, method, *inputs, **options))
        if method == "outer" and len(inputs) == 2 and not options:
            a, b = map(lift, inputs)
            return ufunc(a.reshape((*a.shape, *[1] * b.ndim)), b)
        if method == "accumulate" and ufunc is np.add:
            return np.cumsum(inputs[0], **{"axis": 0, **options})
        axis = options.get("axis", 0)
        options = {key: value for key, value in options.items() if value is not None}
        if method == "reduce" and ufunc in _REDUCTIONS:
            return _REDUCTIONS[ufunc](inputs[0], **{**options, "axis": axis})
        if method != "__call__":
            refuse(f"{name}.{method}")
        if "dtype" in options and len(options) == 1 and ufunc.nout == 1:
            dtype = options.pop("dtype")
            inputs = tuple(lift(x, dtype=dtype).astype(dtype) for x in inputs)
        if options:
            refuse(f"{name} with {', '.join(options)}=")
        if ufunc in CALLS:
            return _own(CALLS[ufunc](*inputs), inputs)
        if ufunc not in _kinds():
            refuse(name)
        return apply(_kinds()[ufunc], *_promoted(ufunc, inputs))

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        name = f"{function.__module__}.{function.__name__}"
        if function not in CALLS:
            refuse(name, REASONS.get(function, ""))
        out = options.pop("out", None)
        try:
            result = CALLS[function](*args, **options)
        except IRError:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            refuse(name, _unfit(CALLS[function], args, options) or str(error))
        if out is not None:
            return _target(name, out).become(result)
        if function not in VIEWS:
            return _own(result, args)
        first, *rest = args or (None,)

        def again(base: Any) -> Any:
            return CALLS[function](base, *rest, **options)

        if isinstance(result, list | tuple):
            return type(result)(x.lies_in(first, lambda base, i=i: again(base)[i]) for i, x in enumerate(result))
        return result.lies_in(first, again) if isinstance(first, Traced) else result

    def __pow__(self, exponent: Any) -> Any:
        """As for NumPy's arrays, some exponents have faster functions than ``numpy.power``."""
        known = type(exponent) in (int, float) and is_floating(self.dtype)
        function = _POWERS.get(exponent) if known else None
        return function(self) if function else np.power(self, exponent)

    # -- methods, by the function of the same name ---------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Any:
        result = CALLS["getitem"](self, key)
        if _picks(key) or (not result.ndim and not (isinstance(key, tuple) and any(k is ... for k in key))):
            return _own(result, [self])         # a single element is a number, not a view
        return result.lies_in(self, lambda base: CALLS["getitem"](base, key), key)

    def __setitem__(self, key: Any, value: Any) -> None:
        # In `x[0] += 1` the in-place addition has changed x already when Python assigns the part.
        if _picks(key) or not isinstance(value, Traced) or not value.is_part(self, key):
            self.become(self.written(key, value))

    def written(self, key: Any, value: Any) -> Any:
        """A new array: this one with ``value`` in place of ``x[key]``."""
        return CALLS["setitem"](self, key, value)

    def astype(self, dtype: Any, *, copy: bool = True) -> Traced:
        dtype = checked_dtype(dtype)
        if dtype != self.dtype:
            return apply("convert", self, dtype=dtype)  # type: ignore[no-any-return]
        return Traced(self.builder, self.value) if copy else self

    def copy(self) -> Traced:
        return Traced(self.builder, self.value)

    def flatten(self, order: Any = "C") -> Any:
        return np.ravel(self, order).copy()

    def fill(self, value: Any) -> None:
        self[...] = value

    def sort(self, axis: int = -1, **options: Any) -> None:
        self.become(np.sort(self, axis, **options))

    def reshape(self, *shape: Any, **options: Any) -> Any:
        return np.reshape(self, shape[0] if len(shape) == 1 else shape, **options)

    def transpose(self, *axes: Any) -> Any:
        return np.transpose(self, (axes[0] if len(axes) == 1 else axes) or None)

    # -- operations that need values -----------------------------------------------------------------------------------

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        refuse("the conversion of a recorded array to numbers (numpy.array, numpy.asarray, writing into an array of "
               "numbers, or a function that does so)", "join arrays with numpy.stack, change a dtype with astype, "
               "write into numpy.zeros_like(x), pick from numbers with ir.apply('take', numbers, x, axis=0)")

    def __bool__(self) -> bool:
        refuse("a decision by the values of an array (if, while, and, or, not)")

    def __iter__(self) -> Any:
        return iter([self[i] for i in range(len(self))])

    def __format__(self, form: str) -> str:
        return repr(self) if not form else refuse(f"the values of an array as text ({form})")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(np.ndarray, name):
            raise AttributeError(f"a recorded array has no attribute {name!r}")
        function = getattr(np, name, None)
        if function is None or function not in CALLS:
            refuse(f"the array's {name}")
        return lambda *args, **options: function(self, *args, **options)

    __array_priority__ = 1000


def _refused(what: str, why: str = "") -> Callable[..., NoReturn]:
    return lambda self, *_: refuse(what, why)


for _name, _what in CONVERSIONS.items():
    setattr(Traced, _name, _refused(*_what))


def _in_place(function: Callable[[Any, Any], Any]) -> Callable[[Traced, Any], Any]:
    def change(self: Traced, other: Any) -> Any:
        result = function(self, other)
        # NumPy's sums and single elements are numbers, which do not change in place: the name is bound to a new one.
        return self.become(result) if self.ndim or self.is_view else result

    return change


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"):
    setattr(Traced, f"__i{_name}__", _in_place(getattr(Traced, f"__{_name}__")))


def _unfit(call: Callable[..., Any], args: Any, options: Any) -> str:
    """Why a call does not take these arguments; an empty text if it takes them."""
    try:
        signature(call).bind(*args, **options)
    except TypeError as error:
        return str(error)
    return ""


def _target(name: str, out: Any) -> Traced:
    """The array of ``out=``, which must be traced."""
    if not isinstance(out, Traced):
        refuse(f"{name} into an array of numbers (out=, or an operator as +=)", "write x = x + y")
    return out


def _picks(key: Any) -> bool:
    """Whether an index contains arrays, so that its result is a copy."""
    return any(isinstance(k, Traced | np.ndarray | list) for k in (key if isinstance(key, tuple) else (key,)))


def _own(result: Any, given: Any) -> Any:
    """``result``, copied if it is one of the given arrays."""
    return result.copy() if isinstance(result, Traced) and any(result is x for x in given) else result


def apply(kind: str, *operands: Any, **attributes: Any) -> Any:
    """Apply an operator of the table: record it if an operand is traced, else compute it at once by its kernel.

    It returns an array, or a tuple if the operator has several outputs.  Scalars become constants.  Operators without
    operands (``constant``, ``iota``) are recorded whenever a recording is in progress.
    """
    builder = next((x.builder for x in operands if isinstance(x, Traced)), None if operands else current())
    if builder is None:
        return operator(kind).run([np.asarray(x) for x in operands], frozen_attributes(attributes))
    return emit(builder, kind, *operands, **attributes)


def emit(builder: Builder, kind: str, *operands: Any, **attributes: Any) -> Any:
    """Add an op to ``builder``; `RecordError` if the operands or attributes do not fit."""
    try:
        traced = [lift(x, builder=builder) for x in operands]
        outputs = builder.emit(kind, [x.value for x in traced], attributes)
    except IRError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        refuse(f"the operator {kind}", str(error))
    results = tuple(Traced(builder, value) for value in outputs)
    return results[0] if len(results) == 1 else results


def lift(x: Any, *, builder: Builder | None = None, dtype: Any = None) -> Traced:
    """A traced array as it is; a scalar or an array of numbers as a constant of the program."""
    if isinstance(x, Traced):
        if builder is not None and x.builder is not builder:
            refuse("an array that belongs to another recording")
        return x
    builder = builder or current()
    if builder is None:
        raise RecordError(f"nothing is being recorded, so {x!r} cannot become a constant")
    if isinstance(x, Expression):
        return _constant(builder, x, (), checked_dtype(dtype or np.int64))
    array = np.asarray(x, dtype)
    if dtype_text(array.dtype.newbyteorder("=")) is None:
        refuse(f"an array of {array.dtype} as a constant")
    if is_narrow(array.dtype) and np.isnan(array).any() and not np.isnan(np.asarray(x, np.float64)).any():
        refuse(f"{x!r} as a constant of {array.dtype}", f"the largest number is {limits_of(array.dtype).max}")
    if array.size > MOST_CONSTANT and array.size and (array != array.flat[0]).any():
        refuse(f"an array of shape {array.shape} as a constant of the program", "pass it as an input; a constant has "
               f"at most {MOST_CONSTANT} elements")
    same = array.size > 0 and bool((array == array.flat[0]).all()) and not np.signbit(array[array == 0]).any()
    value: Any = array.flat[0].item() if same else tuple(array.ravel().tolist())
    return _constant(builder, value, array.shape, array.dtype)


def _constant(builder: Builder, value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Traced:
    constant: Traced = emit(builder, "constant", value=value, shape=shape, dtype=dtype)
    return constant


# -- dtypes ------------------------------------------------------------------------------------------------------------


def _promoted(ufunc: np.ufunc, inputs: tuple[Any, ...]) -> list[Traced]:
    """The operands of a ufunc.  Python scalars get the dtype that NumPy gives them."""
    weak = [bool if type(x) is bool else int if isinstance(x, int | Expression) else float
            if type(x) is float else None for x in inputs]
    try:
        given = tuple(
            x.dtype if isinstance(x, Traced) else np.dtype(bool) if w is bool else w or np.asarray(x).dtype
            for x, w in zip(inputs, weak, strict=True)
        )
        used = resolved(ufunc, *given)
    except (TypeError, ValueError) as error:
        refuse(f"numpy.{ufunc.__name__}", str(error))
    check_promotion(f"numpy.{ufunc.__name__}", inputs, used[-1])
    try:
        return [lift(x, dtype=used[i] if w else None) for i, (x, w) in enumerate(zip(inputs, weak, strict=True))]
    except OverflowError as error:
        refuse(f"numpy.{ufunc.__name__}", str(error))


def check_promotion(function: str, inputs: Sequence[Any], result: np.dtype[Any]) -> None:
    """Warn if a NumPy number makes a ``result`` of more than 16 bits of recorded arrays that all have at most 16."""
    if result.itemsize <= 2:
        return
    arrays = [x.dtype for x in inputs if isinstance(x, Traced)]
    if all(is_floating(dtype) and dtype.itemsize <= 2 for dtype in arrays):
        for x in inputs:
            if isinstance(x, np.generic | np.ndarray) and not x.ndim:
                warn_of_promotion(function, arrays[0], x.dtype, result)


_REDUCTIONS: dict[Any, Callable[..., Any]] = {
    np.add: np.sum, np.multiply: np.prod, np.maximum: np.max, np.minimum: np.min,
}
_POWERS: dict[float, np.ufunc] = {2: np.square, 1: np.positive, 0.5: np.sqrt, -1: np.reciprocal}


@cache
def _kinds() -> dict[Any, str]:
    """The names of the operators whose kernels are ufuncs, by ufunc."""
    return {entry.kernel: name for name, entry in OPERATORS.items() if isinstance(entry.kernel, np.ufunc)}
