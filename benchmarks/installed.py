"""Which peers an interpreter has, and the commands that start them in it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.peers import jax_host
from benchmarks.remote import RemoteSystem

PEERS = {"mpich": "mpi4py", "jax": "jax", "gloo": "torch"}
"""The peers by name, and the module that each needs."""

_LOOK = """
import importlib.util, json, sys
print(json.dumps([m for m in sys.argv[1:] if importlib.util.find_spec(m) is None]))
"""


def missing(python: str) -> dict[str, str]:
    """The peers that the interpreter ``python`` lacks, with the reason.  Raises ``ValueError`` if it does not run."""
    modules = ["numpy", *PEERS.values()]
    try:
        found = subprocess.run(
            [python, "-c", _LOOK, *modules], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
            check=True,
        )
        absent: list[str] = json.loads(found.stdout)
    except (OSError, subprocess.SubprocessError, json.JSONDecodeError) as error:
        raise ValueError(f"--peers needs a Python interpreter that runs, got {python!r} ({_short(error)})") from None
    reasons = {name: f"{module} is not installed" for name, module in PEERS.items() if module in absent}
    if "numpy" in absent:
        return dict.fromkeys(PEERS, f"{python} has no numpy")
    if "mpich" not in reasons and mpiexec(python) is None:
        reasons["mpich"] = "mpi4py is there, but no mpiexec is"
    return reasons


def mpiexec(python: str) -> str | None:
    """The mpiexec beside the interpreter (the ``mpich`` wheel puts it there), else the one on the path."""
    return shutil.which("mpiexec", path=str(Path(shutil.which(python) or python).parent)) or shutil.which("mpiexec")


def start_peer(name: str, python: str, devices: int) -> RemoteSystem:
    """Start one of `PEERS`."""
    run = [python, "-m"]
    line = "{folder}/line"
    if name == "mpich":
        launch = [mpiexec(python) or "mpiexec", "-n", str(devices)]
        return RemoteSystem(name, devices, [[*launch, *run, "benchmarks.peers.mpi", line]], lines=devices)
    if name == "jax":
        return RemoteSystem(
            name, devices, [[*run, "benchmarks.peers.jax_host", line, str(devices)]], lines=1,
            operations=jax_host.OPERATIONS,
        )
    if name == "gloo":
        ranks = [
            [*run, "benchmarks.peers.gloo", line, str(rank), str(devices), "{folder}/store"] for rank in range(devices)
        ]
        return RemoteSystem(name, devices, ranks, lines=devices)
    raise ValueError(f"the peers are {', '.join(PEERS)}, got {name!r}")


def start_queue_pair() -> RemoteSystem:
    """``multiprocessing.Queue`` between two processes of this interpreter."""
    command = [sys.executable, "-m", "benchmarks.peers.queue_pair", "{folder}/line"]
    return RemoteSystem("queue", 2, [command], lines=2, operations=("round_trip", "stream"))


def _short(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return type(error).__name__
