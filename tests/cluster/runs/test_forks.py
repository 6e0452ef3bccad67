"""Forks of the host and of devices: the copy keeps its arrays, and neither it nor the original changes the other."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import numpy as np
import pytest

from parallelism.mesh import Mesh
from vcluster.code import ClusterError, DeviceFailedError
from vcluster.processes import forkserver, running_processes
from vcluster.processes.device_process import START_METHODS
from vcluster.runs import VirtualCluster

MESH = Mesh(devices=2)
LARGE = 1 << 16
PATIENCE_SECONDS = 25
DESCRIPTORS = Path("/proc/self/fd")


def in_a_fork(ask):
    """What ``ask()`` returns in a fork of this process, as text."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(PATIENCE_SECONDS)
            os.write(write, str(ask()).encode())
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    said = b"".join(iter(lambda: os.read(read, 4096), b""))
    os.close(read)
    os.waitpid(pid, 0)
    return said.decode()


@pytest.fixture(params=["process", "thread"])
def cluster(request, cluster_of):
    return cluster_of(MESH, request.param)


@pytest.mark.slow
def test_a_fork_of_the_host_is_told_that_the_cluster_is_not_its_own_and_may_make_one(cluster):
    channel = cluster.channel(0)
    assert "make a new cluster here" in in_a_fork(lambda: cluster.run(lambda device: device.rank))
    assert "is a fork of pid" in in_a_fork(lambda: channel.send(1.0))
    assert in_a_fork(lambda: cluster.closed) == "True"

    def reopened():
        forkserver.SERVER._preload = forkserver.OF_DEVICES = ()    # for one cluster
        cluster.close()
        cluster.restart()
        try:
            return cluster.run(lambda device: int(device.all_reduce(1))).outputs
        finally:
            cluster.close()

    assert in_a_fork(reopened) == "[2, 2]"
    assert cluster.run(lambda device: int(device.all_reduce(1))).outputs == [2, 2]


@pytest.mark.sampled(2)
def test_results_are_private_to_the_host_and_to_its_fork(cluster):
    before = [np.full(LARGE, 7.0), np.full(LARGE, 8.0)]
    outputs = cluster.run(lambda device: np.full(LARGE, 7.0 + device.rank)).outputs
    told, tell = os.pipe()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(PATIENCE_SECONDS)
        os.read(told, 1)    # the host has overwritten its own, and the devices have made others
        same = all((mine == right).all() for mine, right in zip(outputs, before, strict=True))
        outputs[0][:] = -1
        os.write(write, b"same" if same else b"changed")
        del outputs     # in the host these must not be free now
        os.write(write, b".")
        os._exit(0)
    outputs[1][:] = 5
    others = cluster.run(lambda device: np.full(LARGE, 100.0)).outputs
    os.write(tell, b"!")
    assert os.read(read, 7) in (b"same", b"same.")
    os.waitpid(pid, 0)
    more = cluster.run(lambda device: np.full(LARGE, 200.0)).outputs
    np.testing.assert_array_equal(outputs[0], before[0])
    assert (outputs[1] == 5).all()
    assert all((other == 100).all() for other in others)
    assert all((other == 200).all() for other in more)
    for fd in (told, tell, read, write):
        os.close(fd)


@pytest.mark.sampled(2)
def test_a_fork_that_goes_away_frees_nothing_of_the_hosts(cluster):
    outputs = cluster.run(lambda device: np.full(LARGE, 3.0)).outputs

    def drop():
        outputs.clear()

    in_a_fork(drop)
    others = cluster.run(lambda device: np.full(LARGE, 4.0)).outputs
    assert all((output == 3).all() for output in outputs)
    assert all((output == 4).all() for output in others)


def forks_and_returns(device, how):
    """Forks, and comes back from the kernel in the copy, too."""
    if os.fork() == 0:
        if how == "raises":
            raise ValueError("of a copy")
        if how == "exits":
            raise SystemExit(3)
        return "from the copy"
    code = os.waitstatus_to_exitcode(os.wait()[1])
    return code, int(device.all_reduce(1))


@pytest.mark.parametrize("how", ["returns", "raises", "exits"])
def test_a_copy_that_comes_back_from_the_kernel_ends_and_is_in_no_result(cluster_of, how):
    cluster = cluster_of(MESH)
    code = 3 if how == "exits" else 1
    assert cluster.run(forks_and_returns, how).outputs == [(code, 2), (code, 2)]
    for number in range(3):
        assert cluster.run(lambda device, number=number: number).outputs == [number, number]


def computes_in_a_copy(device):
    """A copy of a device computes with its arrays and tells by a pipe; what it may not do is an error."""
    x = device.all_gather(np.full(LARGE, float(device.rank)))
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        print("a copy may print")
        x *= 2
        try:
            device.barrier()
        except ClusterError as error:
            os.write(write, f"{x.sum()} {'is a fork of pid' in str(error)}".encode())
        os._exit(0)
    os.waitpid(pid, 0)
    said = os.read(read, 99).decode()
    os.close(read)
    os.close(write)
    return said, float(device.all_reduce(x).sum())


def test_a_copy_of_a_device_computes_with_arrays_of_its_own_and_does_not_communicate(cluster_of):
    assert cluster_of(MESH).run(computes_in_a_copy).outputs == [(f"{2.0 * LARGE} True", 2.0 * LARGE)] * 2


