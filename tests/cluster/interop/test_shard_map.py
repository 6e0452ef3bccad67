"""Programs with ``shard_map`` run as they are on 8 processes, and give what JAX gives on 8 of its host devices."""

from __future__ import annotations

import re

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import shard_map_examples  # noqa: E402
from numpy.testing import assert_allclose, assert_array_equal  # noqa: E402

from parallelism import Mesh, simulate  # noqa: E402
from parallelism.execution import Executable  # noqa: E402
from parallelism.interop import Partitioned, from_jax, from_stablehlo, mesh_of  # noqa: E402
from parallelism.ir import Function  # noqa: E402
from vcluster import VirtualCluster  # noqa: E402

MESH = Mesh(**shard_map_examples.AXES)
EXAMPLES = shard_map_examples.examples(shard_map_examples.abstract_mesh())


@pytest.fixture(scope="module")
def by_jax(request):
    """What JAX makes of the examples that are asked for, in the ways in which they are asked for."""
    ways = {test_what_jax_runs_on_8_devices_runs_on_8_processes.__name__: "",
            test_a_module_in_the_words_of_gspmd_is_the_same_program.__name__: "gspmd:",
            test_a_module_that_xla_has_split_and_compiled_runs_as_it_is.__name__: "compiled:"}
    tests = {(item.callspec.params["name"], item.originalname) for item in request.session.items
             if item.path == request.path and "by_jax" in item.fixturenames}
    asked = {ways[test] + name for name, test in tests}
    return shard_map_examples.made_by_jax(asked)


@pytest.fixture(scope="module")
def cluster():
    with VirtualCluster(MESH) as cluster:
        yield cluster


@pytest.mark.sampled(28, 26)     # the same in both, which JAX runs once
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", EXAMPLES)
def test_what_jax_runs_on_8_devices_runs_on_8_processes(name, by_jax, cluster):
    text = str(by_jax[f"{name}/text"])
    arguments = EXAMPLES[name][1]
    program = from_stablehlo(text)
    assert mesh_of(text) == MESH
    operation = Executable(program, MESH) if isinstance(program, Function) else program
    run = cluster.run(operation, [*arguments])
    for i, ours in enumerate(run.result):
        theirs = by_jax[f"{name}/{i}"]
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        if theirs.dtype.kind == "f":
            assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
        else:
            assert_array_equal(ours, theirs)
    if isinstance(program, Partitioned) and "while" not in text:
        check_collectives(text, run.trace, name)
        simulated = simulate(program, "dgx-a100")
        assert [e.name for e in simulated.filter(kind="collective", rank=0)] == [
            e.name for e in run.trace.filter(kind="collective", rank=0)]


@pytest.mark.sampled(8, 7)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", shard_map_examples.OTHERS)
def test_a_module_in_the_words_of_gspmd_is_the_same_program(name, by_jax, cluster):
    text = str(by_jax[f"{name}/gspmd"])
    assert "sdy." not in text
    program = from_stablehlo(text, mesh=MESH)
    run = cluster.run(Executable(program, MESH) if isinstance(program, Function) else program, [*EXAMPLES[name][1]])
    for i, ours in enumerate(run.result):
        assert_allclose(ours, by_jax[f"{name}/{i}"], rtol=1e-5, atol=1e-5)


@pytest.mark.slow      # by day a split module runs on devices in cli/test_programs_elsewhere.py
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", shard_map_examples.OTHERS)
def test_a_module_that_xla_has_split_and_compiled_runs_as_it_is(name, by_jax, cluster):
    parts = {key.removeprefix(f"{name}/compiled/"): x for key, x in by_jax.items() if f"{name}/compiled" in key}
    program = from_stablehlo(parts["module"].tobytes(), mesh=MESH)
    assert isinstance(program, Partitioned)
    assert not program.takes_whole
    run = cluster.run(program, [[parts[f"given/{i}/{rank}"] for i in range(len(EXAMPLES[name][1]))]
                                for rank in range(8)])
    for rank, results in enumerate(run.result):
        for i, ours in enumerate(results):
            assert_allclose(ours, parts[f"made/{i}/{rank}"], rtol=1e-5, atol=1e-5)


def check_collectives(text, trace, name):
    """The kinds and groups on rank 0 are those of the text, in its order, as far as they are in one function."""
    kinds = re.findall(r'"stablehlo\.(all_reduce|all_gather|reduce_scatter|all_to_all|collective_permute)"', text)
    groups = re.findall(r"(?:replica_groups|source_target_pairs) = dense<(\[\[.*?\]\]|\d+)>", text)
    done = [(e.name, e.group) for e in trace.filter(kind="collective", rank=0)]
    names = [kind.replace("collective_", "") for kind in kinds]
    if name in ("a product before and after", "two bodies", "a gradient through psum"):    # the rest is laid out here
        assert set(names) <= {kind for kind, _ in done}
        return
    assert [kind for kind, _ in done] == names
    for (kind, group), written in zip(done, groups, strict=True):
        if kind != "permute":
            assert list(group) in [list(each) for each in np.array(eval_list(written)).tolist()]


def eval_list(text):
    rows = re.findall(r"\[([\d, ]+)\]", text)
    return [[int(n) for n in row.split(",")] for row in rows]


def test_from_jax_needs_no_devices_and_keeps_names():
    function, arguments = EXAMPLES["a tensor-parallel layer"]
    program = from_jax(function, *arguments)
    assert isinstance(program, Partitioned)
    assert program.mesh == MESH
    assert [op.kind for op in program.program(5).ops if op.kind in ("einsum", "all_reduce")] == [
        "einsum", "einsum", "all_reduce"]
