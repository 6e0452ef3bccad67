"""`Later`: a result of collectives that are under way, which stands for an array between two programs of a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from parallelism.arrays import Array
from parallelism.execution.typed_arrays import ArrayMaker
from parallelism.ir import Op


@dataclass
class UnderWay:
    """Collectives that were started as one call."""

    arrays: ArrayMaker
    work: Any
    ops: tuple[Op, ...]
    found: Sequence[Array] | None = None

    def wait(self, into: Sequence[Array | None] = ()) -> Sequence[Array]:
        """Their outputs; waits for them once."""
        if self.found is None:
            self.found = self.arrays.wait(self.work, into)
        return self.found


@dataclass(frozen=True)
class Later:
    """An output of collectives that are under way."""

    call: UnderWay
    place: int
    """Its place among the outputs of the call."""

    def wait(self) -> Array:
        """The array."""
        return self.call.wait()[self.place]


def waited_for(x: Array | Later) -> Array:
    """The array, also if it is there later."""
    return x.wait() if isinstance(x, Later) else x
