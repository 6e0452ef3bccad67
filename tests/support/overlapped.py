"""Steps run on devices with and without overlap: what both must agree on."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from simulated_runs import assert_simulated
from trained_runs import B, simulated, trained_on
from transformed import model_step

from parallelism.simulation.folding import CannotFold
from parallelism.transforms import Strategy


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


def assert_moved_as(before, after):
    """With overlap as many bytes move, but for padding, where arrays that are cut unevenly are one call: small arrays."""
    plain, overlapped = moved(before), moved(after)
    assert overlapped.keys() == plain.keys()
    padded = {key for key in plain if overlapped[key] != plain[key]}
    assert {name for name, _ in padded} <= {"reduce_scatter", "all_gather"}
    assert all(0.5 * plain[key] < overlapped[key] < 2 * plain[key] for key in padded)


def check(cluster, model, rows, text, overlap, rule, clip=None, steps=2):
    """The traces of the last step without and with overlap, which agree in every bit and byte; each is simulated."""
    alone = model_step(model, rows, rule, clip=clip)
    program = model_step(model, B, rule, clip=clip) if in_pipeline(text) else alone
    return check_step(cluster, alone, program, rows, text, overlap, steps)


def in_pipeline(text):
    """Whether a strategy has a pipeline."""
    return text.startswith("pp")


def check_step(cluster, alone, program, rows, text, overlap, steps=2):
    """As `check`, of the step ``alone``, with so many rows, and of what the strategy is applied to."""
    strategy, mesh = Strategy.parse_on_mesh(text)
    plain, before = trained_on(cluster, strategy(program), alone, steps)
    step = Strategy(strategy, overlap)(program)
    overlapped, after = trained_on(cluster, step, alone, steps)
    assert bits(overlapped) == bits(plain)
    assert_moved_as(before, after)
    assert_simulated(simulated(step, mesh, rows), after)
    try:
        folded = simulated(step, mesh, rows, fold=True)
    except CannotFold:
        return before, after
    assert folded.makespan_seconds == pytest.approx(after.makespan_seconds, rel=1e-9)
    assert max(folded.peaks().values()) == max(after.peaks().values())
    return before, after
