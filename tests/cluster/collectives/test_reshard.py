"""`device.reshard`, `Sharded` and `run.unshard` on real devices, beside NumPy on the whole array."""

import os
import random

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from parallelism.resharding import run_plan
from vcluster import (
    CollectiveMismatchError,
    DeviceFailedError,
    Mesh,
    PerDevice,
    Sharded,
    TensorSharding,
    UnusedResultWarning,
    VirtualCluster,
    assert_communication,
    plan_resharding,
)

T = TensorSharding
MANY = int(os.environ.get("VCLUSTER_RESHARDINGS", "2000"))
"""Random pairs of layouts in the slow test."""

RUNTIMES = [("thread", "shared_memory"), ("process", "shared_memory"), ("thread", "queue")]
MESH = Mesh(x=2, y=3)
SHAPE = (7, 11)
PAIRS = [
    (T("x", None), T("x", None)), (T("x", None), T(None, "x")), (T("x", "y"), T("y", "x")),
    (T("x", None), T("y", None)), (T("x", "y"), T(None, None)), (T(("x", "y"), None), T(("y", "x"), None)),
    (T("x", ..., partial="y"), T(None, None)), (T(None, None, partial=("x", "y")), T("x", "y")),
    (T(None, None, partial="x"), T("x", ...)), (T("y", None), T(None, None, partial="x")),
    (T(..., partial="x", op="max"), T(..., partial="y", op="prod")),
]


def through(device, shards, ways, shape):
    return [device.reshard(shard, *way, shape=shape) for shard, way in zip(shards, ways, strict=True)]


def shards_of(x, ways, mesh):
    """For each rank the shards of ``x`` under the source of every way."""
    return PerDevice(zip(*(source.shard(x, mesh) for source, _ in ways), strict=True))


def events(run, rank):
    return [*run.trace.filter(rank=rank, name="reshard")]


@pytest.mark.sampled(2)
@pytest.mark.slow_for("queue", "None")
@pytest.mark.parametrize(("backend", "transport"), RUNTIMES)
@pytest.mark.parametrize("shape", [SHAPE, None])
def test_every_shard_is_that_of_the_target_and_the_bytes_are_those_planned(cluster_of, backend, transport, shape):
    x = np.arange(77.0).reshape(SHAPE) + 1
    run = cluster_of(MESH, backend, transport).run(through, shards_of(x, PAIRS, MESH), PAIRS, shape)
    lanes = [events(run, rank) for rank in range(MESH.size)]
    plans = [plan_resharding(source, target, SHAPE, x.dtype, MESH) for source, target in PAIRS]
    for i, ((source, target), plan) in enumerate(zip(PAIRS, plans, strict=True)):
        for rank, expected in enumerate(target.shard(x, MESH)):
            assert_array_equal(run[rank][i], expected, err_msg=f"{source} -> {target} on rank {rank}")
            event = lanes[rank][i]
            assert event.bytes_received == plan.bytes_received[rank]
            assert event.axes == plan.axes
            assert event.group == MESH.group(rank, plan.axes)
    assert run.trace.bytes_received() == sum(sum(plan.bytes_received) for plan in plans)
    assert run.trace.bytes_sent() == run.trace.communication_matrix().sum() == run.trace.bytes_received()


def once(device, x, source, target):
    before = x.copy()
    result = device.reshard(x, source, target)
    same = np.may_share_memory(result, x)
    result[...] = -1
    return bool((x == before).all()), bool(same)


@pytest.mark.parametrize("target", [T("x", None), T("x", "y"), T(None, "x")])
def test_the_result_is_a_new_array_and_the_argument_as_it_was(cluster_of, target):
    x = np.arange(77.0).reshape(SHAPE)
    run = cluster_of(MESH, "thread").run(once, Sharded(x, T("x", None)), T("x", None), target)
    assert run.outputs == [(True, False)] * 6


