"""Indices by chance, read and written: a recorded ``x[...]`` is NumPy's, or refused where it cannot be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st
from numpy.testing import assert_array_equal

from parallelism import ir

T = ir.TensorType
SHAPE = (3, 1, 4, 2)
X = np.arange(24.0).reshape(SHAPE)

bound = st.none() | st.integers(-5, 5)
slices = st.builds(slice, bound, bound, st.none() | st.integers(-3, 3).filter(bool))
numbers = st.integers(-2, 1)
arrays = st.sampled_from([
    np.array([0, 0]), np.array([[0], [-1]]), np.array(0), np.array([-1]), [0, 0], np.zeros((0,), int),
])
bools = st.sampled_from([np.array([True, False, True]), np.array([[True], [False], [False]]), np.array([True]),
                         np.ones((1, 4), bool), [False, True, True, False]])


@st.composite
def keys(draw, *kinds):
    found = draw(st.lists(st.one_of(slices, numbers, st.none(), *kinds), max_size=5))
    if draw(st.booleans()):
        found.insert(draw(st.integers(0, len(found))), Ellipsis)
    return found[0] if len(found) == 1 and draw(st.booleans()) else tuple(found)


def of_numpy(function):
    """What NumPy makes of it, or None for an index that it does not take."""
    try:
        return function(X.copy())
    except (IndexError, ValueError):
        return None


def recorded(function):
    return ir.interpret(ir.record(function, T("f64", SHAPE)), [X]).outputs[0]


@pytest.mark.slow
@given(keys())
def test_slices_and_numbers_read(key):
    expected = of_numpy(lambda x: x[key])
    if expected is not None:
        assert_array_equal(recorded(lambda x: x[key]), expected)


@given(keys(arrays, bools))
def test_arrays_read(key):
    expected = of_numpy(lambda x: x[key])
    if expected is not None:
        found = recorded(lambda x: x[key])
        assert found.shape == expected.shape
        assert_array_equal(found, expected)


@given(keys(st.just(np.array([0, 0])), st.just(np.array([[0], [-1]]))))
def test_recorded_arrays_read(key):
    """The arrays in the index are inputs, too."""
    each = key if isinstance(key, tuple) else (key,)
    given = [k for k in each if isinstance(k, np.ndarray)]
    expected = of_numpy(lambda x: x[key])
    assume(expected is not None)

    def pick(x, *arrays):
        rest = iter(arrays)
        return x[tuple(next(rest) if isinstance(k, np.ndarray) else k for k in each)]

    function = ir.record(pick, T("f64", SHAPE), *(T("i64", k.shape) for k in given))
    assert_array_equal(ir.interpret(function, [X, *given]).outputs[0], expected)


@given(keys(), st.booleans(), st.booleans())
def test_slices_and_numbers_written(key, one, leading):
    shape = of_numpy(lambda x: np.asarray(x[key]))
    assume(shape is not None)
    value = np.float64(-1) if one else -np.arange(shape.size).reshape(shape.shape) - 1.0
    if leading and shape.ndim:
        value = np.asarray(value)[None]

    def write(x):
        x[key] = value
        return x

    def add(x):
        x[key] += value if not leading else 3
        return x

    for change in (write, add):
        assert_array_equal(recorded(change), change(X.copy()))


@given(keys(), keys())
def test_a_view_of_a_view_written(first, second):
    def change(x):
        view = x[first][second]
        view *= 2
        x += 1
        return view + np.zeros(()), x

    for i in range(2):
        expected = of_numpy(lambda x, i=i: change(x)[i])
        if expected is not None:
            assert_array_equal(recorded(lambda x, i=i: change(x)[i]), expected)


ROWS = np.arange(18.0).reshape(6, 3)


@pytest.mark.parametrize(("pick", "rows"), [
    (lambda x, n: x[-(n // 2):], "B/2"), (lambda x, n: x[:-(n // 2)], "B/2"), (lambda x, n: x[-n:], "B"),
    (lambda x, n: x[:-n], "0"), (lambda x, n: x[-n - 2:], "B"), (lambda x, n: x[:2 * n], "B"),
    (lambda x, n: x[n:n], "0"), (lambda x, n: x[n - 2:], "2"), (lambda x, n: x[None, -(n // 3)], "1"),
    (lambda x, n: x[np.int64(-2):], "2"), (lambda x, n: x[-10**12:10**12], "B"),
])
def test_places_with_symbols_count_from_the_end_as_in_numpy(pick, rows):
    program = ir.record(lambda x: pick(x, x.shape[0]), T("f64", (ir.symbol("B"), 3)))
    assert str(program.outputs[0].type.shape[0]) == rows
    assert_array_equal(ir.interpret(program, [ROWS]).outputs[0], pick(ROWS, 6))


@pytest.mark.parametrize("pick", [lambda x: x[1 - x.shape[0]:], lambda x: x[1 - x.shape[0]]])
def test_a_place_whose_sign_is_open_is_refused(pick):
    with pytest.raises(ir.RecordError, match=r"indexing by .*: -B\+1 may be below 0 or not") as caught:
        ir.record(pick, T("f64", (ir.symbol("B"), 3)))
    assert f"{__file__}:{pick.__code__.co_firstlineno}: " in str(caught.value)
