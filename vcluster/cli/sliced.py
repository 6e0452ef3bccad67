"""`plan --slices`: stages on meshes of different sizes."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from parallelism.display import progress
from parallelism.ir import Function
from parallelism.models import TransformerSpec
from parallelism.slicing import NoSlicingFits, SlicedPlan, SlicedPlans, find_slicing
from parallelism.transforms import SGD, Adam
from vcluster.cli.command_line import WrongWords
from vcluster.cli.megatron_words import searched_hardware


def tell_slicings(
    model: TransformerSpec | Function, batch: int, optimizer: SGD | Adam, arguments: argparse.Namespace
) -> int:
    """Find stages of different sizes for so many microbatches, and tell them.  Returns 1 if nothing fits."""
    try:
        with progress("cutting the model") as told:
            plans = find_slicing(
                model,
                hardware=searched_hardware(arguments.hardware, model),
                batch=batch,
                microbatches=arguments.slices,
                optimizer=optimizer,
                devices=arguments.devices,
                memory=arguments.memory,
                progress=told,
                simulations=min(arguments.simulations, arguments.top),
            )
    except NoSlicingFits as error:
        print(error, file=sys.stderr)
        return 1
    except (ValueError, TypeError, OSError) as error:
        raise WrongWords(str(error)) from None
    if arguments.json:
        print(json.dumps(slicings_document(plans, arguments.top), indent=1))
        return 0
    best = plans.best
    how = (
        "by its simulation" if best.simulated_seconds is not None else "by its timeline, without a simulation"
    )
    print(f"{plans}\n\nThe first, {how}; as the text of a strategy:\n  {best}")
    for mesh, reason in plans.refused.items():
        print(f"refused: {mesh!r}: {reason}")
    return 0


def slicings_document(plans: SlicedPlans, top: int) -> dict[str, Any]:
    """The figures of the first slicings, for JSON."""
    task = plans.task
    return {
        "program": task.step.name,
        "hardware": task.hardware.name,
        "devices": task.devices,
        "batch": task.batch,
        "microbatches": task.microbatches,
        "memory_bytes": plans.memory_bytes,
        "plans": [_figures(each) for each in plans[:top]],
        "refused": [{"mesh": dict(mesh.shape), "reason": reason} for mesh, reason in plans.refused.items()],
    }


def _figures(plan: SlicedPlan) -> dict[str, Any]:
    return {
        "seconds": plan.seconds,
        "simulated": plan.simulated_seconds is not None,
        "chosen_by_seconds": plan.slicing.seconds,
        "peak_bytes": plan.peak_bytes,
        "strategy": str(plan),
        "stages": [
            {"first_block": own.first, "last_block": own.last, "mesh": dict(mesh.shape)}
            for own, mesh in zip(plan.slicing.slices, plan.meshes, strict=True)
        ],
    }
