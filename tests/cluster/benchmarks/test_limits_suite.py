"""The benchmark of limits really runs, in its tiniest form, and takes no error for another.  No time is judged."""

import gc
from pathlib import Path

import psutil
import pytest

from benchmarks import mistakes
from benchmarks.cases import WrongAnswerError
from benchmarks.mistakes import MISTAKES
from benchmarks.plan import Plan
from benchmarks.results import Results
from benchmarks.suites import limits
from vcluster import DeadlockError, DeviceFailedError


@pytest.mark.slow
def test_every_mistake_is_measured_on_both_backends_and_nothing_is_left():
    gc.collect()
    before = len(psutil.Process().children()), psutil.Process().num_threads()
    results, said = Results(), []
    limits.measure(Plan(devices=(3,), passes=1, quick=True), results, said.append)
    found = {(m.system, m.operation): m for m in results.of("limits")}
    in_threads = {name for name, mistake in MISTAKES.items() if not mistake.ends_process}
    assert {name for system, name in found if system == "vcluster threads"} == in_threads
    once = {"host killed", "start", "a first all_reduce", "stop"}
    assert {name for system, name in found if system == "vcluster"} == set(MISTAKES) | once
    assert all(m.seconds.minimum > 0 for m in found.values())
    assert {(level.what, level.after) for level in results.levels} == {
        ("clusters", 2), ("clusters", 10), ("runs", 20), ("runs", 100)
    }
    report = limits.report(results)
    assert max(map(len, report.splitlines())) <= 80
    assert [name for name in MISTAKES if name not in report] == []
    assert said[0] == "limits: mistakes of 3 devices, backend='process'"
    server = len(psutil.Process().children()) - before[0]
    assert server in (0, 1)  # the fork server stays
    assert psutil.Process().num_threads() == before[1]


def line(text):
    """A line of the kernels, as an error gives it."""
    lines = Path(mistakes.__file__).read_text(encoding="utf-8").splitlines()
    return f"{mistakes.__file__}:{next(n for n, told in enumerate(lines, 1) if text in told)}"


RIGHT = "deadlock: rank 1 returned without calling barrier, for which rank 0 waits"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (DeviceFailedError("no"), "ended in DeviceFailedError: no"),
        (DeadlockError("deadlock"), "does not tell 'rank 1 returned"),
        (DeadlockError(RIGHT, operation="barrier"), r"names ranks \(\)"),
        (DeadlockError(RIGHT, ranks=[0]), r"names ranks \(0,\), operation None"),
        (DeadlockError(RIGHT, ranks=[0], operation="barrier", locations=["elsewhere.py:3"]), "line elsewhere.py:3"),
        (DeadlockError(RIGHT, ranks=[0], operation="barrier", locations=[line("device.send(")]), "names the line"),
    ],
)
def test_a_wrong_error_is_a_wrong_answer(error, told):
    with pytest.raises(WrongAnswerError, match=told):
        MISTAKES["missing rank"].check("missing rank", error, 2)


def test_the_right_error_is_not():
    error = DeadlockError(RIGHT, ranks=[0], operation="barrier", locations=[line("device.barrier()")])
    MISTAKES["missing rank"].check("missing rank", error, 2)
    error = DeviceFailedError("rank 1 raised ValueError: a planted failure", ranks=[1], locations=[line("raise Val")])
    MISTAKES["exception"].check("exception", error, 2)


def test_figures_are_read_from_what_the_cost_of_tests_prints():
    lines = [
        "milliseconds          first   median   lowest", "test_spmd             220.0     2.50     2.00",
        "test_mesh               1.5     1.75     1.25", "test_plain              0.2     0.25     0.15",
    ]
    assert limits.costs(lines) == pytest.approx((0.22, 0.00225, 0.0015))
