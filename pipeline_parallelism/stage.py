"""One stage of a perceptron: its layers, the values it keeps for each microbatch, and its gradients."""

from collections.abc import Callable, Collection, Sequence

from parallelism.arrays import Array
from parallelism.kernels import (
    Activation,
    dense,
    dense_backward_input,
    dense_backward_weights,
    dense_forward_flops,
)
from pipeline_parallelism.trained_stage import Kept, Layer, Layers, TrainedStage

Saved = tuple[Array | None, Array | None]
"""The input of a layer, and its sum before the activation, which the backward needs; None if it was dropped."""
Finish = Callable[[int, Array], Array | None]
"""``finish(microbatch, output)`` of the last stage returns the gradient of the output, or None."""


def layers_forward(
    layers: Sequence[Layer], activations: Sequence[Activation], x: Array
) -> tuple[Array, Layers]:
    """The output, and for each layer its input and its sum before the activation, which the backward needs."""
    saved: Layers = []
    for (weights, bias), activation in zip(layers, activations, strict=True):
        z = dense(x, weights, bias)
        saved.append((x, z))
        x = activation.forward(z)
    return x, saved


def layers_backward_input(
    layers: Sequence[Layer],
    activations: Sequence[Activation],
    sums: Sequence[Array],
    grad: Array,
    *,
    first: bool,
) -> tuple[Array | None, list[Array]]:
    """The gradients of the input and of each layer's sum.  That of the input is None if the layers come ``first``."""
    gradients: list[Array] = []
    for i in reversed(range(len(layers))):
        grad = activations[i].backward(sums[i], grad)
        gradients.append(grad)
        if i or not first:
            grad = dense_backward_input(layers[i][0], grad)
    return None if first else grad, gradients[::-1]


def layers_backward(
    layers: Sequence[Layer],
    activations: Sequence[Activation],
    saved: Sequence[Layer],
    grad: Array,
    *,
    first: bool,
) -> tuple[Array | None, Layers]:
    """The gradients of the input and of the layers.  That of the input is None if the layers come ``first``."""
    inputs, sums = zip(*saved, strict=True)
    grad_input, gradients = layers_backward_input(layers, activations, sums, grad, first=first)
    return grad_input, [dense_backward_weights(x, g) for x, g in zip(inputs, gradients, strict=True)]


