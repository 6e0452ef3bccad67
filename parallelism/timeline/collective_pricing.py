"""What each collective of a record costs on a `Hardware`: seconds, by which algorithm, and over which links.

An algorithm that was named is taken; of what was run ``direct`` the cheapest, as a tuned library would choose.  A
resharding costs what its slowest member needs for the collectives inside, one after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import fsum, isinf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.algorithms import KINDS, NAMED_OTHERWISE, kind_of_event
from parallelism.collectives import CollectiveCall
from parallelism.cost import Costs
from parallelism.events import Columns, Table
from parallelism.events.columns import combined
from parallelism.hardware import Channel, Hardware
from parallelism.timeline.fair_sharing import LEAST, Way
from parallelism.timeline.matching import group_sizes

Floats = npt.NDArray[np.float64]

_CALL = "name", "group", "algorithm", "payload_bytes", "root", "pairs"
"""The fields of a `CollectiveCall`."""

class CollectivePrice(NamedTuple):
    """A collective's price."""

    seconds: float = 0.0
    algorithm: str | None = None
    crossing: Mapping[Channel, float] = {}
    """The bytes on each channel of links."""


class CollectivePrices(NamedTuple):
    """Of each event of collectives."""

    seconds: Floats
    algorithms: Table
    ways: tuple[Way | None, ...]
    """Those that there are; None: no links are used, as by the first."""
    way: npt.NDArray[np.int64]
    """By event, which of them."""


FREE = CollectivePrice()


def collective_prices(costs: Costs, events: Columns, scale: Floats, *, sharing: bool = True) -> CollectivePrices:
    """The prices of events of collectives, those inside of others included; a byte is priced as ``scale`` bytes.

    Without ``sharing`` nobody asks for ways, and there are none.
    """
    order = np.argsort(events.key("group", "sequence"), kind="stable")
    key = events.key("group", "sequence")[order]
    begins = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]]))
    members = np.diff(np.append(begins, len(order)))
    prices, price = _by_themselves(costs, events, scale, order, begins, members, sharing)
    of_event = np.zeros(len(events), np.int64)
    of_event[order] = np.repeat(price, members)
    if events.present("parent").any():
        prices, of_event = _with_reshardings(events, prices, of_event, order, begins, members)
    names = {name: place for place, name in enumerate(dict.fromkeys(found.algorithm for found in prices))}
    name_of = np.array([names[found.algorithm] for found in prices], np.int32)
    return CollectivePrices(
        np.array([found.seconds for found in prices])[of_event], Table(tuple(names), name_of[of_event]),
        tuple(way_of(costs.hardware, found) for found in prices), of_event)


def _by_themselves(
    costs: Costs, events: Columns, scale: Floats, order: npt.NDArray[Any], begins: npt.NDArray[Any],
    members: npt.NDArray[Any], sharing: bool,
) -> tuple[list[CollectivePrice], npt.NDArray[np.int64]]:
    """The different prices, and by operation which of them it has."""
    least = np.minimum.reduceat(scale[order], begins)
    operations = events.only("rank", "kind", *_CALL).take(order[begins])
    whole = members == group_sizes(operations)
    key = combined(operations.key(*_CALL), np.unique(least, return_inverse=True)[1].astype(np.int64), whole.astype(int))
    _, first, place = np.unique(key, return_index=True, return_inverse=True)
    prices, price_of = [FREE], []
    different = operations.take(first).events()
    for event, factor, complete in zip(different, least[first].tolist(), whole[first].tolist(), strict=True):
        kind = kind_of_event(event.name) if complete else None
        if kind is None or event.group is None:
            price_of.append(0)
            continue
        call = CollectiveCall.of_event(event)
        if call is None:
            raise ValueError(
                f"a collective {event.name!r} of group {list(event.group)} has no payload_bytes, and cannot be priced: "
                f"its trace was saved before events had them; run or simulate it again")
        price_of.append(len(prices))
        prices.append(collective_price(costs, call, 1.0 if isinf(factor) else factor, sharing))
    return prices, np.array(price_of, np.int64)[place]


def collective_price(
    costs: Costs, call: CollectiveCall, scale: float = 1.0, sharing: bool = True
) -> CollectivePrice:
    """What a call costs, its bytes priced as ``scale`` times as many."""
    if len(call.group) < 2:
        return FREE
    named = None if call.algorithm in (None, "direct") else call.algorithm
    root = call.root or 0
    cost = costs.collective(
        call.kind, call.nbytes * scale, call.group, algorithm=named, root=root, pairs=call.pairs)
    crossing = costs.channel_bytes(cost, call.group, root=root, pairs=call.pairs) if sharing else {}
    return CollectivePrice(cost.seconds, cost.algorithm, crossing)


def _with_reshardings(
    events: Columns, prices: list[CollectivePrice], of_event: npt.NDArray[np.int64], order: npt.NDArray[Any],
    begins: npt.NDArray[Any], members: npt.NDArray[Any],
) -> tuple[list[CollectivePrice], npt.NDArray[np.int64]]:
    """The same with what is made of others: by operation, the slowest member's, over the links of all of them."""
    operation = np.zeros(len(events), np.int64)
    operation[order] = np.repeat(np.arange(len(begins)), members)
    seconds = np.array([found.seconds for found in prices])[of_event].tolist()
    inside: Counter[tuple[int, int]] = Counter()
    parts: dict[tuple[int, int], list[int]] = {}
    told = zip(events.values("rank"), events.values("parent"), seconds, operation.tolist(), strict=True)
    for rank, parent, price, part in told:
        if parent is not None:
            inside[rank, parent] += price
            parts.setdefault((rank, parent), []).append(part)
    own = events.isin("name", {*KINDS.records, *NAMED_OTHERWISE})
    keys = list(zip(events.values("rank"), events.values("serial"), strict=True))
    prices, of_event = list(prices), of_event.copy()
    price_of = of_event[order[begins]]      # by operation
    place_of: dict[Any, int] = {}
    for first, count in zip(begins.tolist(), members.tolist(), strict=True):
        alike = order[first:first + count]
        if own[alike[0]]:
            continue
        slowest = max(inside[keys[event]] for event in alike.tolist())
        of_these = sorted({part for event in alike.tolist() for part in parts.get(keys[event], ())})
        known = slowest, tuple(price_of[of_these].tolist())
        if known not in place_of:
            place_of[known] = len(prices)
            prices.append(CollectivePrice(slowest, None, _added(prices[part].crossing for part in known[1])))
        of_event[alike] = place_of[known]
    return prices, of_event


def _added(crossing: Iterable[Mapping[Channel, float]]) -> Mapping[Channel, float]:
    """The sums, whatever the order."""
    parts: dict[Channel, list[float]] = {}
    for each in crossing:
        for channel, nbytes in each.items():
            parts.setdefault(channel, []).append(nbytes)
    return {channel: fsum(crossed) for channel, crossed in parts.items()}


def way_of(hardware: Hardware, price: CollectivePrice) -> Way | None:
    """What a collective asks of the links: what crosses each, spread over its time; no more than the link has."""
    used = {}
    for channel, nbytes in price.crossing.items():
        if nbytes and price.seconds:
            part = nbytes / (hardware.links[channel[0]].bytes_per_second * price.seconds)
            used[channel] = min(part, hardware.part(channel))
    if not used:
        return None
    most = max(used.values())
    return Way(tuple((channel, max(part / most, LEAST)) for channel, part in sorted(used.items())), most)
