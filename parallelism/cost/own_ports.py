"""The seconds of phases where each device has ports of its own and sends and receives one message at a time.

A message is alone on its ports, so it only matters at which levels any members meet.  On a striped level the messages
that leave a unit spread over the ports of all members in it.  In a group that lies in `Blocks` a rule says both; the
phases of other groups, and phases without a rule, are looked at many together.
"""

from collections.abc import Sequence
from functools import lru_cache
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from parallelism.algorithms import Phase
from parallelism.algorithms.patterns import Around, OneByOne, Rule, Swap, Turns, around
from parallelism.arrays import Bools, Ints
from parallelism.cost.group_shapes import Blocks, places_of, unit_of_member
from parallelism.cost.lines import Falling, Line, Term, with_pieces
from parallelism.hardware import Hardware

MOST_IN_TURNS = 4096
"""Turns in larger groups that are not regular are looked at phase by phase: there are as many messages as pairs."""

Terms = list[tuple[Term | Falling, int]]
"""Different terms, and how often each comes."""


def terms_by_rule(
    hardware: Hardware, rule: Rule, group: tuple[int, ...], blocks: Blocks | None, share: float
) -> Terms | None:
    """The terms of the phases of a rule in their order; None for a rule that is not known here.

    ``blocks`` is how the group lies, if it does so.
    """
    if isinstance(rule, tuple) or (blocks is None and isinstance(rule, Turns) and rule.g > MOST_IN_TURNS):
        return None
    if isinstance(rule, OneByOne):
        return _one_by_one(hardware, rule, group, share)
    if isinstance(rule, Turns):
        return (
            _turns(hardware, rule, group, share)
            if blocks is None
            else _turns_of_blocks(hardware, rule, blocks, share)
        )
    if isinstance(rule, Around) and (blocks is not None or len(rule.parts) > 1):
        several = len(rule.parts) > 1
        part = 1 if several else rule.parts[0]
        if blocks is not None:
            lines = _lines(
                hardware, blocks, _crossing_around(blocks, rule.distance % rule.g), part, rule.whole, share
            )
        else:
            places = places_of(hardware, np.array([group], np.int64))
            lines = (
                many_lines(hardware, [around(rule.g, rule.distance, part, rule.whole)], places, share)[0]
                or ()
            )
        term = Term(lines)
        return [(Falling(term, rule.parts) if several else term, rule.times)]
    if isinstance(rule, Swap) and blocks is not None:
        crossing = [inner * (inner <= rule.distance < outer) for inner, outer in blocks.units()]
        return [(Term(_lines(hardware, blocks, crossing, rule.part, rule.whole, share)), 1)]
    return None


def line_of(
    hardware: Hardware, level: int, load: int, whole: int, ports: int, share: float, hops: int = 1
) -> Line:
    """The line of ``load`` parts of S over ``whole``, over so many ports of a level."""
    link = hardware.links[level]
    return with_pieces(
        Line(hops * link.latency_seconds, load, whole * link.bytes_per_second * ports), link, share
    )


def _lines(
    hardware: Hardware, blocks: Blocks, crossing: Sequence[int], part: int, whole: int, share: float
) -> tuple[Line, ...]:
    """The lines of messages of equal parts, of which by level so many leave the busiest unit."""
    lines = []
    for level, count in enumerate(crossing):
        if count:
            load, ports = (count * part, blocks.inside[level]) if hardware.links[level].striped else (part, 1)
            lines.append(line_of(hardware, level, load, whole, ports, share))
    return tuple(lines)


def _crossing_around(blocks: Blocks, distance: int) -> list[int]:
    """By level, how many messages leave the busiest unit if every member sends one over a distance around the group."""
    nearest = min(distance, blocks.size - distance)
    crossing = []
    for inner, outer in blocks.units():
        crosses = inner < outer and nearest < outer
        crossing.append(min(inner, nearest, outer - nearest) if crosses else 0)
    return crossing


