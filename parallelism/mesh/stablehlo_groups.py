"""Groups of ranks in the notation of StableHLO, over a grid of replicas and partitions.

A program with R replicas of P partitions runs on R x P processes.  Ranks are row-major: ``replica * P + partition``.
StableHLO's specification (*Grouping*) has four kinds of groups:

    cross_replica                  ids are replicas:    each group is repeated for every partition
    cross_partition                ids are partitions:  each group is repeated for every replica
    cross_replica_and_partition    ids are replicas:    a group has all their partitions, partition by partition
    flattened_ids                  ids are ranks

The order inside a group is kept: gathers, scatters and reductions follow it.
"""

from collections.abc import Sequence
from itertools import product

from parallelism.mesh.mesh import checked_count, checked_integer

RankGroups = tuple[tuple[int, ...], ...]

STRATEGIES = ("cross_replica", "cross_partition", "cross_replica_and_partition", "flattened_ids")


def replica_groups(
    strategy: str,
    groups: Sequence[Sequence[int]],
    num_replicas: int,
    num_partitions: int,
    *,
    complete: bool = False,
) -> RankGroups:
    """Convert groups of ids to groups of ranks, for the ``groups=`` of a collective.

    Groups may have different sizes.  Ids may be missing: a rank outside of every group gets zeros from ``broadcast``
    and ``permute``, and must not call other collectives.  ``complete=True`` requires every id.

    ``ValueError`` for an unknown strategy, a number of replicas or partitions below 1, an empty group, and an id that
    is out of range, in two groups or twice in one.  ``TypeError`` for an id that is not an integer.

    >>> replica_groups("cross_replica", [[0, 1], [2, 3]], 4, 2)
    ((0, 2), (1, 3), (4, 6), (5, 7))
    >>> replica_groups("cross_replica_and_partition", [[0, 1]], 2, 2)
    ((0, 2, 1, 3),)
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"the strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    replicas = checked_count("num_replicas", num_replicas)
    partitions = checked_count("num_partitions", num_partitions)
    kind, ids = {
        "cross_partition": ("partition", partitions),
        "flattened_ids": ("process", replicas * partitions),
    }.get(strategy, ("replica", replicas))
    checked = _checked(strategy, kind, groups, ids, complete)
    found: list[tuple[int, ...]] = []
    for group in checked:
        match strategy:
            case "cross_replica":
                for partition in range(partitions):
                    found.append(tuple(replica * partitions + partition for replica in group))
            case "cross_partition":
                for replica in range(replicas):
                    found.append(tuple(replica * partitions + partition for partition in group))
            case "cross_replica_and_partition":
                all_partitions = product(range(partitions), group)
                found.append(tuple(replica * partitions + partition for partition, replica in all_partitions))
            case "flattened_ids":
                found.append(group)
    return tuple(found)


def _checked(
    strategy: str, kind: str, groups: Sequence[Sequence[int]], ids: int, complete: bool
) -> RankGroups:
    seen: dict[int, tuple[int, ...]] = {}
    checked = []
    for group in groups:
        if not hasattr(group, "__iter__"):
            raise TypeError(f"a group must be a sequence of {kind} ids, got {group!r} in groups={groups!r}")
        members = tuple(checked_integer(f"a {kind} id", i) for i in group)
        if not members:
            raise ValueError(
                f"a group must have at least one {kind}, got an empty one in groups={list(map(list, groups))}"
            )
        for i in members:
            if not 0 <= i < ids:
                raise ValueError(
                    f"groups of {strategy} hold {kind} ids 0 to {ids - 1}, got {i} in {list(members)}"
                )
            if i in seen:
                where = (
                    f"in {list(seen[i])} and in {list(members)}"
                    if seen[i] != members
                    else f"in {list(members)}"
                )
                raise ValueError(f"{kind} {i} appears twice, {where}; an id belongs to one group, once")
            seen[i] = members
        checked.append(members)
    missing = sorted(set(range(ids)) - set(seen))
    if complete and missing:
        raise ValueError(
            f"groups of {strategy} must name every {kind} of 0 to {ids - 1}; {missing[0]} is missing in "
            f"groups={list(map(list, groups))}"
        )
    return tuple(checked)
