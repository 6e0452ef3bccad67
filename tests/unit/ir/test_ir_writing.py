"""Arrays that are changed in place: the program makes what NumPy makes, for all who hold the array or a view of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, reject, strategies as st
from numpy.testing import assert_array_equal

from parallelism import ir

T = ir.TensorType
X = np.arange(24.0).reshape(4, 6)


def operators(x):
    x += 1
    x -= x.mean(axis=0)
    x *= 2
    x /= 4
    x **= 2
    x //= 3
    x %= 5
    x @= np.ones((6, 6))
    return x


def bits(x):
    n = x > 3
    n |= x < 1
    n &= x != 5
    n ^= x == 7
    return n


def under_another_name(x):
    y = x
    y += 1
    return x, y


def of_a_container(x):
    params = {"w": x}
    params["w"] -= 0.5 * params["w"]
    return params["w"], x


def a_part(x):
    y = x[0]
    y += 1
    return x, y


def seen_by_a_part(x):
    y, z = x[0], x[1:][0]
    x += 1
    return x, y, z


def seen_by_a_view(x):
    y, z = x.T, x.reshape(6, 4)
    x *= 2
    x[0, 0] = 100
    return y, z[1:], x


def seen_by_pieces(x):
    q, k = np.split(x, 2, axis=1)
    x[0, 0] = 100
    x[:, 5] = 7
    return q, k


def a_part_of_a_part(x):
    y = x[1:]
    z = y[0]
    z -= 5
    y[1, ::2] = 3
    return x, y, z


def parts_that_overlap(x):
    a, b = x[0:2], x[1:3]
    a += 1
    b *= 2
    return x, a, b


def row_by_row(x):
    for row in x:
        row += row.sum()
    return x


def augmented(x):
    x[0] += 1
    x[1:3, ::2] *= 2
    x[..., -1] -= x[..., 0]
    x[[0, 3]] += 10
    return x


def from_itself(x):
    x[0] = x[1]
    x[1:] = x[:-1].copy()
    x[:, 0], last = x[:, 1], x[:, 5].copy()
    x[:, 5] = last * 2
    return x


def written(x):
    y = np.zeros_like(x)
    y[:, 0] = 1
    y[-1] = x[0]
    y[::-1, 1] = x[:, 0]
    y[..., 2:4] = 7
    y[None, 2] = x[3]
    y[1:1] = 9
    y[3, 5] = -x[0, 1]
    return y


def everywhere(x):
    y = np.empty_like(x)
    y[...] = x[0]
    z = np.ones_like(x)
    z[:] = 3
    z[:2].fill(4)
    return y, z


def where_it_says(x):
    x[x > 5] = 0
    x[x[:, 0] > 5] = x[0]
    x[np.arange(4) % 2 == 0] = x[0, 0]
    x[np.tri(4, 6) > 0] = -1
    y = np.stack([x, x + 1])
    y[..., np.arange(6) > 3] = 50
    y[:, np.tri(4, 6, 1) > 0] = -np.inf
    y[:, x[:, 0] > 8] = x[1]
    x += y.sum(axis=0, where=y > -9)
    return x


def by_known_bools(x):
    x[np.eye(4, 6) > 0] = -1
    x[:, [0, 2, 0]] = np.array([1.0, 2, 3])
    return x


def into(x):
    y = np.exp2(x / 8)
    np.add(x, y, out=y)
    np.sum(x, axis=0, out=x[0])
    np.maximum(x[2], 5, out=x[1])
    return x, y


def copies(x):
    y, z, w, v = x.copy(), +x, x.astype(float), np.clip(x, None, None)
    y += 1
    z -= 1
    w *= 3
    v[0] = 9
    return x, y, z, w, v


def picked(x):
    y = x[[0, 1]]
    y += 1
    z = np.concatenate([x])
    z[0] = 5
    return x, y, z


def a_view_of_nothing_else(x):
    h = (x @ x.T).reshape(-1)
    h += 1
    h[3] = 0
    return h


def sorted_in_place(x):
    x[1] = -x[1]
    x.sort(axis=0)
    x[:, :2].sort()
    return x


def narrower(x):
    y = x.astype(np.float32)
    y += x
    y *= 1.5
    n = x.astype(np.int32)
    n += 2
    n[0] = 1.9
    return y, n


def numbers(x):
    total, element = x.sum(), x[0, 0]
    before, also = total, element
    total += 1
    element *= 5
    x[0, 0] += 7
    x[1, 1, ...] += 7
    there = x[2, 2, ...]
    there += 7
    return total, before, element, also, x, there


def summed(x):
    total = 0
    for i in range(x.shape[0]):
        total += x[i]
    return total, x


PROGRAMS = [
    operators, bits, under_another_name, of_a_container, a_part, seen_by_a_part, seen_by_a_view, seen_by_pieces,
    a_part_of_a_part, parts_that_overlap, row_by_row, augmented, from_itself, written, everywhere, where_it_says,
    by_known_bools, into, copies, picked, a_view_of_nothing_else, sorted_in_place, narrower, numbers, summed,
]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_change_in_place_is_seen_where_numpy_shows_it(program):
    function = ir.record(program, T("f64", X.shape))
    assert ir.parse(str(function)) == function
    expected = program(X.copy())
    given = X.copy()
    found = ir.interpret(function, [given]).outputs
    assert_array_equal(given, X)            # but the caller's array stays
    for a, b in zip(found, expected if isinstance(expected, tuple) else [expected], strict=True):
        assert a.dtype == b.dtype
        assert_array_equal(a, b)


def test_what_is_not_looked_at_again_costs_nothing():
    def program(x):
        row = x[0]                          # a view that is held
        x += 1
        return x, row.shape[0] * x

    assert [op.kind for op in ir.record(program, T("f64", X.shape)).ops] == [
        "slice", "reshape", "constant", "add", "constant", "multiply",
    ]


def test_gradients_go_through_what_was_written():
    def loss(x, w):
        h = x @ w
        h += 1
        h[0] *= 2
        h[h > 10] = 0
        return np.sum(h * h)

    x, w = np.array([[1.0, 2], [3, 4], [-1, 1]]), np.array([[1.0, 0], [2, 3]])
    found, = ir.interpret(ir.gradient(ir.record(loss, T("f64", x.shape), T("f64", w.shape)), "w"), [x, w]).outputs
    h = (x @ w + 1) * [[2], [1], [1]]
    assert_array_equal(found, x.T @ (2 * h * (h <= 10) * [[2], [1], [1]]))


def test_places_may_be_symbols():
    B = ir.symbol("B")

    def program(x):
        x[1:] += x[:-1]
        x[0] = 0
        return x

    function = ir.record(program, T("f64", (B, 3)))
    for rows in (1, 2, 5):
        x = np.arange(rows * 3.0).reshape(rows, 3)
        assert_array_equal(ir.interpret(function, [x]).outputs[0], program(x.copy()))


REFUSED = {
    "a transpose": (lambda x: x.T.__iadd__(1),
                    r"changing a view of an array in place \(x.T, x.reshape.*write x = x \+ y"),
    "a piece": (lambda x: np.split(x, 2)[0].__iadd__(1), "changing a view of an array in place"),
    "a shape": (lambda x: x[0].__iadd__(np.ones((2, 6))),
                r"an array of shape \(6,\) in place into one of shape \(2, 6\)"),
    "a dtype": (lambda x: x.astype(int).__iadd__(1.5), "changing an array of int64 in place into one of float64"),
    "bools": (lambda x: x.__setitem__(x > 1, np.arange(5.0)), r"writing an array of shape \(5,\) where bools of shape"),
    "other bools": (lambda x: x.__setitem__(np.ones(3, bool), 1),
                    r"an array of shape \(4, 6\) by bools of shape \(3,\) from dim"),
    "floats": (lambda x: x.__setitem__(x.mean(axis=0), 1), "indexing by an array of float64"),
    "integers and a new dim": (lambda x: x.__setitem__(([0, 1], None), 1), "at the indices of an array and along a new dim"),
    "too much": (lambda x: x.__setitem__((0, 0), x), r"shape \(4, 6\) cannot be broadcast to \(\)"),
    "an array of numbers": (lambda x: np.zeros(6).__iadd__(x[0]),
                            r"numpy.add into an array of numbers \(out=, or an operator as \+=\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_is_refused(name):
    call, message = REFUSED[name]
    with pytest.raises(ir.RecordError, match=message):
        ir.record(lambda x: call(x) is None or x, T("f64", X.shape))


parts = st.sampled_from([0, -1, slice(None), slice(1, 3), slice(None, None, 2), slice(None, None, -1), slice(3, 0, -2)])
keys = st.tuples(parts, parts) | parts
changes = st.sampled_from(["view", "turn", "add", "set", "double"])
steps = st.lists(st.tuples(changes, st.integers(0, 9), keys), max_size=8)


@given(steps)
def test_views_and_changes_by_chance(steps):
    def program(x):
        held = [x]
        for what, which, key in steps:
            y = held[which % len(held)]
            if what == "add":
                y += which
            elif what == "double":
                y *= -2
            elif what == "turn":
                held.append(y.T)
            elif y.ndim == 2:
                if what == "view":
                    held.append(y[key])
                else:
                    y[key] = which
        return tuple(held)

    try:
        expected = program(X.copy())
    except IndexError:
        reject()
    try:
        function = ir.record(program, T("f64", X.shape))
    except ir.RecordError as error:
        if "changing a view of an array in place" not in str(error) or "turn" not in {what for what, _, _ in steps}:
            raise
        return
    for a, b in zip(ir.interpret(function, [X]).outputs, expected, strict=True):
        assert_array_equal(a, b)