def test_it_is_one_operation_and_what_is_inside_is_in_no_total(cluster_of):
    x = np.arange(77, dtype=np.int32).reshape(SHAPE)
    source, target = T("x", None), T("y", None)
    run = cluster_of(MESH, "thread").run(lambda device, x: device.reshard(x, source, target), Sharded(x, source))
    plan = plan_resharding(source, target, SHAPE, np.int32, MESH)
    assert [step.kind for step in plan.steps] == ["slice", "permute", "all_gather"]
    assert_communication(run.trace, reshard=1, bytes_received=plan.bytes_received, others=0)
    inside = [event for event in run.trace if event.rank == 4 and event.parent is not None]
    assert [event.name for event in inside] == ["shapes", "permute", "all_gather"]
    assert {event.parent for event in inside} == {events(run, 4)[0].serial}
    assert sum(event.bytes_received for event in inside[1:]) == plan.bytes_received[4]


def test_what_is_already_there_moves_nothing(cluster_of):
    x = np.arange(77.0).reshape(SHAPE)
    run = cluster_of(MESH, "thread").run(
        lambda device, shard: device.reshard(shard, T("x", "y"), T("x", "y"), shape=SHAPE), Sharded(x, T("x", "y"))
    )
    assert_array_equal(run.unshard(T("x", "y")), x)
    assert_communication(run.trace, bytes_received=0, messages=0)
    assert [event for event in run.trace if event.parent is not None] == []


def around(device, x):
    first = device.all_gather(x, "y", dim=1)
    second = device.reshard(first, T("x", None), T(None, "x"))
    third = device.reshard(second, T(None, "x"), T(None, None, partial="x"))
    again = device.reshard(third, T(None, None, partial="x"), T("x", "y"))
    return device.all_reduce(again, "y")


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize(("backend", "transport"), RUNTIMES)
def test_it_stands_among_other_collectives(cluster_of, backend, transport):
    x = np.arange(6 * 9.0).reshape(6, 9)
    run = cluster_of(MESH, backend, transport).run(around, Sharded(x, T("x", "y")))
    expected = x[:, :3] + x[:, 3:6] + x[:, 6:]
    assert_array_equal(run[0], expected[:3])
    assert_array_equal(run[5], expected[3:])
    assert_communication(run.trace, all_gather=2, all_reduce=2, reshard=9)
    times = [event.start_seconds for event in run.trace.filter(rank=3) if event.parent is None]
    assert times == sorted(times)


def test_scalars_bools_and_integers_that_wrap(cluster_of):
    def kernel(device):
        total = device.reshard(np.float64(device.rank), T(partial="x"), T())
        held = np.array([device.rank == 0, False, True])
        anyone = device.reshard(held, T(None, partial=("x", "y")), T(None))
        small = device.reshard(np.full(6, 100, np.int8), T(None, partial="x"), T("x"))
        return total, anyone, small

    for rank, (total, anyone, small) in enumerate(cluster_of(MESH, "thread").run(kernel)):
        assert total == 2 * (rank % 3) + 3
        assert isinstance(total, np.float64)
        assert anyone.tolist() == [True, False, True]
        assert anyone.dtype == bool
        assert small.tolist() == [-56] * 3


def test_sharded_arguments_reach_each_device_as_its_shard(cluster_of):
    x = np.arange(14.0).reshape(7, 2)

    def kernel(device, whole, mine, *, named):
        named += 1      # its own: the caller's array is never touched
        return whole.shape, mine, named

    run = cluster_of(MESH).run(kernel, x, Sharded(x, T("y", None)), named=Sharded(x, T(None, "x")))
    assert [shape for shape, _, _ in run] == [(7, 2)] * 6
    assert_array_equal(T("y", None).unshard([mine for _, mine, _ in run], MESH), x)
    assert_array_equal(T(None, "x").unshard([named for *_, named in run], MESH), x + 1)
    assert x[0, 0] == 0
    partial = cluster_of(MESH).run(lambda device, term: device.all_reduce(term, "x"), Sharded(x, T(..., partial="x")))
    assert_array_equal(partial[5], x)
    assert_array_equal(run.mesh.size * x, cluster_of(MESH).run(lambda device: x).unshard(T(..., partial=("x", "y"))))


