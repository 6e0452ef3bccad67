"""Seconds on a `MixedHardware`: inside a part by the costs of that part; between the parts by what joins them.

A collective whose group has members in both parts takes three steps, as in Cho et al.,
*BlueConnect: Decomposing All-Reduce for Deep Learning on Heterogeneous Network Hierarchy* (2019):

    all_reduce        each part reduces and scatters among its members; the parts exchange their sums of S bytes; each part
                      gathers
    reduce_scatter    the same without the gathering; each part sends what the other one keeps
    all_gather        the parts exchange what they have; each part gathers all S bytes

In the exchange each member of the smaller part sends an even share of the bytes at the rate of a message, or, with a link
across, the group has one lane of it.  Each step lasts as long as in the slower part.  Other kinds have no price between
two parts.
"""

from collections.abc import Iterable

import numpy as np

from parallelism.algorithms import Pairs
from parallelism.cost.channel_loads import NO_LOADS, ChannelLoads
from parallelism.cost.cost import CollectiveCost, Costs
from parallelism.hardware import Hardware, MixedHardware
from parallelism.hardware.rates import Shape

IN_THREE_STEPS = "across parts"
"""The name of the algorithm."""


def costs_of(hardware: Hardware) -> Costs:
    """The costs on a hardware of one kind, or of two."""
    return MixedCosts(hardware) if isinstance(hardware, MixedHardware) else Costs(hardware)


class MixedCosts(Costs):
    """Seconds on a hardware of two parts.

    >>> from parallelism.hardware import mixed
    >>> both = mixed(Hardware.preset("dgx-a100:1"), Hardware.preset("dgx-h100:1"))
    >>> price = MixedCosts(both).collective("all_reduce", 2**30, range(16))
    >>> price.algorithm, price.seconds > MixedCosts(both).collective("all_reduce", 2**30, range(8)).seconds
    ('across parts', True)
    """

    def __init__(self, hardware: MixedHardware) -> None:
        super().__init__(hardware)
        self.mixed = hardware
        self.of_parts = tuple(Costs(part) for part in hardware.parts)

    def __reduce__(self) -> tuple[type["MixedCosts"], tuple[MixedHardware]]:
        return MixedCosts, (self.mixed,)

    def compute_seconds(
        self,
        flops: float = 0.0,
        nbytes: float = 0.0,
        *,
        dtype: object = None,
        rank: int | None = None,
        shape: Shape | None = None,
        kernel: str | None = None,
        other_bytes: float = 0.0,
        added_bytes: float = 0.0,
    ) -> float:
        """As `Costs.compute_seconds`, on the part of the ``rank``.  ``ValueError`` without one."""
        if rank is None:
            raise ValueError(f"the seconds of compute on {self.mixed.name} depend on the rank; got none")
        own = self.of_parts[self.mixed.number_of_part(rank)]
        return own.compute_seconds(
            flops,
            nbytes,
            dtype=dtype,
            shape=shape,
            kernel=kernel,
            other_bytes=other_bytes,
            added_bytes=added_bytes,
        )

    def message_seconds(self, nbytes: float, source: int, target: int) -> float:
        """The seconds of a message, as in `Costs.message_seconds`."""
        part = self.mixed.part_of_group((source, target))
        if part is not None:
            return self.of_parts[part].message_seconds(
                nbytes, self.mixed.place(source), self.mixed.place(target)
            )
        path = self.path(source, target)
        return path.latency_seconds + nbytes / path.bytes_per_second

    def algorithms(self, collective: str, group: Iterable[int]) -> tuple[str, ...]:
        """The algorithms that a collective may use, as in `Costs.algorithms`."""
        ranks = tuple(group)
        part = self.mixed.part_of_group(ranks)
        return (
            (IN_THREE_STEPS,)
            if part is None
            else self.of_parts[part].algorithms(collective, self._places(ranks))
        )

    def collective(
        self,
        collective: str,
        nbytes: float,
        group: Iterable[int],
        *,
        algorithm: str | None = None,
        root: int = 0,
        pairs: Pairs = (),
    ) -> CollectiveCost:
        """As `Costs.collective`.  ``ValueError`` for a kind that has no price between two parts."""
        ranks = tuple(group)
        part = self.mixed.part_of_group(ranks)
        if part is None:
            seconds = self._across(collective, nbytes, ranks)
            return CollectiveCost(collective, IN_THREE_STEPS, nbytes, len(ranks), seconds)
        return self.of_parts[part].collective(
            collective, nbytes, self._places(ranks), algorithm=algorithm, root=root, pairs=pairs
        )

    def channel_bytes(
        self, cost: CollectiveCost, group: Iterable[int], *, root: int = 0, pairs: Pairs = ()
    ) -> ChannelLoads:
        """As `Costs.channel_bytes`; a collective of both parts shares its links with nothing else."""
        ranks = tuple(group)
        part = self.mixed.part_of_group(ranks)
        if part is None:
            return NO_LOADS
        own = self.of_parts[part].channel_bytes(cost, self._places(ranks), root=root, pairs=pairs)
        first = self.mixed.first_level(part)
        return ChannelLoads({(first + level, fault): loads for (level, fault), loads in own.by_level.items()})

    def _places(self, ranks: Iterable[int]) -> tuple[int, ...]:
        return tuple(map(self.mixed.place, ranks))

    def _across(self, collective: str, nbytes: float, ranks: tuple[int, ...]) -> float:
        members: list[list[int]] = [[], []]
        for rank in ranks:
            members[self.mixed.number_of_part(rank)].append(rank)
        sizes = np.array([len(each) for each in members])
        kept = (
            float(sizes.max() / sizes.sum()) * nbytes
        )  # by the larger part, of a dim that all members share
        steps = {
            "all_reduce": (("reduce_scatter", nbytes), nbytes, ("all_gather", nbytes)),
            "reduce_scatter": (("reduce_scatter", nbytes), kept, None),
            "all_gather": (None, kept, ("all_gather", nbytes)),
        }
        if collective not in steps:
            raise ValueError(
                f"{collective} has no price over ranks of both {' and '.join(part.name for part in self.mixed.parts)}; "
                f"{', '.join(steps)} have"
            )
        before, sent, after = steps[collective]
        seconds = self._exchange(sent, members)
        for step in (before, after):
            if step is not None:
                seconds += max(self.collective(*step, each).seconds for each in members)
        return seconds

    def _exchange(self, nbytes: float, members: list[list[int]]) -> float:
        """The seconds in which the members of each part send so many bytes together to those of the other."""
        senders = 1 if self.mixed.across is not None else min(map(len, members))
        return max(
            self.message_seconds(nbytes / senders, here[0], there[0])
            for here, there in (members, members[::-1])
        )
