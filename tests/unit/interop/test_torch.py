"""`from_torch`: modules of PyTorch with their losses; and files as both exporters write them, which need no torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")

from numpy.testing import assert_allclose

from parallelism import ir
from parallelism.interop import from_onnx
from parallelism.planning import find_plan

DATA = Path(__file__).parents[2] / "data" / "onnx"
IDS = [[10, 20, 19, 9, 8, 22], [19, 3, 5, 14, 22, 13], [22, 1, 15, 17, 18, 7]]
TARGETS = [[11, 8, 22, 12, 12, 22], [7, 21, 20, 15, 5, 18], [8, 6, 8, 12, 22, 19]]
LOSS = 5.925607681274414
"""What PyTorch 2.13.0 computes (`torch_models`)."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_loss", "gpt_loss_torchscript"])
def test_files_of_both_exporters_have_the_loss_the_symbols_and_the_modules(name):
    program, weights = from_onnx(DATA / f"{name}.onnx")
    loss, = ir.interpret(program, {**weights, "ids": np.array(IDS), "targets": np.array(TARGETS)}).outputs
    assert_allclose(loss, LOSS, rtol=1e-5)
    assert program.symbols == {"B"}
    assert "model.blocks.1.up" in program.regions
    plans = find_plan(program, hardware="dgx-h100", devices=2, batch=8, tp=1)
    assert plans.best.seconds > 0


def test_a_line_that_a_file_names_is_told_and_never_opened():
    program, _ = from_onnx(DATA / "gpt_loss.onnx")
    lines = {op.line for op in program.ops if op.region == "model.blocks.0.ln1"}
    assert {(Path(line.file).name, line.text) for line in lines} == {("torch_models.py", "")}
