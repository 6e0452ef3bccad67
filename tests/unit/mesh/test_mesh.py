"""Ranks, coordinates and groups."""

import copy
import pickle
from itertools import product

import numpy as np
import pytest
from hypothesis import given, strategies as st

from parallelism.mesh import Mesh, MeshIndex, split_sizes
from parallelism.mesh.uneven import starts

EXTENTS = st.lists(st.integers(1, 4), min_size=1, max_size=4)
MESHES = EXTENTS.map(lambda extents: Mesh(**dict(zip("abcd", extents, strict=False))))


def test_ranks_are_row_major():
    mesh = Mesh(dp=2, tp=3)
    assert [mesh.rank(dp=d, tp=t) for d, t in product(range(2), range(3))] == list(range(6))
    assert list(mesh) == [MeshIndex(dp=d, tp=t) for d, t in product(range(2), range(3))]
    assert len(mesh) == mesh.size == 6


@given(MESHES)
def test_rank_and_index_are_inverse(mesh):
    assert [mesh.rank(mesh.index(rank)) for rank in range(mesh.size)] == list(range(mesh.size))


@given(MESHES, st.data())
def test_groups_cut_the_ranks_as_numpy_transposes_them(mesh, data):
    axes = tuple(data.draw(st.permutations(mesh.axes)))[: data.draw(st.integers(1, len(mesh.axes)))]
    grid = np.arange(mesh.size).reshape(tuple(mesh.shape.values()))
    others = [axis for axis in mesh.axes if axis not in axes]
    order = [mesh.axes.index(axis) for axis in (*others, *axes)]
    rows = grid.transpose(order).reshape(-1, int(np.prod([mesh.shape[axis] for axis in axes])))
    assert mesh.groups(axes) == tuple(sorted((tuple(map(int, row)) for row in rows), key=lambda row: row[0]))
    for rank in range(mesh.size):
        assert mesh.group(rank, axes) in mesh.groups(axes)
        assert rank in mesh.group(rank, axes)


def test_a_group_along_all_axes_is_everybody_in_the_order_that_was_asked():
    mesh = Mesh(dp=2, tp=2)
    assert mesh.groups() == ((0, 1, 2, 3),)
    assert mesh.groups(("tp", "dp")) == ((0, 2, 1, 3),)
    assert mesh.groups(()) == ((0,), (1,), (2,), (3,))


def test_it_is_a_value():
    mesh = Mesh(dp=2, tp=4)
    assert mesh == Mesh(dp=2, tp=4) != Mesh(tp=4, dp=2)
    assert hash(mesh) == hash(Mesh(dp=2, tp=4))
    assert pickle.loads(pickle.dumps(mesh)) == mesh  # noqa: S301
    assert eval(repr(mesh), {"Mesh": Mesh}) == mesh
    assert eval(repr(mesh.index(5)), {"MeshIndex": MeshIndex}) == mesh.index(5)
    with pytest.raises(TypeError):
        mesh.shape["dp"] = 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("wrong", "error", "told"),
    [
        (lambda m: Mesh(), ValueError, "at least one axis"),
        (lambda m: Mesh(dp=0), ValueError, "'dp' must be at least 1, got 0"),
        (lambda m: m.index(1.0), TypeError, "a rank must be an integer, got 1.0"),
        (lambda m: m.rank(dp=0, tp=1.0), TypeError, "the coordinate on axis 'tp' must be an integer, got 1.0"),
        (lambda m: m.groups(0), TypeError, "axes must be one of the names 'dp', 'tp', a tuple of names, or None; got an int"),
        (lambda m: Mesh(dp=2.0), TypeError, "'dp' must be an integer, got 2.0"),
        (lambda m: Mesh(dp=True), TypeError, "got True"),
        (lambda m: m.groups("pp"), ValueError, "no axis 'pp'; its axes are 'dp', 'tp'"),
        (lambda m: m.groups(("dp", "dp")), ValueError, "named twice"),
        (lambda m: m.groups(3), TypeError, "axes must be one of the names"),
        (lambda m: m.groups((3,)), TypeError, "got 3"),
        (lambda m: m.index(6), ValueError, "ranks 0 to 5, got 6"),
        (lambda m: m.index(-1), ValueError, "ranks 0 to 5, got -1"),
        (lambda m: m.rank(dp=1), ValueError, "needs a coordinate for axis 'tp'; got 'dp'"),
        (lambda m: m.rank(dp=2, tp=0), ValueError, "coordinates 0 to 1, got 2"),
        (lambda m: m.rank(dp=0, tp=0, pp=0), ValueError, "no axis 'pp'"),
        (lambda m: m.index(0)["pp"], ValueError, "no axis 'pp'"),
    ],
)
def test_what_is_wrong_is_told_with_both_values(wrong, error, told):
    with pytest.raises(error, match=told):
        wrong(Mesh(dp=2, tp=3))


