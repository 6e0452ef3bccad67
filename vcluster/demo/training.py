"""Common parts of the demos that train: the steps on a cluster, their results, and the files that are written."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallelism.trace import Trace
from pipeline_parallelism import Training
from vcluster.demo.command_line import WrongWords, accessing, writable
from vcluster.demo.pipelines import short
from vcluster.demo.screen import Screen

if TYPE_CHECKING:
    import argparse

    from vcluster.runs import VirtualCluster


@dataclass(frozen=True)
class Trained:
    """The results of a training."""

    losses: list[float]
    """The loss before each step."""
    last: Training
    """The last step, with the parameters after it."""
    step: Trace
    """The trace of the last step."""
    step_seconds: float
    """Wall time of the last step."""
    seconds: float
    """Wall time of all steps."""


def train(
    model: Any, optimizer: Any, steps: int, batch: Callable[[int], tuple[Any, Any]], cluster: VirtualCluster,
    screen: Screen,
) -> Trained:
    """Run all steps on the cluster, each on ``batch(step)``, counted from 1. The last returns the parameters."""
    step = model.train_step(optimizer, returns="loss")
    last = model.train_step(optimizer, returns=("loss", "parameters"))
    losses: list[float] = []
    started = time.perf_counter()
    with screen.progress("step", steps) as update:
        for number in range(1, steps + 1):
            inputs, before = batch(number), time.perf_counter()
            run = cluster.run(step if number < steps else last, *inputs)
            seconds = time.perf_counter() - before
            losses.append(run.result.loss)
            update(number, f"loss {short(losses[-1])}")
    return Trained(losses, run.result, run.trace, seconds, time.perf_counter() - started)


def check_rows(arguments: argparse.Namespace, replicas: int, rows: int, there: str) -> None:
    """Raise `WrongWords` if there are fewer rows than microbatches or replicas. ``there`` describes the rows."""
    for flag, number in (("--microbatches", arguments.microbatches), ("--dp", replicas)):
        if number > rows:
            raise WrongWords(f"{flag} {number}: {there}")


def check_writable(**files: Path | None) -> None:
    """Raise `WrongWords` if a file of these options cannot be written, or if two options name the same file."""
    given = {option: file for option, file in files.items() if file is not None}
    for file in given.values():
        writable(file)
    if len({*given.values()}) < len(given):
        names = " and ".join(f"--{option}" for option in sorted(given))
        raise WrongWords(f"{names} are both {next(iter(given.values()))}")


def write(screen: Screen, option: str, content: str, path: Path | None, save: Callable[[Path], None]) -> None:
    """Save the file of an option, if there is one, and report it. Raises `WrongWords` if it cannot be written."""
    if path is None:
        return
    with accessing(path, option=option):
        save(path)
    screen.line()
    screen.line(f"The {content} of that step is in {path}")
