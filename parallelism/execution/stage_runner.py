"""`ProgramStage`: a stage of a program on a device; it runs for each microbatch and keeps values for later actions."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from parallelism.arrays import Array
from parallelism.execution.device_program import ACTIVATIONS, array_maker, contiguous
from parallelism.execution.last_backward import LastBackward
from parallelism.execution.stage_code import StagePrograms
from parallelism.execution.typed_arrays import ArrayMaker
from parallelism.ir import TensorType
from parallelism.layouts.stages import GRADIENT, Part
from parallelism.layouts.stages.messages import packed, unpacked
from parallelism.operation import Device
from parallelism.pipelining import Stage


class ProgramStage(Stage):
    """One stage during one step.

    ``data`` has this device's part of each microbatch, ``weights`` its parts of the weights.  Every op declares its
    cost, with the stage, the microbatch and the kind of the action.  Memory of ``activations`` are the values that an
    action has before it, the received message included, and those that are kept after it; a backward frees each kept
    value after its last read.  Memory of ``gradients`` are the sums, from the start of the step, and each gradient of a
    microbatch until it is added, right after it is there.  Of a single microbatch the gradients are the sums.
    """

    def __init__(
        self,
        device: Device,
        number: int,
        programs: StagePrograms,
        parts: Sequence[Part],
        data: Mapping[str, Sequence[Array]],
        weights: Mapping[str, Array],
        *,
        last: bool,
        closing: LastBackward | None = None,
        apart: bool = False,
    ) -> None:
        self.closing = closing
        """The last backward, if it sums gradients over replicas."""
        self.summed: dict[str, Any] = {}
        """These sums, by the names of weights, each maybe as `Later`."""
        self.device, self.number, self.programs, self.parts = device, number, programs, parts
        self.data, self.weights, self.last = data, weights, last
        self.arrays = array_maker(device)
        types = programs.sum_types if programs.adds_up else ()
        self.gradients = Gradients(types, self.arrays, apart=apart)
        self.outputs: dict[int, Sequence[Array]] = {}
        """The parts of the loss and of other sums by microbatch, on the last stage."""
        self._kept: dict[int, dict[str, Array]] = {}
        """The values that are kept for the next action of a microbatch, by name."""
        self._last: dict[int, str] = {}
        """The kind of the last action of each microbatch."""

    def forward(self, microbatch: int, x: Array | None) -> Array:
        """The message to the next stage."""
        sent = self.act("F", microbatch, x)
        assert sent is not None
        return sent

    @property
    def dropped(self) -> Collection[int]:
        """The numbers of the values that are computed again before a backward."""
        again = self.programs.functions.recompute
        return range(len(again.outputs)) if again else ()

    def recompute(self, microbatch: int) -> None:
        self.act("R", microbatch)

    def backward(self, microbatch: int, grad: Array | None) -> Array | None:
        """The message to the stage before; the gradients of the weights are added up."""
        return self.act("B", microbatch, grad)

    def backward_input(self, microbatch: int, grad: Array | None) -> Array | None:
        """The message to the stage before."""
        return self.act("I", microbatch, grad)

    def backward_weights(self, microbatch: int) -> None:
        self.act("W", microbatch)

    def seconds(self, kind: str, microbatch: int) -> float:
        """Always 0: every op has a price of its own, and the library's Python between the ops has none."""
        return 0.0

    def held(self, microbatch: int) -> int:
        """Bytes kept for the backward of this microbatch, without its data, which is held during the whole step."""
        return self.programs.held(self._last.get(microbatch), self.parts[microbatch])

    def freed(self, microbatch: int) -> int:
        """Bytes of what was kept that the last action of this microbatch has freed after their last reads."""
        return self.programs.freed(self._last[microbatch], self.parts[microbatch])

    # -- an action -----------------------------------------------------------------------------------------------------

    def act(self, kind: str, microbatch: int, message: Array | None = None) -> Array | None:
        """The message that an action sends, of the one that it takes."""
        functions = self.programs.functions
        arrays = self._taken(kind, microbatch)
        if message is not None:
            names = (
                functions.received if kind == "F" else [f"{GRADIENT}{name}" for name in functions.answered]
            )
            types = self.programs.message(kind, self.parts[microbatch], last=self.last)
            self._hold(ACTIVATIONS, message.nbytes, microbatch)
            arrays.update(zip(names, unpacked(message, types), strict=True))
        results = self._run(kind, microbatch, arrays)
        if kind == "F":
            results = [arrays[name] for name in functions.sent]
            if self.last:
                self.outputs[microbatch] = results
        if kind in "FI":
            kept = functions.saved if kind == "F" else functions.between
            self._kept[microbatch] = {name: arrays[name] for name in kept}
        if kind in "RW":
            return None
        sent = results if kind == "F" else results[: len(functions.returned)]
        # It is empty if all stages before learn by themselves.
        return packed(sent) if sent or kind == "F" else self.arrays.full((0,), 0, np.dtype(np.uint8))

    def _taken(self, kind: str, microbatch: int) -> dict[str, Array]:
        """The values that an action finds, by name, without weights: those that are kept, or data."""
        functions = self.programs.functions
        if kind == "F":
            return {name: parts[microbatch] for name, parts in self.data.items() if name in functions.data}
        arrays = self._kept[microbatch] if kind in "RI" else self._kept.pop(microbatch)
        if kind in "BI" and self.last:
            answers = self.programs.answers(self.parts[microbatch])
            for name, type in zip(functions.answered, answers, strict=True):
                arrays[f"{GRADIENT}{name}"] = self.arrays.full(_shape(type), 1, type.dtype)
        return arrays

    def _run(self, kind: str, microbatch: int, arrays: dict[str, Array]) -> Sequence[Array]:
        """The results of an action, which are also put among the ``arrays``, by name."""
        part = self.parts[microbatch]
        function = self.programs.function(kind, part)
        closing = self.closes(kind, microbatch)
        program = closing.program(kind, part) if closing else self.programs.program(kind, part)
        results = program.run(
            self.device,
            self._inputs(kind, part, arrays, closing),
            stage=self.number,
            microbatch=microbatch,
            phase=kind,
        )
        arrays.update((value.name, array) for value, array in zip(function.outputs, results, strict=True))
        gradients = results[self.programs.first_gradient(kind) :] if kind in ("B", "W") else ()
        if gradients and not self.programs.adds_up:
            self.gradients.arrays = [contiguous(each, writeable=True) for each in gradients]
        if closing:
            self.summed.update(
                (name, gradient)
                for name, gradient in zip(self.programs.functions.trained, gradients, strict=True)
                if name in closing.weights
            )
            self._give_up_summed(closing)
        received = sum(int(type.nbytes) for type in self.programs.message(kind, part, last=self.last))
        self._last[microbatch] = kind
        for category, nbytes in (*self.programs.left(kind, part), (ACTIVATIONS, received)):
            self._hold(category, -nbytes, microbatch)  # `run_actions` holds the bytes that are kept
        return results

    def _inputs(
        self, kind: str, part: Part, arrays: dict[str, Array], closing: LastBackward | None
    ) -> list[Array]:
        """The inputs of the program of an action.  Those that the program frees are taken out of the ``arrays``."""
        wanted = self.programs.function(kind, part).inputs
        inputs = [arrays[v.name] if v.name in arrays else self.weights[v.name] for v in wanted]
        if kind in ("B", "W"):
            inputs += self.gradients.arrays
        if closing and self.programs.adds_up:
            self._give_up_summed(closing)
        for name in self.programs.taken_out(kind, part):
            del arrays[name]
        return list(map(contiguous, inputs))

    def _give_up_summed(self, closing: LastBackward) -> None:
        """Keeps no longer the gradients that the last backward sums over replicas."""
        self.gradients.give_up(map(self.programs.functions.trained.index, closing.weights))

    @property
    def unsummed(self) -> Sequence[Array]:
        """The gradients that are not summed over replicas yet.  If none is summed, those of one dtype are one array."""
        if not self.summed:
            return list(self.gradients.flat.values())
        gradients = zip(self.programs.functions.trained, self.gradients.arrays, strict=True)
        return [array for name, array in gradients if name not in self.summed]

    def closes(self, kind: str, microbatch: int) -> LastBackward | None:
        """The `LastBackward` that runs in this action; None in others."""
        closing = self.closing
        return closing if closing and kind in ("B", "W") and microbatch == closing.microbatch else None

    def _hold(self, category: str, nbytes: int, microbatch: int) -> None:
        if nbytes:
            self.device.hold(category, nbytes, stage=self.number, microbatch=microbatch)


