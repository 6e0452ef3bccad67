"""Layouts as values: what each device holds, and the way there and back."""

import pickle

import numpy as np
import pytest
from drawn import up_to
from hypothesis import given, strategies as st
from layouts import OPS, blocks, layouts, meshes, shapes, terms
from numpy.testing import assert_array_equal

from parallelism import DimSharding, Mesh, TensorSharding

T = TensorSharding
MESH = Mesh(x=2, y=3)

tensors = st.tuples(meshes(), shapes()).flatmap(
    lambda drawn: st.tuples(st.just(drawn[0]), st.just(drawn[1]), layouts(drawn[0], len(drawn[1])))
)
few = up_to(40)


# -- a value -----------------------------------------------------------------------------------------------------------


@given(tensors)
@few
def test_it_prints_as_its_constructor_and_is_equal_to_what_that_makes(drawn):
    _, _, layout = drawn
    again = eval(repr(layout), {"TensorSharding": T})
    assert again == layout
    assert hash(again) == hash(layout)
    assert pickle.loads(pickle.dumps(layout)) == layout  # noqa: S301
    assert eval(repr(layout.dims), {"DimSharding": DimSharding}) == layout.dims


def test_the_forms_in_which_it_is_written():
    layout = T("dp", None, ("tp", "pp"))
    assert layout.dims == (DimSharding("dp"), DimSharding(), DimSharding("tp", "pp"))
    assert layout == T(DimSharding("dp"), (), ["tp", "pp"]) == T(("dp",), DimSharding(None), DimSharding(("tp", "pp")))
    assert layout.axes == ("dp", "tp", "pp")
    assert layout.partial == ()
    assert repr(layout) == "TensorSharding('dp', None, ('tp', 'pp'))"
    assert str(T("a", ..., partial=("b", "c"), op="max")) == (
        "TensorSharding('a', ..., partial=('b', 'c'), op='max')"
    )
    assert T.replicated(2) == T(None, None)
    assert T() == T.replicated(0)


def test_what_is_equal_and_what_is_not():
    assert T("x", partial=("y", "z")) == T("x", partial=["z", "y"])
    assert T("x", op="max") == T("x"), "an operation that nothing waits for does not count"
    assert len({T("x"), T("x", None), T("x", ...), T(None, "x"), T(None, partial="x"), T(None, partial="x", op="max"),
                T(("x", "y")), T(("y", "x"))}) == 8
    assert T("x") != "TensorSharding('x')"


def test_it_cannot_be_changed():
    for value, name in ((T("x"), "dims"), (DimSharding("x"), "axes")):
        with pytest.raises(AttributeError):
            setattr(value, name, ())


def test_an_ellipsis_stands_for_any_number_of_whole_dims():
    assert T("x", ..., "y").over(4) == T("x", None, None, "y")
    assert T(..., "y").over(1) == T("y")
    assert T("x", ...).over(2).ellipsis is None
    assert T("x", ...).local_shape((4, 5, 6), MESH, 0) == (2, 5, 6)
    with pytest.raises(ValueError, match=r"\('x', \.\.\., 'y'\) has at least 2 dims, the tensor has 1"):
        T("x", ..., "y").over(1)


# -- what each device holds --------------------------------------------------------------------------------------------


@given(tensors)
@few
def test_a_dim_is_split_axis_by_axis_as_array_split_does(drawn):
    mesh, shape, layout = drawn
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    for rank, block in enumerate(blocks(layout, shape, mesh)):
        assert layout.local_shape(shape, mesh, rank) == block.shape
        assert_array_equal(numbers[layout.slices(shape, mesh, rank)], block)


def test_uneven_extents_over_two_axes():
    sizes = [T(("x", "y")).local_shape((4,), MESH, rank) for rank in range(6)]
    assert sizes == [(1,), (1,), (0,), (1,), (1,), (0,)]
    assert T("y", "x").slices((5, 7), MESH, 4) == (slice(2, 4), slice(4, 7))
    assert T(None, "y", partial="x").local_shape((5, 7), MESH, 5) == (5, 2)
    assert T().slices((), MESH, 3) == ()


def test_groups():
    layout = T("y", None, partial="x")
    mesh = Mesh(x=2, y=3, z=2)
    assert layout.groups(mesh, 0) == mesh.groups("y")
    assert layout.groups(mesh, -1) == tuple((rank,) for rank in range(12))
    assert layout.replica_groups(mesh) == mesh.groups("z")
    assert layout.partial_groups(mesh) == mesh.groups("x")
    assert T(None, partial=("y", "x")).partial_groups(mesh) == mesh.groups(("x", "y")), "in the order of the mesh"
    with pytest.raises(ValueError, match="names dims -2 to 1, got 2"):
        layout.groups(mesh, 2)


# -- there and back ----------------------------------------------------------------------------------------------------


@given(tensors, st.sampled_from([np.float64, np.int16, np.uint8, np.float16, bool]))
@few
def test_unshard_of_shard_is_the_tensor(drawn, dtype):
    mesh, shape, layout = drawn
    x = (np.arange(np.prod(shape)).reshape(shape) % 7 - 3).astype(dtype)
    shards = layout.shard(x, mesh)
    assert [shard.dtype for shard in shards] == [x.dtype] * mesh.size
    whole = layout.unshard(shards, mesh)
    assert_array_equal(whole, x)
    assert whole.dtype == x.dtype
    assert not np.may_share_memory(whole, x)


