"""Laws of the collectives, and random programs of them beside the same program on global arrays in NumPy."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from oracle import assert_same, groups_along, pieces, results

from parallelism.algorithms.algorithms import algorithms
from parallelism.mesh import Mesh
from vcluster.code import PerDevice

MESHES = [Mesh(devices=1), Mesh(devices=3), Mesh(devices=4), Mesh(dp=2, tp=3), Mesh(dp=2, tp=2)]
RUNTIMES = [("thread", "shared_memory"), ("thread", "queue"), ("process", "shared_memory"), ("process", "queue")]
clusters = st.tuples(st.sampled_from(MESHES), st.sampled_from(RUNTIMES))
shared = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.generate],  # shrinking would run hundreds of programs that fail
)


@st.composite
def programs(draw):
    """A mesh, a runtime, an array for each rank, and calls: each works on what the one before made."""
    mesh, runtime = draw(clusters)
    ndim = draw(st.integers(1, 3))
    extents = [draw(st.integers(0, 4)) for _ in range(ndim)]
    if draw(st.booleans()):  # beyond the slots
        extents[draw(st.integers(0, ndim - 1))] = draw(st.integers(1000, 1500))
    dtype = draw(st.sampled_from([np.int64, np.int16, np.float64, np.uint8]))
    xs = [(np.arange(np.prod(extents)) * 3 + 5 * rank).reshape(extents).astype(dtype) % 7 for rank in range(mesh.size)]
    calls = []
    for _ in range(draw(st.integers(1, 6))):
        axes = draw(st.sampled_from([None, *mesh.axes, mesh.axes, mesh.axes[::-1]]))
        g = len(groups_along(dict(mesh.shape), axes)[0][0])
        method = draw(st.sampled_from(["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "shift",
                                       "permute"]))
        options = {"axes": axes}
        if method in ("reduce_scatter", "all_gather"):
            options["dim"] = draw(st.integers(-ndim, ndim - 1))
        if method == "all_to_all":
            options["split_dim"] = draw(st.integers(-ndim, ndim - 1))
            options["concat_dim"] = draw(st.integers(0, ndim - 1))
        if method in ("all_reduce", "reduce_scatter"):
            options["op"] = draw(st.sampled_from(["sum", "max", "min"]))
        if method == "broadcast":
            options["root"] = draw(st.integers(0, g - 1))
        if method == "shift":
            options["by"] = draw(st.integers(-g, g))
        if method == "permute":
            sources, targets = draw(st.permutations(range(g))), draw(st.permutations(range(g)))
            options["pairs"] = list(zip(sources, targets, strict=True))[: draw(st.integers(0, g))]
        name = draw(st.sampled_from([None, *algorithms("permute" if method == "shift" else method, g)]))
        calls.append((method, options, name, draw(st.booleans())))
    return mesh, runtime, xs, calls


def on_global_arrays(mesh, xs, calls):
    """What every rank has after each call, up to one whose shapes do not agree, or grow too large."""
    history = []
    for method, options, name, later in calls:
        options = dict(options)
        groups, factors = groups_along(dict(mesh.shape), options.pop("axes"))
        after = list(xs)
        for group in groups:
            mine = [xs[rank] for rank in group]
            if not _agrees(method, [x.shape for x in mine], options):
                return history
            for rank, x in zip(group, results(method, mine, factors, **options), strict=True):
                after[rank] = x
        if max(x.size for x in after) > 20_000:
            return history
        xs = after
        history.append(((method, options, name, later), xs))
    return history


def _agrees(method, shapes, options):
    free = None
    if method == "all_gather":
        free = options["dim"] % len(shapes[0])
    if method == "all_to_all":
        free = options["concat_dim"]
    if method in ("broadcast", "shift", "permute"):
        return True
    return len({tuple(n for i, n in enumerate(shape) if i != free) for shape in shapes}) == 1


def play(device, x, calls):
    found = []
    for method, options, name, later in calls:
        before = x.copy()
        result = getattr(device, method)(x, **options, algorithm=name, async_op=later)
        if later:
            result = result.wait()
        assert (x == before).all()
        x = result
        found.append(x)
    return found


@given(program=programs())
@shared
def test_random_programs_do_what_numpy_does_on_the_global_arrays(cluster_of, program):
    mesh, (backend, transport), xs, calls = program
    history = on_global_arrays(mesh, xs, calls)
    run = cluster_of(mesh, backend, transport).run(play, PerDevice(xs), calls[: len(history)])
    for i, (call, expected) in enumerate(history):
        for rank in range(mesh.size):
            assert_same(run[rank][i], expected[rank], f"rank {rank} after {call}")


def laws(device, x, axes, by, dim):
    reduced = device.all_reduce(x, axes)
    scattered = device.reduce_scatter(x, axes, dim=dim)
    there = device.shift(x, axes, by=by)
    once = device.all_to_all(x, axes, split_dim=dim, concat_dim=dim)
    g = len(device.group(axes))
    factors = [device.mesh.shape[axis] for axis in device.mesh.axes_of(axes)]
    mine = len(pieces(np.arange(x.shape[dim]), factors, 0)[device.position(axes)])
    return [
        (reduced, device.all_gather(scattered, axes, dim=dim)),
        (device.shift(there, axes, by=-by), x),
        (device.all_to_all(once, axes, split_dim=dim, concat_dim=dim, split_sizes=[mine] * g), x),
        (device.all_gather(device.scatter(x, axes, root=0, dim=dim), axes, dim=dim), device.broadcast(x, axes)),
        (device.broadcast(device.reduce(x, axes, root=g - 1), axes, root=g - 1), reduced),
        (np.concatenate(device.all_scatter(x, axes), dim), device.all_gather(x, axes, dim=dim)),
        (device.reduce_scatter(np.stack([x] * g), axes, dim=0)[0], reduced),
    ]


@given(clusters, st.lists(st.integers(0, 5), min_size=1, max_size=3), st.integers(-3, 3), st.data())
@shared
def test_laws(cluster_of, where, shape, by, data):
    mesh, (backend, transport) = where
    axes = data.draw(st.sampled_from([None, *mesh.axes]))
    dim = data.draw(st.integers(0, len(shape) - 1))
    if data.draw(st.booleans()):
        shape[dim] = 2100
    rng = np.random.default_rng(len(shape))
    xs = [rng.integers(-9, 9, shape).astype(float) for _ in range(mesh.size)]
    for rank, pairs in enumerate(cluster_of(mesh, backend, transport).run(laws, PerDevice(xs), axes, by, dim)):
        for i, (one, other) in enumerate(pairs):
            assert_same(one, other, f"law {i} on rank {rank}")
