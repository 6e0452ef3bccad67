"""Events by columns: what goes in comes out, and what is found from columns is what plain Python finds from events."""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict
from dataclasses import fields

import numpy as np
import pytest
from drawn import up_to
from hypothesis import given, strategies as st

from parallelism.events import ABSENT, HOST, KINDS, Columns, Event, Table, column_of, whole_nanoseconds
from parallelism.events.columns import combined, sums
from parallelism.trace import Trace
from parallelism.trace.totals import RankTotals

SIZE = 4
ranks = st.integers(0, SIZE - 1)
counts = st.integers(0, 3) | st.integers(0, 2**62)
finite = st.sampled_from((0.0, 0.25, 1.5, 8.0))
maybe = st.none() | st.integers(0, 2)
SPECIAL = {
    "rank": ranks, "kind": st.sampled_from(KINDS), "name": st.sampled_from(("all_reduce", "send", "work")),
    "peer": st.none() | st.integers(HOST, SIZE - 1),
    "tag": st.none() | st.sampled_from((0, 1, -(2**63) + 1, 2**63 - 1)),
    "group": st.none() | st.lists(ranks, max_size=3).map(tuple), "phase": st.none() | st.sampled_from("FB"),
    "sources": st.lists(st.tuples(ranks, st.integers(0, 99)), max_size=3).map(tuple),
    "pairs": st.lists(st.tuples(ranks, ranks), max_size=3).map(tuple),
    "other_bytes": st.sampled_from(((), (("bool", 8),), (("int64", 1), ("float32", 9)))),
    "axes": st.sampled_from((None, ("dp",), ("tp",), ("dp", "tp"))),
    "shape": st.none() | st.lists(st.integers(0, 9), max_size=2).map(tuple),
    "nbytes": finite | finite.map(lambda x: -x),
    "bytes_sent": counts, "bytes_received": st.integers(0, 99), "messages": counts, "serial": counts,
}
OF_TYPE = {"int | None": maybe, "float": finite, "int": st.integers(0, 2), "float | None": st.none() | finite,
           "str | None": st.none() | st.text(max_size=2)}
events = st.builds(Event, **{field.name: SPECIAL.get(field.name, OF_TYPE.get(field.type)) for field in fields(Event)})
lists_of_events = st.lists(events, max_size=8)


@pytest.mark.slow
@given(lists_of_events)
def test_events_come_out_as_they_went_in(given_events):
    columns = Columns.of(given_events)
    assert list(columns.events()) == given_events and len(columns) == len(given_events)
    assert columns == Columns.of(given_events) == pickle.loads(pickle.dumps(columns))  # noqa: S301
    trace = Trace(columns, SIZE)
    assert trace.events == tuple(given_events) == tuple(trace) == tuple(map(trace.__getitem__, range(len(trace))))
    assert trace == Trace(given_events, SIZE) and hash(trace) == hash(Trace(given_events, SIZE))


@given(lists_of_events, lists_of_events, st.data())
def test_parts_are_joined_and_taken_as_lists_are(first, second, data):
    joined = Columns.joined([Columns.of(first), Columns.of(second)])
    assert list(joined.events()) == first + second and joined == Columns.of(first + second)
    places = data.draw(st.lists(st.sampled_from(range(len(joined))), max_size=5) if len(joined) else st.just([]))
    assert list(joined.take(np.array(places, np.int64)).events()) == [(first + second)[i] for i in places]
    part = data.draw(st.slices(len(joined)))
    assert Trace(joined, SIZE)[part].events == (*first, *second)[part]


@given(lists_of_events)
def test_two_traces_are_equal_just_if_their_events_are(given_events):
    trace = Trace(given_events, SIZE)
    for i, event in enumerate(given_events):
        changed = Event(*(None if field.name == "location" else getattr(event, field.name) for field in fields(Event)))
        other = Trace([*given_events[:i], changed, *given_events[i + 1:]], SIZE)
        assert (other == trace) == (changed == event)


@pytest.mark.parametrize("event", [
    Event(0, "compute", None), Event(0, "compute", ["work"], group=[0, 1]), Event(0, "send", "send", bytes_sent=1.5),
    Event(0, "wait", "wait", stage=True), Event(0, "send", "send", bytes_sent=2**70), Event(0, "send", "x", tag=ABSENT),
    Event(0, "compute", "work", flops=2**53 + 1), Event(0, "compute", "work", flops="many", shape=({},)),
])
def test_what_fits_no_column_is_kept_as_it_is(event):
    usual = Event(0, "compute", "work", bytes_sent=1, stage=1, flops=1.0)
    for some in ([event], [usual, event], [event, usual, event]):
        columns = Columns.of(some)
        assert list(columns.events()) == some
        assert [type(e.stage) for e in columns.events()] == [type(e.stage) for e in some]
        joined = Columns.joined([columns, Columns.of([usual]), columns])
        assert list(joined.events()) == [*some, usual, *some]


def test_numbers_are_arrays_and_defaults_are_nothing():
    columns = Columns.of([Event(0, "send", "send", bytes_sent=8, tag=None), Event(1, "send", "send", tag=3)])
    assert set(columns.columns) == {"rank", "kind", "name", "bytes_sent", "tag"}
    np.testing.assert_array_equal(columns["tag"], [ABSENT, 3])
    assert columns["rank"].dtype == columns["stage"].dtype == np.int64 and columns["flops"].dtype == np.float64
    assert columns["kind"].values == ("send",) and columns["kind"].index.dtype == np.int32
    assert isinstance(columns["group"], Table) and columns.values("group") == [None, None]
    assert column_of("flops", [0.0, 0.0]) is None and columns.only("tag").columns.keys() == {"tag"}


