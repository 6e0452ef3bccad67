"""The price of each collective of a record on a `Hardware`: its seconds, its algorithm and its links.

A collective that names an algorithm is priced by it, also a `Deduplicated` one, which ran with every row.  One that ran
``direct`` is priced by the cheapest, which a tuned library would choose.  A resharding takes as long as the collectives
inside, one after the other, at its slowest member.
"""

from collections import Counter, defaultdict
from itertools import chain
from math import fsum, isinf
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.algorithms import KINDS, MPI, NAMED_OTHERWISE, kind_of_event
from parallelism.arrays import Floats, Ints
from parallelism.collectives import CollectiveCall
from parallelism.cost import Costs
from parallelism.cost.channel_loads import NO_LOADS, ChannelLoads
from parallelism.events import Columns, Table
from parallelism.events.columns import combined
from parallelism.hardware import Channel, Hardware
from parallelism.timeline.fair_sharing import LEAST, Route
from parallelism.timeline.matching import group_sizes

_CALL = "name", "group", "algorithm", "payload_bytes", "root", "pairs"
"""The fields of a `CollectiveCall`."""


class CollectivePrice(NamedTuple):
    """A collective's price."""

    seconds: float = 0.0
    algorithm: str | None = None
    crossing: ChannelLoads = NO_LOADS
    """The bytes on each channel of links."""


FREE = CollectivePrice()


def collective_prices(
    costs: Costs, events: Columns, scale: Floats, *, sharing: bool = True
) -> tuple[Floats, Table, tuple[Route | None, ...], Ints]:
    """The prices of events of collectives, also of those inside others; a byte is priced as ``scale`` bytes.

    They are the seconds and algorithms of the events; the different routes over the links, of which None uses no links;
    and for each event the index of its route.  Without ``sharing`` no routes are computed.
    """
    _, first, operation, members = np.unique(
        events.key("group", "sequence"), return_index=True, return_inverse=True, return_counts=True
    )
    least = np.full(len(first), np.inf)
    np.minimum.at(least, operation, scale)
    prices, price_of = _by_themselves(
        costs, events.only("rank", "kind", *_CALL).take(first), least, members, sharing
    )
    of_event = price_of[operation]
    if events.present("parent").any():
        prices, of_event = _with_reshardings(events, prices, price_of, operation)
    names: dict[str | None, int] = {}
    for found in prices:
        names.setdefault(found.algorithm, len(names))
    name_of = np.array([names[found.algorithm] for found in prices], np.int32)
    return (
        np.array([found.seconds for found in prices])[of_event],
        Table(tuple(names), name_of[of_event]),
        tuple(route_of(costs.hardware, found) for found in prices),
        of_event,
    )


def _by_themselves(
    costs: Costs, operations: Columns, least: Floats, members: npt.NDArray[Any], sharing: bool
) -> tuple[list[CollectivePrice], Ints]:
    """The different prices, and the index of the price of each operation.

    ``operations`` has one event of each operation, ``least`` its scale, and ``members`` its number of events.
    """
    whole = members == group_sizes(operations)
    key = combined(
        operations.key(*_CALL), np.unique(least, return_inverse=True)[1].astype(np.int64), whole.astype(int)
    )
    _, first, place = np.unique(key, return_index=True, return_inverse=True)
    prices, price_of = [FREE], []
    different = operations.take(first).events()
    for event, factor, complete in zip(different, least[first].tolist(), whole[first].tolist(), strict=True):
        if not complete or event.group is None or kind_of_event(event.name) is None:
            price_of.append(0)
            continue
        call = CollectiveCall.of_event(event)
        if call is None:
            raise ValueError(
                f"a collective {event.name!r} of group {list(event.group)} has no payload_bytes, and cannot be priced: "
                f"its trace was saved before events had them; run or simulate it again"
            )
        price_of.append(len(prices))
        prices.append(collective_price(costs, call, 1.0 if isinf(factor) else factor, sharing))
    return prices, np.array(price_of, np.int64)[place]


def collective_price(
    costs: Costs, call: CollectiveCall, scale: float = 1.0, sharing: bool = True
) -> CollectivePrice:
    """The price of a call with ``scale`` times its bytes."""
    if len(call.group) < 2:
        return FREE
    named = None if call.algorithm in ("direct", MPI) else call.algorithm
    root = call.root or 0
    cost = costs.collective(
        call.kind, call.nbytes * scale, call.group, algorithm=named, root=root, pairs=call.pairs
    )
    crossing = costs.channel_bytes(cost, call.group, root=root, pairs=call.pairs) if sharing else NO_LOADS
    return CollectivePrice(cost.seconds, cost.algorithm, crossing)


def _with_reshardings(
    events: Columns,
    prices: list[CollectivePrice],
    price_of: Ints,
    operation: Ints,
) -> tuple[list[CollectivePrice], Ints]:
    """The prices with those of operations that consist of collectives, and the index of the price of each event.

    Such an operation takes as long as at its slowest member, over the links of all members.  ``price_of`` has an entry
    for each operation, ``operation`` one for each event.
    """
    of_event = price_of[operation]
    seconds = np.array([price.seconds for price in prices])[of_event].tolist()
    inside: Counter[tuple[int, int]] = Counter()
    parts: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    parents = zip(events.values("rank"), events.values("parent"), strict=True)
    for parent, price, part in zip(parents, seconds, operation.tolist(), strict=True):
        inside[parent] += price
        parts[parent].append(part)
    own = events.isin("name", {*KINDS.records, *NAMED_OTHERWISE})
    keys = list(zip(events.values("rank"), events.values("serial"), strict=True))
    prices, place_of = list(prices), dict[Any, int]()
    members_of = np.split(np.argsort(operation, kind="stable"), np.cumsum(np.bincount(operation))[:-1])
    for alike in members_of:
        if own[alike[0]]:
            continue
        slowest = max(inside[keys[event]] for event in alike.tolist())
        of_these = sorted({part for event in alike.tolist() for part in parts.get(keys[event], ())})
        known = slowest, tuple(price_of[of_these].tolist())
        if known not in place_of:
            crossing: defaultdict[Channel, list[float]] = defaultdict(list)
            for channel, nbytes in chain.from_iterable(prices[part].crossing.items() for part in known[1]):
                crossing[channel].append(nbytes)
            place_of[known] = len(prices)
            # fsum: the sums do not depend on the order.
            sums = ChannelLoads.of({channel: fsum(each) for channel, each in crossing.items()})
            prices.append(CollectivePrice(slowest, None, sums))
        of_event[alike] = place_of[known]
    return prices, of_event


def route_of(hardware: Hardware, price: CollectivePrice) -> Route | None:
    """The links that a collective uses, each with the part of its bandwidth that is used, as if the bytes that cross it
    were spread evenly over the seconds.  None if nothing crosses a link."""
    used: list[tuple[tuple[int, int], Ints, Floats]] = []
    for (level, fault), (numbers, nbytes) in sorted(price.crossing.by_level.items(), key=itemgetter(0)):
        some = nbytes != 0
        if price.seconds and some.any():
            parts = nbytes[some] / (hardware.links[level].bytes_per_second * price.seconds)
            used.append(((level, fault), numbers[some], np.minimum(parts, hardware.part((level, fault, 0)))))
    if not used:
        return None
    most = max(float(parts.max()) for *_, parts in used)
    return Route(
        tuple(
            ((*key, number), part)
            for key, numbers, parts in used
            for number, part in zip(numbers.tolist(), np.maximum(parts / most, LEAST).tolist(), strict=True)
        ),
        most,
    )
