"""A machine that is known is found again; this one is measured, written and read."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from parallelism import Event, Trace
from parallelism.cost import Costs
from parallelism.hardware import VARIABLE, Hardware, HostLink, Link, Piece
from vcluster import VirtualCluster, __main__ as top
from vcluster.calibration.calibrate import TURNS, Calibration, Spread, calibrated
from vcluster.calibration.cases import (
    COLLECTIVE_NAMES,
    FAMILIES,
    PIPELINES,
    POLICIES,
    Sizes,
    measured,
    rounds_apart,
)
from vcluster.calibration.fitting import fitted
from vcluster.cli.command_line import serve

KNOWN = Hardware(
    "known", {"float32": 4e10, "float64": 2e10}, 1e9, 1e10,
    (Link("memory", 2, 2e-5, 3e9, "memory", pieces=[Piece(turn, 6e-5, 9e9) for turn in TURNS],
          collective_pieces=[Piece(turn, 3e-5, 5e9) for turn in (1, *TURNS)]),),
    HostLink(1e-5, 1e9), kernel_launch_seconds=2e-6, memory_overlap=0.5, message_overhead_seconds=3e-6,
    message_overhead_seconds_per_byte=2e-11,
    collective_bytes_per_second=dict.fromkeys(COLLECTIVE_NAMES, 8e9))
SMALL = Sizes(
    products=(8, 64, 96, 128), copies=(64, 4096, 1 << 16), moved=(64, 1 << 12, 1 << 15, 1 << 18, 1 << 19, 1 << 22),
    policies=(16, 48), microbatches=(1,), widths=(8, 32), rows=(4,), repeats=2, rounds=1)


FEW = replace(SMALL, products=(8, 64), copies=(64, 4096), moved=(64, 1 << 12))
"""Two sizes of each, the least that can be fitted to."""


@pytest.fixture(scope="module")
def cases():
    return measured(2, FEW, backend="thread")


def test_a_fit_finds_the_parameters_of_exact_measurements():
    x = np.array([1.0, 2.0, 5.0, 10.0])
    found = fitted(lambda p: p[0] + p[1] * x, 3 + 0.5 * x, (1, 1))
    np.testing.assert_allclose(found, (3, 0.5), rtol=1e-8)


def test_a_fit_is_least_in_the_relative_error():
    found = fitted(lambda p: np.array([p[0], p[0]]), (1.0, 10.0), (2.0,))
    np.testing.assert_allclose(found, (1 + 1 / 10) / (1 + 1 / 100), rtol=1e-8)     # of (p - 1)^2 + (p / 10 - 1)^2


def test_a_spread_is_median_quartiles_and_the_largest_of_the_sizes():
    assert Spread.of((-0.5, 0.25, 0.0, 1.0, -0.125)) == Spread(5, 0.25, (0.125, 0.5), 1.0)


@pytest.mark.slow
def test_every_family_is_measured_and_every_other_case_is_held_out(cases):
    assert tuple(dict.fromkeys(case.family for case in cases)) == FAMILIES
    assert all(case.seconds > 0 and case.trace.size == 2 for case in cases)
    assert {case.name for case in cases if case.family == PIPELINES} == {
        "gpipe", "1f1b", "zero_bubble_h1", "interleaved_1f1b"}
    half = [case.place for case in cases if case.name == "1f1b" and case.held_out]
    assert half == [(0, 1, 0)]


@pytest.mark.slow
def test_a_case_is_one_repetition_without_its_barriers(cases):
    for case in cases:
        assert not case.trace.count("barrier")
    there_and_back = next(case for case in cases if case.name == "there and back")
    assert [len(there_and_back.trace.filter(kind="recv", rank=rank)) for rank in (0, 1)] == [1, 1]
    assert there_and_back.predicted(KNOWN) == pytest.approx(2 * (2e-5 + 64 / 3e9 + 2 * (3e-6 + 64 * 2e-11)), rel=1e-12)


def test_a_case_knows_how_far_two_rounds_of_it_are_apart():
    assert rounds_apart([whole(1.0), whole(4.0), whole(2.0)]) == (3 + 1 + 2) / 3 / 2
    assert rounds_apart([whole(1.0)]) == 0


@pytest.mark.takes_seconds
def test_a_machine_that_is_not_quiet_is_told(cases):
    assert "machine is not quiet" in " ".join(str(calibration_of(cases[::10])).split())


def whole(seconds):
    """A trace of two repetitions, of which the second takes so long."""
    barriers = [Event(0, "collective", "barrier", group=(0,), sequence=number, serial=number, wall_start_seconds=at,
                      wall_duration_seconds=0.0) for number, at in enumerate((0.0, 7.0, 7.0 + seconds))]
    return Trace(barriers, size=1)


def calibration_of(cases):
    return Calibration(KNOWN, tuple(cases), tuple(replace(case, apart=0.25) for case in cases))


@pytest.mark.slow
def test_a_machine_that_is_the_model_is_found_again(monkeypatch):
    monkeypatch.setattr("vcluster.calibration.calibrate._ROUNDS", 5)
    cases = measured(2, SMALL, backend="thread")
    exact = [replace(case, seconds=case.predicted(KNOWN)) for case in cases]
    found = calibrated(exact, 2)
    assert len(found.held_out) + len(found.fitted_to) == len(cases)
    spread = Spread.of(found.errors())
    assert spread.median < 0.05
    assert found.hardware.flops_per_second["float64"] == pytest.approx(2e10, rel=0.5)
    assert found.hardware.links[0].latency_seconds == pytest.approx(2e-5, rel=0.1)
    assert found.hardware.message_overhead_seconds == pytest.approx(3e-6, rel=0.1)
    assert found.hardware.message_overhead_seconds_per_byte == pytest.approx(2e-11, rel=0.2)
    assert "cases held out" in found.hardware.sources["links"]
    for words in ("pipelined MLP", "matmul policies", "middle half", "all  "):
        assert words in str(found)


def test_one_case_of_a_kind_is_too_few(cases):
    with pytest.raises(ValueError, match="at least 2 cases of each kind; got 1 of copies, float64"):
        calibrated([case for case in cases if case.family == "copies"][:1], 2)


@pytest.mark.slow
def test_what_was_found_is_written_and_is_what_host_means(cases, tmp_path, monkeypatch):
    monkeypatch.setattr("vcluster.calibration.calibrate._ROUNDS", 1)
    programs = "full float64", "1f1b"
    cases = [case for case in cases if case.family not in (POLICIES, PIPELINES) or case.name in programs]
    once = cache(calibrated)
    monkeypatch.setattr("vcluster.calibration.calibrate.calibrated", lambda cases, *on: once(tuple(cases), *on))
    monkeypatch.setattr("vcluster.calibration.calibrate.measured", lambda devices, backend, told: cases)
    path = tmp_path / "new" / "host.json"
    monkeypatch.setenv(VARIABLE, str(path))
    assert serve(top.PROGRAM, top.main, ["calibrate", "--devices", "2", "--check"]) == 0 and not path.exists()
    assert serve(top.PROGRAM, top.main, ["calibrate", "--devices", "2"]) == 0
    found = Hardware.load(path)
    assert found.devices == 2 and found.name == "this-machine"
    with VirtualCluster(3, backend="thread", compute="modelled") as cluster:
        trace = cluster.run(lambda device: device.all_reduce(np.ones(512))).trace
    assert trace.hardware == "this-machine"
    assert trace.makespan_seconds == Costs(found.resized(3)).collective("all_reduce", 4096, range(3)).seconds > 0


@pytest.mark.takes_seconds
def test_wrong_words_are_told(capsys, monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    for words in ("calibrate", "calibrate /nonexistent/mine.json", "calibrate mine.json --devices 1",
                  "calibrate mine.json --check"):
        assert serve(top.PROGRAM, top.main, words.split()) == 2
    told = capsys.readouterr().err
    for words in (f"{VARIABLE} is empty", "/nonexistent/mine.json cannot be written", "from 2 to 64, got 1",
                  "--check writes nothing; leave out mine.json"):
        assert words in told
