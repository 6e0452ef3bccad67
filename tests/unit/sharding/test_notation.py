"""Layouts read from text: as printed, as in papers, as torch prints them; and nonsense refused."""

import re

import pytest
from drawn import up_to
from hypothesis import example, given, settings, strategies as st
from layouts import layouts, meshes

from parallelism import Mesh, TensorSharding
from parallelism.display import shortened

T = TensorSharding
MESH = Mesh(x=2, y=3, z=2)

drawn = st.tuples(meshes(), st.integers(0, 3)).flatmap(lambda pair: layouts(*pair))


@given(drawn)
@up_to(40)
def test_what_is_printed_is_read_again(layout):
    assert T.parse(repr(layout)) == layout
    assert T.parse(layout.short()) == layout
    assert T.parse(f"  {repr(layout).replace(',', ' , ')}\n") == layout


@pytest.mark.parametrize(("text", "layout"), [
    ("[]", T()),
    ("[x, None]", T("x", None)),
    ("[x, None, (y, z)]", T("x", None, ("y", "z"))),
    ("['x', -, (\"y\",)]", T("x", None, "y")),
    ("[my_axis, ..., x,]", T("my_axis", ..., "x")),
    ("[x] partial=y", T("x", partial="y")),
    ("[None] op=max, partial=(y, z)", T(None, partial=("y", "z"), op="max")),
    ("[x, None] {U_y}", T("x", None, partial="y")),
    ("x, None", T("x", None)),
    ("TensorSharding()", T()),
    ("TensorSharding('I_x', None, partial='a b')", T("I_x", None, partial="a b")),
])
def test_axes_in_brackets(text, layout):
    assert T.parse(text) == layout


@pytest.mark.parametrize(("text", "layout"), [
    ("I, J", T(None, None)),
    ("I_X, J", T("X", None)),
    ("A[I_x, J_{y,z}] {U_w}", T("x", ("y", "z"), partial="w")),
    ("A[I, J]", T(None, None)),
    ("[I_x, J]", T("x", None)),
    ("weights[In_x, Out]", T("x", None)),
    ("A[..., K_x]", T(..., "x")),
    ("A[I] {U_{v, w}}", T(None, partial=("v", "w"))),
    ("A[I] {U_w: max}", T(None, partial="w", op="max")),
    ("A[]", T()),
])
def test_dims_with_subscripts(text, layout):
    assert T.parse(text) == layout


def test_a_mesh_says_how_its_axes_are_spelt():
    assert T.parse("I_X, J_{YZ} {U_w}", Mesh(x=2, y=2, z=2, w=2)) == T("x", ("y", "z"), partial="w")
    assert T.parse("I_{X,Y}, J", MESH) == T(("x", "y"), None)
    assert T.parse("[I_x, J]", Mesh(I_x=2, J=2)) == T("I_x", "J")
    assert T.parse("I_X", Mesh(X=2, x=2)) == T("X")


@pytest.mark.parametrize(("text", "layout"), [
    ("[S(0), R, P(sum)]", T("x", ..., partial="z")),
    ("[S(1), S(0), S(1)]", T("y", ("x", "z"), ...)),
    ("[R, R, R]", T(...)),
    ("[P(max), R, P(max)]", T(..., partial=("x", "z"), op="max")),
    ("(Shard(dim=2), Replicate(), Partial(sum))", T(None, None, "x", ..., partial="z")),
    ("[P, R, S(0)]", T("z", ..., partial="x")),
    ("[P(product), R, R]", T(..., partial="x", op="prod")),
])
def test_placements_by_mesh_axis(text, layout):
    assert T.parse(text, MESH) == layout


def test_placements_are_read_in_the_order_of_the_mesh():
    for mesh, dims in ((Mesh(a=2, b=4), ("a", "b")), (Mesh(b=4, a=2), ("b", "a"))):
        assert T.parse("[S(0), S(0)]", mesh) == T(dims, ...)


