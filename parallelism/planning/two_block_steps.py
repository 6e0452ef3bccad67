"""`TwoBlockSteps`: the events of a model's pieces, laid out once on the model with one block and with two in a stage.

The events of n blocks follow from those of two, because every event says to which block it belongs.  Of the stages only
one between others is laid out with two blocks, unless backwards are split: a second block does the same in every stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, compress
from math import prod
from typing import Any, NamedTuple

import numpy as np

from parallelism.ir import Expression, Function
from parallelism.ir.core import Extent
from parallelism.ir.core.extents import specialized
from parallelism.memoized import memoized
from parallelism.planning.dealing import EXPERTS_OVER
from parallelism.planning.settings import transforms_of
from parallelism.planning.trained import BATCH, TrainedModel
from parallelism.symbolic.events import (
    COLLECTIVE,
    SIZE,
    Event,
    Events,
    SymbolicEvents,
    Unpriceable,
    repeated,
)
from parallelism.symbolic.orders import FIRST, LAST, MIDDLE, ONLY
from parallelism.symbolic.pieces import EndPieces, StepPieces, Updates, inside_of
from parallelism.symbolic.stages import Inside, Split, SymbolicStage, with_second_block
from parallelism.training.layer_blocks import WHOLE, LayerBlocks
from parallelism.training.sequence_split import SequenceSplit
from parallelism.transforms import Parts, Pipeline, Recompute, Step, Strategy
from parallelism.transforms.words import REPLICA


class ExpertPattern(NamedTuple):
    """How experts are split, without numbers."""

    own: str = ""
    """Of the axis of their own: ``split``, over several devices; ``alone``, these are all that share the batch, and ZeRO is
    over them alone; empty, over none."""
    over: str = EXPERTS_OVER[0]
    """The setting ``experts_over``."""


class Pattern(NamedTuple):
    """A strategy without numbers."""

    in_stages: bool
    """Whether there are several stages."""
    split: bool
    """Whether backwards are split into halves."""
    tp: bool
    sp: bool
    cp: int
    recompute: str
    zero: int
    """For actions 0 or 1, because those of stages 1 and 2 are the same; 0 where `TwoBlockSteps.zero` says so."""
    several: bool = True
    """Whether there are several microbatches, whose gradients are added up."""
    registered: tuple[tuple[str, Any], ...] = ()
    """The settings that were registered from outside, with their values."""
    experts: ExpertPattern = ExpertPattern()
    sequences: SequenceSplit = SequenceSplit()
    """How the sequences are dealt to the ``cp`` devices."""
    instances: int = 1
    """So many groups of replicas hold each what ZeRO splits."""

    @property
    def of_sequences(self) -> dict[str, int]:
        """The devices along the axes that split the sequences."""
        return self.sequences.axes(self.cp)


class Known(NamedTuple):
    """Which events were laid out: those of actions, or those of ends, maybe of several replicas."""

    what: str
    pattern: Pattern
    replicated: bool = False


class Uneven(NamedTuple):
    """An extent whose parts differ by one between replicas: the first have the larger ones."""

    largest: Expression
    """The larger part, which is rounded up: one atom."""
    axes: tuple[str, ...]
    """The axes over which it is split, outermost first."""
    whole: int
    """The extent as a number."""


@lru_cache(maxsize=8)
def two_block_steps(model: TrainedModel, *, fused: bool | str, overlapping: bool) -> TwoBlockSteps:
    """`TwoBlockSteps` with these arguments; those of another search for the same model are used again."""
    return TwoBlockSteps(model, fused=fused, overlapping=overlapping)


@dataclass(frozen=True, eq=False)
class ConditionalEvents:
    """Events with two conditions: extents that must divide evenly, and extents whose parts must have more than one
    element."""

    events: SymbolicEvents
    splits: frozenset[Split]
    several: frozenset[Split] = frozenset()
    replicas: frozenset[tuple[Extent, tuple[str, ...], Any]] = frozenset()
    """Extents whose parts are equal on all replicas where they divide evenly, the axes, and the largest part."""

    def __reduce__(self) -> tuple[type[ConditionalEvents], tuple[Any, ...]]:
        return ConditionalEvents, (self.events, self.splits, self.several, self.replicas)

    def uneven(self, **numbers: int) -> list[Uneven]:
        """The extents whose parts differ between replicas, sorted; empty where all replicas have equal parts."""
        found = []
        for extent, axes, largest in self.replicas:
            whole: Any = specialized(extent, numbers)
            if whole % prod(numbers[axis] for axis in axes):
                found.append(Uneven(largest, axes, whole))
        return sorted(found, key=str)

    def at_parts(self, smaller: Iterable[Uneven], **numbers: int) -> Events:
        """The events of a device that has not the largest part of these extents.

        `Unpriceable` where a collective has another size that is no part of a joined call and no all_reduce, all of whose
        members have equal parts.
        """
        given = {}
        for part, axes, whole in smaller:
            ((((atom, _),), _),) = part.terms
            given[atom] = whole // prod(numbers[axis] for axis in axes)
        events = self.events
        largest, values = events.formulas.at(numbers), events.formulas.at(numbers, given)
        for event in np.flatnonzero(events.are(COLLECTIVE)).tolist():
            kind, payload = events.kinds[event], events.index[event, 0]
            if not (kind.joined or kind.name == "all_reduce") and values[payload] != largest[payload]:
                raise Unpriceable(f"replicas have parts of unequal sizes in {kind.name}")
        return Events(events, values)

    @memoized
    def known_at(self, numbers: tuple[tuple[str, int], ...]) -> Events:
        """`at` these numbers, once for all patterns that have these events."""
        return self.at(**dict(numbers))

    def at(self, **numbers: int) -> Events:
        """The events for these numbers.  `Unpriceable` if parts are uneven, or have one element."""
        for extent, axes in (*self.splits, *self.several):
            of: Any = specialized(extent, numbers)
            parts = prod(numbers[axis] for axis in axes)
            is_uneven = of % parts != 0 and (extent, axes) in self.splits
            if is_uneven or (1 < of <= parts and (extent, axes) in self.several):
                how = "not split evenly" if is_uneven else "split into parts of one"
                raise Unpriceable(f"a dim of {of} is {how} over {' and '.join(axes)}")
        return self.events.at(numbers)


Sections = Mapping[Any, Sequence[Event]]


@dataclass(frozen=True, eq=False)
class LaidOut:
    """Events by section, with the conditions of `ConditionalEvents`."""

    sections: Sections
    splits: frozenset[Split]
    several: frozenset[Split] = frozenset()
    replicas: frozenset[tuple[Extent, tuple[str, ...], Any]] = frozenset()


class TwoBlockSteps:
    """Events by pattern, rows of a microbatch, and devices of ``tp``, ``ep`` and ``dp``.  `Unpriceable` for uneven shards
    inside a stage; those of replicas may be uneven."""

    def __init__(self, model: TrainedModel, *, fused: bool | str, overlapping: bool = False) -> None:
        """``fused`` and ``overlapping`` as for `parallelism.execution.operation_on`."""
        self.model, self.fused, self.overlapping = model, fused, overlapping
        self.known: dict[Known, ConditionalEvents] = {}
        """The events that were laid out before, here or by another process (`learn`)."""

    def learn(self, known: Mapping[Known, ConditionalEvents]) -> None:
        """Takes events that another process has laid out.  Equal ones become one, which is priced once."""
        for key, found in known.items():
            self.known.setdefault(key, self._once(found) if key.what == "actions" else found)

    def zero(self, stage: int, *, sp: bool, cp: int, ep: bool = False) -> int:
        """The stage of ZeRO that the actions of stages depend on: none, if only sums over replicas differ.

        Under sequence, context and expert parallelism it says where sums over devices of a stage are taken, and it keeps ops
        apart that would be one chain.
        """
        return min(stage, 1) if sp or cp > 1 or ep or self.fused or self.overlapping else 0

    @memoized
    def actions(self, pattern: Pattern, rows: int, tp: int, ep: int = 1) -> Events:
        """The actions of stages, for so many rows on each of the ``ep`` devices that share a microbatch."""
        numbers = {BATCH: rows * ep, "tp": tp, **pattern.of_sequences, "ep": ep}
        return self._actions(pattern).known_at(tuple(numbers.items()))

    @memoized
    def ends(
        self, pattern: Pattern, tp: int, dp: int, ep: int = 1, *, smaller: frozenset[Uneven] = frozenset()
    ) -> Events:
        """What a device holds during the step, and what it does at the end.  ``inputs`` are for one row of a device.  It
        has the largest parts, but of ``smaller``."""
        found, numbers = self._ends(pattern, dp > 1), _numbers_of_ends(pattern, tp, dp, ep)
        return found.at_parts(smaller, **numbers) if smaller else found.at(**numbers)

    def uneven(self, pattern: Pattern, tp: int, dp: int, ep: int = 1) -> list[Uneven]:
        """What replicas have parts of unequal sizes of at the end."""
        return self._ends(pattern, dp > 1).uneven(**_numbers_of_ends(pattern, tp, dp, ep))

    @property
    def layer_blocks(self) -> LayerBlocks:
        """Which layers are a block."""
        return WHOLE if self.model.is_whole else self.model.layer_blocks

    @cached_property
    def name(self) -> str:
        """The name of the program of the loss."""
        return Parts.of(self._step_of(1 + self.model.first_alike)).forward.name

    def _actions(self, pattern: Pattern) -> ConditionalEvents:
        """The events of all stages with one block and with two.

        A whole backward does for a second block what it does in a stage between the first and the last.  A half does
        not: the first stage sends no gradient, so there the second half has the work of both.
        """
        key = Known("actions", pattern)
        if key not in self.known:
            with _unpriceable():
                own = self._action_sections(pattern, 1)
                if self.model.is_whole:
                    self.known[key] = self._events_of_actions(own, own, _of_whole(own))
                    return self.known[key]
                middle = self._action_sections(pattern._replace(in_stages=True), 1)
                two = self._action_sections(pattern, 2) if pattern.split else None
                self.known[key] = self._events_of_actions(own, middle, two)
        return self.known[key]

    @memoized
    def _events_of_actions(self, own: LaidOut, middle: LaidOut, two: LaidOut | None) -> ConditionalEvents:
        """The events of stages with one block, and with ``two``: None, if a second block does what it does in the
        ``middle``."""
        first = self.model.first_alike
        further = (
            dict(_of_two_blocks(own.sections, middle.sections, first=first)) if two is None else two.sections
        )
        return self._once(
            ConditionalEvents(
                SymbolicEvents.of({**own.sections, **further}.items(), first=first),
                own.splits | middle.splits,
            )
        )

    def _once(self, found: ConditionalEvents) -> ConditionalEvents:
        """The first events of actions that are equal to these."""
        return self._known_events.setdefault((found.events.made_of, found.splits), found)

    @cached_property
    def _known_events(self) -> dict[Any, ConditionalEvents]:
        """The different events of actions, by what they are made of."""
        return {}

    def _ends(self, pattern: Pattern, replicated: bool) -> ConditionalEvents:
        key = Known("ends", pattern, replicated)
        if key not in self.known:
            self.known[key] = self._events_of_ends(pattern, replicated=replicated)
        return self.known[key]

    def _events_of_ends(self, pattern: Pattern, *, replicated: bool) -> ConditionalEvents:
        with _unpriceable():
            own = self._end_sections(pattern, replicated=replicated)
            held = self._held_by_two(own, pattern, replicated=replicated)
            return ConditionalEvents(
                SymbolicEvents.of({**own.sections, **held}.items(), first=self.model.first_alike),
                own.splits,
                own.several,
                own.replicas,
            )

    def _held_by_two(self, own: LaidOut, pattern: Pattern, *, replicated: bool) -> Sections:
        """What stages of two blocks hold, from those of one block."""
        if self.model.is_whole:
            return {name: _of_whole(own).sections[name] for name in [((ONLY, 2), "held")]}
        middle = self._end_sections(pattern._replace(in_stages=True), replicated=replicated).sections
        places = {place for (place, _), _ in own.sections} - {MIDDLE}
        return {
            ((place, 2), "held"): _of_two_sizes(own.sections[(place, 1), "held"], middle, "held")
            for place in places
        }

    @memoized
    def _action_sections(self, pattern: Pattern, blocks: int) -> LaidOut:
        kinds = "FIW" if pattern.split else "FB"
        pieces = self._pieces(pattern._replace(split=False, several=True), blocks)
        return self._actions_of(pieces, _labels(pattern, blocks), kinds, several=pattern.several)

    @memoized
    def _actions_of(
        self, pieces: StepPieces, labels: Sequence[tuple[int, int]], kinds: str, *, several: bool
    ) -> LaidOut:
        """The actions of pieces, which several patterns may have."""
        return LaidOut(dict(pieces.actions(labels, kinds, several=several)), frozenset(pieces.splits(kinds)))

    @memoized
    def _end_sections(self, pattern: Pattern, *, replicated: bool) -> LaidOut:
        """What stages hold, and the ends of stages with one block and with two."""
        zero = self.zero(pattern.zero, sp=pattern.sp, cp=pattern.cp, ep=bool(pattern.experts.own))
        stages = self._pieces(pattern._replace(zero=zero), 1)
        replicas = _replicas_of(pattern, replicated=replicated)
        labels = _labels(pattern, 1)
        # What is updated has the blocks of a first stage; those of the others are as the last of them.
        blocks = self.layer_blocks
        before = [blocks.layer_of(block) for block in accumulate(self._counts(labels)[:-1])]
        first = [0, *(layer - blocks.before for layer in before)]
        ends = EndPieces(stages.stages, first, replicas, blocks.each)
        updated = pattern._replace(in_stages=False, recompute="none")
        step = self._updated_step(updated, replicated=replicated)
        names = {value.name for value in step.parts.parameters}  # scales of earlier steps are among them
        updates = self._updates(
            updated,
            tuple([each for each in ends.layouts if each[0] in names]),
            tuple([each for each in ends.pending if each[0] in names]),
            replicated=replicated,
        )
        return LaidOut(
            dict(ends.sections(updates, labels)),
            frozenset(updates.splits),
            frozenset(updates.several),
            frozenset(updates.splits_of_replicas),
        )

    @memoized
    def _updates(
        self,
        pattern: Pattern,
        layouts: tuple[tuple[str, Any], ...],
        pending: tuple[tuple[str, tuple[str, ...]], ...],
        *,
        replicated: bool,
    ) -> Updates:
        """The update of two blocks, and of what comes before and after them."""
        step = self._updated_step(pattern, replicated=replicated)
        replicas = _replicas_of(pattern, replicated=replicated)
        return Updates(step, layouts, pending, self._inside(pattern), replicas, self.fused, self.layer_blocks)

    def _updated_step(self, pattern: Pattern, *, replicated: bool) -> Step:
        """The step of two blocks, and of what comes before and after them, of which `_updates` has the update."""
        of_context = not replicated and pattern.cp > 1  # then these are the replicas that ZeRO splits over
        splits_state = self._splits_state(pattern) and not of_context
        return self._step(pattern, 2, replicated=replicated or splits_state)

    @staticmethod
    def _splits_state(pattern: Pattern) -> bool:
        """Whether ZeRO needs the axis of replicas, whatever its extent."""
        return pattern.zero > 0 and pattern.experts.own != "alone"

    def _inside(self, pattern: Pattern) -> Inside:
        own = pattern.experts.own
        # Experts that are split over others alone name their own axis as well, of one device.
        alone = {} if own or pattern.experts.over == EXPERTS_OVER[0] else {"ep": 1}
        return {
            **alone,
            **inside_of(
                ep=0 if own else 1, **pattern.of_sequences, tp=self.model.only_tp if pattern.tp else 1
            ),
        }

    @memoized
    def _pieces(self, pattern: Pattern, blocks: int) -> StepPieces:
        """The pieces of a step with the stages of `_labels`, on one replica.

        Where stages that keep everything are the same, so are those of which something runs again: what runs again is
        chosen by its region, and it has the layouts of what is kept.
        """
        if pattern.recompute == "none":
            return self._laid_out_pieces(pattern, blocks)
        kept = self._pieces(pattern._replace(recompute="none"), blocks)
        key = pattern.recompute, *map(id, kept.stages)  # `_known_stages` keeps them alive
        if key not in self._known_again:
            self._known_again[key] = self._laid_out_pieces(pattern, blocks)
        return self._known_again[key]

    def _laid_out_pieces(self, pattern: Pattern, blocks: int) -> StepPieces:
        step = self._step(pattern, blocks, replicated=self._splits_state(pattern))
        pieces = StepPieces(
            step,
            len(_labels(pattern, blocks)),
            self._inside(pattern),
            self.fused,
            self.overlapping,
            self._known_stages,
            self.layer_blocks,
        )
        return self._known_pieces.setdefault(pieces.made_of, pieces)

    @cached_property
    def _known_stages(self) -> dict[Any, SymbolicStage]:
        """See `StepPieces.known`."""
        return {}

    @cached_property
    def _known_again(self) -> dict[Any, StepPieces]:
        """The pieces of steps of which something runs again, by that and by the stages that keep it."""
        return {}

    @cached_property
    def _known_pieces(self) -> dict[Any, StepPieces]:
        """The different pieces, by what they are made of: ZeRO, say, may change nothing but the update."""
        return {}

    def _step(self, pattern: Pattern, blocks: int, *, replicated: bool) -> Step:
        step = self._kept_step(pattern._replace(recompute="none"), blocks, replicated=replicated)
        if pattern.recompute == "none":
            return step
        return step.with_recompute((Recompute(self.model.recomputed[pattern.recompute]),))

    def _counts(self, labels: Sequence[tuple[int, int]]) -> list[int]:
        """The blocks of each stage that is laid out: of a first stage also those before the first that is like others."""
        if self.model.is_whole:
            return [1]
        counts = []
        for place, blocks in labels:
            unlike = self.model.first_alike if place in (FIRST, ONLY) else 0
            counts.append(blocks + unlike)
        return counts

    @memoized
    def _kept_step(self, pattern: Pattern, blocks: int, *, replicated: bool) -> Step:
        """The step, of which nothing runs again."""
        each = self._counts(_labels(pattern, blocks))
        several = {True: 2, False: 1}  # any number above 1 makes the same transform
        parts = transforms_of(
            self.model,
            {
                "dp": several[replicated],
                "instances": pattern.instances,
                "cp": pattern.cp,
                "exchange": pattern.sequences,
                "ep": several[bool(pattern.experts.own)],
                "experts_over": pattern.experts.over,
                "tp": several[pattern.tp],
                "zero": pattern.zero,
                "sp": pattern.sp,
                **dict(pattern.registered),
            },
        )
        begin = self.model.begin_of(each)
        return Step(self._program(sum(each), tuple(parts)), Pipeline("pp", 1, "1f1b", 1, begin, BATCH))

    @memoized
    def _program(self, blocks: int, parts: tuple[Any, ...]) -> Function:
        return self._transformed(blocks, tuple(Strategy(*parts).in_order(self._step_of(blocks))))

    @memoized
    def _transformed(self, blocks: int, transforms: tuple[Any, ...]) -> Function:
        """The step after some transforms; strategies that begin with the same ones share what these make."""
        if not transforms:
            return self._step_of(blocks)
        *before, last = transforms
        program = last(self._transformed(blocks, tuple(before)))
        assert isinstance(program, Function)
        return program

    @memoized
    def _step_of(self, blocks: int) -> Function:
        return self.model.of_blocks(blocks).step


def _numbers_of_ends(pattern: Pattern, tp: int, dp: int, ep: int) -> dict[str, int]:
    """The numbers for the symbols of an end."""
    return {
        BATCH: ep,
        "tp": tp,
        **pattern.of_sequences,
        "ep": ep,
        "dp": dp // pattern.instances,
        REPLICA: pattern.instances,
    }


def _replicas_of(pattern: Pattern, *, replicated: bool) -> Inside:
    """The axes of the replicas, of which ``dp`` has any number of devices."""
    return inside_of(**{REPLICA: pattern.instances, "dp": 0 if replicated else 1})


def _labels(pattern: Pattern, blocks: int) -> tuple[tuple[int, int], ...]:
    """The stages that are laid out: the place of each and its blocks."""
    if not pattern.in_stages:
        return ((ONLY, blocks),)
    between = ((MIDDLE, 1), (MIDDLE, 2)) if blocks == 1 else ()
    return (FIRST, blocks), *between, (LAST, blocks)


@contextmanager
def _unpriceable() -> Iterator[None]:
    """Tells any ``ValueError`` as an `Unpriceable`."""
    try:
        yield
    except Unpriceable:
        raise
    except ValueError as error:
        raise Unpriceable(str(error)) from error


def _of_whole(own: LaidOut) -> LaidOut:
    """What is laid out of a whole program, as that of two blocks: it has one, so nothing asks what a second one does."""
    return replace(own, sections={((ONLY, 2), *what): events for (_, *what), events in own.sections.items()})


def _of_two_blocks(
    own: Sections, middle: Sections, *, first: int = 0
) -> Iterator[tuple[Any, Sequence[Event]]]:
    """The sections of stages with two blocks, from those with one, and from those of a stage between others."""
    for ((place, blocks), *what), events in own.items():
        if place == MIDDLE or blocks == 2:
            continue
        if events and events[0].kind.what == SIZE:
            yield ((place, 2), *what), _of_two_sizes(events, middle, *what)
        else:
            two = middle[(MIDDLE, 2), *what]
            yield ((place, 2), *what), with_second_block(events, compress(two, repeated(two)), first=first)


def _of_two_sizes(own: Sequence[Event], middle: Sections, *what: str) -> list[Event]:
    """The sizes of a stage with two blocks: a second block adds to each what it adds in a stage between others."""
    one, two = (middle[(MIDDLE, blocks), *what] for blocks in (1, 2))
    sizes: list[Any] = [[event.extents[0] for event in events] for events in (own, one, two)]
    return [
        Event(event.kind, [mine + more - less]) for event, mine, less, more in zip(own, *sizes, strict=True)
    ]
