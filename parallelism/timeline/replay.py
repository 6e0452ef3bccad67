"""The replay of a record: start and duration of each event in virtual time.

Eight processes on two cores cannot show the timeline of a cluster in wall time.  So each device records what it does,
and this module computes afterwards when each event would have happened.  The rules are those of
`parallelism.timeline.engine`: each rank has a clock, which compute, messages and collectives advance.  This one engine
times emulated runs, simulations and schedules under given costs.

    compute      advances the clock by its price
    send         takes no time: a copy is on its way, and arrives after what its path takes
    recv         lasts until the message has arrived; where messages hold their ends (`Pricing.overheads`) sends take
                 that long, and recvs that much longer
    collective   begins when the last member of the group has called it and the communication stream of the group is
                 free; it ends for all members at once, after its price or, where links are shared, later
    wait         lasts until the asynchronous operation of the same ``work`` is over
    the rest     takes no time: host traffic, memory

An asynchronous recv or collective lasts as long but does not hold the clock of its rank: a rank has one stream for
compute and one for the collectives of each of its groups.  (On a hardware with a ``collective_share`` a collective
holds it for that part of its price, because it takes this part of the device from the compute beside it.)  The
collectives of a group follow each other, as their members call them; those of other groups, a gradient sum over ``dp``
beside an all_gather over ``tp``, do not wait for them, as NCCL has it with a communicator for each group.  Messages
and collectives that are pending at the same time share their links (`parallelism.timeline.fair_sharing`); without link
sharing each has its links to itself.
`parallelism.timeline.pricing` gives the prices.  Without it compute takes the CPU seconds of the device's thread, and
everything else is free.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from parallelism.events import ABSENT, Columns, Event, whole_nanoseconds
from parallelism.events.columns import codes, combined
from parallelism.timeline.crossing import NO_LINKS, Crossing
from parallelism.timeline.engine import Replay
from parallelism.timeline.fair_sharing import Route
from parallelism.timeline.matching import COLLECTIVE, COMPUTE, SEND, Roles, roles_of, with_children_at_parents
from parallelism.timeline.pricing import Prices, Pricing, Seen
from parallelism.timeline.steps import Lanes, Steps, Times

_MOST_NANOSECONDS = 2**62
"""Bound on a sum of all costs in nanoseconds; above it an int64 might overflow."""


def replay(events_by_rank: Sequence[Sequence[Event]], pricing: Pricing | None = None) -> tuple[Event, ...]:
    """The same events with ``start_seconds`` and ``duration_seconds`` filled in, rank after rank.

    ``events_by_rank`` holds each rank's events in the order of its record (`Trace.by_rank`).  A send and a recv
    belong together by source, destination, tag and sequence, the events of a collective by group and
    sequence.  Events inside a collective (``parent``) are placed at its start and take no time.

    The result is the same to the last bit whenever it is computed, and the time taken grows with the number of
    events only.  The record of a failed run has events without partners, or even a circle of waits: such an
    event ends where it starts, and its rank goes on.
    """
    columns = Columns.of(chain.from_iterable(events_by_rank))
    return tuple(replay_columns(columns, list(map(len, events_by_rank)), pricing).events())


def replay_columns(
    events: Columns,
    lengths: Sequence[int],
    pricing: Pricing | None = None,
    *,
    roles: Roles | None = None,
    prices: Prices | None = None,
) -> Columns:
    """`replay` of columns: the events of rank after rank, ``lengths[rank]`` of each.

    ``roles`` and ``prices`` are those of the events, if the caller computed them before.

    Times without a hardware are counted in whole nanoseconds if all costs are such.
    """
    roles = roles_of(events) if roles is None else roles
    if prices is None and pricing is not None:
        prices = pricing.prices(events, roles)
    costs = (
        np.where(roles.roles == COMPUTE, events.numbers("cpu_seconds"), 0.0)
        if prices is None
        else prices.seconds
    )
    ordered = pricing is not None and pricing.hardware is not None
    whole = None if ordered else whole_nanoseconds(costs)
    if whole is not None and int(np.abs(whole).max()) * len(events) >= _MOST_NANOSECONDS:
        whole = None
    unit, values = (1.0, costs) if whole is None else (1e9, whole)
    shares: Sequence[float] = ()
    overheads = np.zeros_like(values)
    if ordered and pricing:
        shares = pricing.collective_shares(_ranks_of_lanes(events, lengths))
        overheads = pricing.overheads(events, roles)
    steps = Steps(
        np.asarray(lengths, np.int64),
        roles.roles,
        roles.keys,
        events.key("group"),
        np.where(events.present("work"), events.key("work"), ABSENT),
        values,
        overheads,
    )
    crossing = _crossing(events, roles, pricing, prices)
    starts, durations = _times(steps, crossing, streams=ordered, shares=shares)
    starts, durations = starts / unit, durations / unit
    if events.present("parent").any():
        starts = with_children_at_parents(events, np.cumsum(lengths).tolist(), starts)
    return events.with_columns(
        start_seconds=starts if starts.any() else None,
        duration_seconds=durations if durations.any() else None,
        priced_algorithm=None if prices is None else prices.algorithms,
    )


def _crossing(
    events: Columns, roles: Roles, pricing: Pricing | None, prices: Prices | None
) -> Crossing | None:
    """The links that messages and collectives cross; None where they do not share them."""
    if pricing is None or prices is None or not pricing.shares_links:
        return None
    numbers = np.full(len(events), NO_LINKS)
    found: list[tuple[Route | None, float]] = [(route, 0.0) for route in prices.routes]
    if prices.route is not None:
        meets = np.flatnonzero((roles.roles == COLLECTIVE) & (prices.seconds != 0))
        numbers[meets] = prices.route[meets]
    sends = np.flatnonzero((roles.roles == SEND) & (pricing.message_bytes(events) != 0))
    ranks, peers = (events.numbers(end)[sends] for end in ("rank", "peer"))
    pairs = combined(codes(ranks), codes(peers))
    _, first, pair = np.unique(pairs, return_index=True, return_inverse=True)
    numbers[sends] = len(found) + pair
    route_of = prices.message_route or pricing.route
    found += [route_of(ranks[i], peers[i]) for i in first.tolist()]
    routes = [(route, lag) for route, lag in found if route is not None]
    number = np.cumsum([route is not None for route, _ in found]) - 1
    number[[route is None for route, _ in found]] = NO_LINKS
    at = np.flatnonzero(numbers != NO_LINKS)
    numbers[at] = number[numbers[at]]
    return Crossing(pricing.costs.hardware.part, routes, numbers)


def _ranks_of_lanes(events: Columns, lengths: Sequence[int]) -> list[int]:
    """The rank of each lane; 0 for one without events."""
    ranks = np.append(events.numbers("rank"), 0)
    begins = np.cumsum(lengths) - lengths
    found: list[int] = np.where(np.asarray(lengths) > 0, ranks[begins], 0).tolist()
    return found


def _times(steps: Steps, crossing: Crossing | None, *, streams: bool, shares: Sequence[float]) -> Times:
    """The times of the steps.

    They run on links of their own first, which is quick.  From the first moment on at which a transfer disturbs
    another, they run again on shared links.
    """
    lanes = Lanes(steps, crossing)
    engine = Replay(lanes.program, streams=streams, shares=shares)
    blocked = engine.run()
    first = lanes.first_shared(engine)
    if lanes.crossing is not None and first is not None:
        engine.share(lanes.crossing, first)
        blocked = engine.run()
    while blocked:
        engine.release(blocked)
        blocked = engine.run()
    return lanes.times(engine)


def repriced(events: Columns, size: int, pricing: Pricing) -> Seen:
    """The events of a trace with their times on a hardware: see `Trace.on`."""
    seen = pricing.for_devices(size).seen(events)
    ranks = seen.events.numbers("rank")
    lengths = np.bincount(ranks, minlength=size).tolist()
    if (ranks[1:] >= ranks[:-1]).all():
        return seen._replace(events=replay_columns(seen.events, lengths, pricing))
    by_rank = np.argsort(ranks, kind="stable")
    timed = replay_columns(seen.events.take(by_rank), lengths, pricing)
    return seen._replace(events=timed.take(np.argsort(by_rank)))
