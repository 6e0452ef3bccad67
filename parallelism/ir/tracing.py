"""Arrays that are not there yet: what is done to them in NumPy's words becomes ops.

A `Traced` array has the shape and dtype that the array will have.  NumPy hands over what is called with one, by
``__array_ufunc__`` and ``__array_function__`` (NEP 13 and 18); the functions that are not ufuncs are in
`numpy_calls` and `numpy_shapes`.  Derivatives in the table of operators are written with these arrays, too.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from parallelism.ir.builder import Builder
from parallelism.ir.errors import IRError, RecordError
from parallelism.ir.extents import Expression, Extent
from parallelism.ir.function import Value, frozen_attributes
from parallelism.ir.regions import check_path
from parallelism.ir.table import OPERATORS, operator
from parallelism.ir.types import DTYPE_NAMES, TensorType, checked_dtype

MOST_CONSTANT = 4096
"""Elements of an array that may stand in a program."""

CALLS: dict[Any, Callable[..., Any]] = {}
"""What NumPy's functions, ufuncs aside, become."""

_OURS = tuple(f"{Path(file).parent}{os.sep}" for file in (__file__, np.__file__))


class Traced(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of a program that is being written."""

    __slots__ = ("builder", "value")
    __hash__ = object.__hash__

    def __init__(self, builder: Builder, value: Value) -> None:
        self.builder, self.value = builder, value

    # -- what an array knows of itself ---------------------------------------------------------------------------------

    @property
    def type(self) -> TensorType:
        return self.value.type

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
    def T(self) -> Any:  # noqa: N802  (as NumPy calls it)
        return self.transpose()

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("len() of an array without dims")
        extent = self.shape[0]
        return extent if isinstance(extent, int) else refuse(f"len() of an array of shape {self.shape}")

    def __repr__(self) -> str:
        return f"<recorded %{self.value.name}: {self.type}>"

    # -- what NumPy hands over -----------------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        name = f"numpy.{ufunc.__name__}"
        if "out" in options:
            refuse(f"{name} into an array that is there already (out=, or an operator as +=)")
        if method == "reduce" and ufunc in _REDUCTIONS:
            options = {key: value for key, value in options.items() if value is not None or key == "axis"}
            options.setdefault("axis", 0)
            return _REDUCTIONS[ufunc](inputs[0], **options)
        if method != "__call__":
            refuse(f"{name}.{method}")
        if ufunc is np.matmul and not options:
            return CALLS[np.matmul](*inputs)
        options = {key: value for key, value in options.items() if value is not None}
        if "dtype" in options and len(options) == 1 and ufunc.nout == 1:
            dtype = options.pop("dtype")
            inputs = tuple(lift(x, dtype=dtype).astype(dtype) for x in inputs)
        if options:
            refuse(f"{name} with {', '.join(options)}=")
        if ufunc in CALLS:
            return CALLS[ufunc](*inputs)
        kind = _kinds().get(ufunc)
        if kind is None:
            refuse(name)
        return apply(kind, *_promoted(ufunc, inputs))

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        name = f"{function.__module__}.{function.__name__}"
        if function not in CALLS:
            refuse(name)
        try:
            return CALLS[function](*args, **options)
        except IRError:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            refuse(name, str(error))

    def __pow__(self, exponent: Any) -> Any:
        """As NumPy's arrays do it, which is not by ``numpy.power`` for some numbers."""
        if type(exponent) in (int, float) and self.dtype.kind == "f":
            function = {2: np.square, 1: np.positive, 0.5: np.sqrt, -1: np.reciprocal}.get(exponent)
            if function is not None:
                return function(self)
        return np.power(self, exponent)

    # -- methods, by the function of the same name ---------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Any:
        return CALLS["getitem"](self, key)

    def astype(self, dtype: Any, *, copy: bool = True) -> Traced:
        dtype = checked_dtype(dtype)
        return self if dtype == self.dtype else apply("convert", self, dtype=dtype)

    def reshape(self, *shape: Any) -> Any:
        return np.reshape(self, shape[0] if len(shape) == 1 else shape)

    def transpose(self, *axes: Any) -> Any:
        return np.transpose(self, (axes[0] if len(axes) == 1 else axes) or None)

    # -- what needs the numbers ----------------------------------------------------------------------------------------

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        refuse("making an array of a recorded one (numpy.array, numpy.asarray, or a function that does so)")

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        refuse("writing into an array (x[...] = y)")

    def __bool__(self) -> bool:
        refuse("a decision by the numbers of an array (if, while, and, or, not)")

    def __iter__(self) -> Any:
        return iter([self[i] for i in range(len(self))])

    def __index__(self) -> int:
        refuse("an array as an index or a count")

    def __int__(self) -> int:
        refuse("int() of an array")

    def __float__(self) -> float:
        refuse("float() of an array")

    def item(self, *_: Any) -> NoReturn:
        refuse("item() of an array")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(np.ndarray, name):
            raise AttributeError(f"a recorded array has no attribute {name!r}")
        function = getattr(np, name, None)
        if function is None or function not in CALLS:
            refuse(f"the array's {name}")
        return lambda *args, **options: function(self, *args, **options)

    __array_priority__ = 1000


def _refused_in_place(self: Traced, other: Any) -> NoReturn:
    refuse("changing an array in place (+= and its like); write x = x + y")


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift",
              "rshift"):
    setattr(Traced, f"__i{_name}__", _refused_in_place)


