"""The integer program finds the least of all choices; its seconds are those of the simulator; numbers stay."""

from __future__ import annotations

import os

import numpy as np
import pytest
from auto_programs import every_choice, least_by_trying, random_program
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from localized_runs import run_everywhere

from parallelism import Mesh, TensorSharding, ir, models
from parallelism.auto_sharding import auto_shard
from parallelism.auto_sharding.integer_program import solve
from parallelism.auto_sharding.prices import Prices
from parallelism.auto_sharding.problem import problem_of
from parallelism.hardware import Hardware
from parallelism.layouts import annotate, localize
from parallelism.transforms import SGD
from parallelism.transforms.training import train_step

MANY = int(os.environ.get("VCLUSTER_LAYOUTS", "300"))
SMALL, LARGE = Mesh(x=2, y=2), Mesh(x=2, y=4)
MODELS = {
    "perceptron": lambda: ir.gradient(models.mlp((64, 256, 64), 128), keep_outputs=True),
    "transformer": lambda: ir.gradient(models.gpt(32, 16, 4, 2, 8, 4), keep_outputs=True),
    "mixture": lambda: models.mixture(8, 16, 4, 2, 4, 8, 4),
    "convolutional": lambda: models.convolutional((8, 8, 4), (4, 8), 8, 4),
}


def arrays_of(function):
    rng = np.random.default_rng(1)
    return [rng.normal(size=v.type.shape) if v.type.dtype.kind == "f" else rng.integers(0, 4, v.type.shape)
            for v in function.inputs]


def check(solution, seconds=None):
    """Its seconds are simulated ones; localized again it is as it is; its numbers are those of the program."""
    trace = solution.simulate(link_sharing=False, fold=True)
    assert trace.makespan_seconds == pytest.approx(solution.seconds, rel=1e-9, abs=0)
    localized = localize(solution.function, solution.mesh)
    assert localized.function == solution.function
    function = solution.problem.function
    arrays = arrays_of(function)
    for found, wanted in zip(run_everywhere(localized, arrays), ir.interpret(function, arrays).outputs, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-10 * max(1.0, np.abs(wanted).max(initial=0)))


@st.composite
def problems(draw, most=6):
    """A random program of up to so many ops, on a mesh of two axes, with few enough choices to try all."""
    mesh = draw(st.sampled_from([SMALL, LARGE]))
    function = random_program(np.random.default_rng(draw(st.integers(0, 10 ** 9))), most=draw(st.integers(1, most)))
    problem = problem_of(function, mesh, Prices(mesh, Hardware.of("dgx-h100")))
    assume(np.prod([float(len(each.shardings)) for each in problem.ops]) <= 2e6)
    return problem


def check_least(problem):
    choice = solve(problem)
    assert choice.seconds == pytest.approx(least_by_trying(problem), rel=1e-9, abs=1e-15)
    assert choice.gap == 0


@pytest.mark.slow
@given(problems(most=3))
@settings(max_examples=2, suppress_health_check=list(HealthCheck))
def test_the_least_of_all_choices(problem):
    check_least(problem)


@pytest.mark.slow
@pytest.mark.timeout(1200)     # a crowded machine is slow, not wrong
@given(problems())
@settings(max_examples=MANY, suppress_health_check=list(HealthCheck))
def test_the_least_of_all_choices_often(problem):
    check_least(problem)


