"""After a device has died in the middle of a training, it goes on from its last checkpoint, with the same numbers."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from parallelism.mesh import Mesh
from parallelism.pipelining import Pipeline
from pipeline_parallelism import MLP, SGD, Adam, Checkpoint, MixedStepsError
from vcluster import DeviceFailedError, faults

SIZES = (5, 7, 6, 4, 8, 3)
STEPS = 5


def mlp_of(stages, **options):
    return MLP(layer_sizes=SIZES, pipeline=Pipeline(stages, 3), **options)


def batch(step):
    rng = np.random.default_rng(step)
    return rng.standard_normal((8, SIZES[0])), rng.standard_normal((8, SIZES[-1]))


def train(cluster, mlp, optimizer, path, steps=STEPS):
    """Train to the end, a checkpoint after every second step; from the last one again when a device fails."""
    failures = []
    step = mlp.train_step(optimizer)
    cluster.run(mlp.reset_step())
    cluster.run(mlp.checkpoint_step()).result.save(path)
    done = 0
    while done < steps:
        try:
            done = cluster.run(step, *batch(done)).result.step
            if done % 2 == 0:
                cluster.run(mlp.checkpoint_step()).result.save(path)
        except DeviceFailedError as error:
            failures.append((done, error.ranks))
            checkpoint = Checkpoint.load(path)
            cluster.run(mlp.restore_step(), checkpoint)
            done = checkpoint.step
    return cluster.run(mlp.checkpoint_step()).result, failures


def assert_same_bits(a, b):
    assert (a.step, a.optimizer) == (b.step, b.optimizer)
    for mine, other in zip(a.parameters, b.parameters, strict=True):
        for x, y in zip(mine, other, strict=True):
            assert_array_equal(x, y)
    flat = lambda state: [x for part in state for x in (part if isinstance(part, list) else [part])] if state else []
    for x, y in zip(flat(a.optimizer_state), flat(b.optimizer_state), strict=True):
        assert_array_equal(x, y)


MESHES = [Mesh(pp=3), Mesh(dp=2, pp=2), Mesh(dp=3)]
OPTIMIZERS = [Adam(0.01), SGD(0.1, momentum=0.9), SGD(0.1)]
BOTH = [
    pytest.param(mesh, optimizer, id=f"{mesh}-{optimizer!s:.14}", marks=[pytest.mark.slow] * (i != j))
    for i, mesh in enumerate(MESHES) for j, optimizer in enumerate(OPTIMIZERS)
]
"""Every mesh and every optimizer by default, every pair of them when there is time."""


@pytest.mark.not_on_mpi("a rank that dies ends the job")
@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "optimizer"), BOTH)
def test_a_killed_device_does_not_change_the_numbers(cluster_of, tmp_path, mesh, optimizer):
    cluster = cluster_of(mesh)
    mlp = mlp_of(mesh.shape.get("pp", 1))
    expected, failures = train(cluster, mlp, optimizer, tmp_path / "c")
    assert failures == []
    victim = mesh.size - 1
    # The runs of train(): reset, save, step, step, save, step, step (killed), restore, step, step, save, step (killed).
    kills = [faults.Kill(rank=victim, operation=1, run=run) for run in (7, 12)]
    with faults.plant(cluster, *kills):
        resumed, failures = train(cluster, mlp, optimizer, tmp_path / "c")
    assert failures == [(3, (victim,)), (4, (victim,))]
    assert_same_bits(resumed, expected)


@pytest.mark.sampled(6, 2)
@pytest.mark.not_on_mpi("a rank that dies ends the job")
@pytest.mark.parametrize("operation", range(1, 7))
def test_whenever_in_the_step_it_dies(cluster_of, tmp_path, operation):
    cluster, mlp = cluster_of(Mesh(pp=3)), mlp_of(3)
    expected, _ = train(cluster, mlp, Adam(0.01), tmp_path / "c", steps=2)
    with faults.plant(cluster, faults.Kill(rank=1, operation=operation, run=4)):
        resumed, failures = train(cluster, mlp, Adam(0.01), tmp_path / "c", steps=2)
    assert failures == [(1, (1,))]
    assert_same_bits(resumed, expected)


def test_it_goes_on_with_another_number_of_stages(cluster_of, tmp_path):
    optimizer = Adam(0.01)
    checkpoint, _ = train(cluster_of(Mesh(pp=3)), mlp_of(3), optimizer, tmp_path / "c", steps=3)
    checkpoint.save(tmp_path / "c")
    expected = cluster_of(Mesh(pp=3)).run(mlp_of(3).train_step(optimizer), *batch(3)).result
    other, cluster = mlp_of(2), cluster_of(Mesh(pp=2), "thread")
    cluster.run(other.restore_step(), Checkpoint.load(tmp_path / "c"))
    resumed = cluster.run(other.train_step(optimizer), *batch(3)).result
    assert resumed.loss == expected.loss
    assert resumed.step == expected.step == 4
    for mine, theirs in zip(resumed.parameters, expected.parameters, strict=True):
        assert_array_equal(mine[0], theirs[0])
        assert_array_equal(mine[1], theirs[1])
    reference = other.reference_step(*batch(3), optimizer, previous=checkpoint, microbatches=3)
    assert reference.loss == resumed.loss


@pytest.mark.slow_for("Mesh(dp=2)")
@pytest.mark.not_on_mpi("a rank that dies ends the job")
@pytest.mark.parametrize("mesh", [Mesh(pp=3), Mesh(dp=2)], ids=str)
def test_a_replaced_device_is_noticed_until_the_model_is_whole_again(cluster_of, mesh):
    cluster, mlp = cluster_of(mesh), mlp_of(mesh.shape.get("pp", 1))
    step = mlp.train_step(Adam(0.01))
    cluster.run(mlp.reset_step())
    for i in range(2):
        cluster.run(step, *batch(i))
    kept = cluster.run(mlp.checkpoint_step()).result
    with faults.plant(cluster, faults.Kill(rank=1, operation=1)), pytest.raises(DeviceFailedError):
        cluster.run(lambda device: device.barrier())  # nothing to do with the model
    others = ", ".join(str(rank) for rank in range(mesh.size) if rank != 1)
    with pytest.raises(MixedStepsError, match=f"after 1 on rank 1; after 3 on rank {others}") as caught:
        print(cluster.run(step, *batch(2)).result)
    assert caught.value.steps[:2] == (3, 1)
    for broken, *arguments in ((step, *batch(2)), (mlp.checkpoint_step(),), (mlp.predict_step(), batch(2)[0])):
        run = cluster.run(broken, *arguments)
        with pytest.raises(MixedStepsError, match="restore_step"):
            print(run.result)
    cluster.run(mlp.restore_step(), kept)
    assert cluster.run(step, *batch(2)).result.step == 3
    cluster.run(mlp.reset_step())
    assert cluster.run(step, *batch(0)).result.step == 1


def test_stages_that_finished_a_step_the_others_did_not_are_told_by_rank():
    outputs = [{"step": 2}, {"step": 3}, {"step": 2}]
    for step in (mlp_of(3).train_step(), mlp_of(3).checkpoint_step()):
        with pytest.raises(MixedStepsError, match="after 2 on rank 0, 2; after 3 on rank 1"):
            step.result(Mesh(pp=3), outputs)
    copy = pickle.loads(pickle.dumps(MixedStepsError([2, 3, 2])))  # noqa: S301
    assert copy.steps == (2, 3, 2)
    assert str(copy) == str(MixedStepsError([2, 3, 2]))


def test_what_a_model_cannot_go_on_from_is_refused_on_the_host(cluster_of):
    cluster, mlp = cluster_of(Mesh(pp=2), "thread"), mlp_of(2)
    other, narrow = MLP(layer_sizes=(5, 7, 3), pipeline=Pipeline(2, 3)), mlp_of(2, dtype=np.float32)
    for checkpoint, error, text in [
        (Checkpoint(0, other.initial_parameters()), ValueError, r"6, 4, 8, 3\), and the checkpoint \(5, 7, 3\)"),
        (Checkpoint(0, narrow.initial_parameters()), ValueError, "float64, and the checkpoint float32"),
        ("path", TypeError, "takes a Checkpoint, got str"),
    ]:
        with pytest.raises(error, match=text):
            cluster.run(mlp.restore_step(), checkpoint)
    with pytest.raises(TypeError, match="got nothing"):
        cluster.run(mlp.restore_step())
