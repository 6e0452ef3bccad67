"""A stage of a program at work on a device: its programs, run for each microbatch, and what that has kept."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from parallelism.execution.device_program import ACTIVATIONS
from parallelism.execution.stage_code import StagePrograms
from parallelism.ir import TensorType
from parallelism.layouts.stages import GRADIENT, Part
from parallelism.layouts.stages.messages import packed, unpacked
from parallelism.operation import Device
from parallelism.pipelining import Stage

Array = npt.NDArray[Any]


class ProgramStage(Stage):
    """One stage during one step.

    ``data`` has this device's part of each microbatch, ``weights`` its parts of the weights.  Every op declares itself,
    with the stage, the microbatch and the kind of the action.  What is held: ``activations`` are what an action has
    before it, the message that it takes among it, and what is kept after it; ``gradients`` the sums, from the start,
    and those of a microbatch until they are added.
    """

    def __init__(
        self, device: Device, number: int, programs: StagePrograms, parts: Sequence[Part],
        data: Mapping[str, Sequence[Array]], weights: Mapping[str, Array], *, last: bool,
    ) -> None:
        self.device, self.number, self.programs, self.parts = device, number, programs, parts
        self.data, self.weights, self.last = data, weights, last
        types = programs.types(programs.functions.forward.inputs, programs.functions.trained)
        self.gradients = Gradients(types)
        self.outputs: dict[int, Array] = {}
        """What the last stage has made of each microbatch: its part of the loss."""
        self._kept: dict[int, dict[str, Array]] = {}
        self._last: dict[int, str] = {}
        """Of each microbatch, the kind of its last action."""

    def forward(self, microbatch: int, x: Array | None) -> Array:
        """The message to the next stage."""
        stage = self.programs.of(self.parts[microbatch])
        arrays = {name: parts[microbatch] for name, parts in self.data.items() if name in stage.data}
        self._take("F", microbatch, arrays, stage.received, x)
        self._run("F", microbatch, arrays)
        sent = [arrays[name] for name in stage.sent]
        if self.last:
            self.outputs[microbatch], = sent
        self._kept[microbatch] = {name: arrays[name] for name in stage.saved}
        return packed(sent)

    @property
    def dropped(self) -> Collection[int]:
        """The numbers of the values that are made again before a backward."""
        again = self.programs.functions.recompute
        return range(len(again.outputs)) if again else ()

    def recompute(self, microbatch: int) -> None:
        self._run("R", microbatch, self._kept[microbatch])

    def backward(self, microbatch: int, grad: Array | None) -> Array | None:
        """The message to the stage before; the gradients of the weights are added up."""
        arrays = self._kept.pop(microbatch)
        found = self._backward("B", microbatch, arrays, grad)
        back = len(self.programs.functions.returned)
        self._add(microbatch, found[back:])
        return packed(found[:back])

    def backward_input(self, microbatch: int, grad: Array | None) -> Array | None:
        """The message to the stage before."""
        arrays = self._kept[microbatch]
        found = self._backward("I", microbatch, arrays, grad)
        self._kept[microbatch] = {name: arrays[name] for name in self.programs.functions.between}
        return packed(found[:len(self.programs.functions.returned)])

    def backward_weights(self, microbatch: int) -> None:
        self._add(microbatch, self._run("W", microbatch, self._kept.pop(microbatch)))

    def seconds(self, kind: str, microbatch: int) -> float:
        """None of its own: every op has its price, and what is done between has none."""
        return 0.0

    def held(self, microbatch: int) -> int:
        """Bytes kept for the backward of this microbatch; data, which stays anyway, is none of them."""
        return self.programs.held(self._last.get(microbatch), self.parts[microbatch])

    # -- an action -----------------------------------------------------------------------------------------------------

    def _backward(self, kind: str, microbatch: int, arrays: dict[str, Array], grad: Array | None) -> Sequence[Array]:
        stage = self.programs.of(self.parts[microbatch])
        names = [f"{GRADIENT}{name}" for name in stage.answered]
        if self.last:
            for name, type in zip(names, self.programs.answers(self.parts[microbatch]), strict=True):
                arrays[name] = np.ones(_shape(type), type.dtype)
        self._take(kind, microbatch, arrays, names, grad)
        return self._run(kind, microbatch, arrays)

    def _take(
        self, kind: str, microbatch: int, arrays: dict[str, Array], names: Sequence[str], message: Array | None
    ) -> None:
        """What came from another stage."""
        if message is not None:
            types = self.programs.message(kind, self.parts[microbatch], last=self.last)
            self._hold(ACTIVATIONS, message.nbytes, microbatch)
            arrays.update(zip(names, unpacked(message, types), strict=True))

    def _run(self, kind: str, microbatch: int, arrays: dict[str, Array]) -> Sequence[Array]:
        """Runs an action; what it returns is put among the ``arrays``, by name, too."""
        part = self.parts[microbatch]
        function, program = self.programs.function(kind, part), self.programs.program(kind, part)
        inputs = [arrays[v.name] if v.name in arrays else self.weights[v.name] for v in function.inputs]
        found = program.run(
            self.device, [np.ascontiguousarray(x) if x.ndim else x for x in inputs], stage=self.number,
            microbatch=microbatch, phase=kind if kind != "R" else None)
        arrays.update((value.name, array) for value, array in zip(function.outputs, found, strict=True))
        taken = sum(map(_nbytes, self.programs.message(kind, part, last=self.last)))
        self._last[microbatch] = kind
        for category, nbytes in (*self.programs.left(kind, part), (ACTIVATIONS, taken)):
            self._hold(category, -nbytes, microbatch)       # what is kept is told when it is
        return found

    def _add(self, microbatch: int, gradients: Sequence[Array]) -> None:
        count = sum(array.size for array in gradients)
        if count:
            nbytes = sum(array.nbytes for array in gradients)
            with self.device.compute(
                "add", flops=count, nbytes=3 * nbytes, dtype=gradients[0].dtype, stage=self.number,
                microbatch=microbatch,
            ):
                self.gradients.add(gradients)

    def _hold(self, category: str, nbytes: int, microbatch: int) -> None:
        if nbytes:
            self.device.hold(category, nbytes, stage=self.number, microbatch=microbatch)


class Gradients:
    """The sums of gradients over microbatches, those of one dtype in one array, so that they are summed as one."""

    def __init__(self, types: Sequence[TensorType]) -> None:
        dtypes = dict.fromkeys(type.dtype for type in types)
        self.flat = {
            dtype: np.zeros(sum(prod(_shape(type)) for type in types if type.dtype == dtype), dtype) for dtype in dtypes
        }
        self.types = types

    @property
    def nbytes(self) -> int:
        return sum(flat.nbytes for flat in self.flat.values())

    @property
    def arrays(self) -> list[Array]:
        """Of each weight: views."""
        starts = dict.fromkeys(self.flat, 0)
        found = []
        for type in self.types:
            start, size = starts[type.dtype], prod(_shape(type))
            found.append(self.flat[type.dtype][start:start + size].reshape(_shape(type)))
            starts[type.dtype] += size
        return found

    def add(self, gradients: Sequence[Array]) -> None:
        """Those of one more microbatch."""
        for total, gradient in zip(self.arrays, gradients, strict=True):
            total += gradient


def _shape(type: TensorType) -> tuple[int, ...]:
    return tuple(int(extent) for extent in type.shape)


def _nbytes(type: TensorType) -> int:
    return prod(_shape(type)) * type.dtype.itemsize
