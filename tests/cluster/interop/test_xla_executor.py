"""XLA on 8 host devices of JAX runs the modules that are written here, and finds what the interpreter finds.

The steps of training of the documents, under their strategies: whole, partitioned by XLA from the layouts; and as the
program of one device with its collectives, in which devices differ by what they choose by their place.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jax")

from numpy.testing import assert_allclose

from parallelism import ir, models
from parallelism.execution import Executable
from parallelism.interop import to_stablehlo
from parallelism.transforms import Adam, Parts, Strategy, first_state, train_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SCRIPT = Path(__file__).parents[2] / "support" / "xla_programs.py"
SIZES = {"layers": 1, "width": 8, "heads": 4, "vocabulary": 16, "sequence": 8, "dtype": "float64"}
LOSSES = {
    "mlp": lambda: models.mlp((8, 16, 8), batch=8),
    "gpt": lambda: models.TransformerSpec(**SIZES).function(batch=8),
    "two blocks": lambda: models.TransformerSpec(**SIZES | {"layers": 2}).function(batch=8),
    "llama": lambda: models.TransformerSpec(
        **SIZES, key_value_heads=2, activation="swiglu", norm="rms", positions="rotary").function(batch=8),
    "mixture": lambda: models.mixture(6, 8, 4, 2, 3, 8, 5)}
WHOLE, DEVICE = "whole", "one device"
CASES = [
    ("mlp", "dp=2 tp=4", WHOLE), ("mlp", "dp=2 tp=4", DEVICE), ("mlp", "tp=8", DEVICE), ("mlp", "dp=8 zero=2", WHOLE),
    ("mlp", "dp=8 zero=3", WHOLE), ("mlp", "dp=2 tp=4 overlap", DEVICE), ("mlp", "dp:node=2 dp=4 zero=3", WHOLE),
    ("mlp", "dp=8 fused", WHOLE), ("gpt", "dp=2 tp=4 sp zero=1", WHOLE), ("gpt", "dp=2 cp=4", WHOLE),
    ("gpt", "dp=4 tp=2 recompute=block.*", WHOLE), ("llama", "dp=4 tp=2 zero=1", WHOLE),
    ("mlp", "dp=2 tp=4 precision=f32", WHOLE), ("mlp", "dp=8 precision=bf16", WHOLE),
    ("gpt", "dp=2 tp:x@block.*=4", WHOLE),
    ("gpt", "tp=2 tp:x@head=4", WHOLE), ("mlp", "dp=8 local=layer.*", WHOLE),
    ("two blocks", "dp=2 tp=4 local=block.*", WHOLE), ("mixture", "ep=4 dp=2", WHOLE),
    ("mlp", "dp=8 zero=2", DEVICE), ("mlp", "dp=8 zero=3", DEVICE), ("gpt", "dp=2 tp=4 sp zero=1", DEVICE),
    ("gpt", "dp=2 cp=4", DEVICE), ("llama", "dp=4 tp=2 zero=1", DEVICE),
    ("mixture", "ep=4 dp=2", DEVICE)]


@cache
def step_and_arrays(model):
    step = train_step(LOSSES[model](), Adam(1e-3))
    rng = np.random.default_rng(0)
    arrays = {value.name: np.asarray(rng.normal(size=value.type.shape) if value.type.dtype.kind == "f" else
                                     rng.integers(0, 8, value.type.shape), value.type.dtype) for value in step.inputs}
    return step, arrays


@cache
def step_and_inputs(model, text):
    """The step under a strategy, its mesh, and its inputs in order."""
    step, arrays = step_and_arrays(model)
    strategy, mesh = Strategy.parse_on_mesh(text)
    laid = strategy(step)
    rng, parameters = np.random.default_rng(1), Parts.of(laid).parameters       # local losses bring their own
    added = {value.name: rng.normal(size=value.type.shape) for value in parameters if value.name not in arrays}
    arrays = arrays | added
    arrays |= first_state(laid, {value.name: arrays[value.name] for value in parameters})
    return laid, mesh, [np.asarray(arrays[value.name], value.type.dtype) for value in laid.inputs]


@pytest.fixture(scope="module")
def by_xla(request, tmp_path_factory):
    """The results of the modules that are asked for, from one process."""
    asked = [item.callspec.params["case"] for item in request.session.items if item.path == request.path]
    folder = tmp_path_factory.mktemp("modules")
    for case in asked:
        number, (model, text, kind) = CASES.index(case), case
        laid, mesh, arrays = step_and_inputs(model, text)
        (folder / f"{number:02}.mlir").write_text(
            to_stablehlo(laid, mesh) if kind == WHOLE else to_stablehlo(Executable(laid, mesh)))
        np.savez(folder / f"{number:02}.npz", **{str(i): x for i, x in enumerate(arrays)})
    subprocess.run([sys.executable, SCRIPT, folder], check=True, timeout=800)
    return folder


@pytest.mark.parametrize("case", CASES, ids=str)
def test_xla_finds_what_the_interpreter_finds(case, by_xla):
    laid, _, arrays = step_and_inputs(*case[:2])
    module = (by_xla / f"{CASES.index(case):02}.mlir").read_text()
    assert "num_partitions = 8" in module
    assert ("sdy.manual_computation" in module) == (case[2] == DEVICE)
    expected = ir.interpret(laid, arrays).outputs
    with np.load(by_xla / f"{CASES.index(case):02}.out.npz") as results:
        found = [results[str(i)] for i in range(len(results.files))]
    for ours, theirs in zip(expected, found, strict=True):
        theirs = theirs.view(ours.dtype) if theirs.dtype.kind == "V" else theirs
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        tolerance = 1e-5 if "precision=f32" in case[1] else 2e-2 if "precision=bf16" in case[1] else 1e-8
        assert_allclose(theirs.astype(np.float64), ours.astype(np.float64), rtol=tolerance, atol=tolerance)
