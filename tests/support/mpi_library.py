"""Collectives by ``algorithm="mpi"`` beside direct ones, on the ranks of a job of four devices; a script of MPI jobs.

The values are small integers, so that the library cannot combine them in an order that gives other bits.
"""

from functools import partial

import numpy as np
from mpi_job import text_of

from parallelism import Mesh
from vcluster import VirtualCluster

SHAPES = (5, 6, 3), (1, 4, 2), (0, 3, 4), (9, 1, 1), (40, 50, 30)
"""Pieces that are uneven, that few members have, that nobody has, of one element, and large."""
DTYPES = "i2", "?", "c16", ">f8"


def along(device, axes, x, grown):
    """By text, a collective along axes."""
    last = len(device.group(axes)) - 1
    mine = device.position(axes)
    ofs = x if mine == last else None
    ops = "sum", "mean", *(("prod", "max", "min") if x.dtype.kind != "c" else ())
    found = {f"all_reduce {op}": partial(device.all_reduce, x, op=op) for op in ops}
    for dim in range(3):
        turned = grown.swapaxes(0, dim)
        found |= {
            f"all_gather {dim}": partial(device.all_gather, turned, dim=dim),
            f"gather {dim}": partial(device.gather, turned, dim=dim, root=last),
            f"reduce_scatter {dim}": partial(device.reduce_scatter, x, dim=dim),
            f"scatter {dim}": partial(device.scatter, ofs, dim=dim, root=last),
            f"all_to_all {dim}": partial(device.all_to_all, x, split_dim=dim, concat_dim=(dim + 1) % 3),
        }
    found |= {
        "reduce": partial(device.reduce, x, root=last), "broadcast": partial(device.broadcast, ofs, root=last),
        "all_scatter": partial(device.all_scatter, grown[: mine + 1]), "barrier": device.barrier,
        "scalar": partial(device.all_reduce, float(mine)), "gathered scalars": partial(device.all_gather, mine),
        "transposed": partial(device.all_reduce, x.T),
    }
    return {f"{text} along {axes}": partial(call, axes=axes) for text, call in found.items()}


def calls(device, shape, dtype):
    """By text, a collective of an array of this shape and dtype."""
    x = np.random.default_rng([7, device.rank]).integers(-3, 4, shape).astype(dtype)
    grown = np.concatenate([x] * (1 + device.rank))
    found = along(device, None, x, grown) | along(device, "tp", x, grown) | along(device, "dp", x, grown)
    if shape[0] > 2:
        sizes = [shape[0] - 2, *[0] * (device.size - 2), 2]
        found["all_to_all sizes"] = partial(device.all_to_all, x, split_sizes=sizes)
    found["other order"] = partial(device.all_gather, grown, groups=[[3, 1], [0, 2]])
    found["tree"] = partial(device.all_reduce, {"a": x, "b": [x, np.arange(3)]})
    return found


def same(a, b):
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.values()), list(b.values()))
    if a is None or b is None:
        return a is b
    return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


WITHOUT_OUT = "all_scatter", "barrier", "scalar", "tree"
"""How the texts of calls begin that take no memory for the result."""


def outs(given, expected):
    """What is given, and memory for the result: apart, with gaps, and in place, where that can be."""
    apart, gaps = np.empty_like(expected), np.empty((*expected.shape, 2), expected.dtype)[..., 1]
    found = {"apart": (given, apart), "with gaps": (given, gaps), "in place": (given, apart)}
    if isinstance(given, np.ndarray) and (given.shape, given.dtype) == (expected.shape, expected.dtype):
        found["in place"] = (given.copy(),) * 2
    return found


def into(call, expected):
    """The kinds of memory in which the result of a call is not the expected one.  Each member calls three times."""
    if expected is None:
        return [text for text in outs(None, np.empty(0)) if call(algorithm="mpi") is not None]
    wrong = []
    for text, (given, out) in outs(call.args[0], expected).items():
        result = call.func(given, *call.args[1:], **call.keywords, out=out, algorithm="mpi")
        wrong += [text] * (result is not out or not same(out, expected))
    return wrong


