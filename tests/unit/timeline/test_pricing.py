"""The clock on described hardware: times worked by hand, the same to the last bit, and the laws they obey."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st
from priced_stage import PricedStage

from parallelism.cost import Costs
from parallelism.hardware import Hardware, HostLink, Link, Products
from parallelism.mesh import Mesh
from parallelism.pipelining import Pipeline
from parallelism.pipelining.execution import run_actions
from parallelism.recorder import record
from parallelism.sharding import TensorSharding
from parallelism.timeline import Pricing
from parallelism.timeline.fair_sharing import SharedLinks
from parallelism.timeline.replay import replay
from parallelism.trace import Event, Trace, UndeclaredComputeWarning

TICK = 2.0**-10


def machine(devices=4, **changed):
    """A message of n bytes takes 1 + n / 2 seconds, a flop 1/4, a byte of memory 1/8: sums of these are exact."""
    fields = {
        "name": "machine", "flops_per_second": {"float64": 4, "float32": 8}, "memory_bytes": 64,
        "memory_bytes_per_second": 8, "links": [Link("switch", devices, latency_seconds=1, bytes_per_second=2)],
        "host": HostLink(1, 1)}
    return Hardware(**{**fields, **changed})


def compute(rank, seconds=None, **fields):
    return Event(rank, "compute", fields.pop("name", "work"), cpu_seconds=seconds or 0.0, seconds=seconds, **fields)


def send(rank, peer, nbytes, sequence=0, **fields):
    return Event(rank, "send", "send", peer=peer, tag=0, sequence=sequence, bytes_sent=nbytes, messages=1, **fields)


def recv(rank, peer, nbytes, sequence=0, **fields):
    return Event(rank, "recv", "recv", peer=peer, tag=0, sequence=sequence, bytes_received=nbytes, **fields)


def ring(rank, group, nbytes, sequence=0, **fields):
    """An all_reduce of so many bytes, whole in all parts."""
    received = 2 * (len(group) - 1) * nbytes // len(group)
    return Event(rank, "collective", "all_reduce", group=group, sequence=sequence, algorithm="ring",
                 bytes_received=received, bytes_sent=received, payload_bytes=nbytes, **fields)


def wait(rank, work):
    return Event(rank, "wait", "wait", work=work)


def on(lanes, hardware=None, compute="modelled", **options):
    return Trace([event for lane in lanes for event in lane], len(lanes)).on(
        hardware or machine(), compute=compute, **options)


def times(trace):
    return [(event.rank, event.start_seconds, event.duration_seconds) for event in trace]


# -- worked by hand ----------------------------------------------------------------------------------------------------

def test_compute_is_the_longer_of_flops_and_bytes_or_what_was_declared():
    lane = [compute(0, flops=8.0, nbytes=8.0), compute(0, flops=4.0, nbytes=24.0), compute(0, 5.0, flops=99.0)]
    assert times(on([lane])) == [(0, 0, 2), (0, 2, 3), (0, 5, 5)]


def test_measured_compute_is_cpu_time_whatever_was_declared():
    lane = [Event(0, "compute", "work", cpu_seconds=3.0, flops=400.0), compute(0, 5.0)]
    assert times(on([lane], compute="measured")) == [(0, 0, 3), (0, 3, 5)]


def test_a_message_leaves_at_once_and_its_receiver_waits_for_it():
    trace = on([[compute(0, 2.0), send(0, 1, 6), compute(0, 1.0)], [compute(1, 1.0), recv(1, 0, 6), compute(1, 1.0)]])
    assert times(trace) == [(0, 0, 2), (0, 2, 0), (0, 2, 1), (1, 0, 1), (1, 1, 5), (1, 6, 1)]


def test_a_receive_posted_early_overlaps_with_compute():
    trace = on([[send(0, 1, 6)], [recv(1, 0, 6, work=1), compute(1, 3.0), wait(1, 1), compute(1, 1.0)]])
    assert times(trace)[1:] == [(1, 0, 4), (1, 0, 3), (1, 3, 1), (1, 4, 1)]


def test_a_collective_begins_with_its_last_member_and_takes_what_its_algorithm_takes():
    group = (0, 1, 2, 3)        # a ring: 2 * 3 * 1 + 2 * 3 / 4 * 8 / 2 = 12
    trace = on([[compute(rank, float(rank)), ring(rank, group, 8)] for rank in group])
    assert times(trace)[1::2] == [(0, 0, 15), (1, 1, 14), (2, 2, 13), (3, 3, 12)]
    assert Costs(machine()).collective("all_reduce", 8, group, algorithm="ring").seconds == 12


def test_asynchronous_collectives_overlap_with_compute_and_follow_each_other():
    lanes = [[ring(rank, (0, 1), 4, 0, work=1), ring(rank, (0, 1), 4, 1, work=2), compute(rank, 5.0),
              wait(rank, 1), wait(rank, 2)] for rank in (0, 1)]      # each: 2 * 1 + 4 / 2 = 4
    assert times(on(lanes))[:5] == [(0, 0, 4), (0, 0, 8), (0, 0, 5), (0, 5, 0), (0, 5, 3)]


def test_groups_called_in_a_circle_of_orders_go_on():
    def issue(rank, pairs):
        return [ring(rank, pair, 2, work=number) for number, pair in enumerate(pairs)] + [wait(rank, 0), wait(rank, 1)]

    trace = on([issue(0, [(0, 1), (0, 2)]), issue(1, [(1, 2), (0, 1)]), issue(2, [(0, 2), (1, 2)])])
    ends = {(e.group, e.start_seconds + e.duration_seconds) for e in trace.filter(kind="collective")}
    assert [end for _, end in ends] == [3, 3, 3]            # each group has a stream of its own


def test_the_cheapest_algorithm_is_taken_where_none_was_named():
    group = (0, 1, 2, 3)
    lanes = [[replace(ring(rank, group, 8), algorithm="direct")] for rank in group]
    assert on(lanes).makespan_seconds == Costs(machine()).collective("all_reduce", 8, group).seconds == 10


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["broadcast", "scatter", "reduce", "gather"])
@pytest.mark.parametrize("root", [0, 2])
def test_the_root_is_known_by_what_it_does_not_move(kind, root):
    def program(device):
        x = np.zeros((3, 5)) if kind != "scatter" or device.rank == root else None
        getattr(device, kind)(x, root=root, algorithm="tree")

    hardware = machine(3, links=[Link("ring", 3, latency_seconds=1, bytes_per_second=2, shape="ring")])
    trace = record(program, Mesh(tp=3)).trace.on(hardware)
    whole = 120 if kind != "gather" else 360
    expected = Costs(hardware).collective(kind, whole, (0, 1, 2), algorithm="tree", root=root)
    assert trace.makespan_seconds == expected.seconds


def test_a_permute_takes_as_long_as_its_largest_message():
    def program(device):
        device.permute(np.zeros(device.rank + 1), [(0, 1), (1, 2), (2, 0)])

    trace = record(program, Mesh(tp=3)).trace.on(machine(3))
    assert trace.makespan_seconds == 1 + 24 / 2


def test_permutes_of_as_many_bytes_in_all_differ_by_their_largest_messages():
    def program(device):
        for counts in ((6, 6), (4, 8), (8, 4), (2, 10)):
            device.permute(np.zeros(counts[device.rank]), [(0, 1), (1, 0)])

    hardware = machine(2)
    trace = record(program, Mesh(devices=2)).trace.on(hardware, compute="modelled")
    found = [event.duration_seconds for event in trace if event.rank == 0 and event.name == "permute"]
    assert found == pytest.approx([Costs(hardware).message_seconds(8 * most, 0, 1) for most in (6, 8, 8, 10)])


def test_a_resharding_takes_what_the_collectives_inside_take():
    source, target = TensorSharding("a", None), TensorSharding(None, "a")
    trace = record(lambda d: d.reshard(np.zeros((2, 6)), source, target, shape=(4, 6)), Mesh(a=2)).trace.on(machine(2))
    assert trace.count("reshard") == 1
    expected = Costs(machine(2)).collective("all_to_all", 96, (0, 1)).seconds
    assert trace.makespan_seconds == expected == 1 + 96 / 2 / 2


def test_a_group_of_one_and_a_message_to_oneself_cost_nothing():
    lane = [ring(0, (0,), 8), send(0, 0, 8), recv(0, 0, 8), compute(0, 1.0)]
    assert on([lane]).makespan_seconds == 1


@pytest.mark.sampled(4)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble_h1", "zero_bubble_h2", "zero_bubble_v"])
@pytest.mark.parametrize("message", [0, 3])
def test_a_schedule_that_is_run_takes_what_its_own_timeline_says(schedule, message):
    costs = {"F": 5, "B": 13, "I": 7, "W": 6, "message": message}
    pipeline = Pipeline(8 if schedule == "zero_bubble_v" else 4, 6, schedule, 2 if schedule == "zero_bubble_v" else 1)

    def program(device):
        placement = pipeline.schedule.placement
        stages = {stage: PricedStage(costs) for stage, rank in enumerate(placement) if rank == device.rank}
        run_actions(device, pipeline, "pp", stages, pipeline.actions(device.rank))

    hardware = machine(flops_per_second={"float64": 1}, links=[Link(
        "switch", 4, latency_seconds=message, bytes_per_second=1)])
    trace = record(program, Mesh(pp=4)).trace.on(hardware)
    expected = pipeline.schedule.timeline(costs)
    assert trace.makespan_seconds == expected.makespan
    assert trace.span_bubble_fraction == pytest.approx(expected.span_bubble_fraction, abs=1e-15)
    times = {(e.stage, e.phase, e.microbatch): e.start_seconds for e in trace.filter(kind="compute")}
    assert times == {span.action: span.start for row in expected.spans for span in row}


# -- what is slow ------------------------------------------------------------------------------------------------------

def test_a_straggler_is_slower_in_both_ways_of_counting():
    hardware = machine().slow(rank=1, factor=1.5)
    for kind in ("measured", "modelled"):
        assert times(on([[compute(0, 2.0)], [compute(1, 2.0)]], hardware, kind)) == [(0, 0, 2), (1, 0, 3)]


def test_a_faulty_link_delays_and_narrows_one_way():
    hardware = machine().fault(source=0, target=1, delay_seconds=2, bandwidth_factor=0.5)
    there = on([[send(0, 1, 6)], [recv(1, 0, 6)]], hardware)
    back = on([[recv(0, 1, 6)], [send(1, 0, 6)]], hardware)
    assert (there.makespan_seconds, back.makespan_seconds) == (1 + 2 + 6, 1 + 3)


# -- links that are shared ---------------------------------------------------------------------------------------------

def test_two_messages_from_one_device_share_its_port():
    lanes = [[send(0, 1, 4), send(0, 2, 8)], [recv(1, 0, 4)], [recv(2, 0, 8)]]
    assert times(on(lanes))[2:] == [(1, 0, 1 + 4), (2, 0, 1 + 6)]       # 1 byte/s each until 4; then 4 more at 2
    apart = on(lanes, link_sharing=False)
    assert times(apart)[2:] == [(1, 0, 1 + 2), (2, 0, 1 + 4)] and not apart.link_sharing


def test_what_is_held_up_elsewhere_leaves_the_rest_to_the_others():
    hardware = machine().fault(source=0, target=1, bandwidth_factor=0.25)     # half a byte a second
    lanes = [[send(0, 1, 2), send(0, 2, 6)], [recv(1, 0, 2)], [recv(2, 0, 6)]]
    assert times(on(lanes, hardware))[2:] == [(1, 0, 1 + 4), (2, 0, 1 + 4)]   # 0.5 and 1.5 bytes a second


def test_a_message_that_comes_later_slows_those_under_way_from_then_on():
    lanes = [[send(0, 1, 8), compute(0, 2.0), send(0, 2, 2)], [recv(1, 0, 8)], [recv(2, 0, 2)]]
    # alone for 2 s: 4 of 8 bytes; then 1 byte/s each: the second is through at 4, the first has 2 left, at 5
    assert times(on(lanes))[3:] == [(1, 0, 1 + 5), (2, 0, 1 + 4)]


def test_messages_on_other_links_are_not_disturbed():
    lanes = [[send(0, 1, 8)], [recv(1, 0, 8)], [send(2, 3, 8)], [recv(3, 2, 8)]]
    assert times(on(lanes)) == times(on(lanes, link_sharing=False))


def test_rates_are_found_once_for_all_that_begins_or_ends_together(monkeypatch):
    size, found = 8, []
    honest = SharedLinks._filled
    monkeypatch.setattr(SharedLinks, "_filled", lambda self, flows, channels: (
        found.append(len(flows)), honest(self, flows, channels))[1])
    lanes = [[send(rank, peer, 14) for peer in range(size) if peer != rank]
             + [recv(rank, peer, 14) for peer in range(size) if peer != rank] for rank in range(size)]
    assert on(lanes, machine(size)).makespan_seconds == 1 + 7 * 14 / 2
    assert found == [size * (size - 1)]     # seven through each port, all to the end


# -- which dtype -------------------------------------------------------------------------------------------------------

def test_a_priced_dtype_prices_flops_bytes_and_messages_of_any_float_array():
    lanes = [[compute(0, flops=16.0, dtype="float64"), send(0, 1, 8, dtype="float64")], [recv(1, 0, 8)]]
    assert times(on(lanes))[:2] == [(0, 0, 4), (0, 4, 0)] and on(lanes).makespan_seconds == 4 + 1 + 4
    trace = on(lanes, priced_dtype="float32")
    assert trace.makespan_seconds == 2 + 1 + 2
    assert (trace.priced_dtype, trace[0].dtype) == ("float32", "float64")
    assert trace.on(machine()).makespan_seconds == 5        # remembered


def test_integers_are_not_priced_as_floats():
    lanes = [[send(0, 1, 8, dtype="int64")], [recv(1, 0, 8)]]
    assert on(lanes, priced_dtype="float32").makespan_seconds == 5


def test_integers_beside_floats_keep_their_size():
    work = {"nbytes": 16.0 + 8 + 8, "dtype": "float64", "other_bytes": (("bool", 8), ("float32", 8))}
    lanes = [[compute(0, **work)]]
    assert on(lanes).makespan_seconds == 32 / 8
    assert on(lanes, priced_dtype="float32").makespan_seconds == (16 / 2 + 8 + 8) / 8
    assert on(lanes, priced_dtype="float64").makespan_seconds == (16 + 8 + 2 * 8) / 8


def test_of_what_a_product_moves_in_other_dtypes_only_float32_is_added_to():
    adds = replace(machine(), products=Products(1, ((8, 4),), accumulated=0.5))
    work = {"flops": 8.0 * 4 * 2 * 3, "dtype": "float64", "shape": (1, 8, 4, 3)}
    took = {dtype: on([[compute(0, **work, nbytes=40.0, other_bytes=((dtype, 32),))]], adds).makespan_seconds
            for dtype in ("float32", "bfloat16", "int64")}
    alone = on([[compute(0, **work, nbytes=8.0)]], adds).makespan_seconds
    assert took == {"float32": alone + 0.5 * 32 / 8, "bfloat16": alone, "int64": alone}


def test_a_dtype_without_a_rate_is_refused():
    lanes = [[compute(0, flops=16.0, dtype="int64")]]
    with pytest.raises(ValueError, match=r"machine has no rate for int64; it has float64, float32: compute in"):
        on(lanes)
    with pytest.raises(ValueError, match="machine has no rate for bfloat16"):
        on(lanes, priced_dtype="bfloat16")
    with pytest.raises(ValueError, match="hardware='host' has None, not 'float32'"):
        Pricing.of("host", priced_dtype="float32")


# -- undeclared --------------------------------------------------------------------------------------------------------

def test_what_was_not_declared_costs_nothing_and_is_told():
    bare = Event(0, "compute", "compute", cpu_seconds=0.25, serial=0)
    named = Event(0, "compute", "loss", cpu_seconds=0.5, serial=1)
    inner = Event(0, "collective", "all_reduce", group=(0,), parent=3, serial=4)
    lane = [bare, named, compute(0, 1.0, serial=2), Event(0, "collective", "reshard", group=(0,), serial=3), inner]
    with pytest.warns(UndeclaredComputeWarning, match=r"0\.75 of 1\.75 s of compute have no price"):
        trace = on([lane])
    assert trace.undeclared_seconds == 0.75 and trace.makespan_seconds == 1
    assert [(e.name, e.serial, e.parent) for e in trace] == [
        ("loss", 0, None), ("work", 1, None), ("reshard", 2, None), ("all_reduce", 3, 2)]
    assert trace.on(machine()) == trace     # told once, without another warning


def test_a_little_that_is_undeclared_is_told_without_a_warning():
    trace = on([[compute(0, 1.0), Event(0, "compute", "compute", cpu_seconds=0.001)]])
    assert trace.undeclared_seconds == 0.001


def test_what_python_itself_takes_is_told_without_a_warning():
    trace = on([[compute(0, TICK), Event(0, "compute", "compute", cpu_seconds=0.002)]])
    assert trace.undeclared_seconds == 0.002


def test_the_later_pieces_of_a_block_have_no_price_of_their_own():
    first = Event(0, "compute", "work", cpu_seconds=0.1, flops=8.0)
    trace = on([[first, send(0, 0, 8), Event(0, "compute", "work", cpu_seconds=0.2, seconds=0.0, part=1)]])
    assert trace.undeclared_seconds == 0 and trace.makespan_seconds == 2 and len(trace) == 2


def test_on_the_host_only_declared_seconds_are_a_price():
    with pytest.warns(UndeclaredComputeWarning):
        trace = on([[compute(0, 2.0), Event(0, "compute", "work", cpu_seconds=1.0, flops=8.0)]], "host")
    assert (trace.makespan_seconds, trace.undeclared_seconds, trace.hardware) == (2, 1, None)


def test_a_modelled_trace_has_no_cpu_times_to_go_back_to():
    with pytest.raises(ValueError, match="compute='measured' wants CPU times, and a modelled trace has left out"):
        on([[compute(0, 1.0)]]).on("dgx-h100", compute="measured")


# -- elsewhere ---------------------------------------------------------------------------------------------------------

def test_too_small_a_hardware_is_refused():
    with pytest.raises(ValueError, match="machine has places for 4 devices, not for 5"):
        on([[] for _ in range(5)])


def test_a_priced_trace_is_saved_with_how_it_was_priced(tmp_path):
    trace = on([[compute(0, 1.0, dtype="float64")]], priced_dtype="float32", link_sharing=False)
    trace.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == trace
    assert trace.hardware == "machine" and trace.filter(rank=0).compute == "modelled"
    text = (tmp_path / "trace.json").read_text()
    (tmp_path / "broken.json").write_text(text.replace('["modelled"', '["guessed"'))
    with pytest.raises(ValueError, match="priced should be how compute, dtype and links were priced"):
        Trace.load(tmp_path / "broken.json")


# -- laws --------------------------------------------------------------------------------------------------------------

@st.composite
def programs(draw):
    """Programs that can run: each step appends to the records of those who take part."""
    size = draw(st.integers(1, 4))
    lanes = [[] for _ in range(size)]
    counts, open_work = {}, []
    ranks, nbytes = st.integers(0, size - 1), st.integers(0, 5).map(lambda n: 12 * n)
    for work in range(draw(st.integers(0, 20))):
        step = draw(st.sampled_from(("compute", "message", "collective", "wait")))
        mark = work if draw(st.booleans()) else None
        if step == "compute":
            rank = draw(ranks)
            lanes[rank].append(compute(rank, draw(st.integers(0, 9)) * TICK))
        elif step == "message":
            source, target, moved = draw(ranks), draw(ranks), draw(nbytes)
            number = counts[source, target] = counts.get((source, target), -1) + 1
            posted = [recv(target, source, moved, number, work=mark)]
            sent = [send(source, target, moved, number)]
            for event in posted + sent if mark is not None else sent + posted:
                lanes[event.rank].append(event)
            open_work += [(target, work)] if mark is not None else []
        elif step == "collective":
            group = tuple(draw(st.lists(ranks, min_size=1, unique=True)))
            number = counts[group] = counts.get(group, -1) + 1
            moved = draw(nbytes)
            for rank in group:
                lanes[rank].append(ring(rank, group, moved, number, work=mark))
            open_work += [(rank, work) for rank in group] if mark is not None else []
        elif open_work:
            rank, waited = open_work.pop(draw(st.integers(0, len(open_work) - 1)))
            lanes[rank].append(wait(rank, waited))
    return [[replace(event, serial=i) for i, event in enumerate(lane)] for lane in lanes]


@given(programs(), st.booleans())
def test_pricing_again_changes_nothing(lanes, sharing):
    trace = on(lanes, link_sharing=sharing)
    assert trace.on(machine()) == trace
    assert trace.on("dgx-h100").on(machine()) == trace


@given(programs())
def test_the_order_of_ranks_in_a_trace_does_not_matter(lanes):
    trace = on(lanes)
    events = [event for lane in reversed(lanes) for event in lane]
    assert sorted(Trace(events, len(lanes)).on(machine(), compute="modelled"),
                  key=lambda event: (event.rank, event.serial)) == list(trace)


@given(programs(), st.booleans())
def test_nothing_comes_before_what_it_takes_and_streams_do_one_thing_at_a_time(lanes, sharing):
    hardware = machine()
    costs, trace = Costs(hardware), on(lanes, link_sharing=sharing)
    sent = {(e.rank, e.peer, e.sequence): e for e in trace if e.kind == "send"}
    for event in trace.filter(kind="recv"):
        origin = sent[event.peer, event.rank, event.sequence]
        least = origin.start_seconds + costs.message_seconds(event.bytes_received, event.peer, event.rank)
        assert event.start_seconds + event.duration_seconds >= least
    operations = {}
    for event in trace.filter(kind="collective"):
        operations.setdefault((event.group, event.sequence), []).append(event)
    occupied = {}
    for (group, _), events in operations.items():
        (end,) = {e.start_seconds + e.duration_seconds for e in events}
        received = events[0].bytes_received
        nbytes = received * len(group) / (2 * len(group) - 2) if len(group) > 1 else 0
        lasts = costs.collective("all_reduce", nbytes, group, algorithm="ring").seconds if len(group) > 1 else 0
        assert end >= (max(e.start_seconds for e in events) + lasts) * (1 - 1e-12)
        for rank in group:
            occupied.setdefault((rank, group), []).append((end - lasts, end))
    for spans in occupied.values():
        spans = sorted(span for span in spans if span[0] < span[1])
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(spans))


@given(programs())
def test_without_shared_links_and_collectives_slower_hardware_is_never_quicker(lanes):
    lanes = [[event for event in lane if event.kind != "collective"] for lane in lanes]
    quick, slow = machine(), machine(links=[Link("switch", 4, latency_seconds=2, bytes_per_second=1)])
    spans = [on(lanes, hardware, link_sharing=False).makespan_seconds for hardware in (quick, slow, slow.slow(
        rank=0, factor=2))]
    assert spans == sorted(spans)


@given(programs())
def test_a_shared_link_never_brings_a_message_earlier_than_one_of_its_own(lanes):
    lanes = [[event for event in lane if event.kind != "collective"] for lane in lanes]
    assert on(lanes).makespan_seconds >= on(lanes, link_sharing=False).makespan_seconds


@given(programs(), st.data())
def test_broken_records_end_too(lanes, data):
    lanes = [[event for event in data.draw(st.permutations(lane)) if data.draw(st.integers(0, 4))] for lane in lanes]
    events = replay(lanes, Pricing(machine(), "modelled"))
    assert all(event.duration_seconds >= 0 for event in events)
