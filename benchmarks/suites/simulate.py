"""What it costs to simulate a program, without running it.

``op``: a GPT with its gradient on 8 devices of data and tensor parallelism, every device op by op, in seconds for each
op of each device; at two sizes, so that it is seen to be linear.  ``gpt3`` is a step of GPT-3 175B (Brown et al.,
*Language Models are Few-Shot Learners*, 2020, table 2.1: 96 layers, 12288 wide, 96 heads; sequence 2048, vocabulary
51200) on 8,192 devices: pp 16, dp 64, tp 8, 1F1B, 512 microbatches; the ``simulate`` call with folding and timeline and
all, and beside it what is done once before: recording, cutting, laying out, localizing.  ``folded``: a GPT on 102,400
devices, one program for all of them, likewise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.cases import WrongAnswerError
from benchmarks.plan import Plan
from benchmarks.results import Results
from benchmarks.systems import OURS, Say
from benchmarks.tables import seconds_text, table
from benchmarks.targets import PLAIN, against
from parallelism import Hardware, Mesh, Pipeline, TensorSharding, Trace, ir, models
from parallelism.execution import Executable, PipelinedProgram
from parallelism.layouts import annotate, localize, partition, propagate
from parallelism.simulation import PipelinedStep, simulate

NAME = "simulate"
OPS = Mesh(dp=2, tp=4)
GPT3 = Mesh(pp=16, dp=64, tp=8)
MANY = Mesh(dp=512, cp=25, tp=8)
MICROBATCHES = 512
TEXTS = {
    "op": "an op of a device, {}", "record": "GPT-3 recorded", "cut": "cut into 16 stages", "lay out": "laid out",
    "localize": "localized", "gpt3": "a step simulated", "record many": "a GPT and its gradient recorded",
    "localize many": "laid out and localized", "folded": "simulated",
}

S = TensorSharding


def measure(plan: Plan, results: Results, say: Say) -> None:
    """Each once a pass; what comes before a simulation is timed in the first pass alone."""
    for layers in (2, 4) if plan.quick else (8, 32):
        say(f"{NAME}: ops, {layers} layers")
        loss = _gpt(layers, 64, 8, 32, 4, np.float32)
        executable = _localized(loss, OPS, _tensor(layers) | {"tokens": S("dp", None), "targets": S("dp", None)})
        ops = sum(size * len(executable.programs.program(rank).ops) for rank, size in executable.programs.classes)
        figures = []
        for _ in range(plan.passes):
            taken, trace = _timed(partial(simulate, executable, "dgx-h100", link_sharing=False))
            _check(trace, OPS)
            figures.append(taken / ops)
        results.add(NAME, OURS, "op", figures, devices=OPS.size, memory=f"{ops} ops")
    _gpt3(plan, results, say)
    _many(plan, results, say)


def report(results: Results) -> str:
    """A line for each figure, and what it may be at most."""
    rows = []
    for m in results.of(NAME):
        limit = PLAIN.get((NAME, m.operation, m.devices))
        rows.append([
            TEXTS[m.operation].format(m.memory), str(m.devices), seconds_text(m.seconds.median),
            f"{m.seconds.spread:.0%}", against(limit, m.seconds.median, seconds_text(limit or 0.0)),
        ])
    return table(("", "devices", "median", "spread", "at most"), rows)


def _gpt3(plan: Plan, results: Results, say: Say) -> None:
    layers = 16 if plan.quick else 96
    say(f"{NAME}: GPT-3, {layers} layers")
    batch = ir.symbol("B")
    before: dict[str, float] = {}
    with np.errstate(over="ignore"):
        before["record"], loss = _timed(partial(models.gpt, 51200, 12288, 96, layers, 2048, batch, np.float16))
    loss = annotate(loss, _tensor(layers) | {"p.tokens": S("tp", None)})
    before["cut"], stages = _timed(lambda: partition(loss, GPT3.shape["pp"], batch="B"))
    pipeline = Pipeline(GPT3.shape["pp"], MICROBATCHES, "1f1b")
    before["lay out"], program = _timed(lambda: PipelinedProgram(stages, pipeline, Mesh(tp=GPT3.shape["tp"])))
    step = PipelinedStep(program, GPT3, GPT3.shape["dp"] * MICROBATCHES)
    before["localize"], _ = _timed(step.prepare)
    hardware = Hardware.preset(f"dgx-h100:{GPT3.size // 8}")
    figures = []
    for number in range(plan.passes):
        say(f"{NAME}: GPT-3, pass {number + 1}/{plan.passes}")
        taken, trace = _timed(lambda: simulate(step, hardware, fold=True, priced_dtype="bfloat16"))
        _check(trace, GPT3, folded=GPT3.shape["pp"])
        figures.append(taken)
    for what, seconds in before.items():
        results.add(NAME, OURS, what, [seconds], devices=GPT3.size)
    results.add(NAME, OURS, "gpt3", figures, devices=GPT3.size)


def _many(plan: Plan, results: Results, say: Say) -> None:
    layers = 2 if plan.quick else 24
    say(f"{NAME}: {MANY.size} devices")
    taken, loss = _timed(lambda: _gpt(layers, 1024, 16, 2000, 512, np.float16))
    given = _tensor(layers) | {name: S("dp", "cp") for name in ("tokens", "targets")} | {"p.positions": S("cp", None)}
    results.add(NAME, OURS, "record many", [taken], devices=MANY.size)
    taken, executable = _timed(lambda: _localized(loss, MANY, given))
    results.add(NAME, OURS, "localize many", [taken], devices=MANY.size)
    hardware = Hardware.preset(f"dgx-h100:{MANY.size // 8}")
    figures = []
    for number in range(plan.passes):
        say(f"{NAME}: {MANY.size} devices, pass {number + 1}/{plan.passes}")
        taken, trace = _timed(partial(simulate, executable, hardware, fold=True, priced_dtype="bfloat16"))
        _check(trace, MANY)
        figures.append(taken)
    results.add(NAME, OURS, "folded", figures, devices=MANY.size)


def _gpt(layers: int, width: int, heads: int, sequence: int, batch: int, dtype: Any) -> ir.Function:
    """The loss of a GPT and the gradients of its weights."""
    with np.errstate(over="ignore"):    # the rows of the batch, as a float16
        loss = models.gpt(512, width, heads, layers, sequence, batch, dtype)
        return ir.gradient(loss, [v.name for v in loss.inputs if v.name.startswith("p.")], keep_outputs=True)


def _tensor(layers: int) -> dict[str, TensorSharding]:
    """Megatron's layouts of the layers: columns, then rows."""
    each = {"qkv": S(None, "tp"), "out": S("tp", None), "up": S(None, "tp"), "down": S("tp", None)}
    return {f"p.{i}.{name}": layout for i in range(layers) for name, layout in each.items()}


def _localized(function: ir.Function, mesh: Mesh, layouts: dict[str, TensorSharding]) -> Executable:
    executable = Executable(localize(propagate(annotate(function, layouts), mesh), mesh))
    for number in range(len(executable.programs.classes)):
        _ = executable.of_class(number).steps
    return executable


def _timed(make: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    made = make()
    return time.perf_counter() - start, made


def _check(trace: Trace, mesh: Mesh, folded: int | None = None) -> None:
    """That the whole mesh was simulated, and as few of it as should be."""
    shown = len(trace.ranks)
    if trace.size != mesh.size or not trace.makespan_seconds > 0 or (folded is not None and shown != folded):
        raise WrongAnswerError(f"a simulation of {mesh!r} told of {shown} of {trace.size} devices")
