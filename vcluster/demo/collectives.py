"""The collectives demo: a collective is explained step by step and then executed on the cluster."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from parallelism.algorithms import Pairs, kind_of
from parallelism.algorithms.algorithms import algorithms
from parallelism.collectives import Explanation, explain
from parallelism.mesh import Mesh
from parallelism.operation import Device
from vcluster.demo.command_line import WrongWords, nearest
from vcluster.demo.screen import Screen


def prepare(arguments: argparse.Namespace) -> tuple[str, str, Pairs | None]:
    """The collective, its algorithm, and the pairs of a permute. Raises `WrongWords`. Starts nothing."""
    collective, size = arguments.collective, arguments.devices
    there_are = algorithms(collective, size)
    name = arguments.algorithm
    if name is None:
        name = "ring" if "ring" in there_are else there_are[-1]
    name = name.lower().replace("-", "_")
    if name not in there_are:
        reason = " (it needs a power of two)" if name in algorithms(collective, 1) else ""
        raise WrongWords(
            f"--algorithm: {collective} over {size} has no {arguments.algorithm!r}{reason}{nearest(name, there_are)}"
        )
    pairs = tuple((p, (p + 1) % size) for p in range(size)) if kind_of(collective).paired else None
    return collective, name, pairs


def inputs(collective: str, size: int) -> list[np.ndarray]:
    """An array for each device. The tens digit is the device, the units digit the position."""
    count = 2 if kind_of(collective).in_shards else size    # a result as long as all inputs together is kept short
    return [10 * rank + np.arange(count) for rank in range(size)]


def run_demo(arguments: argparse.Namespace) -> int:
    """Run the demo. Returns 0, or 1 if the cluster's results differ from the explanation."""
    collective, name, pairs = prepare(arguments)
    values = inputs(collective, arguments.devices)
    screen = Screen()
    explained = explain(collective, algorithm=name, inputs=values, pairs=pairs)
    screen.line(str(explained))

    from vcluster import PerDevice, VirtualCluster

    mesh = Mesh(devices=arguments.devices)
    with VirtualCluster(mesh, backend=arguments.backend) as cluster:
        run = cluster.run(_run, PerDevice(values), collective, name, pairs)
    word = "processes" if arguments.backend == "process" else "threads"
    screen.heading(f"The same on {mesh.size} {word}")
    return 0 if _show_verdict(screen, explained, run) else 1


def _run(device: Device, x: np.ndarray, collective: str, name: str, pairs: Pairs | None) -> Any:
    algorithm = None if name == "direct" else name
    return device.collective(collective, x, pairs=pairs, algorithm=algorithm)


def _show_verdict(screen: Screen, explained: Explanation, run: Any) -> bool:
    ranks = range(explained.algorithm.size)
    same = all(_equal(out, expected) for out, expected in zip(run.outputs, explained.results, strict=True))
    if kind_of(explained.algorithm.collective).moves:
        screen.verdict(same, f"every device's result {'equals' if same else 'does NOT equal'} the one above")
    for count, expected, subject in (
        (run.trace.bytes_received, explained.bytes_received, "bytes received"),
        (run.trace.messages, explained.algorithm.messages_sent(), "messages sent"),
    ):
        counts = tuple(map(count, ranks))
        agree = counts == expected
        screen.verdict(agree, f"{sum(counts)} {subject}, {'on each device as above' if agree else 'NOT as above'}")
        same = same and agree
    return same


def _equal(out: Any, expected: Any) -> bool:
    if expected is None or out is None:
        return out is expected
    if isinstance(expected, list):
        return len(out) == len(expected) and all(map(_equal, out, expected))
    return np.array_equal(out, expected) and np.asarray(out).dtype == np.asarray(expected).dtype
