"""Orders of work: for one rank of a pipeline, which forward and which backward comes next.

Each schedule is a pure generator of steps ``(stage, kind, microbatch)``; `parallelism.pipelining` makes actions of
them, and they are checked, drawn, timed and run.  In the pictures time goes to the right, a row is a rank, ``F`` is a
forward, ``B`` a backward, ``I`` and ``W`` its halves for the input and for the weights, and the number is the
microbatch, with the stage in front where a rank has several.  Every action takes one slot.

Every one of them works for any number of ranks and microbatches of 1 or more.  A generator whose pattern has a
least or a whole number of microbatches makes the order for more of them, from which those that are not there are
left out: an action needs others of its own microbatch only, so what is left is an order too.
"""

from __future__ import annotations

import re

from parallelism.pipelining.generators.building_block import v_min
from parallelism.pipelining.generators.interleaved import interleaved_1f1b, looped_bfs
from parallelism.pipelining.generators.one_stage import (
    gpipe,
    inference,
    local,
    one_forward_one_backward,
    pipedream,
    pipedream_2bw,
)
from parallelism.pipelining.generators.step import Generator, Step
from parallelism.pipelining.generators.v_shaped import dual_pipe_v, zero_bubble_v
from parallelism.pipelining.generators.zero_bubble import interleaved_zero_bubble, zero_bubble_h1, zero_bubble_h2

__all__ = [
    "ALIASES", "CHUNKED", "FORWARD_ONLY", "LOCAL", "SCHEDULES", "V_SHAPED", "WEIGHTS", "Generator", "Step", "spelt",
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
"""The schedules that have a name, by that name."""

CHUNKED = frozenset({"interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble"})
"""Any number of stages lies on each rank: rank ``r`` of ``P`` has stages ``r``, ``r + P``, ``r + 2 P``, ..."""

V_SHAPED = frozenset({"zero_bubble_v", "dual_pipe_v", "v_min"})
"""Two stages lie on each rank: rank ``r`` of ``P`` has stages ``r`` and ``2 P - 1 - r``."""

FORWARD_ONLY = frozenset({"inference"})
"""There is no backward, and nothing is kept for one."""

LOCAL = frozenset({"local"})
"""Every stage has a loss of its own, and no backward crosses from one to another."""

WEIGHTS: dict[str, str] = {"pipedream": "stashed", "pipedream_2bw": "double_buffered"}
"""Which weights the work is done with, where it is not one version; see `parallelism.pipelining.schedule.Schedule`."""


def spelt(name: str) -> str:
    """The name without what does not matter: case, ``_``, ``-``, blanks, and torch's ``Schedule`` in front."""
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
"""The names by which each is known, as `spelt`: its own, torch's, those of the papers."""