@given(st.integers(0, 40), st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_an_extent_is_split_axis_by_axis_as_array_split_does(extent, factors):
    pieces = [np.arange(extent)]
    for factor in factors:
        pieces = [part for piece in pieces for part in np.array_split(piece, factor)]
    sizes = split_sizes(extent, tuple(factors))
    assert sizes == tuple(map(len, pieces))
    assert starts(sizes) == (0, *map(int, np.cumsum(sizes)))


def test_it_is_drawn_as_a_grid_of_its_ranks():
    assert str(Mesh(pp=2, dp=2, tp=3).draw()) == """\
Mesh(pp=2, dp=2, tp=3): 12 devices

           tp=0  tp=1  tp=2
pp=0 dp=0     0     1     2
pp=0 dp=1     3     4     5
pp=1 dp=0     6     7     8
pp=1 dp=1     9    10    11"""
    assert str(Mesh(devices=2).draw()) == """\
Mesh(devices=2): 2 devices

  devices=0  devices=1
          0          1"""
    assert str(Mesh(x=1).draw()).splitlines() == ["Mesh(x=1): 1 device", "", "  x=0", "    0"]


@pytest.mark.parametrize("mesh", [
    Mesh(x=100, y=300), Mesh(x=1000), Mesh(**{"n" * 100: 3, "m" * 100: 70}), Mesh(**dict.fromkeys("abcdefghijkl", 2)),
], ids=range(4))
def test_of_a_large_mesh_the_first_ranks_and_the_last_are_drawn(mesh):
    lines = str(mesh.draw()).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 25
    assert str(mesh.size - 1) in lines[-1]
    page = mesh._repr_html_()
    assert page.count("<tr>") == page.count("</tr>") <= 65
    assert "…" in page or mesh.size <= 64 * 64


def test_the_drawing_of_a_mesh_escapes_what_its_names_say():
    page = Mesh(**{"<b>": 2, "&": 1, "\"x": 2})._repr_html_()
    assert "<b>" not in page
    assert "&lt;b&gt;=1 &amp;=0" in page
    assert all(f">{rank}</div>" in page for rank in range(4))


def test_an_index_is_a_mapping_that_can_be_asked_for_an_axis_it_lacks():
    index = Mesh(dp=2, tp=4).index(5)
    assert "pp" not in index
    assert index.get("pp", 7) == 7
    assert (index.get("tp"), "tp" in index) == (1, True)


@pytest.mark.parametrize("name", ["tp", "size", "axes", "more"])
def test_a_mesh_is_frozen(name):
    mesh = Mesh(dp=2, tp=3)
    with pytest.raises(AttributeError, match=f"a Mesh is immutable; '{name}' cannot be set"):
        setattr(mesh, name, 5)
    assert mesh.size == 6 and copy.copy(mesh) == copy.deepcopy(mesh) == mesh


def test_an_axis_is_no_attribute():
    with pytest.raises(AttributeError, match=r"a mesh has no 'tp'; the size of the axis is mesh.shape\['tp'\]"):
        _ = Mesh(dp=2, tp=3).tp
