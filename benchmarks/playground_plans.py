"""``python -m benchmarks.playground_plans``: searches the plans that the playground shows.

They are kept in ``vcluster/report/playground_plans.json``, because a search takes longer than a page should.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallelism.planning import find_plan
from vcluster.cli.command_line import Parser, serve

PAGE = Path("vcluster/report/playground_plans.json")
PROGRAM = "python -m benchmarks.playground_plans"
QUESTIONS = (("gpt3-125m", "dgx-h100:1", 64), ("gpt3-6.7b", "dgx-a100:4", 256), ("gpt3-13b", "dgx-h100:8", 512))
"""A model, hardware with its number of nodes, sequences of a step."""


def answer(model: str, hardware: str, batch: int) -> dict[str, Any]:
    """All plans of a question that fit, the fastest first: the settings that differ, seconds, and bytes at the peak."""
    plans = find_plan(model, hardware=hardware, batch=batch)
    by_seconds = sorted(plans, key=lambda plan: plan.seconds)
    settings = [plan.settings for plan in by_seconds]
    names = [name for name in settings[0] if len({each[name] for each in settings}) > 1]
    return {
        "command": f"python -m vcluster plan {model} --hardware {hardware} --global-batch-size {batch}",
        "devices": plans.task.devices, "memory_bytes": plans.memory, "considered": plans.considered,
        "refused": {reason: each.count for reason, each in plans.refused.items()}, "names": names,
        "plans": [[*(each[name] for name in names), plan.seconds, plan.peak_bytes]
                  for each, plan in zip(settings, by_seconds, strict=True)]}


def title(model: str, hardware: str, batch: int) -> str:
    """What a question is called on the page."""
    name, nodes = hardware.split(":")
    return f"{model}, {batch} sequences, {nodes} x {name}"


def main(words: Sequence[str]) -> int:
    """Write the file."""
    Parser({}, prog=PROGRAM, description=str(__doc__)).parse(words)
    found = {title(*question): answer(*question) for question in QUESTIONS}
    PAGE.write_text(json.dumps(found, separators=(",", ":")) + "\n")
    for name, each in found.items():
        print(f"{name}: {len(each['plans'])} plans")
    return 0


if __name__ == "__main__":
    sys.exit(serve(PROGRAM, main))
