"""What overlap hides on published models, simulated: all but the last bucket of data parallelism, and gathers."""

from __future__ import annotations

from functools import cache

import pytest

from parallelism import models
from parallelism.simulation import simulate
from parallelism.trace import split
from parallelism.transforms import Adam, Overlap, Strategy, train_step


@cache
def step_of(name, rows):
    return train_step(models.transformer(name).function(rows), Adam(1e-4))


def simulated(name, rows, text, *more):
    """The folded trace, and the exposed communication of rank 0 in seconds."""
    strategy, mesh = Strategy.parse_on_mesh(text)
    step, nodes = Strategy(strategy, *more)(step_of(name, rows)), -(-mesh.size // 8)
    trace = simulate(step, f"dgx-h100:{nodes}", mesh=mesh, fold=True)
    return trace, split(trace)[0].communication


def collectives(trace):
    """Those of rank 0; others have pieces that are one element shorter."""
    return [event for event in trace if event.kind == "collective" and event.rank == 0]


@pytest.mark.parametrize(("name", "rows", "text"), [
    ("gpt2", 64, "dp=8 precision=bf16"), *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ("gpt2-xl", 64, "dp=8 precision=bf16"), ("gpt2-medium", 256, "dp=16 precision=bf16"),
        ("llama2-7b", 32, "dp=16 precision=bf16"), ("gpt3-13b", 32, "dp=8 tp=8 sp precision=bf16")])])
def test_exposed_sums_of_data_parallelism_fall_to_the_cost_of_the_last_bucket(name, rows, text):
    trace, exposed = simulated(name, rows, text, Overlap())
    buckets = [event for event in collectives(trace) if "dp" in event.axes]
    last = max(buckets, key=lambda event: event.start_seconds)
    waits = sum(event.duration_seconds for event in trace if event.kind == "wait" and event.rank == 0)
    inside = sum(event.duration_seconds for event in collectives(trace) if event.axes == ("tp",))
    assert 0 < exposed <= last.duration_seconds + inside
    assert waits == pytest.approx(exposed, rel=1e-9) or inside
    plain, blocking = simulated(name, rows, text)
    sums = [event for event in collectives(plain) if "dp" in event.axes]
    assert blocking == pytest.approx(sum(e.duration_seconds for e in collectives(plain)), rel=1e-9)
    assert sum(e.bytes_received for e in sums) == sum(e.bytes_received for e in buckets)
    assert len(buckets) < len(sums) / 3 and trace.makespan_seconds < plain.makespan_seconds
    assert max(trace.peaks().values()) <= max(plain.peaks().values())


@pytest.mark.slow
def test_gathers_of_zero_3_are_hidden_but_for_the_first():
    plain, before = simulated("gpt2-xl", 64, "dp=8 zero=3 precision=bf16")
    trace, after = simulated("gpt2-xl", 64, "dp=8 zero=3 precision=bf16", Overlap())
    assert after < before / 5
    assert max(trace.peaks().values()) < 1.1 * max(plain.peaks().values())
