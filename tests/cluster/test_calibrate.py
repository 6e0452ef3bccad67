"""A machine that is known is found again; this one is measured, written and read."""

from __future__ import annotations

import numpy as np
import pytest

from parallelism.cost import Costs
from parallelism.hardware import Hardware
from parallelism.links import HostLink, Link
from vcluster import VirtualCluster
from vcluster import __main__ as top
from vcluster.calibrate import COLLECTIVES, COPIED, DTYPES, MOVED, WIDTHS, Case, calibrated, measured
from vcluster.demo.command_line import serve
from vcluster.fitting import fitted

KNOWN = Hardware(
    "known", {"float32": 4e10, "float64": 2e10}, 1e9, 1e10, (Link("memory", 4, 2e-5, 3e9),), HostLink(1e-5, 1e9),
    kernel_launch_seconds=2e-6, flops_ramp_seconds=1e-5, memory_ramp_seconds=1e-6)


def test_a_fit_finds_the_parameters_of_exact_measurements():
    x = np.array([1.0, 2.0, 5.0, 10.0])
    found = fitted(lambda p: p[0] + p[1] * x, 3 + 0.5 * x, (1, 1))
    np.testing.assert_allclose(found, (3, 0.5), rtol=1e-8)


def test_a_fit_is_least_in_the_relative_error():
    found = fitted(lambda p: np.array([p[0], p[0]]), (1.0, 10.0), (2.0,))
    np.testing.assert_allclose(found, (1 + 1 / 10) / (1 + 1 / 100), rtol=1e-8)     # of (p - 1)^2 + (p / 10 - 1)^2


def test_a_machine_that_is_the_model_is_found_again():
    costs = Costs(KNOWN)
    looks = [("matmul", width, dtype) for dtype in DTYPES for width in WIDTHS] + [("copy", n, None) for n in COPIED]
    looks += [(kind, n, None) for kind in ("message", *COLLECTIVES) for n in MOVED]
    cases = [Case(kind, n, 1.0, dtype) for kind, n, dtype in looks]
    cases = [Case(c.kind, c.size, c.predicted(costs, 4), c.dtype) for c in cases]
    found = calibrated(cases, 4)
    assert max(found.errors()) < 1e-3 and len(found.held_out) + len(found.cases) == len(cases)
    assert found.hardware.links[0].bytes_per_second == pytest.approx(3e9, rel=1e-3)
    assert found.hardware.kernel_launch_seconds == pytest.approx(2e-6, rel=1e-2)
    assert "cases held out" in found.hardware.sources["links"]
    assert "all_to_all" in str(found) and "median" in str(found)


def test_one_case_of_a_kind_is_too_few():
    with pytest.raises(ValueError, match="at least 2 cases of each kind; got 1 of copy"):
        calibrated([Case("copy", 8, 1.0)], 2)


def test_this_machine_is_measured_written_and_used(tmp_path):
    with VirtualCluster(2, backend="thread") as cluster:
        cases = measured(cluster, widths=(16, 32), copied=(64, 4096), moved=(64, 4096), repeats=3)
    assert [case.kind for case in cases] == ["matmul"] * 4 + ["copy"] * 2 + ["message"] * 2 + [
        kind for kind in COLLECTIVES for _ in range(2)]
    assert all(case.seconds > 0 for case in cases)
    found = calibrated(cases, 2).hardware
    found.save(tmp_path / "mine.json")
    assert Hardware.load(tmp_path / "mine.json") == found and found.devices == 2
    with VirtualCluster(2, backend="thread", hardware=tmp_path / "mine.json", compute="modelled") as cluster:
        trace = cluster.run(lambda device: device.all_reduce(np.ones(512))).trace
    assert trace.makespan_seconds == Costs(found).collective("all_reduce", 4096, (0, 1)).seconds


def test_wrong_words_are_told(capsys):
    for words in ("calibrate", "calibrate /nonexistent/mine.json", "calibrate mine.json --devices 1"):
        assert serve(top.PROGRAM, top.main, words.split()) == 2
    told = capsys.readouterr().err
    for words in ("required: FILE.json", "/nonexistent/mine.json cannot be written", "from 2 to 64, got 1"):
        assert words in told
