"""``python -m benchmarks.playground_serving``: prices the decode steps that the playground shows.

They are kept in ``vcluster/report/playground_serving.json``, because pricing them takes longer than a page should.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallelism.hardware import sized_hardware
from parallelism.models import transformer
from parallelism.serving.engine import PAGE_TOKENS
from parallelism.serving.fits import Fit
from parallelism.serving.plans import SETTINGS, Layout, Task
from parallelism.serving.search import CHUNK, Search, served_spec
from parallelism.serving.workloads import Workload
from vcluster.cli.command_line import Parser, serve

PAGE = Path("vcluster/report/playground_serving.json")
PROGRAM = "python -m benchmarks.playground_serving"
HARDWARE = "dgx-h100+tensorrt-llm-h100"
QUESTIONS = (("llama3.1-8b", "bf16"), ("llama3.1-70b", "bf16"), ("llama3.1-70b", "fp8"))
"""A model and a precision."""
TENSOR_DEVICES = (1, 2, 4, 8)
CONTEXTS = (1024, 4096, 16384, 65536)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NEW_TOKENS = 64
"""Those of an answer: half of them are in the cache."""


def fit_of(model: str, precision: str, tp: int, context: int) -> Fit:
    """A replica on ``tp`` devices whose requests have ``context`` tokens in the cache in the middle of their answers."""
    workload = Workload(((context - NEW_TOKENS // 2, NEW_TOKENS),), 1)
    hardware = sized_hardware(HARDWARE, 8)
    task = Task(served_spec(transformer(model), precision), hardware, tp, workload, True, precision, CHUNK,
                None, None, None, None, None)
    return Search(task, dict.fromkeys(SETTINGS)).fit(Layout(tp, 1, 1, 1))


def answer(model: str, precision: str) -> dict[str, Any]:
    """By ``tp`` the bytes of a device, and by ``tp``, context and batch the seconds of a step by what they are spent on; null
    where the cache does not fit."""
    fits = [[fit_of(model, precision, tp, context) for context in CONTEXTS] for tp in TENSOR_DEVICES]
    steps = []
    for of_contexts in fits:
        steps.append([_steps(fit) for fit in of_contexts])
    first = [of_contexts[0].prices for of_contexts in fits]
    hardware = first[0].hardware
    return {
        "hardware": hardware.name, "memory_bytes": hardware.memory_bytes,
        "memory_bytes_per_second": hardware.memory_bytes_per_second,
        "tp": TENSOR_DEVICES, "contexts": CONTEXTS, "batches": BATCHES,
        "weights_bytes": [prices.weights_bytes() for prices in first],
        "token_bytes": [prices.page_bytes()[0]["full"] / PAGE_TOKENS for prices in first], "steps": steps}


def _steps(fit: Fit) -> list[list[float] | None]:
    return [None if fit.room(batch) is None else list(fit.parts(batch)) for batch in BATCHES]


def title(model: str, precision: str) -> str:
    """What a question is called on the page."""
    return f"{model} in {precision}"


def main(words: Sequence[str]) -> int:
    """Write the file."""
    Parser({}, prog=PROGRAM, description=str(__doc__)).parse(words)
    found = {title(*question): answer(*question) for question in QUESTIONS}
    PAGE.write_text(json.dumps(found, separators=(",", ":")) + "\n")
    for name, each in found.items():
        fitting = sum(step is not None for of_tp in each["steps"] for of_context in of_tp for step in of_context)
        print(f"{name}: {fitting} steps that fit")
    return 0


if __name__ == "__main__":
    sys.exit(serve(PROGRAM, main))
