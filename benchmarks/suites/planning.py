"""What it costs to find the best split of a training step, in CPU seconds.

``set-up`` is everything before the first plan is timed: pieces are measured and priced, and memory is compared.
``timed`` is one plan after that, timed without shared links, of those that are not refused and fit the memory.  No plan
is simulated.  The models are GPT 13B on 64 devices and GPT-3 175B on 1,024 (Brown et al., *Language Models are Few-Shot
Learners*, 2020, table 2.1; sequence 2048, vocabulary 51200), in bfloat16, with all settings free.

Calculon looks at about 470 plans a second with a model of its own (Isaev et al., *Calculon: a Methodology and Tool for
High-Level Codesign of Systems and Large Language Models*, 2023), on one core of another machine.

``slicing`` is the dynamic program over blocks and submeshes alone: 96 layers in 32 blocks of unequal cost, 128 devices
in nodes of 8, submeshes of 8 sizes, at most 16 stages, 64 microbatches, and a memory that excludes the fastest slicing.
"""

from __future__ import annotations

from time import process_time
from typing import Any, NamedTuple

import numpy as np

from benchmarks.cases import WrongAnswerError
from benchmarks.plan import Plan
from benchmarks.results import Results
from benchmarks.systems import OURS, Say
from benchmarks.targets import against_plain
from parallelism import models
from parallelism.planning import find_plan
from parallelism.planning.two_block_steps import two_block_steps
from parallelism.slicing import Slices, best_slicing
from parallelism.slicing.submeshes import submesh_sizes

NAME = "plan"
TEXTS = {"set-up": "{}, set-up", "timed": "{}, a plan (Calculon 2.1 ms)", "slicing": "{}, its slicing"}


class Task(NamedTuple):
    """A GPT, and what it is planned for."""

    name: str
    layers: int
    width: int
    heads: int
    devices: int
    batch: int


TASKS = Task("GPT 13B", 40, 5120, 40, 64, 512), Task("GPT-3 175B", 96, 12288, 96, 1024, 1536)
BLOCKS, DEVICES, NODE, MEMORY_BYTES = 32, 128, 8, 8.0
SLICED = "96 layers in 32 blocks"


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
            two_block_steps.cache_clear()
            found = find_plan(spec, hardware="dgx-h100", devices=task.devices, batch=task.batch, simulations=0, **fixed)
            if not found.timed or found.best.peak_bytes > found.memory:
                raise WrongAnswerError(f"{task.name}: no plan was found that fits")
            figures.setdefault("set-up", []).append(found.setup_seconds)
            figures.setdefault("timed", []).append(found.timing_seconds / found.timed)
        for what, each in figures.items():
            results.add(NAME, OURS, what, each, devices=task.devices, memory=task.name)


    for number in range(plan.passes):
        say(f"{NAME}: {SLICED}, pass {number + 1}/{plan.passes}")
        results.add(NAME, OURS, "slicing", [slicing_seconds()], devices=DEVICES, memory=SLICED)


def slicing_seconds() -> float:
    """The CPU seconds of a slicing, of which the answer is checked."""
    layers = np.random.default_rng(0).uniform(1, 2, 96).reshape(BLOCKS, -1).sum(axis=1)[:, None]
    sizes = np.array(submesh_sizes(NODE, DEVICES))
    slices = Slices.of_blocks(layers / sizes**0.9, sizes.tolist(), 2 * layers / sizes, layers / sizes)
    asked = {"devices": DEVICES, "microbatches": 64, "most_stages": 16}
    free = best_slicing(slices, **asked)
    start = process_time()
    found = best_slicing(slices, memory_bytes=MEMORY_BYTES, **asked)
    taken = process_time() - start
    stages, devices = len(found.slices), sum(int(sizes[each.submesh]) for each in found.slices)
    peak = max(slices.bytes_of(each, stages - place) for place, each in enumerate(found.slices))
    if devices != DEVICES or peak > MEMORY_BYTES or not found.seconds > free.seconds:
        raise WrongAnswerError(f"{SLICED}: {devices} devices, {peak:.3g} bytes, {found.seconds:.4g} s")
    return taken


def report(results: Results) -> str:
    """A line for each figure, and what it may be at most."""
    return against_plain(results, NAME, TEXTS)
