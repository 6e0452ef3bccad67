"""Over three axes: the choices found with the axes joined into two, and how far they are from the least."""

from __future__ import annotations

import math

import numpy as np
import pytest
from auto_programs import random_program

from parallelism import Mesh, TensorSharding, ir, models
from parallelism.auto_sharding import auto_shard, merged_axes
from parallelism.auto_sharding.merged_axes import groupings, is_large, merged, over_merged
from parallelism.layouts import annotate

CUBE = Mesh(x=2, y=2, z=2)
SMALL = models.mlp((64, 128, 32), 16)


@pytest.fixture
def always(monkeypatch):
    """Every program is too large."""
    monkeypatch.setattr(merged_axes, "MOST_SHARDINGS", 0)


def test_neighbours_are_joined():
    assert groupings(CUBE) == [{"x": ("x",), "y_z": ("y", "z")}, {"x_y": ("x", "y"), "z": ("z",)}]
    assert [merged(CUBE, each) for each in groupings(CUBE)] == [Mesh(x=2, y_z=4), Mesh(x_y=4, z=2)]
    assert len(groupings(Mesh(a=2, b=1, c=2, d=2, e=2))) == 3


@pytest.mark.slow
def test_what_is_large():
    assert not is_large(SMALL, Mesh(x=2, y=4, z=1), None)
    assert not is_large(SMALL, CUBE, None)
    assert is_large(models.gpt(32, 16, 4, 2, 8, 4), CUBE, "block.*")


def test_given_layouts_are_joined_where_they_can_be():
    first, second = groupings(CUBE)
    given = annotate(SMALL, {"p.w0": "[x, (y, z)]"})
    layouts = {value.name: value.layout for value in over_merged(given, first).inputs}
    assert layouts["p.w0"] == TensorSharding("x", "y_z")
    assert over_merged(given, second) is None
    for layout in ("[x, y]", "[(z, y), x]", "[y, z]"):
        assert over_merged(annotate(SMALL, {"p.w0": layout}), first) is None


@pytest.mark.usefixtures("always")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_no_slower_than_with_merged_axes_and_no_faster_than_the_least(seed):
    function = random_program(np.random.default_rng(seed), most=1)
    found = auto_shard(function, CUBE, "dgx-h100")
    least = auto_shard(function, CUBE, "dgx-h100", time_limit=math.inf)
    for groups in groupings(CUBE):
        coarse = auto_shard(function, merged(CUBE, groups), "dgx-h100")
        assert found.seconds <= coarse.seconds * (1 + 1e-9)
    assert found.choice.bound_seconds <= least.seconds * (1 + 1e-9) <= found.seconds * (1 + 2e-9)
    assert least.choice.gap == 0
    assert found.simulate(link_sharing=False, fold=True).makespan_seconds == pytest.approx(found.seconds, rel=1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("always")
def test_given_layouts_stay_where_axes_cannot_be_joined():
    builder = ir.Builder()
    x = builder.input("x", ir.TensorType("f8", (64,)))
    given = annotate(builder.function("f", builder.emit("tanh", (x,), {})), {"x": "[(z, y, x)]"})
    found = auto_shard(given, CUBE, "dgx-h100")
    assert found.layout("x") == TensorSharding(("z", "y", "x"))
    assert found.choice.gap == 0        # all choices were priced


@pytest.mark.slow
@pytest.mark.usefixtures("always")
def test_a_limit_of_memory_holds():
    layer = ir.record(lambda x, w: x @ w, ir.TensorType("f8", (64, 32)), ir.TensorType("f8", (32, 16)))
    free = auto_shard(layer, CUBE, "dgx-h100")
    limit = free.peak_bytes - 1
    found = auto_shard(layer, CUBE, "dgx-h100", limit_bytes=limit)
    assert found.peak_bytes <= limit
    assert found.seconds >= free.choice.bound_seconds
