"""A step of the pipelined perceptron: CPU time of all devices over that of the same arithmetic in one process.

The other process is a device, too, so that its products run on one thread as the others' do; it goes through
``MLP.reference_step`` with as many microbatches, which gives the same bits.  Both sides go step after step with what
the step before left.  What the pipeline uses is the CPU time of its processes and of the host during its steps: waiting
and spinning count, sleeping does not.
"""

from __future__ import annotations

import os
import time

import numpy as np

from benchmarks.cases import Array, WrongAnswerError
from benchmarks.cpu import cpu_seconds
from benchmarks.plan import Plan
from benchmarks.results import Results
from benchmarks.systems import OURS, Say
from benchmarks.tables import seconds_text, table
from benchmarks.targets import STEP_OVERHEAD, against
from parallelism.kernels import SGD
from parallelism.pipelining import Pipeline
from pipeline_parallelism import MLP, Training
from vcluster.device import VirtualDevice
from vcluster.runs import VirtualCluster

NAME = "step"
MICROBATCHES = 8
SIZES = {"large": (1024, 2048), "wide": (512, 512), "narrow": (128, 512)}
"""Width of the layers, and rows of the batch."""
REFERENCE = "one process"
OPTIMIZER = SGD(0.01)
SETTLE_SECONDS = 0.002
"""Who still goes to sleep from before does so now."""


def measure(plan: Plan, results: Results, say: Say) -> None:
    """The pipeline and the one process take turns."""
    for devices in plan.devices_or((2, 4, 8), (4,)):
        with VirtualCluster(pp=devices) as cluster, VirtualCluster(1) as single:
            for what in ("wide", "narrow") if plan.quick else SIZES:
                say(f"{NAME}: {devices} devices, {what}")
                steps = 2 if what == "large" else 3 if plan.quick else 10
                _compare(cluster, single, what, steps, plan, results)


def report(results: Results) -> str:
    """A line for each width and number of stages: CPU time of a step on both sides, and what the pipeline adds."""
    found = {(m.operation, m.devices, m.system): m.seconds for m in results.of(NAME)}
    rows = []
    for what, devices in dict.fromkeys((what, devices) for what, devices, _ in found):
        ours, alone = found[what, devices, OURS], found[what, devices, REFERENCE]
        over = ours.median / alone.median - 1
        rows.append([
            "{} wide, {} rows".format(*SIZES[what]), str(devices), seconds_text(ours.median),
            seconds_text(alone.median), f"{over:.1%}",
            against(STEP_OVERHEAD, over, f"{STEP_OVERHEAD:.0%}"),
        ])
    return table(("CPU time of a step", "devices", "pipeline", REFERENCE, "more", "at most"), rows)


def _compare(
    cluster: VirtualCluster, single: VirtualCluster, what: str, steps: int, plan: Plan, results: Results
) -> None:
    """Steps on the cluster and steps in one process, in turn; both must lose alike."""
    devices = cluster.size
    width, rows = SIZES[what]
    mlp = MLP((width,) * (devices + 1), Pipeline(devices, MICROBATCHES), dtype=np.float32)
    rng = np.random.default_rng(0)
    x, targets = (rng.standard_normal((rows, width), np.float32) for _ in range(2))
    step = mlp.train_step(OPTIMIZER, returns="loss")
    pids = {*cluster.pids(), os.getpid()}
    seconds: dict[str, list[float]] = {OURS: [], REFERENCE: []}
    for number in range(plan.passes + 1):
        time.sleep(SETTLE_SECONDS)
        before = cpu_seconds(pids)
        losses = [cluster.run(step, x, targets).result.loss for _ in range(steps)]
        spent = (cpu_seconds(pids) - before) / steps
        alone, right = single.run(_alone, mlp, x, targets, steps)[0]
        if losses != right:
            raise WrongAnswerError(f"{devices} stages lost {losses}, one process {right}")
        if number:
            seconds[OURS].append(spent)
            seconds[REFERENCE].append(alone)
    single.run(_forget)
    for system, figures in seconds.items():
        results.add(NAME, system, what, figures, devices=devices, nbytes=x.nbytes)


def _alone(device: VirtualDevice, mlp: MLP, x: Array, targets: Array, steps: int) -> tuple[float, list[float]]:
    """CPU seconds of a step in this process, and what the steps lost."""
    last: Training | None = device.state.get("last")
    losses = []
    start = time.process_time()
    for _ in range(steps):
        last = mlp.reference_step(x, targets, OPTIMIZER, previous=last, microbatches=MICROBATCHES)
        losses.append(last.loss)
    seconds = (time.process_time() - start) / steps
    device.state["last"] = last
    return seconds, losses


def _forget(device: VirtualDevice) -> None:
    device.state.clear()
