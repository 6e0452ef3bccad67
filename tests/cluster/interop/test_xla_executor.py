"""XLA on 8 host devices of JAX runs the modules that are written here, and finds what the interpreter finds.

The steps of training of the documents, under their strategies: whole, partitioned by XLA from the layouts; and, where
all devices run one program, as the program of one device with its collectives.
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
    "llama": lambda: models.TransformerSpec(
        **SIZES, key_value_heads=2, activation="swiglu", norm="rms", positions="rotary").function(batch=8)}
WHOLE, DEVICE = "whole", "one device"
CASES = [
    ("mlp", "dp=2 tp=4", WHOLE), ("mlp", "dp=2 tp=4", DEVICE), ("mlp", "tp=8", DEVICE), ("mlp", "dp=8 zero=2", WHOLE),
    ("mlp", "dp=8 zero=3", WHOLE), ("mlp", "dp=2 tp=4 overlap", DEVICE), ("mlp", "dp:node=2 dp=4 zero=3", WHOLE),
    ("mlp", "dp=8 fused", WHOLE), ("gpt", "dp=2 tp=4 sp zero=1", WHOLE), ("gpt", "dp=2 cp=4", WHOLE),
    ("gpt", "dp=4 tp=2 recompute=block.*", WHOLE), ("llama", "dp=4 tp=2 zero=1", WHOLE)]


@cache
def step_and_inputs(model):
    step = train_step(LOSSES[model](), Adam(1e-3))
    rng = np.random.default_rng(0)
    arrays = {value.name: np.asarray(rng.normal(size=value.type.shape) if value.type.dtype.kind == "f" else
                                     rng.integers(0, 8, value.type.shape), value.type.dtype) for value in step.inputs}
    names = [value.name for value in Parts.of(step).parameters]
    return step, arrays | first_state(step, {name: arrays[name] for name in names})


@pytest.fixture(scope="module")
def by_xla(tmp_path_factory):
    """The results of all modules, from one process."""
    folder = tmp_path_factory.mktemp("modules")
    for number, (model, text, kind) in enumerate(CASES):
        step, arrays = step_and_inputs(model)
        strategy, mesh = Strategy.parse_on_mesh(text)
        laid = strategy(step)
        (folder / f"{number:02}.mlir").write_text(
            to_stablehlo(laid, mesh) if kind == WHOLE else to_stablehlo(Executable(laid, mesh)))
        np.savez(folder / f"{number:02}.npz", **{str(i): arrays[v.name] for i, v in enumerate(laid.inputs)})
    subprocess.run([sys.executable, SCRIPT, folder], check=True, timeout=800)
    return folder


@pytest.mark.parametrize("case", CASES, ids=str)
def test_xla_finds_what_the_interpreter_finds(case, by_xla):
    step, arrays = step_and_inputs(case[0])
    module = (by_xla / f"{CASES.index(case):02}.mlir").read_text()
    assert "num_partitions = 8" in module
    assert ("sdy.manual_computation" in module) == (case[2] == DEVICE)
    laid = Strategy.parse_on_mesh(case[1])[0](step)
    expected = ir.interpret(laid, [arrays[value.name] for value in laid.inputs]).outputs
    with np.load(by_xla / f"{CASES.index(case):02}.out.npz") as results:
        found = [results[str(i)] for i in range(len(results.files))]
    for ours, theirs in zip(expected, found, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert_allclose(theirs, ours, rtol=1e-8, atol=1e-8)
