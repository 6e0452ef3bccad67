"""Runs on a cluster whose results say all that must be equal on processes and over MPI; a script of MPI jobs, too."""

from __future__ import annotations

import pickle
import sys
import threading
import warnings
from pathlib import Path

import numpy as np

from parallelism import Mesh, models
from parallelism.trace import UndeclaredComputeWarning
from parallelism.transforms import SGD, Strategy, first_state, train_step
from vcluster import ClusterError, VirtualCluster
from vcluster.mpi import places_of_devices

HARDWARE = "dgx-a100"
ELEMENTS = 7, 1500, 40_001
"""Arrays that travel with the calls, in one message, and with a body of their own."""


def numbers(device, n):
    return np.random.default_rng([device.rank, n]).standard_normal(n).astype(np.float32)


def collectives(device):
    found = []
    for n in ELEMENTS:
        x = numbers(device, n)
        for axes in (None, "tp", "dp"):
            found += [device.all_reduce(x, axes), device.all_gather(x[device.rank:], axes)]
            found += [device.reduce_scatter(x, axes, op="mean"), device.broadcast(x, axes, root=1)]
        found.append(device.all_reduce(x, algorithm="ring"))
        found += device.all_scatter(x[: n - device.rank], "dp")
        found.append(device.permute(x, [(0, 2), (2, 1)]))
        device.all_reduce(x, "tp", op="max", out=x)
        found.append(device.all_to_all(np.outer(x[:9], [1.0, device.rank])))
    found.append(device.all_reduce({"a": np.arange(3), "b": [np.ones(2) * device.rank]})["b"][0])
    device.barrier()
    return found


def repeated(device):
    """Small calls that are known from the second time on, but for members that call something else once."""
    found = []
    for step in range(4):
        x = step * numbers(device, 7)
        found += [device.all_reduce(x), device.all_gather(x[device.rank :], "tp"), device.all_reduce(step + 0.5)]
        found += [device.broadcast(x if device.rank == 1 else None, root=1), device.permute(x, [(0, 2), (2, 1)])]
        found += [device.reduce_scatter(x, "dp", op="mean"), device.reduce(x, root=2, op="max")]
        found.append(device.all_gather(np.ones(1 + (step == 2) * device.rank)))
        found.append(device.all_reduce(x, out=x))
        device.barrier()
    return found


def long_descriptions(device):
    """Values of many parts: what describes them is longer than what one message of MPI brings."""
    right, left = (device.rank + 1) % device.size, (device.rank - 1) % device.size
    found = []
    for n in (10, 40_000):
        parts = {f"a part whose name is long, number {i}": np.arange(2) * device.rank for i in range(400)}
        device.isend([parts, "x" * n, numbers(device, n)], right)
        parts, text, array = device.recv(left)
        found += [len(text), array, *parts.values()]
    pairs = [(0, 2), (2, 1)]
    return [*found, device.all_reduce({f"{'long' * 20} {i}": np.full(2, i) for i in range(400)})[f"{'long' * 20} 7"],
            device.permute(numbers(device, 5), pairs)]


def messages(device):
    right, left = (device.rank + 1) % device.size, (device.rank - 1) % device.size
    coming = device.irecv(left, tag=2)
    late = device.isend(numbers(device, 50_000), right, tag=2)
    for n in range(20):     # more than a channel holds
        device.send(np.full(3, n), device.rank ^ 1, tag=n % 2) if device.rank % 2 else None
        if device.rank % 2 == 0:
            assert device.recv(device.rank ^ 1, tag=n % 2)[0] == n
    pending = device.all_reduce(numbers(device, 30_000), async_op=True)
    with device.compute("work", flops=1e6):
        pass
    late.wait()
    return coming.wait(), pending.wait(), device.sendrecv({"of": device.rank}, right, left)


def kinds_of_groups(device):
    """How the groups of this device meet."""
    for axes in (None, "dp", "tp"):
        device.barrier(axes)
    return {ranks: type(group).__name__ for ranks, group in device.collectives._groups.items()}


def helped(device):
    """Calls in a thread that the kernel waits for."""
    found = []
    helper = threading.Thread(target=lambda: found.extend(device.all_reduce(numbers(device, n)) for n in ELEMENTS * 5))
    helper.start()
    helper.join()
    return found