def test_a_million_events_take_tens_of_megabytes():
    event = Event(1, "collective", "all_reduce", wall_duration_seconds=0.5, bytes_sent=8, group=(0, 1), sequence=0)
    columns = Columns.of([event]).take(np.zeros(10**6, np.int64))
    taken = sum(c.index.nbytes if isinstance(c, Table) else c.nbytes for c in columns.columns.values())
    assert len(columns) == 10**6 and taken == 10**6 * (3 * 4 + 4 * 8)       # three tables, four numbers


@given(lists_of_events, st.data())
def test_filters_are_those_of_plain_python(given_events, data):
    trace = Trace(given_events, SIZE)
    choices = {"kind": st.sampled_from(KINDS), "name": st.sampled_from(("all_reduce", "work", "?")), "rank": ranks,
               "stage": maybe.filter(lambda x: x is not None), "microbatch": st.integers(0, 2),
               "phase": st.sampled_from("FB"), "peer": st.integers(HOST, SIZE)}
    wanted = {name: data.draw(value | st.lists(value, min_size=1, max_size=3)) for name, value in choices.items()
              if data.draw(st.booleans())}
    if data.draw(st.booleans()):
        wanted["axes"] = data.draw(st.sampled_from(("tp", ("dp", "tp"), ())))

    def fits(event):
        return all(getattr(event, name) in (value if isinstance(value, list) else [value])
                   for name, value in wanted.items() if name != "axes") and (
            "axes" not in wanted or event.axes == ((wanted["axes"],) if wanted["axes"] == "tp" else wanted["axes"]))

    assert list(trace.filter(**wanted)) == [event for event in given_events if fits(event)]


@up_to(200)
@given(lists_of_events, st.booleans())
def test_totals_are_those_of_plain_python(given_events, host_traffic):
    trace = Trace(given_events, SIZE, host_traffic=host_traffic)
    totals = {rank: list(RankTotals()) for rank in range(SIZE)}
    matrix, held, peaks = np.zeros((SIZE, SIZE), int), defaultdict(float), {}
    for e in given_events:
        if e.kind == "memory":
            held[e.rank] += e.nbytes
            peaks[e.rank] = max(peaks.get(e.rank, 0), int(held[e.rank]))
        if e.parent is not None:
            continue
        sum_ = totals[e.rank]
        sum_[0] += e.duration_seconds * (e.kind == "compute")
        waits = e.kind == "wait" or (e.kind in ("collective", "send", "recv") and e.work is None)
        sum_[1] += e.duration_seconds * waits
        sum_[5] += e.flops
        with_host = e.kind in ("h2d", "d2h") or e.peer == HOST
        if e.kind in ("collective", "send", "recv", "h2d", "d2h") and with_host == host_traffic:
            for place, field in ((2, "bytes_sent"), (3, "bytes_received"), (4, "messages")):
                sum_[place] += getattr(e, field)
            for source, nbytes in (*e.sources, *([(e.peer, e.bytes_received)] if e.kind == "recv" and
                                                 e.peer is not None and e.peer >= 0 else [])):
                matrix[source, e.rank] += nbytes
    assert trace.totals == {rank: RankTotals(*sum_) for rank, sum_ in totals.items()}
    assert trace.peaks() == peaks
    if not host_traffic:
        np.testing.assert_array_equal(trace.communication_matrix(), matrix)
    if given_events:
        ends = [e.start_seconds + e.duration_seconds for e in given_events]
        assert trace.makespan_seconds == max(ends) - min(e.start_seconds for e in given_events)


@given(lists_of_events, st.none() | ranks)
def test_operations_are_counted_as_in_plain_python(given_events, rank):
    expected = Counter()
    seen = set()
    for e in given_events:
        if e.parent is None and e.kind != "wait" and rank in (None, e.rank):
            key = e.name, e.group, e.sequence
            shared = e.kind == "collective" and e.sequence is not None
            expected[e.name] += not shared or key not in seen
            seen |= {key} if shared else set()
    trace = Trace(given_events, SIZE)
    assert {name: trace.count(name, rank) for name in ("all_reduce", "send", "work")} == {
        name: expected[name] for name in ("all_reduce", "send", "work")}


@given(st.lists(st.tuples(*[st.sampled_from((0, 1, 2**40, 2**62))] * 3), max_size=6))
def test_combined_numbers_agree_just_where_all_do(rows):
    keys = combined(*np.array(rows, np.int64).reshape(-1, 3).T).tolist()
    assert [[a == b for b in keys] for a in keys] == [[a == b for b in rows] for a in rows]


def test_sums_of_integers_are_exact_beyond_64_bits():
    assert sums(np.array([2**62, 2**62, 2**62, 5]), np.array([1, 1, 1, 0]), 3) == [5, 3 * 2**62, 0]


def test_whole_nanoseconds_are_found_only_where_all_are():
    times = np.arange(-5, 10**6, 997) / 1e9
    np.testing.assert_array_equal(whole_nanoseconds(times), np.arange(-5, 10**6, 997))
    for wrong in (1 / 3, 2.0**-31, np.inf, np.nan, 1e300):
        assert whole_nanoseconds(np.array([1.0, wrong])) is None
