"""How a recorded array would lie in NumPy's memory: this decides whether ``reshape`` makes a view or a copy.

An array lies by rows, unless it has an `Order`.  Orders are only looked at when an array is changed in place while
somebody holds a reshaped array of it, so an order is a rule that computes the strides when they are asked for.

Strides count elements.  Where extents have symbols, the strides are those for some numbers: once for all symbols equal
to one, because a dim of one element lies in any order, and once for larger numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from operator import mul
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from parallelism.ir.core import Extent, names_in, specialized

Numbers = tuple[int, ...]
Rule = Callable[[Numbers, list["Lying"]], Numbers | None]
"""The strides of an array of this shape, from how its sources lie; None if they are not known."""

ALL_ONE = 0
LARGER = range(1, 9)
"""The trials with larger numbers: a quotient of extents is whole in some of them only."""
MOST_DIMS = 8


class Lying(NamedTuple):
    """An array in memory."""

    shape: Numbers
    strides: Numbers | None
    """In elements; None if they are not known."""

    @property
    def extended(self) -> list[tuple[int, int]]:
        """The extent and stride of each dim of more than one element."""
        assert self.strides is not None
        return [(n, stride) for n, stride in zip(self.shape, self.strides, strict=True) if n != 1]

    @property
    def by_rows(self) -> bool:
        strides = [stride for _, stride in self.extended]
        return 0 in self.shape or strides == list(by_rows([n for n, _ in self.extended]))


class Order:
    """The order of an array that need not lie by rows."""

    __slots__ = ("_known", "_rule", "_sources", "shape")

    def __init__(self, shape: tuple[Extent, ...], sources: Sequence[Place], rule: Rule) -> None:
        self.shape = shape
        self._sources = sources
        self._rule = rule
        self._known: dict[int, Numbers | None] = {}

    def strides(self, trial: int) -> Numbers | None:
        """The strides for the numbers of a trial.  ``ValueError`` if an extent is not whole with these."""
        todo = [self]
        while todo:  # a program is a long chain of arrays, too long for recursion
            one = todo[-1]
            missing = [order for _, order in one._sources if order is not None and trial not in order._known]
            if missing:
                todo += missing
                continue
            lying = [lie(source, trial) for source in one._sources]
            one._known[trial] = one._rule(_numbers(one.shape, trial), lying)
            todo.pop()
        return self._known[trial]


class Place(NamedTuple):
    """The shape and the order of an array."""

    shape: tuple[Extent, ...]
    order: Order | None
    """None: by rows."""


def lie(place: Place, trial: int) -> Lying:
    shape = _numbers(place.shape, trial)
    if place.order is None:
        return Lying(shape, by_rows(shape))
    known = place.order._known
    return Lying(shape, known[trial] if trial in known else place.order.strides(trial))


def _number(symbol: str, trial: int) -> int:
    return 2 ** (1 + crc32(f"{trial} {symbol}".encode()) % 12) if trial else 1


def _numbers(shape: Sequence[Extent], trial: int) -> Numbers:
    """A shape with numbers in place of symbols: powers of two, of which many quotients are whole."""
    numbers = []
    for extent in shape:
        chosen = {name: _number(name, trial) for name in names_in(extent)}
        number = specialized(extent, chosen) if chosen else extent
        assert isinstance(number, int)
        numbers.append(max(number, 1) if chosen else number)
    return tuple(numbers)


def by_rows(shape: Sequence[int]) -> Numbers:
    """The strides of an array that lies by rows."""
    return tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1] if len(shape) else ()


# -- reshaping ---------------------------------------------------------------------------------------------------------


def is_reshaped_in_place(place: Place, shape: tuple[Extent, ...]) -> bool | None:
    """Whether NumPy reshapes an array without a copy; None if that is not known."""
    return _in_all_trials(
        lambda trial: _reshaped(lie(place, trial), _numbers(shape, trial)) is not None, place
    )


def is_by_rows(place: Place) -> bool | None:
    """Whether an array lies in memory row by row (C order); None if that is not known."""
    return _in_all_trials(lambda trial: lie(place, trial).by_rows, place)


def _in_all_trials(holds: Callable[[int], bool], place: Place) -> bool | None:
    try:
        answers = {_in_trial(holds, place, ALL_ONE)}
    except ValueError:
        return None
    for trial in LARGER:
        try:
            answers.add(_in_trial(holds, place, trial))
        except ValueError:
            continue
        return answers.pop() if len(answers) == 1 else None
    return None


def _in_trial(holds: Callable[[int], bool], place: Place, trial: int) -> bool | None:
    return None if lie(place, trial).strides is None else holds(trial)


def _reshaped(old: Lying, shape: Numbers) -> Numbers | None:
    """The strides of an array after it was reshaped without a copy; None if it must be copied.

    Dims that are joined and split must lie behind one another.  (NumPy: ``_attempt_nocopy_reshape``.)
    """
    if 0 in shape:
        return by_rows(shape)
    before, strides, start = old.extended, [1] * len(shape), 0
    for first, last in _groups([n for n, _ in before], shape):
        end = start + last.joined
        group = before[start:end]
        for (_, stride), (n, following) in pairwise(group):
            if stride != n * following:
                return None
        step = group[-1][1] if group else 1
        for dim in reversed(range(first, last.dim)):
            strides[dim] = step
            step *= shape[dim]
        start = end
    return tuple(strides)


class _End(NamedTuple):
    dim: int
    joined: int
    """How many of the old dims the group has."""


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[int, _End]]:
    """The smallest groups of new dims that have as many elements as a group of old dims: the first and the end."""
    groups, place, dim = [], 0, 0
    while dim < len(new):
        first, begin = dim, place
        above = below = 1
        while True:
            if above == below and (dim > first or place > begin):
                break
            if below <= above and dim < len(new):
                below *= new[dim]
                dim += 1
            else:
                above *= old[place]
                place += 1
        groups.append((first, _End(dim, place - begin)))
    return groups


# -- operators that make views -----------------------------------------------------------------------------------------


def _changed_at(strides: Numbers, axis: int, stride: int) -> Numbers:
    return (*strides[:axis], stride, *strides[axis + 1 :])


def _broadcast(new: Numbers, old: Lying) -> Numbers:
    assert old.strides is not None
    added = len(new) - len(old.shape)
    kept = [stride * (n == m) for n, m, stride in zip(old.shape, new[added:], old.strides, strict=True)]
    return (*[0] * added, *kept)


_SEEN: dict[str, Callable[..., Numbers]] = {
    "reshape": lambda new, old, shape: _reshaped(old, new) or by_rows(new),
    "transpose": lambda new, old, permutation: tuple([old.strides[d] for d in permutation]),
    "slice": lambda new, old, axis, step, begin, end: _changed_at(
        old.strides, axis, old.strides[axis] * step
    ),
    "flip": lambda new, old, axis: _changed_at(old.strides, axis, -old.strides[axis]),
    "broadcast_to": lambda new, old, shape: _broadcast(new, old),
    "split": lambda new, old, axis, sizes: old.strides,
    "windows": lambda new, old, axis, size, step: (
        *_changed_at(old.strides, axis, old.strides[axis] * step),
        old.strides[axis],
    ),
}
"""The strides of the outputs of operators whose kernels make views."""
VIEWING = _SEEN.keys()


def order_of(
    kind: str, operands: Sequence[Place], shape: tuple[Extent, ...], attributes: Any
) -> Order | None:
    """The order of an output of an op: that of a view; what an operator computes lies by rows if all operands do."""
    seen = _SEEN.get(kind)
    if seen is None or (kind == "reshape" and operands[0].order is None):
        return None if all(place.order is None for place in operands) else UNKNOWN
    return Order(
        shape,
        operands[:1],
        lambda new, old: None if old[0].strides is None else seen(new, old[0], **attributes),
    )


def diagonal(place: Place, shape: tuple[Extent, ...]) -> Order:
    """The order of the diagonal of a matrix."""
    return Order(shape, [place], lambda new, old: None if old[0].strides is None else (sum(old[0].strides),))


UNKNOWN = Order((), (), lambda new, old: None)
UNKNOWN._known = dict.fromkeys((ALL_ONE, *LARGER))


# -- functions that compute --------------------------------------------------------------------------------------------


def order_made_by(
    call: Callable[[list[Any]], Any], operands: Sequence[Any], shape: tuple[Extent, ...]
) -> Order:
    """The order of what NumPy makes of arrays: that which it makes of small arrays that lie in the same order.

    ``call`` gets the small arrays and returns NumPy's result.
    """

    def rule(new: Numbers, lying: list[Lying]) -> Numbers | None:
        if any(one.strides is None or len(one.shape) > MOST_DIMS for one in lying) or 0 in new:
            return None
        small = [_small(one, x.dtype) for one, x in zip(lying, operands, strict=True)]
        try:
            result = call(small)
        except (ValueError, TypeError, IndexError, OverflowError):
            return None
        return _dense(new, result) if result.ndim == len(new) else None

    operands = [_Kept(x.dtype, place_of(x)) for x in operands]
    return Order(shape, [x.place for x in operands], rule)


class _Kept(NamedTuple):
    dtype: np.dtype[Any]
    place: Place


def place_of(x: Any) -> Place:
    """The shape and the memory order of a recorded array, or of an array of NumPy."""
    if not isinstance(x, np.ndarray):
        return Place(x.shape, x._order)
    strides = tuple(stride // x.itemsize for stride in x.strides)
    return Place(x.shape, Order(x.shape, (), lambda new, old: strides))


def _small(lying: Lying, dtype: np.dtype[Any]) -> Any:
    """An array with two elements in each dim that has several, and with strides in the same order."""
    assert lying.strides is not None
    sizes = sorted({0, *map(abs, lying.strides)})
    steps = [_sign(stride) * sizes.index(abs(stride)) for stride in lying.strides]
    shape = [min(n, 2) for n in lying.shape]
    reach = sum(map(abs, steps))  # how far an element may lie before or behind the first one
    numbers = np.ones(2 * reach + 1, dtype if dtype.kind in "biuf" else np.float32)
    strides = [step * numbers.itemsize for step in steps]
    return np.lib.stride_tricks.as_strided(numbers[reach:], shape, strides)


def _sign(stride: int) -> int:
    return (stride > 0) - (stride < 0)


def _dense(shape: Numbers, small: Any) -> Numbers:
    """The strides of an array without gaps whose dims lie in the order of those of the small array."""
    dims = sorted(range(len(shape)), key=lambda d: (abs(small.strides[d]) if small.shape[d] > 1 else 0, -d))
    strides, step = [0] * len(shape), 1
    for d in dims:
        strides[d] = -step if small.strides[d] < 0 else step
        step *= shape[d]
    return tuple(strides)