def raises(device):
    device.barrier()
    if device.rank == 2:
        raise ValueError("on purpose")
    device.barrier()


def raises_beside_helpers(device):
    if device.rank == 2:
        raise ValueError("on purpose")
    helper = threading.Thread(target=device.barrier)
    helper.start()
    helper.join()


def mismatch(device):
    return device.barrier() if device.rank else device.all_reduce(np.ones(3))


def surprise(device):
    for step in range(4):
        device.all_reduce(np.ones(3 + (step == 3 and device.rank == 1)))


def deadlock(device):
    pending = device.irecv((device.rank + 1) % 3) if device.rank < 3 else None
    return pending and pending.wait()


def endless(device):
    if device.rank == 1:
        raise ArithmeticError("beside a loop")
    while True:
        pass


def text_of(cluster, kernel):
    """The error of a run."""
    try:
        cluster.run(kernel)
    except ClusterError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def trained(strategy):
    """A step of training by a strategy, and what it takes."""
    step = strategy(train_step(models.mlp((6, 8, 3), batch=10), SGD(0.5)))
    shapes = {"p.w0": (6, 8), "p.b0": (8,), "p.w1": (8, 3), "p.b1": (3,), "x": (10, 6), "targets": (10, 3)}
    arrays = {name: np.random.default_rng(len(name)).standard_normal(shape) for name, shape in shapes.items()}
    batch = {name: arrays.pop(name) for name in ("x", "targets")}
    return step, first_state(step, arrays) | batch


def events_of(run):
    """What the events of a run say, but for what depends on the machine."""
    with warnings.catch_warnings(action="ignore", category=UndeclaredComputeWarning):
        events = run.trace.events
    return sorted((e.rank, e.kind, e.name, e.axes or (), e.bytes_received, e.bytes_sent, e.peer or 0, e.tag or 0,
                   e.start_seconds, e.duration_seconds) for e in events)


def everything(**options):
    """What runs give and say, and the events and the modelled time of their traces."""
    with VirtualCluster(Mesh(dp=2, tp=2), hardware=HARDWARE, compute="modelled", **options) as cluster:
        found = {}
        for kernel in (collectives, repeated, long_descriptions, messages):
            run = cluster.run(kernel)
            found[f"events of {kernel.__name__}"] = events_of(run)
            found[kernel.__name__] = run.outputs
            found[f"time of {kernel.__name__}"] = run.trace.makespan_seconds
        run = cluster.run(*trained(Strategy.parse_on_mesh("dp=2 tp=2 zero=2")[0]))
        found |= {"a program": run.result, "events of a program": events_of(run)}
        found["helped"] = cluster.run(helped).outputs
        for kernel in (raises, raises_beside_helpers, mismatch, surprise, deadlock, endless):
            found[f"error of {kernel.__name__}"] = text_of(cluster, kernel)
        cluster.channel(3).send(np.arange(4))
        found["from the host"] = cluster.run(lambda d: d.channel(-1).recv().sum() if d.rank == 3 else None).outputs
        return found


if __name__ == "__main__":
    result = everything()
    with VirtualCluster(2) as first, VirtualCluster(2) as second:       # beside each other, and one after another
        result["two clusters"] = [c.run(lambda d: d.all_reduce(d.rank + 1)).outputs for c in (first, second)]
    result["late"] = []
    for kernel in (endless, deadlock) * 3:      # interrupts of an earlier cluster are none of the next one's
        with VirtualCluster(4) as cluster:
            result["late"].append(text_of(cluster, kernel).partition(":")[0])
    result["places"] = places_of_devices(4, 8)
    with VirtualCluster(Mesh(dp=2, tp=2)) as cluster:
        result["groups"] = cluster.run(kinds_of_groups).outputs
    try:
        VirtualCluster(5)
    except ClusterError as error:
        result["too many"] = str(error)
    Path(sys.argv[1]).write_bytes(pickle.dumps(result))
    print("printed by the host")
    with VirtualCluster(2) as cluster:
        cluster.run(lambda d: print("printed by a device"))
