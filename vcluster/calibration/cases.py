"""What a machine is calibrated by: small programs, run again and again, and how long one run of each took by the wall.

A case is the record of one repetition, the one of the median wall time, of a program whose repetitions barriers part.
Its seconds are from when the last device left the barrier before until the last one came to the barrier behind.  What
the same takes on a hardware, tells the record itself, priced there: `parallelism.trace.Trace.on`, ``modelled``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from parallelism.collectives import kind_of
from parallelism.hardware import VARIABLE, Hardware
from parallelism.mesh import Mesh
from parallelism.operation import Device, Operation
from parallelism.pipelining import Pipeline
from parallelism.sharding import TensorSharding
from parallelism.trace import Trace, UndeclaredComputeWarning
from pipeline_parallelism.mlp import MLP
from tensor_parallelism.products import MatMul, MatMulSharding, MatMulShardingPolicy
from vcluster.runs import VirtualCluster

PRODUCTS, COPIES, MESSAGES, STREAMS, COLLECTIVES, POLICIES, PIPELINES = FAMILIES = (
    "products", "copies", "messages", "streams of messages", "collectives", "matmul policies", "pipelined MLP")
COLLECTIVE_NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
DTYPES = ("float32", "float64")
STREAM = 8
"""Messages one after the other, in one direction."""
LAYOUTS: dict[MatMulShardingPolicy, tuple[tuple[str | None, str | None], ...]] = {
    MatMulShardingPolicy.UNSHARDED: ((None, None), (None, None), (None, None)),
    MatMulShardingPolicy.MATCHED_INNER: ((None, "x"), ("x", None), (None, None)),
    MatMulShardingPolicy.UNMATCHED_INNER: ((None, "x"), ("y", None), (None, None)),
    MatMulShardingPolicy.OUTER: (("x", "y"), ("x", None), ("x", None)),
    MatMulShardingPolicy.FULL: (("x", "y"), ("x", "y"), ("x", "y")),
}
"""Of A, B and C, on a mesh of x by y."""
SCHEDULES = {"gpipe": 1, "1f1b": 1, "zero_bubble_h1": 1, "interleaved_1f1b": 2}
"""With the chunks on each device."""


@dataclass(frozen=True)
class Sizes:
    """How large the cases are."""

    products: Sequence[int] = (48, 64, 96, 128, 192, 256, 384, 512, 768)
    copies: Sequence[int] = tuple(1 << k for k in range(12, 26))
    moved: Sequence[int] = tuple(1 << k for k in range(6, 25))
    policies: Sequence[int] = (64, 96, 128, 192, 256, 384, 512, 768)
    microbatches: Sequence[int] = (2, 4, 8)
    widths: Sequence[int] = (32, 64, 128, 256)
    rows: Sequence[int] = (128, 512)
    repeats: int = 12
    rounds: int = 3
    """Each with fresh devices."""


@dataclass(frozen=True)
class Case:
    """One thing that was measured."""

    family: str
    """One of `FAMILIES`."""
    name: str
    """Which of them, with its dtype: what is of one name differs in size."""
    size: str
    place: tuple[int, ...]
    """Among those of its name, along each way in which they differ."""
    seconds: float
    """By the wall."""
    trace: Trace
    """Of one repetition."""

    @property
    def held_out(self) -> bool:
        """Whether nothing is fitted to it: every other one."""
        return sum(self.place) % 2 == 1

    def predicted(self, hardware: Hardware) -> float:
        """Virtual seconds on a hardware."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UndeclaredComputeWarning)
            return self.trace.on(hardware, compute="modelled").makespan_seconds

    def error(self, hardware: Hardware) -> float:
        """The relative error of what is predicted."""
        return self.predicted(hardware) / self.seconds - 1


