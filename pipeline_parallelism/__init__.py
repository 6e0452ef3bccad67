"""Worked strategies between operators: models cut into stages on different devices."""

from parallelism.kernels import SGD, Adam
from pipeline_parallelism.batch_steps import Training
from pipeline_parallelism.checkpoint import Checkpoint, CheckpointError
from pipeline_parallelism.mlp import MLP
from pipeline_parallelism.resident import MixedStepsError
from pipeline_parallelism.transformer import Transformer

__all__ = [
    "MLP",
    "SGD",
    "Adam",
    "Checkpoint",
    "CheckpointError",
    "MixedStepsError",
    "Training",
    "Transformer",
]
