"""Generators of schedules: the order of forwards and backwards on one rank of a pipeline.

Each schedule is a pure generator of steps ``(stage, kind, microbatch)``.  `parallelism.pipelining` turns them into
actions, which are checked, drawn, timed and run.  In the pictures time goes to the right and a row is a rank.  ``F``
is a forward, ``B`` a backward, ``I`` and ``W`` are its halves for the input and for the weights.  The number is the
microbatch; the stage stands in front if a rank has several.  Every action takes one slot.

All of them work for any number of ranks and microbatches from 1 on.  Some patterns need a minimum or a multiple of
microbatches: their generators produce the order for more microbatches and leave out the extra ones.  An action depends
only on actions of its own microbatch, so the rest is a valid order.
"""

from parallelism.pipelining.generators.interleaved import interleaved_1f1b, looped_bfs
from parallelism.pipelining.generators.kinds import TURNS, ScheduleKind, ScheduleTable, V
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
from parallelism.pipelining.generators.zero_bubble import (
    interleaved_zero_bubble,
    zero_bubble_h1,
    zero_bubble_h2,
)

__all__ = ["SCHEDULES", "Generator", "ScheduleKind", "Slot"]

SCHEDULES = ScheduleTable(
    ScheduleKind("gpipe", gpipe),
    ScheduleKind("1f1b", one_forward_one_backward),
    ScheduleKind("interleaved_1f1b", interleaved_1f1b, TURNS, aliases=("interleaved",)),
    ScheduleKind("looped_bfs", looped_bfs, TURNS, aliases=("breadth_first",)),
    ScheduleKind("zero_bubble_h1", zero_bubble_h1, aliases=("zb_h1",)),
    ScheduleKind("zero_bubble_h2", zero_bubble_h2, aliases=("zb_h2",)),
    ScheduleKind("interleaved_zero_bubble", interleaved_zero_bubble, TURNS),
    ScheduleKind("zero_bubble_v", zero_bubble_v, V, aliases=("zb_v", "zbv_zero_bubble")),
    ScheduleKind("dual_pipe_v", dual_pipe_v, V),
    ScheduleKind("v_min", v_min, V),
    ScheduleKind("pipedream", pipedream, weights="stashed"),
    ScheduleKind("pipedream_2bw", pipedream_2bw, weights="double_buffered"),
    ScheduleKind("local", local, local=True),
    ScheduleKind("inference", inference, training=False, aliases=("forward_only",)),
)
"""All schedules that have a name; `parallelism.register_schedule` adds one."""
