"""The soak finds what it looks for, and nothing else."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

from paths import ROOT

SOAK = ROOT / "tests" / "soak"


def soak(*options):
    return subprocess.run(
        [sys.executable, str(SOAK), *options], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_trials_that_find_nothing_end_with_0_and_a_table():
    done = soak("--minutes", "1", "--times", "1", "--seed", "7", "--kind", "thread-shared_memory", "--trial", "mistake")
    assert done.returncode == 0, done.stdout + done.stderr
    *_, head, row, killed, found = done.stdout.splitlines()
    assert head.split() == ["trial", "thread-shm"]
    assert row.split() == ["mistake", "1"]
    assert "hosts were killed and left nothing" in killed
    assert found == "nothing found"


def test_a_silent_host_is_a_hang_with_its_stacks_and_how_to_repeat_it():
    done = soak("--minutes", "1", "--times", "1", "--seed", "1", "--kind", "thread-queue", "--trial", "right",
                "--patience", "1e-6")
    assert done.returncode == 1
    assert "FOUND on thread-queue in the start: hang" in done.stdout
    assert "-- pid " in done.stderr
    assert done.stdout.endswith("1 x hang\n")


SERIES = {
    "equal": ([5] * 12, False), "noise": ([5, 9, 5, 6, 8, 9, 7, 5, 9, 9, 6, 8], False),
    "settles": ([0, 4, *[40] * 10], False), "a step": ([0] * 6 + [7] * 6, False), "a slope": (list(range(12)), True),
    "a slow slope": ([i // 2 for i in range(12)], True), "a noisy slope": ([i + 3 * (i % 2) for i in range(12)], True),
}


def test_a_trend_is_new_maxima_again_and_again(monkeypatch):
    monkeypatch.syspath_prepend(SOAK)
    flat = importlib.import_module("flat")
    for name, module in [*sys.modules.items()]:
        if SOAK in Path(getattr(module, "__file__", None) or "/").parents:
            del sys.modules[name]   # which others may have, too
    assert {name: flat.rises(samples) for name, (samples, _) in SERIES.items()} == {
        name: trend for name, (_, trend) in SERIES.items()}
