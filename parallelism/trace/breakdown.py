"""Splits the time of each device into parts that add up to the makespan.

    forward, backward, recompute   compute that says so (``phase``; a name that begins with "recompute"): the actions
                   of a pipeline, and the ops of a program that has a gradient
    other          all other compute
    communication  exposed communication: the device has pending communication and computes nothing
    bubble         the device waits: it has no pending communication and computes nothing, between its first event and
                   its last
    idle           before its first event, and after its last

Communication is pending from the moment at which its data begins to move (the last member has called the collective,
the message was sent) to the end of the operation; between device and host, for the whole operation.  It counts whether
the device is blocked by it, waits for it later, or never waits for it.  The time before is waiting for other devices.

Each moment counts once, for the first part that fits; so communication behind compute is not in the split.

`step_split` has finer parts of a training step, by the kind of op and by the axis that communicates (`StepSplit`).
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Floats, Ints
from parallelism.events import Columns
from parallelism.trace.trace import Trace
from parallelism.trace.transfers import HOLDING, HOST_TRAFFIC, Moving, moving, rounded

PHASES = {"F": 0, "B": 1, "I": 1, "W": 1, "R": 2}

_ROUNDING = 1e-12
"""The part of the makespan that rounding may leave when the parts are added up; a smaller rest counts as 0."""


class Split(NamedTuple):
    """Seconds of virtual time; together the makespan."""

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0
    other: float = 0.0
    communication: float = 0.0
    bubble: float = 0.0
    idle: float = 0.0


class StepSplit(NamedTuple):
    """Seconds of virtual time of a training step on one device; together the makespan.

    Communication is what is exposed.  Collectives count for an axis by its usual name.
    """

    products: float = 0.0
    """Matrix products, forward and backward."""
    attention: float = 0.0
    """Attention as one operator, linear or not; of attention that writes its scores, their softmax."""
    elementwise: float = 0.0
    """All other compute of the model: norms, activations, dropout, copies, the loss."""
    recompute: float = 0.0
    """What the backward computes again."""
    update: float = 0.0
    """Compute without a phase in a step that has phases: the update by the optimizer."""
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    dp: float = 0.0
    """Sums over ``dp``, alone or with other axes."""
    zero: float = 0.0
    """Reduce-scatters and gathers over ``dp``."""
    pp: float = 0.0
    """Messages between devices."""
    communication: float = 0.0
    """Over other axes, and with the host."""
    bubble: float = 0.0
    """The device waits for others."""


PARTS = Split._fields
_OTHER, _COMMUNICATION = map(PARTS.index, ("other", "communication"))
STEP_PARTS = StepSplit._fields
_STEP = {name: number for number, name in enumerate(STEP_PARTS)}
_PRODUCTS = frozenset({"matmul", "einsum", "scaled_einsum"})
_ATTENTION = frozenset(
    {
        *("attention", "attention_gradient", "attention_weights", "softmax_gradient"),
        *("context_attention", "context_attention_gradient", "attention_block", "attention_block_gradient"),
        *("linear_attention", "linear_attention_gradient"),
    }
)
_AXIS_PARTS = {"replica": "dp", "dp": "dp", "cp": "cp", "cp_heads": "cp", "ep": "ep", "tp": "tp"}
"""The part of collectives over an axis."""
_SPLIT_SUMS = frozenset({"reduce_scatter", "all_gather"})


def part_of(columns: Columns) -> npt.NDArray[np.int8]:
    """The index in `PARTS` of each event: by phase and name for compute, communication for everything else."""
    part = columns.mapped("phase", lambda phase: PHASES.get(phase, _OTHER), np.int8)
    part[columns.mapped("name", lambda name: str(name).lower().startswith("recompute"), np.bool_)] = PHASES[
        "R"
    ]
    part[~columns.isin("kind", {"compute"})] = _COMMUNICATION
    return part


def step_part_of(columns: Columns) -> npt.NDArray[np.int8]:
    """The index in `STEP_PARTS` of each event of a training step."""

    def op(name: object) -> int:
        kinds = str(name).split("+")  # of a chain that runs as one
        if name in _PRODUCTS:
            return _STEP["products"]
        return _STEP["elementwise" if _ATTENTION.isdisjoint(kinds) else "attention"]

    def over(axes: tuple[str, ...] | None) -> int:
        known = [part for axis, part in _AXIS_PARTS.items() if axis in (axes or ())]
        return _STEP[known[0] if known else "communication"]

    part = columns.mapped("name", op, np.int8)
    if columns.isin("phase", {"F", "B", "I", "W"}).any():
        part[~columns.present("phase")] = _STEP["update"]
    part[columns.isin("phase", {"R"})] = _STEP["recompute"]
    collective = columns.isin("kind", {"collective"})
    part[collective] = columns.mapped("axes", over, np.int8)[collective]
    part[collective & (part == _STEP["dp"]) & columns.isin("name", _SPLIT_SUMS)] = _STEP["zero"]
    part[columns.isin("kind", {"send", "recv", "wait"})] = _STEP["pp"]
    part[columns.isin("kind", set(HOST_TRAFFIC))] = _STEP["communication"]
    return part


During = tuple[float, float]
"""A part of the time of a trace: from when to when, in seconds."""


def split(trace: Trace, moved: Moving | None = None, during: During | None = None) -> dict[int, Split]:
    """The split of each rank's time, in seconds, or of a part of it.

    ``moved`` is ``moving(trace)``, if it was computed before.
    """
    seconds = _seconds(trace, part_of(trace.columns), len(PARTS) - 2, moved, during)
    return {rank: Split(*row) for rank, row in zip(trace.ranks, seconds.tolist(), strict=True)}


MOST_RANKS = 16
"""A table of more ranks is folded on a page and in a notebook; `extremes` stay outside."""


def extremes(by_rank: Mapping[int, Split], held: Mapping[int, int]) -> dict[str, int]:
    """The slowest rank, which computes longest, and the fullest, which holds most bytes at its peak, by these words.

    The first of equals.  ``held`` has the peaks, see `Trace.peaks`; if it is empty, no rank is the fullest.
    """
    found = {"slowest": max(by_rank, key=lambda rank: sum(by_rank[rank][:_COMMUNICATION]))} if by_rank else {}
    return found | ({"fullest": max(held, key=lambda rank: held[rank])} if held else {})


def step_split(
    trace: Trace, moved: Moving | None = None, during: During | None = None
) -> dict[int, StepSplit]:
    """The finer split of each rank's time in a training step, in seconds; the arguments are those of `split`."""
    seconds = _seconds(trace, step_part_of(trace.columns), len(STEP_PARTS) - 1, moved, during)
    seconds[:, -2] += seconds[:, -1]  # a device that is idle waits
    return {rank: StepSplit(*row) for rank, row in zip(trace.ranks, seconds[:, :-1].tolist(), strict=True)}