def apply(kind: str, *operands: Any, **attributes: Any) -> Any:
    """An operator of the table: recorded if an operand is, computed at once by its kernel if not.

    Returns an array, or a tuple if the operator has several outputs; scalars become constants.  What takes no operands
    (``constant``, ``iota``) is recorded while anything is.
    """
    builder = next((x.builder for x in operands if isinstance(x, Traced)), None if operands else _recording.get())
    if builder is None:
        return operator(kind).kernel(*map(np.asarray, operands), **dict(frozen_attributes(attributes)))
    return emit(builder, kind, *operands, **attributes)


def emit(builder: Builder, kind: str, *operands: Any, **attributes: Any) -> Any:
    """Write an op; `RecordError` for what it does not take."""
    try:
        traced = [lift(x, builder=builder) for x in operands]
        outputs = builder.emit(kind, [x.value for x in traced], attributes)
    except IRError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        refuse(f"the operator {kind}", str(error))
    found = tuple(Traced(builder, value) for value in outputs)
    return found[0] if len(found) == 1 else found


def lift(x: Any, *, builder: Builder | None = None, dtype: Any = None) -> Traced:
    """A recorded array as it is; a scalar or an array as a constant of the program."""
    if isinstance(x, Traced):
        if builder is not None and x.builder is not builder:
            refuse("an array of another recording")
        return x
    builder = builder or _recording.get()
    if builder is None:
        raise RecordError(f"nothing is being recorded, so {x!r} belongs to no program")
    if isinstance(x, Expression):
        return _constant(builder, x, (), checked_dtype(dtype or np.int64))
    array = np.asarray(x, dtype)
    if array.dtype.newbyteorder("=") not in DTYPE_NAMES:
        refuse(f"an array of {array.dtype} as a constant")
    if array.size > MOST_CONSTANT and array.size and (array != array.flat[0]).any():
        refuse(f"an array of shape {array.shape} as a constant of the program", "hand it over as an input; a program "
               f"holds arrays of up to {MOST_CONSTANT} elements")
    same = array.size > 0 and bool((array == array.flat[0]).all()) and not np.signbit(array[array == 0]).any()
    value: Any = array.flat[0].item() if same else tuple(array.ravel().tolist())
    return _constant(builder, value, array.shape, array.dtype)


def _constant(builder: Builder, value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Traced:
    made: Traced = emit(builder, "constant", value=value, shape=shape, dtype=dtype)
    return made


_recording: ContextVar[Builder | None] = ContextVar("recording", default=None)


@contextmanager
def recording(builder: Builder) -> Iterator[Builder]:
    """While a program is written by ``builder``: what has no recorded operand goes there."""
    before = _recording.set(builder)
    try:
        yield builder
    finally:
        _recording.reset(before)


@contextmanager
def region(path: str) -> Iterator[None]:
    """What is recorded meanwhile belongs to this region, ``block.0``, of the model; one in another lies inside it.

    Where nothing is recorded it does nothing.  ``ValueError`` for what is no path of names.
    """
    check_path(path)
    builder = _recording.get()
    with builder.region(path) if builder else nullcontext():
        yield


# -- dtypes ------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def resolved(ufunc: np.ufunc, *dtypes: Any) -> tuple[np.dtype[Any], ...]:
    """The dtypes that a ufunc works in, inputs and output; ``int`` or ``float`` for a scalar of Python."""
    return tuple(ufunc.resolve_dtypes((*dtypes, *[None] * ufunc.nout)))


def _promoted(ufunc: np.ufunc, inputs: tuple[Any, ...]) -> list[Traced]:
    """The operands of a ufunc: scalars of Python take the dtype that NumPy gives them."""
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
    try:
        return [lift(x, dtype=used[i] if w else None) for i, (x, w) in enumerate(zip(inputs, weak, strict=True))]
    except OverflowError as error:
        refuse(f"numpy.{ufunc.__name__}", str(error))


_KINDS: dict[Any, str] = {}
_REDUCTIONS: dict[Any, Callable[..., Any]] = {
    np.add: lambda x, **options: np.sum(x, **options), np.multiply: lambda x, **options: np.prod(x, **options),
    np.maximum: lambda x, **options: np.max(x, **options), np.minimum: lambda x, **options: np.min(x, **options),
}


def _kinds() -> dict[Any, str]:
    """The operators that are ufuncs."""
    if len(_KINDS) == 0:
        _KINDS.update((entry.kernel, name) for name, entry in OPERATORS.items() if isinstance(entry.kernel, np.ufunc))
    return _KINDS


def refuse(what: str, why: str = "") -> NoReturn:
    """`RecordError`, with the line of the user's that led here."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    name, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(name, line).strip()
    reason = f": {why}" if why else ""
    raise RecordError(f"{what} cannot be recorded{reason}\n  {name}:{line}: {text}") from None