@pytest.mark.parametrize(("text", "wanted", "place", "found"), [
    ("", "a layout, as [x, None]", 0, "the end"),
    ("[x", "']'", 2, "the end"),
    ("[x]]", "partial= or op=", 3, "']'"),
    ("[x,,y]", "an axis, None, ... or a tuple of axes", 3, "','"),
    ("[x; y]", "a name or a bracket", 2, "';'"),
    ("[x 'y']", "']'", 3, "\"'y'\""),
    ("[(x, None)]", "an axis or )", 5, "'None'"),
    ("[x] partial=y partial=z", "partial= or op=, each once", 14, "'partial'"),
    ("[x] op=mean", "sum, prod, max or min", 7, "'mean'"),
    ("A[I_]", "a dim, as I, I_x or J_{y,z}", 2, "'I_'"),
    ("A[I] {w}", "U_ and an axis", 6, "'w'"),
    ("f(x)", "TensorSharding, or a layout without a name in front", 0, "'f'"),
    ("TensorSharding('x', foo='y')", "partial= or op=, each once", 20, "'foo'"),
    ("__import__('os')", "TensorSharding, or a layout without a name in front", 0, "'__import__'"),
])
def test_broken_text_is_told_with_its_place(text, wanted, place, found):
    expected = f"{text!r} is not a layout: expected {wanted} at position {place}, got {found}"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        T.parse(text)


@pytest.mark.parametrize(("text", "words"), [
    ("[S(0), R]", r"expected 3 placements, one for each axis of the mesh, not 2 at position 8"),
    ("[R, R, R, S(0)]", r"expected \] after 3 placements, one for each axis of the mesh at position 10"),
    ("[S(0), P(sum), P(max)]", "expected one operation for all partial axes, not max and sum at position 15"),
    ("[S(x), R, R]", "expected the number of a dim, counted from 0 at position 3, got 'x'"),
    ("[S(0), Q, R]", r"expected S\(dim\), R or P\(op\) at position 7, got 'Q'"),
    ("[P(avg), R, R]", "expected sum, prod, max or min at position 3, got 'avg'"),
    ("[q, None]", r"^'\[q, None\]': TensorSharding\('q', None\) names axis 'q', but the axes of Mesh"),
    ("[x, x]", r"^'\[x, x\]': axis 'x' is used twice"),
])
def test_what_a_mesh_does_not_allow(text, words):
    with pytest.raises(ValueError, match=words):
        T.parse(text, MESH)


def test_placements_need_a_mesh_and_text_is_needed():
    with pytest.raises(ValueError, match=r"so the mesh is needed to read it: parse\(text, mesh\)"):
        T.parse("[S(0), R]")
    with pytest.raises(TypeError, match="must be given as text, got None"):
        T.parse(None)


words = st.sampled_from([
    "x", "None", "I_x", "J_", "S", "R", "P", "partial", "op", "U_w", "TensorSharding", "[", "]", "(", ")", "{", "}",
    ",", "=", ":", "...", "-", "'", '"', "'y'", "0", "12", " ", "sum", "é", "\n", "\\", "🙂",
])


def read(text, mesh):
    """The layout, or the error."""
    try:
        return T.parse(text, mesh)
    except ValueError as error:
        return error


@given(st.one_of(st.text(max_size=30), st.lists(words, max_size=12).map("".join)), st.sampled_from([None, MESH]))
@example("[S(٣), R, R]", MESH)
@example("'\x1f'", None)
@example("0" * 250 + ":", None)
@up_to(150)
def test_any_text_is_a_layout_or_one_value_error_about_it(text, mesh):
    check(text, mesh)


@pytest.mark.slow
@given(st.one_of(st.text(), st.lists(words).map("".join)), st.sampled_from([None, MESH]))
@settings(max_examples=8000)
def test_so_is_very_much_text(text, mesh):
    check(text, mesh)


def check(text, mesh):
    found = read(text, mesh)
    if isinstance(found, ValueError):
        assert shortened(text) in str(found)
        assert "\n" not in str(found)
    else:
        assert T.parse(repr(found)) == found


def test_a_text_that_is_much_too_long_is_refused_in_a_short_error():
    for text in ("(" * 2_000_000, "[" + "x, " * 500_000 + "]", "[" + "x" * 9_000, "A" * 9_000 + "["):
        with pytest.raises(ValueError, match="layout") as caught:
            TensorSharding.parse(text)
        assert len(str(caught.value)) < 1000
