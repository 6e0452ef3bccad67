"""Tests a vcluster that was installed from a wheel: `python tests/installed.py`, in its environment.

The packages beside this file are not used. It tells where vcluster was found, then runs what needs no optional dependency:
the command, a kernel, a lesson on threads of a Python without `fcntl` and `memfd_create`, and, with ``--tests``, the quick
unit tests (extra `test-small`). Ends with the status of the first that fails.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT / "tests" / "support")  # in place of the folder of this file

ROOMS = (
    "algorithms",
    "collectives",
    "cost",
    "display",
    "events",
    "kernels",
    "mesh",
    "operation",
    "pipelining",
    "recorder",
    "resharding",
    "sharding",
    "trace",
)
"""Of `tests/unit`, what is quick, starts no process and needs no optional dependency."""
KERNEL = """
from vcluster import VirtualCluster
with VirtualCluster(3, backend="{backend}") as cluster:
    print(cluster.run(lambda device: int(device.all_reduce(device.rank + 1))).outputs)
"""


def run(title: str, *words: str, cwd: Path, expected: str = "") -> None:
    """Runs Python with these words, and ends this process if it fails or does not print what is expected."""
    print(f"== {title}", flush=True)
    done = subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode or expected not in done.stdout:
        sys.exit(
            f"{done.stdout}{done.stderr}\n{title} ended with {done.returncode}, and {expected!r} was expected"
        )
    print("\n".join(done.stdout.splitlines()[-1:]), flush=True)


def unit_tests(folder: Path) -> None:
    """Runs the quick tests from a copy of them, away from the sources."""
    for path in ("setup.cfg", "tests/conftest.py"):
        (folder / path).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, folder / path)
    for path in ("tests/support", "tests/data", *(f"tests/unit/{room}" for room in ROOMS)):
        shutil.copytree(ROOT / path, folder / path, ignore=shutil.ignore_patterns("__pycache__"))
    words = ("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "tests/unit")
    run("the quick tests", *words, cwd=folder, expected=" passed")


def main() -> None:
    """Everything, in order."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tests", action="store_true", help="run the quick unit tests, too")
    parser.add_argument("--threads", action="store_true", help="devices are threads, as on native Windows")
    asked = parser.parse_args()
    from lone_lesson import WITHOUT, run_alone, solved_notebook

    found = find_spec("vcluster")
    if found is None or ROOT in Path(found.origin or "").resolve().parents:
        sys.exit(f"no installed vcluster was found, but {found and found.origin}")
    print(f"Python {sys.version.split()[0]}, {found.origin}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run("the command", "-m", "vcluster", "--help", cwd=folder, expected="python -m vcluster plan gpt")
        kernel = KERNEL.format(backend="thread" if asked.threads else "process")
        run("a kernel", "-c", kernel, cwd=folder, expected="[6, 6, 6]")
        (folder / "lesson").mkdir()
        print("== lesson 4, on threads")
        notebook, _ = solved_notebook(4, folder / "lesson")
        lesson = run_alone(notebook, WITHOUT)
        if (
            lesson.returncode
            or "on thread" not in lesson.stdout
            or "passes" not in lesson.stdout.splitlines()
        ):
            sys.exit(lesson.stdout + lesson.stderr)
        if asked.tests:
            unit_tests(folder)


if __name__ == "__main__":
    main()
