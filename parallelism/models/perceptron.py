"""A multilayer perceptron in plain NumPy, recorded."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from parallelism.ir.core import Extent, Function, TensorType
from parallelism.ir.recording import record
from parallelism.ir.tracing.current import region

Parameters = dict[str, Any]


def mlp(sizes: tuple[Extent, ...], batch: Extent, dtype: Any = np.float64) -> Function:
    """A multilayer perceptron with relu and the mean squared error.

    Inputs: ``w0`` of shape ``(sizes[0], sizes[1])``, ``b0`` ``(sizes[1],)``, ...; ``x`` ``(batch, sizes[0])`` and
    ``targets`` ``(batch, sizes[-1])``.
    """
    types = {}
    for i, (inputs, outputs) in enumerate(pairwise(sizes)):
        types[f"w{i}"] = TensorType(dtype, (inputs, outputs))
        types[f"b{i}"] = TensorType(dtype, (outputs,))
    layers = len(sizes) - 1

    def loss(p: Parameters, x: Any, targets: Any) -> Any:
        for i in range(layers):
            with region(f"layer.{i}"):
                x = x @ p[f"w{i}"] + p[f"b{i}"]
                if i < layers - 1:
                    x = np.maximum(x, 0)
        with region("loss"):
            return np.mean((x - targets) ** 2)

    return record(
        loss, types, TensorType(dtype, (batch, sizes[0])), TensorType(dtype, (batch, sizes[-1])), name="mlp"
    )
