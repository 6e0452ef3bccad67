"""The suites by name: each measures one thing into `benchmarks.results.Results`, and reports what it finds there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.plan import Plan
from benchmarks.results import Results
from benchmarks.suites import (
    block,
    checks,
    cliffs,
    collectives,
    idle,
    limits,
    loops,
    messages,
    mpi,
    peers,
    planning,
    products,
    run,
    simulate,
    startup,
    step,
    tracing,
)
from benchmarks.systems import Say


@dataclass(frozen=True)
class Suite:
    """One suite."""

    title: str
    """What it is about, in a line."""
    measure: Callable[[Plan, Results, Say], None]
    report: Callable[[Results], str]


SUITES = {
    "startup": Suite("import, devices cold and warm, shutdown", startup.measure, startup.report),
    "run": Suite("an empty run, and runs with large arguments and results", run.measure, run.report),
    "collectives": Suite("each collective by size, devices and memory", collectives.measure, collectives.report),
    "loops": Suite("small collectives in plain loops, beside MPICH and gloo", loops.measure, loops.report),
    "cliffs": Suite("calls that could fall off the fast way, beside those that do not", cliffs.measure, cliffs.report),
    "messages": Suite("round trips, and a stream, beside multiprocessing.Queue", messages.measure, messages.report),
    "checks": Suite("what supervision, checks and tracing cost an operation", checks.measure, checks.report),
    "limits": Suite("how soon a mistake is told, and what is left behind", limits.measure, limits.report),
    "step": Suite("CPU time of a pipelined training step, beside one process", step.measure, step.report),
    "block": Suite("CPU time of a Transformer block by policy, beside one process", block.measure, block.report),
    "products": Suite("products of sharded matrices, beside JAX", products.measure, products.report),
    "idle": Suite("devices that wait or have nothing to do, and waking them", idle.measure, idle.report),
    "tracing": Suite("what an event costs, and a trace of a million", tracing.measure, tracing.report),
    "simulate": Suite("programs simulated, op by op and folded", simulate.measure, simulate.report),
    "plan": Suite("the best split of a training step found", planning.measure, planning.report),
    "mpi": Suite("collectives on the ranks of MPI, beside plain mpi4py", mpi.measure, mpi.report),
    "peers": Suite("the same work under MPICH, JAX and gloo, as ratios", peers.measure, peers.report),
}
"""In the order in which they run."""
