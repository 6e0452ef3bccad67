"""The table of strategies in the documents: what each line moves and holds is what its formulas say."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import pytest
from paths import ROOT

from parallelism import ir, models
from parallelism.layouts import localize
from parallelism.simulation import simulate
from parallelism.transforms import SGD, Adam, Parts, Strategy, train_step

ROWS, SEQUENCE, WIDTH = 8, 12, 48
TABLE = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8").partition("## What each strategy moves and")[2]
LINES = [re.findall("`([^`]*)`", line.rpartition("|")[0].rpartition("|")[0])
         for line in TABLE.partition("\n## ")[0].splitlines() if line.startswith("| `")]


def spec(layers):
    return models.TransformerSpec(
        layers=layers, width=WIDTH, heads=12, vocabulary=24, sequence=SEQUENCE, dtype="float32")


@cache
def step(layers):
    return train_step(spec(layers).function(ROWS), Adam())


def sizes(layers):
    """The letters of the formulas, from the model alone."""
    parameters = {value.name: value.type.nbytes for value in Parts.of(step(layers)).parameters}
    back = {value.name for op in step(layers).ops if (op.region or "").startswith("gradient") for value in op.inputs}
    split = [name for name in parameters if re.search(r"tokens|qkv|up|\d\.(out|down)$", name)]
    small = [name for name in parameters if re.search("norm|out_bias|down_bias", name)]
    return {
        "L": layers, "h": WIDTH, "A": 4 * ROWS * SEQUENCE * WIDTH, "P": sum(parameters.values()),
        "S": sum(parameters[name] for name in split), "N": sum(parameters[name] for name in small),
        "W": parameters["p.positions"],
        "R": parameters["p.tokens"] + sum(nbytes for name, nbytes in parameters.items() if name in back)}


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("line", LINES, ids=[line[0] for line in LINES])
def test_a_line_of_the_table_is_what_the_program_does(line, layers):
    text, *formulas = line
    strategy, mesh = Strategy.parse_on_mesh(text)
    made = strategy(step(layers))
    # A number without a dim, such as the loss, is not counted.
    received = sum(op.bytes_received for op in localize(made, mesh).program().ops
                   if op.bytes_received and op.inputs[0].type.shape)
    trace = simulate(made, "dgx-h100", mesh=mesh)
    held = [trace.peak_bytes(0, category) for category in ("weights", "gradients", "optimizer")]
    held[2] -= np.dtype(np.int64).itemsize      # the number of updates
    *_, n = mesh.shape.values()
    names = {**sizes(layers), "n": n, "m": mesh.size // n}
    assert [received, *held] == [eval(formula, {}, names) for formula in formulas]


def test_the_table_has_all_that_splits_a_step():
    words = {word.partition("=")[0].partition(":")[0] for line in LINES for word in line[0].split()}
    assert words >= {"dp", "tp", "sp", "cp", "zero", "precision", "recompute", "overlap"}


@pytest.mark.takes_seconds
@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("microbatches", [2, 4])
def test_a_stage_in_the_middle_receives_two_activations(microbatches):
    loss = spec(3).function(ir.symbol("B"))
    strategy, mesh = Strategy.parse_on_mesh(f"pp@block.1,block.2=3 1f1b:{microbatches}")
    trace = simulate(strategy(train_step(loss, SGD(0.1))), "dgx-h100", mesh=mesh, batch=ROWS)
    assert sum(event.bytes_received for event in trace if event.rank == 1) == 2 * sizes(3)["A"]
