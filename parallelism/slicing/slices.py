"""What slices of consecutive blocks cost on submeshes, and a slicing: the stages of a pipeline, each on a submesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Bools, Floats
from parallelism.display.quantities import plural


class NoSlicingFits(ValueError):
    """No slicing uses all devices and fits the memory.

    ``least_bytes``: what a device must hold at least; None if memory is not what lacks.
    """

    def __init__(self, message: str, least_bytes: float | None = None) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


def check_at_least(least: int, **counts: object) -> None:
    """``ValueError`` for a number, called by its name, that is no integer or is less."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {count!r}")


class Slice(NamedTuple):
    """A stage: consecutive blocks on a submesh."""

    first: int
    """The number of its first block."""
    last: int
    """The number of its last block."""
    submesh: int
    """The number of its submesh among those of `Slices`."""

    @property
    def blocks(self) -> str:
        """The blocks in words: ``2-5``, or ``2``."""
        return f"{self.first}-{self.last}" if self.last > self.first else str(self.first)


@dataclass(frozen=True, eq=False)
class Slices:
    """The cost of every slice on every submesh, for one microbatch.

    The arrays have the axes ``[first block, last block + 1, submesh]`` and the shape ``(blocks, blocks + 1,
    submeshes)``; entries without a block are not read.  A stage with n stages from it to the last, itself included,
    keeps the activations of ``min(n, microbatches)`` microbatches, as 1F1B does: each of its devices holds
    ``held_bytes + min(n, microbatches) * microbatch_bytes``.

    ``TypeError``, ``ValueError`` for arrays that do not fit each other, and for negative numbers.
    """

    seconds: Floats
    """Forward and backward; infinite where the slice cannot lie on the submesh."""
    devices: tuple[int, ...]
    """The number of devices of each submesh."""
    held_bytes: Floats | None = None
    """What a device holds during the whole step.  None: nothing."""
    microbatch_bytes: Floats | None = None
    """What a device keeps for each microbatch on its way.  None: nothing."""

    def __post_init__(self) -> None:
        devices = tuple(self.devices)
        for count in devices:
            check_at_least(1, **{"devices of a submesh": count})
        object.__setattr__(self, "devices", devices)
        for name in ("seconds", "held_bytes", "microbatch_bytes"):
            given: Any = getattr(self, name)
            if given is None and name != "seconds":
                given = np.zeros(np.shape(self.seconds))
            array = np.array(given, np.float64)
            blocks = len(array) if array.ndim else 0
            if (
                not blocks
                or array.shape != (blocks, blocks + 1, len(devices))
                or array.shape != np.shape(self.seconds)
            ):
                raise ValueError(
                    f"{name} must have the shape (blocks, blocks + 1, submeshes), with {len(devices)} "
                    f"submeshes and the same blocks everywhere; got {array.shape}"
                )
            if not (array[_are_slices(blocks)] >= 0).all():
                raise ValueError(f"{name} must be 0 or more; got {array[_are_slices(blocks)].min()}")
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    @classmethod
    def of_blocks(
        cls,
        seconds: npt.ArrayLike,
        devices: Sequence[int],
        held_bytes: npt.ArrayLike | None = None,
        microbatch_bytes: npt.ArrayLike | None = None,
    ) -> Slices:
        """The slices of blocks whose costs add up.  The arrays have the shape ``(blocks, submeshes)``.

        >>> from parallelism.slicing import Slices
        >>> Slices.of_blocks([[1.0, 0.5], [3.0, 1.5]], (1, 2)).seconds[0, 2].tolist()
        [4.0, 2.0]
        """
        return cls(
            _added(seconds),
            tuple(devices),
            None if held_bytes is None else _added(held_bytes),
            None if microbatch_bytes is None else _added(microbatch_bytes),
        )

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return len(self.seconds)

    def bytes_of(self, each: Slice, kept: int) -> float:
        """What a device of a stage holds while ``kept`` microbatches are on their way."""
        assert self.held_bytes is not None and self.microbatch_bytes is not None
        at = each.first, each.last + 1, each.submesh
        return float(self.held_bytes[at] + kept * self.microbatch_bytes[at])


@dataclass(frozen=True)
class Slicing:
    """The stages of a pipeline, in their order.

    >>> from parallelism.slicing import Slices, best_slicing
    >>> slicing = best_slicing(Slices.of_blocks([[1.0, 0.5], [3.0, 1.5]], (1, 2)), devices=3, microbatches=4)
    >>> print(slicing, [tuple(each) for each in slicing.slices])
    2 stages, 7 s: blocks 0 on submesh 0, 1 on submesh 1 [(0, 0, 0), (1, 1, 1)]
    """

    slices: tuple[Slice, ...]
    stage_seconds: tuple[float, ...]
    """The seconds of one microbatch on each stage."""
    microbatches: int

    @property
    def seconds(self) -> float:
        """The sum of the seconds of all stages, and the slowest one's once more for each further microbatch."""
        return sum(self.stage_seconds) + (self.microbatches - 1) * max(self.stage_seconds)

    def __str__(self) -> str:
        stages = ", ".join(f"{each.blocks} on submesh {each.submesh}" for each in self.slices)
        return f"{plural(len(self.slices), 'stage')}, {self.seconds:.4g} s: blocks {stages}"


def _are_slices(blocks: int) -> Bools:
    """Whether ``[first, end]`` has a block."""
    return np.arange(blocks)[:, None] < np.arange(blocks + 1)


def _added(costs: npt.ArrayLike) -> Floats:
    """The sums of consecutive rows: ``[first, end, submesh]``; infinite costs stay so."""
    each = np.array(costs, np.float64)
    if each.ndim != 2 or not len(each):
        raise ValueError(f"costs of blocks must have the shape (blocks, submeshes), got {each.shape}")
    blocks, submeshes = each.shape
    sums = np.zeros((blocks, blocks + 1, submeshes))
    for first in range(blocks):
        sums[first, first + 1 :] = np.cumsum(each[first:], axis=0)
    return sums
