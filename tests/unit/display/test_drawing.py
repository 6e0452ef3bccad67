"""Layouts drawn: who holds which block, within 80 columns."""

import numpy as np
import pytest
from drawn import up_to
from hypothesis import given, strategies as st
from layouts import layouts, meshes, shapes

from parallelism import Mesh, TensorSharding

T = TensorSharding
MESH = Mesh(x=2, y=3)


def test_two_dims():
    assert str(T("x", "y").draw((5, 7), MESH)) == """\
[x, y] of 5x7 on Mesh(x=2, y=3)

      0:3   3:5   5:7
    ┌─────┬─────┬─────┐
0:3 │ 0   │ 1   │ 2   │
    ├─────┼─────┼─────┤
3:5 │ 3   │ 4   │ 5   │
    └─────┴─────┴─────┘
down: dim 0 over x; across: dim 1 over y"""


def test_replicas_stand_in_one_cell_and_what_is_empty_is_told():
    assert str(T(("x", "y")).draw((4,), Mesh(x=2, y=3, z=2))) == """\
[(x, y)] of 4 on Mesh(x=2, y=3, z=2)

   0:1    1:2    2:3    3:4
 ┌──────┬──────┬──────┬──────┐
 │ 0, 1 │ 2, 3 │ 6, 7 │ 8, 9 │
 └──────┴──────┴──────┴──────┘
across: dim 0 over x, y
ranks 4, 5, 10, 11 hold nothing"""


def test_terms_are_joined_by_their_operation():
    assert str(T("y", partial="x").draw((3,), MESH)) == """\
[y] partial=x of 3 on Mesh(x=2, y=3)

    0:1     1:2     2:3
 ┌───────┬───────┬───────┐
 │ 0 + 3 │ 1 + 4 │ 2 + 5 │
 └───────┴───────┴───────┘
across: dim 0 over y
a sum over x is pending"""
    assert "0-2 max 3-5" in str(T(None, partial="x", op="max").draw((3,), MESH))


def test_scalars_single_devices_and_nothing_at_all():
    assert "│ 0-5 │" in str(T().draw((), MESH))
    assert "│ 0 │" in str(T("x").draw((1,), Mesh(x=1))).replace("0   ", "0 ")
    assert str(T("x", "y").draw((0, 7), MESH)) == "[x, y] of 0x7 on Mesh(x=2, y=3)\nranks 0-5 hold nothing"
    assert "rank 1 holds nothing" in str(T("x").draw((1,), Mesh(x=2)))


def test_of_more_dims_two_are_drawn_and_the_others_told():
    layout = T(None, "x", "y")
    text = str(layout.draw((5, 4, 6), MESH))
    assert "down: dim 1 over x; across: dim 2 over y" in text
    assert "too" not in text
    chosen = str(layout.draw((5, 4, 6), MESH, dims=(2, 0)))
    assert "down: dim 2 over y; across: dim 0, whole" in chosen
    assert "dim 1 is split over x, too: a cell lists all ranks that hold a part of it" in chosen
    assert "│ 0, 3 │" in chosen
    for wrong in ((0, 0), (3,), (), (0, 1, 2)):
        with pytest.raises(ValueError, match="shows one or two dims of 0 to 2"):
            layout.draw((5, 4, 6), MESH, dims=wrong)


def test_a_large_mesh_keeps_its_ends():
    text = str(T("dp", "tp").draw((64, 64), Mesh(dp=16, tp=32)))
    assert "…" in text
    assert "│ 0   " in text
    assert "│ 511   │" in text
    assert "512 terms" in str(T(None, partial=("dp", "tp")).draw((64,), Mesh(dp=16, tp=32)))


@given(st.tuples(meshes(4, 64), shapes(4, 40)).flatmap(
    lambda drawn: st.tuples(st.just(drawn[0]), st.just(drawn[1]), layouts(drawn[0], len(drawn[1])))
))
@up_to(60)
def test_every_drawing_has_at_most_80_columns_and_every_rank_is_somewhere(drawn):
    mesh, shape, layout = drawn
    drawing = layout.draw(shape, mesh)
    lines = str(drawing).split("\n")
    assert max(map(len, lines)) <= 80
    widths = {len(line) for line in lines if "│" in line}
    assert len(widths) <= 1, "the grid is straight"
    if mesh.size <= 4 and "…" not in str(drawing):
        told = str(drawing).split("\n", 1)[1] + f", {mesh.size}"
        assert all(str(rank) in told or "-" in told for rank in range(mesh.size))
    page = drawing._repr_html_()
    assert page.count("<tr>") == page.count("</tr>")
    assert np.all([page.count(f"<{tag}") == page.count(f"</{tag}>") for tag in ("table", "td", "th", "caption")])


def test_html_escapes_what_names_say():
    assert "<b>" not in T("<b>").draw((2,), Mesh(**{"<b>": 2}))._repr_html_()
