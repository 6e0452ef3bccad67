"""The same wrong program fails alike on a cluster and under a recorder: type, ranks, operation, lines and text."""

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import vcluster
from parallelism import Mesh
from parallelism.recorder import record
from vcluster import CollectiveMismatchError, DeadlockError, UndeliveredMessageError, VirtualCluster
from vcluster.code import ClusterError, DeviceFailedError

SIZE = 4
ARRAY = np.ones((4, 4))


@pytest.fixture(scope="module")
def cluster():
    with VirtualCluster(Mesh(x=2, y=2), backend="thread") as cluster:
        yield cluster


def both(cluster, kernel):
    """The errors of a kernel on the cluster and under a recorder."""
    with pytest.raises(ClusterError) as on_cluster:
        cluster.run(kernel)
    with pytest.raises(Exception) as recorded:
        record(kernel, Mesh(x=2, y=2))
    return on_cluster.value, recorded.value


def waits_elsewhere(device):
    if device.rank == 0:
        device.recv(1)
    else:
        device.barrier()


def receives_first(device):
    device.recv((device.rank + 1) % device.size, tag=3)


def returns_early(device):
    if device.rank != 1:
        device.all_reduce(device.rank)


def receives_nothing(device):
    if device.rank == 1:
        device.recv(0, tag=4)


def called_from_afar(device):
    def deeper():
        waits_elsewhere(device)

    deeper()


def works_in_a_circle(device):
    device.irecv((device.rank + 1) % device.size).wait()


def never_waits(device):
    if device.rank == 0:
        device.all_reduce(1, async_op=True)


def crosses_groups(device):
    first, second = ("x", "y") if device.rank in (0, 3) else ("y", "x")
    device.barrier(first)
    device.barrier(second)


DEADLOCKS = [waits_elsewhere, receives_first, returns_early, receives_nothing, called_from_afar, works_in_a_circle,
             never_waits, crosses_groups]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kernel", DEADLOCKS)
def test_a_deadlock(cluster, kernel):
    on_cluster, recorded = both(cluster, kernel)
    assert type(on_cluster) is type(recorded) is DeadlockError
    assert recorded.operation == on_cluster.operation
    assert set(on_cluster.ranks) <= set(recorded.ranks)     # on crowded cores one may not have reached its call yet
    if recorded.ranks == on_cluster.ranks:
        assert recorded.locations == on_cluster.locations
        assert str(recorded) == str(on_cluster)


