"""The layouts that a value does not have: each costs what the whole program takes more with it at best."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from auto_programs import least_by_trying, random_program

from parallelism import Mesh, TensorSharding, ir, models
from parallelism.auto_sharding import auto_shard
from parallelism.auto_sharding.explanation import why
from parallelism.auto_sharding.integer_program import solve
from parallelism.auto_sharding.prices import Prices
from parallelism.auto_sharding.problem import problem_of
from parallelism.hardware import Hardware
from parallelism.layouts import annotate

WIDE = models.mlp((4096, 16384, 4096), 64, "f4")


@pytest.mark.takes_seconds
@pytest.mark.slow_for("p.w0", "p.b0")
@pytest.mark.parametrize("name", ["p.w0", "p.w1", "p.b0"])
def test_a_layout_costs_what_the_program_takes_with_it_given(name):
    solution = auto_shard(WIDE, Mesh(y=4), "dgx-h100")
    found = solution.why(name)
    assert found.layout == solution.layout(name)
    assert found.layout not in {each.layout for each in found.alternatives}
    for each in found.alternatives:
        given = auto_shard(annotate(WIDE, {name: each.layout}), Mesh(y=4), "dgx-h100")
        least = given.simulate(link_sharing=False, fold=True).makespan_seconds
        assert each.is_proved
        assert least <= (solution.seconds + each.more_seconds) * (1 + 1e-9)
        assert each.more_seconds == pytest.approx(each.more_op_seconds + each.more_move_seconds, abs=1e-12)


@pytest.mark.takes_seconds
def test_the_weights_of_a_wide_perceptron_cost_more_elsewhere():
    found = auto_shard(WIDE, Mesh(y=4), "dgx-h100").why("p.w0")
    assert found.layout == TensorSharding("y", None)     # x is split likewise, and the sum is of few rows
    assert found.used_by == ("matmul: [None, y], [y, None] -> [None, None] partial=y",)
    assert found.made_by is None
    more = [each.more_seconds for each in found.alternatives]
    assert more == sorted(more)
    assert all(each > 0 for each in more)
    text = str(found)
    assert text.startswith("%p.w0 lies as [y, None]: the program takes ")
    assert "  used by matmul: " in text
    assert f"  as {found.alternatives[0].layout.short()}: +" in text
    assert "; other layouts that change: 1)" in text


@pytest.mark.takes_seconds
@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", [2, 0, 3, 1])
def test_the_least_with_a_value_held_is_that_of_trying(seed):
    function, mesh = random_program(np.random.default_rng(seed), most=4), Mesh(x=2, y=2)
    problem = problem_of(function, mesh, Prices(mesh, Hardware.of("dgx-h100")))
    choice = solve(problem)
    for number, value in enumerate(problem.values[:4]):
        found = {each.layout: each for each in why(problem, choice, value.names[0]).alternatives}
        assert len(found) == len(value.layouts) - 1
        for at, layout in enumerate(value.layouts):
            least = least_by_trying(problem.holding(number, at))
            more = found[layout].more_seconds if layout in found else 0.0
            assert choice.seconds + more == pytest.approx(least, rel=1e-9, abs=1e-15)


@pytest.mark.takes_seconds
def test_a_given_layout_has_no_other():
    given = annotate(WIDE, {"p.w0": "[y, None]"})
    found = auto_shard(given, Mesh(y=4), "dgx-h100").why("p.w0")
    assert found.alternatives == ()
    assert str(found).endswith("there is no other layout to choose")


@pytest.mark.takes_seconds
def test_a_layout_that_no_choice_has():
    builder = ir.Builder()
    x = builder.input("x", ir.TensorType("f8", (4, 8)))
    y, = builder.emit("tanh", (x,), {})
    function = builder.function("f", [y])
    problem = problem_of(function, Mesh(x=2), Prices(Mesh(x=2), Hardware.of("dgx-h100")), ties=[("x", y.name)])
    tied = problem.number(y.name)
    whole = problem.values[tied].layouts.index(TensorSharding(None, None))
    problem = problem.holding(tied, whole)
    found = why(problem, solve(problem), "x")
    assert [each.more_seconds for each in found.alternatives] == [np.inf] * len(problem.values[0].layouts[1:])
    assert "no choice of layouts has it" in str(found)


@pytest.mark.takes_seconds
def test_a_value_that_is_not_there():
    with pytest.raises(KeyError, match="has no value %q"):
        auto_shard(WIDE, Mesh(y=4), "dgx-h100").why("q")


@pytest.mark.takes_seconds
def test_a_choice_that_ran_out_of_time_is_told():
    found = auto_shard(WIDE, Mesh(y=4), "dgx-h100").why("p.w0").alternatives[0]
    assert "at most" in str(replace(found, is_proved=False))
    assert "at most" not in str(found)