def _turns_of_blocks(hardware: Hardware, turns: Turns, blocks: Blocks, share: float) -> Terms:
    """Every member sends one message in each phase, and receives one."""
    lines = [
        line_of(hardware, level, turns.part, turns.whole, 1, share) for level in range(len(hardware.links))
    ]
    terms: Terms = []
    for first, end in blocks.distances():
        terms.append((Term(tuple(lines[level] for level in blocks.levels(first))), end - first))
    return terms


def _turns(hardware: Hardware, turns: Turns, group: tuple[int, ...], share: float) -> Terms:
    """The terms of all turns in a group that is not regular."""
    units = tuple(
        (hardware.inside(level), hardware.inside(level) * link.units, link.striped)
        for level, link in enumerate(hardware.links)
    )
    terms: Terms = []
    for row, times in _met_in_turns(units, hardware.placement, group):
        by_level = enumerate(zip(row[::2], row[1::2], strict=True))
        lines = tuple(
            line_of(hardware, level, count * turns.part, turns.whole, ports, share)
            for level, (count, ports) in by_level
            if count
        )
        terms.append((Term(lines), times))
    return terms


@lru_cache(maxsize=16)
def _met_in_turns(
    units: tuple[tuple[int, int, bool], ...], placement: tuple[int, ...], group: tuple[int, ...]
) -> list[tuple[tuple[int, ...], int]]:
    """Of turns in a group: by level how many messages leave the busiest unit, and its ports; and in how many phases.

    On a level that is not striped these are 1 and 1 if any messages meet there, else 0 and 1.
    """
    places = np.array([placement[rank] for rank in group] if placement else group, np.int64)
    size = len(group)
    columns = []
    for inside, outside, striped in units:
        inner, outer = (
            np.unique(places // each, return_inverse=True)[1].astype(np.int32) for each in (inside, outside)
        )
        crossing = _later(outer) == outer
        crossing &= _later(inner) != inner  # by distance and member: its message meets others here
        count = crossing.any(axis=1).astype(np.int64)
        ports = np.ones(size - 1, np.int64)
        if striped:
            per_unit = np.bincount(inner)
            starts = np.cumsum(per_unit) - per_unit
            leaving = np.add.reduceat(
                crossing[:, np.argsort(inner, kind="stable")], starts, axis=1, dtype=np.int64
            )
            most = np.maximum(
                leaving, leaving[::-1]
            )  # what comes over a distance leaves over the opposite one
            busiest = np.argmax(most / per_unit, axis=1)
            count = most[np.arange(size - 1), busiest]
            ports = per_unit[busiest]
            ports = np.where(count > 0, ports, 1)
        columns += [count, ports]
    found: dict[tuple[int, ...], int] = {}
    for row in zip(*(column.tolist() for column in columns), strict=True):
        found[row] = found.get(row, 0) + 1
    return list(found.items())


def _later(values: NDArray[np.int32]) -> NDArray[np.int32]:
    """A row for each distance from 1 on: the value of the member at the distance from each."""
    return np.lib.stride_tricks.sliding_window_view(np.concatenate([values, values[:-1]]), len(values))[1:]


def _one_by_one(hardware: Hardware, rule: OneByOne, group: tuple[int, ...], share: float) -> Terms:
    """On a striped level each message spreads over the ports of all members in its unit, the smaller of the two."""
    places = places_of(hardware, np.array(group, np.int64))
    here, there = places[rule.sources], places[rule.targets]
    found: list[tuple[int, Term, int]] = []
    near = here == there
    for level, link in enumerate(hardware.links):
        unit = hardware.inside(level) * link.units
        within = here // unit == there // unit
        met = np.flatnonzero(within & ~near)
        near = within
        if not len(met):
            continue
        over = {1: (int(met[0]), len(met))}
        if link.striped:
            of_member = unit_of_member(hardware.inside(level), places[None])[0]
            ports = np.bincount(of_member)
            fewest = np.minimum(*(ports[of_member[ends[met]]] for ends in (rule.sources, rule.targets)))
            each, first, times = np.unique(fewest, return_index=True, return_counts=True)
            over = dict(
                zip(each.tolist(), zip(met[first].tolist(), times.tolist(), strict=True), strict=True)
            )
        found += [
            (first, Term((line_of(hardware, level, 1, rule.whole, ports, share),)), times)
            for ports, (first, times) in over.items()
        ]
    return [(term, times) for _, term, times in sorted(found, key=itemgetter(0))]


def many_lines(
    hardware: Hardware, made: Sequence[Phase], places: Ints, share: float
) -> list[tuple[Line, ...] | None]:
    """By phase the lines of its messages; None if it is empty, or if a device sends or receives more than one message.

    ``places`` has a row for each group.
    """
    lengths = np.array([len(phase.sources) for phase in made])
    number = np.repeat(np.arange(len(made)), lengths)
    sources, targets, parts = messages_of(made)
    size = places.shape[1]
    alone = lengths > 0
    for ends in (sources, targets):
        alone &= (
            np.bincount(number * size + ends, minlength=len(made) * size).reshape(-1, size).max(axis=1) < 2
        )
    if not alone.all():
        priceable = np.flatnonzero(alone).tolist()
        found: list[tuple[Line, ...] | None] = [None] * len(made)
        if priceable:
            lines_of = many_lines(hardware, [made[i] for i in priceable], places, share)
            for i, own in zip(priceable, lines_of, strict=True):
                found[i] = own
        return found
    starts = np.cumsum(lengths) - lengths
    empty = np.maximum.reduceat(parts, starts) == 0
    parts = parts + empty[number]  # so that of messages without bytes, too, the unit with the most is found
    lines: list[list[Line]] = [[] for _ in made]
    apart = places[:, sources] != places[:, targets]
    for level, link in enumerate(hardware.links):
        unit = places // (hardware.inside(level) * link.units)
        further = unit[:, sources] != unit[:, targets]
        crossing = apart & ~further
        apart, met = further, crossing.any(axis=0)
        used = np.flatnonzero(np.logical_or.reduceat(met, starts))
        if not len(used):
            continue
        loads = np.maximum.reduceat(np.where(met, parts, 0), starts)
        ports = np.ones(len(made), np.int64)
        if link.striped:
            loads, ports = _busiest(
                unit_of_member(hardware.inside(level), places),
                number,
                sources,
                targets,
                parts,
                crossing,
                len(made),
            )
        loads = np.where(empty, 0, loads)
        for i, load, over in zip(used.tolist(), loads[used].tolist(), ports[used].tolist(), strict=True):
            lines[i].append(line_of(hardware, level, load, made[i].whole, over, share))
    return [tuple(each) for each in lines]


def messages_of(made: Sequence[Phase]) -> tuple[Ints, Ints, Ints]:
    """The sources, targets and parts of the messages of all phases, one phase after the other."""
    return (
        np.concatenate([phase.sources for phase in made]),
        np.concatenate([phase.targets for phase in made]),
        np.concatenate([phase.parts for phase in made]),
    )


def _busiest(
    of_member: Ints, number: Ints, sources: Ints, targets: Ints, parts: Ints, crossing: Bools, count: int
) -> tuple[Ints, Ints]:
    """By phase, the parts that cross the border of the busiest unit in one direction, and over how many ports."""
    ports = np.bincount(of_member.ravel())
    weights = np.broadcast_to(parts, crossing.shape)[crossing]
    most = np.max(
        [
            np.bincount((number * len(ports) + of_member[:, ends])[crossing], weights, count * len(ports))
            for ends in (sources, targets)
        ],
        axis=0,
    ).reshape(count, len(ports))
    busiest = np.argmax(most / ports, axis=1)
    return most[np.arange(count), busiest].astype(np.int64), ports[busiest]
