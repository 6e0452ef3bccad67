"""Numbers by channel of links, such as the bytes of a collective: arrays, because a large group has thousands."""

from collections.abc import Iterator, Mapping
from functools import cached_property

import numpy as np

from parallelism.arrays import Floats, Ints, distinct
from parallelism.hardware import Channel


class ChannelLoads(Mapping[Channel, float]):
    """A number for each of some channels; ``by_level`` has them by the first two numbers of the channels.

    >>> loads = ChannelLoads({(0, -1): (np.array([2, 5]), np.array([8.0, 4.0]))})
    >>> dict(loads.added(loads, 0.5))
    {(0, -1, 2): 12.0, (0, -1, 5): 6.0}
    """

    def __init__(self, by_level: Mapping[tuple[int, int], tuple[Ints, Floats]]) -> None:
        self.by_level = by_level
        """By (level, fault): the numbers of the channels in that level, ascending, and their loads."""

    @classmethod
    def of(cls, loads: Mapping[Channel, float]) -> "ChannelLoads":
        """Loads by channel, stored as arrays."""
        by_level: dict[tuple[int, int], list[tuple[int, float]]] = {}
        for (level, fault, number), load in sorted(loads.items()):
            by_level.setdefault((level, fault), []).append((number, load))
        arrays = {}
        for key, each in by_level.items():
            numbers, own = zip(*each, strict=True)
            arrays[key] = np.array(numbers), np.array(own)
        return cls(arrays)

    @cached_property
    def _all(self) -> dict[Channel, float]:
        return {
            (level, fault, number): load
            for (level, fault), (numbers, loads) in self.by_level.items()
            for number, load in zip(numbers.tolist(), loads.tolist(), strict=True)
        }

    def __getitem__(self, channel: Channel) -> float:
        return self._all[channel]

    def __iter__(self) -> Iterator[Channel]:
        return iter(self._all)

    def __len__(self) -> int:
        return sum(len(numbers) for numbers, _ in self.by_level.values())

    def added(self, other: "ChannelLoads", factor: float) -> "ChannelLoads":
        """These loads plus ``factor`` times the ``other`` ones."""
        found = dict(self.by_level)
        for key, (numbers, loads) in other.by_level.items():
            known, sums = found.get(key, (numbers, np.zeros(len(numbers))))
            if np.array_equal(known, numbers):
                found[key] = known, sums + loads * factor
                continue
            both = distinct(np.concatenate([known, numbers]))
            total = np.zeros(len(both))
            total[np.searchsorted(both, known)] = sums
            total[np.searchsorted(both, numbers)] += loads * factor
            found[key] = both, total
        return ChannelLoads(found)

    def between(self, first: int, end: int) -> Iterator[tuple[Channel, float]]:
        """The channels whose number in their level is in ``range(first, end)``, with their loads."""
        for (level, fault), (numbers, loads) in self.by_level.items():
            low, high = np.searchsorted(numbers, [first, end]).tolist()
            for number, load in zip(numbers[low:high].tolist(), loads[low:high].tolist(), strict=True):
                yield (level, fault, number), load


NO_LOADS = ChannelLoads({})
