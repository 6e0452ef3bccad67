"""What each collective of a record costs on a `Hardware`: seconds, by which algorithm, and over which links.

An algorithm that was named is taken; of what was run ``direct`` the cheapest, as a tuned library would choose.  A
resharding costs what its slowest member needs for the collectives inside, one after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import fsum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.collectives import COLLECTIVES, ROOTED, Pairs, closed_form
from parallelism.cost import Costs
from parallelism.events import Columns, Table
from parallelism.events.columns import codes, combined
from parallelism.hardware import Channel, Hardware
from parallelism.timeline.fair_sharing import LEAST, Way
from parallelism.timeline.matching import group_sizes

Floats = npt.NDArray[np.float64]

_MADE_OF = {"all_gather_object": "all_scatter", "broadcast_object": "broadcast"}
_RECEIVES_NOTHING = ("broadcast", "scatter")
"""The root of these; that of `reduce` and `gather` sends nothing."""
_NO_PAIRS: Pairs = ()


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
    received = np.add.reduceat(events.numbers("bytes_received")[order], begins) * np.where(np.isinf(least), 1.0, least)
    operations = events.only("name", "group", "algorithm").take(order[begins])
    whole = members == group_sizes(operations)
    prices, place_of = [FREE], dict[Any, int]()
    look = combined(*(codes(operations[of]) for of in ("name", "group", "algorithm"))).tolist()
    price = np.zeros(len(begins), np.int64)
    told = zip(look, received.tolist(), *map(operations.values, ("name", "group", "algorithm")), strict=True)
    for place, (alike, total, name, group, algorithm) in enumerate(told):
        kind = _MADE_OF.get(name, name)
        if not whole[place] or kind not in COLLECTIVES:
            continue
        known: Any = alike, total
        root, pairs = 0, _NO_PAIRS
        if kind in ROOTED or kind == "permute":
            own = events.take(order[begins[place]:begins[place] + members[place]])
            root, pairs = _root(kind, group, own), _pairs(group, own) if kind == "permute" else _NO_PAIRS
            if kind == "permute":   # as long as the largest
                total = float(own.numbers("bytes_received").max() * (total / max(1, _sum(own))))
            known = alike, total, root, pairs
        if known not in place_of:
            place_of[known] = len(prices)
            prices.append(collective_price(costs, kind, algorithm, group, total, root, pairs, sharing))
        price[place] = place_of[known]
    return prices, price


def collective_price(
    costs: Costs, kind: str, algorithm: str | None, group: tuple[int, ...], received: float, root: int = 0,
    pairs: Pairs = (), sharing: bool = True,
) -> CollectivePrice:
    if len(group) < 2:
        return FREE
    parts = 1.0 if kind == "permute" else _parts(kind, algorithm, len(group), root)
    named = None if algorithm in (None, "direct") else algorithm
    nbytes = received / parts if parts else 0.0
    cost = costs.collective(kind, nbytes, group, algorithm=named, root=root, pairs=pairs)
    crossing = costs.channel_bytes(cost, group, root=root, pairs=pairs) if sharing else {}
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
    own = events.isin("name", COLLECTIVES) | events.isin("name", _MADE_OF)
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


def _root(kind: str, group: tuple[int, ...], events: Columns) -> int:
    """The position of the root: of whoever gets, or gives, nothing; 0 if there is nothing to give."""
    if kind not in ROOTED:
        return 0
    moved = events.numbers("bytes_received" if kind in _RECEIVES_NOTHING else "bytes_sent")
    none = np.flatnonzero(moved == 0)
    return group.index(events.values("rank")[int(none[0])]) if len(none) and moved.any() else 0


def _pairs(group: tuple[int, ...], events: Columns) -> tuple[tuple[int, int], ...]:
    """Who sends to whom, by position."""
    place = {rank: position for position, rank in enumerate(group)}
    told = zip(events.values("rank"), events.values("sources"), strict=True)
    return tuple(sorted((place[source], place[rank]) for rank, sources in told for source, _ in sources
                        if source != rank and source in place))


def _sum(events: Columns) -> float:
    return float(events.numbers("bytes_received").sum())


@lru_cache(maxsize=4096)
def _parts(kind: str, algorithm: str | None, size: int, root: int) -> float:
    """What all members together receive of S."""
    return float(sum(closed_form(kind, algorithm, size, root=root).received))
