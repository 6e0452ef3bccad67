"""Staleness: the version of the weights that each microbatch uses if weights are updated after every microbatch."""

from collections import Counter

from parallelism.pipelining.schedule import Schedule


def weight_versions(schedule: Schedule) -> dict[tuple[int, int], int]:
    """The version of the weights that the forward of each (stage, microbatch) uses; its backward uses the same.

    The version is the number of updates so far.  A microbatch updates a stage when its backward there is complete.
    Under 1F1B, stage ``s`` of ``S`` uses version ``max(0, k - (S - 1 - s))`` for microbatch ``k``.  So the gradient
    that produces version ``k + 1`` belongs to a version ``S - 1 - s`` earlier: Narayanan et al., *PipeDream*, 2019,
    section 3.3, arXiv:1806.03377.

    >>> from parallelism import Pipeline
    >>> versions = weight_versions(Pipeline(3, 5, "pipedream").schedule)
    >>> [[versions[stage, k] for k in range(5)] for stage in range(3)]
    [[0, 0, 0, 1, 2], [0, 0, 1, 2, 3], [0, 1, 2, 3, 4]]
    """
    versions: dict[tuple[int, int], int] = {}
    for works in schedule.works:
        updates: Counter[int] = Counter()
        for stage, kind, k in works:
            if kind == "F":
                versions[stage, k] = updates[stage]
            elif kind in ("B", "W"):
                updates[stage] += 1
    return versions