@pytest.mark.parametrize(("make", "words"), [
    (lambda run: run(lambda device, x: x, Sharded(np.ones(4), T("z"))), "argument 1: .* names axis 'z'"),
    (lambda run: run(lambda device, x: x, x=Sharded(np.ones(4), T("x", None))),
     "argument 'x': .* has 2 dims, the tensor has 1"),
    (lambda run: run(lambda device: np.ones(device.rank)).unshard(T("x")), "not the shards of one tensor"),
])
def test_shards_that_do_not_fit_are_refused_by_the_host(cluster_of, make, words):
    with pytest.raises(ValueError, match=words):
        make(cluster_of(MESH, "thread").run)
    with pytest.raises(TypeError, match=r"Sharded takes an array and its TensorSharding, or the text of one.* got \(0, 1\)"):
        Sharded(np.ones(4), (0, 1))


def test_layouts_may_be_given_as_texts(cluster_of):
    x, whole = np.arange(15.0).reshape(5, 3), []

    def kernel(device, shard):
        whole.append(device.global_shape(shard, "[x, None]"))
        return device.reshard(shard, "[x, None]", "[None, x]")

    cluster = cluster_of(MESH, "thread")
    run = cluster.run(kernel, Sharded(x, "[x, None]"))
    np.testing.assert_array_equal(run.unshard("[None, x]"), x)
    with pytest.raises(ValueError, match=r"argument 1: '\[z, None\]': .* names axis 'z'"):
        cluster.run(kernel, Sharded(x, "[z, None]"))
    for text in ("x", "x, None, y, z"):                                 # [x] is meant, and it would be a dim that is whole
        with pytest.raises(ValueError):
            cluster.run(lambda device: np.ones(3)).unshard(text)


@pytest.mark.parametrize(("kernel", "words"), [
    (lambda device: device.reshard(np.ones((4, 2)), T("x", None), T(None, "x"), shape=(7, 2)),
     r"rank 3 must pass its shard float64\[3, 2\] of float64\[7, 2\] as TensorSharding\('x', None\), got float64\[4, 2\]"),
    (lambda device: device.reshard(np.ones(3), T("x", None), T(None)), "has 2 dims, the tensor has 1"),
    (lambda device: device.reshard(np.ones(3), T("q"), T(None)), "names axis 'q', but the axes of Mesh"),
    (lambda device: device.reshard(np.ones(3 - (device.rank == 1)), T("y"), T(None)),
     r"in layout TensorSharding\('y'\) on Mesh.*: for shape \(8,\) rank 1 must hold \(3,\), got \(2,\)"),
    (lambda device: device.reshard(np.ones(3), T(None, partial="x", op="min"), T(None, "x")), "the target of a resh"),
])
def test_what_does_not_fit_is_a_value_error_on_the_devices(cluster_of, kernel, words):
    with pytest.raises(DeviceFailedError, match=words) as caught:
        cluster_of(MESH, "thread").run(kernel)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize(("backend", "transport"), RUNTIMES)
