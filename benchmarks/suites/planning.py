"""What it costs to find the best split of a training step, in CPU seconds.

``set-up`` is everything before the first plan is timed: pieces are measured and priced, and memory is compared.
``timed`` is one plan after that, timed without shared links, of those that are not refused and fit the memory.  No plan
is simulated.  The models are GPT 13B on 64 devices and GPT-3 175B on 1,024 (Brown et al., *Language Models are Few-Shot
Learners*, 2020, table 2.1; sequence 2048, vocabulary 51200), in bfloat16, with all settings free.

Calculon looks at about 470 plans a second with a model of its own (Isaev et al., *Calculon: a Methodology and Tool for
High-Level Codesign of Systems and Large Language Models*, 2023), on one core of another machine.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks.cases import WrongAnswerError
from benchmarks.plan import Plan
from benchmarks.results import Results
from benchmarks.systems import OURS, Say
from benchmarks.targets import against_plain
from parallelism import models
from parallelism.planning import find_plan
from parallelism.planning.small_steps import small_steps

NAME = "plan"
TEXTS = {"set-up": "{}, set-up", "timed": "{}, a plan (Calculon 2.1 ms)"}


class Task(NamedTuple):
    """A GPT, and what it is planned for."""

    name: str
    layers: int
    width: int
    heads: int
    devices: int
    batch: int


TASKS = Task("GPT 13B", 40, 5120, 40, 64, 512), Task("GPT-3 175B", 96, 12288, 96, 1024, 1536)


def measure(plan: Plan, results: Results, say: Say) -> None:
    """Each search once a pass, from nothing; a quick one has little to choose."""
    for task in TASKS[:1] if plan.quick else TASKS:
        spec = models.TransformerSpec(layers=task.layers, width=task.width, heads=task.heads, vocabulary=51200,
                                      sequence=2048, dtype="bfloat16")
        few = {"tp": 8, "sp": True, "recompute": "none", "zero": 1, "order": "pp dp cp tp"}
        fixed: dict[str, Any] = few if plan.quick else {}
        figures: dict[str, list[float]] = {}
        for number in range(plan.passes):
            say(f"{NAME}: {task.name}, pass {number + 1}/{plan.passes}")
            small_steps.cache_clear()
            found = find_plan(spec, hardware="dgx-h100", devices=task.devices, batch=task.batch, simulations=0, **fixed)
            if not found.timed or found.best.peak_bytes > found.memory:
                raise WrongAnswerError(f"{task.name}: no plan was found that fits")
            figures.setdefault("set-up", []).append(found.setup_seconds)
            figures.setdefault("timed", []).append(found.timing_seconds / found.timed)
        for what, each in figures.items():
            results.add(NAME, OURS, what, each, devices=task.devices, memory=task.name)


def report(results: Results) -> str:
    """A line for each figure, and what it may be at most."""
    return against_plain(results, NAME, TEXTS)
