"""Pipelines as StableHLO: a module for each class of equal stages, and what the manifest says of them."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest

pytest.importorskip("jax")

from numpy.testing import assert_allclose
from staged_modules import Staged

from parallelism import Mesh, ir, models
from parallelism.execution import operation_on
from parallelism.interop import InteropError, UnsupportedError, from_stablehlo, stages_to_stablehlo
from parallelism.interop.written.module_text import alone, together
from parallelism.transforms import SGD, Adam, Pipeline, Strategy, train_step
from vcluster.__main__ import main
from vcluster.cli.command_line import WrongWords

B = ir.symbol("B")


@cache
def four_stages():
    """A step of a perceptron in stages of a layer, of which two are equal; and its modules."""
    step = train_step(models.mlp((3, 4, 4, 4, 2), B), SGD(0.5))
    cut = Pipeline("pp", microbatches=2, begin=("layer.1", "layer.2", "layer.3"))
    return step, stages_to_stablehlo(operation_on(Strategy(cut)(step), Mesh(pp=4)), 6)


def test_equal_stages_have_one_module():
    _, modules = four_stages()
    assert [stage["module"] for stage in modules.manifest["stages"]] == ["stage0", "stage1", "stage1", "stage2"]
    assert [position["update"]["module"] for position in modules.manifest["positions"]] == [
        "update0", "update1", "update1", "update2"]
    assert sorted(modules.texts) == ["stage0", "stage1", "stage2", "update0", "update1", "update2"]
    for text in modules.texts.values():
        assert text.count("module @") == 1


def test_the_manifest_says_what_is_sent_and_who_runs_what():
    _, modules = four_stages()
    manifest = json.loads(json.dumps(modules.manifest))
    assert manifest["rows"] == {"batch": 6, "microbatch": 3}
    assert manifest["replicas"] == {}
    assert [position["actions"].split()[0] for position in manifest["positions"]] == ["0F0", "1F0", "2F0", "3F0"]
    assert [(message["from"], message["to"]) for message in manifest["messages"]] == [(0, 1), (1, 2), (2, 3)]
    for number, message in enumerate(manifest["messages"]):
        (sent,), (returned,) = message["sent"], message["returned"]
        assert (sent["shape"], sent["dtype"], returned) == ([3, 4], "float64", f"grad.{sent['name']}")
        before, after = manifest["stages"][number : number + 2]
        assert sent["name"] in before["runs"]["forward"]["outputs"]
        assert sent["name"] in after["runs"]["forward"]["inputs"]
        assert returned in after["runs"]["backward"]["outputs"]
    first, last = manifest["stages"][0], manifest["stages"][-1]
    assert first["data"] == {"x": 0}
    assert last["ones"] == [f"grad.{manifest['results'][0]}"]
    assert first["weights"] == ["p.w0", "p.b0"]


@pytest.mark.slow
def test_the_manifest_says_how_what_is_sent_is_split():
    spec = models.TransformerSpec(
        layers=2, width=8, heads=2, vocabulary=12, sequence=4, dtype="float64", activation="relu", norm="rms", biases=False)
    step = Strategy.parse("tp sp pp@block.1 1f1b:2")(train_step(spec.function(B), SGD(0.1)))
    modules = stages_to_stablehlo(operation_on(step, Mesh(pp=2, tp=2)), 4)
    message, = modules.manifest["messages"]
    sent, = message["sent"]
    assert (sent["shape"], sent["split"], sent["terms"]) == ([2, 4, 8], [[], ["tp"], []], [])


def test_inputs_keep_their_names():
    _, modules = four_stages()
    program = from_stablehlo(modules.function("stage0", "forward"))
    described = modules.manifest["modules"]["stage0"]["functions"]["forward"]
    assert [(value.name, [*value.type.shape]) for value in program.inputs] == [
        (value["name"], value["shape"]) for value in described["inputs"]]


def test_a_chain_of_modules_computes_the_step():
    step, modules = four_stages()
    whole = step.specialize(B=6)
    rng = np.random.default_rng(0)
    arrays = {value.name: rng.integers(-2, 3, value.type.shape).astype(value.type.dtype) for value in whole.inputs}

    @cache
    def program(module, function):
        return from_stablehlo(modules.function(module, function))

    def call(module, function, given):
        return ir.interpret(program(module, function), given).outputs

    found = Staged(modules.manifest, call, arrays).run()
    (loss,) = modules.manifest["results"]
    for value, expected in zip(whole.outputs, ir.interpret(whole, arrays).outputs, strict=True):
        theirs = found.get(value.name, found[loss])
        assert theirs.dtype == expected.dtype
        assert_allclose(theirs, expected, rtol=1e-5, atol=1e-6)


def test_unequal_parts_and_numbers_of_all_stages_are_refused():
    step = train_step(models.mlp((3, 4, 2), B), Adam(0.1))
    pipelined = operation_on(Strategy(Pipeline("pp", microbatches=2))(step), Mesh(pp=2))
    with pytest.raises(UnsupportedError, match=r"microbatches of 3 and of 4 rows .* 7 rows must be a multiple of 1 x 2"):
        stages_to_stablehlo(pipelined, 7)
    clipped = train_step(models.mlp((3, 4, 2), B), Adam(0.1), clip=1.0)
    pipelined = operation_on(Strategy(Pipeline("pp", microbatches=2))(clipped), Mesh(pp=2))
    with pytest.raises(UnsupportedError, match="its update needs a number of all stages, as the norm for clipping"):
        stages_to_stablehlo(pipelined, 6)


def test_a_stage_that_numbers_its_rows_is_refused_by_the_name_of_the_operator():
    def loss(p, x):
        with ir.region("up"):
            hidden = x @ p["up"] + ir.apply("iota", dim=0, shape=(B, 4), starts=(0, 0), dtype=np.dtype("f4"))
        with ir.region("down"):
            return np.mean((hidden @ p["down"]) ** 2)

    types = {"up": ir.TensorType("f32", (3, 4)), "down": ir.TensorType("f32", (4, 2))}
    step = train_step(ir.record(loss, types, ir.TensorType("f32", (B, 3))), SGD(0.1))
    pipelined = operation_on(Strategy(Pipeline("pp", microbatches=2, begin=("down",)))(step), Mesh(pp=2))
    with pytest.raises(UnsupportedError, match=r"iota.*: it computes other numbers for each microbatch"):
        stages_to_stablehlo(pipelined, 6)


def test_functions_are_put_together_and_taken_apart():
    text = """module @{0} {{
  func.func public @main(%arg0: tensor<2xf32>) -> (tensor<2xf32>) {{
    %0 = call @helper(%arg0) : (tensor<2xf32>) -> tensor<2xf32>
    return %0 : tensor<2xf32>
  }}
  func.func private @helper(%arg0: tensor<2xf32>) -> tensor<2xf32> {{
    %0 = stablehlo.{1} %arg0, %arg0 : tensor<2xf32>
    return %0 : tensor<2xf32>
  }}
}}
"""
    whole = together("both", {"up": text.format("a", "add"), "down": text.format("b", "multiply")})
    assert whole.startswith("module @both {")
    x = np.float32([3, 5])
    for name, expected in (("up", x + x), ("down", x * x)):
        found = ir.interpret(from_stablehlo(alone(whole, name)), [x]).outputs[0]
        assert found.tolist() == expected.tolist()
        assert alone(whole, name).count("func.func") == 2
    with pytest.raises(InteropError, match="the module has no function @left"):
        alone(whole, "left")


@pytest.mark.takes_seconds
def test_the_command_writes_a_folder(tmp_path, capsys):
    source, target = tmp_path / "loss.mlir", tmp_path / "stages"
    source.write_text(str(models.mlp((3, 4, 2), B)))
    words = ["convert", str(source), str(target), "--optimizer", "sgd", "--strategy", "pp=2 1f1b:2"]
    with pytest.raises(WrongWords, match="--size must give a value for B, as B=64"):
        main(words)
    assert main([*words, "--size", "B=6"]) == 0
    assert "2 modules of 2 stages (stage0 stage1)" in capsys.readouterr().out
    assert sorted(path.name for path in target.iterdir()) == [
        "pipeline.json", "stage0.stablehlo", "stage1.stablehlo", "update0.stablehlo", "update1.stablehlo"]
    assert json.loads((target / "pipeline.json").read_text())["rows"] == {"batch": 6, "microbatch": 3}
    with pytest.raises(WrongWords, match="a pipeline is several modules; name a folder"):
        main([*words[:2], f"{target}.stablehlo", *words[3:], "--size", "B=6"])


def test_the_command_places_a_program_that_is_no_pipeline(tmp_path):
    source, target = tmp_path / "loss.mlir", tmp_path / "loss.stablehlo"
    source.write_text(str(models.mlp((4, 4, 2), B)))
    assert main(["convert", str(source), str(target), "--strategy", "dp=2", "--size", "B=6"]) == 0
    assert [str(value.layout) for value in from_stablehlo(target).inputs if value.name == "x"] == [
        "TensorSharding('dp', None)"]