MISMATCHES = {
    "shape": lambda d, odd: d.all_reduce(np.ones(3 if odd else 4)),
    "dtype": lambda d, odd: d.all_reduce(np.ones(4, "i4" if odd else "f4")),
    "op": lambda d, odd: d.all_reduce(np.ones(4), op="max" if odd else "sum"),
    "kind": lambda d, odd: d.broadcast(np.ones(4)) if odd else d.all_reduce(np.ones(4)),
    "barrier": lambda d, odd: d.barrier() if odd else d.all_reduce(np.ones(4)),
    "root": lambda d, odd: d.reduce(np.ones(4), root=int(odd)),
    "dim": lambda d, odd: d.all_gather(np.ones((4, 4)), dim=int(odd)),
    "ndim": lambda d, odd: d.all_gather(np.ones((4, 4) if odd else 4)),
    "joined": lambda d, odd: d.all_gather(np.ones((4, 5 if odd else 4))),
    "algorithm": lambda d, odd: d.all_reduce(np.ones(4), algorithm="ring" if odd else None),
    "pairs": lambda d, odd: d.permute(np.ones(4), [(0, 1)] if odd else [(1, 0)]),
    "sizes": lambda d, odd: d.all_to_all(np.ones((4, 2)), split_sizes=[1, 0, 1, 2] if odd else None, concat_dim=1),
    "tree": lambda d, odd: d.all_reduce((np.ones(4),) if odd else (np.ones(2), np.ones(2))),
    "tree or array": lambda d, odd: d.all_reduce((np.ones(4),) if odd else np.ones(4)),
    "along an axis": lambda d, odd: d.all_reduce(np.ones(2 + d.rank % 2), "y"),
    "two kinds each": lambda d, odd: d.barrier() if d.rank % 2 else d.all_reduce(1),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("what", MISMATCHES)
def test_a_mismatch(cluster, what):
    def kernel(device):
        MISMATCHES[what](device, device.rank == 3)

    on_cluster, recorded = both(cluster, kernel)
    assert type(on_cluster) is type(recorded) is CollectiveMismatchError
    if what != "along an axis":         # two groups fail on their own, and either may be first
        assert (recorded.ranks, recorded.operation) == (on_cluster.ranks, on_cluster.operation)
        assert recorded.calls == on_cluster.calls
        assert str(recorded) == str(on_cluster)
        assert recorded.locations == on_cluster.locations


@pytest.mark.parametrize("declared", [{"shape": (3,)}, {"dtype": "f4"}, {"shape": (2, 2), "dtype": "i8"}])
def test_a_message_that_is_not_as_declared(cluster, declared):
    def kernel(device):
        if device.rank == 0:
            device.send(np.ones(4), 1)
        elif device.rank == 1:
            device.irecv(0, **declared).wait()

    on_cluster, recorded = both(cluster, kernel)
    assert type(on_cluster) is type(recorded) is CollectiveMismatchError
    assert (recorded.ranks, recorded.operation, str(recorded), recorded.locations) == (
        on_cluster.ranks, on_cluster.operation, str(on_cluster), on_cluster.locations)


def sends_twice_too_often(device):
    for _ in range(3):
        device.send(np.ones(2), (device.rank + 1) % device.size)
    device.recv((device.rank - 1) % device.size)


def sends_under_another_tag(device):
    if device.rank == 2:
        device.send(np.ones(2), 3, tag=7)
        device.isend(1.0, 0)


@pytest.mark.parametrize("kernel", [sends_twice_too_often, sends_under_another_tag])
def test_messages_that_are_not_received(cluster, kernel):
    on_cluster, recorded = both(cluster, kernel)
    assert type(on_cluster) is type(recorded) is UndeliveredMessageError
    assert (recorded.ranks, recorded.operation, str(recorded), recorded.locations) == (
        on_cluster.ranks, on_cluster.operation, str(on_cluster), on_cluster.locations)


ARGUMENTS = {
    "root": lambda d: d.broadcast(ARRAY, root=4),
    "root is no integer": lambda d: d.reduce(ARRAY, root="0"),
    "dim": lambda d: d.all_gather(ARRAY, dim=2),
    "dim is no integer": lambda d: d.all_gather(ARRAY, dim=0.5),
    "concat_dim": lambda d: d.all_to_all(ARRAY, concat_dim=-3),
    "split_sizes": lambda d: d.all_to_all(ARRAY, split_sizes=[1, 1, 1, 2]),
    "0-d": lambda d: d.reduce_scatter(1.0),
    "op": lambda d: d.all_reduce(ARRAY, op="summ"),
    "op for floats": lambda d: d.all_reduce(ARRAY, op="xor"),
    "algorithm": lambda d: d.all_reduce(ARRAY, algorithm="rnig"),
    "pairs": lambda d: d.permute(ARRAY, [(0, 1), (2, 1)]),
    "axis": lambda d: d.all_reduce(ARRAY, "z"),
    "axes and groups": lambda d: d.all_reduce(ARRAY, "x", groups=[[0, 1], [2, 3]]),
    "groups overlap": lambda d: d.all_reduce(ARRAY, groups=[[0, 1], [1, 2, 3]]),
    "groups beyond": lambda d: d.all_reduce(ARRAY, groups=[[0, 1], [2, 4]]),
    "in no group": lambda d: d.all_reduce(ARRAY, groups=[[0, 1]]) if d.rank == 2 else None,
    "shift in no group": lambda d: d.shift(ARRAY, groups=[[0, 1]]) if d.rank == 2 else None,
    "text": lambda d: d.all_reduce("text"),
    "objects": lambda d: d.all_gather(np.array([None])),
    "text in a tree": lambda d: d.broadcast(["text"]),
    "out of another shape": lambda d: d.all_reduce(ARRAY, out=np.empty(3)),
    "out of another dtype": lambda d: d.all_gather(ARRAY, out=np.empty((16, 4), "f4")),
    "out of another extent": lambda d: d.all_gather(ARRAY, out=np.empty((15, 4))),
    "out is no array": lambda d: d.all_reduce(ARRAY, out=[0]),
    "out is read-only": lambda d: d.all_reduce(ARRAY, out=np.broadcast_to(1.0, (4, 4))),
    "out overlaps itself": lambda d: d.all_reduce(ARRAY, out=as_strided(ARRAY, ARRAY.shape, (0, 8))),
    "out of a message overlaps itself": lambda d: (
        d.send(np.arange(4.0), 1) if d.rank == 0 else
        d.recv(0, out=as_strided(ARRAY, (4,), (0,))) if d.rank == 1 else None),
    "out overlaps": lambda d: d.all_reduce(ARRAY[:2], out=ARRAY[1:3]),
    "out of a tree": lambda d: d.all_reduce({"a": ARRAY}, out=ARRAY),
    "out of all_scatter": lambda d: d.all_scatter(ARRAY, out=ARRAY),
    "peer": lambda d: d.send(ARRAY, 4),
    "position": lambda d: d.recv(2, axes="x"),
    "tag": lambda d: d.send(ARRAY, 0, tag=True),
    "tag is text": lambda d: d.recv(0, tag="a"),
    "large tag": lambda d: d.irecv(0, tag=1 << 63),
    "objects in a message": lambda d: d.send(np.array([None]), 0),
    "empty": lambda d: d.empty((2, -1)),
    "empty of objects": lambda d: d.empty(2, object),
    "matmul": lambda d: d.matmul(np.ones((2, 3)), np.ones((4, 5))),
    "matmul of scalars": lambda d: d.matmul(1.0, ARRAY),
    "matmul batches": lambda d: d.matmul(np.ones((2, 2, 3)), np.ones((3, 3, 5))),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("what", ARGUMENTS)
def test_wrong_arguments(cluster, what):
    on_cluster, recorded = both(cluster, ARGUMENTS[what])
    assert isinstance(on_cluster, DeviceFailedError)
    assert type(recorded) is type(on_cluster.__cause__)
    assert str(recorded) == str(on_cluster.__cause__)


def test_the_errors_of_a_recorder_are_those_of_a_cluster():
    with pytest.raises(vcluster.DeadlockError) as caught:
        record(waits_elsewhere, Mesh(x=4))
    assert isinstance(caught.value, vcluster.ClusterError) and isinstance(caught.value, RuntimeError)
