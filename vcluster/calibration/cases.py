"""The cases of a calibration: small programs, repeated many times, and the wall time of one repetition of each.

A case is the record of one repetition, the one with the median wall time. Barriers separate the repetitions. The time
of a repetition runs from when the last device leaves the barrier before it to when the last device reaches the barrier
after it. To predict the time on a hardware, the record is priced there: `parallelism.trace.Trace.on`, ``modelled``.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from statistics import fmean, median
from typing import Any
from unittest.mock import patch

import numpy as np

from parallelism.algorithms import kind_of
from parallelism.arrays import Array, Ints
from parallelism.display import Told
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
    "products",
    "copies",
    "messages",
    "streams of messages",
    "collectives",
    "matmul policies",
    "pipelined MLP",
)
COLLECTIVE_NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
DTYPES = ("float32", "float64")
STREAM = 8
"""Number of messages in a stream. They are sent one after another in one direction."""
LAYOUTS: dict[MatMulShardingPolicy, tuple[tuple[str | None, str | None], ...]] = {
    MatMulShardingPolicy.UNSHARDED: ((None, None), (None, None), (None, None)),
    MatMulShardingPolicy.MATCHED_INNER: ((None, "x"), ("x", None), (None, None)),
    MatMulShardingPolicy.UNMATCHED_INNER: ((None, "x"), ("y", None), (None, None)),
    MatMulShardingPolicy.OUTER: (("x", "y"), ("x", None), ("x", None)),
    MatMulShardingPolicy.FULL: (("x", "y"), ("x", "y"), ("x", "y")),
}
"""The layouts of A, B and C, on a mesh of x by y."""
SCHEDULES = {"gpipe": 1, "1f1b": 1, "zero_bubble_h1": 1, "interleaved_1f1b": 2}
"""Schedules, with the number of chunks on each device."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of the cases: widths of matrices, bytes moved, numbers of microbatches and rows."""

    products: Sequence[int] = (48, 64, 96, 128, 192, 256, 384, 512, 768)
    copies: Sequence[int] = tuple(1 << k for k in range(12, 26))
    moved: Sequence[int] = tuple(1 << k for k in range(6, 25))
    policies: Sequence[int] = (64, 96, 128, 192, 256, 384, 512, 768)
    microbatches: Sequence[int] = (2, 4, 8)
    widths: Sequence[int] = (32, 64, 128, 256)
    rows: Sequence[int] = (128, 512)
    repeats: int = 40
    rounds: int = 3
    """Number of rounds. Each uses new devices."""


@dataclass(frozen=True)
class Case:
    """One measured program of one size."""

    family: str
    """One of `FAMILIES`."""
    name: str
    """The program, with its dtype. Cases of one name differ in size."""
    size: str
    place: tuple[int, ...]
    """The index of the size, one for each quantity that varies."""
    seconds: float
    """Wall seconds of one repetition."""
    trace: Trace
    """The trace of that repetition."""
    apart: float = 0.0
    """How far the medians of two rounds are apart, relative to ``seconds``; the mean over all pairs of rounds."""

    @property
    def held_out(self) -> bool:
        """Whether the case is held out of the fit. Every second case is."""
        return sum(self.place) % 2 == 1

    def predicted(self, hardware: Hardware) -> float:
        """Predicted virtual seconds on a hardware."""
        with warnings.catch_warnings(action="ignore", category=UndeclaredComputeWarning):
            return self.trace.on(hardware, compute="modelled").makespan_seconds

    def error(self, hardware: Hardware) -> float:
        """The relative error of the prediction."""
        return self.predicted(hardware) / self.seconds - 1


def measured(
    devices: int, sizes: Sizes | None = None, backend: str = "process", told: Told | None = None
) -> list[Case]:
    """Every case, measured on ``devices`` devices (at least 2).  ``told`` is called after each run."""
    sizes, rounds = sizes or Sizes(), list[list[_Run]]()
    with patch.dict(os.environ, {VARIABLE: ""}):  # an earlier calibration may be invalid
        for number in range(1, sizes.rounds + 1):
            runs: list[_Run] = []
            for run in _runs(devices, sizes, backend):
                runs.append(run)
                if told is not None:  # the first round tells how many runs there are in each
                    told(
                        f"round {number} of {sizes.rounds}: {run[0]}",
                        len(runs),
                        len(rounds[0]) if rounds else 0,
                    )
            rounds.append(runs)
    cases = []
    for alike in zip(*rounds, strict=True):
        (family, name, size, place, _), traces = alike[0], [run[-1] for run in alike]
        cases.append(Case(family, name, size, place, *middle(traces), rounds_apart(traces)))
    return cases


_Run = tuple[str, str, str, tuple[int, ...], Trace]