class DenseStage(TrainedStage):
    """The layers of one stage on one device, during one step; each has weights ``(inputs, outputs)`` and a bias.

    ``rows`` has the number of rows of each microbatch.  The first stage has its data in ``inputs``, by microbatch.  The
    last one calls ``finish(microbatch, output)``, which returns the gradient of the output.  ``head``, fixed weights
    ``(outputs, classes)``, stands between the output and ``finish`` of a stage with its own loss.  A stage that learns
    ``alone`` does not compute the gradient of its input.  Without ``training`` nothing is kept for a backward.  The
    activations of the layers in ``recompute`` (numbered within the stage) are dropped after the forward and recomputed
    before the backward.
    """

    def __init__(
        self,
        layers: Layers,
        activations: Sequence[Activation],
        rows: Sequence[int],
        *,
        inputs: Sequence[Array] | None = None,
        finish: Finish | None = None,
        head: Array | None = None,
        alone: bool = False,
        training: bool = True,
        recompute: Collection[int] = (),
        accumulate: bool = True,
    ) -> None:
        super().__init__(layers, accumulate=accumulate)
        self.activations, self.rows = activations, rows
        self.head, self.first = head, inputs is not None or alone
        self.inputs, self.finish, self.training, self._dropped = (
            inputs,
            finish,
            training,
            frozenset(recompute),
        )

    @property
    def dropped(self) -> Collection[int]:
        """The layers that are recomputed, numbered within the stage."""
        return self._dropped

    def forward(self, microbatch: int, x: Array | None) -> Array:
        """The stage's output, from its input ``x``; the first stage reads its data."""
        if x is None:
            if self.inputs is None:
                raise ValueError(
                    "a stage that is not the first needs the output of the stage before; got no input"
                )
            x = self.inputs[microbatch]
        y, saved = layers_forward(self.layers, self.activations, x)
        grad = self._finished(microbatch, y)
        if self.training:
            kept: list[Saved] = []
            for i, (x, z) in enumerate(saved):
                kept.append((None if {i - 1, i} <= self._dropped else x, None if i in self._dropped else z))
            self._kept[microbatch] = Kept(
                self.layers, kept, None if len(saved) - 1 in self._dropped else grad
            )
        return y

    def recompute(self, microbatch: int) -> None:
        """Recompute the dropped activations with the weights of the forward."""
        kept = self._kept[microbatch]
        for i in sorted(self._dropped):
            x, _ = kept.saved[i]
            if x is None:
                x = self.activations[i - 1].forward(_there(kept.saved[i - 1][1]))
            kept.saved[i] = x, dense(x, *kept.layers[i])
        if len(kept.saved) - 1 in self._dropped and self.finish is not None:
            y = self.activations[-1].forward(_there(kept.saved[-1][1]))
            kept.output_gradient = self._finished(microbatch, y)

    def _finished(self, microbatch: int, y: Array) -> Array | None:
        """The gradient of the output, if the stage has a loss."""
        if self.finish is None or self.head is None:
            return None if self.finish is None else self.finish(microbatch, y)
        grad = self.finish(microbatch, y @ self.head)
        return None if grad is None else grad @ self.head.T

    def backward_input(self, microbatch: int, grad: Array | None) -> Array | None:
        """The gradient of the input.  The values that `backward_weights` needs are kept."""
        kept = self._kept[microbatch]
        grad, kept.gradients = layers_backward_input(
            kept.layers,
            self.activations,
            [_there(z) for _, z in kept.saved],
            _there(kept.output_gradient) if grad is None else grad,
            first=self.first,
        )
        kept.saved, kept.output_gradient = [(x, None) for x, _ in kept.saved], None
        return grad

    def backward_weights(self, microbatch: int) -> None:
        """Add the gradients of the layers to ``gradients``, and free the values kept for the microbatch."""
        kept = self._kept.pop(microbatch)
        self.add(
            microbatch,
            [
                dense_backward_weights(_there(x), grad)
                for (x, _), grad in zip(kept.saved, kept.gradients, strict=True)
            ],
        )

    def cost(self, kind: str, microbatch: int) -> tuple[float, float]:
        """The flops of the products of an action of this kind (``R``: recomputation), and their bytes read and written.

        Each product reads two of its three arrays and writes the third.
        """
        rows = self.rows[microbatch]
        flops = elements = 0
        for i, (weights, _) in enumerate(self.layers):
            upstream = i > 0 or not self.first
            products = {"F": 1, "B": 1 + upstream, "I": int(upstream), "W": 1, "R": int(i in self._dropped)}[
                kind
            ]
            flops += products * dense_forward_flops(rows, *weights.shape)
            elements += products * (rows * sum(weights.shape) + weights.size)
        has_loss = kind == "F" or (kind == "R" and len(self.layers) - 1 in self._dropped)
        if self.head is not None and self.training and has_loss:
            flops += 2 * dense_forward_flops(rows, *self.head.shape)
            elements += 2 * (rows * sum(self.head.shape) + self.head.size)
        return flops, elements * self.layers[0][0].itemsize

    def held(self, microbatch: int) -> int:
        """The bytes that are kept for the backward of this microbatch, including the stage's input."""
        kept = self._kept.get(microbatch)
        if kept is None:
            return 0
        arrays = [kept.output_gradient, *kept.gradients]
        for pair in kept.saved:
            arrays += pair
        return sum({id(array): array.nbytes for array in arrays if array is not None}.values())


def _there(array: Array | None) -> Array:
    if array is None:
        raise ValueError("a backward needs its forward, and an output gradient; got none")
    return array
