"""Recording of NumPy's functions of each element that are made of several operators."""

from math import log, pi
from typing import Any

import numpy as np

from parallelism.dtypes import is_floating, limits_of
from parallelism.ir.core import resolved
from parallelism.ir.recording.numpy_calls import of_one_dtype
from parallelism.ir.recording.numpy_shapes import stands_for
from parallelism.ir.tracing import CALLS, apply, lift, refuse


def _as_made_by(ufunc: np.ufunc, *operands: Any) -> list[Any]:
    """The operands in the dtype of a ufunc's result."""
    arrays = of_one_dtype(f"numpy.{ufunc.__name__}", *operands)
    dtype = resolved(ufunc, *(x.dtype for x in arrays))[-1]
    return [x.astype(dtype) for x in arrays]


# -- signs and parts ---------------------------------------------------------------------------------------------------


@stands_for(np.signbit)
def _signbit(x: Any) -> Any:
    if not is_floating(x.dtype):
        return x < 0 if x.dtype.kind == "i" else np.zeros_like(x, bool)
    return apply("bitcast", x, dtype=np.dtype(f"i{x.dtype.itemsize}")) < 0


@stands_for(np.copysign)
def _copysign(a: Any, b: Any) -> Any:
    a, b = _as_made_by(np.copysign, a, b)
    size = np.absolute(a)
    return np.where(_signbit(b), -size, size)


@stands_for(np.modf)
def _modf(x: Any) -> Any:
    (x,) = _as_made_by(np.sqrt, x)
    whole = np.trunc(x)
    rest = np.where(np.isfinite(x), x - np.where(np.isfinite(x), whole, x), lift(0, dtype=x.dtype))
    return _copysign(np.where(np.isnan(x), x, rest), x), whole


@stands_for(np.ldexp)
def _ldexp(x: Any, exponent: Any) -> Any:
    (x,) = _as_made_by(np.sqrt, x)
    return x * np.exp2(lift(exponent).astype(x.dtype))


CALLS.update(
    {
        np.conjugate: lambda x: x,
        np.imag: lambda x: np.zeros_like(x),
        np.isreal: lambda x: np.ones_like(x, bool),
        np.iscomplex: lambda x: np.zeros_like(x, bool),
        np.fix: lambda x: np.trunc(x),
    }
)
stands_for(np.real, view=True)(lambda x: x)


# -- of floats ---------------------------------------------------------------------------------------------------------


@stands_for(np.float_power)
def _float_power(a: Any, b: Any) -> Any:
    return np.power(lift(a).astype(np.float64), lift(b).astype(np.float64))


@stands_for(np.logaddexp2)
def _logaddexp2(a: Any, b: Any) -> Any:
    a, b = _as_made_by(np.logaddexp2, a, b)
    return np.logaddexp(a * log(2), b * log(2)) / log(2)


def _scaled(ufunc: np.ufunc, factor: float) -> Any:
    return lambda x: _as_made_by(ufunc, x)[0] * factor


CALLS.update(
    {
        np.deg2rad: _scaled(np.deg2rad, pi / 180),
        np.radians: _scaled(np.radians, pi / 180),
        np.rad2deg: _scaled(np.rad2deg, 180 / pi),
        np.degrees: _scaled(np.degrees, 180 / pi),
    }
)


@stands_for(np.sinc)
def _sinc(x: Any) -> Any:
    (x,) = _as_made_by(np.sqrt, x)
    y = np.where(x == lift(0, dtype=x.dtype), lift(1e-20, dtype=x.dtype), x) * pi
    return np.sin(y) / y


@stands_for(np.isclose)
def _isclose(a: Any, b: Any, rtol: Any = 1e-05, atol: Any = 1e-08, equal_nan: bool = False) -> Any:
    a, b = of_one_dtype("numpy.isclose", a, b)
    if not is_floating(a.dtype):
        a, b = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(b)
    near = np.absolute(a - np.where(finite, b, lift(0, dtype=b.dtype))) <= atol + rtol * np.absolute(b)
    found = np.logical_or(np.logical_and(near, finite), a == b)
    return found | (np.isnan(a) & np.isnan(b)) if equal_nan else found


# -- with nan ----------------------------------------------------------------------------------------------------------


def _ignoring_nan(function: np.ufunc) -> Any:
    def recorded(a: Any, b: Any) -> Any:
        a, b = of_one_dtype(f"numpy.{function.__name__}", a, b)
        if not is_floating(a.dtype):
            return function(a, b)
        return np.where(np.isnan(a), b, np.where(np.isnan(b), a, function(a, b)))

    return recorded


CALLS.update({np.fmax: _ignoring_nan(np.maximum), np.fmin: _ignoring_nan(np.minimum)})


@stands_for(np.nan_to_num)
def _nan_to_num(x: Any, copy: bool = True, nan: Any = 0.0, posinf: Any = None, neginf: Any = None) -> Any:
    if not copy:
        refuse("numpy.nan_to_num in place (copy=False)", "write x[...] = numpy.nan_to_num(x)")
    x = lift(x)
    if not is_floating(x.dtype):
        return x
    limits = limits_of(x.dtype)
    most = float(limits.max) if posinf is None else posinf
    least = float(limits.min) if neginf is None else neginf
    numbers: dict[Any, Any] = {np.isnan: nan, np.isposinf: most, np.isneginf: least}
    found = x
    for test, value in numbers.items():
        found = np.where(test(x), lift(value, dtype=x.dtype), found)
    return found


# -- chosen by tests ---------------------------------------------------------------------------------------------------


@stands_for(np.isin)
def _isin(element: Any, test_elements: Any, *, invert: bool = False, **_: Any) -> Any:
    found, tests = of_one_dtype("numpy.isin", element, test_elements)
    is_in = np.any(found[..., None] == tests.reshape(-1), axis=-1)
    return ~is_in if invert else is_in


@stands_for(np.choose)
def _choose(a: Any, choices: Any) -> Any:
    given = of_one_dtype("numpy.choose", *choices)
    place = apply("take", np.arange(len(given)), lift(a), axis=0)  # an error where there is no such choice
    found: Any = given[0]
    for number, choice in enumerate(given[1:], 1):
        found = np.where(place == number, choice, found)
    return found if given[1:] else np.broadcast_to(found, np.broadcast_shapes(found.shape, place.shape))


@stands_for(np.piecewise)
def _piecewise(x: Any, condlist: Any, funclist: Any) -> Any:
    conditions = condlist if isinstance(condlist, list | tuple) else [condlist]
    tests = [lift(each) for each in conditions]
    functions = list(funclist)
    found: Any = lift(0, dtype=x.dtype)
    if len(functions) == len(tests) + 1:
        found = _piece(functions.pop(), x)
    for test, function in zip(tests, functions, strict=True):
        found = np.where(test, _piece(function, x), found)
    return found


def _piece(function: Any, x: Any) -> Any:
    return lift(function(x) if callable(function) else function).astype(x.dtype)
