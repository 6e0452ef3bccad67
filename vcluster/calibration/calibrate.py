"""Calibration: this machine is measured through the tracer and described as a `Hardware`, with the sources of its
numbers.

    python -m vcluster calibrate                defines what hardware="host" means from now on
    python -m vcluster calibrate --check        prints the prediction errors; writes nothing

The model is that of `parallelism.cost`, with one level of links: the memory that the devices share. All parameters are
fitted, by wall time, to every second case of `vcluster.calibration.cases`. The other cases are held out and measure how
accurate the predictions are. In programs such as these, the Python code around a piece of compute counts as its launch.
"""

import os
import platform
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from os import PathLike
from statistics import median
from typing import NamedTuple, Self

import numpy as np
import psutil

from parallelism.arrays import Floats
from parallelism.display import progress
from parallelism.hardware import CALIBRATED, Hardware, HostLink, Link, Piece
from vcluster.calibration.cases import (
    COLLECTIVE_NAMES,
    COLLECTIVES,
    COPIES,
    DTYPES,
    MESSAGES,
    PIPELINES,
    POLICIES,
    PRODUCTS,
    STREAMS,
    Case,
    measured,
)
from vcluster.calibration.fitting import fitted
from vcluster.collectives import INLINE_BYTES, PRIVATE_BYTES
from vcluster.mpi.group import POSTED_BYTES
from vcluster.mpi.transport import SMALL_BYTES

PREDICTED = (MESSAGES, STREAMS, COLLECTIVES, POLICIES, PIPELINES)
"""The families whose prediction errors are reported. Products and copies serve only the fit."""
TURNS = (INLINE_BYTES + 1, PRIVATE_BYTES)
"""Sizes in bytes from which an array is transferred in a different way."""
MPI_TURNS = (POSTED_BYTES + 1, SMALL_BYTES + 1)
"""The same over MPI."""
_ROUNDS = 15


class Medium(NamedTuple):
    """What joins the devices that are measured."""

    name: str
    backend: str = "process"
    turns: tuple[int, int] = TURNS
    title: str = "this machine, as it was measured"


SHARED_MEMORY = Medium("shared memory")


def over_mpi(nodes: int) -> Medium:
    """The ranks of an MPI job on so many nodes."""
    name = "MPI inside a node" if nodes == 1 else "MPI between nodes"
    return Medium(
        name, "mpi", MPI_TURNS, f"ranks of an MPI job on {nodes} node{'s' * (nodes > 1)}, as measured"
    )


@dataclass(frozen=True)
class Spread:
    """The distribution of relative errors, without their signs."""

    cases: int
    median: float
    quartiles: tuple[float, float]
    largest: float

    @classmethod
    def of(cls, errors: Iterable[float]) -> Self:
        """The spread of ``errors``, of which there is at least one."""
        sizes = np.abs(list(errors))
        low, middle, high = np.quantile(sizes, (0.25, 0.5, 0.75)).tolist()
        return cls(len(sizes), middle, (low, high), float(sizes.max()))


@dataclass(frozen=True)
class Calibration:
    """A measured machine, and the cases that tell how well the model predicts what it was not fitted to."""

    hardware: Hardware
    fitted_to: tuple[Case, ...]
    held_out: tuple[Case, ...]

    def errors(self, family: str | None = None) -> tuple[float, ...]:
        """Predicted divided by measured seconds, minus 1, for each held out case: virtual against wall time."""
        families = PREDICTED if family is None else (family,)
        return tuple(case.error(self.hardware) for case in self.held_out if case.family in families)

    def rounds_apart(self, family: str | None = None) -> tuple[float, ...]:
        """How far two rounds of each held out case are apart, relative to its seconds: the noise of the machine."""
        families = PREDICTED if family is None else (family,)
        return tuple(case.apart for case in self.held_out if case.family in families)

    def __str__(self) -> str:
        title = f"{'virtual against wall time':26}  cases  median  middle half      largest  rounds"
        lines = [str(self.hardware), "", title]
        for family in (*PREDICTED, None):
            if errors := self.errors(family):
                spread = Spread.of(errors)
                half = "{:5.1%} to {:5.1%}".format(*spread.quartiles)
                lines.append(
                    f"  {family or 'all':24}  {spread.cases:5}  {spread.median:6.1%}  {half}  "
                    f"{spread.largest:7.1%}  {median(self.rounds_apart(family)):6.1%}"
                )
        return "\n".join(
            [
                *lines,
                "",
                *textwrap.wrap(
                    "rounds: how far two measurements of the same case are apart, in the median. Where that is much, the "
                    "machine is not quiet, and no model can be nearer.",
                    80,
                ),
            ]
        )


