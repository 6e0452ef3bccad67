"""A program that is run here warns at its own lines, and ignores and raises what NumPy is told to ignore and to raise."""

from __future__ import annotations

import inspect
import warnings

import numpy as np
import pytest

from parallelism import ir

X = np.array([0, 1, -1], np.float32)


def logarithm(x):
    y = x + 1
    return np.log(y - 1), 1 / (y - 1)


PROGRAM = ir.record(logarithm, ir.TensorType("f32", (3,)))
LINE = inspect.getsourcelines(logarithm)[1] + 2


def found(program):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ir.interpret(program, [X])
    return [(each.filename, each.lineno, str(each.message)) for each in caught]


def test_a_warning_is_at_the_line_that_the_op_was_recorded_from():
    assert found(PROGRAM) == [(__file__, LINE, "divide by zero encountered in log"),
                              (__file__, LINE, "invalid value encountered in log"),
                              (__file__, LINE, "divide by zero encountered in divide")]


def test_without_lines_it_names_the_program():
    read = ir.parse(str(PROGRAM))
    assert {(file, message) for file, _, message in found(read)} == {
        ("@logarithm", "divide by zero encountered in log"), ("@logarithm", "invalid value encountered in log"),
        ("@logarithm", "divide by zero encountered in divide")}


def test_what_is_ignored_or_raised_stays_so():
    with np.errstate(divide="ignore"):
        assert found(PROGRAM) == [(__file__, LINE, "invalid value encountered in log")]
    with np.errstate(invalid="raise", divide="ignore"), pytest.raises(FloatingPointError, match="invalid value"):
        ir.interpret(PROGRAM, [X])


def test_a_function_of_the_user_is_called():
    told = []
    with np.errstate(all="call", call=lambda what, flag: told.append(what)):
        assert found(PROGRAM) == []
    assert told == ["divide by zero", "invalid value", "divide by zero"]


def test_a_loop_warns_once_for_each_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(5):
            ir.interpret(PROGRAM, [X])
    assert len(caught) == 3
