"""What the soak tries: each function is one trial on a cluster. It returns, or raises `Finding` or another error.

A trial draws everything from ``host.rng``, which is seeded for it alone. After each the cluster must work as before.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress

import kernels
import numpy as np
from random_programs import MESHES, Step, line_of, program

from vcluster import (
    ClusterError,
    ClusterTimeoutError,
    CollectiveMismatchError,
    DeadlockError,
    DeviceFailedError,
    PerDevice,
    UndeliveredMessageError,
)
from vcluster.processes.forkserver import SERVER

MOST_RUNS = 100_000
"""Runs after which what should have happened by a signal has not."""


class Finding(Exception):
    """What must not be."""


def hold(condition, *words):
    if not condition:
        raise Finding(" ".join(map(str, words)))


def run_right(cluster, rng, longest=8):
    """A random right program; its results are checked on the devices and on the host."""
    token = rng.getrandbits(40)
    steps = program(rng, cluster.mesh, rng.randint(0, longest))
    extent = rng.choice((1, 7, 300, 9000, 40_000))
    xs = [np.arange(extent) * (rank + 1) + token % 1000 for rank in range(cluster.size)]
    try:
        outputs = cluster.run(kernels.right, token, steps, PerDevice(xs)).outputs
    except DeviceFailedError as error:
        if isinstance(error.__cause__, AssertionError):
            raise Finding("wrong value in a device:", error) from error
        raise
    total = sum(xs)
    for rank, (said, number, x) in enumerate(outputs):
        hold((said, number) == (token, rank), "result of another run or rank:", said, number, "not", token, rank)
        hold(x.dtype == total.dtype and np.array_equal(x, total), "wrong value in a result of rank", rank)


def right(host):
    for _ in range(host.rng.randint(1, 10)):
        run_right(host.cluster, host.rng)


def fails(cluster, expected, *call):
    """The error of a run that must fail."""
    try:
        cluster.run(*call)
    except expected as error:
        return error
    raise Finding(f"no {expected} of", *call)


def names(error, rank):
    return rank in error.ranks or any(f"{word} {rank}" in str(error) for word in ("rank", "ranks", "and", "to", ","))


def mistake(host):
    """One rank does another thing at one step: the right error, at the right rank and line."""
    rng, cluster = host.rng, host.cluster
    if cluster.size == 1:
        return
    what = rng.choice(("dtype", "other", "leave", "receive", "skip", "raise"))
    steps = program(rng, cluster.mesh, rng.randint(0, 8))
    steps.append(Step("all_reduce", cluster.mesh.axes, 3, False, None, 0))  # so that everybody has something to miss
    place = rng.randrange(len(steps)) if what == "leave" else len(steps) - 1
    rank = rng.randrange(cluster.size)
    if what == "raise":
        error = fails(cluster, DeviceFailedError, kernels.wrong, 0, steps, (rank, place, what))
        hold(isinstance(error.__cause__, ValueError), "another exception:", repr(error.__cause__))
        hold(error.ranks == (rank,) and error.__cause__.args == ((rank, place, what),), "another failure:", error)
        hold(error.locations == (line_of("raise ValueError(mistake)"),), "another line:", error)
        return
    mismatch = what in ("dtype", "other")
    either = (DeadlockError, CollectiveMismatchError, UndeliveredMessageError)
    error = fails(
        cluster, CollectiveMismatchError if mismatch else either, kernels.wrong, 0, steps, (rank, place, what))
    hold(names(error, rank), "rank", rank, "is not named:", error)
    if mismatch:
        line = line_of("device.reduce(x, axes)" if what == "other" else "return device.all_reduce(x, axes, **options)")
        hold(rank in error.ranks and error.operation in ("all_reduce", "reduce"), "another mismatch:", error)
        hold(line in error.locations and line in str(error), "without the line", line, ":", error)
        said = {"dtype": "int32", "other": "reduce("}[what]
        hold(said in error.calls[rank], "not what rank", rank, "called:", error.calls[rank])
    if what == "receive" and isinstance(error, DeadlockError):
        hold(line_of("tag=99") in error.locations, "without the line of the receive:", error)


def failing(host):
    """A kernel raises what cannot be pickled or described, exits, or returns what cannot be pickled."""
    rng, cluster = host.rng, host.cluster
    how = rng.choice(("unpicklable", "wordless", "exits", "result"))
    if how == "result" and host.backend == "thread":
        return
    rank = rng.randrange(cluster.size)
    steps = program(rng, cluster.mesh, rng.randint(0, 4))
    error = fails(cluster, DeviceFailedError, kernels.raises, 1, steps, rank, how)
    hold(error.ranks == (rank,), "another rank than", rank, ":", error)
    if how != "result":
        hold("kernels.py:" in error.locations[0], "another line:", error.locations)


def killed(host):
    """One device or two die by a signal, at any moment."""
    rng, cluster = host.rng, host.cluster
    pids = cluster.pids()
    chosen = rng.sample(range(cluster.size), min(cluster.size, rng.choice((1, 1, 1, 2))))
    number = rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT))
    for rank in chosen:
        host.hand.later(rng.uniform(0, 0.02) * rng.random(), pids[rank], number)
    told = run_until_told(host, cluster, [pids[rank] for rank in chosen])
    for error in told:
        hold(set(error.ranks) <= set(chosen), "another rank than", chosen, ":", error)
        hold(error.signal == signal.Signals(number).name, "not", number, ":", error)
        hold(f"was ended by {error.signal}" in str(error), "no signal:", error)


def run_until_told(host, cluster, pids):
    """Runs until none of the processes is a device any more: the errors."""
    told = []
    for _ in range(MOST_RUNS):
        if not set(pids) & set(cluster.pids()) and not host.hand.pending():
            hold(told, "the death of", pids, "was never told")
            return told
        try:
            run_right(cluster, host.rng)
        except DeviceFailedError as error:
            hold(error.__cause__ is None, "a failure and no death:", error)
            told.append(error)
    raise Finding("deaths were not told in", MOST_RUNS, "runs; told:", told)


def stopped(host):
    """Devices are stopped and go on: a slow device is no error. A peer that dies meanwhile is told at once."""
    rng, cluster = host.rng, host.cluster
    pids = cluster.pids()
    chosen = rng.sample(range(cluster.size), rng.randint(1, min(2, cluster.size)))
    for rank in chosen:
        begin = rng.uniform(0, 0.01)
        host.hand.later(begin, pids[rank], signal.SIGSTOP)
        host.hand.later(begin + rng.uniform(0, 0.4), pids[rank], signal.SIGCONT)
    dies = rng.randrange(cluster.size) if rng.random() < 0.3 else chosen[0]
    if dies not in chosen:
        host.hand.later(rng.uniform(0, 0.02), pids[dies], signal.SIGKILL)
        for error in run_until_told(host, cluster, [pids[dies]]):
            hold(error.ranks == (dies,), "another rank than", dies, ":", error)
    while host.hand.pending():
        run_right(cluster, rng)


def server_stopped(host):
    """The fork server is stopped for a moment while a device dies."""
    rng, cluster = host.rng, host.cluster
    pids, dies = cluster.pids(), rng.randrange(cluster.size)
    begin = rng.uniform(0, 0.01)
    host.hand.later(begin, SERVER.pid, signal.SIGSTOP)
    host.hand.later(rng.uniform(0, 0.02), pids[dies], signal.SIGKILL)
    host.hand.later(begin + rng.uniform(0, 0.4), SERVER.pid, signal.SIGCONT)
    host.held = None  # there may be a second server from now on
    for error in run_until_told(host, cluster, [pids[dies]]):
        hold(error.ranks == (dies,), "another rank than", dies, ":", error)


def server_killed(host):
    """The fork server dies, and all devices with it."""
    cluster = host.cluster
    pids = cluster.pids()
    host.hand.later(host.rng.uniform(0, 0.02), SERVER.pid, signal.SIGKILL)
    run_until_told(host, cluster, pids)
    for other in host.others():  # they are told by their next run
        with suppress(DeviceFailedError):
            run_right(other, host.rng)


def interrupted(host):
    """Ctrl-C at any moment ends the run and is never lost."""
    rng, cluster = host.rng, host.cluster
    try:
        host.hand.later(rng.uniform(0, 0.03), os.getpid(), signal.SIGINT)
        for _ in range(MOST_RUNS):
            run_right(cluster, rng)
            if not host.hand.pending():
                for _ in range(1000):
                    pass
                raise Finding("an interrupt was lost")
        raise Finding("no interrupt came")
    except KeyboardInterrupt:
        pass
    host.hand.wait()


def interrupted_start(host):
    """Ctrl-C while a cluster starts or is closed."""
    rng = host.rng
    pause = rng.choice((0.005, 0.05, 0.3))
    try:
        host.hand.later(rng.uniform(0, pause), os.getpid(), signal.SIGINT)
        for _ in range(MOST_RUNS):
            with host.new_cluster(rng.choice(MESHES[:3])) as fresh:
                run_right(fresh, rng)
            if not host.hand.pending():
                for _ in range(1000):
                    pass
                raise Finding("an interrupt was lost")
    except KeyboardInterrupt:
        pass
    host.hand.wait()


def forked(host):
    """The host forks between runs, or while a run is under way: the copy is told, and nobody else notices."""
    rng, cluster = host.rng, host.cluster
    if rng.random() < 0.5:
        child = fork(cluster)
        run_right(cluster, rng)
    else:
        found = []

        def meanwhile():
            time.sleep(rng.uniform(0, 0.01))
            found.append(fork(cluster))

        thread = threading.Thread(target=meanwhile)
        thread.start()
        while thread.is_alive():
            run_right(cluster, rng)
        child, = found
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    hold(code == 0, "a fork of the host ended with", code)


def fork(cluster):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.alarm(100)
        code = kernels.child_uses_cluster(cluster)
    finally:
        os._exit(code)


def kernel_forks(host):
    token = host.rng.getrandbits(40)
    total = sum(range(host.cluster.size))
    outputs = host.cluster.run(kernels.forks, token).outputs
    hold(outputs == [(token, 1, total)] * host.cluster.size, "of kernels that fork:", outputs)


def kernel_threads(host):
    rng, cluster = host.rng, host.cluster
    token, count, mesh = rng.getrandbits(40), rng.randint(1, 20), cluster.mesh
    outputs = cluster.run(kernels.threads, token, count).outputs
    for rank, (said, sums) in enumerate(outputs):
        for axis in mesh.axes:
            group = next(group for group in mesh.groups(axis) if rank in group)
            expected = [i * 100 * len(group) + sum(group) for i in range(count)]
            hold(said == token and sums[axis] == expected, "threads of rank", rank, "over", axis, ":", said, sums)


def host_thread(host):
    """A thread of the host sends what the devices wait for."""
    rng, cluster = host.rng, host.cluster
    token, count = rng.getrandbits(40), rng.randint(1, 12)
    xs = [[np.arange(rng.choice((1, 100, 20_000))) for _ in range(count)] for _ in range(cluster.size)]

    def serve():
        for i in range(count):
            for rank in range(cluster.size):
                if rng.random() < 0.1:
                    time.sleep(0.02)
                cluster.channel(rank).send(xs[rank][i])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        outputs = cluster.run(kernels.from_host, token, count).outputs
    finally:
        thread.join()
    sums = [[float(x.sum()) for x in mine] for mine in xs]
    total = float(sum(map(sum, sums)))
    hold(outputs == [(token, mine, total) for mine in sums], "from a thread of the host:", outputs)


def nested(host):
    """Clusters of threads inside devices, one of which fails."""
    rng, cluster = host.rng, host.cluster
    token, rank = rng.getrandbits(40), rng.randrange(-1, cluster.size)
    if rank < 0:
        outputs = cluster.run(kernels.nested, token, [], rank).outputs
        hold(outputs == [(token, [3, 3])] * cluster.size, "of clusters inside:", outputs)
        return
    error = fails(cluster, DeviceFailedError, kernels.nested, token, [], rank)
    hold(error.ranks == (rank,) and error.__cause__.args == (token,), "not the failure of rank", rank, ":", error)


def restarted(host):
    host.cluster.restart()


def forgotten(host):
    host.cluster.forget()


def closed_under_way(host):
    """Another thread closes the cluster in the middle of a run."""
    rng, cluster = host.rng, host.cluster

    def close():
        time.sleep(rng.uniform(0, 0.02))
        cluster.close()

    thread = threading.Thread(target=close)
    thread.start()
    try:
        for _ in range(MOST_RUNS):
            run_right(cluster, rng)
        raise Finding("the cluster was not closed in", MOST_RUNS, "runs")
    except ClusterError as error:
        hold("closed" in str(error) and type(error) is ClusterError, "another error than of the close:", repr(error))
    finally:
        thread.join()
    cluster.restart()


def late(host):
    """A run that takes longer than its deadline."""
    with host.new_cluster(host.rng.choice(MESHES[:3]), deadline_seconds=host.rng.uniform(0.01, 0.3)) as fresh:
        error = fails(fresh, ClusterTimeoutError, kernels.never_ends)
        hold("deadline_seconds" in str(error), "another error:", error)
        with suppress(ClusterTimeoutError):  # that of a slow machine
            hold(fresh.run(kernels.counts).outputs == [fresh.size] * fresh.size, "wrong after a deadline")


def asynchronous(host):
    """From the event loop of asyncio, and two clusters at once."""
    rng, cluster = host.rng, host.cluster
    seeds = rng.getrandbits(30), rng.getrandbits(30)

    async def both(other):
        one, two = (type(rng)(seed) for seed in seeds)
        await asyncio.gather(
            asyncio.to_thread(run_right, cluster, one), asyncio.to_thread(run_right, other, two))

    with host.new_cluster(rng.choice(MESHES[:3])) as other:
        asyncio.run(both(other))


def pool(host):
    """A pool of processes beside the cluster."""
    with multiprocessing.get_context("fork").Pool(2) as workers:
        pending = workers.map_async(abs, range(-20, 0))
        run_right(host.cluster, host.rng)
        hold(sorted(pending.get(60)) == list(range(1, 21)), "of the pool")


def fresh(host):
    """A new cluster, a trial on it, and its end."""
    with host.new_cluster(host.rng.choice(MESHES)) as made:
        run_right(made, host.rng)
        name = host.rng.choice([name for name in host.allowed() if name not in _ALONE])
        before, host.cluster = host.cluster, made
        try:
            TRIALS[name](host)
            run_right(made, host.rng)
        finally:
            host.cluster = before


_ALONE = ("fresh", "late", "interrupted_start", "asynchronous", "pool", "server_killed", "server_stopped")
TRIALS = {
    function.__name__: function for function in (
        right, mistake, failing, killed, stopped, server_stopped, server_killed, interrupted, interrupted_start, forked,
        kernel_forks, kernel_threads, host_thread, nested, restarted, forgotten, closed_under_way, late, asynchronous,
        pool, fresh,
    )
}
WEIGHTS = {"right": 20, "mistake": 12, "failing": 4, "killed": 4, "interrupted": 4, "stopped": 2}
"""How often a trial is drawn, for those that are drawn more than once."""
PROCESSES = {"killed", "stopped", "kernel_forks"}
"""Trials of clusters of processes."""
FORK_SERVER = {"server_stopped", "server_killed"}
