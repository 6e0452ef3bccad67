"""A call that is repeated is found by its common arguments: each has its own, and rare ones lead to the long way."""

from __future__ import annotations

import numpy as np

from parallelism.mesh import Mesh


def each_four_times(device):
    """Results of calls that differ in one argument each, by turns, so that all are kept."""
    x, wide, results = np.arange(4.0) + device.rank, np.arange(6).reshape(2, 3) * (device.rank + 1), {}
    root = 1
    calls = {
        "sum": lambda: device.all_reduce(x),
        "max": lambda: device.all_reduce(x, op="max"),
        "mean": lambda: device.all_reduce(x, "tp", op="mean"),
        "of no axis": lambda: device.all_reduce(x, ()),
        "a function": lambda: device.all_reduce(x, op=lambda a, b: a + 2 * b),
        "dim 0": lambda: device.all_gather(wide),
        "dim 1": lambda: device.all_gather(wide, dim=1),
        "last dim": lambda: device.all_gather(wide, dim=-1),
        "scattered": lambda: device.reduce_scatter(x),
        "scattered by dim 1": lambda: device.reduce_scatter(wide, dim=1, op="min"),
        "from 0": lambda: device.broadcast(wide if device.rank == 0 else None),
        "from 1": lambda: device.broadcast(x if device.rank == root else None, root=root),
        "from 1 into": lambda: device.broadcast(x if device.rank == root else None, root=root, out=np.empty(4)),
        "ring": lambda: device.all_reduce(x, algorithm="ring"),
        "a list of axes": lambda: device.all_reduce(x, ("tp",)),
        "barrier": lambda: device.barrier(),
    }
    for _ in range(4):
        for name, call in calls.items():
            results.setdefault(name, []).append(call())
    return results


def test_calls_that_differ_in_an_argument_have_their_own_results(cluster_of):
    ranks = list(cluster_of(Mesh(tp=2)).run(each_four_times))
    x, wide = [np.arange(4.0) + rank for rank in range(2)], [np.arange(6).reshape(2, 3) * (rank + 1) for rank in range(2)]
    for rank, results in enumerate(ranks):
        wanted = {
            "sum": x[0] + x[1], "max": x[1], "mean": (x[0] + x[1]) / 2, "of no axis": x[rank], "a function": x[0] + 2 * x[1],
            "dim 0": np.concatenate(wide), "dim 1": np.concatenate(wide, 1), "last dim": np.concatenate(wide, 1),
            "scattered": (x[0] + x[1])[2 * rank:][:2],
            "scattered by dim 1": np.minimum(*wide)[:, slice(0, 2) if rank == 0 else slice(2, 3)],
            "from 0": wide[0], "from 1": x[1], "from 1 into": x[1], "ring": x[0] + x[1], "a list of axes": x[0] + x[1],
        }
        assert results.pop("barrier") == [None] * 4
        assert set(results) == set(wanted)
        for name, found in results.items():
            for array in found:
                np.testing.assert_array_equal(array, wanted[name], name, strict=True)



def test_every_line_has_its_own_place_in_the_trace(cluster_of):
    def lines(device):
        for _ in range(3):
            device.barrier()
            device.barrier()

    events = cluster_of(Mesh(tp=2)).run(lines).trace.filter(name="barrier", rank=1)
    places = [event.location for event in events]
    first = lines.__code__.co_firstlineno + 2
    assert [place.rpartition(":")[2] for place in places] == [str(first), str(first + 1)] * 3
