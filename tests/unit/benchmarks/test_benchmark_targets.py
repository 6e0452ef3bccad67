"""What the figures are held against: the least memory traffic, the targets, the growth with the number of devices."""

from __future__ import annotations

import json

import pytest

from benchmarks.copying import SIZES, cases, name_of
from benchmarks.plan import KIB, MIB
from benchmarks.results import Results
from benchmarks.suites import SUITES
from benchmarks.targets import Standing
from benchmarks.traffic import CopyRates, least_bytes


def results_of(figures, sizes=()) -> Results:
    """``figures``: (system, operation, devices, nbytes[, memory[, fresh]]) -> seconds; copies at 1e9 bytes a second."""
    results = Results()
    for (system, operation, devices, nbytes, *rest), seconds in figures.items():
        memory, fresh = (*rest, "private", False)[:2] if len(rest) != 1 else (rest[0], False)
        results.add("peers", system, operation, [seconds], devices=devices, nbytes=nbytes, memory=memory, fresh=fresh)
    for devices in {key[2] for key in figures}:
        for nbytes in sizes:
            for processes in (1, 2):
                results.add(
                    "peers", name_of(processes), "copy", [nbytes * processes / 1e9], devices=devices, nbytes=nbytes
                )
    return results


def allowed(figures, sizes=()):
    """The bounds of the only figure of vcluster that has any, and whether it meets them."""
    (verdict,) = Standing(results_of(figures, sizes)).verdicts()
    return {(bound.factor, bound.of): bound.seconds for bound in verdict.bounds}, verdict.met


# -- the least memory traffic ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "read", "written"),
    [
        ("all_reduce", 4, 4), ("all_gather", 1, 4), ("reduce_scatter", 4, 1), ("all_to_all", 4, 4),
        ("broadcast", 1, 4), ("round_trip", 2, 2), ("barrier", 0, 0),
    ],
)
def test_every_input_is_read_once_and_every_result_written_once(operation, read, written):
    assert least_bytes(operation, 12, 4) == (12 * read, 12 * written)


def test_what_nobody_knows_has_no_least_traffic():
    with pytest.raises(ValueError, match=r"known of all_reduce, .*, got 'gather'"):
        least_bytes("gather", 8, 2)


