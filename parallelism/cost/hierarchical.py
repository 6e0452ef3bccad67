"""A collective taken apart at the outermost level of links that its group spans: inside the units, and across them.

Of S bytes, over m ranks in each of n units,

    all_reduce       reduce_scatter of S inside, all_reduce of S/m across, all_gather of S inside
    all_gather       all_gather of S/m across, then of S inside
    reduce_scatter   the other way round
    all_to_all       all_to_all of S inside, then of S across
    broadcast        from the root to one in each unit, then inside; reduce the other way round

each part by the cheapest algorithm for it, which may be this one again.  Sources: Karonis et al., *Exploiting
hierarchy in parallel computer networks to optimize collective operation performance* (2000), for broadcast and
reduce; Cho et al., *BlueConnect* (2019), for all_reduce and its halves; NCCL's PXN does all_to_all so.
"""

from __future__ import annotations

from collections.abc import Callable

from parallelism.hardware import Hardware

Group = tuple[int, ...]
Groups = tuple[Group, ...]
"""Groups of one size that do the same at the same time."""


Price = Callable[..., tuple[float, str]]
"""(collective, nbytes, groups, root) -> the seconds of the cheapest algorithm, and its name."""

Parts = Callable[[Price, float, Groups, Groups, Groups, int], float]
"""(price, nbytes, groups, inside, across, root) -> seconds; where the root's place differs, as in the first group."""


def taken_apart(hardware: Hardware, groups: Groups) -> tuple[Groups, Groups] | None:
    """The groups inside the units of the outermost level that they span, and those across; None where there are none.

    The ranks across are those that have the same place in the order of their unit.
    """
    outermost = max((hardware.level(ranks[0], rank) for ranks in groups for rank in ranks[1:]), default=0)
    inside = hardware.inside(outermost)
    insides: list[Group] = []
    across: list[Group] = []
    for ranks in groups:
        units: dict[int, list[int]] = {}
        for rank in ranks:
            units.setdefault(hardware.place(rank) // inside, []).append(rank)
        if len(units) == 1 or len({len(unit) for unit in units.values()}) > 1:
            return None
        insides += map(tuple, units.values())
        across += zip(*units.values(), strict=True)
    if len(insides[0]) == 1 or len({len(group) for group in insides}) > 1:
        return None
    return tuple(insides), tuple(across)


def _all_reduce(price: Price, nbytes: float, groups: Groups, inside: Groups, across: Groups, root: int) -> float:
    m = len(inside[0])
    return (price("reduce_scatter", nbytes, inside)[0] + price("all_reduce", nbytes / m, across)[0]
            + price("all_gather", nbytes, inside)[0])


def _all_gather(price: Price, nbytes: float, groups: Groups, inside: Groups, across: Groups, root: int) -> float:
    return price("all_gather", nbytes / len(inside[0]), across)[0] + price("all_gather", nbytes, inside)[0]


def _reduce_scatter(price: Price, nbytes: float, groups: Groups, inside: Groups, across: Groups, root: int) -> float:
    return price("reduce_scatter", nbytes, inside)[0] + price("reduce_scatter", nbytes / len(inside[0]), across)[0]


def _all_to_all(price: Price, nbytes: float, groups: Groups, inside: Groups, across: Groups, root: int) -> float:
    return price("all_to_all", nbytes, inside)[0] + price("all_to_all", nbytes, across)[0]


def _rooted(collective: str) -> Parts:
    def made(price: Price, nbytes: float, groups: Groups, inside: Groups, across: Groups, root: int) -> float:
        roots = {group[root] for group in groups}
        leaders = tuple(group for group in across if roots & set(group))
        one = groups[0][root]
        first = next(group for group in leaders if one in group).index(one)
        second = next(group for group in inside if one in group).index(one)
        return price(collective, nbytes, leaders, first)[0] + price(collective, nbytes, inside, second)[0]
    return made


PARTS: dict[str, Parts] = {
    "all_reduce": _all_reduce, "all_gather": _all_gather, "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all, "broadcast": _rooted("broadcast"), "reduce": _rooted("reduce"),
}
"""What takes a collective apart."""
