"""Collectives on arrays too large for the slots: read and written where they lie, in private memory and in shared."""

from __future__ import annotations

import os
import signal
from itertools import product

import numpy as np
import pytest
from oracle import results

from parallelism.mesh import Mesh
from vcluster.code import CollectiveMismatchError, DeviceFailedError
from vcluster.collectives import INLINE_BYTES, thresholds

ROWS = 3 * INLINE_BYTES // 8 // 7 + 1
CALLS = {
    "all_reduce": [{}, {"op": "max"}, {"op": "mean"}],
    "reduce": [{"root": 1}],
    "reduce_scatter": [{}, {"dim": 1}],
    "all_gather": [{}, {"dim": 1}],
    "gather": [{"root": 1}, {"root": 0, "dim": 1}],
    "all_to_all": [{}, {"split_dim": 1}, {"concat_dim": 1}],
    "broadcast": [{"root": 1}],
    "scatter": [{"root": 1}, {"root": 0, "dim": 1}],
    "all_scatter": [{}],
    "permute": [{"pairs": ((0, 1),)}, {"pairs": ((1, 0), (0, 1))}],
}
PLACES = ("private", "shared", "mixed", "out=x", "out", "out shared", "out mixed", "out strided")


def values(rank, dtype=np.float64):
    return (np.arange(ROWS * 7).reshape(ROWS, 7) % 11 + 10 * rank).astype(dtype)


def call_all(device, calls, places, private):
    thresholds.PRIVATE_BYTES = 1 if private else 1 << 60
    found = {}
    for kind, variants in calls.items():
        for number, options in enumerate(variants):
            for place in places:
                x = values(device.rank)
                if place == "shared" or (place == "mixed" and device.rank):
                    shared = device.empty(x.shape)
                    shared[...] = x
                    x = shared
                call = getattr(device, kind)
                gives = kind not in ("broadcast", "scatter") or device.rank == options["root"]
                given = x if gives else None
                if "out" not in place:
                    for _ in range(3):
                        result = call(given, **options)
                elif kind == "all_scatter":
                    continue
                elif place == "out=x":
                    if kind not in ("all_reduce", "broadcast", "permute"):
                        continue
                    result = call(given, **options, out=x)
                    assert result is x
                else:
                    like = call(given, **options)
                    out = None if like is None else np.full(like.shape, 77, like.dtype)
                    if out is not None and (place == "out shared" or (place == "out mixed" and device.rank)):
                        out = device.empty(like.shape, like.dtype)
                    if out is not None and place == "out strided":
                        out = np.full((*like.shape[:-1], 2 * like.shape[-1]), 77, like.dtype)[..., ::2]
                    for _ in range(4):
                        if out is not None:
                            out.fill(77)
                        result = call(given, **options, out=out)
                        assert out is None or result is out
                if place != "out=x" and gives:
                    np.testing.assert_array_equal(x, values(device.rank))
                found[kind, number, place] = [*result] if kind == "all_scatter" else result
    return found


@pytest.mark.slow_for("thread")
@pytest.mark.slow
@pytest.mark.parametrize("places", [PLACES[::2], PLACES[1::2]], ids=["half", "other half"])
@pytest.mark.parametrize(("backend", "devices", "private"), [
    ("process", 2, True), ("process", 3, True), ("process", 3, False), ("thread", 3, True),
])
def test_large_collectives_equal_numpy_wherever_the_arrays_lie(cluster_of, backend, devices, private, places):
    """``private``: read there whatever its size; else copied first, as where the system forbids it."""
    before = thresholds.PRIVATE_BYTES
    cluster = cluster_of(Mesh(devices=devices), backend, "shared_memory")
    try:
        run = cluster.run(call_all, CALLS, places, private)
    finally:
        thresholds.PRIVATE_BYTES = before  # of threads
        cluster.restart()
    xs = [values(rank) for rank in range(devices)]
    checked = 0
    for kind, variants in CALLS.items():
        for number, options in enumerate(variants):
            expected = results(kind, xs, [devices], **options)
            for place in places:
                for rank in range(devices):
                    if (kind, number, place) not in run[rank]:
                        continue
                    found = run[rank][kind, number, place]
                    if isinstance(found, list):
                        found, wanted = np.stack(found), np.stack(expected[rank])
                    else:
                        wanted = expected[rank]
                    np.testing.assert_array_equal(found, wanted, err_msg=f"{kind} {options} {place} on rank {rank}")
                    checked += 1
    assert checked > 40 * devices


