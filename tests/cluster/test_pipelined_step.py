"""A step of a pipelined program, simulated and executed: the same messages, collectives, memory and virtual time."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from parallelism import Mesh, TensorSharding, ir
from parallelism.ir import models
from parallelism.layouts import annotate, partition
from parallelism.pipelined_program import PipelinedProgram
from parallelism.pipelined_step import PipelinedStep
from parallelism.pipelining import Pipeline
from parallelism.simulator import simulate

B, S = ir.symbols("B S")
COLUMNS, LINES, ROWS = TensorSharding(None, "tp"), TensorSharding("tp", None), TensorSharding("tp")


def tensor_parallel():
    layouts = {"p.tokens": LINES, "p.0.up": COLUMNS, "p.0.down": LINES, "p.1.up": COLUMNS, "p.1.down": LINES}
    return annotate(models.gpt(11, 8, 2, 2, S, B), layouts)


def fully_sharded():
    mlp = models.mlp((5, 8, 6, 4, 3), B)
    return annotate(mlp, {v.name: ROWS if v.type.ndim == 1 else LINES for v in mlp.inputs})


MODELS = {"gpt": (tensor_parallel(), {"S": 3}), "mlp": (fully_sharded(), {})}


def told(trace):
    """What each device says to others."""
    return Counter(
        (e.rank, e.kind, e.name, e.group, e.peer, e.tag, e.bytes_sent, e.bytes_received)
        for e in trace if e.kind in ("collective", "send", "recv") and (e.peer is None or e.peer >= 0))


@pytest.mark.parametrize(("name", "schedule", "chunks", "microbatches", "recompute", "replicas", "devices", "rows"), [
    ("gpt", "1f1b", 1, 3, False, 1, 1, 7), ("mlp", "gpipe", 1, 2, True, 1, 3, 7), ("mlp", "1f1b", 1, 4, False, 2, 2, 9),
    ("gpt", "zero_bubble_h1", 1, 3, True, 2, 1, 7), ("gpt", "interleaved_1f1b", 2, 4, False, 1, 2, 9),
    ("mlp", "zero_bubble_v", 2, 3, [1], 2, 2, 8),
])
def test_a_simulated_step_is_the_executed_one(
    cluster_of, name, schedule, chunks, microbatches, recompute, replicas, devices, rows
):
    function, numbers = MODELS[name]
    stages = partition(function, 2 * chunks, sizes=numbers, recompute=recompute)
    program = PipelinedProgram(stages, Pipeline(2 * chunks, microbatches, schedule, chunks), Mesh(tp=devices))
    mesh = Mesh(dp=replicas, pp=2, tp=devices)
    rng = np.random.default_rng(0)
    inputs = [
        rng.normal(size=v.type.shape) if v.type.dtype.kind == "f" else rng.integers(0, 11, v.type.shape)
        for v in function.specialize(B=rows, **numbers).inputs
    ]
    ran = cluster_of(mesh, "thread", hardware="dgx-h100", compute="modelled").run(program, inputs).trace
    found = simulate(PipelinedStep(program, mesh, rows, **numbers), "dgx-h100")
    assert told(found) == told(ran)
    for category in (None, "weights", "inputs", "activations", "gradients"):
        assert found.peaks(category) == ran.peaks(category)
    assert found.makespan_seconds == pytest.approx(ran.makespan_seconds, rel=1e-9) and ran.makespan_seconds > 0
