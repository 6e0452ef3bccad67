"""What more memory, or another mesh of the same devices, would buy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallelism import Mesh, ir, models
from parallelism.auto_sharding import auto_shard, dual, other_splits
from parallelism.transforms import SGD
from parallelism.transforms.training import train_step

STEP = train_step(models.mlp((512, 2048, 512), 4096, "f4"), SGD(0.1, momentum=0.9))


@pytest.mark.slow
def test_memory_that_limits_is_worth_what_the_program_takes_less_with_more():
    mesh = Mesh(x=4)
    free = auto_shard(STEP, mesh, "dgx-h100")
    tight = auto_shard(STEP, mesh, "dgx-h100", limit_bytes=free.peak_bytes * 8 // 10)
    assert tight.is_limited and tight.seconds > free.seconds
    found = dual(tight, more_bytes=free.peak_bytes, meshes=[])
    assert found.is_limited and found.is_proved
    assert found.saved_seconds == pytest.approx(tight.seconds - free.seconds, rel=1e-6)
    some = dual(tight, more_bytes=free.peak_bytes // 20, meshes=[])
    again = auto_shard(STEP, mesh, "dgx-h100", limit_bytes=tight.limit_bytes + free.peak_bytes // 20)
    assert some.saved_seconds == pytest.approx(tight.seconds - again.seconds, abs=1e-15)
    assert 0 <= some.saved_seconds <= found.saved_seconds
    assert " more memory a device saves " in str(found) and str(found).endswith(" a run.")


@pytest.mark.slow
def test_memory_that_does_not_limit_is_worth_nothing():
    free = auto_shard(STEP, Mesh(x=2), "dgx-h100")
    assert str(dual(free)) == "1 GB more memory a device saves nothing: memory does not limit."
    roomy = auto_shard(STEP, Mesh(x=2), "dgx-h100", limit_bytes=80_000_000_000)
    assert not roomy.is_limited and dual(roomy).saved_seconds == 0


@pytest.mark.slow
def test_another_mesh_is_worth_the_difference_of_the_seconds():
    few = ir.record(lambda x, w: x @ w, ir.TensorType("f4", (32, 64)), ir.TensorType("f4", (64,)))
    solution = auto_shard(few, Mesh(x=2, y=4), "dgx-h100")
    found, = dual(solution).meshes
    assert found.mesh == Mesh(x=4, y=2) and found.is_proved
    other = auto_shard(few, Mesh(x=4, y=2), "dgx-h100")
    assert found.saved_seconds == pytest.approx(solution.seconds - other.seconds, abs=1e-15)
    assert str(found).startswith("The mesh x=4 y=2 saves ")
    assert str(replace(found, saved_seconds=-1.0)) == "The mesh x=4 y=2 costs 1 s a run"
    assert str(replace(found, saved_seconds=-float("inf"))) == "The mesh x=4 y=2 does not fit"
    assert str(replace(found, is_proved=False)).endswith(" (not proved)")


def test_the_splits_that_are_tried():
    assert other_splits(Mesh(x=8)) == ()
    assert other_splits(Mesh(x=8, y=8)) == (Mesh(x=4, y=16), Mesh(x=16, y=4))
    assert other_splits(Mesh(x=2, y=2)) == ()
    assert other_splits(Mesh(x=2, y=3, z=4, w=1)) == (Mesh(x=4, y=3, z=2, w=1), Mesh(x=2, y=6, z=2, w=1))


@pytest.mark.slow
def test_what_cannot_be_asked():
    solution = auto_shard(models.mlp((64, 32), 16), Mesh(x=2), "dgx-h100")
    with pytest.raises(ValueError, match="more_bytes must be at least 1, got 0"):
        dual(solution, more_bytes=0)
    with pytest.raises(ValueError, match=r"Mesh\(x=4\) has 4 devices, the solution is for 2"):
        dual(solution, meshes=[Mesh(x=4)])
