"""Every collective equals NumPy on the gathered input: on every mesh, by both backends and both transports."""

from __future__ import annotations

import copy
import functools
import itertools
from hashlib import sha256
from math import prod
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from oracle import assert_same, groups_along, results
from runtimes import RUNTIMES, mainly

from parallelism.algorithms import COLLECTIVES
from parallelism.algorithms.algorithms import algorithms
from parallelism.mesh import Mesh
from vcluster.code import CollectiveMismatchError, DeviceFailedError, PerDevice

MESHES = [Mesh(devices=n) for n in (1, 2, 3, 4)] + [Mesh(dp=2, tp=2), Mesh(dp=2, tp=3), Mesh(pp=2, dp=2, tp=2)]
DTYPES = [np.dtype(t) for t in "?bBhHiIlLqQefdgFDG"]


class Case(NamedTuple):
    """One collective on the whole cluster: everything that each rank gives, and what it must get."""

    method: str
    xs: list[Any]
    options: list[dict[str, Any]]
    expected: list[Any]
    form: str = "plain"
    out: str | None = None

    def of(self, rank):
        wanted = self.expected[rank]
        look = (wanted.shape, wanted.dtype) if isinstance(wanted, np.ndarray) else None
        return self.method, self.xs[rank], self.options[rank], self.form, self.out, look

    def __str__(self):
        return f"{self.method} of {self.xs[0]!r} with {self.options[0]}, {self.form}, out={self.out}"


def values(rank, shape, dtype=np.float64, most=11):
    """Small integers, other ones on every rank."""
    dtype = np.dtype(dtype)
    count = np.arange(prod(shape)) * 3 + rank * 5 + 1
    x = (count % 2 if dtype.kind == "b" else count % most).astype(dtype).reshape(shape)
    return x + (x * 1j).astype(dtype) if dtype.kind == "c" else x


def case(
    mesh, method, shape, where=None, *, dtype=np.float64, most=11, form="plain", out=None, scalar=False, **options
):
    """``shape`` and values in ``options`` may be functions of rank or, among the options, of (position, group)."""
    factors: list[int]
    if isinstance(where, list):
        groups, factors, place = where, [len(where[0])], {"groups": where}
    else:
        (groups, factors), place = groups_along(dict(mesh.shape), where), {"axes": where}
    xs: list[Any] = [None] * mesh.size
    given: list[dict[str, Any]] = [{} for _ in range(mesh.size)]
    expected: list[Any] = [None] * mesh.size
    for group in groups:
        g = len(group)
        meaning = {name: value(g) if callable(value) and name != "op" else value for name, value in options.items()}
        for rank in group:
            xs[rank] = values(rank, shape(rank) if callable(shape) else shape, dtype, most)
        per_position = dict(meaning)
        sizes = per_position.pop("split_sizes", None)
        for position, (rank, wanted) in enumerate(zip(
            group, results(method, [xs[r] for r in group], factors if not isinstance(where, list) else [g], **meaning),
            strict=True,
        )):
            expected[rank] = wanted[()] if scalar and isinstance(wanted, np.ndarray) and wanted.ndim == 0 else wanted
            given[rank] = {**per_position, **place, **({} if sizes is None else {"split_sizes": sizes[position]})}
    if scalar:
        expected = [[y[()] if y.ndim == 0 else y for y in e] if isinstance(e, list) else e for e in expected]
        xs = [x[()] for x in xs]
    elif method in ("broadcast", "scatter"):
        for group in groups:
            for position, rank in enumerate(group):
                if position != given[rank].get("root", 0):
                    xs[rank] = None
    return Case(method, xs, given, expected, form, out)


