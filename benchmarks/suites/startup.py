"""Start-up and shutdown, in fresh interpreters.

``cold``: the first cluster of a process, vcluster already imported; ``warm``: every later one.  A cold start loads
NumPy in the process that devices are forked from, so it is shown with a fresh interpreter's ``import numpy`` taken off,
too: the quicker of the two timed before and after it, so that a disturbed import cannot flatter the difference.

``first_test``: a script, end to end, that starts devices, checks one all_reduce and ends; under torch, where it is
installed, that is `benchmarks.peers.first_test`.  Memory is the proportional set size of each idle device: what it
shares with others is counted in parts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from benchmarks.installed import missing
from benchmarks.plan import Plan
from benchmarks.remote import ROOT
from benchmarks.results import Results
from benchmarks.systems import OURS, Say, SystemFailedError
from benchmarks.tables import nbytes_text, seconds_text, table
from benchmarks.targets import FIRST_TEST_FACTOR, MEMORY_BYTES, PLAIN, against

NAME = "startup"
TORCH = "gloo"
MOST_REPEATED = 64
MOST_TORCH_TESTS = 3
"""They take seconds each."""
TEXTS = {
    "import numpy": "import numpy", "import vcluster": "import vcluster",
    "import VirtualCluster": "import VirtualCluster",
    "cold": "{} devices, cold", "cold minus numpy": "{} devices, cold, less numpy", "warm": "{} devices, warm",
    "first_run": "first run on {} devices", "shutdown": "shutdown of {} devices",
    "script": "first test on {} devices",
}
_SCRIPT = """
from vcluster import VirtualCluster
with VirtualCluster({devices}) as cluster:
    assert cluster.run(lambda device: device.all_reduce(1)).outputs == [{devices}] * {devices}
"""


def measure(plan: Plan, results: Results, say: Say) -> None:
    """Interpreter after interpreter, all kinds in turn."""
    crowds = plan.devices_or((4, 64, 256), (4, 64))
    torch = _torch(plan, results)
    memory: dict[int, list[float]] = {}
    theirs: list[float] = []
    seconds: dict[tuple[str, int], list[float]] = {}
    for number in range(plan.passes):
        say(f"{NAME}: pass {number + 1}/{plan.passes}, imports")
        numpy = seconds.setdefault(("import numpy", 0), [])
        numpy.extend(fresh("import", "numpy")["seconds"])
        for what, words in {"vcluster": ("vcluster",), "VirtualCluster": ("vcluster", "VirtualCluster")}.items():
            seconds.setdefault((f"import {what}", 0), []).extend(fresh("import", *words)["seconds"])
        for devices in crowds:
            say(f"{NAME}: pass {number + 1}/{plan.passes}, {devices} devices")
            found = fresh("devices", str(devices), str(_repeats(devices, plan)))
            memory.setdefault(devices, []).extend(found["memory"])
            numpy.extend(fresh("import", "numpy")["seconds"])
            found["cold minus numpy"] = [found["cold"][0] - min(numpy[-2:])]
            for what in ("cold", "cold minus numpy", "warm", "first_run", "shutdown"):
                seconds.setdefault((what, devices), []).extend(found[what])
        seconds.setdefault(("script", crowds[0]), []).append(_script(crowds[0]))
        if torch is not None and number < MOST_TORCH_TESTS:
            say(f"{NAME}: pass {number + 1}/{plan.passes}, a first test under torch")
            theirs.append(_timed(torch, "-m", "benchmarks.peers.first_test", str(crowds[0])))
    for (what, devices), figures in seconds.items():
        results.add(NAME, OURS, what, figures, devices=devices)
    if theirs:
        results.add(NAME, TORCH, "script", theirs, devices=crowds[0])
    for devices, figures in memory.items():
        if figures:
            results.note(NAME, OURS, "proportional set size", figures, "bytes", devices=devices)


def report(results: Results) -> str:
    """A line for each figure, with its spread and what it may be at most."""
    found = list(results.of(NAME))
    torch = next((m.seconds.median for m in found if m.system == TORCH), None)
    rows = []
    for m in found:
        limit = PLAIN.get((NAME, m.operation, m.devices))
        if m.operation == "script" and m.system == OURS and torch is not None:
            limit = torch / FIRST_TEST_FACTOR
        rows.append([
            TEXTS[m.operation].format(m.devices) + (", torch" if m.system == TORCH else ""),
            *map(seconds_text, m.seconds.points[:3]),
            against(limit, m.seconds.median, seconds_text(limit or 0.0)),
        ])
    for quantity in results.amounts_of(NAME):
        amount, most = quantity.amount, MEMORY_BYTES.get(quantity.devices)
        rows.append([
            f"memory of one of {quantity.devices}, idle", *(nbytes_text(round(nbytes)) for nbytes in amount.points[:3]),
            against(most, amount.median, nbytes_text(most or 0)),
        ])
    return table(("", "median", "25 %", "75 %", "at most"), rows)


def _repeats(devices: int, plan: Plan) -> int:
    """Warm starts in one interpreter."""
    return 1 if devices > MOST_REPEATED else 2 if plan.quick else 5


def _torch(plan: Plan, results: Results) -> str | None:
    """The interpreter that has torch."""
    python = plan.peers_python or sys.executable
    absent = missing(python)
    if "gloo" in absent:
        results.skipped.setdefault("gloo", absent["gloo"])
        return None
    return python


def fresh(*words: str) -> dict[str, Any]:
    """What `benchmarks.fresh` found in an interpreter of its own.  Raises `SystemFailedError`."""
    found: dict[str, Any] = json.loads(_python("-m", "benchmarks.fresh", *words))
    return found


def _script(devices: int) -> float:
    return _timed(sys.executable, "-c", _SCRIPT.format(devices=devices))


def _timed(*words: str) -> float:
    start = time.perf_counter()
    _run(*words)
    return time.perf_counter() - start


def _python(*words: str) -> str:
    return _run(sys.executable, *words)


def _run(*words: str) -> str:
    run = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    if run.returncode:
        last = run.stderr.strip().split("\n")[-1]
        raise SystemFailedError(f"{' '.join(words[:4])!r} ended with {run.returncode}: {last}")
    return run.stdout