def _runs(devices: int, sizes: Sizes, backend: str) -> Iterator[_Run]:
    yield from _pieces(devices, sizes, backend)
    with VirtualCluster(x=devices, y=1, backend=backend) as cluster:
        for (policy, layouts), dtype in product(LAYOUTS.items(), DTYPES):
            multiply = MatMul(MatMulSharding(*(TensorSharding(*dims) for dims in layouts)), policy)
            for i, width in enumerate(sizes.policies):
                again = Again(multiply, _fewer(sizes.repeats, width**3 // 8))
                operand = np.ones((width, width), dtype)
                yield (
                    POLICIES,
                    f"{policy.value} {dtype}",
                    f"{width} wide",
                    (i,),
                    cluster.run(again, operand, operand).trace,
                )
    with VirtualCluster(pp=devices, backend=backend) as cluster:
        different = product(enumerate(sizes.microbatches), enumerate(sizes.widths), enumerate(sizes.rows))
        for (schedule, chunks), ((i, microbatches), (j, width), (k, rows)) in product(
            SCHEDULES.items(), different
        ):
            pipeline = Pipeline(
                stages=devices * chunks, microbatches=microbatches, schedule=schedule, chunks=chunks
            )
            step = MLP((width,) * (2 * devices + 1), pipeline).train_step(returns=())
            again = Again(step, max(3, sizes.repeats // 5))
            x = np.ones((rows, width))
            yield (
                PIPELINES,
                schedule,
                f"{microbatches} microbatches of {rows} rows, {width} wide",
                (i, j, k),
                cluster.run(again, x, x).trace,
            )


def _pieces(devices: int, sizes: Sizes, backend: str) -> Iterator[_Run]:
    """Single products, copies, messages and collectives.

    Each program runs on new devices. Otherwise memory freed by an earlier one would decide whether the C library maps
    new memory at every allocation.
    """
    works: list[tuple[str, str, Any, Sequence[int]]] = [
        *((PRODUCTS, dtype, _multiply, sizes.products) for dtype in DTYPES),
        (COPIES, "float64", _copy, sizes.copies),
        (MESSAGES, "there and back", partial(_on_array, _there_and_back), sizes.moved),
        (MESSAGES, "both ways", partial(_on_array, _both_ways), sizes.moved),
        (STREAMS, f"{STREAM} one way", partial(_on_array, _stream), sizes.moved),
        *((COLLECTIVES, name, partial(_collective, name), sizes.moved) for name in COLLECTIVE_NAMES),
    ]
    for family, name, work, different in works:
        dtype, unit = (name, "wide") if family == PRODUCTS else ("float64", "bytes")
        with VirtualCluster(devices, backend=backend) as cluster:
            for i, size in enumerate(different):
                times = _fewer(sizes.repeats, size**3 // 8 if family == PRODUCTS else size)
                yield (
                    family,
                    name,
                    f"{size} {unit}",
                    (i,),
                    cluster.run(_again, work, size, dtype, times).trace,
                )


def _fewer(repeats: int, nbytes: int) -> int:
    return max(min(repeats, 7), min(repeats, (1 << 26) // max(nbytes, 1)))


# -- the programs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Again(Operation):
    """An operation that is repeated, with barriers between the repetitions."""

    operation: Operation
    times: int

    def inputs(self, mesh: Mesh, *args: Any) -> list[tuple[Any, ...]]:
        """The inputs of the repeated operation."""
        return self.operation.inputs(mesh, *args)

    def __call__(self, device: Device, *inputs: Any) -> None:
        _parted(device, lambda: self.operation(device, *inputs), self.times)


def _again(
    device: Device, make: Callable[..., Callable[[], object]], size: int, dtype: str, times: int
) -> None:
    _parted(device, make(device, size, dtype), times)


def _parted(device: Device, work: Callable[[], object], times: int) -> None:
    for _ in range(times):
        device.barrier()
        result = work()
        del result
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


def _on_array(
    work: Callable[[Device, Array], object], device: Device, nbytes: int, dtype: str
) -> Callable[[], object]:
    return partial(work, device, np.ones(nbytes // 8, dtype))


def _there_and_back(device: Device, x: Array) -> None:
    if device.rank == 0:
        device.send(x, 1)
        device.recv(1)
    elif device.rank == 1:
        device.recv(0)
        device.send(x, 0)


def _both_ways(device: Device, x: Array) -> None:
    if device.rank < 2:
        device.send(x, 1 - device.rank)
        device.recv(1 - device.rank)


def _stream(device: Device, x: Array) -> None:
    for _ in range(STREAM if device.rank < 2 else 0):
        if device.rank == 0:
            device.send(x, 1)
        else:
            device.recv(0)


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
    """Wall seconds and trace of the repetition of median length. The first repetition of each trace is a warm-up."""
    repetitions = [
        (seconds, number, which)
        for number, trace in enumerate(traces)
        for which, seconds in enumerate(_repetitions(trace)[0])
        if which
    ]
    seconds, number, which = sorted(repetitions)[(len(repetitions) - 1) // 2]
    trace = traces[number]
    columns, (_, barriers) = trace.columns, _repetitions(trace)
    ranks = columns.numbers("rank")
    places = np.arange(len(columns))
    begin, end = np.array([at[which : which + 2] for at in barriers]).T[:, ranks]
    return seconds, Trace(
        columns.take((places > begin) & (places < end)), trace.size, mesh_shape=trace.mesh_shape
    )


def rounds_apart(traces: Sequence[Trace]) -> float:
    """The mean of the differences of two rounds' medians, relative to the median of these; 0 for one round."""
    medians = [median(_repetitions(trace)[0][1:]) for trace in traces]
    pairs = [abs(a - b) for a, b in combinations(medians, 2)]
    return fmean(pairs) / median(medians) if pairs else 0.0


def _repetitions(trace: Trace) -> tuple[list[float], list[Ints]]:
    """Wall seconds of each repetition, and for each rank the indices of its barriers."""
    columns = trace.columns
    is_barrier = columns.isin("name", {"barrier"}) & ~columns.present("parent")
    ranks, begin = columns.numbers("rank"), columns.numbers("wall_start_seconds")
    end = begin + columns.numbers("wall_duration_seconds")
    barriers = [np.flatnonzero(is_barrier & (ranks == rank)) for rank in range(trace.size)]
    come = np.array([begin[at] for at in barriers]).max(axis=0)
    left = np.array([end[at] for at in barriers]).max(axis=0)
    return (come[1:] - left[:-1]).tolist(), barriers
