"""`ScheduleKind`: all that is known of a schedule by its name; and the table of these records."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from parallelism.pipelining.generators.step import Generator

ONE, TURNS, V = "one", "turns", "v"
"""How stages lie on ``P`` ranks.  `ONE`: rank ``r`` has stage ``r``.  `TURNS`: it has any number of stages, ``r``,
``r + P``, ``r + 2 P``, ...  `V`: it has stages ``r`` and ``2 P - 1 - r``."""
PLACEMENTS = ONE, TURNS, V


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule: its generator, how stages lie on ranks, and what its actions mean.

    >>> from parallelism import ScheduleKind
    >>> def forwards(rank, ranks, microbatches):
    ...     yield from ((rank, "F", k) for k in range(microbatches))
    >>> ScheduleKind("forwards", forwards, training=False).trains_whole_model
    False

    `parallelism.register_schedule` makes it known by its name.  ``ValueError`` for a ``placement`` that is not one of
    `PLACEMENTS`.
    """

    name: str
    generator: Generator
    placement: str = ONE
    """How stages lie on ranks: ``"one"``, ``"turns"`` or ``"v"``."""
    training: bool = True
    """Whether there are backwards.  Without them no activations are kept."""
    local: bool = False
    """Whether every stage has its own loss, so that no gradient passes between stages."""
    weights: str = "one"
    """Which versions of the weights are used; see `parallelism.pipelining.schedule.Schedule`."""
    aliases: tuple[str, ...] = ()
    """Other names, those of torch and of papers among them."""

    def __post_init__(self) -> None:
        if self.placement not in PLACEMENTS:
            raise ValueError(
                f"schedule {self.name!r}: placement must be {', '.join(map(repr, PLACEMENTS))}; "
                f"got {self.placement!r}"
            )

    @property
    def is_interleaved(self) -> bool:
        """Whether a rank has any number of stages, which take turns."""
        return self.placement == TURNS

    @property
    def is_v_shaped(self) -> bool:
        """Whether the stages lie in a V, so that the first rank has the first stage and the last one."""
        return self.placement == V

    @property
    def fewest_chunks(self) -> int:
        """The number of stages on a rank, if none is given."""
        return 2 if self.is_v_shaped else 1

    @property
    def trains_whole_model(self) -> bool:
        """Whether a step gives the gradient of the whole model, for one version of the weights."""
        return self.training and not self.local and self.weights == "one"

    @property
    def spellings(self) -> tuple[str, ...]:
        """Its names, normalized: see `spelt`."""
        return tuple(map(spelt, (self.name, *self.aliases)))

    def check_stages(self, stages: int, chunks: int) -> None:
        """``ValueError`` if so many ``stages`` cannot lie on ranks with ``chunks`` of them each."""
        if self.is_interleaved:
            return
        if self.is_v_shaped:
            if chunks != 2:
                raise ValueError(
                    f"schedule {self.name!r} puts two stages on each rank, chunks=2; got chunks={chunks}"
                )
            if stages % 2:
                raise ValueError(
                    f"schedule {self.name!r} puts two stages on each rank; got {stages} stages, {stages + 1} fit"
                )
        elif chunks != 1:
            raise ValueError(
                f"schedule {self.name!r} puts one stage on each rank, got chunks={chunks}; chunks=1 fits"
            )


def spelt(name: str) -> str:
    """The normalized name: lower case, without ``_``, ``-``, blanks and torch's prefix ``Schedule``."""
    return re.sub(r"[\s_-]", "", name).lower().removeprefix("schedule")


class ScheduleTable:
    """All schedules that have a name: those of the package, and those that were registered."""

    def __init__(self, *own: ScheduleKind) -> None:
        self.kinds = {kind.name: kind for kind in own}
        """All of them by name."""
        self.own = frozenset(self.kinds)
        """The names of those of the package, which its tests check."""

    def __getitem__(self, name: str) -> ScheduleKind:
        return self.kinds[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.kinds)

    def by_spelling(self) -> dict[str, ScheduleKind]:
        """All of them by each of their normalized names: see `spelt`."""
        return {name: kind for kind in self.kinds.values() for name in kind.spellings}

    def find(self, name: str) -> ScheduleKind | None:
        """The schedule of this name, in any accepted spelling; None if there is none."""
        return self.by_spelling().get(spelt(name))
