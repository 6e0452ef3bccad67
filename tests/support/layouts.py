"""Layouts drawn at random, and where their blocks lie, in NumPy alone."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from parallelism.mesh import Mesh
from parallelism.sharding import TensorSharding

OPS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}


def blocks(layout, shape, mesh):
    """By rank, the numbers (in C order) of the elements that it holds; ``layout`` has no ``...``."""
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    found = []
    for rank in range(mesh.size):
        block = numbers
        for d, dim in enumerate(layout.dims):
            for axis in dim.axes:
                block = np.array_split(block, mesh.shape[axis], d)[mesh.index(rank)[axis]]
        found.append(block)
    return found


def largest(layout, shape, mesh):
    """The number of elements of the largest block."""
    return max(block.size for block in blocks(layout, shape, mesh))


def meshes(most_axes=3, most_devices=24):
    """Meshes of a few axes, some of size 1."""
    extents = st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=most_axes)
    small = extents.filter(lambda sizes: np.prod(sizes) <= most_devices)
    return small.map(lambda sizes: Mesh(**dict(zip("xyzw", sizes, strict=False))))


def shapes(most_dims=3, most=9):
    """Shapes with uneven extents, 1 and (seldom) 0 among them."""
    return st.lists(st.sampled_from([0, *range(1, most + 1), *range(1, most + 1)]), max_size=most_dims).map(tuple)


@st.composite
def layouts(draw, mesh, ndim, *, partial=True, ops=tuple(OPS)):
    """A layout of so many dims: each axis splits one of them, is partial, or does nothing."""
    dims = [[] for _ in range(ndim)]
    pending = []
    for axis in draw(st.permutations(mesh.axes)):
        place = draw(st.integers(-1 - partial, ndim - 1))
        if place >= 0:
            dims[place].append(axis)
        elif place == -2:
            pending.append(axis)
    return TensorSharding(*map(tuple, dims), partial=pending, op=draw(st.sampled_from(ops)))


def terms(layout, x, mesh, seed=0):
    """Shards of ``x`` that are partial in earnest: terms at random that add up to it, the same on all replicas."""
    rng = np.random.default_rng(seed)
    pending = [axis for axis in mesh.axes if axis in layout.partial]
    count = int(np.prod([mesh.shape[axis] for axis in pending]))
    whole = rng.integers(-9, 9, (count, *x.shape)).astype(x.dtype)
    whole[0] = x - whole[1:].sum(axis=0)
    held = []
    for rank, block in enumerate(blocks(layout, x.shape, mesh)):
        number = 0
        for axis in pending:
            number = number * mesh.shape[axis] + mesh.index(rank)[axis]
        held.append(whole[number].reshape(-1)[block])
    return held