def leaves_a_child_and(ends, told):
    """A kernel whose rank 1 has a child that holds all that it had open, writes its pid to a file, and ends in one way.
    """

    def kernel(device):
        if device.rank == 1:
            child = os.fork()
            if child == 0:
                select.select([], [], [], PATIENCE_SECONDS)
                os._exit(0)
            told.write_text(str(child))
            ends()
        device.barrier()

    return kernel


ENDS = {
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), "was ended by SIGKILL"),
    "exits": (lambda: os._exit(5), "ended with exit code 5"),
    "replaced": (lambda: os.execv("/bin/sleep", ["sleep", "30"]), "has closed its connection to the host"),
}


@pytest.mark.slow_for("spawn")
@pytest.mark.sampled(12)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("start_method", START_METHODS)
def test_the_end_of_a_device_is_seen_though_a_child_of_its_own_lives(start_method, end, tmp_path):
    ends, text = ENDS[end]
    child = tmp_path / "child"
    with VirtualCluster(MESH, start_method=start_method, deadline_seconds=20) as cluster:
        with pytest.raises(DeviceFailedError, match=text):
            cluster.run(leaves_a_child_and(ends, child))
        assert cluster.run(lambda device: int(device.all_reduce(1))).outputs == [2, 2]
    os.kill(int(child.read_text()), signal.SIGKILL)     # it lives, and holds the output of the tests open


def closes_what_it_did_not_open(device):
    """A kernel that closes the connection to the host on rank 1, and returns as if nothing had happened."""
    if device.rank == 1:
        os.closerange(3, 1000)
    return device.rank


@pytest.mark.slow
@pytest.mark.slow_for("spawn")
@pytest.mark.parametrize("start_method", START_METHODS)
def test_a_device_that_closes_its_connection_is_told_by_the_run_that_closed_it(start_method):
    text = r"rank 1 .*(closed its connection|exit code 0).*os\.closerange in the kernel"
    with VirtualCluster(MESH, start_method=start_method, deadline_seconds=20) as cluster:
        for _ in range(5):
            with pytest.raises(DeviceFailedError, match=text) as caught:
                cluster.run(closes_what_it_did_not_open)
            assert caught.value.ranks == (1,)
            assert caught.value.outputs == {0: 0}
            assert cluster.run(lambda device: int(device.all_reduce(1))).outputs == [2, 2]


def inheritable(device):
    open_ones = [int(path.name) for path in DESCRIPTORS.iterdir()]
    return [fd for fd in open_ones if fd > 2 and (DESCRIPTORS / str(fd)).exists() and os.get_inheritable(fd)]


@pytest.mark.sampled(4)
@pytest.mark.slow_for("spawn")
@pytest.mark.skipif(not DESCRIPTORS.is_dir(), reason="a list of open descriptors")
@pytest.mark.parametrize("start_method", START_METHODS)
def test_no_descriptor_of_a_device_is_inherited_by_the_programs_that_it_starts(start_method):
    with VirtualCluster(MESH, start_method=start_method) as cluster:
        assert cluster.run(inheritable).outputs == [[], []]


def interrupted_as_it_forks():
    """What became of the interrupts that came before and after the fork of a device."""
    armed, told = [], []

    def interrupt(when):
        if armed == [when]:
            armed.clear()
            signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.register_at_fork(before=lambda: interrupt("before"), after_in_parent=lambda: interrupt("after_in_parent"))
    before = running_processes()
    for when in ("before", "after_in_parent"):
        armed[:] = [when]
        try:
            VirtualCluster(2, start_method="fork")
            told.append((when, "lost"))
        except KeyboardInterrupt:
            told.append((when, running_processes() == before))
    return told


@pytest.mark.slow
def test_an_interrupt_while_a_device_is_forked_is_not_lost_in_a_callback(capfd):
    assert in_a_fork(interrupted_as_it_forks) == "[('before', True), ('after_in_parent', True)]"
    assert capfd.readouterr() == ("", "")


def pooled(device, kind):
    """What a pool of a kernel, or a process of it, says."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing.pool import ThreadPool

    with ThreadPool(2) as threads:
        assert threads.map(lambda x: x * x, range(3)) == [0, 1, 4]
    if kind == "pool":
        multiprocessing.Pool(2)
    elif kind == "executor":
        with ProcessPoolExecutor(2) as executor:
            executor.submit(abs, -1)
    else:
        multiprocessing.get_context("spawn").Process(target=abs, args=(-1,)).start()


@pytest.mark.not_on_mpi("a rank is no daemon")
@pytest.mark.parametrize("kind", ["pool", "executor", "process"])
def test_a_kernel_that_starts_processes_by_multiprocessing_is_told_what_to_use(cluster_of, kind):
    cluster = cluster_of(MESH)
    with pytest.raises(DeviceFailedError, match=r"a kernel cannot start processes by multiprocessing .* use threads"):
        cluster.run(pooled, kind)
    assert cluster.run(lambda device: int(device.all_reduce(1))).outputs == [2, 2]


def in_a_pool(device):
    import multiprocessing

    def own(x):
        return x

    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.map(abs, [-1, 2]), pool.map(own, [1])


@pytest.mark.slow
@pytest.mark.not_on_mpi("threads")
def test_a_pool_of_a_device_that_is_a_thread_is_told_that_it_cannot_look_up_a_function_of_the_kernel(cluster_of):
    with pytest.raises(DeviceFailedError, match="the functions of a kernel are copies; define what the pool calls in"):
        cluster_of(MESH, "thread").run(in_a_pool)
