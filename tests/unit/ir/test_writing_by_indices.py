"""Writes at recorded indices and bools, and conversions of recorded arrays: NumPy's results, and clear refusals."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from parallelism import ir
from parallelism.ir import RecordError

X = np.arange(12.0).reshape(3, 4)
F = ir.TensorType("f8", (3, 4))


def indices(n):
    return ir.TensorType("i64", (n,))


def both(function, *arrays):
    program = ir.record(function, *(ir.TensorType(x.dtype, x.shape) for x in arrays))
    found, = ir.interpret(program, list(arrays)).outputs
    expected = function(*(x.copy() for x in arrays))
    assert found.dtype == expected.dtype
    assert_array_equal(found, expected)
    return program


@pytest.mark.parametrize("places", [[0, 2], [2, 2], [-1, 0], [1]])
def test_values_are_written_at_recorded_places(places):
    def write(x, p, v):
        x[p] = v
        x[1:, p] += 1
        x[p, p] = x[p, 0]
        return x

    at = np.array(places)
    both(write, X, at, X[:len(at)] * -1)


def test_of_two_values_at_one_place_the_last_one_stays_and_has_the_slope():
    def write(x, p, v):
        x[p] = v
        return np.sum(x * x)

    places, values = np.array([1, 1]), np.array([[1.0, 2, 3, 4], [5, 6, 7, 8]])
    program = ir.gradient(ir.record(write, F, indices(2), ir.TensorType("f8", (2, 4))))
    to_x, to_v = ir.interpret(program, [X, places, values]).outputs
    assert_array_equal(to_x, 2 * X * [[1], [0], [1]])
    assert_array_equal(to_v, [[0, 0, 0, 0], [10, 12, 14, 16]])


def test_a_view_of_what_is_written_sees_it():
    def write(x, p):
        x = x.copy()
        row, turned = x[0], x.T
        x[p] = 7.0
        return row + turned[:, 0]

    both(write, X, np.array([0, 2]))


def test_a_place_out_of_range_is_an_error_when_the_program_runs():
    def write(x, p):
        x[p] = 0.0
        return x

    with pytest.raises(IndexError, match="out of bounds"):
        ir.interpret(ir.record(write, F, indices(1)), [X, np.array([3])])


def test_sums_at_places_given_twice_are_sums():
    def add(x, p, v):
        np.add.at(x, (slice(None), p), v)
        return x

    both(add, X, np.array([3, 0, 3]), np.arange(9.0).reshape(3, 3))


def test_elements_that_bools_select_are_computed_on_and_written_back():
    def halve(x):
        x[x > 4] *= 0.5
        chosen = x[x < 3]
        chosen += 2
        x[x < 3] = np.sqrt(chosen) + chosen
        return x * x[x > 1].mean() + x[x > 1].sum() - np.min(x[x > 1])

    both(halve, X)


def test_rows_that_bools_select():
    def rows(x, v):
        x[v > 0] *= 2
        return x, x[v > 0].sum(axis=0)

    x, v = X, np.array([1.0, -1, 2])
    program = ir.record(rows, F, ir.TensorType("f8", (3,)))
    for found, expected in zip(ir.interpret(program, [x, v]).outputs, rows(x.copy(), v), strict=True):
        assert_array_equal(found, expected)


def test_no_slope_of_an_element_that_is_not_selected_is_nan():
    program = ir.gradient(ir.record(lambda x: np.log(x[x > 0]).sum(), ir.TensorType("f8", (4,))))
    slope, = ir.interpret(program, [np.array([0.0, 2, -1, 4])]).outputs
    assert_array_equal(slope, [0, 0.5, 0, 0.25])


@pytest.mark.parametrize(("function", "message"), [
    (lambda x: x[x > 0] + x[x > 1], "elements that different bools select"),
    (lambda x: x[x > 0], "indexing by bools.*use numpy.where"),
    (lambda x: x[x > 0].reshape(2, 2), "their reshape of the elements"),
    (lambda x: np.cumsum(x[x > 0]), "numpy.cumsum of the elements that bools select"),
    (lambda x: np.add.at(np.zeros(4), np.array([1]), x[0, 0]), "numpy.add.at into an array of numbers"),
    (lambda x: np.add.at(x, 1, 2.0), "numpy.add.at at an index without arrays"),
    (lambda x: np.divide.at(x, [1], 2.0), "it is recorded of numpy.add"),
    (lambda x: np.place(x, x > 0, [1.0, 2.0]), "numpy.place of several values"),
])
def test_what_cannot_be_recorded_is_refused_by_name(function, message):
    with pytest.raises(RecordError, match=message):
        ir.record(function, F)


def test_numpys_conversions_are_its_own_again_after_a_recording():
    own = np.array, np.asarray, np.asanyarray, np.ascontiguousarray

    def failing(x):
        inner = ir.record(lambda y: np.asarray(y) + 1, F)
        assert len(inner.ops) == 2
        assert np.asarray(x) is x and np.array(x) is not x and np.asarray([1, 2]).tolist() == [1, 2]
        raise KeyError("stop")

    with pytest.raises(KeyError):
        ir.record(failing, F)
    assert (np.array, np.asarray, np.asanyarray, np.ascontiguousarray) == own


def test_conversions_take_their_argument_by_name_while_a_function_is_recorded():
    def function(x):
        assert np.array(object=[1, 2]).tolist() == np.asarray(a=(1, 2)).tolist() == [1, 2]
        assert np.asarray(a=x) is x and np.array(object=x) is not x
        return np.asarray(x, np.float32)

    assert ir.record(function, F).outputs[0].type.dtype == np.float32


def test_two_threads_record_conversions_at_once():
    own, found, both_in = np.asarray, [], threading.Barrier(2, timeout=20)

    def convert(x):
        both_in.wait()
        return np.asarray([x, x * 2]).sum(axis=0)

    threads = [threading.Thread(target=lambda: found.append(ir.record(convert, F))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [ir.interpret(program, [X]).outputs[0].tolist() for program in found] == [(3 * X).tolist()] * 2
    assert np.asarray is own


def test_nan_is_a_number_of_a_program():
    def holes(x):
        return np.where(x > 4, np.nan, x), np.full_like(x, np.nan), np.maximum(x, np.array([1, np.nan, 3, 20]))

    for found, expected in zip(ir.interpret(ir.record(holes, F), [X]).outputs, holes(X), strict=True):
        assert_array_equal(found, expected)
