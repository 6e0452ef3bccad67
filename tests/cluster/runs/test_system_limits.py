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
for which, number in zip(words[::2], words[1::2]):
    if which == "directory":
        os.mkdir(number); os.chdir(number); os.rmdir("../" + number)
    else:
        resource.setrlimit(getattr(resource, which), (int(number), resource.getrlimit(getattr(resource, which))[1]))
try:
    with VirtualCluster(2, start_method=method) as cluster:
        print(cluster.run(lambda device: int(device.all_reduce(1))).outputs)
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
    """What a cluster under these limits says, and what is left open if it could not start."""
    words = [str(word) for limit in limits for word in limit]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, start_method, *words], cwd=folder, capture_output=True, text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": ""}, check=False)
    assert done.stderr == ""
    first, *rest = done.stdout.splitlines()
    assert rest in ([], ["left open 0"])
    return first


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
@pytest.mark.sampled(15)
@pytest.mark.parametrize("start_method", START_METHODS)
@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_a_limit_of_the_system_is_kept_or_named(limit, start_method, tmp_path):
    assert LIMITS[limit] in under([limit], start_method, tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_limits_that_leave_enough_are_kept_all_together(tmp_path):
    enough = [limit for limit, said in LIMITS.items() if said == "[2, 2]"]
    assert len(enough) == 3 and under(enough, "forkserver", tmp_path) == "[2, 2]"


def test_without_semaphores_shared_memory_works_and_queues_say_so(monkeypatch):
    """As where there is no /dev/shm."""
    def none(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(synchronize._multiprocessing, "SemLock", none)
    with VirtualCluster(2) as cluster:
        assert cluster.run(lambda device: int(device.all_reduce(1))).outputs == [2, 2]
    with pytest.raises(ClusterError, match=r"queue.* needs semaphores.*/dev/shm.*Read-only.*transport='shared_memory'"):
        VirtualCluster(2, transport="queue")
