"""Recover from the death of a device: a training resumes from its checkpoint and ends with the same numbers.

Three stages of a perceptron lie on three devices. The training is saved to a file at every third step. When a device
dies, its stage is lost, and all stages resume from the last file.
"""

import tempfile
from pathlib import Path

import numpy as np

from parallelism import Mesh, Pipeline
from pipeline_parallelism import MLP, Adam, Checkpoint
from vcluster import DeviceFailedError, VirtualCluster, faults

mlp = MLP(layer_sizes=(4, 16, 16, 2), pipeline=Pipeline(stages=3, microbatches=4), activation="tanh")
x = np.random.default_rng(0).standard_normal((32, 4))
targets = np.stack([x[:, 0] * x[:, 1], np.abs(x[:, 2])], axis=1)


def train(cluster, steps, path):
    step, done = mlp.train_step(Adam(0.01)), 0
    cluster.run(mlp.checkpoint_step()).result.save(path)
    while done < steps:
        try:
            result = cluster.run(step, x, targets).result
        except DeviceFailedError as error:
            checkpoint = Checkpoint.load(path)
            print(f"rank {error.ranks[0]} was ended by {error.signal} in step {done + 1};", end=" ")
            print(f"all stages resume from step {checkpoint.step}")
            cluster.run(mlp.restore_step(), checkpoint)
            done = checkpoint.step
        else:
            done = result.step
            if done % 3 == 0:
                cluster.run(mlp.checkpoint_step()).result.save(path)
    return result


with tempfile.TemporaryDirectory() as directory, VirtualCluster(Mesh(pp=3)) as cluster:
    path = Path(directory) / "training.checkpoint"
    expected = train(cluster, 10, path)
    print("loss of step 10 without a failure:", round(expected.loss, 6))

    cluster.run(mlp.reset_step())
    with faults.plant(cluster, faults.Kill(rank=1, operation=6, run=11)):  # in the middle of step 8
        result = train(cluster, 10, path)
    print("loss of step 10 with the failure:", round(result.loss, 6))
    layers = zip(result.parameters, expected.parameters, strict=True)
    same = all(np.array_equal(a, b) for ours, theirs in layers for a, b in zip(ours, theirs, strict=True))
    print("the parameters are bitwise equal:", same)
