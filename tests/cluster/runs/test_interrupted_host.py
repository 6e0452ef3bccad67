"""The handler of a signal may raise, or close the cluster, at any step of the host: the next run is right.

A step is an instruction after which Python looks for signals. The tests raise a signal at drawn steps of every function
of the library that a call of the host runs, so that no moment is too short to be hit.
"""

from __future__ import annotations

import dis
import gc
import itertools
import os
import signal
import sys
import threading
from pathlib import Path
from random import Random

import numpy as np
import psutil
import pytest

import vcluster
from parallelism.sharding import TensorSharding
from vcluster import HOST, ClusterError, PerDevice, Sharded, VirtualCluster
from vcluster.memory import interrupts

ROOT = str(Path(vcluster.__file__).parent)
LOOKS = {"RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD"}
IGNORED = {"_is_gone", "_in_child", "close_all"}
"""Callbacks that the interpreter makes: what a handler raises there, it prints and forgets."""

MANY = int(os.environ.get("VCLUSTER_INTERRUPTS", "5000"))
"""How many interrupts the slow test raises."""


class LateError(Exception):
    """What the handler raises."""


def raise_late(*_):
    raise LateError


def steps_of(call, at=-1):
    """The number of steps of a call, in which SIGALRM is raised at one."""
    count = itertools.count()
    reached = 0

    def trace(frame, event, _):
        code, last = frame.f_code, ""
        if not code.co_filename.startswith(ROOT) or code.co_name in IGNORED:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False

        def step(frame, event, _):
            nonlocal last, reached
            if event == "opcode":
                now, last = last, dis.opname[code.co_code[frame.f_lasti]]
                if now in LOOKS:
                    reached = next(count)
                    if reached == at:
                        sys.settrace(None)
                        signal.raise_signal(signal.SIGALRM)
            return step

        return step

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return reached


@pytest.fixture
def alarm():
    """Sets the handler of SIGALRM."""
    before = signal.getsignal(signal.SIGALRM)
    yield lambda handler: signal.signal(signal.SIGALRM, handler)
    signal.signal(signal.SIGALRM, before)


def kernel(device, a, b, rows):
    return int(device.all_reduce(a) + b + rows.sum())


def echo(device):
    return device.channel(HOST).recv()


def give(device):
    device.channel(HOST).send(device.rank)


class Calls:
    """What a host does with a cluster of two devices."""

    def __init__(self, **options):
        self.options = options
        self.cluster = VirtualCluster(tp=2, **options)

    def run(self):
        """Rank 0 gets the rows [1, 2], rank 1 the row [3]."""
        rows = Sharded(np.array([1, 2, 3]), TensorSharding(("tp",)))
        assert self.cluster.run(kernel, 1, PerDevice([10, 20]), rows).outputs == [2 + 10 + 3, 2 + 20 + 3]

    def send(self):
        for rank in range(2):
            self.cluster.channel(rank).send(np.arange(3) + rank)
        self.cluster.run(echo)

    def isend(self):
        works = [self.cluster.channel(rank).isend({"a": rank}) for rank in range(2)]
        self.cluster.run(echo)
        for work in works:
            work.wait()

    def recv(self):
        self.cluster.run(give)
        assert [self.cluster.channel(rank).recv() for rank in range(2)] == [0, 1]

    def irecv(self):
        works = [self.cluster.channel(rank).irecv() for rank in range(2)]
        self.cluster.run(give)
        assert works[0].done() in (True, False)
        assert [work.wait() for work in works] == [0, 1]

    def forget(self):
        self.cluster.forget()

    def close(self):
        self.cluster.close()

    def restart(self):
        self.cluster.restart()

    def start(self):
        VirtualCluster(1, **self.options).close()

    def check(self):
        """Nothing of an interrupted call is left."""
        assert not self.cluster._running.locked()
        assert not interrupts._innermost
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self.cluster.closed:
            self.cluster.restart()
        else:
            self.cluster.forget()
        self.run()
        self.send()


NAMES = ["run", "run", "send", "isend", "recv", "irecv", "forget", "close", "restart", "start"]


def interrupt_often(calls, alarm, handler, count, seed, names=NAMES):
    """Interrupt ``count`` calls at drawn steps. How many were."""
    rng, hits = Random(seed), 0
    alarm(raise_late)
    steps = {}
    for name in dict.fromkeys(names):
        steps[name] = steps_of(getattr(calls, name))
        calls.check()
    for _ in range(count):
        name = rng.choice(names)
        at = rng.randrange(steps[name] + 1)
        alarm(handler)
        try:
            steps_of(getattr(calls, name), at)
        except LateError:
            hits += 1
        except ClusterError as error:
            if handler is raise_late or "closed" not in str(error):
                raise
            hits += 1
        alarm(raise_late)
        try:
            calls.check()
        except BaseException as error:
            error.add_note(f"after {name} was interrupted at step {at}")
            raise
    return hits


def belongings():
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), len(psutil.Process().children())


def handlers(calls):
    def closes(*_):
        calls.cluster.close()

    def closes_and_raises(*_):
        calls.cluster.close()
        raise LateError

    return [raise_late, closes, closes_and_raises]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["process", "thread"])
def test_a_handler_that_raises_or_closes_at_any_step_leaves_a_cluster_that_works(backend, alarm):
    calls = Calls(backend=backend)
    for seed, handler in enumerate(handlers(calls)):
        assert interrupt_often(calls, alarm, handler, 6, seed, ["run", "irecv"])
    calls.cluster.close()


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("transport", ["shared_memory", "queue"])
@pytest.mark.parametrize("backend", ["process", "thread"])
def test_thousands_of_handlers_that_raise_or_close_leave_nothing(backend, transport, alarm):
    calls = Calls(backend=backend, transport=transport)
    calls.check()
    before = belongings()
    for seed, handler in enumerate(handlers(calls)):
        count = MANY // 4 * (2, 1, 1)[seed] // 4
        assert interrupt_often(calls, alarm, handler, count, seed) > count // 4
    calls.check()
    assert belongings() == before
    calls.cluster.close()


@pytest.mark.slow
@pytest.mark.parametrize("count", [30, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
def test_alarms_at_drawn_moments_leave_a_cluster_that_works(alarm, count):
    rng, done, hits = Random(count), itertools.count(), 0

    def meets(device):
        for _ in range(40):
            device.barrier()

    alarm(raise_late)
    with VirtualCluster(4) as cluster:
        while next(done) < count:
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 6e-3))
                cluster.run(meets)
                cluster.run(kernel, 1, PerDevice([1, 2, 3, 4]), np.arange(2))
            except LateError:
                hits += 1
            finally:
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except LateError:
                    hits += 1
            assert cluster.run(lambda device: int(device.all_reduce(1))).outputs == [4] * 4
    assert hits
