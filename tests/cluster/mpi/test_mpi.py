"""Devices on the ranks of MPI jobs. Each job starts processes that load everything, so few tests make one by day."""

import pickle
import re
import signal
import time
from pathlib import Path

import mpi_job
import mpi_library
import numpy as np
import psutil
import pytest
from mpi_jobs import each_mpi, finish, needs_mpi, start

pytestmark = needs_mpi


def same(a, b):
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


NODES = {"": [(0, 1, 2, 3)], 1: [(0,), (1,), (2,), (3,)], 2: [(0,), (1, 2), (3,)]}
"""By the number of ranks on a node, if that is given: the devices of each node, beside the host."""


@pytest.mark.timeout(240)
@each_mpi
@pytest.mark.parametrize("per_node", NODES)
@pytest.mark.slow
def test_a_job_gives_the_bits_the_events_the_times_and_the_errors_of_processes(tmp_path, mpi, per_node):
    job = start(5, "-m", "vcluster.mpi", mpi_job.__file__, tmp_path / "found", mpi=mpi,
                VCLUSTER_MPI_RANKS_PER_NODE=str(per_node))
    expected = mpi_job.everything(backend="process")
    said = finish(job)
    assert job.returncode == 0, said
    found = pickle.loads((tmp_path / "found").read_bytes())  # noqa: S301
    assert {name for name in expected if not same(found[name], expected[name])} == set()
    assert "rank 2 raised ValueError" in found["error of raises"] and "raises" in found["error of raises"]
    assert found["error of deadlock"].startswith("DeadlockError: deadlock: rank 0 waits for rank 1")
    assert found["two clusters"] == [[3, 3], [3, 3]]
    assert found["late"] == ["DeviceFailedError", "DeadlockError"] * 3
    nodes = NODES[per_node]
    assert found["places"] == tuple(8 * node + there.index(device) for device in range(4)
                                    for node, there in enumerate(nodes) if device in there)
    for device, groups in enumerate(found["groups"]):
        assert len(groups) == 3 and all(device in ranks for ranks in groups)
        assert groups == {ranks: "NodeGroup" if any(set(ranks) <= set(there) for there in nodes) else "MpiGroup"
                          for ranks in groups}
    assert "mpiexec -n 6 python -m vcluster.mpi" in found["too many"]
    assert "printed by the host" in said
    assert "[rank 0] printed by a device" in said and "[rank 1] printed by a device" in said


@pytest.mark.slow
@pytest.mark.timeout(240)
@each_mpi
def test_the_collectives_of_the_library_give_the_results_the_traffic_and_the_errors_of_direct_ones(mpi):
    job = start(5, "-m", "vcluster.mpi", mpi_library.__file__, mpi=mpi)
    said = finish(job)
    assert job.returncode == 0 and "all is right" in said, said


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
@each_mpi
@pytest.mark.parametrize(("how", "expected"), [
    ("kill", r"the process of rank 1 \(rank 2 of the job, pid \d+ on .*\) was ended by SIGKILL"),
    ("exit", r"the process of rank 1 \(rank 2 of the job, pid \d+ on .*\) ended with exit code 3"),
    ("raise", r"rank 0 raised ZeroDivisionError"),
])
def test_a_job_that_fails_names_the_rank_and_leaves_nothing(tmp_path, mpi, how, expected):
    before = segments()
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    job = start(3, "-m", "vcluster.mpi", script, how, mpi=mpi)
    said = finish(job)
    assert job.returncode
    assert re.search(expected, said), said
    nothing_is_left(said, before)


@pytest.mark.slow
@pytest.mark.timeout(240)
@each_mpi
def test_ctrl_c_ends_a_job_that_leaves_nothing(tmp_path, mpi):
    before = segments()
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    job = start(3, "-m", "vcluster.mpi", script, "loop", mpi=mpi)
    lines = []
    while not any("begun" in line for line in lines):
        lines.append(job.stdout.readline())
        assert lines[-1], "".join(lines)
    job.send_signal(signal.SIGINT)
    said = "".join(lines) + finish(job)
    assert job.returncode
    assert "KeyboardInterrupt" in said or mpi.name == "openmpi"     # whose launcher ends the ranks itself
    nothing_is_left(said, before)


@pytest.mark.slow
@pytest.mark.timeout(240)
@each_mpi
def test_the_doctor_tells_the_ranks_of_each_node(mpi):
    said = finish(start(3, "-m", "vcluster.mpi", "-m", "vcluster", "doctor", mpi=mpi))
    assert re.search(r"MPI +\S.*, 3 ranks\n", said) and "the host and devices 0 1\n" in said, said


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_notebook_attaches_to_the_host_of_a_job(tmp_path):
    jupyter_client = pytest.importorskip("jupyter_client")
    path = tmp_path / "kernel.json"
    job = start(3, "-m", "vcluster.mpi", "-m", "ipykernel_launcher", "-f", path)
    try:
        while "--existing" not in job.stdout.readline():    # then the kernel listens
            assert job.poll() is None
        client = jupyter_client.BlockingKernelClient(connection_file=str(path))
        client.load_connection_file()
        client.start_channels()
        client.wait_for_ready(timeout=60)
        said = []
        client.execute_interactive(
            "from vcluster import VirtualCluster\nwith VirtualCluster(2) as cluster:\n"
            "    print(cluster.backend, *cluster.run(lambda device: int(device.all_reduce(device.rank + 1))).outputs)",
            timeout=60, output_hook=said.append)
        assert "".join(message["content"].get("text", "") for message in said) == "mpi 3 3\n", said
        client.shutdown()
        finish(job)
        assert job.returncode == 0
        client.stop_channels()
    finally:
        job.kill()
        job.wait()
        job.stdout.close()
