"""Arrays of bfloat16 and float8 on every backend, transport and start method: collectives, messages, layouts."""

from __future__ import annotations

from functools import reduce

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from parallelism import TensorSharding
from parallelism.mesh import Mesh

MESH = Mesh(x=3)
DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
PLACES = {
    "threads": {"backend": "thread"}, "forkserver": {}, "queue": {"transport": "queue"},
    "fork": {"start_method": "fork"}, "spawn": {"start_method": "spawn"},
}


def given(rank, count, name):
    """Numbers whose sums must be rounded, and depend on the order."""
    rng = np.random.default_rng(rank)
    return rng.normal(size=count).astype(getattr(ml_dtypes, name))


def all_sorts(device, count, name):
    """The results of one rank, and whether they have the dtype."""
    x = device.empty((count,), name)
    x[...] = given(device.rank, count, name)
    left, right = (device.rank - 1) % device.size, (device.rank + 1) % device.size
    device.send({"x": x, "rest": [x[:2], 1]}, right)
    tree = device.recv(left)
    device.send(x, right)
    results = {
        "sum": device.all_reduce(x), "naive": device.all_reduce(x, algorithm="naive"),
        "max": device.all_reduce(x, op="max"), "mean": device.all_reduce(x, op="mean"),
        "scattered": device.reduce_scatter(x), "tree": device.all_reduce({"a": x, "b": [x[:1], np.ones(2)]})["a"],
        "gathered": device.all_gather(x), "exchanged": device.all_to_all(x), "sent": device.recv(left),
        "in a dict": tree["x"], "in a list": tree["rest"][0], "scalar": np.asarray(device.all_reduce(x[0])),
        "awaited": device.all_reduce(x, async_op=True).wait(), "function": device.all_reduce(x, op=np.add),
        "resharded": device.reshard(x[:count // 3], TensorSharding("x"), TensorSharding(None)),
        "product": device.matmul(np.ones((2, 3), x.dtype), np.full((3, 2), 0.5, x.dtype)),
    }
    assert {result.dtype for result in results.values()} == {x.dtype}
    out = device.empty((count,), name)
    device.all_reduce(x, out=out)
    assert_array_equal(out, results["sum"])
    return results


GIVEN = [(6, "float8_e5m2"), (6, "float8_e4m3fn"), (6, "bfloat16"), (60_000, "bfloat16")]
BY_DAY = {"threads": GIVEN, "forkserver": [GIVEN[0], GIVEN[3]]}
"""The others are slow."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("place", "count", "name"), [
    pytest.param(place, *one, id=f"{place}-{one[1]}-{one[0]}", marks=[pytest.mark.slow] * (one not in by_day))
    for place in PLACES for by_day in [BY_DAY.get(place, [])] for one in GIVEN])
def test_every_way_gives_the_same_bits(cluster_of, place, count, name):
    options = PLACES[place]
    found = cluster_of(MESH, **options).run(all_sorts, count, name)
    x = [given(rank, count, name) for rank in range(3)]
    total = reduce(np.add, x)                               # rounded after each addition, in group order
    gathered, part = np.concatenate(x), count // 3
    for rank, results in enumerate(found.outputs):
        left = x[(rank - 1) % 3]
        for what in ("sum", "naive", "tree", "awaited", "function"):
            assert_array_equal(results[what], total, what)
        assert_array_equal(results["max"], reduce(np.maximum, x))
        assert_array_equal(results["mean"], np.divide(total, 3))
        assert_array_equal(results["scattered"], total[rank * part:(rank + 1) * part])
        assert_array_equal(results["gathered"], gathered)
        assert_array_equal(results["exchanged"], np.concatenate([y[rank * part:(rank + 1) * part] for y in x]))
        assert_array_equal(results["resharded"], np.concatenate([y[:part] for y in x]))
        assert_array_equal(results["product"], np.full((2, 2), 1.5))
        assert results["scalar"] == total[0]
        for what, wanted in (("sent", left), ("in a dict", left), ("in a list", left[:2])):
            assert_array_equal(results[what], wanted)
    event = next(e for e in found.trace if e.name == "all_reduce")
    assert (event.dtype, event.payload_bytes) == (name, count * x[0].itemsize)


@pytest.mark.sampled(2)
@pytest.mark.slow_for("spawn")
@pytest.mark.parametrize("place", PLACES)
def test_arrays_travel_to_devices_and_back(cluster_of, place):
    xs = [given(0, 5, name) for name in DTYPES]
    mesh = Mesh(x=1) if place == "spawn" else MESH      # each of these loads everything anew
    for ys in cluster_of(mesh, **PLACES[place]).run(lambda device, xs: [(x, x[0], {"x": x[::2]}) for x in xs], xs):
        for x, y in zip(xs, ys, strict=True):
            assert y[0].dtype == x.dtype and y[1].dtype == x.dtype
            assert_array_equal(y[0], x)
            assert_array_equal(y[2]["x"], x[::2])


def test_other_dtypes_in_a_group_are_told(cluster_of):
    def differing(device):
        device.all_reduce(np.ones(3, ml_dtypes.bfloat16 if device.rank else np.float16))

    with pytest.raises(Exception, match=r"differ in dtype\n  ranks 1 and 2 called all_reduce\(bfloat16\[3\]"):
        cluster_of(MESH, backend="thread").run(differing)


def test_a_dtype_that_is_not_of_numbers_is_refused(cluster_of):
    with pytest.raises(Exception, match="all_reduce takes numbers or bools, got an array of dtype float6_e2m3fn"):
        cluster_of(MESH, backend="thread").run(lambda device: device.all_reduce(np.ones(3, ml_dtypes.float6_e2m3fn)))