def _seconds(
    trace: Trace, parts: npt.NDArray[np.int8], count: int, moved: Moving | None, during: During | None
) -> Floats:
    """Seconds by rank and part: of the ``count`` parts that events have, of the bubble, and in which it is idle.

    The bubble and the idle time make up the last two columns.
    """
    columns, (begin, stop) = trace.columns, during or (0.0, trace.makespan_seconds)
    moved = moving(trace) if moved is None else moved
    start = columns.numbers("start_seconds").astype(np.float64)
    end = start + columns.numbers("duration_seconds")
    counted = ~columns.present("parent") & columns.isin("kind", HOLDING) & (end > start)
    ranks = np.searchsorted(np.array(trace.ranks), columns.numbers("rank"))

    active = counted & ~columns.isin("kind", {"wait"})  # a wait only waits: its operation has the transfer
    at_once = columns.isin("kind", {"compute", "send", *HOST_TRAFFIC})
    since = rounded(np.where(at_once, start, np.maximum(start, moved.since)), end)
    first = np.full(len(trace.ranks), np.inf)
    last = np.full(len(trace.ranks), -np.inf)
    np.minimum.at(first, ranks[counted], start[counted])
    np.maximum.at(last, ranks[counted], end[counted])
    seen = np.flatnonzero(last > first)
    seconds = _first_that_fits(
        np.concatenate([ranks[active], seen]),
        np.concatenate([np.minimum(since, end)[active], first[seen]]).clip(begin, stop),
        np.concatenate([end[active], last[seen]]).clip(begin, stop),
        np.concatenate([parts[active], np.full(len(seen), count)]),
        len(trace.ranks),
        count + 1,
    )
    rounding = _ROUNDING * (stop - begin)
    bubble, rest = seconds[:, -1], stop - begin - seconds.sum(axis=1)
    bubble[bubble <= rounding] = 0
    return np.column_stack([seconds, np.where(rest > rounding, rest, 0)])


def _first_that_fits(
    ranks: Ints,
    starts: Floats,
    ends: Floats,
    parts: npt.NDArray[np.int8],
    count: int,
    kinds: int,
) -> Floats:
    """Seconds by rank and part, shape (count, kinds), in which that rank has an interval of that part open, and no
    interval of an earlier part.  An interval has a rank, a start, an end and a part."""
    rank, time = np.concatenate([ranks, ranks]), np.concatenate([starts, ends])
    order = np.lexsort((time, rank))
    rank, time = rank[order], time[order]
    lengths = np.diff(time, append=time[-1:])
    lengths[np.diff(rank, append=rank[-1:] + 1) != 0] = (
        0  # from a rank's last moment to the next rank's first
    )
    seconds = np.zeros((count, kinds))
    free = np.ones(len(time), np.bool_)
    for part in range(kinds):
        step = np.concatenate([parts == part, -1 * (parts == part)])[order]
        here = free & (np.cumsum(step) > 0)
        seconds[:, part] = np.bincount(rank[here], lengths[here], count)
        free &= ~here
    return seconds
