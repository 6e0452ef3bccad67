"""The search for the cheapest way to compute a product: by bytes received by all ranks, then by flops, or by a cost.

The search tries axes for every letter of the product; a sum that is pending in an operand may stay pending.  On meshes
of up to three axes it tries all possibilities, on larger ones those that some layout names, and their outer parts.  A
lower bound of the bytes to receive excludes candidates that need not be planned.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, permutations, product
from math import comb, perm
from typing import Any

from parallelism.resharding import blocks_of, plan_resharding, state_of
from parallelism.resharding.axis_numbers import singles
from parallelism.sharding import TensorSharding
from tensor_parallelism.products.product import (
    Axes,
    ProductPlan,
    Split,
    Task,
    all_different,
    flops_of,
    moves_around,
    product_plan,
    without,
)

MOST_TRIED = 300
"""Up to this number all candidates are tried; beyond it only those that the layouts name."""

Candidate = tuple[Split, Axes, Axes]
"""The axes of each letter, and of the sums that stay pending in either operand."""

Cost = Callable[[int, int], Any]
"""``cost(bytes, flops)`` of all ranks together.  More of either must never cost less.

Results are only compared, so they need not be numbers.
"""


def bytes_then_flops(nbytes: int, flops: int) -> tuple[int, int]:
    """The default `Cost`."""
    return nbytes, flops


@dataclass(frozen=True)
class Seconds:
    """A `Cost` in seconds: bytes and flops of all ranks together, one after the other, at the rates of all together.

    >>> Seconds(flops_per_second=2e11, bytes_per_second=1e10)(10**9, 10**11)
    0.6
    """

    flops_per_second: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        for name in ("flops_per_second", "bytes_per_second"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is a rate above 0, got {getattr(self, name)!r}")

    def __call__(self, nbytes: int, flops: int) -> float:
        return nbytes / self.bytes_per_second + flops / self.flops_per_second


@lru_cache(1024)
def cheapest_product(task: Task, cost: Cost = bytes_then_flops) -> ProductPlan:
    """The plan with the smallest cost; among equal ones, that with the fewest communications."""
    candidates = []
    for candidate in _candidates(task):
        candidates.append((candidate, _least_received(task, candidate), flops_of(task, candidate[0])))
    best: ProductPlan | None = None
    spent: tuple[Any, int] = (None, 0)
    for bound, number in sorted(
        (cost(sum(least), flops), i) for i, (_, least, flops) in enumerate(candidates)
    ):
        candidate, least, flops = candidates[number]
        if best is not None and (bound, 0) >= spent:
            break
        if best is not None and _exceeds(spent[0], task, candidate, least, flops, cost):
            continue
        plan = product_plan(task, *candidate, why=f"the cheapest of {len(candidates)} ways")
        nbytes, _, communications = plan.cost
        price = cost(nbytes, flops), communications
        if best is None or price < spent:
            best, spent = plan, price
    assert best is not None, "to gather everything is always one of the ways"
    return best


def _exceeds(limit: Any, task: Task, candidate: Candidate, least: list[int], flops: int, cost: Cost) -> bool:
    """Whether a candidate costs more than ``limit``.  The moves of its operands are planned to find out."""
    total = sum(least)
    for bound, move in zip(least[:2], moves_around(task, *candidate), strict=False):
        total += sum(plan_resharding(*move, task.dtype, task.mesh).bytes_received) - bound
        if cost(total, flops) > limit:
            return True
    return False


def _candidates(task: Task) -> Iterator[Candidate]:
    free = [axis for axis, extent in task.mesh.shape.items() if extent > 1]
    letters = task.contraction.letters
    splits = (
        _all_splits(free, len(letters)) if _count(len(free), len(letters)) <= MOST_TRIED else _named(task)
    )
    for axes in splits:
        used = {axis for dim in axes for axis in dim}
        for kept in _staying(task.lhs, used):
            for other in _staying(task.rhs, used.union(kept)):
                yield dict(zip(letters, axes, strict=True)), kept, other


def _staying(layout: TensorSharding, used: set[str]) -> list[Axes]:
    """The sums that may stay pending: none, or those over all axes that split no letter."""
    kept = without(layout.partial, used) if layout.op == "sum" else ()
    return [(), kept] if kept else [()]


def _count(axes: int, letters: int) -> int:
    """How many splits there are: k of the axes in some order, cut into as many parts as there are letters."""
    return sum(perm(axes, k) * comb(k + letters - 1, k) for k in range(axes + 1))


def _all_splits(free: list[str], letters: int) -> Iterator[tuple[Axes, ...]]:
    for chosen in product(range(letters + 1), repeat=len(free)):
        by_letter: list[list[str]] = [[] for _ in range(letters + 1)]
        for axis, letter in zip(free, chosen, strict=True):
            by_letter[letter].append(axis)
        yield from product(*map(permutations, by_letter[:-1]))  # the axes of the last one split no letter


def _named(task: Task) -> Iterator[tuple[Axes, ...]]:
    options: list[list[Axes]] = []
    contraction = task.contraction
    sides = (task.lhs, contraction.lhs), (task.rhs, contraction.rhs), (task.out, contraction.out)
    for letter in contraction.letters:
        named = [
            layout.over(len(letters)).dims[letters.index(letter)].axes
            for layout, letters in sides
            if letter in letters
        ]
        named += [(axis,) for axis in task.out.partial if letter in contraction.summed]
        options.append(list(dict.fromkeys(axes[:n] for axes in [(), *named] for n in range(len(axes) + 1))))
    return (axes for axes in product(*options) if all_different(chain(*axes)))


def _least_received(task: Task, candidate: Candidate) -> list[int]:
    """The bytes that all ranks together receive at least: to move the operands, and to move the product."""
    return [_least_elements(task, *move) * task.dtype.itemsize for move in moves_around(task, *candidate)]


def _least_elements(
    task: Task, source: TensorSharding, target: TensorSharding, shape: tuple[int, ...]
) -> int:
    """The elements that must be received, whatever the moves.

    If nothing is reduced, these are the elements that ranks lack.  Otherwise each sum of ``t`` terms needs t - 1
    received elements, and every further rank that needs the sum receives one more.  An identity in place of a value
    costs nothing.
    """
    axes = singles(task.mesh)
    blocks = blocks_of(shape, task.mesh, axes)
    before = state_of(source, axes)
    after = state_of(target, axes)
    stays = source.op == target.op and set(after.partial) <= set(before.partial)
    reduced = tuple(axis for axis in before.partial if source.op != target.op or axis not in after.partial)
    if not reduced:
        common = int(blocks.overlap(after.dims, [before.dims]).sum())
        return blocks.held(after.dims) - common if stays else 0
    pending = blocks.count(after.partial)
    sums = blocks.elements * (pending if stays else 1)
    holders = blocks.held(after.dims) // (1 if stays else pending)
    return sums * (blocks.count(reduced) - 1) + holders - sums
