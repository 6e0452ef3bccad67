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

from collections.abc import Callable

import numpy as np

from parallelism.algorithms import kind_of
from parallelism.cost.group_shapes import places_of
from parallelism.hardware import Hardware

Group = tuple[int, ...]
Groups = tuple[Group, ...]
"""Groups of one size that do the same at the same time."""

Price = Callable[..., tuple[float, str]]
"""(collective, nbytes, groups, root) -> the seconds of the cheapest algorithm, and its name."""

INSIDE, ACROSS = "inside", "across"

PARTS: dict[str, tuple[tuple[str, str, bool], ...]] = {
    "all_reduce": (
        ("reduce_scatter", INSIDE, False),
        ("all_reduce", ACROSS, True),
        ("all_gather", INSIDE, False),
    ),
    "all_gather": (("all_gather", ACROSS, True), ("all_gather", INSIDE, False)),
    "reduce_scatter": (("reduce_scatter", INSIDE, False), ("reduce_scatter", ACROSS, True)),
    "all_to_all": (("all_to_all", INSIDE, False), ("all_to_all", ACROSS, False)),
    "broadcast": (("broadcast", ACROSS, False), ("broadcast", INSIDE, False)),
    "reduce": (("reduce", ACROSS, False), ("reduce", INSIDE, False)),
}
"""For each collective its parts: (collective, where it runs, whether it runs on S/m instead of S)."""


def seconds_in_parts(
    collective: str, price: Price, nbytes: float, groups: Groups, inside: Groups, across: Groups, root: int
) -> float:
    """The seconds of all parts of a collective.  If the place of the root differs between groups, the first counts."""
    roots = {INSIDE: 0, ACROSS: 0}
    if kind_of(collective).rooted:
        all_roots = {ranks[root] for ranks in groups}
        across = tuple(group for group in across if not all_roots.isdisjoint(group))
        first = groups[0][root]
        for where, parts in ((INSIDE, inside), (ACROSS, across)):
            roots[where] = next(group for group in parts if first in group).index(first)
    total = 0.0
    for part, where, is_shard in PARTS[collective]:
        size = nbytes / len(inside[0]) if is_shard else nbytes
        seconds, _ = price(part, size, inside if where == INSIDE else across, roots[where])
        total += seconds
    return total


def taken_apart(hardware: Hardware, groups: Groups) -> tuple[Groups, Groups] | None:
    """The groups inside the units of the outermost level that they span, and the groups across; None without such.

    A group across has the ranks with the same place in the order of their unit.
    """
    places = places_of(hardware, np.array(groups, np.int64))
    apart = (places // hardware.inside(level) for level in range(len(hardware.links)))
    outermost = max((level for level, unit in enumerate(apart) if (unit != unit[:, :1]).any()), default=0)
    unit = places // hardware.inside(outermost)
    insides: list[Group] = []
    across: list[Group] = []
    for ranks, numbers in zip(np.array(groups, np.int64), unit, strict=True):
        order = np.argsort(numbers, kind="stable")
        borders = np.flatnonzero(np.diff(numbers[order])) + 1
        inside, further = divmod(len(ranks), len(borders) + 1)
        if (
            not len(borders)
            or further
            or inside == 1
            or (borders % inside).any()
            or (insides and inside != len(insides[0]))
        ):
            return None
        first_of_unit = order[::inside]
        units = ranks[order].reshape(-1, inside)[
            np.argsort(first_of_unit)
        ]  # in the order of their first members
        insides += map(tuple, units.tolist())
        across += map(tuple, units.T.tolist())
    return tuple(insides), tuple(across)