def test_traffic_takes_as_long_as_copies_of_half_as_many_bytes_of_the_likest_size():
    results = Results()
    for processes, nbytes, seconds in ((1, MIB, 1.0), (2, MIB, 1.0), (1, 16 * MIB, 1.0), (2, 16 * MIB, 4.0)):
        results.add("peers", name_of(processes), "copy", [seconds], devices=4, nbytes=nbytes)
    rates = CopyRates(list(results.of("peers")))
    assert rates.rate(2, MIB) == 2 * MIB
    assert rates.rate(2, 64 * MIB) is None
    assert rates.least_seconds("all_reduce", MIB // 2, 4) == 1.0  # 2 MiB of copies, at 2 MiB a second
    assert rates.least_seconds("all_reduce", 16 * MIB, 4) == 4.0  # 64 MiB, at the 16 MiB a second that one reaches
    assert rates.least_seconds("barrier", 0, 4) is None
    assert CopyRates([]).least_seconds("all_reduce", MIB, 4) is None


def test_copies_are_measured_up_to_the_memory_of_the_largest_operation():
    assert [case.nbytes for case in cases(4, MIB)] == [16 * KIB, 64 * KIB, 256 * KIB, MIB]
    assert [case.nbytes for case in cases(2, 8)] == [16 * KIB, 64 * KIB]
    assert [case.nbytes for case in cases(8, 64 * MIB)] == list(SIZES)


# -- the targets -------------------------------------------------------------------------------------------------------


def test_a_small_collective_must_be_faster_than_each_peer_by_its_factor():
    figures = {
        ("vcluster", "all_reduce", 4, 8): 9.0, ("mpich", "all_reduce", 4, 8): 10.0, ("jax", "all_reduce", 4, 8): 40.0,
        ("gloo", "all_reduce", 4, 8): 200.0,
    }
    assert allowed(figures) == ({(1.0, "mpich"): 10.0, (0.3, "jax"): 12.0, (0.1, "gloo"): 20.0}, True)
    figures["jax", "all_reduce", 4, 8] = 20.0
    assert allowed(figures)[1] is False


def test_two_devices_have_microseconds_beside_their_ratio():
    figures = {("vcluster", "barrier", 2, 0): 8e-6, ("mpich", "barrier", 2, 0): 3e-6}
    bounds, met = allowed(figures)
    assert bounds == {(2.5, "mpich"): pytest.approx(7.5e-6), (0.0, ""): 12e-6}
    assert not met


def test_a_small_broadcast_is_held_against_a_peers_barrier_and_broadcast():
    figures = {("vcluster", "broadcast", 8, 64 * KIB): 5.0, ("mpich", "broadcast", 8, 64 * KIB): 2.0,
               ("mpich", "barrier", 8, 0): 4.0}
    assert allowed(figures) == ({(1.0, "mpich"): 6.0}, True)
    large = {("vcluster", "broadcast", 8, MIB): 5.0, ("mpich", "broadcast", 8, MIB): 2.0,
             ("mpich", "barrier", 8, 0): 4.0}
    assert allowed(large) == ({(1.0, "mpich"): 2.0}, False)


@pytest.mark.parametrize(
    ("operation", "devices", "memory", "bounds"),
    [
        ("all_reduce", 4, "private", {(0.7, "mpich"): 70.0}),
        ("reduce_scatter", 8, "private", {(0.7, "mpich"): 70.0}),
        ("all_gather", 4, "private", {(1.0, "mpich"): 100.0}),
        ("all_reduce", 4, "shared", {(0.9, "jax"): 72.0, (0.45, "mpich"): 45.0}),
        ("all_to_all", 8, "shared", {(0.9, "jax"): 72.0}),
        ("all_reduce", 2, "shared", {(0.9, "mpich"): 90.0}),
        ("broadcast", 2, "private", {(1.3, "mpich"): 130.0}),
    ],
)
def test_large_collectives(operation, devices, memory, bounds):
    figures = {("vcluster", operation, devices, MIB, memory): 1.0, ("mpich", operation, devices, MIB): 100.0,
               ("jax", operation, devices, MIB): 80.0}
    assert allowed(figures) == ({key: pytest.approx(seconds) for key, seconds in bounds.items()}, True)


def test_the_least_traffic_is_allowed_with_a_third_more_where_that_is_more():
    figures = {("vcluster", "all_to_all", 4, MIB): 5e-3, ("mpich", "all_to_all", 4, MIB): 1e-3}
    bounds, met = allowed(figures, [MIB])
    assert bounds == {(1.3, "least"): pytest.approx(1.3 * 4 * MIB / 1e9)}
    assert met
    figures["mpich", "all_to_all", 4, MIB] = 1.0
    assert allowed(figures, [MIB])[0] == {(1.0, "mpich"): 1.0}


def test_a_new_result_is_held_against_the_same_with_out():
    figures = {("vcluster", "all_gather", 4, MIB, "shared"): 10.0,
               ("vcluster", "all_gather", 4, MIB, "shared", True): 12.0}
    assert allowed(figures) == ({(1.15, "with out="): pytest.approx(11.5)}, False)


@pytest.mark.parametrize(
    ("devices", "nbytes", "bounds"),
    [(2, 8, {(0.0, ""): 12e-6}), (4, 8, {(1.5, "mpich"): 1.5}), (2, MIB, {(1.0, "mpich"): 1.0})],
)
def test_round_trips(devices, nbytes, bounds):
    figures = {("vcluster", "round_trip", devices, nbytes): 1e-6, ("mpich", "round_trip", devices, nbytes): 1.0}
    assert allowed(figures) == (bounds, True)


@pytest.mark.parametrize(
    ("operation", "devices", "nbytes"),
    [("round_trip", 2, 64 * KIB), ("all_reduce", 4, 256 * KIB), ("all_reduce", 16, 8), ("all_reduce", 3, 8)],
)
def test_what_has_no_target_has_no_verdict(operation, devices, nbytes):
    figures = {(system, operation, devices, nbytes): 1.0 for system in ("vcluster", "mpich")}
    assert Standing(results_of(figures)).verdicts() == []


def test_without_peers_nothing_but_microseconds_is_judged():
    assert Standing(results_of({("vcluster", "all_reduce", 4, 8): 1.0}, [MIB])).verdicts() == []
    assert Standing(results_of({("vcluster", "all_to_all", 4, MIB): 1.0}, [MIB])).verdicts() == []
    assert allowed({("vcluster", "all_reduce", 2, 8): 1.0}) == ({(0.0, ""): 12e-6}, False)


def test_growth_is_judged_above_eight_devices_by_the_fastest_peers():
    seconds = {("vcluster", 8): 1.0, ("vcluster", 16): 3.0, ("mpich", 8): 2.0, ("mpich", 16): 5.0, ("gloo", 8): 3.0,
               ("gloo", 16): 30.0, ("vcluster", 4): 0.5, ("mpich", 4): 1.0}
    results = results_of({(system, "all_reduce", devices, 8): value for (system, devices), value in seconds.items()})
    by_devices = {growth.devices: growth for growth in Standing(results).growths()}
    assert set(by_devices) == {8, 16}
    assert (by_devices[8].ours, by_devices[8].theirs, by_devices[8].allowed) == (2.0, {"mpich": 2.0}, None)
    assert (by_devices[16].ours, by_devices[16].allowed) == (3.0, 2.5)
    assert by_devices[16].theirs == {"mpich": 2.5, "gloo": 10.0}
    assert by_devices[8].met
    assert not by_devices[16].met


def test_the_document_has_targets_least_traffic_and_growth():
    figures = {
        ("vcluster", "all_gather", 4, MIB): 5e-3, ("mpich", "all_gather", 4, MIB): 4e-3,
        ("vcluster", "all_gather", 8, MIB): 9e-3,
    }
    plain = Standing(results_of(figures, [MIB])).plain()
    assert plain["targets"] == [{
        "operation": "all_gather", "devices": 4, "nbytes": MIB, "memory": "private", "fresh": False, "seconds": 5e-3,
        "allowed_seconds": 4e-3, "factor": 1.0, "of": "mpich", "met": False,
    }]
    assert [(least["devices"], least["bytes_read"], least["bytes_written"]) for least in plain["least_traffic"]] == [
        (4, MIB, 4 * MIB), (8, MIB, 8 * MIB)
    ]
    assert plain["least_traffic"][0]["seconds"] == pytest.approx(2.5 * MIB / 1e9)
    assert [(growth["devices"], growth["allowed"]) for growth in plain["growth"]] == [(8, None)]
    assert plain["growth"][0]["ours"] == pytest.approx(1.8)
    assert json.dumps(plain)


def test_the_report_shows_target_and_mark_below_each_figure_and_counts_what_is_met():
    figures = {
        ("vcluster", "all_reduce", 4, MIB): 9e-3, ("mpich", "all_reduce", 4, MIB): 1e-2,
        ("vcluster", "all_reduce", 4, MIB, "private", True): 1e-2,
    }
    report = SUITES["peers"].report(results_of(figures, [MIB]))
    rows = {line[14:22].strip(): line[22:].split() for line in report.splitlines() if line.startswith(" " * 14)}
    assert rows["/ mpich"] == ["0.90"]
    assert rows["target"] == ["0.7", "M"]
    assert rows["met"] == ["NO", "1.29"]
    assert rows["no out="] == ["1.11"]
    assert rows["/ least"] == ["2.15"]
    assert "1 of 2 figures meet their targets." in report
    assert "    all_reduce 1 MiB private on 4: 9.00 ms, 1.29 x 0.7 M" in report
