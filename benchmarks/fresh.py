"""What suites run in fresh interpreters: ``python -m benchmarks.fresh import MODULE [NAME]``, ``devices COUNT
REPEATS``, or ``trace DEVICES EVENTS``.

Prints one JSON object of lists of seconds (and bytes); under ``memory`` of bytes, of each device when it is idle after
its first run.  Imports stand inside the functions, since they are what is timed; nothing on the way here may import
NumPy.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any


def imports(module: str, *names: str) -> dict[str, list[float]]:
    """Import a module, which must not be there yet, and use ``names`` of it, since they may be loaded only then."""
    if "numpy" in sys.modules or module in sys.modules:
        raise SystemExit(f"import {module} cannot be timed: it, or numpy, is loaded already")
    start = time.perf_counter()
    loaded = import_module(module)
    for name in names:
        getattr(loaded, name)
    return {"seconds": [time.perf_counter() - start]}


def devices(count: int, repeats: int) -> dict[str, list[float]]:
    """Start and end ``count`` devices: once cold, then ``repeats`` times warm; each cluster must answer a run."""
    from vcluster.runs import VirtualCluster

    found: dict[str, list[float]] = {"cold": [], "warm": [], "first_run": [], "shutdown": [], "memory": []}
    for number in range(repeats + 1):
        moments = [time.perf_counter()]
        cluster = VirtualCluster(count)
        moments.append(time.perf_counter())
        ranks = cluster.run(lambda device: device.rank).outputs
        moments.append(time.perf_counter())
        if not number:
            sizes = (proportional_set_size(pid) for pid in cluster.pids())
            found["memory"] = [nbytes for nbytes in sizes if nbytes is not None]
        closing = time.perf_counter()
        cluster.close()
        shutdown = time.perf_counter() - closing
        if ranks != list(range(count)):
            raise SystemExit(f"{count} new devices say that their ranks are {ranks}")
        started, first_run = (after - before for before, after in pairwise(moments))
        found["warm" if number else "cold"].append(started)
        found["first_run"].append(first_run)
        found["shutdown"].append(shutdown)
    return found


def proportional_set_size(pid: int) -> float | None:
    """Bytes of a process's memory, those shared with others counted in parts; None where the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((float(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), None)


def trace(devices: int, events: int) -> dict[str, list[float]]:
    """A trace of so many events: recorded, merged, saved, loaded and looked at; wall and CPU seconds of this process.

    ``bytes`` is the most memory that this process held until it was saved, less what it held before.
    """
    import resource
    import tempfile
    from pathlib import Path

    from vcluster.runs import VirtualCluster

    found: dict[str, list[float]] = {}

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def timed(what: str, work: Callable[[], Any]) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        value = work()
        found[f"{what}, CPU of the host"] = [time.process_time() - cpu]
        found[what] = [time.perf_counter() - wall]
        return value

    def work(device: Any, count: int) -> None:
        template = "collective", "all_reduce", {
            "axes": ("devices",), "group": device.group("devices"), "algorithm": "direct", "bytes_sent": 8,
            "bytes_received": 8, "messages": 1, "sources": ((device.rank, 8),),
        }
        for _ in range(count):
            start = device.recorder.enter()
            device.recorder.add_repeated(template, "work.py:1", start)
            device.recorder.leave()

    with VirtualCluster(devices) as cluster, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        assert len(cluster.run(work, 10).trace) >= 10 * devices
        before = peak()
        run = timed("record", lambda: cluster.run(work, events // devices))
        made = timed("merge", lambda: run.trace)
        timed("save", lambda: made.save(path))
        found["bytes"] = [peak() - before]
        loaded = timed("load", lambda: type(made).load(path))
        timed("count", lambda: (made.filter(kind="collective", rank=1).totals, made.count("all_reduce")))
        if loaded != made or made.count("all_reduce") != events // devices:
            raise SystemExit(f"a trace of {len(made)} events, loaded as one of {len(loaded)}")
    return found


def main(words: Sequence[str]) -> None:
    """Do what the words say."""
    if words[0] == "import":
        print(json.dumps(imports(*words[1:])))
    else:
        print(json.dumps({"devices": devices, "trace": trace}[words[0]](int(words[1]), int(words[2]))))


if __name__ == "__main__":
    main(sys.argv[1:])