def in_mixed_places(device, choices, times):
    """Choices of places, one for each rank, with which some all_reduce was wrong: a place is that of x and of out."""
    wrong = []
    expected = results("all_reduce", [values(rank) for rank in range(device.size)], [device.size])[0]
    for places in choices:
        where, how = places[device.rank].split()
        for _ in range(times):
            x = device.empty((ROWS, 7)) if where == "shared" else np.empty((ROWS, 7))
            x[...] = values(device.rank)
            out = None
            if how == "in_place":
                out = x
            elif how == "apart":
                out = np.empty_like(x)
            elif how == "strided":
                out = np.empty((ROWS, 14))[:, ::2]
            if not np.array_equal(device.all_reduce(x, out=out), expected):
                wrong.append(places)
    return wrong


@pytest.mark.parametrize(("backend", "devices", "times"), [
    ("process", 2, 2), *(pytest.param(*one, marks=pytest.mark.slow) for one in (
        ("process", 3, 3), ("process", 4, 2), ("thread", 3, 3)))])
def test_a_result_in_the_place_of_a_term_is_read_by_nobody(cluster_of, backend, devices, times):
    """Each member chooses for itself where its result lies."""
    every = ("shared in_place", "private in_place", "shared new", "private apart", "shared strided")
    choices = [places for places in product(every, repeat=devices) if "shared in_place" in places]
    cluster = cluster_of(Mesh(devices=devices), backend, "shared_memory")
    for wrong in cluster.run(in_mixed_places, choices, times):
        assert wrong == []


def behind_ones(device):
    """Twice the long way, twice the short one."""
    every = values(device.rank)[None, None, : ROWS - device.rank]
    alike = values(device.rank).reshape(1, 1, ROWS, 7)
    out = np.empty((1, 1, 3 * ROWS - 3, 7))
    for _ in range(4):
        joined, mine = device.all_gather(every, dim=2), device.reduce_scatter(alike, dim=2)
        device.all_gather(every, dim=2, out=out)
    return joined, mine, out


def test_dims_behind_extents_of_one_are_joined_and_cut_like_first_ones(cluster_of):
    run = cluster_of(Mesh(devices=3), "process", "shared_memory").run(behind_ones)
    xs = [values(rank) for rank in range(3)]
    joined = np.concatenate([x[: ROWS - rank] for rank, x in enumerate(xs)])
    pieces = np.array_split(xs[0] + xs[1] + xs[2], 3)
    for (found, mine, out), piece in zip(run, pieces, strict=True):
        np.testing.assert_array_equal(found, joined[None, None])
        np.testing.assert_array_equal(out, joined[None, None])
        np.testing.assert_array_equal(mine, piece[None, None])


def scattered_along_a_negative_dim(device):
    thresholds.PRIVATE_BYTES = 1
    x = values(1) if device.rank == 1 else None
    return [device.scatter(x, root=1, dim=-2) for _ in range(4)]


def test_a_large_scatter_may_count_its_dim_from_the_last(cluster_of):
    """Only the root knows how many dims there are: whether its array is read in place follows from its call alone."""
    run = cluster_of(Mesh(devices=3), "process", "shared_memory").run(scattered_along_a_negative_dim)
    for pieces, expected in zip(run, np.array_split(values(1), 3), strict=True):
        for piece in pieces:
            np.testing.assert_array_equal(piece, expected)


def of_any_dtype(device, dtype):
    thresholds.PRIVATE_BYTES = 1
    x = values(device.rank, dtype)
    return device.all_reduce(x), device.all_reduce(x, op=lambda a, b: np.where(a < b, a, b)), device.all_reduce(x[::2])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.complex128, np.uint16, ">i8"])
