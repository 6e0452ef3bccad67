"""A system that can be timed, vcluster as one of them, and the loop that lets them take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from benchmarks.cases import (
    COPY,
    STREAM_MESSAGES,
    Array,
    Case,
    Times,
    Trial,
    WrongAnswerError,
    receive_stream,
    seconds_from_first_start,
    seconds_in_a_loop,
    seconds_of,
    timed_rounds,
)
from benchmarks.plan import Plan
from benchmarks.results import Results
from benchmarks.tables import nbytes_text
from vcluster.code import DeviceFailedError
from vcluster.device import VirtualDevice
from vcluster.runs import VirtualCluster

Say = Callable[[str], None]
"""Tells what is being done just now."""

OURS = "vcluster"
LOOP_ROUNDS = 20
"""Calls of a loop for each round of a case."""


class SystemFailedError(Exception):
    """A system cannot be measured (any more); the text is one line."""


class System(Protocol):
    """Devices that stand ready to run cases.  Between calls they sleep, so that others can be timed."""

    name: str
    devices: int

    def supports(self, case: Case) -> bool:
        """Whether it can run this case at all."""

    def rounds(self, case: Case, count: int) -> list[Times]:
        """Start and end of ``count`` rounds, by rank.  Raises `SystemFailedError` or `WrongAnswerError`."""

    def close(self) -> None:
        """End it."""


class OurCluster:
    """vcluster with its defaults: processes, shared memory, with supervision, checks and tracing."""

    name = OURS

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self._cluster = VirtualCluster(devices)

    def supports(self, case: Case) -> bool:
        return case.operation != COPY

    def rounds(self, case: Case, count: int) -> list[Times]:
        try:
            return self._cluster.run(run_case, case, count).outputs
        except DeviceFailedError as error:
            if isinstance(error.__cause__, WrongAnswerError):
                raise WrongAnswerError(str(error.__cause__)) from None
            raise

    def close(self) -> None:
        self._cluster.close()


def run_case(device: VirtualDevice, case: Case, count: int, **options: Any) -> Times:
    """The kernel: ``count`` rounds on one device; ``options`` are those of every collective."""

    def empty(elements: int) -> Array:
        array: Array = device.empty(elements, np.float32)
        return array

    trial = Trial(case, device.rank, device.size, empty if case.memory == "shared" else None)
    return timed_rounds(trial, count, device.barrier, _call(device, trial, options))


def _call(device: VirtualDevice, trial: Trial, options: dict[str, Any]) -> Callable[[], Any]:
    x = trial.x
    out = None if trial.case.fresh else trial.out
    if trial.case.operation == "round_trip":
        return _round_trip(device, x)
    if trial.case.operation == "stream":
        return _stream(device, x)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: device.all_reduce(x, out=out, **options),
        "all_gather": lambda: device.all_gather(x, out=out, **options),
        "reduce_scatter": lambda: device.reduce_scatter(x, out=out, **options),
        "all_to_all": lambda: device.all_to_all(x, out=out, **options),
        "broadcast": lambda: device.broadcast(x if device.rank == 0 else None, out=out, **options),
        "barrier": lambda: device.barrier(**options),
    }
    return calls[trial.case.operation]


def _round_trip(device: VirtualDevice, x: Array) -> Callable[[], Any]:
    def first() -> Any:
        device.send(x, 1)
        return device.recv(1)

    def second() -> None:
        device.send(device.recv(0), 0)

    return first if device.rank == 0 else second if device.rank == 1 else lambda: None


def _stream(device: VirtualDevice, x: Array) -> Callable[[], Any]:
    if device.rank > 1:
        return lambda: None
    channel = device.channel(1 - device.rank)

    def send() -> None:
        for _ in range(STREAM_MESSAGES):
            channel.send(x)

    return send if device.rank == 0 else lambda: receive_stream(channel.recv)


def take_turns(
    suite: str, systems: Sequence[System], cases: Iterable[Case], plan: Plan, results: Results, say: Say
) -> None:
    """Time ``cases`` on ``systems`` of one size, pass after pass, each case on all systems in turn.

    A system that fails is noted as skipped, and left out from there on; what it had measured stays.
    """
    figures: dict[tuple[str, Case], tuple[list[float], list[float]]] = {}
    todo = list(cases)
    alive = list(systems)
    for number in range(plan.passes):
        for case in todo:
            for system in list(alive):
                if not system.supports(case):
                    continue
                say(
                    f"{suite}: pass {number + 1}/{plan.passes}, {system.devices} devices, "
                    f"{case.operation} {nbytes_text(case.nbytes)}, {system.name}"
                )
                try:
                    times = system.rounds(case, plan.rounds(case.nbytes) * (LOOP_ROUNDS if case.in_a_loop else 1))
                except SystemFailedError as error:
                    results.skipped[f"{system.name} on {system.devices}"] = str(error)
                    alive.remove(system)
                    continue
                plain, upper = figures.setdefault((system.name, case), ([], []))
                plain.extend(seconds_in_a_loop(times) if case.in_a_loop else seconds_of(case.operation, times))
                upper.extend(seconds_from_first_start(case.operation, times))
    for (name, case), (plain, upper) in figures.items():
        results.add(
            suite, name, case.operation, plain, devices=systems[0].devices, nbytes=case.nbytes, memory=case.memory,
            fresh=case.fresh, from_first_start=upper,
        )
