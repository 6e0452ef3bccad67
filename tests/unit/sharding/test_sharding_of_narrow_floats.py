"""Layouts and reshardings of arrays of bfloat16 and float8."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from parallelism import Mesh, TensorSharding
from parallelism.dtypes import NARROW_FLOATS, as_dtype
from parallelism.resharding import plan_resharding
from parallelism.sharding.partial import OPS, combine, identity

MESH = Mesh(x=2, y=3)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", NARROW_FLOATS.values())
@pytest.mark.parametrize("op", OPS)
def test_the_identity_of_a_reduction_changes_nothing(name, op):
    dtype = as_dtype(name)
    codes = np.arange(2 ** (8 * dtype.itemsize)).astype(f"u{dtype.itemsize}").view(dtype)
    with np.errstate(invalid="ignore"):         # codes of signalling nan
        numbers = codes[np.isfinite(codes)]     # every number that there is
    none = np.full(numbers.shape, identity(op, dtype), dtype)
    for terms in ([numbers, none], [none, numbers]):
        assert combine(op, terms).dtype == dtype
        assert_array_equal(combine(op, terms), numbers)


@pytest.mark.parametrize("name", NARROW_FLOATS.values())
def test_a_tensor_is_cut_and_joined_again(name):
    x = np.random.default_rng(0).normal(size=(7, 5)).astype(as_dtype(name))
    for layout in (TensorSharding("x", "y"), TensorSharding(None, ("y", "x")), TensorSharding("y", None, partial="x"),
                   TensorSharding(None, None, partial=("x", "y"), op="max")):
        shards = layout.shard(x, MESH)
        assert {shard.dtype for shard in shards} == {x.dtype}
        assert_array_equal(layout.unshard(shards, MESH), x)


def test_a_plan_counts_the_bytes_of_the_dtype():
    source, target = TensorSharding("x", None), TensorSharding(None, "x")
    for dtype, nbytes in (("float32", 4), ("bfloat16", 2), ("float8_e5m2", 1)):
        plan = plan_resharding(source, target, (8, 6), dtype, Mesh(x=2))
        assert plan.bytes_received == (4 * 3 * nbytes,) * 2     # the half of the other that is wanted here
        assert f"of {dtype} 8x6 on" in str(plan)
