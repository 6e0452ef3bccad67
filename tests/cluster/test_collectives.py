"""Every collective equals NumPy on the gathered input: on every mesh, by both backends and both transports."""

from __future__ import annotations

import copy
import functools
import itertools
from math import prod
from typing import Any, NamedTuple

import numpy as np
import pytest
from oracle import assert_same, groups_along, results

from parallelism.mesh import Mesh
from vcluster.arguments import PerDevice
from vcluster.errors import DeviceFailedError

MESHES = [Mesh(devices=n) for n in (1, 2, 3, 4)] + [Mesh(dp=2, tp=2), Mesh(dp=2, tp=3), Mesh(pp=2, dp=2, tp=2)]
RUNTIMES = [(b, t) for b in ("process", "thread") for t in ("shared_memory", "queue")]
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


def case(mesh, method, shape, where=None, *, dtype=np.float64, most=11, form="plain", out=None, scalar=False, **options):
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


def battery(mesh, *, full=True):
    """The cases of one mesh.  ``full=False`` leaves out the sweeps over dtypes and forms of the input."""
    n = mesh.size
    axes = list(mesh.axes)
    wheres: list[Any] = [None, *axes] if len(axes) > 1 else [None]
    wheres += [tuple(order) for k in range(2, len(axes) + 1) for order in itertools.permutations(axes, k)][:8]
    if n > 1:
        backwards = list(range(n))[::-1]
        wheres += [[backwards], [backwards[::2], backwards[1::2]] if n > 2 else [[0], [1]]]
    make = functools.partial(case, mesh)
    last = lambda g: g - 1  # noqa: E731
    some = lambda g: [(p, p + 1) for p in range(0, g - 1, 2)] + [(g - 1, g - 1)] * (g % 2)  # noqa: E731
    for where in wheres:
        for op, dtype in [("sum", np.int64), ("mean", np.int32), ("max", np.float64)]:
            yield make("all_reduce", (5, 3), where, op=op, dtype=dtype)
        yield make("all_gather", lambda r: (2, (r + 1) % 3, 4), where, dim=1)
        yield make("all_gather", (2, 3), where, dim=-1)
        yield make("reduce_scatter", (7, 2), where)
        yield make("reduce_scatter", (2, 3, 5), where, dim=-1, op="max")
        yield make("all_to_all", lambda r: (5, r + 1, 2), where, split_dim=0, concat_dim=1)
        yield make("all_to_all", (3, 7), where, split_dim=1, concat_dim=0)
        yield make("all_to_all", lambda r: (r, 2), where, split_dim=0, concat_dim=0)
        yield make("broadcast", lambda r: (3, r + 1), where, root=last)
        yield make("reduce", (3, 5), where, root=last, op="min")
        yield make("scatter", (5, 2), where, root=last)
        yield make("scatter", lambda r: (2, 7), where, root=0, dim=-1)
        yield make("gather", lambda r: (r % 2, 3), where, root=last)
        yield make("all_scatter", lambda r: (r, 3), where)
        yield make("permute", lambda r: (r + 1, 2), where, pairs=some)
        yield make("shift", (3,), where, by=1)
        yield make("shift", lambda r: (2, r), where, by=-2)
        for method in ("all_reduce", "all_gather", "gather", "all_scatter", "shift"):
            yield make(method, (), where)
            yield make(method, (), where, scalar=True)

    for op in ("sum", "prod", "product", "mean", "avg", "max", "min", "and", "or", "xor"):
        yield make("all_reduce", (7,), dtype=np.uint8, op=op)
        yield make("all_reduce", (7,), dtype=bool, op=op)
    for op in (np.add, np.maximum, keep_smaller, functools.partial(keep_smaller), lambda a, b: a * b):
        yield make("all_reduce", (3, 5), op=op, most=3)
        yield make("reduce_scatter", (5, 3), op=op, most=3)
        yield make("reduce", (), op=op, most=3)
    for method in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter",
                   "all_scatter", "shift"):
        yield make(method, (0, 3))
    yield make("all_to_all", (n * (n + 1) // 2, 2), split_sizes=lambda g: [[*range(1, g + 1)]] * g)
    yield make("all_to_all", (n, 2), split_sizes=lambda g: [[g if j == i else 0 for j in range(g)] for i in range(g)])

    for out in ("new", "x", "fortran", "strided", "shared"):
        for shape in [(3, 5), (60, 70)]:
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
    for elements in (1023, 1024, 1025, 2047, 2048, 2049, *([60_001] if full else [])):
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


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(("backend", "transport"), RUNTIMES)
def test_every_collective_equals_numpy_on_the_gathered_input(cluster_of, mesh, backend, transport):
    cases = list(battery(mesh, full=(backend, transport) == ("process", "shared_memory") or mesh.size == 3))
    cluster = cluster_of(mesh, backend, transport)
    run = cluster.run(play, PerDevice([case.of(rank) for case in cases] for rank in range(mesh.size)))
    for i, case in enumerate(cases):
        for rank in range(mesh.size):
            try:
                assert_same(run[rank][i], case.expected[rank])
            except AssertionError as error:
                raise AssertionError(f"rank {rank}: {case}") from error
