"""The collectives demo: a collective is explained step by step and then executed on the cluster."""

import argparse
from typing import Any

import numpy as np

from parallelism.algorithms import Pairs, kind_of
from parallelism.algorithms.algorithms import algorithms
from parallelism.collectives import explain
from parallelism.mesh import Mesh
from parallelism.operation import Device
from vcluster.cli.command_line import WrongWords, nearest
from vcluster.code import PerDevice
from vcluster.demo.screen import Screen
from vcluster.demo.traffic import run_here


def prepare(arguments: argparse.Namespace) -> tuple[str, str, Pairs | None]:
    """The collective, its algorithm, and the pairs of a permute. Raises `WrongWords`. Starts nothing."""
    collective, size = arguments.collective, arguments.devices
    there_are = algorithms(collective, size)
    usual = "ring" if "ring" in there_are else there_are[-1]
    name = (usual if arguments.algorithm is None else arguments.algorithm).lower().replace("-", "_")
    if name not in there_are:
        reason = " (it needs a power of two)" if name in algorithms(collective, 1) else ""
        raise WrongWords(
            f"--algorithm: {collective} over {size} has no {arguments.algorithm!r}{reason}{nearest(name, there_are)}"
        )
    return (
        collective,
        name,
        tuple((p, (p + 1) % size) for p in range(size)) if kind_of(collective).paired else None,
    )


def inputs(collective: str, size: int) -> list[np.ndarray]:
    """An array for each device. The tens digit is the device, the units digit the position."""
    # The result of a collective in shards is as long as all inputs together; it is kept short.
    count = 2 if kind_of(collective).in_shards else size
    return [10 * rank + np.arange(count) for rank in range(size)]


def run_demo(arguments: argparse.Namespace, screen: Screen) -> None:
    """Run the demo. A verdict is bad if the cluster's results differ from the explanation."""
    collective, name, pairs = prepare(arguments)
    values = inputs(collective, arguments.devices)
    explained = explain(collective, algorithm=name, inputs=values, pairs=pairs)
    screen.line(str(explained))
    run = run_here(
        arguments, Mesh(devices=arguments.devices), _run, PerDevice(values), collective, name, pairs
    )
    screen.record = run.trace, None
    screen.heading(f"The same on {len(values)} {'processes' if arguments.backend != 'thread' else 'threads'}")
    same = all(_equal(out, expected) for out, expected in zip(run.outputs, explained.results, strict=True))
    if kind_of(collective).moves or not same:
        screen.verdict(same, f"every device's result {'equals' if same else 'does NOT equal'} the one above")
    for count, expected, subject in (
        (run.trace.bytes_received, explained.bytes_received, "bytes received"),
        (run.trace.messages, explained.algorithm.messages_sent(), "messages sent"),
    ):
        counts = tuple(map(count, range(len(values))))
        agree = counts == expected
        screen.verdict(
            agree, f"{sum(counts)} {subject}, {'on each device as above' if agree else 'NOT as above'}"
        )


def _run(device: Device, x: np.ndarray, collective: str, name: str, pairs: Pairs | None) -> Any:
    return device.collective(collective, x, pairs=pairs, algorithm=None if name == "direct" else name)


def _equal(out: Any, expected: Any) -> bool:
    if expected is None or out is None:
        return out is expected
    if isinstance(expected, list):
        return len(out) == len(expected) and all(map(_equal, out, expected))
    return np.array_equal(out, expected) and np.asarray(out).dtype == np.asarray(expected).dtype
