"""`StageCosts`: seconds and memory of the pieces of a step, for stages of any number of blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Floats, Ints
from parallelism.memoized import memoized
from parallelism.symbolic.event_prices import EventPrices, MeshOnHardware
from parallelism.symbolic.events import COLLECTIVE, COMPUTE, MEMORY, MESSAGE, WAIT, EventKind, Events


class Memory(NamedTuple):
    """Bytes of an action, beside what the device holds before it."""

    peak: int
    change: int


class StageCosts:
    """The costs of stages, from events with one block and with two."""

    def __init__(self, events: Events) -> None:
        self.events, self.symbolic = events, events.symbolic
        self._computes: dict[Any, float] | None = None
        self._each: Floats = np.zeros(0)
        """The seconds of each compute, once they are known."""

    def numbers(self, event: int) -> list[int]:
        """The numbers of an event, all of which are whole: see `Events.numbers`."""
        return [self._values[place] for place in self.symbolic.index[event].tolist()]

    @cached_property
    def _values(self) -> list[int]:
        """The value of each formula."""
        return [int(value) for value in self.events.values]

    # -- memory --------------------------------------------------------------------------------------------------------

    @memoized
    def memory(self, place: int, kind: str, blocks: int) -> Memory:
        """Of an action of a stage of so many blocks; of a backward with what is computed again."""
        kept = self.size(place, (kind, "kept"), "kept", blocks)
        own = Memory(max(self._peak(place, kind, blocks), kept), kept)
        if kind not in "BI" or ((place, 2), "R") not in self.symbolic.sections:
            return own
        before = self.memory(place, "R", blocks)
        return Memory(max(before.peak, before.change + own.peak), before.change + own.change)

    @memoized
    def end_peak(self, place: int, blocks: int) -> int:
        """The most bytes that the end of a device with so many blocks takes, beside what the device holds."""
        return self._peak(place, "end", blocks)

    @memoized
    def held(self, place: int, blocks: int, category: str) -> int:
        """Bytes that a device holds during the whole step."""
        return self.size(place, ("held",), category, blocks)

    @memoized
    def received(self, place: int, kind: str) -> int:
        """The bytes of the message that an action takes; 0 if it takes none."""
        return self.events.size(((place, 1), "received"), kind)

    @memoized
    def exchanged(self, place: int) -> int:
        """The bytes of the gradients of shared weights."""
        events = self.symbolic.sections[(place, 1), "end"]
        return int(self.events.nbytes(events)[self.symbolic.are(MESSAGE)[events]].sum())

    def size(self, place: int, section: tuple[str, ...], name: str, blocks: int) -> int:
        """A size of a stage of so many blocks, to which every block adds the same."""
        one, two = (self.events.size(((place, laid_out), *section), name) for laid_out in (1, 2))
        return one + (blocks - 1) * (two - one)

    def _peak(self, place: int, action: str, blocks: int) -> int:
        """The most bytes that an action, or an end, holds beside what the device holds before it."""
        level, most = 0, 0
        for is_repeated, highest, change in self._changes_of_runs(place, action):
            times = blocks - 1 if is_repeated else 1
            if times:
                most = max(most, level + highest + max(0, (times - 1) * change))
                level += times * change
        return most

    @memoized
    def _changes_of_runs(self, place: int, action: str) -> list[tuple[bool, int, int]]:
        """For each run of events of two blocks: whether it is repeated, and the bytes that it holds, at most and at its
        end, beside what is held before it."""
        runs = self.symbolic.runs(((place, 2), action))
        if not runs:
            return []
        events = slice(runs[0].events.start, runs[-1].events.stop)
        starts = np.array([run.events.start for run in runs]) - events.start
        changes = self._changes(events)
        held = changes.cumsum()
        before = held[starts] - changes[starts]
        highest = np.maximum.reduceat(held, starts) - before
        change = np.append(before[1:], held[-1]) - before
        return list(zip([run.is_repeated for run in runs], highest.tolist(), change.tolist(), strict=True))

    def _changes(self, events: slice) -> Ints:
        """The change of memory by each of some events."""
        nbytes = self.events.nbytes(events)
        changes: Ints = np.where(self.symbolic.are(MEMORY)[events], nbytes, 0).astype(np.int64)
        return changes

    # -- seconds -------------------------------------------------------------------------------------------------------

    def seconds(self, prices: EventPrices, layout: MeshOnHardware) -> StageSeconds:
        """The seconds of all sections on a mesh."""
        if self._computes is None:
            each = prices.computes(self.events, self.symbolic.first(COMPUTE))[self.symbolic.alike]
            self._computes = dict.fromkeys([name for name, _ in self.symbolic.parts], 0.0)
            self._computes |= self._sums(each, COMPUTE)
            if self.symbolic.with_waits:
                self._each = each
        events, different, number = self._collectives
        seconds = np.zeros(len(self.symbolic.kinds))
        if len(events):
            seconds[events] = np.array([prices.collective(*each, layout) for each in different])[number]
            seconds = seconds[self.symbolic.alike]
        sums = self._sums(seconds, COLLECTIVE) if len(events) else {}
        found = {name: sums.get(name, 0.0) + own for name, own in self._computes.items()}
        share = prices.hardware.collective_share
        found |= {
            name: _beside(
                self._runs_of_computes[name], self.symbolic.communication[name], seconds, share, layout
            )
            for name in self.symbolic.with_waits
        }
        return StageSeconds(
            found, self._joined, lambda kind, payload: prices.collective(kind, payload, layout)
        )

    @cached_property
    def _joined(self) -> Mapping[Any, Mapping[EventKind, float]]:
        """By section, the payload of each call of several collectives."""
        found: dict[Any, dict[EventKind, float]] = {}
        for name, events in self.symbolic.joined.items():
            payloads = found[name] = {}
            for event, nbytes in zip(events, self.events.nbytes(np.array(events)), strict=True):
                kind = self.symbolic.kinds[event]
                payloads[kind] = payloads.get(kind, 0.0) + float(nbytes)
        return found

    @cached_property
    def _collectives(self) -> tuple[Ints, list[tuple[EventKind, float]], list[int]]:
        """The collectives that are calls of their own, the first of those that are alike; the different ones; and for
        each collective its number among them."""
        events = np.array(
            [
                event
                for event in self.symbolic.first(COLLECTIVE).tolist()
                if not self.symbolic.kinds[event].joined
            ],
            np.int64,
        )
        different: dict[tuple[EventKind, float], int] = {}
        payloads = self.events.nbytes(events).astype(np.float64).tolist()
        number = [
            different.setdefault((self.symbolic.kinds[event], payload), len(different))
            for event, payload in zip(events.tolist(), payloads, strict=True)
        ]
        return events, [*different], number

    @cached_property
    def _runs_of_computes(self) -> dict[Any, list[float]]:
        """By section with waits, the seconds of compute before each of its collectives and waits, and behind the last."""
        found: dict[Any, list[float]] = {}
        for name, events in self.symbolic.with_waits.items():
            edges = [
                events.start - 1,
                *(event for event, _ in self.symbolic.communication[name]),
                events.stop,
            ]
            found[name] = [float(self._each[before + 1 : end].sum()) for before, end in pairwise(edges)]
        return found

    def _sums(self, seconds: Floats, what: str) -> dict[Any, float]:
        """The seconds of each part of the sections that has events of a sort; ``seconds`` are those of such events."""
        return {name: float(seconds[events].sum()) for name, events in self.symbolic.parts_with(what)}


def _beside(
    computes: Sequence[float],
    communication: Sequence[tuple[int, EventKind]],
    seconds: Floats,
    share: float,
    layout: MeshOnHardware,
) -> float:
    """The seconds of events in order, of which some collectives run beside others: as in `parallelism.timeline.replay`,
    those of one group follow each other, and each holds the device for a share of its seconds.

    ``communication`` are collectives and waits, ``seconds`` those of each event, and ``computes`` those of compute before
    each of these, and behind the last.
    """
    clock = 0.0
    streams: dict[tuple[str, ...], float] = {}  # by group: when its stream is free
    ends: list[float] = []
    for compute, (event, kind) in zip(computes, communication, strict=False):
        clock += compute
        if kind.what == WAIT:
            clock = max(clock, ends[-kind.later])
            continue
        group, own = layout.group(kind.axes), float(seconds[event])
        streams[group] = end = max(clock, streams.get(group, 0.0)) + own
        if kind.later:
            ends.append(end)
            clock += share * own
        else:
            clock = end
    return clock + computes[-1]


@dataclass(frozen=True)
class StageSeconds:
    """The seconds of the actions, and of the end, of stages on a mesh."""

    sums: Mapping[Any, float]
    joined: Mapping[Any, Mapping[EventKind, float]]
    """By section, the payloads of calls of several collectives, whose seconds are not in the sums."""
    price: Callable[[EventKind, float], float]
    """The seconds of such a call, by its payload."""

    def action(self, place: int, kind: str, blocks: int) -> float:
        """Of an action of a stage of so many blocks; of a backward with what is computed again."""
        own = self._grown(place, kind, blocks)
        again = kind in "BI" and ((place, 1), "R") in self.sums
        return own + self._grown(place, "R", blocks) if again else own

    def end(self, place: int, blocks: int) -> tuple[float, float]:
        """Of the end of a device, before its gradients are exchanged, and after."""
        return self.sums[(place, 1), "before"], self._grown(place, "end", blocks) + self._calls(place, blocks)

    @memoized
    def _calls(self, place: int, blocks: int) -> float:
        """Of the calls of several collectives at the end of a device, to which every block adds the same payload."""
        one, two = (self.joined.get(((place, laid_out), "end"), {}) for laid_out in (1, 2))
        payloads = {
            kind: one.get(kind, 0.0) + (blocks - 1) * (payload - one.get(kind, 0.0))
            for kind, payload in two.items()
        }
        return sum(self.price(kind, payload) for kind, payload in payloads.items())

    def _grown(self, place: int, section: str, blocks: int) -> float:
        one = self.sums[(place, 1), section]
        return one + (blocks - 1) * (self.sums[(place, 2), section] - one)
