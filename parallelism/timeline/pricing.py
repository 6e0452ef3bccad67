"""The price of each event of a record: on described hardware, or on this machine.

    compute="measured"      the CPU seconds of the device's thread, never wall time
    compute="modelled"      what was declared: ``seconds=``, or flops and bytes by the roofline of the hardware; the
                            same to the last bit whatever the load of the machine; the undeclared costs nothing

Both are longer on a straggler.  `parallelism.cost` gives the seconds of messages and collectives, by the named
algorithm or else by the cheapest (`parallelism.timeline.collective_pricing`).  Messages that only agree on shapes are
free.  On the host, hardware None, there are no rates: messages and collectives are free, and only ``seconds=`` is
declared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Bools, Floats, Ints
from parallelism.collectives import CollectiveCall
from parallelism.cost import Costs, costs_of
from parallelism.dtypes import FLOAT4, NARROW_FLOATS
from parallelism.events import ABSENT, Columns, Table, column_of
from parallelism.events.columns import codes, combined
from parallelism.hardware import ITEMSIZE, Hardware, MixedHardware, rate_name
from parallelism.timeline.collective_pricing import FREE, CollectivePrice, collective_price, collective_prices
from parallelism.timeline.fair_sharing import Route
from parallelism.timeline.matching import COLLECTIVE, COMPUTE, RECV, SEND, Roles

HOST_NAME = "host"
COMPUTE_KINDS = ("measured", "modelled")


_FLOATS = frozenset({"float16", "float32", "float64", *NARROW_FLOATS.values(), FLOAT4})
"""The floats of arrays: ``priced_dtype`` stands for each of them."""
_ADDED_IN = "float32"
"""What gradients of weights are added up in, by products of narrower numbers."""


def priced_scale(dtype: str | None, priced_dtype: str | None) -> float:
    """How many bytes are priced for each byte of an array of ``dtype``: ``priced_dtype`` stands for its floats."""
    if priced_dtype is None or dtype not in _FLOATS:
        return 1.0
    return ITEMSIZE[rate_name(priced_dtype)] / ITEMSIZE[rate_name(dtype)]


class Seen(NamedTuple):
    """The events of a record that are in its timeline, and the CPU seconds without a price in it."""

    events: Columns
    left_out_seconds: float = 0.0
    """The seconds of events that were left out."""
    undeclared_seconds: float = 0.0
    """The CPU seconds of compute that declared no cost."""
    compute_seconds: float = 0.0
    """The seconds of all compute."""


class Prices(NamedTuple):
    """The prices of the events of a record."""

    seconds: Floats
    algorithms: Table | None = None
    """The algorithms of the collectives; None: there are no collectives, or they are free."""
    routes: tuple[Route | None, ...] = (None,)
    """The different routes of collectives over the links."""
    route: Ints | None = None
    """For each event the index of its route; None: the first for all."""
    message_route: Callable[[int, int], tuple[Route | None, float]] | None = None
    """`Pricing.route` of messages that stand for others; None: of themselves."""


def nameless_compute(events: Columns) -> Bools:
    """For each event, whether it is compute outside of all named blocks, with neither flops nor bytes."""
    free: Bools = (events.numbers("flops") == 0) & (events.numbers("nbytes") == 0)
    named = events.present("stage") | events.present("phase")
    return free & ~named & events.isin("kind", {"compute"}) & events.isin("name", {"compute"})


def with_free_overhead(events: Columns) -> Columns:
    """The events of a program that declares every op: its nameless compute is the library's own, declared as 0 s."""
    seconds = list(events.values("seconds"))
    for place in np.flatnonzero(nameless_compute(events)).tolist():
        seconds[place] = 0.0
    return events.with_columns(seconds=column_of("seconds", seconds))


