"""A recorded run, priced: its events with the times that they have on a hardware."""

from __future__ import annotations

import numpy as np

from parallelism.events import Columns
from parallelism.timeline.pricing import Pricing, Seen
from parallelism.timeline.replay import replay_columns


def repriced(events: Columns, size: int, pricing: Pricing) -> Seen:
    """The events of a trace with their times on a hardware: see `Trace.on`."""
    seen = pricing.for_devices(size).seen(events)
    ranks = seen.events.numbers("rank")
    order = None if (ranks[1:] >= ranks[:-1]).all() else np.argsort(ranks, kind="stable")
    lengths = np.bincount(ranks, minlength=size).tolist()
    timed = replay_columns(seen.events if order is None else seen.events.take(order), lengths, pricing)
    if order is not None:
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        timed = timed.take(back)
    return seen._replace(events=timed)