def measured(devices: int, sizes: Sizes | None = None, backend: str = "process") -> list[Case]:
    """Every case on so many devices, at least 2."""
    sizes = sizes or Sizes()
    with _uncalibrated():
        rounds = [list(_runs(devices, sizes, backend)) for _ in range(sizes.rounds)]
    cases = []
    for runs in zip(*rounds, strict=True):
        family, name, size, place, _ = runs[0]
        cases.append(Case(family, name, size, place, *middle([run[-1] for run in runs])))
    return cases


@contextmanager
def _uncalibrated() -> Iterator[None]:
    """An earlier calibration, perhaps a broken one, is not in the way."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = ""
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


_Run = tuple[str, str, str, tuple[int, ...], Trace]


def _runs(devices: int, sizes: Sizes, backend: str) -> Iterator[_Run]:
    yield from _pieces(devices, sizes, backend)
    with VirtualCluster(x=devices, y=1, backend=backend) as cluster:
        for (policy, layouts), dtype in product(LAYOUTS.items(), DTYPES):
            multiply = MatMul(MatMulSharding(*(TensorSharding(*dims) for dims in layouts)), policy)
            for i, width in enumerate(sizes.policies):
                operand = np.ones((width, width), dtype)
                again = Again(multiply, _fewer(sizes.repeats, width**3 // 8))
                yield (POLICIES, f"{policy.value} {dtype}", f"{width} wide", (i,),
                       cluster.run(again, operand, operand).trace)
    with VirtualCluster(pp=devices, backend=backend) as cluster:
        different = product(enumerate(sizes.microbatches), enumerate(sizes.widths), enumerate(sizes.rows))
        for (schedule, chunks), ((i, microbatches), (j, width), (k, rows)) in product(SCHEDULES.items(), different):
            pipeline = Pipeline(stages=devices * chunks, microbatches=microbatches, schedule=schedule, chunks=chunks)
            step = MLP((width,) * (2 * devices + 1), pipeline).train_step(returns=())
            x = np.ones((rows, width))
            yield (PIPELINES, schedule, f"{microbatches} microbatches of {rows} rows, {width} wide", (i, j, k),
                   cluster.run(Again(step, max(3, sizes.repeats // 2)), x, x).trace)


def _pieces(devices: int, sizes: Sizes, backend: str) -> Iterator[_Run]:
    """Single products, copies, messages and collectives.

    Each on fresh devices: by what was freed before, the C library decides whether memory is new each time.
    """
    works: list[tuple[str, str, Any, Sequence[int]]] = [
        *((PRODUCTS, dtype, _multiply, sizes.products) for dtype in DTYPES),
        (COPIES, "float64", _copy, sizes.copies), (MESSAGES, "there and back", _there_and_back, sizes.moved),
        (MESSAGES, "both ways", _both_ways, sizes.moved), (STREAMS, f"{STREAM} one way", _stream, sizes.moved),
        *((COLLECTIVES, name, partial(_collective, name), sizes.moved) for name in COLLECTIVE_NAMES)]
    for family, name, work, different in works:
        dtype = name if family == PRODUCTS else "float64"
        with VirtualCluster(devices, backend=backend) as cluster:
            for i, size in enumerate(different):
                times = _fewer(sizes.repeats, size**3 // 8 if family == PRODUCTS else size)
                told = f"{size} wide" if family == PRODUCTS else f"{size} bytes"
                yield family, name, told, (i,), cluster.run(_again, work, size, dtype, times).trace


def _fewer(repeats: int, nbytes: int) -> int:
    return max(min(repeats, 7), min(repeats, (1 << 26) // max(nbytes, 1)))


# -- the programs ------------------------------------------------------------------------------------------------------

class Again(Operation):
    """An operation, again and again, with barriers between."""

    def __init__(self, operation: Operation, times: int) -> None:
        self.operation, self.times = operation, times

    def inputs(self, mesh: Mesh, *args: Any) -> list[tuple[Any, ...]]:
        """Those of the operation."""
        return self.operation.inputs(mesh, *args)

    def __call__(self, device: Device, *inputs: Any) -> None:
        _parted(device, lambda: self.operation(device, *inputs), self.times)


def _again(device: Device, make: Callable[..., Callable[[], object]], size: int, dtype: str, times: int) -> None:
    _parted(device, make(device, size, dtype), times)


def _parted(device: Device, work: Callable[[], object], times: int) -> None:
    for _ in range(times):
        device.barrier()
        made = work()
        del made
    device.barrier()


def _multiply(device: Device, width: int, dtype: str) -> Callable[[], object]:
    a = np.ones((width, width), dtype)
    return lambda: device.matmul(a, a)


def _copy(device: Device, nbytes: int, dtype: str) -> Callable[[], object]:
    x, y = np.ones(nbytes // 8, dtype), np.empty(nbytes // 8, dtype)

    def work() -> None:
        with device.compute("copy", nbytes=2 * nbytes):
            np.copyto(y, x)

    return work


def _there_and_back(device: Device, nbytes: int, dtype: str) -> Callable[[], object]:
    x = np.ones(nbytes // 8, dtype)

    def work() -> None:
        if device.rank == 0:
            device.send(x, 1)
            device.recv(1)
        elif device.rank == 1:
            device.recv(0)
            device.send(x, 0)

    return work


def _both_ways(device: Device, nbytes: int, dtype: str) -> Callable[[], object]:
    x = np.ones(nbytes // 8, dtype)

    def work() -> None:
        if device.rank < 2:
            device.send(x, 1 - device.rank)
            device.recv(1 - device.rank)

    return work


def _stream(device: Device, nbytes: int, dtype: str) -> Callable[[], object]:
    x = np.ones(nbytes // 8, dtype)

    def work() -> None:
        for _ in range(STREAM if device.rank < 2 else 0):
            if device.rank == 0:
                device.send(x, 1)
            else:
                device.recv(0)

    return work


def _collective(name: str, device: Device, nbytes: int, dtype: str) -> Callable[[], object]:
    kind = kind_of(name)
    x = np.ones(max(1, nbytes // 8 // (device.size if kind.in_shards else 1)), dtype)
    if kind.cuts:
        x = np.ones(-(-len(x) // device.size) * device.size, dtype)
    call = getattr(device, name)
    if kind.gives == "root":
        return lambda: call(x if device.rank == 0 else None, root=0)
    return lambda: call(x)


# -- the repetitions ---------------------------------------------------------------------------------------------------

def middle(traces: Sequence[Trace]) -> tuple[float, Trace]:
    """Seconds by the wall, and the record, of the repetition of median length; the first of each does not count."""
    found = [(seconds, number, which) for number, trace in enumerate(traces)
             for which, seconds in enumerate(_repetitions(trace)[0]) if which]
    seconds, number, which = sorted(found)[(len(found) - 1) // 2]
    trace = traces[number]
    columns, (_, barriers) = trace.columns, _repetitions(trace)
    ranks, places = columns.numbers("rank"), np.arange(len(columns))
    inside = np.zeros(len(columns), bool)
    for rank, at in enumerate(barriers):
        inside |= (ranks == rank) & (places > at[which]) & (places < at[which + 1])
    return seconds, Trace(columns.take(inside), trace.size, mesh_shape=trace.mesh_shape)


def _repetitions(trace: Trace) -> tuple[list[float], list[npt.NDArray[np.int64]]]:
    """How long each took by the wall; and by rank where the barriers are."""
    columns = trace.columns
    is_barrier = columns.isin("name", {"barrier"}) & ~columns.present("parent")
    ranks, begin = columns.numbers("rank"), columns.numbers("wall_start_seconds")
    end = begin + columns.numbers("wall_duration_seconds")
    barriers = [np.flatnonzero(is_barrier & (ranks == rank)) for rank in range(trace.size)]
    come, left = (np.array([times[at] for at in barriers]).max(axis=0) for times in (begin, end))
    return (come[1:] - left[:-1]).tolist(), barriers
