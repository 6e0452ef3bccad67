"""Start-up and shutdown, in fresh interpreters.

``cold``: the first cluster of a process, vcluster already imported; ``warm``: every later one.  A cold start loads
NumPy in the process that devices are forked from, so it is shown with a fresh interpreter's ``import numpy`` taken off,
too: the quicker of the two timed before and after it, so that a disturbed import cannot flatter the difference.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from benchmarks.plan import Plan
from benchmarks.remote import ROOT
from benchmarks.results import Results
from benchmarks.systems import OURS, Say, SystemFailedError
from benchmarks.tables import seconds_text, table

NAME = "startup"
TEXTS = {
    "import numpy": "import numpy", "import vcluster": "import vcluster",
    "import VirtualCluster": "import VirtualCluster",
    "cold": "{} devices, cold", "cold minus numpy": "{} devices, cold, less numpy", "warm": "{} devices, warm",
    "first_run": "first run on {} devices", "shutdown": "shutdown of {} devices",
    "script": "Python, {} devices, a run, the end",
}
_SCRIPT = """
from vcluster import VirtualCluster
with VirtualCluster({devices}) as cluster:
    assert cluster.run(lambda device: device.all_reduce(1)).outputs == [{devices}] * {devices}
"""


def measure(plan: Plan, results: Results, say: Say) -> None:
    """Interpreter after interpreter, all kinds in turn."""
    crowds = plan.devices_or((4, 64), (4, 64))
    repeats = 2 if plan.quick else 5
    seconds: dict[tuple[str, int], list[float]] = {}
    for number in range(plan.passes):
        say(f"{NAME}: pass {number + 1}/{plan.passes}, imports")
        numpy = seconds.setdefault(("import numpy", 0), [])
        numpy.extend(fresh("import", "numpy")["seconds"])
        for what, words in {"vcluster": ("vcluster",), "VirtualCluster": ("vcluster", "VirtualCluster")}.items():
            seconds.setdefault((f"import {what}", 0), []).extend(fresh("import", *words)["seconds"])
        for devices in crowds:
            say(f"{NAME}: pass {number + 1}/{plan.passes}, {devices} devices")
            found = fresh("devices", str(devices), str(repeats))
            numpy.extend(fresh("import", "numpy")["seconds"])
            found["cold minus numpy"] = [found["cold"][0] - min(numpy[-2:])]
            for what in ("cold", "cold minus numpy", "warm", "first_run", "shutdown"):
                seconds.setdefault((what, devices), []).extend(found[what])
        seconds.setdefault(("script", crowds[0]), []).append(_script(crowds[0]))
    for (what, devices), figures in seconds.items():
        results.add(NAME, OURS, what, figures, devices=devices)


def report(results: Results) -> str:
    """A line for each figure, with its spread."""
    rows = [
        [TEXTS[m.operation].format(m.devices), *map(seconds_text, m.seconds.points), str(m.seconds.rounds)]
        for m in results.of(NAME)
    ]
    return table(("", "median", "25 %", "75 %", "least", "rounds"), rows)


def fresh(*words: str) -> dict[str, Any]:
    """What `benchmarks.fresh` found in an interpreter of its own.  Raises `SystemFailedError`."""
    found: dict[str, Any] = json.loads(_python("-m", "benchmarks.fresh", *words))
    return found


def _script(devices: int) -> float:
    start = time.perf_counter()
    _python("-c", _SCRIPT.format(devices=devices))
    return time.perf_counter() - start


def _python(*words: str) -> str:
    run = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    if run.returncode:
        last = run.stderr.strip().split("\n")[-1]
        raise SystemFailedError(f"{' '.join(words[:4])!r} ended with {run.returncode}: {last}")
    return run.stdout
