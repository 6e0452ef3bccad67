"""A convolutional net in plain NumPy, recorded."""

from __future__ import annotations

from typing import Any

import numpy as np

from parallelism.ir.core import Extent, Function, TensorType
from parallelism.ir.recording import record
from parallelism.ir.tracing.current import region
from parallelism.models.layers import cross_entropy

Parameters = dict[str, Any]


def convolution(x: Any, weight: Any) -> Any:
    """A convolution without padding.

    ``x`` is ``(batch, rows, columns, channels)``; ``weight`` is ``(kernel rows, kernel columns, channels, features)``.
    """
    patches = np.lib.stride_tricks.sliding_window_view(x, weight.shape[:2], axis=(1, 2))
    return np.einsum("nhwcij,ijco->nhwo", patches, weight)


def convolutional(
    image: tuple[Extent, Extent, Extent],
    channels: tuple[int, ...],
    classes: int,
    batch: Extent,
    dtype: Any = np.float64,
) -> Function:
    """3x3 convolutions with relu, the mean over the image, and a linear classifier with cross-entropy.

    Batch inputs: ``x`` of shape ``(batch, *image)``, where ``image`` is (rows, columns, channels), and integer
    ``targets`` ``(batch,)``.
    """
    types = {
        f"w{i}": TensorType(dtype, (3, 3, before, after))
        for i, (before, after) in enumerate(zip((image[2], *channels), channels, strict=False))
    }
    types["head"] = TensorType(dtype, (channels[-1], classes))

    def loss(p: Parameters, x: Any, targets: Any) -> Any:
        for i in range(len(channels)):
            with region(f"layer.{i}"):
                x = np.maximum(convolution(x, p[f"w{i}"]), 0)
        with region("head"):
            logits = np.mean(x, axis=(1, 2)) @ p["head"]
        with region("loss"):
            return cross_entropy(logits, targets)

    return record(
        loss, types, TensorType(dtype, (batch, *image)), TensorType(np.int64, (batch,)), name="convolutional"
    )
