"""One stage of a perceptron: its layers, what it keeps for each microbatch, and the gradients it has summed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt

from parallelism.kernels import (
    Activation,
    dense,
    dense_backward_flops,
    dense_backward_input,
    dense_backward_weights,
    dense_forward_flops,
)

Array = npt.NDArray[Any]
Layer = tuple[Array, Array]
"""Weights ``(inputs, outputs)`` and bias ``(outputs,)``."""
Finish = Callable[[int, Array], Array | None]
"""What the last stage does with a microbatch and its output: it gives the gradient of the output, or None."""


def layers_forward(layers: Sequence[Layer], activations: Sequence[Activation], x: Array) -> tuple[Array, list[Layer]]:
    """The output, and for each layer what its backward needs: its input, and its sum before the activation."""
    saved = []
    for (weights, bias), activation in zip(layers, activations, strict=True):
        z = dense(x, weights, bias)
        saved.append((x, z))
        x = activation.forward(z)
    return x, saved


def layers_backward(
    layers: Sequence[Layer], activations: Sequence[Activation], saved: Sequence[Layer], grad: Array, *, first: bool
) -> tuple[Array | None, list[Layer]]:
    """The gradient of the input (None if the layers come ``first``: nobody wants it), and those of the layers."""
    gradients: list[Layer] = []
    for i in reversed(range(len(layers))):
        x, z = saved[i]
        grad = activations[i].backward(z, grad)
        gradients.append(dense_backward_weights(x, grad))
        if i or not first:
            grad = dense_backward_input(layers[i][0], grad)
    return None if first else grad, gradients[::-1]


def add_layers(a: Sequence[Layer], b: Sequence[Layer]) -> list[Layer]:
    """The sums, layer by layer."""
    return [(weights + w, bias + v) for (weights, bias), (w, v) in zip(a, b, strict=True)]


class DenseStage:
    """The layers of one stage on one device, during one step; a `pipeline_parallelism.execution.Stage`.

    ``rows`` has the rows of each microbatch.  The first stage has its data in ``inputs``, by microbatch; the
    last one calls ``finish(microbatch, output)``, which gives the gradient of the output to start back from.
    Without ``training`` nothing is kept for a backward.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        activations: Sequence[Activation],
        rows: Sequence[int],
        *,
        inputs: Sequence[Array] | None = None,
        finish: Finish | None = None,
        training: bool = True,
    ) -> None:
        self.layers, self.activations, self.rows = layers, activations, rows
        self.inputs, self.finish, self.training = inputs, finish, training
        self.gradients: list[Layer] = []
        """The sums over the microbatches whose backward is done."""
        self._saved: dict[int, list[Layer]] = {}
        self._output_gradients: dict[int, Array] = {}
        self._early: dict[int, list[Layer]] = {}
        self._summed = 0

    def forward(self, microbatch: int, x: Array | None) -> Array:
        """The stage's output for its input, of the first stage for its data."""
        if x is None:
            x = self._data[microbatch]
        y, saved = layers_forward(self.layers, self.activations, x)
        if self.training:
            self._saved[microbatch] = saved
        if self.finish is not None and (grad := self.finish(microbatch, y)) is not None:
            self._output_gradients[microbatch] = grad
        return y

    def backward(self, microbatch: int, grad: Array | None) -> Array | None:
        """The gradient of the input; those of the layers are added to ``gradients``."""
        if grad is None:
            grad = self._output_gradients.pop(microbatch)
        saved = self._saved.pop(microbatch)
        grad, gradients = layers_backward(self.layers, self.activations, saved, grad, first=self.inputs is not None)
        self._add(microbatch, gradients)
        return grad

    def _add(self, microbatch: int, gradients: list[Layer]) -> None:
        # In the order of the microbatches, whatever the schedule's: every schedule gives the same bits.
        self._early[microbatch] = gradients
        while (ready := self._early.pop(self._summed, None)) is not None:
            self.gradients = add_layers(self.gradients, ready) if self._summed else ready
            self._summed += 1

    def cost(self, kind: str, microbatch: int) -> tuple[float, float]:
        """Flops of the products of a forward or a backward, and bytes of what they read and write."""
        rows = self.rows[microbatch]
        flops = elements = 0
        for i, (weights, _) in enumerate(self.layers):
            inputs, outputs = weights.shape
            products = 1
            if kind == "F":
                flops += dense_forward_flops(rows, inputs, outputs)
            else:
                upstream = i > 0 or self.inputs is None
                flops += dense_backward_flops(rows, inputs, outputs, input_gradient=upstream)
                products = 1 + upstream
            # Each product of the three extents reads two of the three arrays and writes the third.
            elements += products * (rows * inputs + inputs * outputs + rows * outputs)
        return flops, elements * self.layers[0][0].itemsize

    def held(self, microbatch: int) -> int:
        """Bytes kept for the backward of this microbatch, the stage's input among them."""
        saved = [array for pair in self._saved.get(microbatch, ()) for array in pair]
        if (grad := self._output_gradients.get(microbatch)) is not None:
            saved.append(grad)
        return sum({id(array): array.nbytes for array in saved}.values())

    @property
    def _data(self) -> Sequence[Array]:
        if self.inputs is None:
            raise ValueError("a stage that is not the first needs the output of the stage before; got no input")
        return self.inputs
