"""A training run on real processes, compared with its simulation and with one process."""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

import numpy as np

from parallelism import ir
from parallelism.display import WIDTH
from parallelism.display.quantities import seconds
from parallelism.dtypes import is_floating, limits_of
from parallelism.hardware import Hardware
from parallelism.ir import Function
from parallelism.simulation import simulate
from parallelism.trace import HOST, Trace, UndeclaredComputeWarning
from parallelism.training import TrainingRun
from parallelism.training.training_run import ROWS
from parallelism.transforms import Parts, first_state
from parallelism.transforms.training import given_weights
from vcluster.runs.cluster import VirtualCluster

TOLERANCES = {2: 1e-2, 4: 1e-4, 8: 1e-10}
"""How far numbers may always be apart, as a part of the largest, by the bytes of the narrowest float."""


@dataclass(frozen=True)
class Verified:
    """A step as it ran on real processes, beside its simulation."""

    run: TrainingRun
    apart: float
    """The largest difference to one process, as a part of the largest number of its output."""
    limit: float
    """How large the difference may be: see `verified`."""
    differences: tuple[str, ...]
    """What is not equal."""
    seconds: float
    """The virtual seconds of the step in the run."""
    received_bytes: int
    """The bytes that all devices received together."""

    def json(self) -> dict[str, Any]:
        """The fields as values that JSON knows."""
        return {
            "mesh": dict(self.run.mesh.shape),
            "strategy": str(self.run.strategy),
            "apart": self.apart,
            "limit": self.limit,
            "differences": list(self.differences),
            "seconds": self.seconds,
            "received_bytes": self.received_bytes,
        }


def verified(run: TrainingRun, hardware: Hardware, *, backend: str = "process") -> Verified:
    """One step of a small run on the devices of this machine, by the prices of a hardware.

    Compared are the outputs with those of one process; with the simulation the virtual time, the memory of each device
    at its peak, and the collectives and messages of each device: kinds and bytes.

    Devices add in another order than one process, so their numbers are rounded differently.  They may differ by one of
    `TOLERANCES`.  If they differ by more, one process computes the step again, with each weight changed by one unit in
    its last place: they may differ by as much as this changes its numbers.  Weights in 8 bits, and their scales, are not
    compared: where a shard has a scale of its own they are other numbers that stand for the same weight.
    """
    step: Any = run.step
    function: Function = step if run.pipeline is None else step.function.specialize(**{ROWS: run.batch})
    inputs = _inputs(function)
    with np.errstate(all="ignore"):
        expected = ir.interpret(function, inputs).outputs
    with VirtualCluster(run.mesh, backend=backend, hardware=hardware, compute="modelled") as cluster:
        done = cluster.run(step, [inputs[value.name] for value in function.inputs])
        with warnings.catch_warnings(action="ignore", category=UndeclaredComputeWarning):
            trace = done.trace
    predicted = simulate(step, hardware, **run.placed)
    apart = _furthest(function, done.result, expected)
    narrowest = min(value.type.dtype.itemsize for value in function.inputs if is_floating(value.type.dtype))
    limit = TOLERANCES.get(narrowest, 1e-1)
    if apart > limit:
        limit = max(limit, _sensitivity(function, inputs, expected))
    differences = [] if apart <= limit else ["numbers"]
    if trace.makespan_seconds != predicted.makespan_seconds:
        differences.append("time")
    if trace.peaks() != predicted.peaks():
        differences.append("memory")
    if _traffic(trace) != _traffic(predicted):
        differences.append("communication")
    return Verified(run, apart, limit, tuple(differences), trace.makespan_seconds, trace.bytes_received())


def verified_text(found: Mapping[str, Any]) -> str:
    """What was compared, in 80 columns."""
    devices = int(np.prod(list(found["mesh"].values())))
    axes = ", ".join(f"{axis}={size}" for axis, size in found["mesh"].items())
    text = (
        f"{'NOT verified' if found['differences'] else 'Verified'}: a small model ran under the first plan on "
        f"{devices} process{'es' * (devices > 1)} ({axes}). "
        f"Its numbers differ from those of one process by {found['apart']:.1g} of the largest"
    )
    text += f"; rounding explains {found['limit']:.1g}. " if "limit" in found else ". "
    if list(found["differences"]) == ["numbers"]:
        text += "The virtual time, the memory and the communication are those of the simulation."
    elif found["differences"]:
        text += f"The run differs from its simulation in {' and '.join(found['differences'])}."
    else:
        text += (
            f"The virtual time of {seconds(found['seconds'])}, the memory of each device, and the "
            f"{found['received_bytes']} bytes of all collectives and messages are those of the simulation."
        )
    return "\n".join(wrap(text, WIDTH))


def _inputs(function: Function) -> dict[str, Any]:
    """Random parameters around the usual sizes, the first state of the optimizer, and tokens."""
    rng = np.random.default_rng(0)
    parts = Parts.of(function)
    weights = {
        value.name: rng.normal(0, 0.1, value.type.shape) + ("norm" in value.name and value.type.ndim == 1)
        for value in given_weights(function)
    }
    given: dict[str, Any] = first_state(function, weights)
    least = min(
        (int(value.type.shape[0]) for value in parts.weights if value.name.endswith("tokens")), default=2
    )
    for value in function.inputs:
        if value.name not in given:
            given[value.name] = rng.integers(0, least, value.type.shape).astype(value.type.dtype)
    return given


def _sensitivity(function: Function, inputs: Mapping[str, Any], expected: Sequence[Any]) -> float:
    """How far the outputs of one process move if each weight changes by one unit in its last place, up or down."""
    rng = np.random.default_rng(1)
    moved, parts = dict(inputs), Parts.of(function)
    for value in (*parts.weights, *parts.copies):
        dtype = value.type.dtype
        if not is_floating(dtype):
            continue
        unit, most = float(limits_of(dtype).eps), float(limits_of(dtype).max)
        weight = inputs[value.name].astype(np.float64)
        near = weight * (1 + unit * rng.choice([-1, 1], weight.shape))
        moved[value.name] = np.clip(near, -most, most).astype(
            dtype
        )  # of 8 bits the largest weight is the largest number
    with np.errstate(all="ignore"):
        outputs = ir.interpret(function, moved).outputs
    return _furthest(function, outputs, expected)


def _furthest(function: Function, found: Sequence[Any], expected: Sequence[Any]) -> float:
    """The largest `_apart` of the outputs that are no weights in 8 bits."""
    quantized = {value for op in function.ops if op.kind == "quantize" for value in op.outputs}
    outputs = zip(function.outputs, found, expected, strict=True)
    return max(_apart(np.asarray(a), np.asarray(b)) for value, a, b in outputs if value not in quantized)


def _apart(a: Any, b: Any) -> float:
    x, y = a.astype(np.float64), b.astype(np.float64)
    return float(np.abs(x - y).max(initial=0) / max(np.abs(y).max(initial=0), 1e-300))


def _traffic(trace: Trace) -> Counter[Any]:
    """How often each device moved so many bytes, by the kind of operation."""
    columns = trace.columns
    columns = columns.take(columns.isin("kind", {"collective", "send", "recv"}) & ~columns.present("parent"))
    host = columns.isin("peer", {HOST})
    columns = columns.take(~host)
    return Counter(
        zip(
            columns.values("rank"),
            columns.values("name"),
            columns.values("axes"),
            columns.values("bytes_received"),
            columns.values("bytes_sent"),
            strict=True,
        )
    )