class Gradients:
    """The sums of gradients over microbatches.

    Those of one dtype lie in one array, so that they are reduced as one; or each is ``apart``, so that an update frees
    one after the other.
    """

    def __init__(self, types: Sequence[TensorType], arrays: ArrayMaker, *, apart: bool = False) -> None:
        sizes: Counter[Any] = Counter()
        for type in types:
            sizes[type.dtype] += int(type.size)
        self.types = types
        self.flat: dict[Any, Array] = {}
        """By dtype, the array that all sums lie in; none if each is apart."""
        if apart:
            self.arrays: list[Any] = [arrays.full(_shape(type), 0, type.dtype) for type in types]
        else:
            self.flat.update((dtype, arrays.full((size,), 0, dtype)) for dtype, size in sizes.items())
            self.arrays = self._views()
        self.nbytes = sum(int(array.nbytes) for array in self.arrays)

    def _views(self) -> list[Array]:
        """The sum of each weight's gradients, as views."""
        starts = dict.fromkeys(self.flat, 0)
        views = []
        for type in self.types:
            start = starts[type.dtype]
            end = starts[type.dtype] + int(type.size)
            views.append(self.flat[type.dtype][start:end].reshape(_shape(type)))
            starts[type.dtype] = end
        return views

    def give_up(self, places: Iterable[int]) -> None:
        """Keeps the sums at these places no longer, if each is apart: then they are None."""
        if not self.flat:
            for place in places:
                self.arrays[place] = None


def _shape(type: TensorType) -> tuple[int, ...]:
    return tuple(int(extent) for extent in type.shape)
