"""A stage of a program at work: its functions, for each microbatch with what that has kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from parallelism.ir import Function, Value, interpret
from parallelism.layouts.messages import packed, unpacked
from parallelism.layouts.microbatches import batch_dim
from parallelism.layouts.stages import GRADIENT, StageFunctions
from parallelism.pipeline_execution import Stage

Array = npt.NDArray[Any]
Run = Callable[[Function, Mapping[str, Array]], Sequence[Array]]
"""Runs a function on arrays by name, some of which it may not take, and returns its outputs."""


def interpreted(function: Function, arrays: Mapping[str, Array]) -> Sequence[Array]:
    """By the reference executor."""
    return interpret(function, [arrays[value.name] for value in function.inputs]).outputs


class ProgramStage(Stage):
    """One stage during one step.

    ``functions`` have no symbols but those of the batch.  ``parts`` has the first row and the number of rows of each
    microbatch, counted in the batch of ``whole`` rows; ``data`` the rows from the first one of them on.
    """

    def __init__(
        self, functions: StageFunctions, batch: str, whole: int, parts: Sequence[tuple[int, int]],
        data: Mapping[str, Array], weights: Mapping[str, Array], run: Run = interpreted,
    ) -> None:
        self.functions, self.batch, self.whole, self.parts = functions, batch, whole, parts
        self.data, self.weights, self.run = data, weights, run
        self.gradients: list[Array] = []
        """Of ``functions.trained``: the sums over the microbatches whose backward is done."""
        self.outputs: dict[int, list[Array]] = {}
        """What the last stage has made of each microbatch: its part of the loss."""
        self._kept: dict[int, dict[str, Array]] = {}
        self._of_size: dict[tuple[int, int], StageFunctions] = {}

    def forward(self, microbatch: int, x: Array | None) -> Array:
        """The message to the next stage."""
        functions = self.of(microbatch)
        arrays = {**self.weights, **self._rows(microbatch)}
        if x is not None:
            inputs = {value.name: value for value in functions.forward.inputs}
            arrays.update(zip(functions.received, unpacked(x, [inputs[n].type for n in functions.received]), strict=True))
        arrays.update(_named(functions.forward.outputs, self.run(functions.forward, arrays)))
        self._kept[microbatch] = {name: arrays[name] for name in functions.saved}
        sent = [arrays[name] for name in functions.sent]
        if x is None or not self._passes_on:
            pass
        return packed(sent)

    def backward(self, microbatch: int, grad: Array | None) -> Array | None:
        functions = self.of(microbatch)
        kept = self._kept.pop(microbatch)
        found = self.run(functions.backward, self._with_gradients(functions, kept, grad))
        back = len(functions.returned)
        self._add(found[back:])
        return packed(found[:back])

    def backward_input(self, microbatch: int, grad: Array | None) -> Array | None:
        functions = self.of(microbatch)
        arrays = self._with_gradients(functions, self._kept[microbatch], grad)
        found = self.run(functions.backward_input, arrays)
        arrays.update(_named(functions.backward_input.outputs, found))
        self._kept[microbatch] = {name: arrays[name] for name in functions.between}
        return packed(found[:len(functions.returned)])
