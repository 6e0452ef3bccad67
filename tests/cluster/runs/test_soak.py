"""The soak finds what it looks for, and nothing else."""

import faulthandler
import importlib
import runpy
import sys
from pathlib import Path

import pytest
from paths import ROOT

SOAK = ROOT / "tests" / "soak"


@pytest.fixture(autouse=True)
def modules_of_the_soak_are_forgotten(monkeypatch):
    """Others may have modules of these names, too."""
    monkeypatch.setattr(sys, "path", [str(SOAK), *sys.path])
    yield
    for name, module in [*sys.modules.items()]:
        if SOAK in Path(getattr(module, "__file__", None) or "/").parents:
            if name == "stacks":
                faulthandler.unregister(module.SIGNAL)
            del sys.modules[name]


@pytest.fixture
def soak(monkeypatch, capfd):
    """The soak in this process, whose hosts are processes: its status, and what it and they have written."""
    def run(*options):
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setattr(sys, "argv", [str(SOAK), *options])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SOAK), run_name="__main__")
        return ended.value.code, *capfd.readouterr()

    return run


@pytest.mark.slow
def test_trials_that_find_nothing_end_with_0_and_a_table(soak):
    status, out, err = soak(
        "--minutes", "1", "--times", "1", "--seed", "7", "--kind", "thread-shared_memory", "--trial", "mistake")
    assert status == 0, out + err
    *_, head, row, killed, found = out.splitlines()
    assert head.split() == ["trial", "thread-shm"]
    assert row.split() == ["mistake", "1"]
    assert "hosts were killed and left nothing" in killed
    assert found == "nothing found"


@pytest.mark.slow
def test_a_silent_host_is_a_hang_with_its_stacks_and_how_to_repeat_it(soak):
    status, out, err = soak(
        "--minutes", "1", "--times", "1", "--seed", "1", "--kind", "thread-queue", "--trial", "right",
        "--patience", "1e-6")
    assert status == 1
    assert "FOUND on thread-queue in the start: hang" in out
    assert "-- pid " in err
    assert out.endswith("1 x hang\n")


SERIES = {
    "equal": ([5] * 12, False), "noise": ([5, 9, 5, 6, 8, 9, 7, 5, 9, 9, 6, 8], False),
    "settles": ([0, 4, *[40] * 10], False), "a step": ([0] * 6 + [7] * 6, False), "a slope": (list(range(12)), True),
    "a slow slope": ([i // 2 for i in range(12)], True), "a noisy slope": ([i + 3 * (i % 2) for i in range(12)], True),
}


def test_a_trend_is_new_maxima_again_and_again():
    flat = importlib.import_module("flat")
    assert {name: flat.rises(samples) for name, (samples, _) in SERIES.items()} == {
        name: trend for name, (_, trend) in SERIES.items()}
