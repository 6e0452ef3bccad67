"""XLA on 8 host devices of JAX runs the modules of a pipeline, stage by stage; what is sent is carried by hand.

All results of a step, the loss, parameters and state, are those of the whole step on one device.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jax")

from numpy.testing import assert_allclose

from parallelism import Mesh, PipelinedProgram, ir, models
from parallelism.execution import operation_on
from parallelism.interop import stages_to_stablehlo
from parallelism.layouts import partition
from parallelism.pipelining import Pipeline as Scheduled
from parallelism.transforms import Adam, Parts, Pipeline, Strategy, first_state, train_step
from vcluster import VirtualCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SUPPORT = Path(__file__).parents[2] / "support"
B = ir.symbol("B")
ROWS = 8


def masked():
    """A mean over the targets that count: how many these are must be known before the first microbatch."""
    def loss(p, x, t):
        with ir.region("up"):
            hidden = np.maximum(x @ p["up"], 0)
        with ir.region("down"):
            z = hidden @ p["down"]
        counts = (t > 2).astype(z.dtype)
        return np.sum((z[:, 0] - t) ** 2 * counts) / np.sum(counts)

    types = {"up": ir.TensorType("f64", (4, 6)), "down": ir.TensorType("f64", (6, 3))}
    return ir.record(loss, types, ir.TensorType("f64", (B, 4)), ir.TensorType("f64", (B,)))


def transformer():
    return models.TransformerSpec(layers=3, width=8, heads=2, vocabulary=16, sequence=4, dtype="float64").function(batch=B)


def perceptron():
    return models.mlp((8, 8, 8, 8, 8), B, "f8")


def cut(*begin, **more):
    return Strategy(Pipeline("pp", **{"microbatches": 2, "begin": begin, **more}))


CASES = {
    "equal stages": (perceptron, cut("layer.1", "layer.2", "layer.3"), Mesh(pp=4), [0, 1, 1, 2]),
    "two stages on a device": (perceptron, "pp=2 interleaved_1f1b:2x2", None, [0, 1, 1, 2]),
    "meshes of their own": (perceptron, cut("layer.2", meshes=(Mesh(dp=2), Mesh(dp=1))), Mesh(devices=3), [0, 1]),
    "a number of the whole batch": (masked, "pp=2 dp=2 1f1b:2", None, [0, 1]),
    "halves of backwards": (transformer, cut("block.1", "block.2", schedule="zb_h1"), Mesh(pp=3), [0, 1, 2]),
    "computed again": (transformer, cut("block.1", recompute=True), Mesh(pp=2), [0, 1]),
    "tensors and sequences split": (transformer, "tp=2 sp pp=2 dp=2 zero=1 1f1b:2", None, [0, 1]),
    "weights gathered": (transformer, "pp=2 dp=2 zero=3 1f1b:2", None, [0, 1]),
    "contexts split": (transformer, "cp=2 pp=2 1f1b:2", None, [0, 1]),
}


def numbers_for(function):
    rng = np.random.default_rng(0)
    return {value.name: np.asarray(rng.normal(size=value.type.shape) if value.type.dtype.kind == "f" else
                                   rng.integers(0, 8, value.type.shape), value.type.dtype) for value in function.inputs}


def by_xla(modules, arrays, folder):
    """The results of the modules, by name."""
    modules.save(folder)
    for name, module in modules.manifest["modules"].items():
        for function in module["functions"]:
            (folder / f"{name}.{function}.mlir").write_text(modules.function(name, function))
    np.savez(folder / "inputs.npz", **arrays)
    subprocess.run([sys.executable, SUPPORT / "staged_modules.py", folder], check=True, timeout=500)
    with np.load(folder / "outputs.npz") as found:
        return dict(found)


@pytest.mark.parametrize("case", CASES)
def test_the_modules_of_a_step_compute_the_step(case, tmp_path):
    made, strategy, mesh, classes = CASES[case]
    step = train_step(made(), Adam(1e-3))
    if isinstance(strategy, str):
        strategy, mesh = Strategy.parse_on_mesh(strategy)
    operation = operation_on(strategy(step), mesh)
    modules = stages_to_stablehlo(operation, ROWS)
    assert [stage["module"] for stage in modules.manifest["stages"]] == [f"stage{number}" for number in classes]
    whole = step.specialize(B=ROWS)
    arrays = numbers_for(whole)
    arrays |= first_state(whole, {value.name: arrays[value.name] for value in Parts.of(whole).parameters})
    found = by_xla(modules, arrays, tmp_path)
    (loss,) = modules.manifest["results"]
    expected = ir.interpret(whole, [arrays[value.name] for value in whole.inputs]).outputs
    with VirtualCluster(mesh, backend="thread") as cluster:
        on_devices = cluster.run(operation, [arrays[value.name] for value in whole.inputs]).result
    assert len(found) == len(expected) == len(on_devices)
    for value, reference, device in zip(whole.outputs, expected, on_devices, strict=True):
        theirs = found.get(value.name, found[loss])
        assert (theirs.shape, theirs.dtype) == (reference.shape, reference.dtype)
        assert_allclose(theirs, reference, rtol=1e-8, atol=1e-8)
        assert_allclose(theirs, device, rtol=1e-8, atol=1e-8)


def test_a_pipeline_without_an_update_gives_the_loss_and_gradients(tmp_path):
    loss = perceptron()
    pipelined = PipelinedProgram(partition(loss, ["layer.1", "layer.2", "layer.3"]), Scheduled(4, 2))
    modules = stages_to_stablehlo(pipelined, ROWS, Mesh(pp=4, dp=2))
    whole = loss.specialize(B=ROWS)
    arrays = numbers_for(whole)
    found = by_xla(modules, arrays, tmp_path)
    trained = sorted(name for name in arrays if name.startswith("p."))
    expected = ir.interpret(ir.gradient(whole, trained, keep_outputs=True), [arrays[v.name] for v in whole.inputs]).outputs
    results = [*modules.manifest["results"], *(f"grad.{name}" for name in trained)]
    assert sorted(found) == sorted(results)
    for name, reference in zip(results, expected, strict=True):
        assert_allclose(found[name], reference, rtol=1e-10)
