"""Devices on the ranks of MPI jobs. Each job starts processes that load everything, so few tests make one by day."""

import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import mpi_job
import numpy as np
import psutil
import pytest

MPIEXEC = next(filter(None, (shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
                             for name in ("mpiexec",))), None)
pytestmark = pytest.mark.skipif(
    MPIEXEC is None or find_spec("mpi4py") is None, reason="there is no mpiexec, or no mpi4py")
ROOT = Path(__file__).parents[3]


@cache
def launcher():
    """mpiexec with what it needs to start more ranks than cores, as root."""
    said = subprocess.run([MPIEXEC, "--version"], capture_output=True, text=True, check=False).stdout
    return [MPIEXEC, *(["--allow-run-as-root", "--oversubscribe"] if "Open MPI" in said else [])]


def start(ranks, *arguments):
    """A job that runs ``python ...`` on so many ranks."""
    support = str(ROOT / "tests" / "support")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), support])}
    return subprocess.Popen(
        [*launcher(), "-n", str(ranks), sys.executable, *map(str, arguments)], env=environment, cwd=ROOT, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(job):
    """What a job has printed, once it has ended by itself."""
    try:
        said, _ = job.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        job.kill()
        raise
    return said


def same(a, b):
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.timeout(240)
def test_a_job_gives_the_bits_the_events_the_times_and_the_errors_of_processes(tmp_path):
    job = start(5, "-m", "vcluster.mpi", mpi_job.__file__, tmp_path / "found")
    expected = mpi_job.everything(backend="process")
    said = finish(job)
    assert job.returncode == 0, said
    found = pickle.loads((tmp_path / "found").read_bytes())  # noqa: S301
    assert {name for name in expected if not same(found[name], expected[name])} == set()
    assert "rank 2 raised ValueError" in found["error of raises"] and "raises" in found["error of raises"]
    assert found["error of deadlock"].startswith("DeadlockError: deadlock: rank 0 waits for rank 1")
    assert found["two clusters"] == [[3, 3], [3, 3]]
    assert "mpiexec -n 6 python -m vcluster.mpi" in found["too many"]
    assert "printed by the host" in said
    assert "[rank 0] printed by a device" in said and "[rank 1] printed by a device" in said


DYING = """
import os, signal, sys
from vcluster import VirtualCluster
with VirtualCluster(2) as cluster:
    print("pids", *cluster.pids(), flush=True)
    def kernel(device):
        print("begun", flush=True)
        if device.rank == 1 and sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if device.rank == 1 and sys.argv[1] == "exit":
            os._exit(3)
        while sys.argv[1] == "loop":
            pass
        device.barrier()
        if device.rank == 0:
            1 / 0
    cluster.run(kernel)
"""


def segments():
    """The shared memory of MPICH that has a name, so that it outlives its processes."""
    return {path.name for path in Path("/dev/shm").glob("mpich_shm_*")}


def nothing_is_left(said, before):
    """No process of the job, and no shared memory that was not there before it. (Other jobs may start meanwhile.)"""
    pids = [int(pid) for pid in re.search(r"pids (.*)", said)[1].split()]
    end = time.monotonic() + 20
    while left := [pid for pid in pids if psutil.pid_exists(pid)] or sorted(segments() - before):
        assert time.monotonic() < end, f"{left} are left"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("how", "expected"), [
    ("kill", r"the process of rank 1 \(rank 2 of the job, pid \d+ on .*\) was ended by SIGKILL"),
    ("exit", r"the process of rank 1 \(rank 2 of the job, pid \d+ on .*\) ended with exit code 3"),
    ("raise", r"rank 0 raised ZeroDivisionError"),
])
def test_a_job_that_fails_names_the_rank_and_leaves_nothing(tmp_path, how, expected):
    before = segments()
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    job = start(3, "-m", "vcluster.mpi", script, how)
    said = finish(job)
    assert job.returncode
    assert re.search(expected, said), said
    nothing_is_left(said, before)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_ctrl_c_ends_a_job_that_leaves_nothing(tmp_path):
    before = segments()
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    job = start(3, "-m", "vcluster.mpi", script, "loop")
    lines = []
    while not any("begun" in line for line in lines):
        lines.append(job.stdout.readline())
        assert lines[-1], "".join(lines)
    job.send_signal(signal.SIGINT)
    said = "".join(lines) + finish(job)
    assert job.returncode
    assert "KeyboardInterrupt" in said
    nothing_is_left(said, before)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tests", [
    ["collectives/test_collectives.py", "collectives/test_async.py"], ["simulation/test_three_ways.py"],
])
def test_the_tests_of_clusters_run_on_the_ranks_of_a_job(tests):
    job = start(5, "-m", "pytest", "--vcluster-backend=mpi", "-n", "0", "-q", "-p", "no:cacheprovider",
                "-k", "not any_integer", *(f"tests/cluster/{test}" for test in tests))    # that opens a cluster beside
    said, _ = job.communicate(timeout=500)
    assert job.returncode == 0, said
    assert re.search(r"\d passed", said) and "failed" not in said
