"""Simulations on two kinds of nodes: of equal kinds they are those of one, folded ones are full ones, lanes are shares."""

from dataclasses import replace
from functools import cache

import pytest
from mixed_nodes import FAST, FUSED, SLOW, both
from transformed import transformer

from parallelism import Mesh, simulate
from parallelism.simulation import CannotFold
from parallelism.training import TrainingRun
from parallelism.transforms import Strategy

SPEC = transformer(layers=4)


@cache
def run(text="dp tp pp@block.1 1f1b:4", spec=SPEC, **axes):
    return TrainingRun(spec, 16, Strategy.parse(text), Mesh(**(axes or {"pp": 2, "dp": 2, "tp": 2})))


def told(trace):
    return [(e.rank, e.kind, e.name, e.start_seconds, e.duration_seconds) for e in trace]


@pytest.mark.slow
def test_two_parts_of_one_kind_are_that_kind():
    step = run()
    assert told(simulate(step.step, both(SLOW, SLOW), **step.placed)) == told(
        simulate(step.step, SLOW.resized(4), **step.placed))


@pytest.mark.takes_seconds
@pytest.mark.sampled(4)
@pytest.mark.parametrize("hardware", [both(), both(FAST, SLOW), both(rate=1e8, lanes=4)])
@pytest.mark.parametrize("sharing", [True, False])
def test_a_folded_simulation_is_the_full_one(hardware, sharing):
    step = run("dp zero=1 pp@block.1,block.2,block.3 1f1b:4", pp=4, dp=2)
    full = simulate(step.step, hardware, link_sharing=sharing, **step.placed)
    folded = simulate(step.step, hardware, link_sharing=sharing, fold=True, **step.placed)
    assert folded.makespan_seconds == pytest.approx(full.makespan_seconds, rel=1e-9)
    assert len(folded.ranks) == 4 and max(folded.peaks().values()) == max(full.peaks().values())


@pytest.mark.slow
def test_devices_that_send_at_once_share_the_link_across_evenly():
    step = run()
    shared = simulate(step.step, both(rate=1e7), **step.placed).makespan_seconds
    dealt = simulate(step.step, both(rate=1e7, lanes=4), **step.placed).makespan_seconds
    assert dealt == pytest.approx(shared, rel=1e-9)
    assert shared > 1.5 * simulate(step.step, both(rate=1e7), link_sharing=False, **step.placed).makespan_seconds
    with pytest.raises(CannotFold):
        simulate(step.step, both(rate=1e7), fold=True, **step.placed)


@pytest.mark.slow
def test_each_rank_computes_as_fast_as_its_part():
    step = run("dp tp pp@block.1 1f1b:1", transformer(layers=2))
    seconds = {}
    for hardware in (both(), SLOW.resized(4), FAST.resized(4)):
        trace = simulate(step.step, hardware, **step.placed)
        seconds[hardware.name] = [
            sum(e.duration_seconds for e in trace if e.kind == "compute" and e.rank == rank) for rank in range(8)]
    assert seconds["4 of slow and 4 of fast"] == pytest.approx(seconds["slow"][:4] + seconds["fast"][4:], rel=1e-12)


@pytest.mark.takes_seconds
def test_replicas_in_both_parts_sum_their_gradients_in_three_steps():
    step = run("dp pp 1f1b:2", transformer(layers=2), pp=1, dp=8)
    full = simulate(step.step, both(), **step.placed)
    sums = [e for e in full if e.kind == "collective"]
    assert {e.priced_algorithm for e in sums} == {"across parts"} and {len(e.group) for e in sums} == {8}
    folded = simulate(step.step, both(), fold=True, **step.placed)
    assert folded.makespan_seconds == pytest.approx(full.makespan_seconds, rel=1e-9) and len(folded.ranks) == 2


@pytest.mark.takes_seconds
def test_a_program_is_refused_where_the_parts_run_it_in_two_ways():
    step = run()
    with pytest.raises(ValueError, match=r"a program runs with other ops on slow and fused; .* as slow\+plain"):
        simulate(step.step, both(SLOW, FUSED), **step.placed)


@pytest.mark.slow
def test_a_collective_takes_the_share_of_a_device_that_its_part_has():
    step = run("dp tp overlap pp@block.1 1f1b:1")
    times = {}
    for first, second in ((0.0, 0.0), (0.5, 0.0), (0.0, 0.5), (0.5, 0.5)):
        parts = (replace(SLOW, collective_share=share) for share in (first, second))
        trace = simulate(step.step, both(*parts), **step.placed)
        times[first, second] = [max(e.start_seconds for e in trace if e.rank == rank) for rank in (0, 7)]
    one = simulate(step.step, replace(SLOW.resized(4), collective_share=0.5), **step.placed)
    assert times[0.5, 0.5] == [max(e.start_seconds for e in one if e.rank == rank) for rank in (0, 7)]
    assert times[0.5, 0.0] != times[0.0, 0.0] != times[0.0, 0.5] and times[0.5, 0.0] != times[0.0, 0.5]
