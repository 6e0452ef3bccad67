"""Propagation of layouts: from the layouts of a few values to one for every value, by the rules of the ops.

A dim without axes takes the axes of a dim with the same letter of another value in the same op.  The first assignment
stays.  The search order is:

1. A given layout is final, including its unsplit dims.
2. Axes pass from a value to others that have no other dims, forwards and backwards, as far as possible: through
   elementwise ops, transpositions and reductions, and to broadcast operands.  So an activation determines the layouts
   of all values computed from it elementwise.
3. Axes pass through other ops, mostly products, to their outputs, in the order of the program; after each op step 2 is
   repeated from there.  So the batch decides before the weights do.  An axis that two dims of an output could take goes
   to the outer one.
4. Axes pass through these ops to their inputs, in reverse order, likewise.  Steps 3 and 4 repeat until nothing changes.

If values disagree about a letter, the axes of most of them win, then the longest, then those of the first value.

Then every op is placed (`parallelism.layouts.propagation.placement`).  A value without a given layout keeps the layout
in which it is computed.  A partial value is reduced at once into its propagated layout, by all_reduce or
reduce_scatter, unless nothing uses it, or the only op that does can carry the pending reduction
(`parallelism.layouts.propagation.linearity`).  If an op needs a value in another layout, the value is resharded; that
is a `Conflict`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from parallelism.ir.core import Extent, Function, Op, Value
from parallelism.ir.core.lines import on_line
from parallelism.layouts.propagation.annotation import laid_out
from parallelism.layouts.propagation.conflicts import Conflict, Paths
from parallelism.layouts.propagation.devices import Axes, Devices
from parallelism.layouts.propagation.linearity import carries, finite_constants
from parallelism.layouts.propagation.placement import Placement, dealt, dims_of, placement, sharding
from parallelism.layouts.propagation.relations import relation
from parallelism.mesh import Mesh
from parallelism.sharding import TensorSharding

COLLECTIVES = frozenset(
    (
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "permute",
        "send",
        "recv",
        "all_slice",
        "relayout",
    )
)


def propagate(
    function: Function, mesh: Mesh | Mapping[str, Extent], conflicts: list[Conflict] | None = None
) -> Function:
    """The function with a layout on every value.  Given layouts stay; the others are propagated from them.

    Values that had to be resharded for an op are appended to ``conflicts``, with the origins of both layouts.  Layouts
    never change the results.  ``ValueError`` for an axis that the mesh does not have, and for a function with
    collectives.
    """
    devices = Devices.of(mesh)
    given = _given(function, devices)
    if len(given) == len(list(function.values)) and conflicts is None:
        return laid_out(function, given)
    propagation = _Propagation(function, devices, given)
    propagation.spread()
    return laid_out(function, propagation.settle(conflicts))


def _given(function: Function, devices: Devices) -> dict[str, TensorSharding]:
    """The given layouts by names of values."""
    layouts = {value.name: value.layout for value in function.values if value.layout is not None}
    for op in function.ops:
        if op.kind in COLLECTIVES:
            raise ValueError(
                f"@{function.name} has collectives, so it is the program of one device: {op}{on_line(op.line)}"
            )
        if op.kind == "reshard":
            (value,) = op.outputs
            layouts[value.name] = TensorSharding.parse(op["layout"]).over(value.type.ndim)
    for name, layout in layouts.items():
        devices.check(layout, f"@{function.name}, %{name}")
    return layouts


class _Propagation:
    def __init__(self, function: Function, devices: Devices, given: Mapping[str, TensorSharding]) -> None:
        self.function = function
        self.devices = devices
        self.given = given
        self.relations = [relation(op.kind, op.types, op.attributes) for op in function.ops]
        self.values = [(*op.inputs, *op.outputs) for op in function.ops]
        self.letters = [(*rule.inputs, *rule.outputs) for rule in self.relations]
        self.sides: list[tuple[list[int], list[int]]] = []
        """By op, the places in `values` of its inputs, and those of its outputs, without values of given layouts."""
        for op, values in zip(function.ops, self.values, strict=True):
            free = [place for place, value in enumerate(values) if value.name not in given]
            count = len(op.inputs)
            inputs = [place for place in free if place < count]
            outputs = [place for place in free if place >= count]
            self.sides.append((inputs, outputs))
        self.near: dict[str, list[int]] = {value.name: [] for value in function.values}
        for number, values in enumerate(self.values):
            for value in dict.fromkeys(values):
                self.near[value.name].append(number)
        self.dims: dict[str, list[Axes]] = {value.name: [()] * value.type.ndim for value in function.values}
        self.dims |= {name: list(dims_of(layout)) for name, layout in given.items()}
        self.used: dict[str, set[str]] = {value.name: set() for value in function.values}
        self.used |= {name: {*layout.axes, *layout.partial} for name, layout in given.items()}
        self.paths = Paths(function)
        self.dims_of = [[self.dims[value.name] for value in values] for values in self.values]
        """By op, the dims of each of its values, and the axes that each uses."""
        self.used_of = [[self.used[value.name] for value in values] for values in self.values]

    # -- from value to value -------------------------------------------------------------------------------------------

    def spread(self) -> None:
        """Propagate until nothing changes: one-to-one relations first, then one step through each other op."""
        numbers = range(len(self.relations))
        self._one_to_one(numbers)
        # Forwards and backwards, as long as a value of an op changed since the last step to the same side of it.
        waiting = [[True] * len(numbers), [True] * len(numbers)]
        while any(map(any, waiting)):
            for side, order in ((1, numbers), (0, reversed(numbers))):
                for number in order:
                    if not waiting[side][number]:
                        continue
                    waiting[side][number] = False
                    for near in self._near(self._step(number, self.sides[number][side])):
                        waiting[0][near] = waiting[1][near] = True

    def _near(self, changed: Iterable[str]) -> Iterator[int]:
        """The ops that read or make one of these values."""
        for name in changed:
            yield from self.near[name]

    def _step(self, number: int, side: Sequence[int]) -> set[str]:
        """Propagate to the values on one side of an op from all its other values; the names of what changed."""
        changed: dict[str, None] = {}
        for target in side if any(self.used_of[number]) else ():
            others = [i for i in range(len(self.values[number])) if i != target]
            changed.update(dict.fromkeys(value.name for value in self._take(number, target, others)))
        return {*changed}.union(*[self._one_to_one(self.near[name]) for name in changed])

    def _one_to_one(self, numbers: Iterable[int]) -> set[str]:
        """Propagate, from these ops on, between values of which one has all the dims of the other; what changed."""
        waiting, changed = dict.fromkeys(numbers), set[str]()
        while waiting:
            number = next(iter(waiting))
            del waiting[number]
            inputs, outputs = self.sides[number]
            for target in (*outputs, *inputs):
                for value in self._take(number, target, self.relations[number].above[target]):
                    changed.add(value.name)
                    waiting.update(dict.fromkeys(self.near[value.name]))
        return changed

    def _take(self, number: int, target: int, sources: Iterable[int]) -> list[Value]:
        """Give axes to the unsplit dims of a value, from dims of other values with the same letters."""
        letters_of, dims = self.letters[number], self.dims_of[number][target]
        open_dims = [d for d, letter in enumerate(letters_of[target]) if letter and not dims[d]]
        used_of = self.used_of[number]
        sources = [source for source in sources if used_of[source]] if open_dims else []
        if not sources:
            return []
        value = self.values[number][target]
        values, rule, used = self.values[number], self.relations[number], used_of[target]
        dims_of = self.dims_of[number]
        sides = [(values[source], letters_of[source], dims_of[source]) for source in sources]
        changed = []
        for d in open_dims:
            letter = letters_of[target][d]
            assert letter is not None
            asked = [
                (axes, other, e)
                for other, letters, axes_of in sides
                for e, same in enumerate(letters)
                if same == letter and (axes := axes_of[e])
            ]
            if not asked:
                continue
            counts = Counter(axes for axes, _, _ in asked)
            best, source, place = max(asked, key=lambda ask: (counts[ask[0]], len(ask[0])))
            free = next((i for i, axis in enumerate(best) if axis in used), len(best))
            axes = rule.exact(letter, best[:free], self.devices)
            if axes:
                dims[d] = axes
                used.update(axes)
                self.paths.before[value.name, d] = number, source.name, place
                changed.append(value)
        return changed

    # -- placement of every op -----------------------------------------------------------------------------------------

    def settle(self, conflicts: list[Conflict] | None) -> dict[str, TensorSharding]:
        """The layout of every value."""
        layouts = dict(self.given)
        constants = finite_constants(self.function)
        uses = _uses(self.function)
        alone = _used_once(self.function, uses)
        pending: dict[str, TensorSharding] = {}
        for value in self.function.inputs:
            layouts.setdefault(value.name, sharding(tuple(self.dims[value.name])))
        for op in self.function.ops:
            placed = self._placed(op, layouts, constants)
            while stopped := [
                value
                for value, wanted in zip(op.inputs, placed.inputs, strict=True)
                if value.name in pending and layouts[value.name].partial != wanted.partial
            ]:
                for value in stopped:  # No other op has used the value yet.
                    layouts[value.name] = self._reduced(value, pending.pop(value.name))
                placed = self._placed(op, layouts, constants)
            for value, layout in zip(op.outputs, placed.outputs, strict=True):
                if value.name in self.given:
                    continue
                layouts[value.name] = layout
                if layout.partial and uses[value.name]:  # what nobody uses is summed by nobody
                    user = alone.get(value.name)
                    if user is not None and _may_wait(user, value, layout.op, constants):
                        pending[value.name] = layout
                    else:
                        layouts[value.name] = self._reduced(value, layout)
            if conflicts is not None and op.kind != "reshard":
                conflicts.extend(self.paths.conflicts(op, layouts, placed))
        return layouts

    def _placed(self, op: Op, layouts: Mapping[str, TensorSharding], constants: frozenset[str]) -> Placement:
        if op.kind == "reshard":
            return Placement((layouts[op.inputs[0].name],), (layouts[op.outputs[0].name],))
        if op.kind == "deal":
            return dealt(op, layouts[op.inputs[0].name], self.devices)
        homes = tuple(
            layouts.get(value.name) or sharding(tuple(self.dims[value.name])) for value in op.outputs
        )
        return op_placement(
            op, tuple(layouts[value.name] for value in op.inputs), homes, self.devices, constants
        )

    def _reduced(self, value: Value, computed: TensorSharding) -> TensorSharding:
        """The propagated layout of a value, as far as a reduction of the computed layout can reach it."""
        target: list[Axes] = []
        for wish, now in zip(self.dims[value.name], dims_of(computed), strict=True):
            more = wish[len(now) :] if wish[: len(now)] == now else ()
            count = next((i for i, axis in enumerate(more) if axis not in computed.partial), len(more))
            target.append((*now, *more[:count]))
        return sharding(tuple(target))


def op_placement(
    op: Op,
    inputs: tuple[TensorSharding, ...],
    outputs: tuple[TensorSharding, ...],
    devices: Devices,
    constants: frozenset[str],
) -> Placement:
    """The `placement` of an op whose inputs have these layouts."""
    pending = {
        value.name: layout.op for value, layout in zip(op.inputs, inputs, strict=True) if layout.partial
    }
    return placement(
        op.kind, op.types, op.attributes, inputs, outputs, devices, carries=carries(op, pending, constants)
    )


def _may_wait(user: Op, value: Value, op: str, constants: frozenset[str]) -> bool:
    """Whether the only user of a value can carry its pending reduction, if all other addends are partial, too."""
    together = user.inputs if user.operator.linear in ("together", "moves") else [value]
    return user.kind == "reshard" or carries(user, {each.name: op for each in together}, constants)


def _uses(function: Function) -> Counter[str]:
    """How often each value is used, by its name."""
    counts = Counter(value.name for op in function.ops for value in op.inputs)
    counts.update(value.name for value in function.outputs)
    return counts


def _used_once(function: Function, counts: Counter[str]) -> dict[str, Op]:
    """For each value that is used once, the op that uses it."""
    return {value.name: op for op in function.ops for value in op.inputs if counts[value.name] == 1}
