"""Whether the results of several devices are those of one process, as far as rounding lets them be.

Devices add in another order than one process, so their numbers are rounded differently.  An array is right if it
differs by at most a `tolerance` of its largest number.  Some arrays are nothing but rounding: a gradient that is zero
in exact arithmetic, such as that of a shift of all logits of a softmax, and what an optimizer makes of it.  Such an
array is right, too, if it differs by no more than `ROUNDINGS` times

- what one process makes of inputs that are changed in their last place, or
- one unit in the last place of the largest number among all arrays of its kind: all gradients, all means of Adam.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from parallelism import ir
from parallelism.arrays import Array
from parallelism.dtypes import is_floating, limits_of
from parallelism.ir.core import Function
from parallelism.ir.passes.gradients import GRADIENT
from parallelism.transforms.parts import NEXT

TOLERANCE = 1e-10
ROUNDINGS = 64
MOST_OF_KIND = 1e-3
"""The largest part of the largest number of a kind that counts as rounding, in narrow floats."""
SAMPLES = 4
"""How often inputs are changed, to see what rounding does."""

Arrays = Sequence[Array]


@dataclass(frozen=True)
class Judgement:
    """The result of a comparison."""

    apart: float
    """The largest difference, as a part of the largest number of its array.  Infinite if infinities differ."""
    limit: float
    """As far the arrays may be apart."""
    rounding: int = 0
    """The number of arrays that are further apart, and for which rounding explains it: they are not in ``apart``."""
    nan: tuple[str, ...] = ()
    """The names of results with a NaN, in the run or in one process."""

    @property
    def right(self) -> bool:
        """Whether the results are those of one process."""
        return self.apart <= self.limit and not self.nan


def _has_nan(array: Array) -> bool:
    return is_floating(array.dtype) and bool(np.isnan(array).any())


def judged(function: Function, inputs: Mapping[str, Array], results: Arrays, expected: Arrays) -> Judgement:
    """Compares the results of devices with those of one process (``expected``), both in the order of the outputs."""
    limit = tolerance(function)
    checked = zip(function.outputs, results, expected, strict=True)
    nan = tuple(value.name for value, a, b in checked if _has_nan(a) or _has_nan(b))
    apart = [_apart(a, b) for a, b in zip(results, expected, strict=True)]
    far = [place for place, each in enumerate(apart) if limit < each < inf]
    explained: list[int] = []
    if far and not nan:
        may = _rounding(function, inputs, expected)
        explained = [place for place in far if _difference(results[place], expected[place]) <= may[place]]
    left = [each for place, each in enumerate(apart) if place not in explained]
    return Judgement(max(left, default=0.0), limit, len(explained), nan)


def tolerance(function: Function) -> float:
    """How far results may be apart: more for smaller floats, whose sums depend on their order."""
    dtypes = {value.type.dtype for value in function.values if is_floating(value.type.dtype)}
    if all(dtype.itemsize >= 8 for dtype in dtypes):
        return TOLERANCE
    return max(1e-2, *(8 * float(limits_of(dtype).eps) for dtype in dtypes))


def _apart(a: Array, b: Array) -> float:
    """The largest difference divided by the largest number.  Infinite if infinities differ; NaNs do not count."""
    difference = _difference(a, b)
    return difference / max(_largest(b), 1e-300) if difference else 0.0


def _difference(a: Array, b: Array) -> float:
    if a.size == 0 or np.array_equal(a, b):
        return 0.0
    x, y = a.astype(np.float64), b.astype(np.float64)
    numbers = ~(np.isnan(x) | np.isnan(y))
    finite = np.isfinite(x) & np.isfinite(y)
    if not np.array_equal(x[numbers & ~finite], y[numbers & ~finite]):
        return inf
    return float(np.abs(x[finite] - y[finite]).max(initial=0))


def _largest(array: Array) -> float:
    numbers = np.abs(array.astype(np.float64))
    return float(numbers[np.isfinite(numbers)].max(initial=0))


def _rounding(function: Function, inputs: Mapping[str, Array], expected: Arrays) -> list[float]:
    """By output, how far it may be away by rounding alone."""
    rng = np.random.default_rng(1)
    moved = [0.0] * len(expected)
    for _ in range(SAMPLES):
        with np.errstate(all="ignore"):
            outputs = ir.interpret(function, _changed(inputs, rng)).outputs
        moved = [
            max(own, _difference(np.asarray(a), b))
            for own, a, b in zip(moved, outputs, expected, strict=True)
        ]
    kinds = [_kind(value.name) for value in function.outputs]
    largest: dict[str, float] = {}
    for kind, array in zip(kinds, expected, strict=True):
        largest[kind] = max(largest.get(kind, 0.0), _largest(array))
    return [
        max(ROUNDINGS * own, _part_of_kind(array) * largest[kind])
        for own, kind, array in zip(moved, kinds, expected, strict=True)
    ]


def _part_of_kind(array: Array) -> float:
    return (
        min(MOST_OF_KIND, ROUNDINGS * float(limits_of(array.dtype).eps)) if is_floating(array.dtype) else 0.0
    )


def _kind(name: str) -> str:
    """What an output is: ``p`` of ``next.p.w``, ``grad`` of ``grad.p.w``; its own name otherwise."""
    if name.startswith(GRADIENT):
        return GRADIENT
    return f"{NEXT}{name.removeprefix(NEXT).split('.')[0]}" if name.startswith(NEXT) else name


def _changed(inputs: Mapping[str, Array], rng: np.random.Generator) -> dict[str, Array]:
    """The inputs with every float changed by one unit in its last place, up or down."""
    changed = dict(inputs)
    for name, array in inputs.items():
        if is_floating(array.dtype):
            unit = float(limits_of(array.dtype).eps)
            signs = rng.choice([-1, 1], array.shape)
            changed[name] = np.asarray(array.astype(np.float64) * (1 + unit * signs), array.dtype)
    return changed