def test_shards_are_views_and_the_terms_of_a_partial_one_are_not():
    x = np.arange(35.0).reshape(5, 7)
    assert all(np.shares_memory(shard, x) for shard in T("x", "y").shard(x, MESH))
    shards = T(None, None, partial="x", op="max").shard(x, MESH)
    assert [np.shares_memory(shard, x) for shard in shards] == [True] * 3 + [False] * 3
    assert all((shard == -np.inf).all() for shard in shards[3:])
    assert not np.shares_memory(shards[3], shards[4])


@pytest.mark.parametrize(("op", "dtype", "identity"), [
    ("sum", np.int32, 0), ("prod", np.float32, 1), ("max", np.int8, -128), ("min", np.uint8, 255),
    ("max", np.uint8, 0), ("min", np.float64, np.inf), ("max", bool, False), ("min", bool, True), ("sum", complex, 0),
])
def test_others_than_the_first_hold_the_identity(op, dtype, identity):
    x = np.ones(3, dtype)
    first, second = T(None, partial="x", op=op).shard(x, Mesh(x=2))
    assert_array_equal(first, x)
    assert_array_equal(second, np.full(3, identity, dtype))


@given(tensors, st.integers(0, 99))
@few
def test_unshard_adds_up_the_terms_of_each_group(drawn, seed):
    mesh, shape, layout = drawn
    layout = T(*layout.dims, partial=layout.partial)
    x = np.arange(np.prod(shape)).reshape(shape)
    assert_array_equal(layout.unshard(terms(layout, x, mesh, seed), mesh), x)


@pytest.mark.parametrize("op", OPS)
def test_terms_are_combined_in_the_order_of_the_mesh(op):
    held = [np.array([rank + 2.0, 5.0 - rank]) for rank in range(6)]
    expected = held[0]
    for term in held[1:]:
        expected = OPS[op](expected, term)
    assert_array_equal(T(None, partial=("y", "x"), op=op).unshard(held, MESH), expected)


def test_bools_are_added_by_or_and_keep_their_dtype():
    whole = T(None, partial="x").unshard([np.array([True, True, False]), np.array([True, False, False])], Mesh(x=2))
    assert whole.tolist() == [True, True, False]


def test_scalars():
    assert [shard.shape for shard in T().shard(3.5, MESH)] == [()] * 6
    assert T().unshard([np.float64(4)] * 6, MESH) == 4
    assert T(partial="y").unshard(range(6), MESH) == 0 + 1 + 2


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("make", "words"), [
    (lambda: T("a", "a"), "axis 'a' is used twice, by dim 0 and by dim 1"),
    (lambda: T(("a", "b", "a")), "axis 'a' is used twice, by dim 0 and by dim 0"),
    (lambda: T("a", partial=("b", "a")), "axis 'a' is used twice, by dim 0 and by partial"),
    (lambda: T(..., "a", ...), r"at most one \.\.\., got 2"),
    (lambda: T(None, partial="a", op="mean"), "one of sum, prod, max, min, got op='mean'"),
    (lambda: T("z").local_shape((4,), MESH, 0), r"names axis 'z', but the axes of Mesh\(x=2, y=3\) are 'x', 'y'"),
    (lambda: T(None, partial="z").shard(np.ones(4), MESH), "names axis 'z'"),
    (lambda: T("x").local_shape((4, 4), MESH, 0), r"TensorSharding\('x'\) has 1 dim, the tensor has 2: .*\(4, 4\)"),
    (lambda: T("x").slices((-1,), MESH, 0), r"an extent cannot be negative, got shape \(-1,\)"),
    (lambda: T("x").slices((4,), MESH, 6), "ranks 0 to 5, got 6"),
    (lambda: T("x").unshard([np.ones(2)] * 5, MESH), "has 6 devices, got 5 shards"),
    (lambda: T("x").unshard([np.ones(2)] * 5 + [np.ones(3)], MESH),
     r"for shape \(4,\) rank 5 must hold \(2,\), got \(3,\)"),
    (lambda: T("x").unshard([np.ones(2)] * 5 + [np.ones((2, 1))], MESH),
     r"rank 0 has shape \(2,\), rank 5 has \(2, 1\)"),
    (lambda: T("x").unshard([np.ones(1)] * 3 + [np.ones(2)] * 3, MESH),
     r"for shape \(3,\) rank 0 must hold \(2,\), got \(1,\)"),
    (lambda: T().unshard([1] * 5 + [1.5], MESH), "one dtype; rank 0 has int64, rank 5 has float64"),
    (lambda: T(partial="x", op="max").shard(1j, MESH), "a max of complex128 cannot be pending"),
    (lambda: T(partial="x").shard("text", MESH), "a sum of <U4 cannot be pending"),
])
def test_what_does_not_fit_is_told_with_both_names_and_values(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("wrong", [lambda: T(3), lambda: T(("x", None)), lambda: T(partial=2), lambda: DimSharding(1)])
def test_what_is_no_name_is_a_type_error(wrong):
    with pytest.raises(TypeError, match="names of mesh axes"):
        wrong()
