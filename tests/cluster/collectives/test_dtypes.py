"""Each kind, op and dtype gives what NumPy gives, value and dtype, the first time and later; and writes nowhere else.

The result of a reduction may have another dtype than its arrays: a mean of integers is float64, a sum of bools int64.
Blocks of shared memory, and the arrays for results, lie between fences (`fences`).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from fences import FencedArray, fence
from oracle import results

from parallelism.mesh import Mesh
from vcluster.collectives import INLINE_BYTES

DEVICES = 3
TIMES = 3
NARROW = [np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")]
DTYPES = [*map(np.dtype, "?bhiqBHIQefdgFDG"), np.dtype(">i4"), np.dtype(">f8"), *NARROW]
OPS = ("sum", "mean", "prod", "max", "min", "and", "or", "xor")
SIZES = (1, INLINE_BYTES, INLINE_BYTES + 4, 1 << 20)
"""Bytes of what is given, and of what the reduction makes of it."""
OF_QUEUES = (*SIZES[:3], 1 << 18)
"""Through a queue arrays of any size go one way."""
KINDS = {
    "all_reduce": {}, "reduce": {"root": 1}, "reduce_scatter": {}, "all_gather": {}, "gather": {"root": 1},
    "all_to_all": {}, "broadcast": {"root": 1}, "scatter": {"root": 1}, "all_scatter": {},
    "permute": {"pairs": ((0, 1), (1, 0))},
}
OF_MPI = "?bhiqBHIQfdgFDG"
"""The dtypes that every MPI can combine."""
PLACES = ("new", "private", "shared")
"""Where the result lies: in an array that is returned, or in one that is given."""
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
RUNTIMES = [("process", "shared_memory"), ("process", "queue"), ("thread", "shared_memory")]


def has_op(op, dtype):
    """Whether numbers of a dtype can be combined so."""
    if op in ("and", "or", "xor"):
        return dtype.kind in "biu"
    return op in ("sum", "mean", "prod") or dtype.kind != "c"


def counts_of(dtype, options, sizes):
    """Numbers of elements: as many as fill each of the sizes, before and after the reduction changes the dtype."""
    itemsizes = {dtype.itemsize}
    if "op" in options:
        one = results("all_reduce", [np.ones(1, dtype)], [1], **options)[0]
        itemsizes.add(one.dtype.itemsize)
    return sorted({-(-nbytes // itemsize) for nbytes in sizes for itemsize in itemsizes})


def values(rank, time, count, dtype):
    return ((np.arange(count) + rank + time) % 3).astype(dtype)


def differences(found, expected):
    """What differs between two results; each is an array, a list of arrays or None."""
    if expected is None:
        return [] if found is None else [f"{found!r}, not None"]
    if isinstance(expected, list):
        return [text for one, other in zip(found, expected, strict=True) for text in differences(one, other)]
    if type(found) is not type(expected) or (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return [f"{found!r}, not {expected.dtype}{list(expected.shape)}"]
    different = np.flatnonzero(found != expected)
    if different.size:
        return [f"{different.size} of {found.size} {found.dtype} differ, number {different[0]} first: "
                f"{found[different[0]]}, not {expected[different[0]]}"]
    return []


def place_for(device, expected, place):
    """An array for the result in ``place``, and what says whether nothing was written beyond it; None: a new one."""
    if place == "new" or not isinstance(expected, np.ndarray):
        return None, lambda: True
    if place == "shared":
        return device.empty(expected.shape, expected.dtype), lambda: True   # its block has fences
    fenced = FencedArray(expected.shape, expected.dtype)
    return fenced.array, fenced.is_whole


def call_often(device, kind, options, dtype, count, algorithm):
    """What is wrong with the results of equal calls."""
    given, answers, wrong = [], [], []
    for time in range(TIMES):
        given.append([values(rank, time, count, dtype) for rank in range(device.size)])
        answers.append(results(kind, given[time], [device.size], **options)[device.rank])
    gives = kind not in ("broadcast", "scatter") or device.rank == options["root"]
    for place in PLACES:
        for time in range(TIMES):
            out, is_whole = place_for(device, answers[time], place)
            x = given[time][device.rank] if gives else None
            found = getattr(device, kind)(x, **options, out=out, algorithm=algorithm)
            texts = differences(found, answers[time])
            if not is_whole():
                texts.append("bytes beyond out= were written")
            wrong += [f"result {place}, time {time}: {text}" for text in texts]
    return wrong


def call_all(device, calls, dtypes, sizes=SIZES, algorithm=None):
    """What is wrong with the results of one rank, and the number of calls."""
    heap = fence(device.endpoint.heap)
    wrong, called = [], 0
    for kind, options in calls:
        for dtype in dtypes:
            if "op" in options and not has_op(options["op"], dtype):
                continue
            for count in counts_of(dtype, options, sizes):
                texts = call_often(device, kind, options, dtype, count, algorithm)
                device.barrier()    # nobody writes any more
                texts += heap.broken_fences()
                device.barrier()    # nobody writes yet
                wrong += [f"{kind} {options} of {dtype}[{count}]: {text}" for text in texts]
                called += len(PLACES) * TIMES
    return wrong, called


def with_ops(kind, ops=OPS):
    """The calls of a kind: with each op, if it reduces."""
    if kind in REDUCING:
        return [(kind, {**KINDS[kind], "op": op}) for op in ops]
    return [(kind, KINDS[kind])]


def assert_nothing_wrong(run):
    for rank, (wrong, called) in enumerate(run):
        assert not wrong, f"rank {rank}: {len(wrong)} in {called} calls, first: {wrong[0]}"
        assert called


def test_a_result_with_a_dtype_of_its_own_lies_within_its_memory(cluster_of):
    calls = with_ops("all_reduce", ["mean", "sum"]) + with_ops("reduce", ["mean"])
    cluster = cluster_of(Mesh(devices=DEVICES), "process", "shared_memory")
    assert_nothing_wrong(cluster.run(call_all, calls, [np.dtype(bool)], SIZES[:3]))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("backend", "transport"), RUNTIMES)
def test_each_kind_op_and_dtype_gives_what_numpy_gives(cluster_of, backend, transport, kind):
    cluster = cluster_of(Mesh(devices=DEVICES), backend, transport, deadline_seconds=280)
    assert_nothing_wrong(cluster.run(call_all, with_ops(kind), DTYPES, OF_QUEUES if transport == "queue" else SIZES))
    if cluster.backend == "mpi" and kind != "permute":
        dtypes = [dtype for dtype in DTYPES if kind not in REDUCING or dtype.char in OF_MPI]
        assert_nothing_wrong(cluster.run(call_all, with_ops(kind), dtypes, algorithm="mpi"))
