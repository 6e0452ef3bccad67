"""The cheapest way to carry out a product: by bytes received by all ranks together, then by flops.

Of every letter of the product the search tries the axes it may lie over; a sum that is pending in an operand may stay
so.  On meshes of up to three axes all possibilities are tried, on larger ones those that some layout names, and their
outer parts.  What must at least be received, whatever the moves, tells which of them need not be planned.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import permutations, product
from math import prod

from parallelism.resharding import plan_resharding
from parallelism.sharding import TensorSharding
from tensor_parallelism.product import Axes, ProductPlan, Shape, Split, Task, layouts_during, product_plan

MOST_TRIED = 300
"""So many ways are all tried; where there are more, those that the layouts name."""

Way = tuple[tuple[Axes, ...], Axes, Axes]
"""The axes of each letter, and of the sums that stay pending in either operand."""


@lru_cache(1024)
def cheapest_product(task: Task) -> ProductPlan:
    """The plan that receives fewest bytes; of those, with fewest flops; then with fewest communications."""
    ways = list(_ways(task))
    bounds = _Bounds(task)
    best: ProductPlan | None = None
    why = f"the cheapest of {len(ways)} ways"
    for least, number in sorted((sum(bounds.least(way)), number) for number, way in enumerate(ways)):
        if best is not None and least > best.cost[0]:
            break
        axes, lhs_partial, rhs_partial = way = ways[number]
        split = dict(zip(task.contraction.letters, axes, strict=True))
        if best is not None and _exceeds(best.cost[0], task, bounds.least(way), split, lhs_partial, rhs_partial):
            continue
        plan = product_plan(task, split, lhs_partial=lhs_partial, rhs_partial=rhs_partial, why=why)
        if best is None or plan.cost < best.cost:
            best = plan
    assert best is not None, "to gather everything is always one of the ways"
    return best


def _exceeds(
    limit: int, task: Task, least: tuple[int, int, int], split: Split, lhs_partial: Axes, rhs_partial: Axes
) -> bool:
    """Whether a way is found to need more bytes than ``limit`` before all its moves are planned."""
    lhs, rhs, _ = layouts_during(task, split, lhs_partial, rhs_partial)
    total = sum(least)
    moves = ((task.lhs, lhs, task.lhs_shape), (task.rhs, rhs, task.rhs_shape))
    for bound, (source, target, shape) in zip(least, moves, strict=False):
        total += sum(plan_resharding(source, target, shape, task.dtype, task.mesh).bytes_received) - bound
        if total > limit:
            return True
    return False


def _ways(task: Task) -> Iterator[Way]:
    free = [axis for axis, extent in task.mesh.shape.items() if extent > 1]
    letters = task.contraction.letters
    splits = list(_all_splits(free, len(letters))) if _count(len(free), len(letters)) <= MOST_TRIED else _named(task)
    for axes in splits:
        used = {axis for dim in axes for axis in dim}
        lhs = _staying(task.lhs, used)
        for kept in lhs:
            for other in _staying(task.rhs, used.union(kept)):
                yield axes, kept, other


def _staying(layout: TensorSharding, used: set[str]) -> list[Axes]:
    """Which sums may stay pending: none, or all that are on axes with nothing else to do."""
    kept = tuple(axis for axis in layout.partial if axis not in used) if layout.op == "sum" else ()
    return [(), kept] if kept else [()]


def _count(axes: int, letters: int) -> int:
    """How many splits there are: k of the axes in some order, cut into as many parts as there are letters."""
    count = 0
    for k in range(axes + 1):
        orders = prod(range(axes - k + 1, axes + 1))
        count += orders * prod(range(k + 1, k + letters)) // prod(range(1, letters))
    return count


def _all_splits(free: list[str], letters: int) -> Iterator[tuple[Axes, ...]]:
    for places in product(range(letters + 1), repeat=len(free)):       # the last place: over no letter
        placed = list(zip(free, places, strict=True))
        given = [[axis for axis, place in placed if place == letter] for letter in range(letters)]
        yield from product(*(tuple(permutations(axes)) for axes in given))


def _named(task: Task) -> Iterator[tuple[Axes, ...]]:
    options: list[list[Axes]] = []
    contraction = task.contraction
    for letter in contraction.letters:
        named = [
            task.axes_of(layout, letters, letter) for layout, letters in
            ((task.lhs, contraction.lhs), (task.rhs, contraction.rhs), (task.out, contraction.out))
        ]
        named += [(axis,) for axis in task.out.partial if letter in contraction.summed]
        options.append(list(dict.fromkeys(axes[:n] for axes in [(), *named] for n in range(len(axes) + 1))))
    for axes in product(*options):
        used = [axis for dim in axes for axis in dim]
        if len(set(used)) == len(used):
            yield axes


class _Bounds:
    """What all ranks together receive at least."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._letters = task.contraction.letters
        self._blocks: dict[tuple[Shape, TensorSharding], list[list[tuple[int, int]]]] = {}
        self._known: dict[tuple[int, TensorSharding], int] = {}

    def least(self, way: Way) -> tuple[int, int, int]:
        """The bytes of one way, at least: to move the operands, and to move the product."""
        task, contraction = self._task, self._task.contraction
        axes, lhs_partial, rhs_partial = way
        split = dict(zip(self._letters, axes, strict=True))
        lhs, rhs, made = (
            TensorSharding(*(split[letter] for letter in letters))
            for letters in (contraction.lhs, contraction.rhs, contraction.out)
        )
        summed = [axis for letter in contraction.summed for axis in split[letter]]
        reduced = [axis for axis in (*summed, *lhs_partial, *rhs_partial) if axis not in task.out.partial]
        terms = prod(task.mesh.shape[axis] for axis in reduced)
        size = task.dtype.itemsize
        return (
            self._lacking(0, task.lhs, lhs, task.lhs_shape) * size,
            self._lacking(1, task.rhs, rhs, task.rhs_shape) * size,
            max(self._lacking(2, made, task.out, task.out_shape), (terms - 1) * prod(task.out_shape)) * size,
        )

    def _lacking(self, which: int, before: TensorSharding, after: TensorSharding, shape: Shape) -> int:
        """The elements that ranks have not, of what they are to have.  Identities in place of sums cost nothing."""
        key = which, before if which == 2 else after
        found = self._known.get(key)
        if found is None:
            partial = which == 2 and bool(after.partial)
            found = 0 if partial else sum(
                prod(stop - start for start, stop in theirs) - _common(mine, theirs)
                for mine, theirs in zip(self._places(before, shape), self._places(after, shape), strict=True)
            )
            self._known[key] = found
        return found

    def _places(self, layout: TensorSharding, shape: Shape) -> list[list[tuple[int, int]]]:
        key = shape, layout
        found = self._blocks.get(key)
        if found is None:
            mesh = self._task.mesh
            found = self._blocks[key] = [
                [(piece.start, piece.stop) for piece in layout.slices(shape, mesh, rank)] for rank in range(mesh.size)
            ]
        return found


def _common(mine: list[tuple[int, int]], theirs: list[tuple[int, int]]) -> int:
    return prod(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in zip(mine, theirs, strict=True))
