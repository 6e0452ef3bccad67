"""Under a limit of memory: no device holds more, the choice is the least of all that fit, copies are made twice."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from auto_programs import random_program
from localized_runs import run_everywhere

from parallelism import Mesh, ir, models
from parallelism.auto_sharding import NoLayoutFits, auto_shard
from parallelism.auto_sharding.integer_program import solve
from parallelism.auto_sharding.memory import Memory
from parallelism.auto_sharding.prices import Prices
from parallelism.auto_sharding.problem import problem_of
from parallelism.auto_sharding.solution import laid_out_by, peak_bytes, replaced_by
from parallelism.hardware import Hardware
from parallelism.ir.passes import live_bytes
from parallelism.layouts import Devices, Localized
from parallelism.transforms import SGD, Adam
from parallelism.transforms.training import train_step

PAIR = Mesh(x=2)


def problem_on(function, mesh=PAIR):
    return problem_of(function, mesh, Prices(mesh, Hardware.of("dgx-h100")), blocks=None)


def every_choice(problem):
    """Every choice that is possible, with its seconds."""
    for ways in product(*(range(len(each.shardings)) for each in problem.ops)):
        for lies in product(*(range(len(each.layouts)) for each in problem.values)):
            seconds = problem.seconds(ways, lies, ())
            if seconds < np.inf:
                yield ways, lies, seconds


def check_all(seed, most):
    """At limits between the least and the most, the least seconds of all choices that hold no more."""
    problem = problem_on(random_program(np.random.default_rng(seed), most=most))
    count = np.prod([float(len(each.shardings)) for each in problem.ops]) * np.prod(
        [float(len(each.layouts)) for each in problem.values])
    if count > 40_000:
        return False
    memory = Memory(problem)
    found = [(int(memory.total(ways, lies, ()).max()), seconds) for ways, lies, seconds in every_choice(problem)]
    peaks = sorted({peak for peak, _ in found})
    for limit in {peaks[0], peaks[len(peaks) // 2], peaks[-1]}:
        choice = solve(problem, memory=memory, limit_bytes=limit)
        assert memory.total(choice.sharding_of, choice.layout_of, choice.kept).max() <= limit
        assert choice.seconds == pytest.approx(
            min(seconds for peak, seconds in found if peak <= limit), rel=1e-9, abs=1e-15)
    with pytest.raises(NoLayoutFits, match=r"fit in .* a device: at least .* are held while") as caught:
        solve(problem, memory=memory, limit_bytes=peaks[0] - 1)
    assert peaks[0] - 1 < caught.value.least_bytes <= peaks[0]
    return True


@pytest.mark.slow
def test_the_least_of_all_choices_that_fit():
    assert sum(check_all(seed, 2) for seed in range(2, 5)) >= 1


@pytest.mark.slow
@pytest.mark.timeout(400)     # a crowded machine is slow, not wrong
def test_the_least_of_all_choices_that_fit_often():
    assert sum(check_all(seed, 2 + seed % 2) for seed in range(100, 180)) >= 30


@pytest.mark.takes_seconds
@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(20, 23))
def test_what_is_counted_is_what_the_program_holds(seed):
    """Without changes of layout there are no buffers inside of them: then the peaks are equal."""
    mesh = Mesh(x=2, y=2)
    problem = problem_on(random_program(np.random.default_rng(seed), most=5), mesh)
    choice = solve(problem)
    function = laid_out_by(problem, choice)
    counted = int(Memory(problem).total(choice.sharding_of, choice.layout_of, choice.kept or ()).max(initial=0))
    if any(op.kind == "reshard" for op in function.ops):
        assert peak_bytes(function, mesh) > 0
    else:
        assert peak_bytes(function, mesh) == counted


@pytest.mark.takes_seconds
@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", [SGD(0.1, momentum=0.9), Adam()])
def test_a_step_holds_no_more_than_it_may(optimizer):
    """Its peak is the simulated one, its seconds are the simulated ones, its numbers stay."""
    step = train_step(models.mlp((16, 24), 40, "f8"), optimizer)
    free = auto_shard(step, PAIR, "dgx-h100")
    limit = int(0.7 * free.peak_bytes)
    found = auto_shard(step, PAIR, "dgx-h100", limit_bytes=limit)
    trace = found.simulate(link_sharing=False)
    assert found.peak_bytes == max(trace.peaks().values()) <= limit < free.peak_bytes
    assert free.seconds <= found.seconds == pytest.approx(trace.makespan_seconds, rel=1e-9)
    rng = np.random.default_rng(3)
    arrays = [np.abs(rng.normal(size=value.type.shape)) if value.type.dtype.kind == "f"
              else rng.integers(0, 4, value.type.shape).astype(value.type.dtype) for value in step.inputs]
    wanted = ir.interpret(step, [array.copy() for array in arrays]).outputs
    for mine, whole in zip(run_everywhere(found.executable.programs, arrays), wanted, strict=True):
        np.testing.assert_allclose(mine, whole, rtol=1e-10, atol=1e-10)


def check_what_is_counted(solution):
    """While each op runs: what the device holds, and no less while what it makes is laid out anew or replaces an input.

    Returns the names of the values that are laid out anew.
    """
    step, choice = solution.problem.function, solution.choice
    counted = Memory(solution.problem, replaced_by(step)).total(choice.sharding_of, choice.layout_of, choice.kept)
    local = Localized(solution.function, Devices.of(solution.mesh)).program(0)
    live = live_bytes(local, replaced_by(step))
    place = {value.name: at for at, op in enumerate(local.ops) for value in op.outputs}
    first, equal = 0, 0
    for at, op in enumerate(step.ops):
        name = op.outputs[0].name
        end = max(place[name], place.get(f"{name}.made", 0)) + 1        # with the changes of layout before and after it
        held = max(map(int, live[first:end]))
        assert held <= counted[at], (op, held, counted[at])
        equal += held == counted[at]
        first = end
    assert equal >= len(step.ops) - 8
    return [op.inputs[0].name for op in solution.function.ops if op.kind == "reshard"]


@pytest.mark.slow
def test_copies_are_counted_where_they_are_held():
    """Weights that are gathered in the forward are kept for the backward, and counted all that time."""
    step = train_step(models.mlp((512,) * 3, 4096, "f4"), SGD(0.1, momentum=0.9))
    mesh = Mesh(x=4)
    free = auto_shard(step, mesh, "dgx-h100")
    solution = auto_shard(step, mesh, "dgx-h100", limit_bytes=int(0.9 * free.peak_bytes))
    assert solution.choice.kept
    assert "p.w1" in check_what_is_counted(solution)


@pytest.mark.slow
@pytest.mark.timeout(400)     # a crowded machine is slow, not wrong
def test_weights_that_do_not_fit_lie_split_and_are_gathered_once_or_twice():
    step = train_step(models.mlp((1024,) * 5, 8192, "f4"), SGD(0.1, momentum=0.9))
    mesh = Mesh(x=4)
    free = auto_shard(step, mesh, "dgx-h100")

    def gathered(solution, name):
        """The regions in which copies of a weight are made."""
        return [op.region for op in solution.function.ops if op.kind == "reshard" and op.inputs[0].name == name]

    kept = auto_shard(step, mesh, "dgx-h100", limit_bytes=int(0.9 * free.peak_bytes))
    twice = auto_shard(step, mesh, "dgx-h100", limit_bytes=int(0.8 * free.peak_bytes))
    assert free.layout("p.w1").axes == () and not gathered(free, "p.w1")
    assert kept.layout("p.w1").axes and gathered(kept, "p.w1") == ["layer.1"]
    assert twice.layout("p.w1").axes and gathered(twice, "p.w1") == ["layer.1", "gradient.layer.1"]
    assert free.seconds < kept.seconds < twice.seconds
    for solution in (kept, twice):
        trace = solution.simulate(link_sharing=False, fold=True)
        assert trace.makespan_seconds == pytest.approx(solution.seconds, rel=1e-9)
        assert max(trace.peaks().values()) == solution.peak_bytes <= solution.limit_bytes
        check_what_is_counted(solution)


@pytest.mark.takes_seconds
def test_the_error_names_what_is_held():
    step = train_step(models.mlp((64, 64), 16), Adam())
    with pytest.raises(NoLayoutFits) as caught:
        auto_shard(step, PAIR, "dgx-h100", limit_bytes=20_000)
    least = caught.value.least_bytes
    assert f"fit in 20 kB a device: at least {least / 1000:.0f} kB are held while" in str(caught.value)
    assert "inputs" in str(caught.value)
    with pytest.raises(ValueError, match=r"limit_bytes must be an integer of at least 1, got 0"):
        auto_shard(step, PAIR, "dgx-h100", limit_bytes=0)


@pytest.mark.slow
def test_why_within_the_limit():
    """What another layout costs counts only choices that fit: with the weights whole, none does."""
    step = train_step(models.mlp((64, 64), 16, "f8"), SGD(0.1, momentum=0.9))
    with pytest.raises(NoLayoutFits) as caught:
        auto_shard(step, PAIR, "dgx-h100", limit_bytes=1000)
    tight = auto_shard(step, PAIR, "dgx-h100", limit_bytes=caught.value.least_bytes + 200)
    why = tight.why("p.w0")
    assert tight.layout("p.w0").axes
    whole, = (each for each in why.alternatives if not each.layout.axes)
    assert whole.more_seconds == np.inf
    assert all(each.more_seconds >= 0 for each in why.alternatives)
