"""What each event of a record costs: on described hardware, or here.

    compute="measured"      the CPU seconds of the device's thread, never wall time
    compute="modelled"      what was declared: ``seconds=``, or flops and bytes by the roofline of the hardware; the
                            same to the last bit whatever the load of the machine; the undeclared costs nothing

Either is longer on a straggler.  Messages and collectives cost what `parallelism.cost` says, by the algorithm that was
named; by the cheapest, as a tuned library would choose, where none was (``direct`` in the record).  A resharding costs
what its slowest member needs for the collectives inside, one after the other; what is said to agree on shapes is free.
On the host, hardware None, there are no rates: messages and collectives are free, and only ``seconds=`` is declared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.closed_forms import closed_form
from parallelism.columns import ABSENT, Columns, codes, combined
from parallelism.communication import COLLECTIVES, ROOTED, Pairs
from parallelism.cost import Costs
from parallelism.hardware import ITEMSIZE, Channel, Hardware, LinkPath
from parallelism.timeline_roles import COLLECTIVE, COMPUTE, SEND, Roles, group_sizes

HOST_NAME = "host"
COMPUTE_KINDS = ("measured", "modelled")

Floats = npt.NDArray[np.float64]

_MADE_OF = {"all_gather_object": "all_scatter", "broadcast_object": "broadcast"}
_RECEIVES_NOTHING = ("broadcast", "scatter")
"""The root of these; that of `reduce` and `gather` sends nothing."""
_NO_PAIRS: Pairs = ()
_FLOATS = ("float16", "float32", "float64")


class Seen(NamedTuple):
    """The events of a record that are in its timeline, and the CPU seconds without a price in it."""

    events: Columns
    left_out_seconds: float = 0.0
    """Of events that were left out."""
    undeclared_seconds: float = 0.0
    """Of those that were not."""
    compute_seconds: float = 0.0
    """Of all compute."""


@dataclass(frozen=True)
class Pricing:
    """How the events of a record are priced.  ``ValueError`` where a rate is asked for that there is not.

    ``priced_dtype`` prices the flops and bytes of any float array as those of this dtype; declared flops and bytes of
    no told dtype are taken for float64's.  ``link_sharing``: messages that overlap share their links.
    """

    hardware: Hardware | None = None
    compute: str = "measured"
    priced_dtype: str | None = None
    link_sharing: bool = True

    def __post_init__(self) -> None:
        if self.compute not in COMPUTE_KINDS:
            raise ValueError(f"compute must be {' or '.join(map(repr, COMPUTE_KINDS))}, got {self.compute!r}")
        if self.priced_dtype is not None:
            if self.hardware is None:
                raise ValueError(
                    f"priced_dtype is for described hardware; hardware='host' has None, not {self.priced_dtype!r}")
            object.__setattr__(self, "priced_dtype", str(self.priced_dtype))
            self.hardware.peak(self.priced_dtype)   # refuses

    @classmethod
    def of(
        cls, hardware: Hardware | str | PathLike[str] = HOST_NAME, compute: str = "measured",
        priced_dtype: str | None = None, link_sharing: bool = True,
    ) -> Pricing:
        """``hardware`` is ``"host"``, or what `Hardware.of` takes."""
        found = None if isinstance(hardware, str) and hardware == HOST_NAME else Hardware.of(hardware)
        return cls(found, compute, priced_dtype, link_sharing)

    def for_devices(self, size: int) -> Pricing:
        """The same; ``ValueError`` if the hardware has no place for so many."""
        if self.hardware is not None and size > self.hardware.ranks:
            raise ValueError(
                f"{self.hardware.name} has places for {self.hardware.ranks} devices, not for {size}; a preset's name "
                f"may say how many it has outermost, as 'dgx-h100:4', and Hardware.resized() does")
        return self

    @property
    def name(self) -> str | None:
        """The name of the hardware; None for the host."""
        return None if self.hardware is None else self.hardware.name

    @property
    def shares_links(self) -> bool:
        """Whether messages share links."""
        return self.link_sharing and self.hardware is not None

    @cached_property
    def costs(self) -> Costs:
        """Seconds on the hardware."""
        assert self.hardware is not None
        return Costs(self.hardware)

    @property
    def path(self) -> Callable[[int, int], LinkPath]:
        """The way of a message."""
        return self.costs.path

    @property
    def capacity(self) -> Callable[[Channel], float]:
        """What a channel carries."""
        assert self.hardware is not None
        return self.hardware.capacity

    # -- what there is to price ----------------------------------------------------------------------------------------

    def declared(self, events: Columns) -> npt.NDArray[np.bool_]:
        """Which computes have a price that was declared."""
        told = events.present("seconds")
        if self.hardware is not None:
            told |= (events.numbers("flops") != 0) | (events.numbers("nbytes") != 0)
        return events.isin("kind", {"compute"}) & told

    def seen(self, events: Columns) -> Seen:
        """The events that are in the timeline.

        Of a modelled one those are left out that depend on the moment: what was computed under no name, and the
        pieces of a block but its first, which has the price.
        """
        if self.compute == "measured":
            return Seen(events)
        computes = events.isin("kind", {"compute"})
        seconds = np.where(computes, events.numbers("cpu_seconds"), 0.0)
        unpriced = computes & ~self.declared(events)
        nameless = unpriced & events.isin("name", {"compute"}) & ~events.present("stage") & ~events.present("phase")
        gone = nameless | (computes & (events.numbers("part") > 0))
        left_out, undeclared = float(seconds[unpriced & gone].sum()), float(seconds[unpriced & ~gone].sum())
        return Seen(_without(events, gone), left_out, undeclared, float(seconds.sum()))

    # -- prices --------------------------------------------------------------------------------------------------------

    def seconds(self, events: Columns, found: Roles) -> Floats:
        """What each compute, send and collective costs by itself; all others 0."""
        seconds = np.zeros(len(events))
        at = np.flatnonzero(found.roles == COMPUTE)
        seconds[at] = self._compute(events.take(at))
        if self.hardware is not None:
            at = np.flatnonzero(found.roles == SEND)
            seconds[at] = self._messages(events.take(at))
            at = np.flatnonzero(events.isin("kind", {"collective"}))
            if len(at):
                prices = self._collectives(events.take(at))
                seconds[at] = np.where(found.roles[at] == COLLECTIVE, prices, 0.0)
        return seconds

    def message_bytes(self, events: Columns) -> Floats:
        """The bytes of each send, as they are priced."""
        return events.numbers("bytes_sent") * self._scale(events, None)

    def _scale(self, events: Columns, untold: str | None) -> Floats:
        """The bytes that a byte is priced as, by the dtype of its event; ``untold``: where none is told."""
        if self.priced_dtype is None:
            return np.ones(len(events))
        by_dtype = {dtype: self._factor(dtype or untold) for dtype in events.distinct("dtype")}
        return np.array([by_dtype[dtype] for dtype in events.values("dtype")], np.float64)

    def _factor(self, dtype: str | None) -> float:
        if self.priced_dtype is None or dtype not in _FLOATS:
            return 1.0
        return ITEMSIZE[self.priced_dtype] / ITEMSIZE[dtype]

    def _compute(self, events: Columns) -> Floats:
        if self.compute == "measured":
            seconds = events.numbers("cpu_seconds").astype(np.float64)
            return seconds if self.hardware is None else seconds * self._slowdowns(events)
        key = events.key("seconds", "flops", "nbytes", "dtype", "part")
        _, first, place = np.unique(key, return_index=True, return_inverse=True)
        different = events.take(first)
        scale = self._scale(different, "float64")
        prices = []
        for told, flops, nbytes, dtype, part, times in zip(
            *map(different.values, ("seconds", "flops", "nbytes", "dtype", "part")), scale.tolist(), strict=True
        ):
            if part or told is not None or self.hardware is None:
                prices.append(told or 0.0)
                continue
            rated = dtype
            if self.priced_dtype is not None and dtype in (None, *_FLOATS):
                rated = self.priced_dtype
            prices.append(self.costs.compute_seconds(flops, nbytes * times, dtype=rated))
        seconds = np.array(prices, np.float64)[place]
        return seconds if self.hardware is None else seconds * self._slowdowns(events)

    def _slowdowns(self, events: Columns) -> Floats:
        assert self.hardware is not None
        factor = {rank: self.hardware.slowdown(rank) for rank in events.distinct("rank")}
        return np.array([factor[rank] for rank in events.values("rank")], np.float64)

    def _messages(self, events: Columns) -> Floats:
        nbytes = self.message_bytes(events)
        key = combined(events.key("rank", "peer"), np.unique(nbytes, return_inverse=True)[1].astype(np.int64))
        _, first, place = np.unique(key, return_index=True, return_inverse=True)
        different = events.take(first)
        prices = [
            self.costs.message_seconds(size, source, target) for size, source, target in
            zip(nbytes[first].tolist(), different.values("rank"), different.values("peer"), strict=True)
        ]
        return np.array(prices, np.float64)[place]

    def _collectives(self, events: Columns) -> Floats:
        """The price of each collective, children included; a resharding's is made of those of its children."""
        scale = self._scale(events, None)
        if self.priced_dtype is not None:
            scale = np.where(events.present("dtype"), scale, np.inf)    # who only receives has none to tell
        order = np.argsort(events.key("group", "sequence"), kind="stable")
        key = events.key("group", "sequence")[order]
        begins = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]]))
        least = np.minimum.reduceat(scale[order], begins)
        received = np.add.reduceat(events.numbers("bytes_received")[order], begins) * np.where(
            np.isinf(least), 1.0, least)
        members = np.diff(np.append(begins, len(order)))
        operations = events.only("name", "group", "algorithm").take(order[begins])
        whole = members == group_sizes(operations)
        price_of: dict[Any, float] = {}
        looks = codes(operations["name"]), codes(operations["group"]), codes(operations["algorithm"])
        look = combined(*looks).tolist()
        prices = np.zeros(len(begins))
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
                known = alike, total, root, pairs
            if known not in price_of:
                if kind == "permute":   # as long as the largest
                    total = float(own.numbers("bytes_received").max() * (total / max(1, _sum(own))))
                price_of[known] = self._collective(kind, algorithm, group, total, root, pairs)
            prices[place] = price_of[known]
        out = np.zeros(len(events))
        out[order] = np.repeat(prices, members)
        return self._with_reshardings(events, out, order, begins, members)

    def collective_seconds(
        self, kind: str, group: tuple[int, ...], received: Sequence[int] | npt.NDArray[np.int64], dtype: str | None,
        pairs: Pairs = (),
    ) -> float:
        """What a direct collective over these ranks takes, each of which receives so many bytes; 0 on the host."""
        if self.hardware is None:
            return 0.0
        own = np.asarray(received)
        total = float(own.sum() * self._factor(dtype))
        if kind == "permute":   # as long as the largest
            total = float(own.max() * (total / max(1, int(own.sum()))))
        return self._collective(kind, "direct", group, total, 0, pairs)

    def _collective(
        self, kind: str, algorithm: str | None, group: tuple[int, ...], received: float, root: int, pairs: Pairs
    ) -> float:
        if len(group) < 2:
            return 0.0
        parts = 1.0 if kind == "permute" else _parts(kind, algorithm, len(group), root)
        named = None if algorithm in (None, "direct") else algorithm
        nbytes = received / parts if parts else 0.0
        return self.costs.collective(kind, nbytes, group, algorithm=named, root=root, pairs=pairs).seconds

    def _with_reshardings(
        self, events: Columns, prices: Floats, order: npt.NDArray[Any], begins: npt.NDArray[Any],
        members: npt.NDArray[Any],
    ) -> Floats:
        if not events.present("parent").any():
            return prices
        inside: Counter[tuple[int, int]] = Counter()
        for rank, parent, price in zip(events.values("rank"), events.values("parent"), prices.tolist(), strict=True):
            if parent is not None:
                inside[rank, parent] += price
        made_of = [inside[key] for key in zip(events.values("rank"), events.values("serial"), strict=True)]
        slowest = np.zeros(len(events))
        slowest[order] = np.repeat(np.maximum.reduceat(np.array(made_of)[order], begins), members)
        return np.where(events.isin("name", COLLECTIVES) | events.isin("name", _MADE_OF), prices, slowest)


def _without(events: Columns, left_out: npt.NDArray[np.bool_]) -> Columns:
    """The events but some, numbered anew."""
    if not left_out.any():
        return events
    ranks = codes(events["rank"])
    serials, parents = events.numbers("serial"), events.numbers("parent")
    spread = int(max(serials.max(), parents.max())) + 2
    gone = np.sort((ranks * spread + serials)[left_out])

    def moved(numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        before = np.searchsorted(gone, ranks * spread + numbers) - np.searchsorted(gone, ranks * spread)
        return np.asarray(numbers - before)

    renumbered = events.with_columns(
        serial=moved(serials), parent=np.where(parents == ABSENT, ABSENT, moved(np.maximum(parents, 0))))
    return renumbered.take(~left_out)


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

