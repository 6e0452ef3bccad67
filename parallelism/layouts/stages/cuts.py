"""Where to cut a chain of ops into stages: before named ones, or so that the largest stage is as small as can be."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate


def balanced(costs: Sequence[float], stages: int, sent: Sequence[float]) -> tuple[int, ...]:
    """The places before which a new stage begins, ``stages - 1`` of them; every stage has an op.

    ``costs`` are those of the ops, at least 0; ``sent[i]`` what a cut before op ``i`` costs.  Of all ways to cut, one
    whose largest stage costs least, and of those one that sends least: exact, by two dynamic programs over the order of
    the ops, O(stages * ops * log ops).  ``ValueError`` for more stages than ops.
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise ValueError(f"{count} ops can be cut into 1 to {count} stages, not {stages}")
    total = [0, *accumulate(costs)]
    return _least_sent(total, stages, [0, *sent[1:]], _least_largest(total, stages))


def _least_largest(total: Sequence[float], stages: int) -> float:
    """The cost of the largest stage, made as small as can be.  ``total[i]`` is the cost of the first ``i`` ops."""
    count = len(total) - 1
    best = list(total)                  # best[i]: of the first i ops in one stage, then in two, ...
    for stage in range(1, stages):
        found = best[:stage + 1]
        for end in range(stage + 1, count + 1):
            # the longer the last stage, the more it costs and the less the others: the best is where they cross
            low, high = stage, end - 1
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if best[middle] >= total[end] - total[middle] else (middle + 1, high)
            found.append(min(max(best[i], total[end] - total[i]) for i in (low - 1, low) if i >= stage))
        best = found
    return best[count]


def _least_sent(total: Sequence[float], stages: int, sent: Sequence[float], most: float) -> tuple[int, ...]:
    """The cuts that send least, of those that leave no stage above ``most``."""
    count = len(total) - 1
    never = float("inf")
    best = [0.0] + [never] * count      # best[i]: the least that is sent to have the first i ops in so many stages
    before: list[list[int]] = []
    for stage in range(stages):
        found, cut = [never] * (count + 1), [0] * (count + 1)
        window: deque[int] = deque()    # where the last stage may begin, what is sent so far growing
        for end in range(stage + 1, count + 1):
            start = end - 1
            while window and best[window[-1]] + sent[window[-1]] >= best[start] + sent[start]:
                window.pop()
            window.append(start)
            while window and total[end] - total[window[0]] > most:
                window.popleft()
            if window:
                first = window[0]
                found[end], cut[end] = best[first] + sent[first], first
        best = found
        before.append(cut)
    cuts, end = [], count
    for cut in before[:0:-1]:
        end = cut[end]
        cuts.append(end)
    return tuple(cuts[::-1])


def begun_by(names: Sequence[str], places: Sequence[set[str]], what: str) -> tuple[int, ...]:
    """The places of the first op that goes by each name; ``places`` has the names of each op.

    ``ValueError`` for a name that no op has, and for stages that would be empty or out of order.
    """
    cuts: list[int] = []
    for name in names:
        found = next((place for place, known in enumerate(places) if name in known), None)
        if found is None:
            raise ValueError(f"a stage is to begin with {name!r}, which is no value or region of {what} that depends "
                             f"on its data")
        if found <= (cuts[-1] if cuts else 0):
            last = f"the stage that begins with {names[len(cuts) - 1]!r}" if cuts else "the first stage"
            raise ValueError(f"{last} of {what} would have no op before {name!r}, with which the next one begins")
        cuts.append(found)
    return tuple(cuts)