def test_any_dtype_and_op_and_input(cluster_of, dtype):
    run = cluster_of(Mesh(devices=3), "process", "shared_memory").run(of_any_dtype, np.dtype(dtype))
    xs = [values(rank, dtype) for rank in range(3)]
    for total, smallest, strided in run:
        np.testing.assert_array_equal(total, xs[0] + xs[1] + xs[2])
        np.testing.assert_array_equal(smallest, np.where(xs[0] < xs[1], xs[0], xs[1]))
        np.testing.assert_array_equal(strided, (xs[0] + xs[1] + xs[2])[::2])
        assert total.dtype == np.dtype(dtype)


def uneven(device):
    """Large for one, inline for another, empty for the third."""
    rows = (ROWS, 3, 0)[device.rank]
    x = np.full((rows, 7), float(device.rank))
    return device.all_gather(x), device.all_scatter(x), device.shift(x)


def test_large_and_small_shards_mix(cluster_of):
    xs = [np.full((rows, 7), float(rank)) for rank, rows in enumerate((ROWS, 3, 0))]
    run = cluster_of(Mesh(devices=3), "process", "shared_memory").run(uneven)
    for rank, (gathered, scattered, shifted) in enumerate(run):
        np.testing.assert_array_equal(gathered, np.concatenate(xs))
        for found, wanted in zip(scattered, xs, strict=True):
            np.testing.assert_array_equal(found, wanted)
        np.testing.assert_array_equal(shifted, xs[rank - 1])


def one_differs(device):
    x = np.ones((ROWS, 7) if device.rank != 1 else (ROWS + 1, 7))
    return device.all_reduce(x)


def test_a_mismatch_of_large_arrays_moves_nothing(cluster_of):
    with pytest.raises(CollectiveMismatchError, match="differ in shape") as caught:
        cluster_of(Mesh(devices=3), "process", "shared_memory").run(one_differs)
    assert caught.value.ranks == (1,)


def until_killed(device, victim):
    x = np.ones(600_000)
    out = np.empty_like(x)
    for time in range(10**6):
        if device.rank == victim and time == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        device.all_reduce(x, out=out)
        device.all_gather(x)


@pytest.mark.not_on_mpi("a rank that dies ends the job")
@pytest.mark.parametrize("victim", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_death_among_large_collectives_is_told(cluster_of, victim):
    with pytest.raises(DeviceFailedError) as caught:
        cluster_of(Mesh(devices=3), "process", "shared_memory").run(until_killed, victim)
    assert caught.value.ranks == (victim,)
    assert caught.value.signal == "SIGKILL"


def async_private(device):
    x, y = np.full(600_000, float(device.rank)), np.full(600_000, 1.0)
    first = device.all_reduce(x, async_op=True)
    second = device.all_gather(y, async_op=True)
    small = device.all_reduce(np.ones(3), "devices")
    return first.wait()[0], second.wait().sum(), small[0]


def test_asynchronous_private_collectives(cluster_of):
    run = cluster_of(Mesh(devices=3), "process", "shared_memory").run(async_private)
    assert list(run) == [(3.0, 1_800_000.0, 3.0)] * 3


def changing(device, counts, times):
    """Results of calls between which every array changes at once, and members come at different moments."""
    rng, wrong = np.random.default_rng(device.rank), []
    xs = [np.empty(count, np.float32) for count in counts]
    outs = [np.empty(count, np.float32) for count in counts]
    for time in range(times):
        for x, out in zip(xs, outs, strict=True):
            x[:] = np.arange(x.size) % 7 + 10 * device.rank + time
            device.all_reduce(x, out=out)
            x.fill(-1)
            terms = np.arange(x.size) % 7 * device.size + 10 * sum(range(device.size)) + time * device.size
            if not np.array_equal(out, terms):
                wrong.append((time, x.size))
            rng.normal(size=int(rng.integers(20_000)))
            gathered = device.all_gather(out[: x.size // 2] + device.rank)
            out.fill(-2)
            if gathered[-1] - gathered[0] != device.size - 1 + terms[x.size // 2 - 1] - terms[0]:
                wrong.append(("all_gather", time, x.size))
    return wrong


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("devices", "backend"), [(2, "process"), (3, "process"), (4, "thread")])
def test_arrays_may_change_as_soon_as_a_call_returns(cluster_of, devices, backend):
    counts = [16_385, 70_001, 40_003]   # one rendezvous, and the larger ones two in a group of four
    assert cluster_of(Mesh(devices=devices), backend).run(changing, counts, 5).outputs == [[]] * devices
