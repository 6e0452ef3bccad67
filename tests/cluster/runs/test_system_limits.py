"""Limits of the system: a cluster keeps below them if it can, and an error names the one it runs into."""

from __future__ import annotations

import errno
import subprocess
import sys
from multiprocessing import synchronize

import numpy as np
import pytest
from gone import gone
from paths import ROOT

from vcluster.code import ClusterError
from vcluster.processes.device_process import START_METHODS
from vcluster.processes.memory_left import Memory, measured_memory
from vcluster.runs import VirtualCluster

SCRIPT = """
import gc, os, resource, sys
from vcluster import ClusterError, VirtualCluster
method, *words = sys.argv[1:]
before = len(os.listdir("/proc/self/fd"))
def limit(words):
    for which, number in zip(words[::2], words[1::2]):
        if which == "directory":
            os.mkdir(number); os.chdir(number); os.rmdir("../" + number)
        else:
            resource.setrlimit(getattr(resource, which), (int(number), resource.getrlimit(getattr(resource, which))[1]))
    return which
def run():
    with VirtualCluster(2, start_method=method) as cluster:
        print(cluster.run(lambda device: int(device.all_reduce(1))).outputs)
if "then" in words:     # under some limits first, then under others, too
    limit(words[:words.index("then")])
    run()
    words = words[words.index("then") + 1:]
which = limit(words)
try:
    run()
except ClusterError as error:
    print(error)
else:
    sys.exit()
resource.setrlimit(getattr(resource, which), (resource.getrlimit(getattr(resource, which))[1],) * 2)
gc.collect()    # the frames of the error, which is gone, held the mapping and with it the file
print("left open", max(0, len(os.listdir("/proc/self/fd")) - before - 1))
"""     # the socket of the fork server may stay open

LIMITS = {
    ("RLIMIT_FSIZE", 100_000): "shared memory counts as a file, and files may not be so large (ulimit -f)",
    ("RLIMIT_NOFILE", 12): "this process may open no more files (ulimit -n)",
    ("RLIMIT_FSIZE", 1 << 31): "[2, 2]",
    ("RLIMIT_AS", 3 << 30): "[2, 2]",
    ("directory", "gone"): "[2, 2]",
}


def under(limits, start_method, folder):
    """What a cluster under these limits says; if it could not start, nothing is left open.

    With ("then",) among them, a cluster under those before it, and one under all.
    """
    words = [str(word) for limit in limits for word in limit]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, start_method, *words], cwd=folder, capture_output=True, text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": ""}, check=False)
    assert done.stderr == ""
    said = done.stdout.splitlines()
    if said[-1].startswith("left open"):
        assert said.pop() == "left open 0"
    return said


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
@pytest.mark.slow
@pytest.mark.parametrize("start_method", START_METHODS)
@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_a_limit_of_the_system_is_kept_or_named(limit, start_method, tmp_path):
    (said,) = under([limit], start_method, tmp_path)
    assert LIMITS[limit] in said


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_limits_that_leave_enough_are_kept_all_together_and_one_that_does_not_is_named(tmp_path):
    enough = [limit for limit, said in LIMITS.items() if said == "[2, 2]"]
    small = next(iter(LIMITS))
    assert len(enough) == 3
    kept, named = under([*enough, ("then",), small], "forkserver", tmp_path)
    assert kept == "[2, 2]" and LIMITS[small] in named


def test_without_semaphores_shared_memory_works_and_queues_say_so(monkeypatch):
    """As where there is no /dev/shm."""
    def none(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(synchronize._multiprocessing, "SemLock", none)
    with VirtualCluster(2) as cluster:
        assert cluster.run(lambda device: int(device.all_reduce(1))).outputs == [2, 2]
    with pytest.raises(ClusterError, match=r"queue.* needs semaphores.*/dev/shm.*Read-only.*transport='shared_memory'"):
        VirtualCluster(2, transport="queue")


@pytest.mark.parametrize(("devices", "told"), [
    (3, ["devices started: 0 of 3, 0 s", "devices started: 1 of 3, 0 s", "devices started: 2 of 3, 0 s"]), (2, []),
])
def test_the_start_of_many_devices_tells_how_far_it_is(monkeypatch, capfd, devices, told):
    monkeypatch.setattr("vcluster.processes.crew.MANY", 3)
    monkeypatch.setattr("parallelism.display.progress_line.LONG_SECONDS", 0.0)
    with VirtualCluster(devices, backend="process"):
        assert capfd.readouterr().err.splitlines() == told


@pytest.mark.parametrize(("left", "refused"), [(9_000_000, True), (10_000_000, False)])
def test_a_cluster_that_is_too_large_for_the_memory_is_refused_while_it_starts(monkeypatch, left, refused):
    """Of five devices two have started when this is asked first, and the other three need what the first has."""
    asked = []

    def measured(pid):
        asked.append(pid)
        return Memory(3_145_728, left)

    monkeypatch.setattr("vcluster.processes.crew.MANY", 2)
    monkeypatch.setattr("vcluster.processes.memory_left.measured_memory", measured)
    if refused:
        with pytest.raises(ClusterError) as caught:
            VirtualCluster(5, backend="process")
        assert str(caught.value) == (
            "a cluster of 5 devices cannot be started: each needs 3 MiB of memory, 15 MiB together, and 8.58 MiB are "
            "left after the first 2")
        assert len(asked) == 1 and gone(asked[0])
        return
    with VirtualCluster(5, backend="process") as cluster:
        assert asked == [cluster.pids()[0]] * 2
        assert cluster.run(lambda device: int(device.all_reduce(1))).outputs == [5] * 5


def test_the_memory_of_a_device_is_measured():
    with VirtualCluster(1, backend="process") as cluster:
        memory = measured_memory(*cluster.pids())
        (before,) = cluster.run(lambda device: device.state.setdefault("held", np.ones(4_000_000)).nbytes)
        after = measured_memory(*cluster.pids())
    assert 100_000 < memory.of_a_device < 100_000_000 < memory.left
    assert 0 <= after.of_a_device - memory.of_a_device - before < 50_000_000
    assert measured_memory(1 << 30) is None
