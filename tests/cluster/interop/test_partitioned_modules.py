"""Modules that are programs of one device, with all four kinds of groups, run as they are."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax")

from numpy.testing import assert_array_equal

from parallelism import simulate
from parallelism.execution import Executable
from parallelism.interop import InteropError, UnsupportedError, from_stablehlo, mesh_of
from parallelism.sharding import TensorSharding
from vcluster import VirtualCluster

ADD = """({ ^bb0(%a: tensor<i64>, %b: tensor<i64>): %s = stablehlo.add %a, %b : tensor<i64>
      stablehlo.return %s : tensor<i64> })"""


def module(body, result="tensor<2xi64>", replicas=1, partitions=4, x="tensor<2xi64>"):
    counts = f"mhlo.num_replicas = {replicas} : i32, mhlo.num_partitions = {partitions} : i32"
    return f"""module @part attributes {{{counts}}} {{
  func.func public @main(%x: {x}) -> {result} {{
    {body}
    return %0 : {result}
  }}
}}"""


def collective(kind, attributes, result="tensor<2xi64>", region="", x="tensor<2xi64>"):
    return f'%0 = "stablehlo.{kind}"(%x) <{{{attributes}}}> {region} : ({x}) -> {result}'


def groups(rows):
    return f"replica_groups = dense<{rows}> : tensor<{len(rows)}x{len(rows[0])}xi64>"


CHANNEL = "channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>"


def results(text, xs):
    program = from_stablehlo(text)
    with VirtualCluster(program.mesh, backend="thread") as cluster:
        run = cluster.run(program, [[x] for x in xs])
        return program, [each[0] for each in run.result], run.trace


XS = [np.array([10 * rank + 1, 10 * rank + 2]) for rank in range(4)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("more", "rows", "expected"), [
    ("", [[0, 1]], [(0, 2), (1, 3)]),                                       # cross_replica, for each partition
    (f", {CHANNEL}", [[0, 1]], [(0, 2, 1, 3)]),                             # cross_replica_and_partition
    (f", {CHANNEL}", [[0], [1]], [(0, 1), (2, 3)]),
    (f", {CHANNEL}, use_global_device_ids", [[0, 3], [1, 2]], [(0, 3), (1, 2)]),     # flattened ids
    (f", {CHANNEL}, use_global_device_ids", [[0, 1], [2, 3]], [(0, 1), (2, 3)]),
])
def test_sums_over_groups_of_replicas_and_partitions(more, rows, expected):
    text = module(collective("all_reduce", groups(rows) + more, region=ADD), replicas=2, partitions=2)
    _, found, trace = results(text, XS)
    for group in expected:
        for rank in group:
            assert_array_equal(found[rank], sum(XS[member] for member in group))
    assert {tuple(sorted(event.group)) for event in trace.filter(kind="collective")} == {
        tuple(sorted(group)) for group in expected}


@pytest.mark.takes_seconds
def test_the_order_inside_a_group_is_that_of_the_text():
    rows = [[1, 0], [2, 3]]
    how = f"all_gather_dim = 0 : i64, {groups(rows)}, {CHANNEL}, use_global_device_ids"
    text = module(collective("all_gather", how, "tensor<4xi64>"), "tensor<4xi64>")
    program, found, _ = results(text, XS)
    for group in rows:
        for rank in group:
            assert_array_equal(found[rank], np.concatenate([XS[member] for member in group]))
    assert {event.group for event in simulate(program, "dgx-a100").filter(kind="collective")} == {(1, 0), (2, 3)}


@pytest.mark.takes_seconds
@pytest.mark.sampled(6)
@pytest.mark.parametrize("rows", [[[0, 3], [2, 1]], [[3, 1, 2, 0]]], ids=str)
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_broadcast"])
def test_collectives_of_ranks_that_lie_along_no_axes_are_simulated_as_they_run(kind, rows):
    size, shape, region = len(rows[0]), [8, 3], ""
    how = f"{groups(rows)}, {CHANNEL}"
    if kind == "collective_broadcast":
        rows = [rows[0][:2]]
        how = f"{groups(rows)}, {CHANNEL}"
    else:
        how += ", use_global_device_ids" if kind != "all_to_all" else ""
    if kind == "all_gather":
        how, shape = how + ", all_gather_dim = 0 : i64", [8 * size, 3]
    if kind == "reduce_scatter":
        how, shape = how + ", scatter_dimension = 0 : i64", [8 // size, 3]
    if kind in ("all_reduce", "reduce_scatter"):
        region = ADD
    if kind == "all_to_all":
        how += f", split_dimension = 0 : i64, concat_dimension = 1 : i64, split_count = {size} : i64"
        shape = [8 // size, 3 * size]
    result = f"tensor<{shape[0]}x{shape[1]}xi64>"
    x = "tensor<8x3xi64>"
    text = module(collective(kind, how, result, region, x), result, x=x)
    program, _, trace = results(text, [np.ones((8, 3), np.int64)] * 4)
    fields = ("rank", "name", "group", "bytes_sent", "bytes_received", "payload_bytes", "sources", "sequence")
    told = [sorted(tuple(getattr(event, field) for field in fields) for event in each.filter(kind="collective"))
            for each in (trace, simulate(program, "dgx-a100"))]
    assert told[0] == told[1]
    assert {group for _, _, group, *_ in told[0]} == {tuple(row) for row in rows}


def test_cross_partition_exchanges():
    shape = "tensor<4xi64>"
    xs = [np.arange(4) + 10 * rank for rank in range(4)]
    text = module(collective(
        "all_to_all", f"concat_dimension = 0 : i64, split_count = 2 : i64, split_dimension = 0 : i64, "
        f"{groups([[0, 1]])}, {CHANNEL}", shape, x=shape), shape, replicas=2, partitions=2, x=shape)
    _, found, _ = results(text, xs)
    for first in (0, 2):        # partitions 0 and 1 of each replica
        assert_array_equal(found[first], [*xs[first][:2], *xs[first + 1][:2]])
        assert_array_equal(found[first + 1], [*xs[first][2:], *xs[first + 1][2:]])


def test_permutes_give_zeros_where_nothing_comes():
    text = module(collective("collective_permute", "source_target_pairs = dense<[[0, 1], [1, 3]]> : tensor<2x2xi64>, "
                             + CHANNEL))
    _, found, _ = results(text, XS)
    for rank, expected in enumerate([0 * XS[0], XS[0], 0 * XS[0], XS[1]]):
        assert_array_equal(found[rank], expected)


def test_a_broadcast_comes_from_the_first_of_its_group():
    text = module(collective("collective_broadcast", f"{groups([[2, 1]])}, {CHANNEL}"))
    _, found, _ = results(text, XS)
    for rank, expected in enumerate([0 * XS[0], XS[2], XS[2], 0 * XS[0]]):
        assert_array_equal(found[rank], expected)


def test_scattered_sums_and_ids():
    text = module(collective("reduce_scatter", f"scatter_dimension = 0 : i64, {groups([[0, 1], [2, 3]])}, {CHANNEL}, "
                             "use_global_device_ids", "tensor<1xi64>", ADD), "tensor<1xi64>")
    _, found, _ = results(text, XS)
    assert [int(x[0]) for x in found] == [12, 14, 52, 54]
    body = """%p = stablehlo.partition_id : tensor<ui32>
    %r = stablehlo.replica_id : tensor<ui32>
    %ten = stablehlo.constant dense<10> : tensor<ui32>
    %t = stablehlo.multiply %r, %ten : tensor<ui32>
    %0 = stablehlo.add %p, %t : tensor<ui32>"""
    _, found, _ = results(module(body, "tensor<ui32>", 2, 3), [XS[0]] * 6)
    assert [int(x) for x in found] == [0, 1, 2, 10, 11, 12]


def test_a_reducer_of_any_kind():
    body = """({ ^bb0(%a: tensor<i64>, %b: tensor<i64>): %s = stablehlo.xor %a, %b : tensor<i64>
      stablehlo.return %s : tensor<i64> })"""
    how = groups([[0, 1, 2, 3]]) + f", {CHANNEL}, use_global_device_ids"
    _, found, _ = results(module(collective("all_reduce", how, region=body)), XS)
    assert_array_equal(found[2], XS[0] ^ XS[1] ^ XS[2] ^ XS[3])


GSPMD = """module attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%x: tensor<8x16xf32> {mhlo.sharding = "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"},
      %w: tensor<16x4xf32> {mhlo.sharding = "{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}"})
      -> (tensor<8x4xf32> {mhlo.sharding = "{devices=[2,4]<=[8]}"}) {
    %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
        : (tensor<8x16xf32>, tensor<16x4xf32>) -> tensor<8x4xf32>
    %1 = stablehlo.custom_call @Sharding(%0) {mhlo.sharding = "{devices=[2,4]<=[8]}"}
        : (tensor<8x4xf32>) -> tensor<8x4xf32>
    return %1 : tensor<8x4xf32>
  }
}"""


def test_lists_of_devices_become_axes_and_layouts():
    program, mesh = from_stablehlo(GSPMD), mesh_of(GSPMD)
    assert dict(mesh.shape) == {"axis0": 2, "axis1": 4}
    assert [value.layout for value in program.inputs] == [TensorSharding("axis0", None), TensorSharding(None, "axis1")]
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(8, 16)).astype(np.float32), rng.normal(size=(16, 4)).astype(np.float32)
    with VirtualCluster(mesh, backend="thread") as cluster:
        run = cluster.run(Executable(program, mesh), [x, w])
    np.testing.assert_allclose(run.result[0], x @ w, rtol=1e-5)
    assert not list(run.trace.filter(kind="collective"))       # every device has what its tile needs


def test_a_product_on_one_device_alone_is_that_of_whole_tensors():
    program = from_stablehlo(GSPMD.replace("{devices=[2,4]<=[8]}", "{maximal device=1}"))
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(8, 16)).astype(np.float32), rng.normal(size=(16, 4)).astype(np.float32)
    with VirtualCluster(mesh_of(GSPMD), backend="thread") as cluster:
        run = cluster.run(Executable(program, mesh_of(GSPMD)), [x, w])
    np.testing.assert_allclose(run.result[0], x @ w, rtol=1e-5)


@pytest.mark.parametrize(("text", "error", "message"), [
    (module(collective("all_reduce", groups([[0, 7]]) + f", {CHANNEL}, use_global_device_ids", region=ADD)),
     InteropError, "not seen in replica groups"),
    (GSPMD.replace("{devices=[2,4]<=[8]}", "{devices=[2,2]<=[4]}"), UnsupportedError, "is for 4 devices"),
])
def test_groups_and_tiles_that_do_not_fit_are_refused(text, error, message):
    with pytest.raises(error, match=message):
        from_stablehlo(text)
