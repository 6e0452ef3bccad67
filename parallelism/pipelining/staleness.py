"""How old the weights are that a schedule works with, where they change after every microbatch."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallelism.pipelining.schedule import Schedule


def weight_versions(schedule: Schedule) -> dict[tuple[int, int], int]:
    """By stage and microbatch, how many updates the weights of its forward have seen; its backward has the same.

    Each microbatch makes an update of a stage with the last of its backward there.  Of 1F1B, stage ``s`` of ``S`` gives
    microbatch ``k`` version ``max(0, k - (S - 1 - s))``, so that the gradient that makes version ``k + 1`` is one of
    ``S - 1 - s`` versions before: Narayanan et al., *PipeDream*, 2019, section 3.3, arXiv:1806.03377.

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
