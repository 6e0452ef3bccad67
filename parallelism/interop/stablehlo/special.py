"""What special functions mean, in elementwise operators of the IR, by the formulas that XLA has for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from parallelism.interop.folding import elementwise as ew
from parallelism.interop.moving_elements import number, rounded_once
from parallelism.interop.stablehlo.module import Node
from parallelism.interop.stablehlo.reading import MEANINGS, Reader, meaning
from parallelism.kernels.error_function import ERFC_BELOW_8, ERFC_FROM_8


def _polynomial(x: Any, coefficients: Sequence[float]) -> Any:
    """The polynomial with these coefficients, the highest power first."""
    total: Any = number(coefficients[0], x)
    for coefficient in coefficients[1:]:
        total = ew("add", ew("multiply", total, x), number(coefficient, x))
    return total


@meaning("stablehlo.logistic")
@rounded_once
def _logistic(reader: Reader, node: Node, x: list[Any]) -> Any:
    return ew("sigmoid", x[0])


@meaning("chlo.square")
def _square(reader: Reader, node: Node, x: list[Any]) -> Any:
    return ew("multiply", x[0], x[0])


# -- error functions ---------------------------------------------------------------------------------------------------

ERROR_FUNCTIONS = "erf", "erfc", "erf_inv"
OWN = "vcluster.chlo."
"""What stands before their names in custom calls: an export of JAX has no operators for them."""


def of_own_call(reader: Reader, node: Node, x: list[Any]) -> Any:
    """The meaning of a custom call that stands for an error function; None for another call."""
    target = str(node.attributes.get("call_target_name", ""))
    name = target.removeprefix(OWN)
    known = target.startswith(OWN) and name in ERROR_FUNCTIONS
    return MEANINGS[f"chlo.{name}"](reader, node, x) if known else None


@meaning("chlo.erfc")
@rounded_once
def _erfc(reader: Reader, node: Node, x: list[Any]) -> Any:
    """From 1 on ``1 - erf(x)`` would have no digits left."""
    a = x[0]
    one = number(1, a)
    size = ew("minimum", ew("absolute", a), number(30, a))  # beyond it, erfc is 0 in every dtype
    near, far = (
        ew("divide", _polynomial(size, above), _polynomial(size, below))
        for above, below in (ERFC_BELOW_8, ERFC_FROM_8)
    )
    ratio = ew("where", ew("less", size, number(8, a)), near, far)
    tail = ew("multiply", ew("exp", ew("negative", ew("multiply", size, size))), ratio)
    large = ew("where", ew("less", a, number(0, a)), ew("subtract", number(2, a), tail), tail)
    return ew("where", ew("less", size, one), ew("subtract", one, ew("erf", a)), large)


_NEAR = (
    2.81022636e-08,
    3.43273939e-07,
    -3.5233877e-06,
    -4.39150654e-06,
    0.00021858087,
    -0.00125372503,
    -0.00417768164,
    0.246640727,
    1.50140941,
)
_FAR = (
    -0.000200214257,
    0.000100950558,
    0.00134934322,
    -0.00367342844,
    0.00573950773,
    -0.0076224613,
    0.00943887047,
    1.00167406,
    2.83297682,
)


@meaning("chlo.erf_inv")
@rounded_once
def _erf_inv(reader: Reader, node: Node, x: list[Any]) -> Any:
    """M. Giles, *Approximating the erfinv function*, 2010, in single precision; two Newton steps for doubles."""
    a = x[0]
    w = ew("negative", ew("log1p", ew("negative", ew("multiply", a, a))))
    near = _polynomial(ew("subtract", w, number(2.5, a)), _NEAR)
    large = ew("maximum", w, number(5, a))  # a square root has no finite slope at 0
    far = _polynomial(ew("subtract", ew("sqrt", large), number(3, a)), _FAR)
    y = ew("multiply", ew("where", ew("less", w, number(5, a)), near, far), a)
    edge = ew("equal", ew("absolute", a), number(1, a))
    if a.dtype == np.float64:
        for _ in range(2):
            slope = ew(
                "multiply", ew("exp", ew("negative", ew("multiply", y, y))), number(2 / math.sqrt(math.pi), a)
            )
            y = ew("subtract", y, ew("divide", ew("subtract", ew("erf", y), a), slope))
    endless = ew("where", ew("less", a, number(0, a)), number(-math.inf, a), number(math.inf, a))
    return ew("where", edge, endless, y)


# -- gamma functions ---------------------------------------------------------------------------------------------------


_LANCZOS = (
    0.99999999999980993227684700473478,
    676.520368121885098567009190444019,
    -1259.13921672240287047156078755283,
    771.3234287776530788486528258894,
    -176.61502916214059906584551354,
    12.507343278686904814458936853,
    -0.13857109526572011689554707,
    9.984369578019570859563e-6,
    1.50563273514931155834e-7,
)


def _lanczos(a: Any, small: Any) -> tuple[Any, Any, Any, Any]:
    """The series of Lanczos with g = 7 and 9 terms, at z = a - 1, or at -a where ``small``.

    It gives the sum, the sum's derivative, t = z + 7.5, and the logarithm of t.
    """
    z = ew("where", small, ew("negative", a), ew("subtract", a, number(1, a)))
    total, slope = number(_LANCZOS[0], a), number(0, a)
    for i, coefficient in enumerate(_LANCZOS[1:], 1):
        part = ew("reciprocal", ew("add", z, number(i, a)))
        term = ew("multiply", part, number(coefficient, a))
        total = ew("add", total, term)
        slope = ew("subtract", slope, ew("multiply", term, part))
    log = ew("add", number(math.log(7.5), a), ew("log1p", ew("divide", z, number(7.5, a))))
    return total, slope, ew("add", z, number(7.5, a)), log


@meaning("chlo.lgamma")
@rounded_once
def _lgamma(reader: Reader, node: Node, x: list[Any]) -> Any:
    """By reflection below 1/2: lgamma(x) = log(pi / |sin(pi x)|) - lgamma(1 - x)."""
    a = x[0]
    small = ew("less", a, number(0.5, a))
    total, _, t, log = _lanczos(a, small)
    z = ew("where", small, ew("negative", a), ew("subtract", a, number(1, a)))
    # log(sqrt(2 pi)) + (z + 1/2 - t / log(t)) log(t) + log(sum)
    exponent = ew("subtract", ew("add", z, number(0.5, a)), ew("divide", t, log))
    power = ew("multiply", exponent, log)
    direct = ew("add", ew("add", number(0.5 * math.log(2 * math.pi), a), power), ew("log", total))
    # The sine of pi x is taken of the distance to the nearest integer, where it is exact.
    size = ew("absolute", a)
    rest = ew("subtract", size, ew("floor", size))
    is_above_half = ew("less", number(0.5, a), rest)
    rest = ew("where", is_above_half, ew("subtract", number(1, a), rest), rest)
    log_sine = ew("log", ew("sin", ew("multiply", rest, number(math.pi, a))))
    log_quotient = ew("subtract", number(math.log(math.pi), a), log_sine)
    turned = ew("subtract", log_quotient, direct)
    turned = ew("where", ew("isfinite", log_sine), turned, ew("negative", log_sine))
    is_infinite = ew("equal", size, number(math.inf, a))
    result = ew("where", small, turned, direct)
    return ew("where", is_infinite, size, result)


@meaning("chlo.digamma")
@rounded_once
def _digamma(reader: Reader, node: Node, x: list[Any]) -> Any:
    """By reflection below 1/2: digamma(x) = digamma(1 - x) - pi / tan(pi x)."""
    a = x[0]
    small = ew("less", a, number(0.5, a))
    total, slope, t, log = _lanczos(a, small)
    # log(t) + sum' / sum - 7 / t
    of_sum = ew("add", log, ew("divide", slope, total))
    direct = ew("subtract", of_sum, ew("divide", number(7, a), t))
    # pi / tan(pi x), of the distance to the nearest integer.
    nearest = ew("absolute", ew("floor", ew("add", a, number(0.5, a))))
    angle = ew("multiply", ew("add", a, nearest), number(math.pi, a))
    over = ew("multiply", number(math.pi, a), ew("cos", angle))
    turned = ew("subtract", direct, ew("divide", over, ew("sin", angle)))
    is_at_most_0 = ew("less_equal", a, number(0, a))
    is_pole = ew("logical_and", is_at_most_0, ew("equal", a, ew("floor", a)))
    result = ew("where", small, turned, direct)
    return ew("where", is_pole, number(math.nan, a), result)
