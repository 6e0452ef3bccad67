"""The usual mistakes of kernels that pass blocks round a ring, found by trying them on the inputs of the reference.

If every rank returns what the reference makes of inputs with a mistake in them, that is the mistake of the kernel: the
blocks lie in the other direction, or one of them is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from parallelism.sharding import TensorSharding

if TYPE_CHECKING:
    from vcluster.testing.kernels import KernelCase

Array = npt.NDArray[Any]
Reference = Callable[..., npt.ArrayLike]
Near = Callable[[Array, Array], bool]
Changed = Callable[[Array, int, int], Array]
"""An array with a mistake in it: of ``(array, dim, index of the rank along the axis)``."""

DEVICES = 4
"""On fewer, the two directions of a ring and its first and last step are hard to tell apart."""
MOST_ARGUMENTS = 4


def ring_cause(
    kernel: Callable[..., Any], reference: Reference, case: KernelCase, axis: str, near: Near
) -> str:
    """The mistake that explains the wrong outputs on the ranks along ``axis``; empty if none of those known does."""
    outputs = [np.asarray(output) for output in case.run(kernel).outputs]
    arrays = [array for array, _ in case.arguments]
    split = [
        (place, dim)
        for place, (_, layout) in enumerate(case.arguments)
        for dim, each in enumerate(layout.dims)
        if each.axes == (axis,)
    ][:MOST_ARGUMENTS]
    for text, changed, first in _mistakes(axis):
        owners = [0] * len(outputs) if first else range(len(outputs))  # the ranks whose shards are returned
        for chosen in _subsets(split):

            def mistaken(rank: int, changed: Changed = changed, chosen: Any = chosen) -> Any:
                given = list(arrays)
                for place, dim in chosen:
                    given[place] = changed(given[place], dim, rank)
                with np.errstate(all="ignore"):
                    return np.asarray(reference(*given))

            if all(
                _is_shard(output, mistaken, rank, owner, case, near)
                for rank, (owner, output) in enumerate(zip(owners, outputs, strict=True))
            ):
                which = " and ".join(f"argument {place + 1}" for place, _ in chosen)
                return text.format(which=which)
    return _missing_block(outputs, case, axis, near) or _missing_rescale(kernel, reference, case, split, near)


def _subsets(split: Sequence[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], ...]]:
    """All sets of split arguments, the smallest first; each argument is given with its split dim."""
    for count in range(1, len(split) + 1):
        yield from combinations(split, count)


def _mistakes(axis: str) -> Iterator[tuple[str, Changed, bool]]:
    """What is said of a mistake, the mistake, and whether the shard of the first rank is to be compared."""
    yield (
        f"the blocks of {{which}} go round the ring along {axis!r} in the other direction than the kernel counts: "
        "after step s a rank has the block of the rank s before it if each sends to the next, and of the rank s "
        "after it if each sends to the one before",
        _turned,
        False,
    )
    for name, by in (("after", 1), ("before", -1)):
        yield (
            f"the ring along {axis!r} has one step too few: the block of {{which}} of the rank {name} a rank is "
            "missing",
            lambda array, dim, rank, by=by: np.delete(  # type: ignore[misc]
                array, _block(array, dim, rank + by), axis=dim
            ),
            False,
        )
        yield (
            f"the ring along {axis!r} has one step too few: the block of {{which}} of the rank {name} a rank is "
            "missing",
            lambda array, dim, rank, by=by: _without(  # type: ignore[misc]
                array, dim, rank + by
            ),
            False,
        )
        yield (
            f"each rank takes the block of {{which}} of the rank {name} the one whose turn it is along {axis!r}: "
            "the step is counted one too far",
            lambda array, dim, rank, by=by: np.roll(  # type: ignore[misc]
                array, by * (array.shape[dim] // DEVICES), axis=dim
            ),
            False,
        )
    yield (
        f"positions of {{which}} are counted from the start of the shard, not of the whole: a causal mask needs the "
        f"offset of the shard, device.position({axis!r}) times its rows",
        lambda array, dim, rank: np.roll(array, -rank * (array.shape[dim] // DEVICES), axis=dim),
        True,
    )


def _block(array: Array, dim: int, rank: int) -> Array:
    """The places of a block along a dim."""
    size = array.shape[dim] // DEVICES
    return np.arange(rank % DEVICES * size, (rank % DEVICES + 1) * size)


def _turned(array: Array, dim: int, rank: int) -> Array:
    """The blocks in the other direction round the ring, seen from a rank."""
    order = [place for other in range(DEVICES) for place in _block(array, dim, 2 * rank - other)]
    return np.take(array, order, axis=dim)


def _without(array: Array, dim: int, rank: int) -> Array:
    """The array with zeros in a block."""
    changed = np.array(array)
    np.moveaxis(changed, dim, 0)[_block(array, dim, rank)] = 0
    return changed


def shard_of(whole: Array, case: KernelCase, rank: int) -> Array:
    """The shard of a rank, of an array in the layout of the result."""
    layout: TensorSharding = case.layout
    return whole[layout.slices(whole.shape, case.cluster.mesh, rank)]


def _is_shard(
    output: Array, mistaken: Callable[[int], Array], rank: int, of: int, case: KernelCase, near: Near
) -> bool:
    try:
        whole = mistaken(rank)
    except (ValueError, IndexError, TypeError):  # the reference does not take such shapes
        return False
    return whole.shape == case.expected.shape and near(output, shard_of(whole, case, of))


def _missing_block(outputs: Sequence[Array], case: KernelCase, axis: str, near: Near) -> str:
    """Whether the outputs are right but for one block, that of a neighbour in the ring."""
    whole = case.expected
    for dim, each in enumerate(case.layout.dims):
        if each.axes or whole.shape[dim] % DEVICES or any(output.shape != whole.shape for output in outputs):
            continue
        for name, by in (("after", 1), ("before", -1)):
            right = [
                near(
                    np.delete(output, _block(whole, dim, rank + by), axis=dim),
                    np.delete(whole, _block(whole, dim, rank + by), axis=dim),
                )
                for rank, output in enumerate(outputs)
            ]
            if all(right):
                return (
                    f"the ring along {axis!r} has one step too few: on each rank the block of the rank {name} it "
                    f"is missing along dim {dim} of the result"
                )
    return ""


def _missing_rescale(
    kernel: Callable[..., Any],
    reference: Reference,
    case: KernelCase,
    split: Sequence[tuple[int, int]],
    near: Near,
) -> str:
    """Whether the kernel is a softmax over blocks which is right only where all blocks have the same maximum."""
    arrays = [array for array, _ in case.arguments]
    for place, _ in split:
        moved, zero = list(arrays), list(arrays)
        moved[place], zero[place] = arrays[place] + 1, np.zeros_like(arrays[place])
        if not near(np.asarray(reference(*moved)), case.expected) or near(
            np.asarray(reference(*zero)), case.expected
        ):
            continue  # a softmax does not change if all its numbers do
        flat = case._replace(
            arguments=tuple((array, layout) for array, (_, layout) in zip(zero, case.arguments, strict=True))
        )
        wanted = np.asarray(reference(*zero))
        outputs = flat.run(kernel).outputs
        if all(near(np.asarray(output), shard_of(wanted, case, rank)) for rank, output in enumerate(outputs)):
            return (
                f"it is right where argument {place + 1} is zero, so that all blocks have the same maximum: when "
                "the maximum rises, what is added up so far, sum and output, must be rescaled by "
                "exp(old - new)"
            )
    return ""