def calibrated(cases: Sequence[Case], devices: int, medium: Medium = SHARED_MEMORY) -> Calibration:
    """The hardware that fits every second case. ``ValueError`` if there are fewer than two cases of one name."""
    for family, name in dict.fromkeys((case.family, case.name) for case in cases):
        if len({case.held_out for case in cases if (case.family, case.name) == (family, name)}) < 2:
            raise ValueError(f"calibration needs at least 2 cases of each kind; got 1 of {family}, {name}")
    fitted_to = tuple(case for case in cases if not case.held_out)
    held_out = tuple(case for case in cases if case.held_out)
    hardware = Hardware(
        CALIBRATED,
        dict.fromkeys(DTYPES, 1e10),
        psutil.virtual_memory().total / devices,
        1e10,
        (Link(medium.name, devices, 1e-5, 1e9, "memory"),),
        HostLink(1e-5, 1e9),
        memory_overlap=0.0,
        title=medium.title,
    )
    hardware = _nearest(hardware, fitted_to, (PRODUCTS, COPIES), _with_rates, (5e-6, 3e10, 1.5e10, 8e9))
    copies, transfers = hardware.memory_bytes_per_second, (1e-5, 5e9, 5e-5, 1e10, 1e-4, 1e10)
    # Of one message alone nobody can tell what holds its ends from what it takes on its way; of several, one can.
    hardware = _nearest(
        hardware,
        fitted_to,
        (MESSAGES, STREAMS),
        partial(_with_messages, medium.turns),
        (5e-6, 5e-11, *transfers),
    )
    hardware = _nearest(
        hardware,
        fitted_to,
        (COLLECTIVES,),
        partial(_with_collectives, medium.turns),
        (*transfers, *(2e10 for _ in COLLECTIVE_NAMES)),
    )
    hardware = _nearest(hardware, fitted_to, (POLICIES, PIPELINES), _with_programs, (3e-5, 8e9, 1.0))
    return _with_sources(Calibration(hardware, fitted_to, held_out), copies)


def _with_rates(hardware: Hardware, parameters: Floats) -> Hardware:
    launch, single, double, bandwidth = parameters.tolist()
    return replace(
        hardware,
        kernel_launch_seconds=launch,
        flops_per_second=dict(zip(DTYPES, (single, double), strict=True)),
        memory_bytes_per_second=bandwidth,
    )


def _with_messages(turns: tuple[int, int], hardware: Hardware, parameters: Floats) -> Hardware:
    (link,) = hardware.links
    overhead, per_byte, latency, bandwidth, *values = parameters.tolist()
    link = replace(link, latency_seconds=latency, bytes_per_second=bandwidth, pieces=_pieces(turns, values))
    return replace(
        hardware,
        links=(link,),
        host=HostLink(latency, bandwidth),
        message_overhead_seconds=overhead,
        message_overhead_seconds_per_byte=per_byte,
    )


def _with_collectives(turns: tuple[int, int], hardware: Hardware, parameters: Floats) -> Hardware:
    (link,) = hardware.links
    values = parameters.tolist()
    rates = dict(zip(COLLECTIVE_NAMES, values[-len(COLLECTIVE_NAMES) :], strict=True))
    link = replace(link, collective_pieces=_pieces((1, *turns), values))
    return replace(hardware, links=(link,), collective_bytes_per_second=rates)


def _with_programs(hardware: Hardware, parameters: Floats) -> Hardware:
    launch, bandwidth, apart = parameters.tolist()
    return replace(
        hardware,
        kernel_launch_seconds=launch,
        memory_bytes_per_second=bandwidth,
        memory_overlap=1 / (1 + apart),
    )


def _pieces(turns: Sequence[int], values: Sequence[float]) -> tuple[Piece, ...]:
    return tuple(Piece(turn, *values[2 * i : 2 * i + 2]) for i, turn in enumerate(turns))


def _nearest(
    hardware: Hardware,
    cases: Sequence[Case],
    families: Sequence[str],
    changed: Callable[[Hardware, Floats], Hardware],
    start: Sequence[float],
) -> Hardware:
    """The hardware, changed by the parameters that fit the cases of some families."""
    cases = [case for case in cases if case.family in families]

    def predict(parameters: Floats) -> list[float]:
        trial = changed(hardware, parameters)
        return [case.predicted(trial) for case in cases]

    return changed(hardware, fitted(predict, [case.seconds for case in cases], start, _ROUNDS))


def _with_sources(calibration: Calibration, copied_per_second: float) -> Calibration:
    """The calibration with the sources of its hardware's numbers."""
    errors = [abs(error) for error in calibration.errors()]
    fit = (
        f"fitted to {len(calibration.fitted_to)} cases by python -m vcluster calibrate, "
        f"{datetime.now(UTC):%Y-%m-%d}, on {platform.machine()} with {os.cpu_count()} cores, {platform.system()}, "
        f"NumPy {np.__version__}; virtual against wall time: median error {median(errors):.1%} of {len(errors)} "
        f"cases held out"
    )
    programs = (
        f"{fit}; includes the Python code around compute, and memory traffic that programs do not declare"
    )
    sources = {
        **dict.fromkeys(
            (
                "flops_per_second",
                "links",
                "collective_bytes_per_second",
                "message_overhead_seconds",
                "message_overhead_seconds_per_byte",
            ),
            fit,
        ),
        **dict.fromkeys(("kernel_launch_seconds", "memory_overlap"), programs),
        "memory_bytes_per_second": f"{programs}; a copy alone reaches {copied_per_second:.3g} bytes per second",
        "memory_bytes": "the memory of the system, in equal parts",
        "host": "the same as a message between devices",
    }
    return replace(calibration, hardware=replace(calibration.hardware, sources=sources))


def calibrate(
    devices: int, path: str | PathLike[str] | None = None, medium: Medium = SHARED_MEMORY
) -> Calibration:
    """Measure ``devices`` devices and what joins them, and write the hardware to ``path`` if one is given."""
    with progress("measuring") as told:
        cases = measured(devices, backend=medium.backend, told=told)
    with progress("fitting", alone=True):
        calibration = calibrated(cases, devices, medium)
    if path is not None:
        calibration.hardware.save(path)
    return calibration