@dataclass(frozen=True)
class Pricing:
    """How the events of a record are priced.  ``ValueError`` where a rate is asked for that there is not.

    ``priced_dtype`` prices the flops and bytes of any float array as those of this dtype; integers and bools keep
    their size, also beside floats in one compute (`Event.other_bytes`).  Flops and bytes without a dtype count as those
    of float64.  ``link_sharing``: messages and collectives that overlap share their links.
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
                    f"priced_dtype is for described hardware; hardware='host' has None, not {self.priced_dtype!r}"
                )
            object.__setattr__(self, "priced_dtype", str(self.priced_dtype))
            self.hardware.peak(self.priced_dtype)  # refuses

    @classmethod
    def of(
        cls,
        hardware: Hardware | str | PathLike[str] = HOST_NAME,
        compute: str = "measured",
        priced_dtype: str | None = None,
        link_sharing: bool = True,
    ) -> Pricing:
        """``hardware`` is ``"host"``, or what `Hardware.of` takes."""
        on_host = isinstance(hardware, str) and hardware == HOST_NAME
        return cls(None if on_host else Hardware.of(hardware), compute, priced_dtype, link_sharing)

    def for_devices(self, size: int) -> Pricing:
        """Returns itself; ``ValueError`` if the hardware has fewer places than ``size``."""
        if self.hardware is not None and size > self.hardware.ranks:
            raise ValueError(
                f"{self.hardware.name} has places for {self.hardware.ranks} devices, not for {size}; a preset's name "
                f"may say how many it has outermost, as 'dgx-h100:4', and Hardware.resized() does"
            )
        return self

    @property
    def name(self) -> str | None:
        """The name of the hardware; None for the host."""
        return None if self.hardware is None else self.hardware.name

    def collective_shares(self, ranks: Sequence[int]) -> Sequence[float]:
        """What part of each of these devices a collective takes from compute beside it; empty: no part of any."""
        hardware = self.hardware
        if hardware is None:
            return ()
        kinds = hardware.parts if isinstance(hardware, MixedHardware) else (hardware,)
        if not any(kind.collective_share for kind in kinds):
            return ()
        if not isinstance(hardware, MixedHardware):
            return [hardware.collective_share] * len(ranks)
        return [kinds[hardware.number_of_part(rank)].collective_share for rank in ranks]

    @property
    def shares_links(self) -> bool:
        """Whether messages share links."""
        return self.link_sharing and self.hardware is not None

    @cached_property
    def costs(self) -> Costs:
        """Seconds on the hardware."""
        assert self.hardware is not None
        return costs_of(self.hardware)

    # -- what there is to price ----------------------------------------------------------------------------------------

    def declared(self, events: Columns) -> Bools:
        """Which computes have a price that was declared."""
        declared = events.present("seconds")
        if self.hardware is not None:
            declared |= (events.numbers("flops") != 0) | (events.numbers("nbytes") != 0)
        return events.isin("kind", {"compute"}) & declared

    def seen(self, events: Columns) -> Seen:
        """The events that are in the timeline.

        A modelled timeline leaves out events that depend on the moment: compute without a name and without a price, and
        the later pieces of a block, whose price stands at its first piece.
        """
        if self.compute == "measured":
            return Seen(events)
        computes = events.isin("kind", {"compute"})
        seconds = np.where(computes, events.numbers("cpu_seconds"), 0.0)
        unpriced = computes & ~self.declared(events)
        gone = (nameless_compute(events) & (unpriced | events.isin("seconds", (0.0,)))) | (
            computes & (events.numbers("part") > 0)
        )
        left_out = float(seconds[unpriced & gone].sum())
        undeclared = float(seconds[unpriced & ~gone].sum())
        return Seen(_without(events, gone), left_out, undeclared, float(seconds.sum()))

    # -- prices --------------------------------------------------------------------------------------------------------

    def prices(self, events: Columns, found: Roles) -> Prices:
        """The price of each compute, send and collective by itself, and its links; other events are free."""
        seconds = np.zeros(len(events))
        at = np.flatnonzero(found.roles == COMPUTE)
        seconds[at] = self._compute(events.take(at))
        if self.hardware is not None:
            at = np.flatnonzero(found.roles == SEND)
            seconds[at] = self._messages(events.take(at))
            at = np.flatnonzero(events.isin("kind", {"collective"}))
            if len(at):
                collectives = events.take(at)
                # The scale is infinite without a dtype, as for a member that only receives.
                scale = self._scale(collectives)
                if self.priced_dtype is not None:
                    scale = np.where(collectives.present("dtype"), scale, np.inf)
                name, route = np.zeros(len(events), np.int32), np.zeros(len(events), np.int64)
                alone, algorithms, routes, route[at] = collective_prices(
                    self.costs, collectives, scale, sharing=self.link_sharing
                )
                seconds[at] = np.where(found.roles[at] == COLLECTIVE, alone, 0.0)
                name[at] = algorithms.index
                return Prices(seconds, Table(algorithms.values, name), routes, route)
        return Prices(seconds)

    def route(self, source: int, target: int) -> tuple[Route | None, float]:
        """The links of a message, and its latency behind them."""
        path = self.costs.path(source, target)
        if not path.channels or self.hardware is None:
            return None, path.latency_seconds
        rates = [
            path.bytes_per_second / self.hardware.links[level].bytes_per_second for level, *_ in path.channels
        ]
        most = max(rates)
        uses = tuple((channel, rate / most) for channel, rate in zip(path.channels, rates, strict=True))
        return Route(uses, most), path.latency_seconds

    def message_bytes(self, events: Columns) -> Floats:
        """The bytes of each send, as they are priced."""
        return events.numbers("bytes_sent") * self._scale(events)

    def overheads(self, events: Columns, roles: Roles) -> Floats:
        """How long each send and recv holds its rank: for a time, and for a time per byte that was sent.

        These are o and O of Hoefler, Schneider and Lumsdaine, *LogGOPSim: Simulating Large-Scale Applications in the
        LogGOPS Model* (2010).  A recv without a send, of a failed run, counts as one of no bytes.
        """
        seconds = np.zeros(len(events))
        at = np.flatnonzero((roles.roles == SEND) | (roles.roles == RECV))
        if self.hardware is None or not len(at):
            return seconds
        seconds[at] = self.hardware.message_overhead_seconds
        if self.hardware.message_overhead_seconds_per_byte:
            sends = np.flatnonzero(roles.roles == SEND)
            keys, first = np.unique(roles.keys[sends], return_index=True)
            if len(keys):
                slots = np.minimum(np.searchsorted(keys, roles.keys[at]), len(keys) - 1)
                nbytes = np.where(
                    keys[slots] == roles.keys[at], self.message_bytes(events)[sends][first][slots], 0
                )
                seconds[at] += nbytes * self.hardware.message_overhead_seconds_per_byte
        return seconds

    def _scale(self, events: Columns, default: str | None = None) -> Floats:
        """The number of bytes as which a byte is priced, by the dtype of its event; ``default`` if it has none."""
        return events.mapped("dtype", lambda dtype: self._factor(dtype or default), np.float64)

    def _factor(self, dtype: str | None) -> float:
        return priced_scale(dtype, self.priced_dtype)

    def _compute(self, events: Columns) -> Floats:
        if self.compute == "measured":
            return self._slowed(events, events.numbers("cpu_seconds").astype(np.float64))
        if isinstance(self.hardware, MixedHardware):
            return self._compute_in_parts(events, self.hardware)
        fields = ["seconds", "flops", "nbytes", "dtype", "part", "other_bytes", "shape"]
        by_kernel = self.hardware is not None and bool(self.hardware.kernels)
        _, first, place = np.unique(
            events.key(*fields, *["name"] * by_kernel), return_index=True, return_inverse=True
        )
        different = events.take(first)
        names = different.values("name") if by_kernel else repeat(None, len(first))
        scale = self._scale(different, "float64").tolist()
        prices = []
        for seconds, flops, nbytes, dtype, part, others, shape, name, times in zip(
            *map(different.values, fields), names, scale, strict=True
        ):
            if part or seconds is not None or self.hardware is None:
                prices.append(seconds or 0.0)
                continue
            rated = self.priced_dtype if self.priced_dtype and dtype in (None, *_FLOATS) else dtype
            moved_by_others = sum(size * self._factor(other) for other, size in others)
            moved = (nbytes - sum(size for _, size in others)) * times + moved_by_others
            added = sum(size * self._factor(other) for other, size in others if other == _ADDED_IN)
            prices.append(
                self.costs.compute_seconds(
                    flops,
                    moved,
                    dtype=rated,
                    shape=shape,
                    kernel=name,
                    other_bytes=moved_by_others,
                    added_bytes=added,
                )
            )
        return self._slowed(events, np.array(prices, np.float64)[place])

    def _compute_in_parts(self, events: Columns, hardware: MixedHardware) -> Floats:
        seconds = np.zeros(len(events))
        number = events.mapped("rank", hardware.number_of_part, np.int64)
        for part, kind in enumerate(hardware.parts):
            at = np.flatnonzero(number == part)
            if len(at):
                seconds[at] = replace(self, hardware=kind)._compute(events.take(at))
        return seconds

    def _slowed(self, events: Columns, seconds: Floats) -> Floats:
        """The seconds of compute, longer on stragglers."""
        return (
            seconds
            if self.hardware is None
            else seconds * events.mapped("rank", self.hardware.slowdown, np.float64)
        )

    def _messages(self, events: Columns) -> Floats:
        nbytes = self.message_bytes(events)
        key = combined(events.key("rank", "peer"), np.unique(nbytes, return_inverse=True)[1].astype(np.int64))
        _, first, place = np.unique(key, return_index=True, return_inverse=True)
        different = events.take(first)
        prices = [
            self.costs.message_seconds(size, source, target)
            for size, source, target in zip(
                nbytes[first].tolist(), different.values("rank"), different.values("peer"), strict=True
            )
        ]
        return np.array(prices, np.float64)[place]

    def collective(self, call: CollectiveCall, dtype: str | None) -> CollectivePrice:
        """The seconds of a collective of arrays of a dtype; 0 on the host."""
        if self.hardware is None:
            return FREE
        return collective_price(self.costs, call, self._factor(dtype), self.link_sharing)


def _without(events: Columns, left_out: Bools) -> Columns:
    """The remaining events, with new numbers."""
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
        serial=moved(serials), parent=np.where(parents == ABSENT, ABSENT, moved(np.maximum(parents, 0)))
    )
    return renumbered.take(~left_out)
