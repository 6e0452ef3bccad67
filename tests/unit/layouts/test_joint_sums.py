"""Sums over what several stages have: which values they are, what each stage adds, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from localized_runs import run_everywhere

from parallelism import Mesh, TensorSharding, ir
from parallelism.layouts import localize
from parallelism.layouts.stages.joint_sums import JointSums

OWNERS = {"a": "a", "b": "b", "c": "c", "rate": None}


def scaled(a, b, c, rate):
    """Each array divided by the norm of all, times a rate that belongs to all."""
    norm = np.sqrt(np.sum(a * a) + np.sum(b * b) + np.sum(c * c) + rate)
    return a * rate / norm, b / norm, c / norm


def recorded(function, outputs="abc"):
    types = [ir.TensorType("f64", shape) for shape in ((2,), (3,), (5,), ())]
    program = ir.record(function, *types)
    return program, OWNERS | {value.name: owner for value, owner in zip(program.outputs, outputs, strict=True)}


def test_a_norm_is_a_joint_sum_and_each_stage_adds_its_own_terms():
    program, owners = recorded(scaled)
    sums = JointSums.of(program, owners)
    (total, terms), = sums.terms.items()
    assert [owner for _, owner in terms] == ["a", "b", "c"] and total.type.shape == ()
    arrays = {"a": np.array([3.0, 1]), "b": np.array([1.0, 2, 2]), "c": np.arange(5.0), "rate": np.array(0.5)}
    stages = [sums.of_one_stage([program.outputs[i] for i in own], counted, "pp", 3)
              for own, counted in (((0,), "a"), ((1, 2), "bc"), ((2,), ""))]
    assert [[value.name for value in stage.inputs] for stage in stages] == [["a", "rate"], ["b", "c", "rate"],
                                                                           ["c", "rate"]]
    own = []
    for place, stage in enumerate(stages):      # of one stage alone the total is three times its own terms
        program_of = localize(stage, Mesh(pp=3)).program(place)
        assert [op["axes"] for op in program_of.ops if op.kind == "all_reduce"] == [("pp",)]
        rows = next(op.outputs[0] for op in program_of.ops if op.kind == "broadcast_to")
        assert rows.type.shape == (1,) and rows.type.dtype == np.float64
        values = ir.interpret(ir.Function("own", stage.inputs, stage.ops, [
            op.outputs[0] for op in stage.ops if op.kind == "sum" and op.inputs[0].layout]),
            [arrays[value.name] for value in stage.inputs]).outputs
        own.append(values[0] / 3)
    assert own == [10, 9 + 30, 0]
    assert stages[0].ops != program.ops and sums.of_one_stage(program.outputs, "abc", "pp", 1) == program


def test_what_stays_apart_has_no_joint_sum_and_one_stage_may_have_it_all():
    program, owners = recorded(lambda a, b, c, rate: (a * rate, b + 1, c - rate))
    assert JointSums.of(program, owners).terms == {}
    program, owners = recorded(scaled)
    whole = JointSums.of(program, owners).of_one_stage(program.outputs, "abc", "pp", 2)
    arrays = [np.array([3.0, 1]), np.array([1.0, 2, 2]), np.arange(5.0), np.array(0.5)]
    laid = ir.Function(whole.name, whole.inputs, whole.ops, whole.outputs)
    found = run_everywhere(localize(laid, Mesh(pp=2)), arrays)
    norm = np.sqrt(2 * 49 + 0.5)         # both of two stages have all
    np.testing.assert_allclose(found[1], arrays[1] / norm, rtol=1e-15)


@pytest.mark.parametrize(("function", "outputs", "name"), [
    (lambda a, b, c, rate: (a, b * np.sum(c), c), "abc", "%b and to %c"),
    (lambda a, b, c, rate: (a, b, c + np.sum(a) * np.sum(b)), "abc", "%a and to %b"),
    (lambda a, b, c, rate: (a, c * 2, b), "abc", "%b and to %c"),
    (lambda a, b, c, rate: (a[:1] + b[:1], b, c), "abc", "%a and to %b"),
])
def test_any_other_combination_is_refused(function, outputs, name):
    program, owners = recorded(function, outputs)
    with pytest.raises(ValueError, match=rf"%[a-z0-9]+ of @.* depends on what belongs to {name}, which different"):
        JointSums.of(program, owners)


def test_a_row_of_each_stage_is_split_over_the_axis():
    program, owners = recorded(scaled)
    stage = JointSums.of(program, owners).of_one_stage(program.outputs[:1], "a", "stage", 4)
    laid = [value.layout for value in stage.values if value.layout]
    assert laid == [TensorSharding("stage"), TensorSharding()]
