"""Complex numbers, which programs do not have: a pair of arrays stands for each, and a table says what ops make of them.

A Fourier transform is a product with the cosines and sines of its angles, along one dim after another: that takes
n * n steps where the fast transform takes n * log(n).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parallelism.interop.folding import convert, elementwise as ew, emit, whole
from parallelism.interop.moving_elements import INDEX, iota, number, part, reshaped, transposed
from parallelism.ir.core import TensorType

_TYPE = re.compile(r"tensor<((?:\d+x)*)complex<(f32|f64)>>")


@dataclass(frozen=True, eq=False)
class Pair:
    """The array ``real + 1j * imag``."""

    real: Any
    imag: Any

    @property
    def shape(self) -> tuple[Any, ...]:
        return tuple(self.real.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(f"c{2 * self.real.dtype.itemsize}")


def type_of_parts(text: str) -> TensorType | None:
    """The type of each of the two arrays of ``tensor<3x4xcomplex<f32>>``; None for what is no such type."""
    found = _TYPE.fullmatch(text)
    return None if found is None else TensorType(found[2], [int(n) for n in found[1].split("x") if n])


def numbers_in(text: str, shape: Sequence[int]) -> np.ndarray[Any, Any] | None:
    """The numbers of ``dense<[(1.0, 2.0), ...]> : tensor<2xcomplex<f32>>``, as complex128; None if they are not there."""
    found = re.search(r"dense<(.*)> : tensor<[^<]*complex<f(\d+)>>", text, re.S)
    if found is None:
        return None
    if (given := re.fullmatch(r'"0x([0-9A-Fa-f]*)"', found[1])) is not None:
        numbers: Any = np.frombuffer(bytes.fromhex(given[1]), f"<c{2 * int(found[2]) // 8}").astype("c16")
    else:
        pairs = re.findall(r"\(([^(),]+),([^(),]+)\)", found[1])
        numbers = np.array([complex(_number(a), _number(b)) for a, b in pairs], "c16")
    if numbers.size == 1:
        return np.broadcast_to(numbers.reshape(()), tuple(shape))
    return numbers.reshape(tuple(shape)) if numbers.size == int(np.prod(shape)) else None


def _number(text: str) -> float:
    text = text.strip()
    if not text.lower().startswith("0x"):
        return float(text)
    digits = text[2:]
    return float(np.frombuffer(bytes.fromhex(digits)[::-1], f"<f{len(digits) // 2}")[0])


def pair(x: Any) -> Pair:
    """An array of real numbers as complex ones."""
    return x if isinstance(x, Pair) else Pair(x, ew("multiply", x, number(0, x)))


# -- arithmetic --------------------------------------------------------------------------------------------------------


def _each(kind: str) -> Callable[..., Pair]:
    return lambda *x: Pair(ew(kind, *(each.real for each in x)), ew(kind, *(each.imag for each in x)))


def _multiply(a: Pair, b: Pair, product: Callable[[Any, Any], Any] | None = None) -> Pair:
    by = product or (lambda x, y: ew("multiply", x, y))
    real = ew("subtract", by(a.real, b.real), by(a.imag, b.imag))
    return Pair(real, ew("add", by(a.real, b.imag), by(a.imag, b.real)))


def _squared(a: Pair) -> Any:
    return ew("add", ew("multiply", a.real, a.real), ew("multiply", a.imag, a.imag))


def _divide(a: Pair, b: Pair) -> Pair:
    above = _multiply(a, Pair(b.real, ew("negative", b.imag)))
    below = _squared(b)
    return Pair(ew("divide", above.real, below), ew("divide", above.imag, below))


def _exponential(a: Pair) -> Pair:
    size = ew("exp", a.real)
    return Pair(ew("multiply", size, ew("cos", a.imag)), ew("multiply", size, ew("sin", a.imag)))


def _compare(how: str) -> Callable[[Pair, Pair], Any]:
    joined = {"equal": "logical_and", "not_equal": "logical_or"}[how]
    return lambda a, b: ew(joined, ew(how, a.real, b.real), ew(how, a.imag, b.imag))


ARITHMETIC: dict[str, Callable[..., Any]] = {
    "stablehlo.add": _each("add"),
    "stablehlo.subtract": _each("subtract"),
    "stablehlo.negate": _each("negative"),
    "stablehlo.multiply": _multiply,
    "stablehlo.divide": _divide,
    "stablehlo.exponential": _exponential,
    "stablehlo.log": lambda a: Pair(ew("log", ew("hypot", a.real, a.imag)), ew("arctan2", a.imag, a.real)),
    "stablehlo.abs": lambda a: ew("hypot", a.real, a.imag),
    "stablehlo.real": lambda a: a.real,
    "stablehlo.imag": lambda a: a.imag,
    "chlo.conj": lambda a: Pair(a.real, ew("negative", a.imag)),
}
"""What ops make of pairs, element by element."""
COMPARISONS = {"EQ": _compare("equal"), "NE": _compare("not_equal")}
MOVING = frozenset(
    f"stablehlo.{name}"
    for name in (
        *(
            "reshape",
            "transpose",
            "broadcast_in_dim",
            "slice",
            "concatenate",
            "reverse",
            "pad",
            "select",
            "gather",
        ),
        *("dynamic_slice", "dynamic_update_slice", "optimization_barrier"),
    )
)
"""Ops that move elements, or choose among them: they do the same with both arrays."""


def product(a: Pair, b: Pair, by: Callable[[Any, Any], Any]) -> Pair:
    """The product of two arrays, where ``by`` is that of their parts."""
    return _multiply(a, b, by)


# -- Fourier transforms ------------------------------------------------------------------------------------------------


def fourier(x: Any, kind: str, lengths: Sequence[int]) -> Any:
    """``fft``, ``ifft``, ``rfft`` or ``irfft`` over the last dims, whose extents are the ``lengths``."""
    axes = [*range(len(x.shape) - len(lengths), len(x.shape))]
    last, n = axes[-1], lengths[-1]
    if kind == "RFFT":
        return transformed(half_transformed(x, last, n), axes[:-1], lengths, sign=-1)
    if kind == "IRFFT":
        along_others = transformed(pair(x), axes[:-1], lengths, sign=1)
        return from_half(along_others, last, n)
    return transformed(pair(x), axes, lengths, sign=1 if kind == "IFFT" else -1)


def half_transformed(x: Any, axis: int, n: int) -> Pair:
    """The first half of the transform of real numbers along a dim of ``n``, and the number behind it."""
    cosines, sines = _table(n, n // 2 + 1, x.dtype)
    return Pair(_by(x, cosines, axis), ew("negative", _by(x, sines, axis)))


def transformed(x: Pair, axes: Sequence[int], lengths: Sequence[int], *, sign: int) -> Pair:
    """The transform along each dim; with a ``sign`` of 1 the inverse one."""
    for axis, n in zip(axes, lengths, strict=False):
        cosines, sines = _table(n, n, x.real.dtype)
        turn = "subtract" if sign > 0 else "add"
        back = "add" if sign > 0 else "subtract"
        real = ew(turn, _by(x.real, cosines, axis), _by(x.imag, sines, axis))
        imag = ew(back, _by(x.imag, cosines, axis), _by(x.real, sines, axis))
        x = Pair(_scaled(real, n), _scaled(imag, n)) if sign > 0 else Pair(real, imag)
    return x


def from_half(x: Pair, axis: int, n: int) -> Any:
    """The inverse transform of half of the numbers; the other half are their conjugates.

    A number whose conjugate is another number counts twice: all but the first, and but the middle one if n is even.
    """
    bins = n // 2 + 1
    x = Pair(part(x.real, axis, 0, bins), part(x.imag, axis, 0, bins))
    tables = _table(bins, n, x.real.dtype, of=n)
    places = iota(bins, INDEX, 2, 0)
    is_behind_first = ew("greater", places, np.asarray(0))
    is_before_middle = ew("less", ew("multiply", places, np.asarray(2)), np.asarray(n))
    counts_twice = ew("logical_and", is_behind_first, is_before_middle)
    weights = convert(ew("add", convert(counts_twice, INDEX), np.asarray(1)), x.real.dtype)
    cosines, sines = (ew("multiply", table, weights) for table in tables)
    real = ew("subtract", _by(x.real, cosines, axis), _by(x.imag, sines, axis))
    return _scaled(real, n)


def _scaled(x: Any, n: int) -> Any:
    return ew("multiply", x, number(1 / n, x))


def _table(rows: int, columns: int, dtype: np.dtype[Any], of: int | None = None) -> tuple[Any, Any]:
    """The cosines and sines of the angles ``2 pi j k / of``, shape (rows, columns); None: of is ``rows``.

    The product of j and k is brought below ``of`` first, in integers, so that the angles are exact to a rounding.
    """
    n = rows if of is None else of
    turns = ew(
        "remainder", emit("multiply", iota(rows, INDEX, 2, 0), iota(columns, INDEX, 2, 1)), np.asarray(n)
    )
    angles = ew("multiply", convert(turns, dtype), np.asarray(2 * np.pi / n, dtype))
    return ew("cos", angles), ew("sin", angles)


def _by(x: Any, table: Any, axis: int) -> Any:
    """The product with a table along a dim."""
    if len(x.shape) == 1:
        return reshaped(_by(reshaped(x, (1, *x.shape)), table, 1), (table.shape[1],))
    last = len(x.shape) - 1
    order = [d for d in range(last + 1) if d != axis] + [axis]
    made = emit("matmul", whole(transposed(x, order)), whole(table))
    back = [*range(axis), last, *range(axis, last)]
    return transposed(made, back)


def is_sum(kinds: Sequence[str]) -> bool:
    """Whether the ops of a reducer add, and nothing else."""
    return [kind for kind in kinds if not kind.endswith(".return")] == ["stablehlo.add"]
