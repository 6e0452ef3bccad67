"""Extents with symbols: one form, so that equal ones are equal; numbers put in late."""

from __future__ import annotations

import pickle
from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given, strategies as st

from parallelism import ir
from parallelism.ir.core.extents import product, quotient

A, B, D = ir.symbols("A B D")


def test_equal_expressions_are_equal_and_print_alike():
    assert (A + B) * (A - B) == A * A - B * B
    assert hash(2 * A + B) == hash(B + A + A)
    assert str((A + 1) * (B + 2)) == "A*B+2*A+B+2"
    assert str(3 - A) == "-A+3"
    assert A - A == 0 and isinstance(A - A, int)
    assert (A + 5) - A == 5


def test_a_hash_is_kept_but_not_pickled():
    """Names have other hashes in another process."""
    extent = 3 * A * B + 1
    known = {extent: 1}
    found = pickle.loads(pickle.dumps(extent))      # noqa: S301
    assert found._hash is None
    assert known[found] == 1 and hash(found) == hash(extent)


def test_a_quotient_is_taken_to_be_whole():
    assert D // B * B == D
    assert (2 * A * B) // A == 2 * B
    assert (2 * A + 4) // (A + 2) == 2
    assert str(3 * D // (2 * B)) == "3*D/2/B"
    assert (D // B).specialize(D=12, B=4) == 3
    with pytest.raises(ValueError, match="D/B must be whole; with B=5, D=12 it is 12/5"):
        (D // B).specialize(D=12, B=5)
    with pytest.raises(ValueError, match=r"A cannot be divided by the sum A\+1"):
        A // (A + 1)
    with pytest.raises(ZeroDivisionError):
        A // 0


def test_numbers_are_put_in_some_or_all():
    extent = 2 * A * B + D
    assert extent.specialize(A=3) == 6 * B + D
    assert extent.specialize(A=3, B=2, D=1) == 13
    assert extent.specialize(A=B + 1) == 2 * B * B + 2 * B + D
    assert extent.symbols == {"A", "B", "D"}


def test_an_expression_is_no_number():
    with pytest.raises(TypeError, match=r"2\*A has symbols and is not a number: give them values with "
                                        r"specialize\(A=...\)"):
        range(2 * A)
    with pytest.raises(TypeError, match="not a number"):
        float(A)


@pytest.mark.parametrize("name", ["", "1a", "f32", "max", "a b", "é", None])
def test_a_symbol_is_a_name_that_means_nothing_else(name):
    with pytest.raises(ValueError, match="a symbol is a name"):
        ir.symbol(name)


def test_the_largest_leaves_out_what_cannot_be_it():
    assert ir.largest(A, 2 * A, A + 3, 7, 2 * A + 7) == 2 * A + 7
    assert str(ir.largest(A, B)) == "max(A, B)"
    assert ir.largest(ir.largest(A, B), A + B) == A + B
    assert ir.largest(A, B).specialize(A=3, B=4) == 4
    assert ir.largest(3, 9, 4) == 9


def test_pieces_are_rounded_up():
    assert ir.ceil_div(7, 2) == 4
    pieces = ir.ceil_div(B, D)
    assert str(pieces) == "ceil(B/D)"
    assert [pieces.specialize(B=10, D=d) for d in (1, 3, 4, 10, 11)] == [10, 4, 3, 1, 1]
    assert pieces.specialize(B=2 * D) == 2
    assert ir.ceil_div(2 * D, D) == 2


def test_whole_numbers_are_added_outside_of_what_is_rounded_up():
    assert ir.ceil_div(A + 2, 2) == ir.ceil_div(A, 2) + 1
    assert str(ir.ceil_div(A - 3, 2)) == "ceil(A/2+1/2)-2"


@given(st.integers(-5, 5), st.integers(1, 5), st.integers(-5, 5), st.integers(1, 5), st.integers(0, 50))
def test_what_is_rounded_up_twice_is_written_as_rounded_once(a, b, c, d, rows):
    once, twice = ir.ceil_div(A + a + b * c, b * d), ir.ceil_div(ir.ceil_div(A + a, b) + c, d)
    assert once == twice
    assert twice.specialize(A=rows) == ceil(Fraction(ceil(Fraction(rows + a, b)) + c, d))


def test_products_and_quotients_of_shapes():
    assert product(()) == 1
    assert quotient((A + 1, 6, B), (A + 1, 3)) == 2 * B
    assert quotient((5,), (2,)) is None
    assert quotient((A,), (A + 1,)) is None
    assert quotient((0, 3), (0,)) == 3


expressions = st.recursive(
    st.integers(-3, 9) | st.sampled_from([A, B, D]),
    lambda inner: st.tuples(st.sampled_from("+-*"), inner, inner), max_leaves=8,
)


def built(tree):
    if not isinstance(tree, tuple):
        return tree
    left, right = built(tree[1]), built(tree[2])
    return left + right if tree[0] == "+" else left - right if tree[0] == "-" else left * right


def evaluated(tree, numbers):
    if not isinstance(tree, tuple):
        return tree if isinstance(tree, int) else numbers[str(tree)]
    left, right = evaluated(tree[1], numbers), evaluated(tree[2], numbers)
    return left + right if tree[0] == "+" else left - right if tree[0] == "-" else left * right


@given(expressions, st.fixed_dictionaries({name: st.integers(0, 7) for name in "ABD"}))
def test_arithmetic_is_that_of_the_numbers_put_in(tree, numbers):
    extent = built(tree)
    found = extent if isinstance(extent, int) else extent.specialize(**numbers)
    assert found == evaluated(tree, numbers)


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 9))
def test_rounding_up_is_that_of_fractions(b, d, a):
    extent = ir.ceil_div(A * B + 3, D)
    assert extent.specialize(A=a, B=b, D=d) == ceil(Fraction(a * b + 3, d))


@given(st.integers(1, 7), st.integers(1, 4), st.integers(0, 7), st.integers(1, 40))
def test_windows_along_a_symbol_are_those_along_its_number(size, step, padding, rows):
    if rows + padding < size:
        return
    builder = ir.Builder()
    x = builder.input("x", ir.TensorType("f64", (A + padding,)))
    (windows,) = builder.emit("windows", [x], {"axis": 0, "size": size, "step": step})
    places, left_over = windows.type.shape[0], (rows + padding - size) % step
    try:
        found = places.specialize(A=rows)
    except ValueError:      # nothing may be left over where A / step is whole otherwise
        assert left_over and (padding - size) % step == 0
        return
    assert found == (rows + padding - size) // step + 1
