"""Steps run on devices with and without overlap: what both must agree on."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from simulated_runs import assert_simulated
from transformed import MODELS, trained

from parallelism import ir
from parallelism.simulation import simulate
from parallelism.simulation.folding import CannotFold
from parallelism.transforms import Strategy, train_step

ON = {"hardware": "dgx-h100", "priced_dtype": "bfloat16"}
B, = ir.symbols("B")


def run(cluster, step, like):
    """What two steps give, and the trace of the second."""
    traces = []

    def once(inputs):
        done = cluster.run(step, inputs)
        traces.append(done.trace)
        return done.result

    return trained(getattr(step, "function", step), once, like=like, steps=2), traces[-1]


def bits(results):
    losses, state = results
    return [np.asarray(x).tobytes() for x in losses], {name: np.asarray(x).tobytes() for name, x in state.items()}


def moved(trace):
    """Bytes by kind and axes of all collectives."""
    found = Counter()
    for event in trace:
        if event.kind == "collective":
            found[event.name, event.axes] += event.bytes_received
    return found


def check(cluster, model, rows, text, overlap, rule, clip=None):
    """The traces of the last step without and with overlap, which agree in every bit and byte; each is simulated."""
    strategy, mesh = Strategy.parse_on_mesh(text)
    alone, piped = train_step(MODELS[model](rows), rule, clip=clip), "pp=" in text
    program = train_step(MODELS[model](B), rule, clip=clip) if piped else alone
    plain, before = run(cluster, strategy(program), alone)
    step = Strategy(strategy, overlap)(program)
    overlapped, after = run(cluster, step, alone)
    assert bits(overlapped) == bits(plain)
    assert moved(after) == moved(before)
    batch = {"batch": rows} if piped else {}
    assert_simulated(simulate(step, mesh=mesh, **batch, **ON), after)
    try:
        folded = simulate(step, mesh=mesh, fold=True, **batch, **ON)
    except CannotFold:
        return before, after
    assert folded.makespan_seconds == pytest.approx(after.makespan_seconds, rel=1e-9)
    assert max(folded.peaks().values()) == max(after.peaks().values())
    return before, after
