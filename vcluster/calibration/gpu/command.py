"""`calibrate --gpu` on the command line: PyTorch is looked for, and what is found is told."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vcluster.calibration.gpu.calibration import calibrate, tables_beside
from vcluster.calibration.gpu.items import COLLECTIVES, Item, items
from vcluster.calibration.gpu.measuring import of_tables
from vcluster.calibration.gpu.models import Model
from vcluster.calibration.gpu.through_torch import group
from vcluster.calibration.gpu.through_torch.device import Device
from vcluster.calibration.gpu.through_torch.machine import described
from vcluster.calibration.gpu.through_torch.steps import measured_step
from vcluster.calibration.gpu.through_torch.torch_found import torch_on

INTERRUPTED = 130
"""The exit status after an interrupt, as a shell has it."""


class TorchBench:
    """Measures through PyTorch."""

    def __init__(self, torch: Any, device: str, *, quick: bool) -> None:
        self.torch, self.name = torch, device
        self.device = Device(torch, device, quick=quick)

    def machine(self) -> dict[str, Any]:
        """What is measured, in words."""
        return {**described(self.torch, self.name), "empty_seconds": self.device.clock.empty_seconds}

    def measure(self, item: Item) -> Mapping[str, Any]:
        """The figures of an item."""
        return self.device.measure(item)

    def step(self, model: Model, steps: int) -> Mapping[str, Any]:
        """The seconds of a step of training, and its kernels."""
        try:
            return measured_step(self.device.clock, model, steps)
        finally:
            self.device.tidy()


def run(device: str, output: Path, *, seconds: float, quick: bool) -> int:
    """Measures and prints.  Returns the exit status: 1 without a stack, 130 after an interrupt.

    `NoTorchError` without PyTorch or without such a device.
    """
    torch = torch_on(device)
    devices = group.job_size()
    if devices > 1:
        device = group.join(torch, device)
    bench = TorchBench(torch, device, quick=quick)
    try:
        if group.rank():
            return _other(bench, quick, devices)
        return _first_of_job(bench, output, seconds, quick, devices)
    finally:
        if devices > 1:
            with suppress(RuntimeError):
                group.leave(torch)


def _other(bench: TorchBench, quick: bool, devices: int) -> int:
    """The part of the other processes of a job: the collectives."""
    for item in of_tables(items(quick=quick, devices=devices), COLLECTIVES):
        with suppress(Exception):
            bench.measure(item)
    return 0


def _first_of_job(bench: TorchBench, output: Path, seconds: float, quick: bool, devices: int) -> int:
    found = calibrate(
        bench,
        output,
        seconds=seconds,
        quick=quick,
        devices=devices,
        say=lambda words: print(words, flush=True),
    )
    if missing := found.tables.missing():
        print(f"not measured: {len(missing)} items, each with its reason in the tables")
    if found.found is None:
        print(f"the tables are in {tables_beside(output)}")
        return INTERRUPTED if found.tables.interrupted else 1
    print(
        f"written to {output}, its tables to {tables_beside(output)}: "
        f"--hardware {found.found.preset}+{output}"
    )
    return INTERRUPTED if found.tables.interrupted else 0
