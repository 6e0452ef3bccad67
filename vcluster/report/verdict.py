"""A trace summarised in a few sentences: the share of compute, the losses and their causes, and the critical path."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import attrgetter

import numpy as np

from parallelism.display.quantities import fit, nbytes, plural, rate, seconds
from parallelism.trace import PARTS, CollectiveRow, PathStep, Split, Trace, part_of
from vcluster.report.naming import part_name

UNEVEN = 1.1
"""A device is named if it computes at least this many times as long as the median device."""
LONGEST = 1e300
"""Upper bound of a makespan in seconds. The times of a forged trace may add up to more than a float holds."""
_COMPUTE = ("forward", "backward", "recompute", "other")
_LOSSES = ("communication", "bubble", "idle")


def verdict(
    trace: Trace, by_rank: Mapping[int, Split], path: Sequence[PathStep], rows: Sequence[CollectiveRow]
) -> list[str]:
    """The sentences. The first is a summary of all."""
    if not len(trace):
        return ["This trace has no events."]
    makespan = trace.makespan_seconds
    if not makespan > 0:
        return ["Nothing in this trace takes virtual time: it has no compute, and messages take no time."]
    if not makespan < LONGEST:
        return ["The times of this trace add up to more than a float can hold."]
    totals = map(sum, zip(*by_rank.values(), strict=True))
    share = {part: total / (makespan * len(by_rank)) for part, total in zip(PARTS, totals, strict=True)}
    compute = sum(share[part] for part in _COMPUTE)
    lost = ", ".join(f"{part_name(part)} {share[part]:.1%}" for part in _LOSSES)
    sentences = [
        f"{plural(len(by_rank), 'device')} for {seconds(makespan)}: {compute:.1%} of it compute, {lost}."
    ]
    if share["recompute"] > 0:
        sentences.append(f"{share['recompute'] / compute:.1%} of the compute is recompute.")
    worst = max(_LOSSES, key=share.__getitem__)
    if share[worst] >= 0.01:
        sentences.append(_loss(worst, by_rank, rows))
    sentences += _uneven(by_rank)
    sentences += _of_path(trace, path)
    if held := trace.peaks():
        rank = max(held, key=held.__getitem__)
        sentences.append(f"Rank {rank} has the highest memory peak: {nbytes(held[rank])}.")
    return sentences


def _loss(worst: str, by_rank: Mapping[int, Split], rows: Sequence[CollectiveRow]) -> str:
    rank = max(by_rank, key=lambda rank: getattr(by_rank[rank], worst))
    amount = seconds(getattr(by_rank[rank], worst))
    if worst == "bubble":
        return f"The largest loss is the bubble: rank {rank} waits longest, for {amount}."
    if worst == "idle":
        return f"The largest loss is idle time: rank {rank} is idle for {amount}, before or after its work."
    longest = max(rows, key=lambda row: row.seconds, default=None)
    if longest is None or not longest.seconds:
        return f"The largest loss is exposed communication: messages, {amount} on rank {rank}."
    over = f" over {', '.join(longest.axes)}" if longest.axes else ""
    bus = longest.bus_bytes_per_second
    speed = "" if bus is None else f", at {rate(bus)} of bus bandwidth"
    return (
        f"The largest loss is exposed communication, {amount} on rank {rank}; of the collectives "
        f"{fit(longest.name, 40)}{fit(over, 40)} takes longest, {seconds(longest.seconds)}{speed}."
    )


def _uneven(by_rank: Mapping[int, Split]) -> list[str]:
    of_compute = attrgetter(*_COMPUTE)
    computes = {rank: sum(of_compute(parts)) for rank, parts in by_rank.items()}
    middle = float(np.median(list(computes.values())))
    rank = max(computes, key=computes.__getitem__)
    if len(computes) < 2 or not middle > 0 or computes[rank] < UNEVEN * middle:
        return []
    more = sum(seconds >= UNEVEN * middle for seconds in computes.values()) - 1
    also = f", and {more} more at least {UNEVEN} times: stragglers" if more else ": a straggler"
    return [
        f"Rank {rank} computes {computes[rank] / middle:.2f} times as long as the median device{also}, "
        "or an uneven split."
    ]


def _of_path(trace: Trace, path: Sequence[PathStep]) -> list[str]:
    if not path:
        return []
    parts = part_of(trace.columns)
    ranks = trace.columns.numbers("rank")
    seconds_of: defaultdict[str, float] = defaultdict(float)
    for step in path:
        seconds_of[PARTS[parts[step.event]]] += step.end_seconds - step.start_seconds
    through = plural(len({int(ranks[step.event]) for step in path}), "device")
    shares = [
        f"{part_name(part).removeprefix('exposed ')} {amount / trace.makespan_seconds:.1%}"
        for part, amount in sorted(seconds_of.items(), key=lambda item: -item[1])
    ]
    return [f"The critical path goes through {through}: {', '.join(shares)}."]
