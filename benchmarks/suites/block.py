"""A block of a Transformer forward and backward: CPU time of all devices over that of one, by policy.

The one runs the same block unsharded.  The block and its weights stay on the devices from step to step.  What a policy
uses is the CPU time of its processes and of the host during its steps: waiting and spinning count, sleeping does not.
Attention is not causal, so that every policy computes all scores; dropout is left out.  What MEGATRON computes alike on
all devices (norms, residual additions) is counted as often as it is done.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.cases import Array, WrongAnswerError
from benchmarks.cpu import cpu_seconds
from benchmarks.plan import Plan
from benchmarks.results import Results
from benchmarks.systems import OURS, Say
from benchmarks.tables import seconds_text, table
from benchmarks.targets import BLOCK_OVERHEAD, against
from parallelism.mesh import Mesh
from tensor_parallelism import TransformerBlock, TransformerBlockPolicy, TransformerBlockSharding
from vcluster.code import Sharded
from vcluster.device import VirtualDevice
from vcluster.runs import VirtualCluster

NAME = "block"
TOKENS, WIDTH, HEADS = 512, 512, 8
REFERENCE = "one process"
SETTLE_SECONDS = 0.002
"""Who still goes to sleep from before does so now."""
SHARDINGS = {
    "megatron": TransformerBlockSharding.megatron(("cp", "tp")),
    "sequence": TransformerBlockSharding.sequence(("cp", "tp")),
    "ring": TransformerBlockSharding.ring(("cp", "tp")),
    "ulysses": TransformerBlockSharding.ulysses(("cp", "tp")),
    "megatron_ring": TransformerBlockSharding.megatron_ring("tp", "cp"),
}


def measure(plan: Plan, results: Results, say: Say) -> None:
    """Each policy and the one process take turns."""
    tokens, width, steps = (TOKENS // 8, WIDTH // 8, 1) if plan.quick else (TOKENS, WIDTH, 5)
    for devices in plan.devices_or((4,), (4,)):
        around = 2 if devices % 2 == 0 else 1
        with VirtualCluster(Mesh(cp=around, tp=devices // around)) as cluster, VirtualCluster(1) as single:
            for policy in SHARDINGS:
                say(f"{NAME}: {devices} devices, {policy}")
                _compare(cluster, single, policy, (tokens, width), steps, plan, results)


def report(results: Results) -> str:
    """A line for each policy: CPU time of forward and backward on both sides, and what the policy adds."""
    found = {(m.operation, m.devices, m.system): m.seconds for m in results.of(NAME)}
    rows = []
    for policy, devices in dict.fromkeys((policy, devices) for policy, devices, _ in found):
        ours, alone = found[policy, devices, OURS], found[policy, devices, REFERENCE]
        over = ours.median / alone.median - 1
        rows.append([
            policy, str(devices), seconds_text(ours.median), seconds_text(alone.median), f"{over:.1%}",
            against(BLOCK_OVERHEAD, over, f"{BLOCK_OVERHEAD:.0%}"),
        ])
    return table(("CPU time of a block", "devices", "sharded", REFERENCE, "more", "at most"), rows)


def _compare(
    cluster: VirtualCluster, single: VirtualCluster, policy: str, extents: tuple[int, int], steps: int, plan: Plan,
    results: Results,
) -> None:
    """Steps on the cluster and steps in one process, in turn; both must find the same."""
    sharded = TransformerBlock(SHARDINGS[policy], TransformerBlockPolicy(policy))
    whole = TransformerBlock(TransformerBlockSharding.unsharded())
    rng = np.random.default_rng(0)
    tokens, width = extents
    shapes = whole.shapes((1, tokens, width), HEADS).values()
    values = [(rng.standard_normal(shape) * width**-0.5).astype(np.float32) for shape in shapes]
    grad = rng.standard_normal((1, tokens, width), np.float32)
    found = [_dealt(where, block, [grad, *values]) for where, block in ((cluster, sharded), (single, whole))]
    for ours, right in zip(*found, strict=True):
        if not np.allclose(ours, right, rtol=1e-3, atol=1e-3 * float(np.abs(right).max())):
            raise WrongAnswerError(f"{policy} on {cluster.size} devices and one process differ")
    pids = {*cluster.pids(), os.getpid()}
    seconds: dict[str, list[float]] = {OURS: [], REFERENCE: []}
    for number in range(plan.passes + 1):
        time.sleep(SETTLE_SECONDS)
        before = cpu_seconds(pids)
        cluster.run(_steps, steps)
        spent = (cpu_seconds(pids) - before) / steps
        alone = single.run(_steps, steps)[0]
        if number:
            seconds[OURS].append(spent)
            seconds[REFERENCE].append(alone)
    for system, figures in seconds.items():
        results.add(NAME, system, policy, figures, devices=cluster.size, nbytes=grad.nbytes)
    for where in (cluster, single):
        where.run(_forget)


def _dealt(cluster: VirtualCluster, block: TransformerBlock, arrays: Sequence[Array]) -> list[Array]:
    """Shards of the gradient of y, x and the weights to where they stay; y and all gradients, whole."""
    layouts = [block.sharding.out, *(getattr(block.sharding, name) for name in block.NAMES)]
    run = cluster.run(_first, block, *(Sharded(x, layout) for x, layout in zip(arrays, layouts, strict=True)))
    return [layout.unshard([out[i] for out in run], cluster.mesh) for i, layout in enumerate(layouts)]


def _first(device: VirtualDevice, block: TransformerBlock, grad: Array, *shards: Array) -> tuple[Array, ...]:
    device.state["block"] = block, grad, shards
    return _step(device)


def _step(device: VirtualDevice) -> tuple[Array, ...]:
    block, grad, shards = device.state["block"]
    y, saved = block.forward(device, *shards)
    return y, *block.backward(device, saved, grad)


def _steps(device: VirtualDevice, steps: int) -> float:
    """CPU seconds of a step in this process."""
    start = time.process_time()
    for _ in range(steps):
        _step(device)
    return (time.process_time() - start) / steps


def _forget(device: VirtualDevice) -> None:
    device.state.clear()
