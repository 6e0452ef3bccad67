"""Worked strategies between operators: a model cut into stages that lie on different devices."""

from __future__ import annotations

from parallelism.kernels import SGD, Adam
from pipeline_parallelism.mlp import MLP
from pipeline_parallelism.steps import Training

__all__ = ["MLP", "SGD", "Adam", "Training"]
