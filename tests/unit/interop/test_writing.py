"""Programs written as StableHLO and ONNX, and read again."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

jax = pytest.importorskip("jax")
onnx = pytest.importorskip("onnx")

from ir_examples import EXAMPLES  # noqa: E402
from numpy.testing import assert_allclose  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from parallelism import Mesh, Pipeline, PipelinedProgram, ir, models  # noqa: E402
from parallelism.execution import Executable  # noqa: E402
from parallelism.interop import (  # noqa: E402
    Partitioned,
    UnsupportedError,
    from_onnx,
    from_stablehlo,
    mesh_of,
    to_onnx,
    to_stablehlo,
)
from parallelism.interop.written.stablehlo_modules import CALLS, called  # noqa: E402
from parallelism.layouts import annotate, partition  # noqa: E402
from parallelism.transforms import Strategy, TensorParallel  # noqa: E402
from vcluster.__main__ import main  # noqa: E402
from vcluster.cli.command_line import WrongWords  # noqa: E402

WRITTEN = [example for example in EXAMPLES
           if example.kind in CALLS and "group" not in example.attributes and not example.attributes.get("rate")]


def network():
    def loss(p, x, y):
        hidden = np.maximum(x @ p["up"] + p["b"], 0)
        scores = hidden @ p["down"]
        shifted = scores - scores.max(axis=-1, keepdims=True)
        return np.mean((np.exp(shifted) / np.exp(shifted).sum(axis=-1, keepdims=True) - y) ** 2)

    types = {"up": ir.TensorType("f32", (4, 6)), "b": ir.TensorType("f32", (6,)), "down": ir.TensorType("f32", (6, 3))}
    return ir.record(loss, types, ir.TensorType("f32", (2, 4)), ir.TensorType("f32", (2, 3)))


def arrays(function, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=value.type.shape).astype(np.float32) for value in function.inputs]


@pytest.mark.sampled(450)
@pytest.mark.parametrize("example", WRITTEN, ids=str)
def test_an_operator_is_computed_by_xla_as_here_and_comes_back(example):
    function, given = example.function(), example.arrays()
    text = to_stablehlo(function)
    expected = ir.interpret(function, given).outputs
    with jax.enable_x64(True):
        by_xla = jax.jit(lambda *x: called(jax, function.ops[0], list(x)))(*given)
    again = ir.interpret(from_stablehlo(text), given).outputs
    for ours, theirs, back in zip(expected, by_xla, again, strict=True):
        assert ours.dtype == theirs.dtype == back.dtype
        assert_allclose(np.asarray(theirs), ours, rtol=1e-10, atol=1e-12)
        assert_allclose(back, ours, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mesh", [None, Mesh(tp=2)])
def test_inputs_keep_their_names(mesh):
    function = network()
    laid = function if mesh is None else Strategy(TensorParallel("tp"))(function)
    again = from_stablehlo(to_stablehlo(laid, mesh))
    assert [value.name for value in again.inputs] == [value.name for value in function.inputs]


@pytest.mark.slow
def test_a_module_of_jax_has_the_names_that_it_was_written_with():
    low = jax.jit(lambda p, x: x @ p["w"] + p["b"][0]).lower(
        {"w": np.ones((3, 4)), "b": [np.ones(4)]}, np.ones((2, 3)))
    assert [value.name for value in from_stablehlo(low.as_text(debug_info=True)).inputs] == ["p.b.0", "p.w", "x"]
    assert [value.name for value in from_stablehlo(low.as_text()).inputs] == ["arg0", "arg1", "arg2"]


def test_a_step_goes_out_and_in_again():
    function = ir.gradient(network(), keep_outputs=True)
    again = from_stablehlo(to_stablehlo(function))
    given = arrays(function)
    for a, b in zip(ir.interpret(function, given).outputs, ir.interpret(again, given).outputs, strict=True):
        assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_layouts_and_collectives_are_written():
    laid = Strategy(TensorParallel("tp"))(network())
    mesh = Mesh(tp=2)
    text = to_stablehlo(laid, mesh)
    assert mesh_of(text) == mesh
    assert "sdy.sharding_constraint" in text
    program = from_stablehlo(to_stablehlo(Executable(laid, mesh)))
    assert isinstance(program, Partitioned)
    kinds = [op.kind for op in program.program(0).ops]
    assert "all_reduce" in kinds


def test_onnx_gives_the_same_numbers():
    function = network()
    given = arrays(function)
    model = to_onnx(function, {"p.up": given[0]} if function.inputs[0].name == "p.up" else None)
    names = {value.name for value in model.graph.input}
    feed = {value.name: x for value, x in zip(function.inputs, given, strict=True)}
    expected = ir.interpret(function, given).outputs[0]
    found, = ReferenceEvaluator(model).run(None, {name: x for name, x in feed.items() if name in names})
    assert_allclose(found, expected, rtol=1e-5)
    program, weights = from_onnx(model)
    inputs = {value.name: feed[value.name] for value in program.inputs if value.name in feed} | weights
    assert_allclose(ir.interpret(program, inputs).outputs[0], expected, rtol=1e-5)


def test_what_has_no_counterpart_is_refused_by_name():
    x = ir.TensorType("f32", (3,))
    function = ir.record(lambda x: ir.apply("all_reduce", x, axes=["tp"], group=2, op="sum"), x)
    with pytest.raises(UnsupportedError, match="all_reduce: this operator has no counterpart in ONNX"):
        to_onnx(function)
    with pytest.raises(UnsupportedError, match="give values to B with specialize"):
        to_stablehlo(ir.record(lambda x: x + 1, ir.TensorType("f32", (ir.symbol("B"),))))


def test_a_pipeline_has_no_module_but_each_function_of_a_stage_has_one():
    def loss(x, w):
        with ir.region("up"):
            hidden = np.maximum(x @ w["up"], 0)
        with ir.region("down"):
            return np.mean((hidden @ w["down"]) ** 2)

    x = np.random.default_rng(0).standard_normal((2, 3), np.float32)
    w = {"up": np.full((3, 5), 0.5, np.float32), "down": np.full((5, 4), 2, np.float32)}
    types = {name: ir.TensorType("f32", array.shape) for name, array in w.items()}
    program = ir.record(loss, ir.TensorType("f32", (ir.symbol("B"), 3)), types)
    stages = partition(program, ["down"])
    pipelined = PipelinedProgram(stages, Pipeline(2, 1, "1f1b"))
    with pytest.raises(UnsupportedError, match="got PipelinedProgram; of a pipeline, stages_to_stablehlo writes"):
        to_stablehlo(pipelined)
    with pytest.raises(UnsupportedError, match="a Function can be written as ONNX, got PipelinedProgram"):
        to_onnx(pipelined)
    value = {"x": x, "w.up": w["up"], "w.down": w["down"]}
    for stage in stages.specialize(B=2, B_whole=2, B_first=0).functions:
        module = from_stablehlo(to_stablehlo(stage.forward))
        made = ir.interpret(module, [value[each.name] for each in stage.forward.inputs]).outputs
        value.update((each.name, array) for each, array in zip(stage.forward.outputs, made, strict=True))
    expected, = ir.interpret(program, [x, w["up"], w["down"]]).outputs
    assert_allclose(made[0], expected, rtol=1e-5)


@pytest.mark.takes_seconds
def test_commands_take_files_of_all_formats(tmp_path, capsys):
    ours = tmp_path / "a.mlir"
    ours.write_text(str(network()))
    for name in ("b.stablehlo", "c.onnx", "d.mlir"):
        source = ours if name[0] != "d" else tmp_path / "b.stablehlo"
        assert main(["convert", str(source), str(tmp_path / name)]) == 0
    for name in ("a.mlir", "b.stablehlo", "c.onnx", "d.mlir"):
        assert main(["show", str(tmp_path / name)]) == 0
        assert "ops," in capsys.readouterr().out


def test_nothing_of_it_is_imported_with_the_package():
    code = "import parallelism, vcluster, sys; print([m for m in ('jax', 'onnx') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.takes_seconds
def test_a_program_with_a_symbol_is_converted_with_its_size(tmp_path):
    source, target = tmp_path / "doubled.mlir", tmp_path / "doubled.stablehlo"
    source.write_text(str(ir.record(lambda x: x + x, ir.TensorType("f32", (ir.symbol("B"), 3)))))
    with pytest.raises(WrongWords, match="--size must give a value for B, as B=64"):
        main(["convert", str(source), str(target)])
    assert main(["convert", str(source), str(target), "--size", "B=4"]) == 0
    assert [value.type for value in from_stablehlo(target).inputs] == [ir.TensorType("f32", (4, 3))]


def test_layouts_of_inputs_come_back():
    laid = annotate(models.mlp((4, 8, 2), batch=4), {"x": "[dp, None]", "p.w0": "[None, tp]"})
    back = from_stablehlo(to_stablehlo(laid, Mesh(dp=2, tp=2)))
    assert [(value.name, value.layout) for value in back.inputs] == [(value.name, value.layout) for value in laid.inputs]
    assert len([value for value in back.inputs if value.layout is not None]) == 2
    assert not [op for op in back.ops if op.kind == "reshard"]
