"""The seconds of the phases of a collective on a `Hardware`.

A phase ends with its last message: on each level of links that it uses it takes the longest latency there, and the
bytes on the busiest port or link over its bandwidth.  Over one level with a port for everybody that gives the
textbook's formulas (`parallelism.algorithms.phases`); over more, the slowest level counts in each phase.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from parallelism.algorithms import Phase, Phases
from parallelism.algorithms.patterns import Rule, each_phase
from parallelism.arrays import Array, Bools, Floats, Ints
from parallelism.cost.channel_loads import ChannelLoads
from parallelism.cost.group_shapes import blocks_of, has_own_ports, is_striped, places_of, unit_of_member
from parallelism.cost.hierarchical import Groups
from parallelism.cost.lines import Falling, Line, Term, with_pieces
from parallelism.cost.own_ports import line_of, many_lines, messages_of, terms_by_rule
from parallelism.hardware import Hardware

MOST_PATTERNS = 2**15
"""The most patterns of messages that are kept for a hardware."""
MOST_LOADS = 2**20
"""The most messages that are looked at together, and the most loads of channels that are added up."""


Patterns = dict[tuple[Groups, bytes], tuple[tuple[int, int, int, int], ...]]
"""For messages of equal parts, by the groups, and the sources and targets: each level that they use, the most hops that
one makes there, the most of them that come together on a channel, and over how many channels these spread."""


Seen = dict[tuple[int, int], tuple[Phase, tuple[tuple[int, int, int, int], ...]]]
"""The patterns by the identity of the two arrays, which a phase keeps alive: many phases share them."""


ByLevel = dict[tuple[int, int], tuple[Ints, Floats]]
"""The loads of channels as `ChannelLoads.by_level` has them."""


@lru_cache(maxsize=8)
def patterns_of(links: tuple[Any, ...], placement: tuple[int, ...]) -> Patterns:
    """What was found so far for messages on links of these shapes, whatever their rates."""
    return {}


def terms(
    hardware: Hardware, rules: Sequence[Rule], groups: Groups, rounds: int = 0, share: float = 1.0
) -> dict[Term | Falling, int]:
    """The phases, and how many are alike, of an algorithm that every group runs at the same time.

    ``share`` is the part of S that each member has.  If every two ranks have a link of their own, an algorithm in which
    each rank takes turns with all others needs only ``rounds`` phases; 0 for other algorithms.
    """
    if rounds and rules and _fully_connected(hardware, groups):
        made = tuple(each_phase(rules))
        each = len(made) // rounds
        rules = tuple(_at_once(made[i * each : (i + 1) * each]) for i in range(rounds))
    found = _Terms(hardware, groups, share)
    alone = found.own_ports and len(groups) == 1
    blocks = blocks_of(hardware, groups[0]) if alone else None
    for rule in rules:
        by_rule = terms_by_rule(hardware, rule, groups[0], blocks, share) if alone else None
        if by_rule is None:
            found.add_phases(rule)
        else:
            found.add_waiting()
            found.add(by_rule)
    found.add_waiting()
    return found.times


class _Terms:
    """Collects the terms of phases, and counts equal ones.  Phases are priced one by one, or many together."""

    def __init__(self, hardware: Hardware, groups: Groups, share: float) -> None:
        self.hardware, self.groups, self.share = hardware, groups, share
        self.own_ports = has_own_ports(hardware)
        self.times: dict[Term | Falling, int] = {}
        shapes = tuple((link.shape, link.extents, link.ports, link.striped) for link in hardware.links)
        self._patterns, self._seen = patterns_of(shapes, tuple(hardware.placement or ())), Seen()
        self._waiting: list[Phase] = []
        self._most = max(1, MOST_LOADS // (len(groups) * len(groups[0])))

    def add(self, made: Iterable[tuple[Term | Falling, int]]) -> None:
        """Adds terms, with how many there are of each."""
        for term, times in made:
            self.times[term] = self.times.get(term, 0) + times

    def add_phases(self, rule: Rule) -> None:
        """Adds the phases of a rule, when there are many or with `add_waiting`."""
        for phase in each_phase((rule,)):
            self._waiting.append(phase)
            if len(self._waiting) == self._most:
                self.add_waiting()

    def add_waiting(self) -> None:
        """Adds the phases that wait; many together, if each device has ports of its own."""
        made, self._waiting = self._waiting, []
        if not made:
            return
        ranks, places = _ranks_and_places(self.hardware, self.groups)
        known = many_lines(self.hardware, made, places, self.share) if self.own_ports else [None] * len(made)
        for phase, lines in zip(made, known, strict=True):
            if lines is None:
                lines = _lines_of(
                    self.hardware, phase, self.groups, ranks, places, self.share, self._patterns, self._seen
                )
            self.add([(Term(lines, phase.piped), phase.times)])


def channel_loads(hardware: Hardware, made: Phases, groups: Groups) -> ChannelLoads:
    """By channel, the parts of S that cross it when every group runs these phases."""
    messages = sum(len(phase.sources) for phase in made) * len(groups)
    if (
        messages <= MOST_LOADS
        and not hardware.faults
        and all(link.shape in ("switch", "memory") for link in hardware.links)
    ):
        return _spread(hardware, _loads_of_switches(hardware, made, groups), groups)
    ranks, places = _ranks_and_places(hardware, groups)
    by_level: dict[int, list[tuple[Ints, Array]]] = {}
    slowed: dict[tuple[int, int], float] = {}
    for phase in made:
        times = phase.sendings / phase.whole
        for used in _used(hardware, phase, ranks, places):
            if not hardware.links[used.level].shared:
                continue
            some = used.loads != 0
            by_level.setdefault(used.level, []).append((used.channels[some], times * used.loads[some]))
            for i, concerned in enumerate(used.slowed):
                load = float(used.parts[concerned].sum())
                if load:
                    slowed[used.level, i] = slowed.get((used.level, i), 0.0) + times * load
    found: ByLevel = {key: (np.zeros(1, np.int64), np.array([load])) for key, load in slowed.items()}
    for level, each in by_level.items():
        numbers, place = np.unique(np.concatenate([channels for channels, _ in each]), return_inverse=True)
        sums, start = np.zeros(len(numbers)), 0
        for channels, loads in each:  # in the order of the phases
            sums[place[start : start + len(channels)]] += loads  # the channels of one phase differ
            start += len(channels)
        found[level, -1] = numbers, sums
    return _spread(hardware, found, groups)


def _loads_of_switches(hardware: Hardware, made: Phases, groups: Groups) -> ByLevel:
    """`channel_loads` without faults, many phases at once; the loads of a channel are added in their order."""
    _, places = _ranks_and_places(hardware, groups)
    found: ByLevel = {}
    if not made:
        return found
    lengths = np.array([len(phase.sources) for phase in made]) * len(groups)
    here = np.concatenate([places[:, phase.sources].ravel() for phase in made])
    there = np.concatenate([places[:, phase.targets].ravel() for phase in made])
    parts = np.concatenate([np.tile(phase.parts, len(groups)) for phase in made])
    times = np.array([phase.sendings / phase.whole for phase in made])
    number = np.repeat(np.arange(len(made)), lengths)
    for level, link in enumerate(hardware.links):
        met = _met(hardware, level, here, there)
        if not link.shared or not len(met):
            continue
        _, message, channel = link.uses(hardware.inside(level), here[met], there[met])
        first = int(channel.min())
        width = int(channel.max()) - first + 1
        sums, crossed = np.zeros(width), np.zeros(width, np.bool_)
        phase_of = number[met][message]
        of_message = parts[met][message]
        order = np.argsort(phase_of, kind="stable")
        phase_of = phase_of[order]
        channel = channel[order] - first
        of_message = of_message[order]
        some = max(1, MOST_LOADS // width)
        for start in range(0, len(made), some):
            low, high = np.searchsorted(phase_of, [start, start + some])
            keys = (phase_of[low:high] - start) * width + channel[low:high]
            count = min(some, len(made) - start)
            loads = np.bincount(keys, of_message[low:high], count * width).reshape(count, width)
            crossed |= loads.any(axis=0)
            for each, time in zip(loads, times[start : start + count].tolist(), strict=True):
                sums += time * each
        found[level, -1] = first + np.flatnonzero(crossed), sums[crossed]
    return found


def _ranks_and_places(hardware: Hardware, groups: Groups) -> tuple[Ints, Ints]:
    """The rank and the place of each member of each group: two arrays ``[group, position]``."""
    ranks = np.array(groups, np.int64)
    return ranks, places_of(hardware, ranks)


class _Used(NamedTuple):
    """The use of one level by the messages of a phase."""

    level: int
    distance: Ints
    parts: Ints
    """The part that each message carries."""
    channels: Ints
    loads: Array
    """The parts that come together on each channel."""
    slowed: list[Bools]
    """By fault, the messages that it concerns."""


def _used(hardware: Hardware, phase: Phase, ranks: Ints, places: Ints) -> Iterator[_Used]:
    here, there = places[:, phase.sources].ravel(), places[:, phase.targets].ravel()
    parts = np.tile(phase.parts, len(ranks))
    concerned = [
        _among(ranks[:, phase.sources], fault.source) & _among(ranks[:, phase.targets], fault.target)
        for fault in hardware.faults
    ]
    for level, link in enumerate(hardware.links):
        met = _met(hardware, level, here, there)
        if len(met):
            distance, message, channel = link.uses(hardware.inside(level), here[met], there[met])
            channels, place = np.unique(channel, return_inverse=True)
            loads = np.bincount(place, weights=parts[met][message])
            yield _Used(
                level, distance, parts[met], channels, loads, [each.ravel()[met] for each in concerned]
            )


def _met(hardware: Hardware, level: int, here: Ints, there: Ints) -> Ints:
    """The numbers of the messages whose ends meet at a level."""
    inside = hardware.inside(level)
    outside = inside * hardware.links[level].units
    return np.flatnonzero((here // inside != there // inside) & (here // outside == there // outside))


def _lines_of(
    hardware: Hardware,
    phase: Phase,
    groups: Groups,
    ranks: Ints,
    places: Ints,
    share: float,
    patterns: Patterns,
    seen: Seen,
) -> tuple[Line, ...]:
    """By level: the longest latency, and what comes together on one channel.

    Phases of equal parts that differ in their size alone are looked at once; all of it grows with the part.
    """
    parts = phase.parts
    if hardware.faults or not len(parts) or (len(parts) > 1 and (parts != parts[0]).any()):
        return tuple(
            with_pieces(line, hardware.links[level], share)
            for level, line in _lines(hardware, phase, ranks, places)
        )
    ends = id(phase.sources), id(phase.targets)
    _, found = seen.get(ends, (phase, None))
    if found is None:
        key = groups, blake2b(phase.sources.tobytes() + phase.targets.tobytes(), digest_size=16).digest()
        found = patterns.get(key)
        if found is None:
            if len(patterns) >= MOST_PATTERNS:
                patterns.clear()
            found = patterns[key] = tuple(_pattern(hardware, phase, ranks, places))
        seen[ends] = phase, found
    part = int(parts[0])
    return tuple(
        line_of(hardware, level, count * part, phase.whole, ports, share, hops)
        for level, hops, count, ports in found
    )


def _pattern(
    hardware: Hardware, phase: Phase, ranks: Ints, places: Ints
) -> Iterator[tuple[int, int, int, int]]:
    """By level: the most hops of a message, the most messages on a channel, and over how many channels they spread."""
    phase = phase._replace(parts=np.ones_like(phase.parts), whole=1)
    for used in _used(hardware, phase, ranks, places):
        yield used.level, int(used.distance.max()), int(used.loads.max()), 1


def _lines(hardware: Hardware, phase: Phase, ranks: Ints, places: Ints) -> Iterator[tuple[int, Line]]:
    for used in _used(hardware, phase, ranks, places):
        link = hardware.links[used.level]
        latency = used.distance * link.latency_seconds
        per_second = phase.whole * link.bytes_per_second
        loads = [(int(used.loads.max()), per_second)]
        for fault, slowed in zip(hardware.faults, used.slowed, strict=True):
            latency = latency + slowed * fault.delay_seconds
            loads.append((int(used.parts[slowed].sum()), fault.bandwidth_factor * per_second))
        load, per_second = max(loads, key=lambda load: load[0] / load[1])
        yield used.level, Line(float(latency.max()), load, per_second)


def _spread(hardware: Hardware, found: ByLevel, groups: Groups) -> ChannelLoads:
    """The loads of channels, where those of striped levels spread over the ports of the members in each unit."""
    striped = [
        level for level in range(len(hardware.links)) if (level, -1) in found and is_striped(hardware, level)
    ]
    if striped:
        places = _ranks_and_places(hardware, groups)[1]
    for level in striped:
        numbers, loads = found[level, -1]
        of_channel = np.zeros(2 * int(places.max()) + 2)
        of_channel[numbers] = loads
        of_member = unit_of_member(hardware.inside(level), places).ravel()
        ports = np.bincount(of_member)
        for end in (0, 1):
            channels = 2 * places.ravel() + end
            of_channel[channels] = (np.bincount(of_member, of_channel[channels]) / ports)[of_member]
        numbers = np.flatnonzero(of_channel)
        found[level, -1] = numbers, of_channel[numbers]
    return ChannelLoads(found)


def _fully_connected(hardware: Hardware, groups: Groups) -> bool:
    """Whether the ranks of each group are joined two by two, at one level, by links of their own."""
    if all(link.shape != "fully_connected" for link in hardware.links):
        return False
    for ranks in groups:
        level, *more = {hardware.level(ranks[0], rank) for rank in ranks[1:]}
        units = {hardware.place(rank) // hardware.inside(level) for rank in ranks}
        if more or len(units) < len(ranks) or hardware.links[level].shape != "fully_connected":
            return False
    return True


def _at_once(made: Phases) -> Phase:
    """Several phases as one."""
    return Phase(1, *messages_of(made), made[0].whole)


def _among(ranks: Ints, end: int | None) -> Bools:
    return np.full(ranks.shape, True) if end is None else ranks == end
