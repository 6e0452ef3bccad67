"""From the layouts of a few values to one for every value, by the rules of the dims of the ops between them.

A dim that nobody has laid out takes the axes of a dim with the same letter in an op that both values are in.  What was
found first stays; in this order it is looked for:

1. A layout that a value was given is as it is, dims that are whole included.
2. From a value to others that have no other dims, as far as that leads, forwards and backwards: through elementwise
   ops, transpositions, reductions, to what is broadcast.  So an activation lays out all that is made of it.
3. Through other ops, products above all, to their results, in the order of the program, and after each of them from
   there on as in 2.  So what comes in, the batch, decides before the weights do.  An axis that two dims of one result
   could have goes to the outer one.
4. Through them to what they take, in the reverse order, likewise.  Then 3 again, until nothing changes.

Where values disagree about a letter, the layout of most of them, then the longest, then of the first of them.

Then every op is placed (`parallelism.layouts.propagation.placement`).  A value that was not given a layout lies as it is made; one
that is partial is reduced at once, into the layout that was found for it (an all_reduce, or a reduce_scatter), unless
the one op that needs it can go on with the terms (`parallelism.layouts.propagation.linearity`).  Where an op needs a value otherwise
than it lies, it is laid out anew, and that is a `Conflict`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from parallelism.ir.core import Extent, Function, Op, Value
from parallelism.layouts.propagation.annotation import laid_out
from parallelism.layouts.propagation.conflicts import Conflict, Paths
from parallelism.layouts.propagation.devices import Axes, Devices
from parallelism.layouts.propagation.linearity import carries, finite_constants
from parallelism.layouts.propagation.placement import Placement, dims_of, placement, sharding
from parallelism.layouts.propagation.relations import relation
from parallelism.mesh import Mesh
from parallelism.sharding import TensorSharding

COLLECTIVES = frozenset((
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "send", "recv", "all_slice", "relayout",
))


def propagate(
    function: Function, mesh: Mesh | Mapping[str, Extent], conflicts: list[Conflict] | None = None
) -> Function:
    """The function with a layout on every value: those that are there stay, the others are found.

    ``conflicts`` is given what had to be laid out anew for an op, and why each side wants what it does.  Whatever is
    found, and whatever was annotated, the numbers are those of the whole.  ``ValueError`` for an axis that the mesh has
    not, and for a function with collectives.
    """
    devices = Devices.of(mesh)
    given = _given(function, devices)
    if len(given) == len(list(function.values)) and conflicts is None:
        return laid_out(function, given)
    found = _Propagation(function, devices, given)
    found.spread()
    return laid_out(function, found.settle(conflicts))


def _given(function: Function, devices: Devices) -> dict[str, TensorSharding]:
    """The layouts that are there, by name."""
    found = {value.name: value.layout for value in function.values if value.layout is not None}
    for op in function.ops:
        if op.kind in COLLECTIVES:
            raise ValueError(f"@{function.name} has collectives, as the program of one device: {op}")
        if op.kind == "reshard":
            value, = op.outputs
            found[value.name] = TensorSharding.parse(op["layout"]).over(value.type.ndim)
    for name, layout in found.items():
        devices.check(layout, f"@{function.name}, %{name}")
    return found


class _Propagation:
    def __init__(self, function: Function, devices: Devices, given: Mapping[str, TensorSharding]) -> None:
        self.function = function
        self.devices = devices
        self.given = given
        self.relations = [relation(op.kind, op.types, op.attributes) for op in function.ops]
        self.values = [(*op.inputs, *op.outputs) for op in function.ops]
        self.letters = [(*of.inputs, *of.outputs) for of in self.relations]
        self.sides = [
            (range(len(op.inputs)), range(len(op.inputs), len(values)))
            for op, values in zip(function.ops, self.values, strict=True)
        ]
        self.near: dict[str, list[int]] = {value.name: [] for value in function.values}
        for number, values in enumerate(self.values):
            for value in dict.fromkeys(values):
                self.near[value.name].append(number)
        self.dims: dict[str, list[Axes]] = {}
        self.used: dict[str, set[str]] = {}
        for value in function.values:
            layout = given.get(value.name)
            self.dims[value.name] = list(dims_of(layout)) if layout else [()] * value.type.ndim
            self.used[value.name] = {*layout.axes, *layout.partial} if layout else set()
        self.paths = Paths(function)

    # -- from value to value -------------------------------------------------------------------------------------------

    def spread(self) -> None:
        """Until nothing changes: one to one wherever that goes, then a step through another op, and so on."""
        numbers = range(len(self.relations))
        self._one_to_one(numbers)
        while True:
            changed = sum(self._step(number, self.sides[number][1]) for number in numbers)
            changed += sum(self._step(number, self.sides[number][0]) for number in reversed(numbers))
            if not changed:
                return

    def _step(self, number: int, side: range) -> int:
        """What the values on one side of an op have from any other of it."""
        count = len(self.values[number])
        changed = [
            value for target in side
            for value in self._take(number, target, (i for i in range(count) if i != target))
        ]
        for value in changed:
            self._one_to_one(self.near[value.name])
        return len(changed)

    def _one_to_one(self, numbers: Iterable[int]) -> None:
        """At these ops and wherever it leads, from values that have all the dims of the other."""
        waiting = dict.fromkeys(numbers)
        while waiting:
            number = next(iter(waiting))
            del waiting[number]
            inputs, outputs = self.sides[number]
            for target in (*outputs, *inputs):
                for value in self._take(number, target, self.relations[number].above[target]):
                    waiting.update(dict.fromkeys(self.near[value.name]))

    def _take(self, number: int, target: int, sources: Iterable[int]) -> list[Value]:
        """Axes for the dims of a value that have none, from dims of others with the same letters."""
        value, of = self.values[number][target], self.relations[number]
        dims, used = self.dims[value.name], self.used[value.name]
        open_dims = [d for d, letter in enumerate(self.letters[number][target]) if letter and not dims[d]]
        if value.name in self.given or not open_dims:
            return []
        sides = [(self.values[number][source], self.letters[number][source]) for source in sources]
        changed = []
        for d in open_dims:
            letter = self.letters[number][target][d]
            assert letter is not None
            asked = [
                (axes, other, e) for other, letters in sides for e, same in enumerate(letters)
                if same == letter and (axes := self.dims[other.name][e])
            ]
            if not asked:
                continue
            counts = Counter(axes for axes, _, _ in asked)
            best, source, place = max(asked, key=lambda ask: (counts[ask[0]], len(ask[0])))
            free = next((i for i, axis in enumerate(best) if axis in used), len(best))
            axes = of.exact(letter, best[:free], self.devices)
            if axes:
                dims[d] = axes
                used.update(axes)
                self.paths.came(value, d, number, source, place)
                changed.append(value)
        return changed

    # -- and for every op ----------------------------------------------------------------------------------------------

    def settle(self, conflicts: list[Conflict] | None) -> dict[str, TensorSharding]:
        """The layout of every value."""
        layouts = dict(self.given)
        constants = finite_constants(self.function)
        alone = _used_once(self.function)
        made: dict[str, TensorSharding] = {}
        for value in self.function.inputs:
            layouts.setdefault(value.name, sharding(tuple(self.dims[value.name])))
        for op in self.function.ops:
            found = self._placed(op, layouts, constants)
            while stopped := [
                value for value, wanted in zip(op.inputs, found.inputs, strict=True)
                if value.name in made and layouts[value.name].partial != wanted.partial
            ]:
                for value in stopped:                       # nobody else has seen it yet
                    layouts[value.name] = self._reduced(value, made.pop(value.name))
                found = self._placed(op, layouts, constants)
            for value, layout in zip(op.outputs, found.outputs, strict=True):
                if value.name in self.given:
                    continue
                layouts[value.name] = layout
                if layout.partial:
                    user = alone.get(value.name)
                    if user is not None and (user.kind == "reshard" or _may_wait(user, value, layout.op, constants)):
                        made[value.name] = layout
                    else:
                        layouts[value.name] = self._reduced(value, layout)
            if conflicts is not None and op.kind != "reshard":
                conflicts.extend(self.paths.conflicts(op, layouts, found))
        return layouts

    def _placed(self, op: Op, layouts: Mapping[str, TensorSharding], constants: frozenset[str]) -> Placement:
        if op.kind == "reshard":
            return Placement((layouts[op.inputs[0].name],), (layouts[op.outputs[0].name],))
        homes = tuple(
            layouts.get(value.name) or sharding(tuple(self.dims[value.name])) for value in op.outputs
        )
        return op_placement(op, tuple(layouts[value.name] for value in op.inputs), homes, self.devices, constants)

    def _reduced(self, value: Value, made: TensorSharding) -> TensorSharding:
        """What was found for it, as far as a reduction of what is made leads there."""
        target: list[Axes] = []
        for wish, now in zip(self.dims[value.name], dims_of(made), strict=True):
            more = wish[len(now):] if wish[:len(now)] == now else ()
            count = next((i for i, axis in enumerate(more) if axis not in made.partial), len(more))
            target.append((*now, *more[:count]))
        return sharding(tuple(target))


def op_placement(
    op: Op, inputs: tuple[TensorSharding, ...], outputs: tuple[TensorSharding, ...], devices: Devices,
    constants: frozenset[str],
) -> Placement:
    """`placement` of an op whose inputs lie so."""
    pending = {
        value.name: layout.op for value, layout in zip(op.inputs, inputs, strict=True) if layout.partial
    }
    through = bool(pending) and carries(op, pending, constants)
    return placement(op.kind, op.types, op.attributes, inputs, outputs, devices, carries=through)


def _may_wait(user: Op, value: Value, op: str, constants: frozenset[str]) -> bool:
    """Whether the only user of a value could go on with terms, if those that are added to it are terms, too."""
    together = user.inputs if user.operator.linear in ("together", "moves") else [value]
    return carries(user, {each.name: op for each in together}, constants)


def _used_once(function: Function) -> dict[str, Op]:
    """The op that uses a value, for those that are used once."""
    counts = Counter(value.name for op in function.ops for value in op.inputs)
    counts.update(value.name for value in function.outputs)
    return {value.name: op for op in function.ops for value in op.inputs if counts[value.name] == 1}
