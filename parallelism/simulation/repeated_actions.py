"""The actions of a schedule on a `TypedDevice`: each kind of action runs once, and its events are repeated as columns.

The events of an action are those of `parallelism.pipelining.execution.run_actions`, in its order:

    the wait for the message that the action takes, or its receive if none was posted
    the posted receive of the message that the next action takes
    the events of the action itself
    the send of its result

Two actions of one kind on a stage, for microbatches of one size, differ in numbers alone: those of the microbatch, of
tags, of asynchronous operations, and of collectives of a group.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Bools, Ints
from parallelism.events import ABSENT, Columns, Table
from parallelism.events.columns import combined
from parallelism.layouts.stages import Part
from parallelism.pipelining import (
    MESSAGES,
    NOBODY,
    Action,
    Passed,
    Pipeline,
    event_name,
    parts_of,
    passed_columns,
    run_action,
)
from parallelism.pipelining.actions import earlier
from parallelism.simulation.device_events import FIELDS, Bulk, CollectiveRow, DeviceEvents
from parallelism.simulation.repeated_stages import RepeatingStage
from parallelism.simulation.typed_device import TypedDevice, TypedWork


def run_repeated(
    device: TypedDevice,
    pipeline: Pipeline,
    axis: str | None,
    stages: Mapping[int, RepeatingStage],
    actions: Sequence[Action],
) -> None:
    """Adds the events that `run_actions` with these arguments would add.

    No action may have messages of its own, other than those between the stages.
    """
    if not actions:
        return
    kinds = _Kinds(device, pipeline, axis, stages)
    moves = passed_columns(pipeline, actions)
    if all(stage.closing is None for stage in stages.values()):
        different, first, place = np.unique(kinds.numbers(actions), return_index=True, return_inverse=True)
        found = [_Look(0, 0, 0, 0)] * len(different)
        for one in np.argsort(first).tolist():
            found[one] = kinds.run(actions[first[one]], Passed(*moves[:, first[one]].tolist()))
        looks = np.array(found, np.int64)[place]
    else:
        looks = np.array(list(map(kinds.of, actions, map(Passed, *moves.tolist()))), np.int64)
    _add(device, actions, moves, kinds, looks.T, listed=pipeline.schedule.lists_messages)


Result = tuple[int, bool, Part]
"""Results that are alike: the stage, whether they are those of forwards, and the part of the batch."""


class _Look(NamedTuple):
    """Where the events of an action stand in `_Kinds.events`, the different events of a device."""

    start: int
    end: int
    received: int
    """The receive of the message that the action takes, or that a listed ``RECV`` receives."""
    sent: int
    """The send of the result; -1 if there is no result."""


class _Kinds:
    """The different events of a device: those of each kind of action, run once, and its messages."""

    def __init__(
        self, device: TypedDevice, pipeline: Pipeline, axis: str | None, stages: Mapping[int, RepeatingStage]
    ) -> None:
        self.device, self.pipeline, self.axis, self.stages = device, pipeline, axis, stages
        self.events = DeviceEvents()
        self.events.add_wait("recv", 0)
        self.events.add_wait("send", 0)
        self.wait_of_recv, self.wait_of_send = 0, 1
        self.part_of: dict[int, str] = {}
        """The parts of actions, by the place of their compute event, whose name has the number of the microbatch."""
        self.alike = {number: stage.programs.all_alike(stage.parts) for number, stage in stages.items()}
        self.left: dict[TypedWork, Action] = {}
        """The collectives that an action leaves under way."""
        self.known: dict[tuple[int, str, Part], _Look] = {}
        """The events of actions by stage, kind and part."""
        self._results: dict[Result, Any] = {}
        self._sent: dict[Result, int] = {}
        self._received: dict[Result, tuple[Any, int]] = {}
        """What the actions with these results take, and the places of the events."""
        self._inputs: dict[tuple[int, Part, str], Any] = {}
        self._run_for: dict[tuple[int, int], set[str]] = {}
        """The kinds of actions that ran on a stage for a microbatch."""

    def numbers(self, actions: Sequence[Action]) -> Ints:
        """A number for each action: equal for those of one kind on one stage, for parts of the batch that are alike."""
        parts: dict[Part, int] = {}
        part_of = {}
        for number, alike in self.alike.items():
            part_of[number] = np.array([parts.setdefault(part, len(parts)) for part in alike])
        stages, kinds, microbatches = zip(*actions, strict=True)
        stage, microbatch, different = np.array(stages), np.array(microbatches), list(dict.fromkeys(kinds))
        part = np.zeros(len(actions), np.int64)
        for number in part_of:
            part[stage == number] = part_of[number][microbatch[stage == number]]
        return combined(part, stage, np.array(list(map(different.index, kinds))))

    def of(self, action: Action, move: Passed) -> _Look:
        """The events of an action.  The last backward of a stage is an action of its own, and what comes after it on
        the device has other prices, if it leaves the first collectives under way."""
        number, kind, microbatch = action
        if kind not in MESSAGES and self.stages[number].closes(kind, microbatch):
            before = bool(self.device.under_way)
            look = self.run(action, move)
            self.left.update(dict.fromkeys({*self.device.under_way.values()}.difference(self.left), action))
            if before != bool(self.device.under_way):
                self.known.clear()
            return look
        return self.known.get((number, kind, self.alike[number][microbatch])) or self.run(action, move)

    def run(self, action: Action, move: Passed) -> _Look:
        """The events of an action, the first of its kind, which runs.  If need be, those before it on the stage for its
        microbatch run again."""
        number, kind, microbatch = action
        part = self.alike[number][microbatch]
        result, x, received = (number, kind[-1] == "F", part), None, -1
        if move.source != NOBODY:
            x, received = self._receive(result, move)
        start = len(self.events.rows)
        if kind not in MESSAGES:
            self._add_action(action, x, result)
        end = len(self.events.rows)
        look = _Look(start, end, received, -1 if move.target == NOBODY else self._send(result, move))
        self.known[number, kind, part] = look
        return look

    def _send(self, result: Result, move: Passed) -> int:
        """The place of the event that sends such a result; -1 if there is no result."""
        if result in self._results and result not in self._sent:
            y = self._results[result]
            self._sent[result] = len(self.events.rows)
            self.events.add_message("send", move.target, move.given, y.nbytes, y.dtype_name, self.axis, None)
        return self._sent.get(result, -1)

    def _receive(self, result: Result, move: Passed) -> tuple[Any, int]:
        """The message that an action with this result takes, and the place of its event."""
        if result not in self._received:
            assert self.device.incoming is not None
            x: Any = self.device.incoming(move.taken)
            self._received[result] = x, len(self.events.rows)
            self.events.add_message("recv", move.source, move.taken, x.nbytes, None, self.axis, None)
        return self._received[result]

    def _add_action(self, action: Action, x: Any, result: Result) -> None:
        stage, events = self.stages[action.stage], self.device.events
        before, run = len(events.rows), self._run_for.setdefault((action.stage, action.microbatch), set())
        needed = earlier(action.kind)
        for kind in needed:
            if kind not in run:
                run_action(
                    self.device.device, stage, action._replace(kind=kind), self._inputs[*result[::2], kind]
                )
        events.cut(before)
        self._inputs[*result[::2], action.kind] = x
        y = run_action(self.device.device, stage, action, x)
        run |= {*needed, action.kind}
        if y is not None:
            self._results[result] = y
        names = {
            event_name(action.stage, part, action.microbatch): part for part in parts_of(stage, action.kind)
        }
        start, own = len(self.events.rows), events.since(before)
        events.cut(before)
        self.events.rows += own.rows
        self.events.collectives += [each._replace(event=start + each.event) for each in own.collectives]
        self.events.pieces += [each._replace(places=(start + each.places[0],)) for each in own.pieces]
        for place, (kind, name, *_) in enumerate(own.rows, start):
            if kind == "compute" and name in names:
                self.part_of[place] = names[name]


class _Layout(NamedTuple):
    """Where the events of all actions stand: of each action its wait, the posted receive, its own events, the send; and
    behind all of them the waits for the sends."""

    owner: Ints
    """By event, the number of its action."""
    own: Bools
    """By event, whether the action itself adds it."""
    own_looks: Ints
    """By event, the one that it looks like, if the action itself adds it."""
    takes: Bools
    """By action, whether it begins with the wait for a message; those below say which post a receive, and which send."""
    posts: Bools
    sends: Bools
    posted: Ints
    """By action, the one whose receive it posts."""
    at_take: Ints
    at_post: Ints
    at_send: Ints
    at_action: Ints
    """By action, its first event; and the place behind the last action, where the waits are."""

    @property
    def total(self) -> int:
        """The number of events but for the waits behind all."""
        return int(self.at_action[-1])


def _laid_out(names: Sequence[str], here: int, moves: Ints, looks: Ints, *, listed: bool) -> _Layout:
    source, _, target, _ = moves
    start, end, _, sent = looks
    count = len(names)
    computes = np.array([name not in MESSAGES for name in names])
    remote = (source != NOBODY) & (source != here)
    takes = remote & computes
    posts, posted = (remote & ~computes), np.arange(count)
    if not listed:
        posted = np.minimum(posted + 1, count - 1)
        posts = np.append(remote[1:], False)
    sends = (sent >= 0) & (~computes if listed else (target != NOBODY) & (target != here))

    inner = takes.astype(np.int64) + posts  # the place of an action's own events among all of it
    length = inner + (end - start) + sends
    at = np.cumsum(length) - length
    total, ends = int(length.sum()), int(np.count_nonzero(sends))
    at_take, at_post, at_send = at[takes], (at + takes)[posts], (at + length - 1)[sends]
    owner = np.append(np.repeat(np.arange(count), length), np.zeros(ends, np.int64))
    own = np.ones(total + ends, np.bool_)
    own[at_take], own[at_post], own[at_send], own[total:] = False, False, False, False
    own_looks = np.arange(total + ends) + (start - at - inner)[owner]
    at_action = np.append(at, total)
    return _Layout(owner, own, own_looks, takes, posts, sends, posted, at_take, at_post, at_send, at_action)


def _add(
    device: TypedDevice,
    actions: Sequence[Action],
    moves: Ints,
    kinds: _Kinds,
    looks: Ints,
    *,
    listed: bool,
) -> None:
    """Adds the events of all actions.  ``moves`` and ``looks`` have a row for each field of `Passed` and `_Look`."""
    stages, names, microbatches = zip(*actions, strict=True)
    number, microbatch = np.array(stages, np.int64), np.array(microbatches, np.int64)
    here = device.position(kinds.axis) if kinds.axis is not None else 0
    laid = _laid_out(names, here, moves, looks, listed=listed)
    columns = Columns.of_rows(kinds.events.rows, FIELDS)
    look, tag, work = _messages(device.events, laid, moves, kinds, looks)
    _number_later(device.events, laid, look, work, columns, kinds, actions)
    _take_messages(laid, look, tag, work, moves, kinds, looks)

    rows = columns.take(look)
    events, first = device.events, len(device.events)
    sequence = rows.numbers("sequence").copy()
    for place, collective in _repeated(kinds.events.collectives, look, events):
        sequence[place] = collective.number
        events.collectives.append(collective)
    events.pieces += [
        each._replace(places=first + np.flatnonzero(look == each.places[0])) for each in kinds.events.pieces
    ]
    of_microbatch = columns.present("microbatch")[look]
    rows = rows.with_columns(
        name=_names(columns, look, laid.owner, number, microbatch, kinds.part_of),
        microbatch=np.where(of_microbatch, microbatch[laid.owner], ABSENT),
        tag=tag,
        work=work,
        sequence=sequence,
    )
    events.add_bulk(Bulk(rows, kinds.events.peer_axis(device.mesh)[look], laid.at_action))


def _messages(
    events: DeviceEvents, laid: _Layout, moves: Ints, kinds: _Kinds, looks: Ints
) -> tuple[Ints, Ints, Ints]:
    """By event, which one it looks like, its tag and the number of its operation: of posted receives, of sends, and of
    the waits for sends."""
    _, taken, _, given = moves
    _, _, received, sent = looks
    look = np.where(laid.own, laid.own_looks, kinds.wait_of_send)
    tag, work = (np.full(len(look), ABSENT) for _ in range(2))
    started = np.sort(np.concatenate([laid.at_post, laid.at_send]))
    work[started] = events.works + 1 + np.arange(len(started))
    events.works += len(started)
    asked = laid.posted[laid.posts]
    look[laid.at_post], tag[laid.at_post] = received[asked], taken[asked]
    look[laid.at_send], tag[laid.at_send] = sent[laid.sends], given[laid.sends]
    work[laid.total :] = work[laid.at_send]
    return look, tag, work


def _number_later(
    events: DeviceEvents,
    laid: _Layout,
    look: Ints,
    work: Ints,
    columns: Columns,
    kinds: _Kinds,
    actions: Sequence[Action],
) -> None:
    """Asynchronous collectives of an action, and the waits for them, have a number for each action."""
    later = laid.own & columns.present("work")[look]
    if not later.any():
        return
    span, base = 1 + int(columns.numbers("work").max()), events.works + 1
    work[later] = (base + laid.owner * span + columns.numbers("work")[look])[later]
    events.works += span * (len(actions) + 1)
    for left, action in kinds.left.items():
        if left.number is not None:
            left.number += base + list(actions).index(action) * span


def _take_messages(
    laid: _Layout, look: Ints, tag: Ints, work: Ints, moves: Ints, kinds: _Kinds, looks: Ints
) -> None:
    """An action waits for the receive that was posted before it, or receives."""
    _, taken, _, _ = moves
    _, _, received, _ = looks
    wanted, at_take = taken[laid.takes], laid.at_take
    post = _places_of(wanted, tag[laid.at_post], laid.at_post)
    waits = (post >= 0) & (post < at_take)
    look[at_take] = np.where(waits, kinds.wait_of_recv, received[laid.takes])
    tag[at_take], work[at_take] = np.where(waits, ABSENT, wanted), np.where(waits, work[post], ABSENT)


def _places_of(wanted: Ints, tags: Ints, places: Ints) -> Ints:
    """The place of each wanted tag; -1 if it is not among the ``tags``, which differ."""
    if not len(tags):
        return np.full(len(wanted), -1)
    order = np.argsort(tags)
    found = order[np.minimum(np.searchsorted(tags, wanted, sorter=order), len(tags) - 1)]
    return np.where(tags[found] == wanted, places[found], -1)


def _repeated(
    collectives: Sequence[CollectiveRow], look: Ints, events: DeviceEvents
) -> Iterator[tuple[int, CollectiveRow]]:
    """The collectives of all actions, which are added to events, in order, with their places among the actions'.  They
    are numbered on after those of each group before."""
    of_look, first = {each.event: each for each in collectives}, len(events)
    at = np.flatnonzero(np.isin(look, list(of_look)))
    for place, one in zip(at.tolist(), look[at].tolist(), strict=True):
        _, axes, _, call = of_look[one]
        number = events.counts[axes]
        events.counts[axes] = number + 1
        yield place, CollectiveRow(first + place, axes, number, call)


def _names(
    columns: Columns, look: Ints, owner: Ints, number: Ints, microbatch: Ints, part_of: Mapping[int, str]
) -> Table:
    """The names of the events, those of actions with the numbers of their microbatches."""
    column = columns["name"]
    assert isinstance(column, Table)
    index = column.index[look]
    at = np.flatnonzero(np.isin(look, list(part_of)))
    names = [
        event_name(stage, part_of[place], k)
        for place, stage, k in zip(
            look[at].tolist(), number[owner[at]].tolist(), microbatch[owner[at]].tolist(), strict=True
        )
    ]
    index[at] = len(column.values) + np.arange(len(at))
    return Table((*column.values, *names), index)
