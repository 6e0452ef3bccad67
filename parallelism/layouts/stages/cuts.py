"""Cuts of a chain of ops into stages: before named ops, or so that the largest stage costs least."""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from operator import sub


def balanced(costs: Sequence[float], stages: int, sent: Sequence[float]) -> tuple[int, ...]:
    """The ``stages - 1`` positions at which a new stage begins.  Every stage has at least one op.

    ``costs`` are the costs of the ops, at least 0; ``sent[i]`` is the cost of a cut before op ``i``.  The cuts minimize
    the cost of the largest stage; among such cuts they minimize the sum of ``sent``.  Both minima are exact.
    ``ValueError`` for more stages than ops.
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise ValueError(f"{count} ops can be cut into 1 to {count} stages, got {stages}")
    total = [0, *accumulate(costs)]
    whole = all(isinstance(each, int) for each in total)
    most = _least_whole(total, stages) if whole else _least_largest(total, stages)
    return _least_sent(total, stages, [0, *sent[1:]], most)


def _least_whole(total: Sequence[float], stages: int) -> int:
    """`_least_largest` of integers: the least number with which greedy stages come to the end, by halving."""
    low = int(max(map(sub, total[1:], total)))
    high = int(total[-1])
    while low < high:
        most, end = (low + high) // 2, 0
        for _ in range(stages):
            end = bisect_right(total, total[end] + most) - 1
        low, high = (low, most) if end == len(total) - 1 else (most + 1, high)
    return low


def _least_largest(total: Sequence[float], stages: int) -> float:
    """The minimal cost of the largest stage, by a dynamic program in O(stages * ops).

    ``total[i]`` is the cost of the first ``i`` ops.
    """
    count = len(total) - 1
    best = list(total)  # best[i]: the minimum for the first i ops in one stage, then in two, ...
    for stage in range(1, stages):
        following, start = best[: stage + 1], stage
        for end in range(stage + 1, count + 1):
            # A longer last stage costs more and the others cost less: the minimum is where the two costs cross, which
            # moves on with the end.
            until = total[end]
            while start < end - 1 and best[start] < until - total[start]:
                start += 1
            here = max(best[start], until - total[start])
            following.append(
                here if start == stage else min(max(best[start - 1], until - total[start - 1]), here)
            )
        best = following
    return best[count]


def _least_sent(total: Sequence[float], stages: int, sent: Sequence[float], most: float) -> tuple[int, ...]:
    """The cuts that send least, among those whose stages all cost at most ``most``.

    A dynamic program over the places at which each stage can end.  Where all stages must cost nearly as much, these are
    about as many as the ops of two stages.
    """
    count = len(total) - 1
    places, begins = (
        range(count + 1),
        [count],
    )  # the first places at which the last stages can begin, or all end
    for _ in range(stages):
        begins.append(bisect_left(places, True, key=lambda place: total[begins[-1]] - total[place] <= most))
    begins, last = begins[::-1], 0  # the last place at which the stages so far can end
    never = float("inf")
    best = [0.0] + [never] * count  # best[i]: the least sum of sent for the first i ops in ``stage`` stages
    before: list[list[int]] = []
    for stage in range(stages):
        following, cut = [never] * (count + 1), [0] * (count + 1)
        window: deque[int] = deque()  # possible starts of the last stage, by increasing sum of sent
        before_last = last
        last = bisect_left(places, True, key=lambda place: total[place] - total[before_last] > most) - 1
        for end in range(max(stage, begins[stage]) + 1, last + 1):
            start = end - 1
            while window and best[window[-1]] + sent[window[-1]] >= best[start] + sent[start]:
                window.pop()
            window.append(start)
            while window and total[end] - total[window[0]] > most:
                window.popleft()
            if window:
                first = window[0]
                following[end], cut[end] = best[first] + sent[first], first
        best = following
        before.append(cut)
    cuts, end = [], count
    for cut in before[:0:-1]:
        end = cut[end]
        cuts.append(end)
    return tuple(cuts[::-1])


def begun_by(names: Sequence[str], places: Sequence[set[str]], what: str) -> tuple[int, ...]:
    """The positions of the first op with each name; ``places`` holds the names of each op.

    ``ValueError`` for a name that no op has, and for stages that would be empty or out of order.
    """
    cuts: list[int] = []
    for name in names:
        start = next((place for place, known in enumerate(places) if name in known), None)
        if start is None:
            raise ValueError(
                f"a stage cannot begin with {name!r}: {what} has no value or region of this name that "
                "depends on its data"
            )
        if start <= (cuts[-1] if cuts else 0):
            last = f"the stage that begins with {names[len(cuts) - 1]!r}" if cuts else "the first stage"
            raise ValueError(
                f"{last} of {what} would be empty: no op precedes {name!r}, where the next one begins"
            )
        cuts.append(start)
    return tuple(cuts)
