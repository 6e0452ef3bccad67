"""What it costs to simulate a program, without running it, in CPU seconds.

``op``: a GPT with its gradient on 8 devices of data and tensor parallelism, every device op by op, in seconds for each
op of each device; at two sizes, so that it is seen to be linear.  ``step`` is a step of GPT-3 175B (Brown et al.,
*Language Models are Few-Shot Learners*, 2020, table 2.1: 96 layers, 12288 wide, 96 heads; sequence 2048, vocabulary
51200) on 8,192 devices, and of GPT 1T (Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM*, 2021, table 1: 128 layers, 25600 wide, 160 heads) on 3,072 devices: 1F1B, 512 microbatches; the
``simulate`` call with folding and timeline and all.  Beside it is what comes before: recording, cutting, laying out,
localizing; ``whole`` is all of it.  ``all_reduce`` is one collective over many devices, none of them folded.
``folded``: a GPT on 102,400 devices, one program for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks.cases import WrongAnswerError
from benchmarks.plan import Plan
from benchmarks.results import Results
from benchmarks.systems import OURS, Say
from benchmarks.targets import against_plain
from parallelism import Hardware, Mesh, Pipeline, TensorSharding, Trace, ir, models
from parallelism.execution import Executable, PipelinedProgram
from parallelism.layouts import annotate, localize, partition, propagate
from parallelism.simulation import PipelinedStep, simulate

NAME = "simulate"
OPS = Mesh(dp=2, tp=4)
MANY = Mesh(dp=512, cp=25, tp=8)
MICROBATCHES = 512
TEXTS = {
    "op": "an op of a device, {}", "record": "a GPT recorded", "cut": "cut into stages", "lay out": "laid out",
    "localize": "localized", "step": "a step simulated", "whole": "from the function to the trace of a step",
    "all_reduce": "an all_reduce of 1 MiB", "record many": "a GPT and its gradient recorded",
    "localize many": "laid out and localized", "folded": "simulated",
}

S = TensorSharding


class Model(NamedTuple):
    """A GPT, and the mesh that it is trained on."""

    name: str
    layers: int
    width: int
    heads: int
    mesh: Mesh


MODELS = (
    Model("GPT-3 175B", 96, 12288, 96, Mesh(pp=16, dp=64, tp=8)),
    Model("GPT 1T", 128, 25600, 160, Mesh(pp=64, dp=6, tp=8)),
)


def measure(plan: Plan, results: Results, say: Say) -> None:
    """Each once a pass; what comes before a simulation of a GPT on all devices is timed in the first pass alone."""
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
    for model in MODELS:
        _step(plan, results, say, model)
    _all_reduce(plan, results, say)
    _many(plan, results, say)


def report(results: Results) -> str:
    """A line for each figure, and what it may be at most."""
    return against_plain(results, NAME, TEXTS)


def _step(plan: Plan, results: Results, say: Say, model: Model) -> None:
    layers, mesh, sequence = 16 if plan.quick else model.layers, model.mesh, 2048
    stages = min(mesh.shape["pp"], layers)
    mesh = Mesh(**{**mesh.shape, "pp": stages})
    hardware = Hardware.preset(f"dgx-h100:{mesh.size // 8}")
    figures: dict[str, list[float]] = {}
    for number in range(plan.passes):
        say(f"{NAME}: {model.name}, {layers} layers, pass {number + 1}/{plan.passes}")
        taken: dict[str, float] = {}
        with np.errstate(over="ignore"):
            taken["record"], loss = _timed(partial(
                models.gpt, 51200, model.width, model.heads, layers, sequence, ir.symbol("B"), np.float16))
        loss = annotate(loss, _tensor(layers) | {"p.tokens": S("tp", None)})
        taken["cut"], parts = _timed(partial(partition, loss, stages, batch="B"))
        pipeline = Pipeline(stages, MICROBATCHES, "1f1b")
        taken["lay out"], program = _timed(partial(PipelinedProgram, parts, pipeline, Mesh(tp=mesh.shape["tp"])))
        step = PipelinedStep(program, mesh, mesh.shape["dp"] * MICROBATCHES)
        taken["localize"], _ = _timed(step.prepare)
        taken["step"], trace = _timed(partial(simulate, step, hardware, fold=True, priced_dtype="bfloat16"))
        _check(trace, mesh, folded=stages)
        for what, seconds in (*taken.items(), ("whole", sum(taken.values()))):
            figures.setdefault(what, []).append(seconds)
    for what, each in figures.items():
        results.add(NAME, OURS, what, each, devices=mesh.size)


def _all_reduce(plan: Plan, results: Results, say: Say) -> None:
    for size in (64, 128) if plan.quick else (1024, 2048):
        say(f"{NAME}: all_reduce over {size} ranks")
        mesh = Mesh(x=size)
        total = ir.record(lambda x: x.sum(axis=0), ir.TensorType(np.float32, (size, 2**18)))
        executable = _localized(total, mesh, {total.inputs[0].name: S("x", None)})
        figures = []
        for _ in range(plan.passes):
            taken, trace = _timed(partial(simulate, executable, f"dgx-h100:{size // 8}"))
            _check(trace, mesh, folded=size)
            figures.append(taken)
        results.add(NAME, OURS, "all_reduce", figures, devices=size)


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


def _tensor(layers: int) -> dict[Any, TensorSharding]:
    """Megatron's layouts of the layers: columns, then rows."""
    each = {"qkv": S(None, "tp"), "out": S("tp", None), "up": S(None, "tp"), "down": S("tp", None)}
    return {f"p.{i}.{name}": layout for i in range(layers) for name, layout in each.items()}


def _localized(function: ir.Function, mesh: Mesh, layouts: dict[Any, TensorSharding]) -> Executable:
    executable = Executable(localize(propagate(annotate(function, layouts), mesh), mesh))
    for number in range(len(executable.programs.classes)):
        _ = executable.of_class(number).steps
    return executable


def _timed(make: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    made = make()
    return time.process_time() - start, made


def _check(trace: Trace, mesh: Mesh, folded: int | None = None) -> None:
    """That the whole mesh was simulated, and as few of it as should be."""
    shown = len(trace.ranks)
    if trace.size != mesh.size or not trace.makespan_seconds > 0 or (folded is not None and shown != folded):
        raise WrongAnswerError(f"a simulation of {mesh!r} told of {shown} of {trace.size} devices")
