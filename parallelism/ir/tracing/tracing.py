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
    Value,
    VerifyError,
    dtype_text,
    frozen_attributes,
    operator,
)
from parallelism.ir.tracing.current import current
from parallelism.ir.tracing.in_place import Writable
from parallelism.ir.tracing.memory_order import UNKNOWN, VIEWING, order_of, place_of
from parallelism.ir.tracing.promotion import meant_dtype, operand_dtypes
from parallelism.ir.tracing.refusing import CONVERSIONS, OTHER_NAMES, REASONS, refuse
from parallelism.ir.tracing.results import computed, seen

MOST_CONSTANT = 4096
"""The largest number of elements of an array that may be a constant of a program."""

CALLS: dict[Any, Callable[..., Any]] = {}
"""How calls of NumPy's functions are recorded, except most ufuncs."""
ACCUMULATIONS: dict[Any, Callable[..., Any]] = {}
"""How the methods ``accumulate`` of ufuncs are recorded."""
VIEWS: dict[Any, Callable[..., int | None]] = {}
"""The functions whose results share the memory of an argument: each returns the argument's place, or None if
these arguments give a copy."""
PASSING: set[Any] = set()
"""The functions whose results are known to be views or not, because other functions have made them."""


class Traced(Writable, np.lib.mixins.NDArrayOperatorsMixin):
    """An array of a program that is being recorded."""

    __slots__ = ("builder",)
    __hash__ = object.__hash__

    def __init__(self, builder: Builder, value: Value) -> None:
        super().__init__(value)
        self.builder = builder

    # -- attributes ----------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[Extent, ...]:
        return self.type.shape

    @shape.setter
    def shape(self, _: Any) -> NoReturn:
        refuse("setting the shape of an array", "write x = x.reshape(...)")

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.type.dtype

    @dtype.setter
    def dtype(self, _: Any) -> NoReturn:
        refuse("setting the dtype of an array", "write x = x.astype(...)")

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
    def real(self) -> Traced:
        return self

    @property
    def imag(self) -> Any:
        return np.imag(self)

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
            return self._into(ufunc, method, inputs, options)
        if method == "outer" and len(inputs) == 2 and not options:
            a, b = map(lift, inputs)
            return ufunc(a.reshape((*a.shape, *[1] * b.ndim)), b)
        if method == "at":
            return CALLS["at"](ufunc, *inputs)
        if method == "accumulate" and ufunc in ACCUMULATIONS:
            axis = options.pop("axis", 0)
            if isinstance(axis, tuple) and len(axis) == 1:  # NumPy takes it, too
                (axis,) = axis
            result = _own(ACCUMULATIONS[ufunc](inputs[0], axis=axis, **options), inputs)
            return computed(result, ufunc.accumulate, inputs, {"axis": axis, **options})
        axis = options.get("axis", 0)
        options = {key: value for key, value in options.items() if value is not None}
        if method == "reduce" and ufunc in _REDUCTIONS:
            if "dtype" in options and ufunc in (np.maximum, np.minimum):
                refuse(f"{name}.reduce with dtype=", "convert the array before with astype")
            return _REDUCTIONS[ufunc](inputs[0], **{**options, "axis": axis})
        if method != "__call__":
            refuse(f"{name}.{method}", "call the function on parts of the array")
        return self._called(ufunc, inputs, options)

    def _called(self, ufunc: np.ufunc, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """A ufunc that is called on its inputs."""
        name = f"numpy.{ufunc.__name__}"
        dtype = options.pop("dtype", None) if ufunc.nout == 1 else None
        if options:
            refuse(f"{name} with {', '.join(options)}=")
        if dtype is not None:
            into = operand_dtypes(ufunc, inputs, dtype)
            inputs = tuple(lift(x, dtype=own).astype(own) for x, own in zip(inputs, into, strict=True))
        if ufunc in CALLS:
            result = _own(CALLS[ufunc](*inputs), inputs)
        elif ufunc in _kinds():
            result = apply(_kinds()[ufunc], *_promoted(ufunc, inputs))
        elif getattr(np, ufunc.__name__, None) is ufunc:
            refuse(name, REASONS.get(ufunc, ""))
        else:
            kind = OTHER_NAMES.get(ufunc.__name__, ufunc.__name__)
            refuse(
                f"{ufunc.__name__}, which is no function of NumPy's,",
                f"write ir.apply({kind!r}, x)" * (kind in OPERATORS),
            )
        return computed(result, ufunc, inputs, {})

    def _into(self, ufunc: np.ufunc, method: str, inputs: Any, options: Any) -> Any:
        """A ufunc with ``out=``.  It has the result's dtype in a reduction, and the other elements in ``where=``."""
        out = _target(f"numpy.{ufunc.__name__}", *options.pop("out"))
        if (
            method in ("reduce", "accumulate")
            and ufunc in (np.add, np.multiply)
            and options.get("dtype") is None
        ):
            options["dtype"] = out.dtype
        where = options.pop("where", None) if method == "__call__" else None
        result = self.__array_ufunc__(ufunc, method, *inputs, **options)
        if where is None:
            return out.become(result)
        if not np.can_cast(result.dtype, out.dtype, "same_kind"):
            refuse(f"changing an array of {out.dtype} in place into one of {result.dtype}")
        return out.become(np.where(lift(where), result.astype(out.dtype), out))

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        name = f"{function.__module__}.{function.__name__}"
        if function not in CALLS:
            refuse(name, REASONS.get(function, ""))
        out = options.pop("out", None)
        if out is not None and function in _ACCUMULATING and options.get("dtype") is None:
            options["dtype"] = _target(name, out).dtype
        try:
            result = CALLS[function](*args, **options)
        except IRError:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            refuse(name, _unfit(CALLS[function], args, options) or str(error))
        if out is not None:
            return _filled(name, _target(name, out), result)
        if function in PASSING:
            return result
        place = VIEWS[function](*args, **options) if function in VIEWS else None
        if place is None:
            return computed(_own(result, args), function, args, options)
        if place >= len(args):
            refuse(f"{name} of an array given by keyword", "give the array first, without its name")
        before, after = args[:place], args[place + 1 :]
        return seen(
            result, function, args[place], lambda base: CALLS[function](*before, base, *after, **options)
        )

    def __pow__(self, exponent: Any) -> Any:
        """As for NumPy's arrays, some exponents have faster functions than ``numpy.power``."""
        known = type(exponent) in (int, float) and is_floating(self.dtype)
        function = _POWERS.get(exponent) if known else None
        if self.dtype == bool and type(exponent) is int and exponent == 2 and not self.is_number:
            function = np.square  # int8, but int64 by numpy.power
        return function(self) if function else np.power(self, exponent)

    # -- methods, by the function of the same name ---------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Any:
        result = CALLS["getitem"](self, key)
        if not isinstance(result, Traced):
            return result  # elements chosen by bools
        keys = key if isinstance(key, tuple) else (key,)
        is_element = not result.ndim and not any(k is ... for k in keys)
        if not _picks(key) and not is_element and not self.is_number:
            return result.lies_in(self, lambda base: CALLS["getitem"](base, key), key)
        result = _own(result, [self])  # a single element is a number, not a view
        result.is_number = is_element
        by_rows = not result.ndim or (self._order is None and _picks_first(keys))
        result._order = None if by_rows else UNKNOWN
        return result

    def __setitem__(self, key: Any, value: Any) -> None:
        # In `x[0] += 1` the in-place addition has changed x already when Python assigns the part.
        if _picks(key) or not isinstance(value, Traced) or not value.is_part(self, key):
            self.become(self.written(key, value))

    def written(self, key: Any, value: Any) -> Any:
        """A new array: this one with ``value`` in place of ``x[key]``."""
        return CALLS["setitem"](self, key, value)

    def astype(self, dtype: Any, order: str = "K", *, copy: bool = True, **options: Any) -> Traced:
        if order != "K" or options:
            refuse("the array's astype with order= or " + ", ".join(options or ["casting"]) + "=")
        dtype = meant_dtype(dtype)
        if dtype == self.dtype and not copy:
            return self
        made = self._anew() if dtype == self.dtype else apply("convert", self, dtype=dtype)
        computed(made, np.copy, [self], {})
        made.is_number = self.is_number
        return made

    def copy(self, order: str = "C") -> Traced:
        if order != "C":
            refuse(f"the array's copy in order {order!r}", "it is by rows: order='C'")
        return self._anew()

    def _anew(self) -> Traced:
        """This array in memory of its own, by rows."""
        new = Traced(self.builder, self.value)
        new.is_number = self.is_number
        return new

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
        refuse(
            "the conversion of a recorded array to numbers (numpy.array, numpy.asarray, writing into an array of "
            "numbers, or a function that does so)",
            "join arrays with numpy.stack, change a dtype with astype, "
            "write into numpy.zeros_like(x), pick from numbers with ir.apply('take', numbers, x, axis=0)",
        )

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
        if name in _UNLIKE_FUNCTIONS:
            refuse(f"the array's {name}", f"write numpy.{name}(...)")
        if function is None or function not in CALLS:
            refuse(f"the array's {name}", REASONS.get(function, ""))
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
        return result if self.is_number else self.become(result)

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


def _target(name: str, out: Any, *others: Any) -> Traced:
    """The array of ``out=``, which must be traced."""
    if others:
        refuse(f"{name} into several arrays (out=)", "write x[...] = y for each result")
    if not isinstance(out, Traced):
        refuse(f"{name} into an array of numbers (out=, or an operator as +=)", "write x = x + y")
    return out


def _filled(name: str, out: Traced, result: Any) -> Any:
    """``out`` with the result.  A function that is no ufunc computes in the dtype of ``out``, in its own way."""
    if not isinstance(result, Traced) or result.dtype != out.dtype:
        refuse(
            f"{name} into an array of another dtype, {out.dtype}", "write x[...] = and the call without out="
        )
    return out.become(result)


def _picks_first(keys: Sequence[Any]) -> bool:
    """Whether the arrays of an index come first, and whole dims after them: the result then lies by rows."""
    rest = list(keys)
    while rest and _is_array(rest[0]):
        rest.pop(0)
    return all(k is ... or (isinstance(k, slice) and k == slice(None)) for k in rest)


def _picks(key: Any) -> bool:
    """Whether an index contains arrays, so that its result is a copy."""
    return any(map(_is_array, key if isinstance(key, tuple) else (key,)))


def _is_array(key: Any) -> bool:
    return not key.is_number if isinstance(key, Traced) else isinstance(key, np.ndarray | list)


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
    except RecordError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        refuse(f"the operator {kind}", _without_names(error))
    results = tuple(Traced(builder, value) for value in outputs)
    if kind in VIEWING or any(x._order is not None for x in traced):
        places = [place_of(x) for x in traced]
        for result in results:
            result._order = order_of(kind, places, result.shape, attributes)
    return results[0] if len(results) == 1 else results


def _without_names(error: Exception) -> str:
    """The text of an error; that of a value of the program begins with a name that nobody has given."""
    text = str(error)
    return text.partition(": ")[2] if isinstance(error, VerifyError) and text.startswith("%") else text


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
        return _constant(builder, x, (), np.dtype(dtype or np.int64))
    array = np.asarray(x, dtype)
    if dtype_text(array.dtype.newbyteorder("=")) is None:
        refuse(f"an array of {array.dtype} as a constant")
    nans = is_floating(array.dtype) and bool(np.isnan(array).any())
    if nans and is_narrow(array.dtype) and not np.isnan(np.asarray(x, np.float64)).any():
        refuse(f"{x!r} as a constant of {array.dtype}", f"the largest number is {limits_of(array.dtype).max}")
    if nans:  # no attribute is nan, because nan does not equal itself
        bits = np.array(array, order="C").view(f"u{array.dtype.itemsize}")
        numbers: Traced = emit(builder, "bitcast", lift(bits, builder=builder), dtype=array.dtype)
        return numbers
    if array.size > MOST_CONSTANT and array.size and (array != array.flat[0]).any():
        refuse(
            f"an array of shape {array.shape} as a constant of the program",
            f"pass it as an input; a constant has at most {MOST_CONSTANT} elements",
        )
    same = array.size > 0 and bool((array == array.flat[0]).all()) and not np.signbit(array[array == 0]).any()
    value: Any = array.flat[0].item() if same else tuple(array.ravel().tolist())
    return _constant(builder, value, array.shape, array.dtype)


def _constant(builder: Builder, value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Traced:
    constant: Traced = emit(builder, "constant", value=value, shape=shape, dtype=dtype)
    return constant


def _promoted(ufunc: np.ufunc, inputs: tuple[Any, ...]) -> list[Traced]:
    """The operands of a ufunc.  Python scalars get the dtype that NumPy gives them."""
    try:
        return [lift(x, dtype=dtype) for x, dtype in zip(inputs, operand_dtypes(ufunc, inputs), strict=True)]
    except OverflowError as error:
        refuse(f"numpy.{ufunc.__name__}", str(error))


_REDUCTIONS: dict[Any, Callable[..., Any]] = {
    np.add: np.sum,
    np.multiply: np.prod,
    np.maximum: np.max,
    np.minimum: np.min,
    np.logical_or: np.any,
    np.logical_and: np.all,
}
_UNLIKE_FUNCTIONS = {"partition", "resize", "compress"}
"""Methods that do not return what the function of the same name returns for the array."""
_ACCUMULATING = {np.sum, np.prod, np.cumsum}
"""Functions that compute in the dtype of ``out``."""
_POWERS: dict[float, np.ufunc] = {2: np.square, 1: np.positive, 0.5: np.sqrt, -1: np.reciprocal}


@cache
def _kinds() -> dict[Any, str]:
    """The names of the operators whose kernels are ufuncs, by ufunc."""
    return {entry.kernel: name for name, entry in OPERATORS.items() if isinstance(entry.kernel, np.ufunc)}