def test_agreeing_on_a_shape_is_in_no_record_while_a_message_is_under_way_too(backend, transport):
    def kernel(device):
        other = 1 - device.rank
        coming = device.irecv(other)
        shape = device.global_shape(np.ones((3 - device.rank, 3)), T("x", None))
        device.send(np.ones(4), other)
        return shape, coming.wait().tolist()

    with VirtualCluster(Mesh(x=2), backend=backend, transport=transport) as cluster:
        run = cluster.run(kernel)
    assert run.outputs == [((5, 3), [1.0] * 4)] * 2
    recorded = run.trace.filter(kind={"collective", "send", "recv"})
    assert sorted(event.kind for event in recorded) == ["recv"] * 2 + ["send"] * 2
    assert run.trace.bytes_received() == 2 * 4 * 8


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_shapes_are_agreed_on_at_once_of_tensors_of_any_dims_and_layouts(cluster_of, backend):
    layouts = [T("x", None), T(None, ("x", "y"), ...), T(None), T("y"), T(partial="x")]
    shapes = [(5, 3), (2, 5, 0, 4), (6,), (1,), ()]

    def kernel(device):
        shards = [np.zeros(layout.local_shape(shape, device.mesh, device.rank))
                  for layout, shape in zip(layouts, shapes, strict=True)]
        several = [device.global_shapes(shards, layouts) for _ in range(3)]
        several.append([device.global_shape(x, layout) for x, layout in zip(shards, layouts, strict=True)])
        shards[0] = np.zeros((2 + device.rank % 2, 3))      # of no tensor
        with pytest.raises(ValueError, match="these are not the shards of one tensor") as caught:
            device.global_shapes(shards, [T("y", None), *layouts[1:]])
        return several, str(caught.value), device.global_shapes(shards[2:3], layouts[2:3])

    cluster = cluster_of(Mesh(x=2, y=2), backend)
    run = cluster.run(kernel)
    for several, _, alone in run:
        assert several == [shapes] * 4
        assert alone == [(6,)]
    assert "for shape (5, 3) rank 0 must hold (3, 3), got (2, 3)" in run[0][1]
    assert not run.trace.filter(kind="collective")


def test_what_is_spent_is_reduced_in_place_whatever_the_order_of_its_dims():
    mesh, shape = Mesh(x=2), (4, 2, 3)
    plan = plan_resharding(T(None, None, None, partial="x"), T(None, None, None), shape, np.dtype(float), mesh)

    def kernel(device):
        terms = np.arange(24.0).reshape(shape) * (1 + device.rank)
        found = []
        for order in ([0, 1, 2], [2, 0, 1]):
            x = terms.transpose(order).copy().transpose(np.argsort(order))
            y = run_plan(device, plan, x, spent=True)
            found.append((y.copy(), np.shares_memory(x, y)))
        x = np.repeat(terms, 2, axis=2)[..., ::2]           # with gaps: a new array
        y = run_plan(device, plan, x, spent=True)
        return [*found, (y, np.shares_memory(x, y))]

    with VirtualCluster(mesh, backend="thread") as cluster:
        for found in cluster.run(kernel):
            for y, _ in found:
                assert_array_equal(y, 3 * np.arange(24.0).reshape(shape))
            assert [shared for _, shared in found] == [True, True, False]


def test_what_was_computed_before_agreeing_on_a_shape_stays_in_the_record():
    def kernel(device):
        with device.compute("sum", flops=7):
            np.arange(1e6).sum()
            device.global_shape(np.ones(2), T("x"))

    with VirtualCluster(Mesh(x=2), backend="thread") as cluster:
        assert cluster.run(kernel).trace.flops() == 2 * 7


def test_stages_reshard_their_own_tensors(cluster_of):
    def kernel(device):
        if device.index["pp"] == 1:
            return None     # has something else to do
        x = T("x").shard(np.arange(8.0), device.mesh)[device.rank]
        return device.reshard(x, T("x"), T("y"), axes=("x", "y"))

    run = cluster_of(Mesh(pp=2, x=2, y=3), "thread").run(kernel)
    for rank in range(6):
        assert_array_equal(run[rank], T("y").shard(np.arange(8.0), run.mesh)[rank])


def test_devices_that_mean_different_targets_are_told(cluster_of):
    with pytest.raises(CollectiveMismatchError, match="differ in"):
        cluster_of(Mesh(x=2), "thread").run(
            lambda device: device.reshard(np.ones((2, 2)), T("x", None), T(*[(None, "x"), (None, None)][device.rank]))
        )