@pytest.mark.takes_seconds
def test_trying_everything_is_trying_every_choice():
    builder = ir.Builder()
    x, y = builder.input("x", ir.TensorType("f8", (3, 64))), builder.input("y", ir.TensorType("f8", (64, 3)))
    z, = builder.emit("matmul", (x, y), {})
    w, = builder.emit("tanh", (z,), {})
    problem = problem_of(builder.function("f", [w]), Mesh(x=2, y=1), Prices(Mesh(x=2, y=1), Hardware.of("dgx-h100")))
    assert every_choice(problem) == pytest.approx(least_by_trying(problem), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_programs(seed):
    check(auto_shard(random_program(np.random.default_rng(seed), most=8), LARGE, "dgx-h100"))


@pytest.mark.slow
@pytest.mark.slow_for("transformer", "mixture")
@pytest.mark.timeout(400)     # a crowded machine is slow, not wrong
@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    check(auto_shard(MODELS[name](), Mesh(x=2), "dgx-h100"))


@pytest.mark.slow
def test_a_wide_perceptron_is_never_slower_than_columns_then_rows():
    wide = models.mlp((4096, 16384, 4096), 64, "f4")
    found = auto_shard(wide, Mesh(y=4), "dgx-h100")
    columns = auto_shard(annotate(wide, {"p.w0": "[None, y]", "p.w1": "[y, None]"}), Mesh(y=4), "dgx-h100")
    whole = auto_shard(annotate(wide, {"p.w0": "[None, None]", "p.w1": "[None, None]"}), Mesh(y=4), "dgx-h100")
    assert found.seconds <= columns.seconds < whole.seconds


@pytest.mark.takes_seconds
def test_the_next_state_of_a_step_lies_as_the_state():
    step = train_step(models.mlp((64, 128, 32), 16), SGD(0.1, momentum=0.9))
    solution = auto_shard(step, Mesh(x=2), "dgx-h100")
    names = {value.name for value in step.inputs}
    replaced = [value.name for value in step.outputs if value.name.removeprefix("next.") in names]
    assert replaced
    for name in replaced:
        assert solution.layout(name) == solution.layout(name.removeprefix("next."))


@pytest.mark.slow
def test_blocks_are_laid_out_alike():
    blocks = models.gpt(16, 8, 2, 2, 4, 2)
    problem = problem_of(blocks, Mesh(x=2), Prices(Mesh(x=2), Hardware.of("dgx-h100")), blocks="block.*")
    assert max(len(each.ops) for each in problem.ops) == 2
    assert len(problem.ops) < len(problem_of(
        blocks, Mesh(x=2), Prices(Mesh(x=2), Hardware.of("dgx-h100"))).ops)
    choice = solve(problem)
    assert problem.seconds(choice.sharding_of, choice.layout_of) == choice.seconds


@pytest.mark.takes_seconds
def test_given_layouts_stay():
    given = annotate(models.mlp((64, 128, 32), 16), {"p.w0": "[x, None]", "p.w1": "[None, x]"})
    solution = auto_shard(given, Mesh(x=2), "dgx-h100")
    check(solution)
    assert solution.layout("p.w0") == TensorSharding("x", None)
    assert {op.inputs[0].name for op in solution.function.ops if op.kind == "reshard"}


@pytest.mark.takes_seconds
def test_what_cannot_be_laid_out():
    with pytest.raises(ValueError, match=r"nothing says what B is; .* and the program's specialize"):
        auto_shard(models.mlp((4, 8), ir.symbol("B")), Mesh(x=2), "dgx-h100")
    with pytest.raises(ValueError, match="has no value %q to tie"):
        auto_shard(models.mlp((4, 8), 4), Mesh(x=2), "dgx-h100", ties=[("q", "p.w0")])


def test_a_wrong_program_mesh_or_axis_is_named():
    program = models.mlp((4, 8), 4)
    with pytest.raises(TypeError, match=r"auto_shard takes a Function, got function; ir\.record makes a program of"):
        auto_shard(lambda x: x, Mesh(x=2), "dgx-h100")
    with pytest.raises(TypeError, match="mesh must be a Mesh, got 'x=2'"):
        auto_shard(program, "x=2", "dgx-h100")
    with pytest.raises(ValueError, match=r"@mlp, %p\.w0: .* names axis 'tp', but the axes of .* are 'x', 'y'"):
        auto_shard(annotate(program, {"p.w0": "[tp, None]"}), Mesh(x=2, y=3), "dgx-h100")
