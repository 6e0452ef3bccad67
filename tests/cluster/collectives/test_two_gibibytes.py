"""Arrays of more than 2 GiB: no count of bytes or elements is kept in 32 bits."""

import numpy as np
import psutil
import pytest

from vcluster.runs import VirtualCluster

COUNT = 2**31 + 9
NEEDED_BYTES = 12 << 30
pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(900),
    pytest.mark.skipif(psutil.virtual_memory().available < NEEDED_BYTES, reason="needs 12 GiB of memory"),
]


def array_of(rank):
    x = np.full(COUNT, rank + 1, np.uint8)
    x[-1] = 7 * rank
    return x


def ends(x):
    """The number of elements, the first and the last; whether all others are as the first."""
    return None if x is None else (len(x), int(x[0]), int(x[-1]), bool((x[:-1] == x[0]).all()))


def all_reduced(device):
    return ends(device.all_reduce(array_of(device.rank)))


def broadcast(device):
    return ends(device.broadcast(array_of(1) if device.rank == 1 else None, root=1))


def sent(device):
    if device.rank == 0:
        device.send(array_of(1), 1)
        return None
    return ends(device.recv(0))


@pytest.mark.parametrize("backend", ["process", "thread"])
@pytest.mark.parametrize(
    ("kernel", "expected"),
    [(all_reduced, [(COUNT, 3, 7, True)] * 2), (broadcast, [(COUNT, 2, 7, True)] * 2),
     (sent, [None, (COUNT, 2, 7, True)])])
def test_collectives_and_messages(backend, kernel, expected):
    with VirtualCluster(2, backend=backend) as cluster:
        assert cluster.run(kernel).outputs == expected


def test_arguments_and_results():
    with VirtualCluster(2) as cluster:
        nothing, result = cluster.run(lambda device: array_of(1) if device.rank else None).outputs
        assert nothing is None
        assert ends(result) == (COUNT, 2, 7, True)
        assert cluster.run(lambda device, x: ends(x), result).outputs == [ends(result)] * 2
