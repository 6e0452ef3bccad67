"""Generators of schedules: the order of forwards and backwards on one rank of a pipeline.

Each schedule is a pure generator of steps ``(stage, kind, microbatch)``.  `parallelism.pipelining` turns them into
actions, which are checked, drawn, timed and run.  In the pictures time goes to the right and a row is a rank.  ``F``
is a forward, ``B`` a backward, ``I`` and ``W`` are its halves for the input and for the weights.  The number is the
microbatch; the stage stands in front if a rank has several.  Every action takes one slot.

All of them work for any number of ranks and microbatches from 1 on.  Some patterns need a minimum or a multiple of
microbatches: their generators produce the order for more microbatches and leave out the extra ones.  An action depends
only on actions of its own microbatch, so the rest is a valid order.
"""

import re

from parallelism.pipelining.generators.interleaved import interleaved_1f1b, looped_bfs
from parallelism.pipelining.generators.one_stage import (
    gpipe,
    inference,
    local,
    one_forward_one_backward,
    pipedream,
    pipedream_2bw,
)
from parallelism.pipelining.generators.step import Generator, Slot
from parallelism.pipelining.generators.v_shaped import dual_pipe_v, v_min, zero_bubble_v
from parallelism.pipelining.generators.zero_bubble import interleaved_zero_bubble, zero_bubble_h1, zero_bubble_h2

__all__ = [
    "ALIASES", "CHUNKED", "FORWARD_ONLY", "LOCAL", "SCHEDULES", "V_SHAPED", "WEIGHTS", "Generator", "Slot", "spelt",
]

SCHEDULES: dict[str, Generator] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved_1f1b": interleaved_1f1b,
    "looped_bfs": looped_bfs,
    "zero_bubble_h1": zero_bubble_h1,
    "zero_bubble_h2": zero_bubble_h2,
    "interleaved_zero_bubble": interleaved_zero_bubble,
    "zero_bubble_v": zero_bubble_v,
    "dual_pipe_v": dual_pipe_v,
    "v_min": v_min,
    "pipedream": pipedream,
    "pipedream_2bw": pipedream_2bw,
    "local": local,
    "inference": inference,
}
"""All generators by the name of the schedule."""

CHUNKED = frozenset({"interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble"})
"""Schedules with any number of stages on a rank: rank ``r`` of ``P`` has stages ``r``, ``r + P``, ``r + 2 P``, ..."""

V_SHAPED = frozenset({"zero_bubble_v", "dual_pipe_v", "v_min"})
"""Schedules with two stages on each rank: rank ``r`` of ``P`` has stages ``r`` and ``2 P - 1 - r``."""

FORWARD_ONLY = frozenset({"inference"})
"""Schedules without backwards; no activations are kept."""

LOCAL = frozenset({"local"})
"""Schedules in which every stage has its own loss, and no gradient passes between stages."""

WEIGHTS: dict[str, str] = {"pipedream": "stashed", "pipedream_2bw": "double_buffered"}
"""The versions of weights that a schedule uses, if several; see `parallelism.pipelining.schedule.Schedule`."""


def spelt(name: str) -> str:
    """The normalized name: lower case, without ``_``, ``-``, blanks and torch's prefix ``Schedule``."""
    return re.sub(r"[\s_-]", "", name).lower().removeprefix("schedule")


ALIASES: dict[str, str] = {spelt(name): name for name in SCHEDULES} | {
    "zbh1": "zero_bubble_h1",
    "zbh2": "zero_bubble_h2",
    "zbv": "zero_bubble_v",
    "zbvzerobubble": "zero_bubble_v",
    "interleaved": "interleaved_1f1b",
    "breadthfirst": "looped_bfs",
    "forwardonly": "inference",
}
"""Normalized names (see `spelt`) of the schedules: their own, torch's, and those of the papers."""
