"""A stage of a program at work: its functions, run for each microbatch, and what that has kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from parallelism.ir import Function, interpret
from parallelism.layouts.batches import Part, rows_of
from parallelism.layouts.messages import packed, unpacked
from parallelism.layouts.stages import GRADIENT, StageFunctions
from parallelism.pipeline_execution import Stage

Array = npt.NDArray[Any]
Run = Callable[[Function, Sequence[Array]], Sequence[Array]]
"""Runs a function on arrays in the order of its inputs, and returns its outputs."""


def interpreted(function: Function, arrays: Sequence[Array]) -> Sequence[Array]:
    """By the reference executor."""
    return interpret(function, arrays).outputs


class ProgramStage(Stage):
    """One stage during one step, on one device.

    ``functions`` have no symbols but those of the ``batch``.  ``parts`` has, by microbatch, the number of its first row
    and how many it has, in a batch of ``whole`` rows; ``data`` begins with the first row of the first microbatch.
    """

    def __init__(
        self, functions: StageFunctions, batch: str, whole: int, parts: Sequence[Part],
        data: Mapping[str, Array], weights: Mapping[str, Array], *, last: bool, run: Run = interpreted,
    ) -> None:
        self.functions, self.batch, self.whole, self.parts = functions, batch, whole, parts
        self.data, self.weights, self.last, self.run = data, weights, last, run
        self.gradients: list[Array] = []
        """Of ``functions.trained``: the sums over the microbatches whose backward is done, in the order of the
        schedule."""
        self.outputs: dict[int, list[Array]] = {}
        """What the last stage has made of each microbatch: its part of the loss."""
        self._kept: dict[int, dict[str, Array]] = {}
        self._of_size: dict[tuple[int, int], StageFunctions] = {}

    def of(self, microbatch: int) -> StageFunctions:
        """The functions for the rows of a microbatch."""
        first, rows = self.parts[microbatch]
        if f"{self.batch}_first" not in self.functions.symbols:
            first = 0
        if (first, rows) not in self._of_size:
            numbers = {self.batch: rows, f"{self.batch}_whole": self.whole, f"{self.batch}_first": first}
            self._of_size[first, rows] = self.functions.specialize(**numbers)
        return self._of_size[first, rows]

    def forward(self, microbatch: int, x: Array | None) -> Array:
        """The message to the next stage."""
        functions = self.of(microbatch)
        arrays = {**self.weights, **self._rows(microbatch)}
        if x is not None:
            types = {value.name: value.type for value in functions.forward.inputs}
            message = unpacked(x, [types[name] for name in functions.received])
            arrays.update(zip(functions.received, message, strict=True))
        self._run(functions.forward, arrays)
        sent = [arrays[name] for name in functions.sent]
        if self.last:
            self.outputs[microbatch] = sent
        self._kept[microbatch] = {name: arrays[name] for name in functions.saved}
        return packed(sent)

    @property
    def dropped(self) -> Collection[int]:
        """The numbers of the values that are made again before a backward."""
        again = self.functions.recompute
        return range(len(again.outputs)) if again else ()

    def recompute(self, microbatch: int) -> None:
        again = self.of(microbatch).recompute
        if again is not None:
            self._run(again, self._kept[microbatch])

    def backward(self, microbatch: int, grad: Array | None) -> Array | None:
        """The message to the stage before; the gradients of the weights are added to ``gradients``."""
        functions = self.of(microbatch)
        found = self._run(functions.backward, self._answered(microbatch, grad))
        del self._kept[microbatch]
        self._add(found[len(functions.returned):])
        return packed(found[:len(functions.returned)])

    def backward_input(self, microbatch: int, grad: Array | None) -> Array | None:
        """The message to the stage before."""
        functions = self.of(microbatch)
        arrays = self._answered(microbatch, grad)
        found = self._run(functions.backward_input, arrays)
        self._kept[microbatch] = {name: arrays[name] for name in functions.between}
        return packed(found[:len(functions.returned)])

    def backward_weights(self, microbatch: int) -> None:
        self._add(self._run(self.of(microbatch).backward_weights, self._kept.pop(microbatch)))

    def cost(self, kind: str, microbatch: int) -> tuple[float, float]:
        """Flops and bytes of the function that does it."""
        functions = self.of(microbatch)
        function = {"F": functions.forward, "B": functions.backward, "I": functions.backward_input,
                    "W": functions.backward_weights, "R": functions.recompute}[kind]
        return (float(function.flops), float(function.nbytes)) if function else (0.0, 0.0)

    def held(self, microbatch: int) -> int:
        """Bytes kept for the backward of this microbatch; data, which stays anyway, is none of them."""
        kept = self._kept.get(microbatch, {})
        return sum(array.nbytes for name, array in kept.items() if name not in self.data)

    def _run(self, function: Function, arrays: dict[str, Array]) -> Sequence[Array]:
        """Runs a function; what it returns is put among the ``arrays``, by name, too."""
        inputs = [arrays[v.name] if v.name in arrays else self.weights[v.name] for v in function.inputs]
        found = self.run(function, inputs)
        arrays.update((value.name, array) for value, array in zip(function.outputs, found, strict=True))
        return found

    def _answered(self, microbatch: int, grad: Array | None) -> dict[str, Array]:
        """What the backward of a microbatch has: what was kept, and the gradients of what was sent."""
        functions = self.of(microbatch)
        sent = {value.name: value.type for value in functions.forward.outputs}
        types = [sent[name] for name in functions.answered]
        grads = [np.ones(type.shape, type.dtype) for type in types] if grad is None else unpacked(grad, types)
        names = [f"{GRADIENT}{name}" for name in functions.answered]
        return {**self._kept[microbatch], **dict(zip(names, grads, strict=True))}

    def _add(self, gradients: Sequence[Array]) -> None:
        self.gradients = [a + b for a, b in zip(self.gradients, gradients, strict=True)] if self.gradients \
            else list(gradients)

    def _rows(self, microbatch: int) -> dict[str, Array]:
        """The data of a microbatch: views."""
        first, rows = self.parts[microbatch]
        return {
            value.name: rows_of(self.data[value.name], value.type, self.batch, first - self.parts[0][0], rows)
            for value in self.functions.forward.inputs if value.name in self.data
        }
