"""What a device runs of a stage: for each kind of action, and each size of a microbatch, the program made ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from parallelism.execution.device_program import ACTIVATIONS, DeviceProgram, Held
from parallelism.ir import Function, TensorType, Value
from parallelism.layouts.localization.localized import localize
from parallelism.layouts.stages import GRADIENT, Part, StageFunctions, gradient_layout
from parallelism.mesh import Mesh

GRADIENTS = "gradients"
_SOURCES = {"F": "F", "R": "FR", "I": "FRI"}
"""Of what is kept after an action, the actions that have made or taken it."""


class StagePrograms:
    """Of one stage, for one place on the mesh of the axes ``inside`` it.

    ``functions`` have no symbols but those of the ``batch``, of ``whole`` rows; where there is such a mesh, every value
    has a layout.  The kinds are those of actions: F, B, I, W, and R for what is computed again.
    """

    def __init__(
        self, functions: StageFunctions, batch: str, whole: int, inside: Mesh | None = None, place: int = 0
    ) -> None:
        self.functions, self.batch, self.whole, self.inside, self.place = functions, batch, whole, inside, place
        self._functions: dict[Part, StageFunctions] = {}
        self._programs: dict[tuple[str, Part], DeviceProgram] = {}

    def of(self, part: Part) -> StageFunctions:
        """The functions for some rows of the batch."""
        part = self._alike(part)
        if part not in self._functions:
            first, rows = part
            numbers = {self.batch: rows, f"{self.batch}_whole": self.whole, f"{self.batch}_first": first}
            self._functions[part] = self.functions.specialize(**numbers)
        return self._functions[part]

    def function(self, kind: str, part: Part) -> Function:
        """What an action of this kind runs, whole."""
        stage = self.of(part)
        again = stage.recompute or Function(f"{self.functions.forward.name}.nothing", (), (), ())
        return {"F": stage.forward, "B": stage.backward, "I": stage.backward_input, "W": stage.backward_weights,
                "R": again}[kind]

    def program(self, kind: str, part: Part) -> DeviceProgram:
        """And this device's part of it.  What it makes counts as activations, gradients of weights as gradients."""
        key = kind, self._alike(part)
        if key not in self._programs:
            function = self.function(*key)
            if self.inside is not None:
                function = localize(function, self.inside).program(self.place)
            first = len(self.functions.returned) if kind == "B" else 0
            trained = function.outputs[first:] if kind in ("B", "W") else ()
            categories = {value.name: ACTIVATIONS for value in function.outputs}
            self._programs[key] = DeviceProgram(function, categories | {v.name: GRADIENTS for v in trained})
        return self._programs[key]

    def left(self, kind: str, part: Part) -> Held:
        """What the program still holds at its end: what it returns."""
        found: dict[str, int] = {}
        for step in self.program(kind, part).steps:
            for sign, held in ((1, step.made), (-1, step.freed)):
                for category, nbytes in held:
                    found[category] = found.get(category, 0) + sign * nbytes
        return tuple((category, nbytes) for category, nbytes in found.items() if nbytes)

    def held(self, kind: str | None, part: Part) -> int:
        """Bytes that a microbatch keeps after its last action, of this kind (None: it has had none), data aside."""
        if kind not in ("F", "R", "I"):
            return 0
        stage = self.of(part)
        made: dict[str, tuple[tuple[str, str], int]] = {
            f"{GRADIENT}{name}": (("", name), _bytes(type))
            for name, type in zip(stage.answered, self.answers(part), strict=True)
        }
        for source in _SOURCES[kind]:
            function, own = self.function(source, part), self.program(source, part).function
            there = {}
            for value, local in zip(function.inputs, own.inputs, strict=True):
                there[local.name] = made.setdefault(value.name, ((source, local.name), _bytes(local.type)))
            for value, local in zip(function.outputs, own.outputs, strict=True):
                made.setdefault(value.name, there.get(local.name, ((source, local.name), _bytes(local.type))))
        again = tuple(value.name for value in stage.recompute.outputs) if stage.recompute else ()
        names = {"F": stage.saved, "R": stage.saved + again, "I": stage.between}[kind]
        return sum(dict(made[name] for name in names if name not in stage.data).values())

    def message(self, kind: str, part: Part, *, last: bool) -> tuple[TensorType, ...]:
        """What an action takes from another stage: the types of this device's parts, in the order of the message."""
        stage = self.of(part)
        if kind == "F":
            return self.types(stage.forward.inputs, stage.received)
        return self.answers(part) if kind in ("B", "I") and not last else ()

    def answers(self, part: Part) -> tuple[TensorType, ...]:
        """The types of this device's parts of the gradients of what is sent."""
        stage = self.of(part)
        return self.types([
            value if value.layout is None else replace(value, layout=gradient_layout(value.layout))
            for value in stage.forward.outputs
        ], stage.answered)

    def types(self, values: Sequence[Value], names: Sequence[str]) -> tuple[TensorType, ...]:
        """The types of this device's parts of values, by their names."""
        by_name = {value.name: value for value in values}
        return tuple(self.local(by_name[name]) for name in names)

    def local(self, value: Value) -> TensorType:
        """The type of this device's part of a value without symbols."""
        if self.inside is None or value.layout is None:
            return value.type
        shape = [int(extent) for extent in value.type.shape]
        return TensorType(value.type.dtype, value.layout.local_shape(shape, self.inside, self.place))

    def _alike(self, part: Part) -> Part:
        """The first of the parts that have the same program."""
        return part if f"{self.batch}_first" in self.functions.symbols else (0, part[1])


def _bytes(type: TensorType) -> int:
    return int(type.nbytes)
