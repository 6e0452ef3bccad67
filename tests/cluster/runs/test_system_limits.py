"""Limits of the system: a cluster keeps below them if it can, and an error names the one it runs into."""

from __future__ import annotations

import errno
import subprocess
import sys
from multiprocessing import synchronize

import pytest
from paths import ROOT

from vcluster.code import ClusterError
from vcluster.processes.device_process import START_METHODS
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
