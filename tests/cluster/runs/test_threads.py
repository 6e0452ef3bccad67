"""Threads of a kernel and of the host: they work, and neither hide a deadlock nor make one up."""

from __future__ import annotations

import _thread
import gc
import queue
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from parallelism.mesh import Mesh
from vcluster import HOST
from vcluster.code import DeadlockError, DeviceFailedError, HostWaitWarning
from vcluster.messages import VirtualChannel
from vcluster.runs import VirtualCluster, host_waits

GRID = Mesh(a=2, b=2)


@pytest.fixture(params=["process", "thread"])
def backend(request):
    return request.param


def in_threads(*functions):
    """The results of functions that run at the same time."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [each.result() for each in [pool.submit(function) for function in functions]]


@contextmanager
def quiet_threads():
    """Threads of this process are cancelled, too, where devices are threads."""
    hook, threading.excepthook = threading.excepthook, lambda args: None
    try:
        yield
    finally:
        threading.excepthook = hook


# -- threads of a kernel -----------------------------------------------------------------------------------------------


def sums(device, axis, count):
    return [int(device.all_reduce(np.int64(i * 100 + device.rank), axis)) for i in range(count)]


@pytest.mark.sampled(2, 1)
def test_threads_call_collectives_on_groups_of_their_own(cluster_of, backend):
    run = cluster_of(GRID, backend).run(
        lambda device: in_threads(lambda: sums(device, "a", 15), lambda: sums(device, "b", 15),
                                  lambda: sums(device, ("a", "b"), 15)))
    for rank, found in enumerate(run):
        row, column = divmod(rank, 2)
        assert found[0] == [200 * i + column + column + 2 for i in range(15)]
        assert found[1] == [200 * i + 4 * row + 1 for i in range(15)]
        assert found[2] == [400 * i + 6 for i in range(15)]
    assert len([event for event in run.trace.events if event.kind == "collective"]) == 4 * 3 * 15
    assert run.outputs == run.outputs


def test_threads_on_one_group_take_turns(cluster_of, backend):
    def kernel(device):
        one, other = in_threads(lambda: sums(device, None, 12), lambda: sums(device, None, 12))
        return sorted(one + other)

    pairs = cluster_of(GRID, backend).run(kernel).outputs
    assert all(sum(found) == sum(pairs[0]) == 2 * sum(400 * i + 6 for i in range(12)) for found in pairs)


@pytest.mark.sampled(2)
def test_large_arrays_and_messages_of_several_threads(cluster_of, backend):
    x = np.arange(40_000.0)

    def exchange(device, tag):
        for i in range(6):
            device.send(x + i, 1 - device.rank, tag=tag)
            np.testing.assert_array_equal(device.recv(1 - device.rank, tag=tag), x + i)
        return tag

    def reduce(device):
        for i in range(6):
            np.testing.assert_array_equal(device.all_reduce(x + i), 2 * (x + i))
        return "reduced"

    run = cluster_of(Mesh(devices=2), backend).run(
        lambda device: in_threads(lambda: exchange(device, 1), lambda: exchange(device, 2), lambda: reduce(device)))
    assert run.outputs == [[1, 2, "reduced"]] * 2
    assert run.trace.makespan_seconds >= 0


@pytest.mark.sampled(2)
def test_a_helper_serves_what_the_kernel_itself_waits_for(cluster_of, backend):
    def kernel(device):
        started = threading.Event()

        def help_out():
            started.wait()
            device.send(np.arange(3.0), 1 - device.rank, tag=5)

        thread = threading.Thread(target=help_out)
        thread.start()
        threading.Timer(0.15, started.set).start()    # the host looks several times meanwhile
        x = device.recv(1 - device.rank, tag=5)
        thread.join()
        return x.tolist()

    run = cluster_of(Mesh(devices=2), backend).run(kernel)
    assert run.outputs == [[0.0, 1.0, 2.0]] * 2
    assert run.trace.makespan_seconds >= 0


def test_a_run_ends_when_the_calls_of_all_threads_have_ended(cluster_of, backend):
    def kernel(device):
        if device.rank == 0:
            thread = threading.Thread(target=lambda: device.state.update(got=float(device.recv(1)[0])))
            thread.start()
            while not device.endpoint.threads.helpers:
                pass
            device.send(np.zeros(1), 1, tag=9)
        else:
            device.recv(0, tag=9)   # the thread is in its call now
            device.send(np.full(1, 4.0), 0)

    cluster = cluster_of(Mesh(devices=2), backend)
    cluster.run(kernel)
    assert cluster.run(lambda device: device.state.pop("got", None)).outputs == [4.0, None]


def test_a_deadlock_of_threads_that_are_joined_is_told(cluster_of):
    def kernel(device):
        in_threads(lambda: device.recv(1 - device.rank, tag=1), lambda: device.recv(1 - device.rank, tag=2))

    cluster = cluster_of(Mesh(devices=2))
    with pytest.raises(DeadlockError, match="rank 0 waits for rank 1; rank 1 waits for rank 0"):
        cluster.run(kernel)
    assert cluster.run(lambda device: device.rank).outputs == [0, 1]


def test_helpers_that_wait_for_a_rank_that_has_returned_are_told(cluster_of, backend):
    def kernel(device):
        device.barrier()
        if device.rank == 2:
            return
        helper = threading.Thread(target=lambda: device.all_reduce(np.ones(3)))
        helper.start()
        helper.join()

    cluster = cluster_of(Mesh(devices=3), backend)
    with quiet_threads(), pytest.raises(DeadlockError, match="rank 2 returned without calling all_reduce"):
        cluster.run(kernel)
    assert cluster.run(lambda device: int(device.all_reduce(1))).outputs == [3] * 3


def test_a_kernel_that_computes_while_its_helper_waits_is_no_deadlock(cluster_of, backend):
    def kernel(device):
        if device.rank:
            device.send(device.recv(0) + 1, 0)
            return None
        helper = ThreadPoolExecutor(1)
        answer = helper.submit(device.recv, 1)
        time.sleep(0.3)     # the host looks many times meanwhile
        device.send(4, 1)
        helper.shutdown()
        return answer.result()

    assert cluster_of(Mesh(devices=2), backend).run(kernel).outputs == [5, None]


@pytest.mark.sampled(2)
def test_threads_of_a_failed_run_do_not_reach_the_next(cluster_of, backend):
    def fails(device):
        if device.rank == 0:
            for tag in (1, 2):
                threading.Thread(target=lambda tag=tag: device.recv(1, tag=tag), daemon=True).start()
            while len(device.endpoint.threads.helpers) < 2:
                pass
            raise ValueError("on purpose")
        device.barrier()

    cluster = cluster_of(Mesh(devices=2), backend)
    with quiet_threads():
        for number in range(3):
            with pytest.raises(DeviceFailedError, match="on purpose"):
                cluster.run(fails)
            assert cluster.run(
                lambda device, n: device.sendrecv(np.float64(n), 1 - device.rank, 1 - device.rank, tag=1), number,
            ).outputs == [number] * 2


# -- threads of the host -----------------------------------------------------------------------------------------------


def from_host(device):
    return device.channel(HOST).recv() if device.rank == 0 else None


def later(event, channel):
    event.wait()
    channel.send(5.0)


@pytest.mark.sampled(6, 4)
@pytest.mark.parametrize("name", ["Queue-reader", "vcluster-feeder", None])
def test_a_thread_of_the_host_that_will_send_is_no_deadlock_however_it_is_named(cluster_of, backend, name):
    cluster, event = cluster_of(Mesh(devices=2), backend), threading.Event()
    if name is None:
        _thread.start_new_thread(later, (event, cluster.channel(0)))
    else:
        threading.Thread(target=later, args=(event, cluster.channel(0)), name=name).start()
    threading.Timer(0.15, event.set).start()     # the host looks several times meanwhile
    assert cluster.run(from_host).outputs == [5.0, None]


def test_a_device_that_waits_for_a_thread_of_the_host_is_warned_of_with_its_line(cluster_of, monkeypatch):
    monkeypatch.setattr(host_waits, "PATIENCE_SECONDS", 0.1)
    cluster, event = cluster_of(Mesh(devices=2)), threading.Event()
    threading.Thread(target=later, args=(event, cluster.channel(0))).start()
    told = []

    def show(message, category, filename, line, *rest):
        told.append((category, str(message), filename))
        event.set()

    monkeypatch.setattr(warnings, "showwarning", show)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", show)
        assert cluster.run(from_host).outputs == [5.0, None]
    (category, text, filename), = told
    assert (category, filename) == (HostWaitWarning, __file__)
    assert text.startswith("rank 0 waits for the host in recv(from the host, tag 0) at ")
    assert f"{__file__}:{from_host.__code__.co_firstlineno + 1}" in text


def test_threads_of_the_host_share_a_channel(cluster_of):
    cluster = cluster_of(Mesh(devices=2))
    channel = cluster.channel(0)
    assert isinstance(channel, VirtualChannel)

    def send(first):
        for i in range(100):
            channel.send(np.full(50, first + i), tag=i % 3)

    in_threads(lambda: send(0), lambda: send(1000), lambda: send(2000))
    found = cluster.run(lambda device: [
        int(device.channel(HOST).recv(tag=tag).mean()) for tag in range(3)
        for _ in range(3 * len(range(tag, 100, 3)))] if device.rank == 0 else None).outputs[0]
    assert sorted(found) == sorted(first + i for first in (0, 1000, 2000) for i in range(100))
    for first in (0, 1000, 2000):   # of one thread and tag in order
        for tag in range(3):
            mine = [n - first for n in found if first <= n < first + 1000 and (n - first) % 3 == tag]
            assert mine == sorted(mine)


# -- deadlocks with many operations ------------------------------------------------------------------------------------


def test_a_deadlock_with_hundreds_of_receives_under_way_is_told(cluster_of, backend):
    def kernel(device):
        if device.rank == 0:
            works = [device.irecv(1, tag=tag) for tag in range(600)]
            works[0].wait()

    with pytest.raises(DeadlockError, match="rank 1 returned without sending what rank 0 waits for"):
        cluster_of(Mesh(devices=2), backend).run(kernel)


def has_a_cluster(device, fails):
    """One device fails while the others start, use or close clusters of their own."""
    with VirtualCluster(2, backend="thread") as inner:
        inner.run(lambda mine: int(mine.all_reduce(mine.rank)))
        if device.rank == fails:
            raise ValueError
        inner.run(lambda mine: [mine.barrier() for _ in range(20)])
    device.barrier()


@pytest.mark.sampled(2)
def test_devices_that_have_clusters_of_their_own_are_cancelled_in_any_state_of_those(cluster_of, backend):
    cluster = cluster_of(GRID, backend)
    pids, threads = cluster.pids(), threading.active_count()
    for number in range(4):
        with pytest.raises(DeviceFailedError) as caught:
            cluster.run(has_a_cluster, number % cluster.size)
        assert caught.value.ranks == (number % cluster.size,)
        assert cluster.run(lambda device: int(device.all_reduce(1))).outputs == [4] * 4
    assert cluster.pids() == pids
    gc.collect()
    assert threading.active_count() == threads


def released_by_an_event(act, receive):
    go = threading.Event()
    helper = threading.Thread(target=lambda: (go.wait(), act()))
    helper.start()
    time.sleep(0.01)    # until it waits
    go.set()
    return receive(), helper.join()


def released_while_it_starts_a_thread(act, receive):
    answer = []
    helper = threading.Thread(target=lambda: answer.append(receive()))
    helper.start()
    act()
    helper.join()
    return answer


def released_by_a_join(act, receive):
    go = threading.Event()
    first = threading.Thread(target=go.wait)
    helper = threading.Thread(target=lambda: (first.join(), act()))
    for thread in (first, helper):
        thread.start()
    time.sleep(0.01)
    go.set()
    return receive(), helper.join()


def released_by_a_queue(act, receive):
    orders = queue.Queue()
    helper = threading.Thread(target=lambda: orders.get()())
    helper.start()
    time.sleep(0.01)
    orders.put(act)
    return receive(), helper.join()


def released_in_a_pool(act, receive):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        time.sleep(0.01)
        pool.submit(act)
        return [receive()]


RELEASED = [released_by_an_event, released_while_it_starts_a_thread, released_by_a_join, released_by_a_queue,
            released_in_a_pool]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("count", [1, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("released", RELEASED, ids=lambda each: each.__name__)
def test_a_thread_that_was_released_and_has_not_run_yet_is_no_deadlock(cluster_of, backend, released, count):
    def kernel(device):
        def act():
            time.sleep(0.1)     # the host looks meanwhile
            device.send(4, 1)

        return device.send(device.recv(0) + 1, 0) if device.rank else released(act, lambda: device.recv(1))[0]

    cluster = cluster_of(Mesh(devices=2), backend)
    for _ in range(count):
        assert cluster.run(kernel).outputs == [5, None]