def places(mesh, *, full):
    """Where on a mesh a collective may take place.  Not ``full``: one of each sort."""
    n, axes = mesh.size, mesh.axes
    groups: list[Any] = []
    if n > 1:
        backwards = list(range(n))[::-1]
        groups = [[backwards], [backwards[::2], backwards[1::2]] if n > 2 else [[0], [1]]]
    if len(axes) == 1:
        return [None, *groups]
    if not full:
        return [None, axes[len(axes) // 2], *(axes[::-1], axes[::-2])[: len(axes) - 1], groups[-1]]
    return [None, *axes, *(o for k in range(2, len(axes) + 1) for o in itertools.permutations(axes, k)), *groups]


def battery(mesh, *, full=True):
    """The cases of one mesh.  ``full=False`` leaves out the sweeps over places, operations, dtypes and forms."""
    n = mesh.size
    make = functools.partial(case, mesh)
    last = lambda g: g - 1
    some = lambda g: [(p, p + 1) for p in range(0, g - 1, 2)] + [(g - 1, g - 1)] * (g % 2)
    for where in places(mesh, full=full):
        yield make("all_reduce", (5, 3), where, op="mean", dtype=np.int32)
        yield make("all_gather", lambda r: (2, (r + 1) % 3, 4), where, dim=1)
        yield make("reduce_scatter", (2, 3, 5), where, dim=-1, op="max")
        yield make("all_to_all", lambda r: (5, r + 1, 2), where, split_dim=0, concat_dim=1)
        yield make("broadcast", lambda r: (3, r + 1), where, root=last)
        yield make("reduce", (3, 5), where, root=last, op="min")
        yield make("scatter", (5, 2), where, root=last)
        yield make("gather", lambda r: (r % 2, 3), where, root=last)
        yield make("all_scatter", lambda r: (r, 3), where)
        yield make("permute", lambda r: (r + 1, 2), where, pairs=some)
        yield make("shift", lambda r: (2, r), where, by=-2)
        if not full and where is not None:
            continue
        yield make("all_reduce", (5, 3), where, dtype=np.int64)
        yield make("all_reduce", (5, 3), where, op="max")
        yield make("all_gather", (2, 3), where, dim=-1)
        yield make("reduce_scatter", (7, 2), where)
        yield make("all_to_all", (3, 7), where, split_dim=1, concat_dim=0)
        yield make("all_to_all", lambda r: (r, 2), where, split_dim=0, concat_dim=0)
        yield make("scatter", lambda r: (2, 7), where, root=0, dim=-1)
        yield make("shift", (3,), where, by=1)
        for method in ("all_reduce", "all_gather", "gather", "all_scatter", "shift"):
            yield make(method, (), where)
            yield make(method, (), where, scalar=True)

    for method in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather",
                   "scatter", "all_scatter", "shift"):
        yield make(method, (0, 3))
    yield make("all_to_all", (n * (n + 1) // 2, 2), split_sizes=lambda g: [[*range(1, g + 1)]] * g)
    yield make("all_to_all", (n, 2), split_sizes=lambda g: [[g if j == i else 0 for j in range(g)] for i in range(g)])

    for out in ("new", "x", "fortran", "strided", "shared") if full else ("x", "strided"):
        for shape in [(3, 5), (60, 70)] if full else [(60, 70)]:
            yield make("all_reduce", shape, out=out)
            yield make("shift", shape, out=out)
            if out != "x":
                yield make("all_gather", shape, out=out, dim=1)
                yield make("reduce_scatter", shape, out=out, dim=1)
                yield make("all_to_all", shape, out=out)
                yield make("reduce", shape, out=out, root=last)
                yield make("gather", shape, out=out)
                yield make("broadcast", shape, out=out)
                yield make("scatter", shape, out=out)

    # 8 KiB go through the slots; results from 16 KiB on lie in shared memory
    for elements in (1023, 1024, 1025, 2047, 2048, 2049, 60_001) if full else (1025, 2049):
        for form in ("plain", "shared"):
            yield make("all_reduce", (elements,), form=form)
            yield make("all_reduce", (elements,), form=form, out="x")
            yield make("shift", (elements,), form=form, out="x")
            yield make("all_gather", (elements,), form=form)
            yield make("reduce_scatter", (elements,), form=form, op="mean")
            yield make("all_to_all", (3, elements // 3), form=form, split_dim=1, concat_dim=0)
            yield make("broadcast", (elements,), form=form, root=last)
            yield make("all_scatter", (elements,), form=form)
    yield make("all_gather", lambda r: (3000 * (r % 2),))  # large for some, inline for others
    if not full:
        return
    for op in ("sum", "prod", "product", "mean", "avg", "max", "min", "and", "or", "xor"):
        yield make("all_reduce", (7,), dtype=np.uint8, op=op)
        yield make("all_reduce", (7,), dtype=bool, op=op)
    for op in (np.add, np.maximum, keep_smaller, functools.partial(keep_smaller), lambda a, b: a * b):
        yield make("all_reduce", (3, 5), op=op, most=3)
        yield make("reduce_scatter", (5, 3), op=op, most=3)
        yield make("reduce", (), op=op, most=3)
    for dtype in DTYPES:
        for method in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "shift"):
            yield make(method, (5, 3), dtype=dtype)
        yield make("all_reduce", (), dtype=dtype, scalar=True, op="mean")
        yield make("all_reduce", (1100,), dtype=dtype, op="mean")
        yield make("all_reduce", (5, 2), dtype=dtype, op="prod", most=4)
        if dtype.kind != "c":
            yield make("reduce", (5, 2), dtype=dtype, op="min")
        if dtype.kind in "biu":
            yield make("reduce_scatter", (5, 2), dtype=dtype, op="xor")
    yield make("all_reduce", (5, 3), dtype=">i4")
    for form in ("fortran", "strided", "reversed", "transposed", "readonly", "shared"):
        for method in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "scatter", "gather",
                       "all_scatter", "reduce", "shift"):
            for shape in [(5, 3), (70, 60)]:
                yield make(method, shape, form=form)


def keep_smaller(a, b):
    return np.where(a < b, a, b)


def shaped(device, x, form):
    if x is None or form == "plain":
        return x
    if form == "fortran":
        return np.asfortranarray(x)
    if form == "transposed":
        return np.ascontiguousarray(x.T).T
    if form == "reversed":
        return np.ascontiguousarray(x[::-1])[::-1]
    if form == "strided":
        y = np.full((*x.shape[:-1], 2 * x.shape[-1]), 99, x.dtype)[..., ::2]
    elif form == "shared":
        y = device.empty(x.shape, x.dtype)
    else:
        y = x.copy()
    y[...] = x
    y.flags.writeable = form != "readonly"
    return y


def space(device, x, out, look):
    """The array for a result of that look: (shape, dtype)."""
    if out == "x":
        return x
    if out == "fortran":
        return np.full(look[0], 77, look[1], order="F")
    return shaped(device, np.full(look[0], 77, look[1]), {"new": "plain"}.get(out, out))


def play(device, cases):
    """The results of the cases: all kept to the end, so that none may lie where a later one is written."""
    found = []
    for method, x, options, form, out, look in cases:
        mine = shaped(device, x, form)
        before = copy.deepcopy(mine)
        if out is not None and look is not None:
            options = {**options, "out": space(device, mine, out, look)}
        result = getattr(device, method)(mine, **options)
        if "out" in options:
            assert result is options["out"]
        elif isinstance(result, np.ndarray):
            assert result.flags.writeable
            assert not np.may_share_memory(result, mine) or mine is None
        if out != "x":
            assert_same(mine, before, f"the input of {method}")
        found.append(result)
    return found


def worlds():
    """Every mesh on every runtime: one of three devices in full, on the others what differs there."""
    for mesh in MESHES:
        for runtime in RUNTIMES:
            full = mesh.size == 3 and runtime == RUNTIMES[0]
            rare = runtime == RUNTIMES[3] and mesh.size != 3
            marks = [pytest.mark.slow] * rare
            yield pytest.param(mesh, *runtime, full, id=f"{mesh}-{'-'.join(runtime)}", marks=marks)
            if not full and (mesh.size == 3 or runtime == RUNTIMES[0]):
                name = f"{mesh}-{'-'.join(runtime)} in full"
                yield pytest.param(mesh, *runtime, True, id=name, marks=pytest.mark.slow)


@pytest.mark.slow_for("devices=3", "pp=2, dp=2")
@pytest.mark.sampled(26)
@pytest.mark.parametrize(("mesh", "backend", "transport", "full"), [*worlds()])
def test_every_collective_equals_numpy_on_the_gathered_input(cluster_of, mesh, backend, transport, full):
    cases = list(battery(mesh, full=full))
    assert {case.method for case in cases} == {*COLLECTIVES, "shift"} - {"barrier"}
    slow = {"deadline_seconds": 280} if full else {}      # a crowded machine is slow, not wrong
    cluster = cluster_of(mesh, backend, transport, **slow)
    run = cluster.run(play, PerDevice([case.of(rank) for case in cases] for rank in range(mesh.size)))
    for i, case in enumerate(cases):
        for rank in range(mesh.size):
            try:
                assert_same(run[rank][i], case.expected[rank])
            except AssertionError as error:
                raise AssertionError(f"rank {rank}: {case}") from error


# What is refused, and how


def attempt(function):
    """The error of a call, as text."""
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def no_numbers(device):
    told = {}
    for name, x in {
        "structured": np.zeros(2, [("a", int)]), "object": np.array([None, 1]), "string": np.array(["a"]),
        "time": np.zeros(2, "M8[s]"), "text": "abc", "none": None, "huge": 2**70,
    }.items():
        for method in ("all_reduce", "all_gather", "all_to_all", "broadcast", "gather", "all_scatter", "shift", "send"):
            # the others call nothing: it is refused before anything is sent
            if device.rank == 0 and (method != "send" or isinstance(x, np.ndarray)):
                arguments = (1,) if method == "send" else ()
                told[name, method] = attempt(lambda m=method, x=x, a=arguments: getattr(device, m)(x, *a))
    return told, device.all_reduce(1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", ["shared_memory", "queue"])
def test_arrays_without_numbers_are_refused_by_name(cluster_of, transport):
    run = cluster_of(Mesh(devices=2), "process", transport).run(no_numbers)
    names = {"structured": "dtype [('a', '<i8')]", "object": "dtype object", "string": "dtype <U1",
             "time": "dtype datetime64[s]", "text": "got str", "none": "got None", "huge": "dtype object"}
    for (name, method), told in run[0][0].items():
        assert told.startswith("TypeError: "), (name, method, told)
        assert names[name] in told
        assert {"send": "a message", "shift": "permute"}.get(method, method) in told
    assert [total for _, total in run] == [2, 2]


def wrong_arguments(device):
    x = np.ones((2, 3))
    calls = {
        "dim": lambda: device.all_gather(x, dim=2),
        "negative dim": lambda: device.reduce_scatter(x, dim=-3),
        "concat_dim": lambda: device.all_to_all(x, concat_dim=5),
        "dim of another type": lambda: device.gather(x, dim=1.0),
        "scatter of 0-d": lambda: device.scatter(np.array(1.0)) if device.rank == 0 else device.reduce_scatter(1),
        "all_to_all of 0-d": lambda: device.all_to_all(3),
        "root": lambda: device.broadcast(x, root=3),
        "root of another type": lambda: device.reduce(x, root="first"),
        "op": lambda: device.all_reduce(x, op="add"),
        "and of floats": lambda: device.all_reduce(x, op="and"),
        "max of complex": lambda: device.all_reduce(x * 1j, op="max"),
        "split_sizes": lambda: device.all_to_all(x, split_sizes=[1, 1, 1]),
        "algorithm": lambda: device.all_reduce(x, algorithm="rings"),
        "power of two": lambda: device.all_reduce(x, algorithm="halving_doubling"),
        "axis": lambda: device.all_reduce(x, "tp"),
        "axes and groups": lambda: device.all_reduce(x, "devices", groups=[[0, 1, 2]]),
        "twice": lambda: device.all_reduce(x, groups=[[0, 1, 2], [1]]),
        "outside": lambda: device.all_reduce(x, groups=[[0, 1, 3]]),
        "pairs": lambda: device.permute(x, [(0, 1), (2, 1)]),
        "pair": lambda: device.permute(x, [(0, 3)]),
        "pair of texts": lambda: device.permute(x, ["01"]),
        "pair of three": lambda: device.permute(x, [(0, 1, 2)]),
        "shift by a part": lambda: device.shift(x, by=0.5),
        "split_sizes of parts": lambda: device.all_to_all(x, split_sizes=[1.5, 0.5, 0]),
        "groups of ranks": lambda: device.all_reduce(x, groups=[0, 1]),
        "groups of texts": lambda: device.all_reduce(x, groups=["01"]),
        "negative split_sizes": lambda: device.all_to_all(x, split_sizes=[3, -1, 0]),
        "no array at the root": lambda: device.broadcast(None, root=device.rank),
        "nothing to sum": lambda: device.all_reduce(None),
        "a list to scatter": lambda: device.scatter([x, x, x], root=device.rank),
        "axes as a number": lambda: device.all_reduce(x, 0),
        "axes as a list": lambda: device.all_reduce(x, ["devices"]),
        "held nan": lambda: device.hold("weights", float("nan")),
        "negative seconds": lambda: device.compute("x", seconds=-1),
        "endless seconds": lambda: device.compute("x", seconds=float("inf")),
        "negative flops": lambda: device.compute("x", flops=-1, seconds=1),
        "computed nan": lambda: device.compute("x", nbytes=float("nan")),
        "out list": lambda: device.all_reduce(x, out=[1]),
        "out shape": lambda: device.all_reduce(x, out=np.empty((3, 2))),
        "out dtype": lambda: device.all_reduce(x, out=np.empty((2, 3), np.float32)),
        "out dtype of a gather": lambda: device.all_gather(x, out=np.empty((6, 3), int)),
        "out piece": lambda: device.reduce_scatter(np.ones((3, 2)), out=np.empty((2, 2))),
        "out read-only": lambda: device.all_reduce(x, out=np.broadcast_to(1.0, (2, 3))),
        "out in one row": lambda: device.all_reduce(x, out=as_strided(np.empty(3), (2, 3), (0, 8))),
        "out that repeats": lambda: device.all_gather(x, out=as_strided(np.empty(9), (6, 3), (8, 16))),
        "out at the root": lambda: device.broadcast(x, root=device.rank, out=as_strided(np.empty(4), (2, 3), (8, 8))),
        "out of a mean": lambda: device.all_reduce(np.arange(3), op="mean", out=np.empty(3, int)),
        "out overlaps": lambda: (lambda y: device.all_reduce(y[:4], out=y[1:]))(np.arange(5)),
        "out of a tree": lambda: device.all_reduce([x], out=x),
        "out of a list": lambda: device.all_scatter(x, out=x),
    }
    told = {}
    for i, (name, call) in enumerate(calls.items()):
        if device.rank == i % 3:  # alone: the others are not asked
            told[name] = attempt(call)
    return told, device.all_reduce(x)


WRONG = {
    "dim": "ValueError: all_gather of an array of 2 dims has dims -2 to 1, got 2",
    "negative dim": "ValueError: reduce_scatter of an array of 2 dims has dims -2 to 1, got -3",
    "concat_dim": "ValueError: all_to_all of an array of 2 dims has dims -2 to 1, got 5",
    "dim of another type": "TypeError: dim is an integer, got 1.0",
    "scatter of 0-d": "ValueError",
    "all_to_all of 0-d": "ValueError: all_to_all splits its array along a dim, and a 0-d one has none",
    "root": "ValueError: root is a position in the group, 0 to 2, got 3",
    "root of another type": "TypeError: root is an integer, got 'first'",
    "op": "ValueError: op must be one of sum, mean,",
    "and of floats": "TypeError: op 'and' is for integers and bools, got float64",
    "max of complex": "TypeError: op 'max' needs an order, and complex128 has none",
    "split_sizes": "ValueError: all_to_all over 3 ranks needs 3 split_sizes that add up to 2",
    "algorithm": "ValueError: no algorithm 'rings' for all_reduce over 3; these apply: direct, naive, ring, tree",
    "power of two": "ValueError: no algorithm 'halving_doubling' for all_reduce over 3 (it needs a power of two)",
    "axis": "ValueError",
    "axes and groups": "ValueError: all_reduce takes axes or groups, got both",
    "twice": "ValueError: rank 1 is twice in groups=[[0, 1, 2], [1]]",
    "outside": "ValueError: groups of Mesh(devices=3) hold ranks 0 to 2, got 3",
    "pairs": "ValueError: permute has position 1 as target of more than one pair",
    "pair": "ValueError",
    "pair of texts": "TypeError: each pair in pairs= is a list of integers, got '01'",
    "pair of three": "ValueError: a pair is (source, target), two positions in the group; got (0, 1, 2)",
    "shift by a part": "TypeError: by is an integer, got 0.5",
    "split_sizes of parts": "TypeError: a split size is an integer, got 1.5",
    "groups of ranks": "TypeError: each group in groups= is a list of integers, got 0",
    "groups of texts": "TypeError: each group in groups= is a list of integers, got '01'",
    "negative split_sizes": "ValueError: all_to_all over 3 ranks needs 3 split_sizes that add up to 2, the extent of dim 0, "
                            "and none below 0; got [3, -1, 0]",
    "no array at the root": "TypeError: broadcast takes an array or a scalar, got None; the root passes the array, and the "
                            "other ranks None",
    "nothing to sum": "TypeError: all_reduce takes an array or a scalar, got None, which is what a function without a return",
    "a list to scatter": "TypeError: scatter takes an array or a scalar, got list; np.concatenate and np.stack make",
    "axes as a number": "TypeError: axes must be one of the names 'devices', a tuple of names, or None; got an int",
    "axes as a list": "TypeError: axes must be one of the names 'devices', a tuple of names, or None; got a list",
    "held nan": "ValueError: hold() takes a finite number of bytes, got nan",
    "negative seconds": "ValueError: compute('x') takes seconds that are finite and at least 0, got -1.0",
    "endless seconds": "ValueError: compute('x') takes seconds that are finite and at least 0, got inf",
    "negative flops": "ValueError: compute('x') takes flops that are finite and at least 0, got -1.0",
    "computed nan": "ValueError: compute('x') takes nbytes that are finite and at least 0, got nan",
    "out list": "TypeError: out= must be an array, got list",
    "out shape": "ValueError: out= of all_reduce must be float64[2, 3], got float64[3, 2]",
    "out dtype": "ValueError: out= of all_reduce must be float64[2, 3], got float32[2, 3]",
    "out dtype of a gather": "ValueError: out= of all_gather must have dtype float64, got int64",
    "out piece": "ValueError: out= of reduce_scatter must be float64[1, 2], got float64[2, 2]",
    "out read-only": "ValueError: out= of all_reduce is read-only",
    "out in one row": "ValueError: out= of all_reduce has elements that lie in the same memory: shape [2, 3], "
                      "strides [0, 8]; every element needs memory of its own",
    "out that repeats": "ValueError: out= of all_gather has elements that lie in the same memory: shape [6, 3]",
    "out at the root": "ValueError: out= of broadcast has elements that lie in the same memory",
    "out of a mean": "ValueError: out= of all_reduce must be float64[3], got int64[3]",
    "out overlaps": "ValueError: out= of all_reduce overlaps its input",
    "out of a tree": "TypeError: all_reduce of a list of arrays takes no out=",
    "out of a list": "TypeError: all_scatter takes no out=",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", ["shared_memory", "queue"])
def test_wrong_arguments_are_refused_before_anything_is_sent(cluster_of, transport):
    run = cluster_of(Mesh(devices=3), "process", transport).run(wrong_arguments)
    told = {name: text for found, _ in run for name, text in found.items()}
    for name, start in WRONG.items():
        assert str(told[name]).startswith(start), (name, told[name])
    assert len(told) == len(WRONG)
    for _, total in run:
        assert_same(total, np.full((2, 3), 3.0))


def late_refusals(device):
    """What only the others' shapes tell: one member is refused, the others have their results, and all go on."""
    told = []
    for shape in [(3,), (3000,)]:
        x = np.full(shape, device.rank)
        for alone in range(device.size):
            out = np.empty(5, int) if device.rank == alone else None
            told.append(attempt(lambda x=x, out=out: device.all_gather(x, out=out).tolist()))
            told.append(attempt(lambda x=x, out=out: device.all_to_all(x, out=out).tolist()))
            other = 1 - alone
            told.append(attempt(lambda x=x, out=out, other=other: device.broadcast(x, root=other, out=out).tolist()))
    return told, device.all_reduce(1)


@mainly
def test_a_member_with_a_wrong_out_does_not_hold_up_the_others(cluster_of, backend, transport):
    run = cluster_of(Mesh(devices=2), backend, transport).run(late_refusals)
    for rank, (told, total) in enumerate(run):
        assert total == 2
        for i, text in enumerate(told):
            if i // 3 % 2 == rank:
                assert text.startswith("ValueError: out= of "), text
                assert "int64[5]" in text
            else:
                assert isinstance(text, list)


# Trees


class Pair(NamedTuple):
    left: Any
    right: Any


def tree(rank):
    return {
        "weights": [values(rank, (5, 3)), values(rank, (7,), np.int32)], "flags": (values(rank, (3,), bool),),
        "step": rank + 1, "pair": Pair(values(rank, (), np.float32), values(rank, (0, 2))), "rest": [], "none": {},
    }


def trees(device, last):
    mine = tree(device.rank)
    before = copy.deepcopy(mine)
    found = [
        device.all_reduce(mine), device.all_reduce([values(device.rank, (40, 50)), 2.5], op="max"),
        device.broadcast(mine, root=last), device.broadcast(mine if device.rank == last else None, root=last),
        device.permute(mine, [(0, last)]), device.all_reduce(()), device.broadcast(()),
        device.shift((1, [device.rank])),
        device.all_reduce(mine, algorithm="ring"), device.all_reduce(mine, async_op=True).wait(),
    ]
    assert_same(mine, before, "the input")
    return found


def tree_map(function, *trees):
    first = trees[0]
    if isinstance(first, dict):
        return {key: tree_map(function, *(t[key] for t in trees)) for key in first}
    if isinstance(first, list | tuple):
        children = [tree_map(function, *leaves) for leaves in zip(*trees, strict=True)]
        return type(first)(*children) if isinstance(first, Pair) else type(first)(children)
    return function(*trees)


def zeros(leaf):
    return np.zeros_like(leaf) if isinstance(leaf, np.ndarray) else leaf.dtype.type(0)


def total(*leaves):
    dtype = np.int64 if np.asarray(leaves[0]).dtype == bool else None
    arrays = [np.asarray(leaf) for leaf in leaves]
    summed = np.asarray(np.sum(arrays, axis=0, dtype=dtype or arrays[0].dtype))
    return summed if isinstance(leaves[0], np.ndarray) else summed[()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [1, 3])
@mainly
def test_trees_of_arrays_travel_as_one_value(cluster_of, backend, transport, size):
    last = size - 1
    run = cluster_of(Mesh(devices=size), backend, transport).run(trees, last)
    arrived = lambda leaf: leaf if isinstance(leaf, np.ndarray) else np.int64(leaf)
    there = [tree_map(arrived, tree(rank)) for rank in range(size)]
    summed = tree_map(total, *map(tree, range(size)))
    highest = [np.max([values(r, (40, 50)) for r in range(size)], axis=0), np.float64(2.5)]
    for rank, found in enumerate(run):
        moved = there[0] if rank == last else tree_map(zeros, there[rank])
        ring = (np.int64(1), [np.int64((rank - 1) % size)])
        assert_same(found, [summed, highest, there[last], there[last], moved, (), (), ring, summed, summed])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", ["shared_memory", "queue"])
@pytest.mark.parametrize(("trees", "told"), [
    (({"a": 1.0, "b": 2.0}, {"b": 1.0, "a": 2.0}), ("{'a': float64[], 'b': float64[]}", "{'b': float64[], 'a': float64[]}")),
    (([np.ones(2), np.ones(3)], [np.ones(3), np.ones(2)]), ("[float64[2], float64[3]]", "[float64[3], float64[2]]")),
    (([np.ones(2)], (np.ones(2),)), ("[float64[2]]", "(float64[2],)")),
], ids=["keys", "shapes", "types"])
def test_trees_of_different_structure_are_not_summed(cluster_of, trees, told, transport):
    cluster = cluster_of(Mesh(devices=2), "process", transport)
    with pytest.raises(CollectiveMismatchError, match="structure") as error:
        cluster.run(lambda device, mine: device.all_reduce(mine), PerDevice(trees))
    assert all(f"rank {rank} called all_reduce({told[rank]}, op='sum')" in str(error.value) for rank in range(2))
    assert cluster.run(lambda device: device.all_reduce(1)).outputs == [2, 2]


# Ownership


def bits(device):
    """Sums whose last bits depend on the order of the terms, in every size and by every algorithm."""
    rng = np.random.default_rng(device.rank)
    found = []
    for elements in (1, 7, 1030, 9001):
        x = (rng.standard_normal(elements) * 10.0 ** rng.integers(-8, 8, elements)).astype(np.float32)
        for name in algorithms("all_reduce", device.size):
            for op in ("sum", lambda a, b: a + b):
                found.append(sha256(device.all_reduce(x, op=op, algorithm=name)).hexdigest())
    return found


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("backend", "transport"), RUNTIMES)
@pytest.mark.parametrize("size", [3, 8])
def test_every_rank_has_the_same_bits_after_an_all_reduce(cluster_of, backend, transport, size):
    if size == 8 and (backend, transport) != ("process", "shared_memory"):
        size = 4
    first, *others = cluster_of(Mesh(devices=size), backend, transport).run(bits)
    assert all(other == first for other in others)


def scribble(device):
    """Writes into every result, and sees that nothing else changed: not one's own value, not the others' results."""
    g, rank = device.size, device.rank
    for elements in (12, 1200, 7200):
        for new in (np.empty, device.empty):
            for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "all_scatter",
                         "shift", "scatter", "gather", "reduce"):
                x = new(elements, np.int64)
                x[:] = rank
                found = getattr(device, name)(x)
                mine = [y for y in (found if isinstance(found, list) else [found]) if y is not None]
                for i, y in enumerate(mine):
                    y[:] = 100 * rank + i
                device.barrier()
                assert (x == rank).all(), name
                assert all((y == 100 * rank + i).all() for i, y in enumerate(mine)), name
                x[:] = 55
                device.barrier()
                assert all((y == 100 * rank + i).all() for i, y in enumerate(mine)), name
    return g


@pytest.mark.sampled(2)
@mainly
def test_results_are_the_callers_own(cluster_of, backend, transport):
    assert cluster_of(Mesh(devices=3), backend, transport).run(scribble).outputs == [3, 3, 3]


def chain(device, x):
    """A result of one collective is the input, or the output, of the next."""
    x = device.all_reduce(x)
    x = device.shift(x, out=x)
    assert device.all_reduce(x, out=x) is x
    y = device.reduce_scatter(x)
    z = device.all_gather(y)
    back = z[::-1]
    assert device.all_reduce(back, out=back) is back
    w = device.empty(z.shape)
    for _ in range(3):  # the two buffers of a slot are used in turn
        device.all_reduce(z, op="max", out=w)
        device.broadcast(w, out=z)
    return z


@pytest.mark.sampled(6)
@pytest.mark.parametrize("elements", [1, 30, 1025, 2050, 40_000])
@mainly
def test_collectives_on_results_of_collectives(cluster_of, backend, transport, elements):
    xs = [values(rank, (elements,)) for rank in range(4)]
    run = cluster_of(Mesh(devices=4), backend, transport).run(chain, PerDevice(xs))
    for z in run:
        assert_same(z, 64 * np.sum(xs, axis=0))


# Groups, objects, integers


def outside(device):
    found = []
    for x in (np.full((2, 3), device.rank + 1), device.rank + 1, [np.full(2, device.rank + 1.0), 1]):
        for work in (False, True):
            options = {"groups": [[3, 1]], "async_op": work}
            for y in (device.broadcast(x, root=1, **options), device.permute(x, [(0, 1)], **options)):
                found.append(y.wait() if work else y)
    out = np.full(2, 9.0)
    assert device.broadcast(np.full(2, device.rank + 1.0), groups=[[3, 1]], out=out) is out
    found.append(out)
    found.append(attempt(lambda: device.all_reduce(1, groups=[[3, 1]]).item()))
    return found


@mainly
def test_ranks_in_no_group_get_zeros_from_broadcast_and_permute_alone(cluster_of, backend, transport):
    run = cluster_of(Mesh(devices=4), backend, transport).run(outside)
    for rank, found in enumerate(run):
        sent, moved = (2 if rank in (1, 3) else 0), (4 if rank == 1 else 0)
        expected = []
        for make in (lambda k: np.full((2, 3), k), np.int64, lambda k: [np.full(2, float(k)), np.int64(k > 0)]):
            expected += [make(sent), make(moved)] * 2
        refusal = f"ValueError: rank {rank} is in none of groups=[[3, 1]], but calls all_reduce"
        expected += [np.full(2, 4.0 if rank in (1, 3) else 0.0), 2 if rank in (1, 3) else refusal]
        assert_same(found, expected)


def numpys_integers(device):
    x = values(device.rank, (2, 3))
    one = np.int64(1)
    return [
        device.broadcast(x, root=one), device.all_gather(x, dim=-one), device.gather(x, root=np.uint8(1), dim=one),
        device.permute(x, np.array([[0, 1]])), device.shift(x, by=one), device.all_reduce(x, groups=np.array([[1, 0]])),
        device.all_to_all(x, split_sizes=np.array([1, 1])),
    ]


def test_numpys_integers_are_integers(cluster_of):
    run = cluster_of(Mesh(devices=2)).run(numpys_integers)
    a, b = values(0, (2, 3)), values(1, (2, 3))
    wide = np.concatenate([a, b], 1)
    assert_same(run[0], [b, wide, None, np.zeros((2, 3)), b, a + b, np.stack([a[0], b[0]])])
    assert_same(run[1], [b, wide, wide, a, a, a + b, np.stack([a[1], b[1]])])


def objects(device):
    mine = {"rank": device.rank, "text": "é" * (5000 * device.rank), "function": keep_smaller, "set": {device.rank}}
    everyones = device.all_gather_object(mine)
    told = device.broadcast_object(mine if device.rank == 1 else None, root=1)
    nothing = device.all_gather_object(None)
    return [one["set"] for one in everyones], len(everyones[-1]["text"]), told["rank"], nothing, device.barrier()


@mainly
def test_objects_are_gathered_and_broadcast(cluster_of, backend, transport):
    run = cluster_of(Mesh(devices=3), backend, transport).run(objects)
    assert run.outputs == [([{0}, {1}, {2}], 10_000, 1, [None] * 3, None)] * 3


def write_into_terms(a, b):
    a += b
    return a


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", ["shared_memory", "queue"])
@pytest.mark.parametrize("elements", [3, 30_000])
def test_an_op_cannot_write_into_somebodys_value(cluster_of, transport, elements):
    cluster = cluster_of(Mesh(devices=3), "process", transport)
    with pytest.raises(DeviceFailedError, match="read-only"):
        cluster.run(lambda device: device.all_reduce(np.ones(elements), op=write_into_terms))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", ["shared_memory", "queue"])
def test_an_op_that_changes_shape_or_dtype_is_refused(cluster_of, transport):
    cluster = cluster_of(Mesh(devices=3), "process", transport)
    for op in (lambda a, b: a[:1], lambda a, b: a.astype(np.float32), np.less):
        with pytest.raises(DeviceFailedError, match="must be elementwise and keep the dtype"):
            cluster.run(lambda device, op=op: device.all_reduce(np.ones(30), op=op))
    assert cluster.run(lambda device: device.all_reduce(np.ones(30), op=np.add)[0]).outputs == [3.0] * 3