def test_who_throws_the_result_away_is_warned():
    def kernel(device):
        device.reshard(np.ones((2, 3)), T("x", None), T(None, "x"))

    with (
        VirtualCluster(Mesh(x=2), backend="thread") as cluster,
        pytest.warns(UnusedResultWarning, match="the result of reshard is not used"),
    ):
        cluster.run(kernel)


# -- at random ---------------------------------------------------------------------------------------------------------

MESHES = [
    Mesh(x=1), Mesh(x=5), Mesh(x=16), Mesh(x=2, y=2), Mesh(x=4, y=3), Mesh(x=3, y=5), Mesh(x=2, y=1, z=3),
    Mesh(x=2, y=2, z=3), Mesh(x=2, y=4, z=2), Mesh(x=2, y=2, z=2, w=2),
]


def random_layout(rng, mesh, ndim):
    dims = [[] for _ in range(ndim)]
    partial = []
    for axis in rng.sample(mesh.axes, len(mesh.axes)):
        place = rng.randint(-2, ndim - 1)
        if place >= 0:
            dims[place].append(axis)
        elif place == -2 and rng.random() < 0.4:
            partial.append(axis)
    return T(*map(tuple, dims), partial=partial, op=rng.choice(("sum", "sum", "max", "prod", "min")))


def random_ways(rng, mesh, count):
    """Tensors with their layouts: (x, source, target)."""
    for _ in range(count):
        shape = [rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 17)) for _ in range(rng.randint(0, 3))]
        values = np.random.default_rng(rng.randint(0, 99)).integers(-9, 9, shape)
        x = values.astype(rng.choice(("f8", "i4", "f2", "i8")))
        yield x, random_layout(rng, mesh, len(shape)), random_layout(rng, mesh, len(shape))


def there_and_back(device, shards, ways, told):
    """Each shard to its target and back again; ``told`` are the shapes, where they are not to be agreed on."""
    found = []
    for shard, (source, target), shape in zip(shards, ways, told, strict=True):
        there = device.reshard(shard, source, target, shape=shape)
        found.append((there, device.reshard(there, target, source, shape=shape)))
    return found


def check_random(cluster, rng, count):
    mesh = cluster.mesh
    drawn = list(random_ways(rng, mesh, count))
    ways = [(source, target) for _, source, target in drawn]
    shards = PerDevice(zip(*(source.shard(x, mesh) for x, source, _ in drawn), strict=True))
    run = cluster.run(there_and_back, shards, ways, [rng.choice((None, x.shape)) for x, _, _ in drawn])
    received = [[event.bytes_received for event in events(run, rank)] for rank in range(mesh.size)]
    for i, (x, source, target) in enumerate(drawn):
        plans = [plan_resharding(*way, x.shape, x.dtype, mesh) for way in ((source, target), (target, source))]
        for rank, (there, back) in enumerate(zip(target.shard(x, mesh), source.shard(x, mesh), strict=True)):
            where = f"{source} -> {target} of {x.dtype}{x.shape} on rank {rank} of {mesh}"
            assert_array_equal(run[rank][i][0], there, err_msg=where)
            assert_array_equal(run[rank][i][1], back, err_msg=f"back again: {where}")
            assert received[rank][2 * i : 2 * i + 2] == [plan.bytes_received[rank] for plan in plans], where


@pytest.mark.slow_for("z=3")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("mesh", MESHES[3:5] + MESHES[6:8], ids=str)
def test_random_layouts(cluster_of, mesh):
    check_random(cluster_of(mesh, "thread"), random.Random(str(mesh)), 15)


@pytest.mark.slow
def test_random_layouts_on_processes(cluster_of):
    check_random(cluster_of(MESH), random.Random(1), 15)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("backend", "share"), [("thread", 1), ("process", 8)])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_very_many_random_layouts(cluster_of, mesh, backend, share):
    rng = random.Random(f"{mesh} {backend}")
    left = -(-MANY // len(MESHES) // share)
    while left > 0:
        check_random(cluster_of(mesh, backend), rng, min(50, left))
        left -= 50
