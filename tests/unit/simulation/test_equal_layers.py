"""The events of many layers, from those of few."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from parallelism.collectives import MemberCall
from parallelism.simulation.device_events import DeviceEvents, EventRow, PieceRow
from parallelism.simulation.equal_layers import MARK, UnequalLayers, with_layers

GATHER = MemberCall("all_gather", np.dtype(np.float32), (5,))
SUM = MemberCall("all_reduce", np.dtype(np.float32), (7,), op="sum")


def call(events: DeviceEvents, name: MemberCall, axis: str, work: int | None = None) -> None:
    events.add_collective((axis,), (axis,), name, name.kind, "float32", work)


def program(widths: Sequence[int]) -> DeviceEvents:
    """Layers of these widths: each is gathered one layer ahead and computes, and the sum of a layer is waited for behind
    the next one; then all memory is freed, and every layer is updated."""
    events, count = DeviceEvents(), len(widths)
    events.rows.append(EventRow("compute", "embedding", 3.0, 2.0))
    call(events, GATHER, "dp", 1)
    for layer, width in enumerate(widths):
        if layer + 1 < count:
            call(events, GATHER, "dp", 2 * layer + 3)
        events.add_wait("all_gather", 2 * layer + 1)
        events.rows.append(EventRow("compute", "product", 8.0 * width, 16.0, "float32", phase="F"))
        events.add_memory("activations", 8 * width, None, None)
        call(events, SUM, "tp")
        call(events, SUM, "dp", 2 * layer + 2)
        if layer:
            events.add_wait("all_reduce", 2 * layer)
    events.add_wait("all_reduce", 2 * count)
    events.add_memory("activations", -8 * sum(widths), None, None)
    events.rows += [EventRow("compute", "update", 4.0 * width) for width in widths]
    events.works = 2 * count
    return events


def renumbered(events: DeviceEvents) -> list[EventRow]:
    """The events, whose asynchronous operations are numbered in the order in which they start."""
    numbers: dict[int, int] = {}
    rows = []
    for row in events.rows:
        if row.work is not None:
            row = row._replace(work=numbers.setdefault(row.work, len(numbers) + 1))
        rows.append(row)
    return rows


@pytest.mark.parametrize("layers", [0, 1, 2, 9])
def test_each_layer_more_adds_the_events_of_the_one_before(layers: int) -> None:
    found, whole = with_layers(program([6] * 3), program([6] * 4), layers), program([6] * (3 + layers))
    assert found.rows == renumbered(whole)
    assert found.collectives == whole.collectives and found.counts == whole.counts and found.works == whole.works


def test_programs_without_events_stay_empty() -> None:
    assert with_layers(DeviceEvents(), DeviceEvents(), 3).rows == []


@pytest.mark.parametrize(("few", "more"), [([6] * 3, [6, 6, 6, 5]), ([5] * 3, [6] * 4), ([6] * 4, [6] * 3)])
def test_layers_that_differ_are_not_repeated(few: list[int], more: list[int]) -> None:
    with pytest.raises(UnequalLayers):
        with_layers(program(few), program(more), 5)


def test_events_that_a_layer_has_besides_are_repeated_beside_equal_ones_alone() -> None:
    first, other = EventRow("compute", "first"), EventRow("compute", "other")
    assert with_layers(DeviceEvents([first]), DeviceEvents([first, first]), 3).rows == [first] * 4
    with pytest.raises(UnequalLayers, match="what a layer adds does not follow an equal layer"):
        with_layers(DeviceEvents([first]), DeviceEvents([first, other]), 3)


def test_a_call_that_grows_with_the_layers_is_not_repeated() -> None:
    """Such as a bucket of the sums of all layers, which may be two calls when it is full."""
    few, more = program([6] * 3), program([6] * 4)
    for events, count in ((few, 3), (more, 4)):
        call(events, MemberCall("all_reduce", np.dtype(np.float32), (7 * count,), op="sum"), "dp")
    with pytest.raises(UnequalLayers):
        with_layers(few, more, 5)


def test_a_wait_for_what_started_elsewhere_is_not_repeated() -> None:
    events = DeviceEvents()
    events.add_wait("all_reduce", 1)
    with pytest.raises(UnequalLayers, match="a wait for all_reduce is for what did not start here"):
        with_layers(events, events, 5)


def test_messages_are_numbered_by_their_peers_and_tags() -> None:
    def program(layers: int) -> DeviceEvents:
        events = DeviceEvents()
        for _ in range(layers):
            events.add_message("send", 1, 5, 8, "float32", "pp", None)
            events.add_message("recv", 1, 6, 8, None, "pp", None)
        return events

    found, whole = with_layers(program(2), program(3), 4), program(6)
    assert found.rows == whole.rows and found.along == whole.along


def test_pieces_are_not_repeated() -> None:
    events = DeviceEvents([EventRow("compute", "piece")], pieces=[PieceRow((0,), DeviceEvents(), 0)])
    with pytest.raises(UnequalLayers, match="pieces are not repeated"):
        with_layers(events, events, 5)


def test_a_call_that_may_grow_is_that_of_all_layers() -> None:
    few, more, whole = (program([6] * count) for count in (3, 4, 8))
    for events, count in ((few, 3), (more, 4), (whole, 8)):
        call(events, MemberCall("all_reduce", np.dtype(np.float32), (7 * count,), op="sum"), "dp")
    found = with_layers(few, more, 5, lambda axes, few, all: axes == ("dp",) and few.nbytes == 84 and all.nbytes == 224)
    assert found.collectives == whole.collectives
    with pytest.raises(UnequalLayers):
        with_layers(few, more, 6, lambda axes, few, all: all.nbytes == 224)


def test_the_end_waits_for_what_each_backward_started() -> None:
    """Backwards are from the last stage on, and the end goes through the stages from the first on, twice."""
    def program(stages: int) -> DeviceEvents:
        events = DeviceEvents()
        for stage in reversed(range(stages)):
            events.rows.append(MARK)
            call(events, SUM, "dp", 2 * stage + 1)
            call(events, SUM, "dp", 2 * stage + 2)
        events.rows.append(MARK)
        for stage in range(stages):
            events.add_wait("all_reduce", 2 * stage + 1)
            events.rows.append(EventRow("compute", "update"))
        for stage in range(stages):
            events.add_wait("all_reduce", 2 * stage + 2)
        return events

    assert with_layers(program(3), program(4), 5).rows == renumbered(program(8))


def test_waits_may_be_in_an_order_that_is_neither_that_of_starts_nor_its_reverse() -> None:
    """The update of a layer, from the first on, waits for the second, the first and the third sum of its backward, those
    before, and the maxima of all products behind all of it."""
    def program(layers: int) -> DeviceEvents:
        events = DeviceEvents()
        for layer in reversed(range(layers)):
            for number in range(3):
                call(events, SUM, "dp", 4 * layer + number + 1)
        for layer in reversed(range(layers)):
            call(events, SUM, "dp", 4 * layer + 4)
        for layer in range(layers):
            for number in (1, 0, 2):
                events.add_wait("all_reduce", 4 * layer + number + 1)
                events.rows.append(EventRow("compute", "update", number))
        for layer in range(layers):
            events.add_wait("all_reduce", 4 * layer + 4)
            events.rows.append(EventRow("compute", "recorded"))
        return events

    assert with_layers(program(3), program(4), 6).rows == renumbered(program(9))


def test_a_wait_is_for_what_is_under_way_and_like_that_of_few_layers() -> None:
    """The wait is for the third call in all programs: with further layers that is another one."""
    def program(*axes: str) -> DeviceEvents:
        events = DeviceEvents()
        for number, axis in enumerate(axes, 1):
            call(events, GATHER, axis, number)
        events.add_wait("all_gather", 3)
        return events

    found = with_layers(program(*["dp"] * 3), program(*["dp"] * 4), 2)
    assert found.rows == renumbered(program(*["dp"] * 5))
    with pytest.raises(UnequalLayers, match="with all layers a device waits for another all_gather than with few"):
        with_layers(program("dp", "dp", "tp"), program("dp", "dp", "dp", "tp"), 1)


def test_nothing_is_waited_for_twice() -> None:
    """The second wait is for the third call, or with a layer more for the second: then with two more for the first."""
    def program(calls: int, target: int) -> DeviceEvents:
        events = DeviceEvents()
        for number in range(1, 1 + calls):
            call(events, GATHER, "dp", number)
        events.add_wait("all_gather", 1)
        events.add_wait("all_gather", target)
        return events

    assert with_layers(program(3, 3), program(4, 2), 1).rows == program(4, 2).rows
    with pytest.raises(UnequalLayers, match="with all layers a device waits for another all_gather than with few"):
        with_layers(program(3, 3), program(4, 2), 2)


def test_an_equal_event_is_found_behind_what_a_layer_has_besides_although_what_follows_it_grows() -> None:
    def program(layers: int) -> DeviceEvents:
        events = DeviceEvents()
        for _ in range(layers):
            events.add_memory("inputs", -8, None, None)
            events.add_memory("inputs", -4, None, None)
        events.add_memory("inputs", -6, None, None)
        call(events, MemberCall("all_reduce", np.dtype(np.float32), (layers,), op="sum"), "tp")
        return events

    found, whole = with_layers(program(2), program(3), 4, lambda axes, few, all: True), program(6)
    assert found.rows == whole.rows and found.collectives == whole.collectives