def kernel(device, shape, dtype):
    """The texts of collectives whose result is not that of the direct algorithm."""
    wrong = []
    for text, call in calls(device, shape, dtype).items():
        expected = call()
        wrong += [text] * (not same(expected, call(algorithm="mpi")))
        if not text.startswith(WITHOUT_OUT):
            wrong += [f"{text} {how}" for how in into(call, expected)]
    x = np.arange(6.0).reshape(3, 2) * device.rank
    expected, out, whole = 6 * np.arange(6.0).reshape(3, 2), np.empty((3, 2)), np.empty((12, 2))[::-1]
    assert device.all_reduce(x, out=out, algorithm="mpi") is out
    assert device.all_gather(x, out=whole, algorithm="mpi") is whole
    pending = [device.all_reduce(x, algorithm="mpi", async_op=True) for _ in range(3)]
    bits = device.all_reduce(np.array([1 << device.rank, 3]), op="xor", algorithm="mpi").tolist()
    works = bits == [15, 0] and (out == expected).all() and (whole[3:6] == x / max(1, device.rank)).all()
    return wrong + ["out"] * (not works and device.rank > 0) + [
        "async" for work in pending if not (work.wait() == expected).all()]


def events(device, algorithm):
    x = np.arange(7.0)
    found = device.all_reduce(x, algorithm=algorithm), device.all_gather(x[device.rank :], algorithm=algorithm)
    found += device.reduce_scatter(x, "tp", algorithm=algorithm), device.scatter(x, root=1, algorithm=algorithm)
    return found, device.barrier(algorithm=algorithm)


def traffic(cluster, algorithm):
    found = [event for event in cluster.run(events, algorithm).trace.events if event.kind == "collective"]
    assert {event.algorithm for event in found} == {algorithm}
    return sorted((e.rank, e.name, e.group, e.bytes_sent, e.bytes_received, e.messages, e.sources, e.start_seconds,
                   e.duration_seconds) for e in found)


def another_shape(device):
    device.all_reduce(np.ones(3 + (device.rank == 2)), algorithm="mpi")


def another_algorithm(device):
    device.all_reduce(np.ones(3), algorithm="mpi" if device.rank else None)


def never_called(device):
    if device.rank != 1:
        device.all_reduce(np.ones(3), algorithm="mpi")


def left(device):
    """Rank 0 fails while the others are in collectives, some of which all have begun."""
    pending = [device.all_reduce(np.ones(100_000), algorithm="mpi", async_op=True) for _ in range(3)]
    if device.rank == 0:
        raise ValueError("on purpose")
    for work in pending:
        work.wait()


def permuted(device):
    device.permute(np.ones(3), [(0, 1)], algorithm="mpi")


def function(device):
    device.all_reduce(np.ones(3), op=lambda a, b: a + b, algorithm="mpi")


def half(device):
    device.all_reduce(np.ones(3, np.float16), algorithm="mpi")


ERRORS = {
    another_shape: "differ in shape", another_algorithm: "differ in algorithm", never_called: "rank 1 returned without",
    left: "ValueError: on purpose", permuted: "MPI has no permute; algorithm='mpi' is for all_reduce",
    function: "combines by MPI's own operations", half: "not every MPI can reduce float16",
}


def main():
    """Print what is wrong."""
    with VirtualCluster(Mesh(dp=2, tp=2), hardware="dgx-a100", compute="modelled") as cluster:
        for shape, dtype in [*((shape, "f4") for shape in SHAPES), *((SHAPES[0], dtype) for dtype in DTYPES)]:
            for wrong in cluster.run(kernel, shape, dtype).outputs:
                assert not wrong, (shape, dtype, wrong)
        assert traffic(cluster, "mpi") == traffic(cluster, "direct")
        for kernel_that_fails, text in ERRORS.items():
            for _ in range(3):
                said = text_of(cluster, kernel_that_fails)
                assert text in said, said
            assert cluster.run(kernel, SHAPES[0], "f4").outputs == [[]] * 4
    for _ in range(2):  # others on the same ranks
        with VirtualCluster(3) as cluster:
            assert cluster.run(lambda d: float(d.all_reduce(d.rank, algorithm="mpi"))).outputs == [3.0] * 3
    with VirtualCluster(1) as cluster:
        assert cluster.run(lambda d: d.all_gather(np.ones(2), algorithm="mpi").sum()).outputs == [2.0]
    print("all is right")


if __name__ == "__main__":
    main()
