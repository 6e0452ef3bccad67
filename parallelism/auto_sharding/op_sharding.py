"""All shardings of an op over the axes of a mesh, from the rule of its dims alone.

    for sharding in op_shardings(op, Mesh(x=2, y=4)):
        print(sharding.letters, sharding.inputs, sharding.outputs, sharding.flops)

Each axis splits one letter of the rule, or none: then all devices along it do the same.  Several axes may split one
letter, in the order of the mesh.  An output without a letter that is split is partial.  And an op that is linear may
leave a sum pending that is pending in its inputs (`parallelism.layouts.propagation.linearity`).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product

from parallelism.execution.chains import DeclaredCost, declared_cost
from parallelism.ir import Function, Op, Value
from parallelism.ir.core.lines import on_line
from parallelism.layouts import Devices, Localized
from parallelism.layouts.propagation import Relation, carries, placement_by, relation
from parallelism.layouts.propagation.propagation import COLLECTIVES
from parallelism.mesh import Mesh
from parallelism.sharding import TensorSharding

WAITS = "+"
"""In place of a letter: the sum over the axis is pending in the inputs, and stays so."""


@dataclass(frozen=True)
class OpSharding:
    """An op, split over the axes of a mesh."""

    op: Op
    letters: tuple[str | None, ...]
    """For each axis of the mesh the letter that it splits, `WAITS`, or None."""
    inputs: tuple[TensorSharding, ...]
    """The layout that the op needs for each input."""
    outputs: tuple[TensorSharding, ...]
    """The layout in which the op leaves each output; a sum may be pending."""
    mesh: Mesh

    @property
    def pending(self) -> tuple[tuple[str, ...], ...]:
        """For each output the axes over which a reduction is pending."""
        return tuple(layout.partial for layout in self.outputs)

    @cached_property
    def is_even(self) -> bool:
        """Whether the shards of all devices are equally large."""
        return all(
            Devices.of(self.mesh).cut(extent, dim.axes) is None
            for value, layout in zip(
                (*self.op.inputs, *self.op.outputs), (*self.inputs, *self.outputs), strict=True
            )
            for extent, dim in zip(value.type.shape, layout.dims, strict=True)
        )

    @cached_property
    def local(self) -> Op:
        """The op of the first device, whose shards are the largest.  ``ValueError`` if the op has symbols."""
        return Localized(self.function(), Devices.of(self.mesh)).program(0).ops[0]

    @property
    def flops(self) -> float:
        """The floating-point operations of the first device."""
        cost = self._cost
        return 0.0 if cost is None else cost.flops

    @property
    def nbytes(self) -> float:
        """The bytes that the op of the first device reads and writes; a view does neither."""
        cost = self._cost
        return 0.0 if cost is None else cost.nbytes

    @cached_property
    def _cost(self) -> DeclaredCost | None:
        return None if self.local.operator.view else declared_cost(self.local)

    def function(self) -> Function:
        """The program of the op alone, laid out so."""
        op, inputs, outputs = self.placed("x", "y")
        return Function("sharded", tuple(dict.fromkeys(inputs)), (op,), outputs)

    def placed(self, before: str, after: str) -> tuple[Op, tuple[Value, ...], tuple[Value, ...]]:
        """The op in these layouts, with its inputs and outputs, whose names begin with ``before`` and ``after``."""
        inputs: list[Value] = []
        known: dict[tuple[str, TensorSharding], Value] = {}
        for value, layout in zip(self.op.inputs, self.inputs, strict=True):
            name = f"{before}{len(known)}"
            inputs.append(known.setdefault((value.name, layout), Value(name, value.type, layout)))
        outputs = tuple(
            Value(f"{after}{number}", value.type, layout)
            for number, (value, layout) in enumerate(zip(self.op.outputs, self.outputs, strict=True))
        )
        return self.op.with_values(tuple(inputs), outputs), tuple(inputs), outputs


def op_shardings(
    op: Op, mesh: Mesh, *, constants: Collection[str] = frozenset(), even: bool = False
) -> tuple[OpSharding, ...]:
    """All shardings of an op on a mesh; the first one does not split it.

    A letter of extent 1 and an axis of one device split nothing.  ``constants`` are the names of inputs that are a
    single finite number other than zero: by these a pending sum may be multiplied.  ``even`` leaves out shardings with
    unequal shards.  ``ValueError`` for a collective, and for an op that changes layouts: they belong to one device, or
    to one layout.
    """
    if op.kind in COLLECTIVES or op.kind == "reshard":
        raise ValueError(
            f"{op.kind} moves data of given layouts: it cannot be split in other ways: {op}{on_line(op.line)}"
        )
    devices = Devices.of(mesh)
    rule = relation(op.kind, op.types, op.attributes)
    known = dict.fromkeys(chain(*rule.inputs, *rule.outputs))
    letters = [letter for letter in known if letter is not None and rule.extents[letter] != 1]
    carriers = list(_carriers(op, frozenset(constants)))
    any_letter = [None, *letters, WAITS] if carriers else [None, *letters]
    choices = []
    for n in mesh.shape.values():
        choices.append([None] if n == 1 else any_letter)
    found: dict[OpSharding, None] = {}
    for chosen in product(*choices):
        axes_of: dict[str, tuple[str, ...]] = {}
        for axis, letter in zip(mesh.axes, chosen, strict=True):
            if letter is not None:
                axes_of[letter] = (*axes_of.get(letter, ()), axis)
        waiting = axes_of.pop(WAITS, ())
        if not _is_possible(rule, axes_of, waiting, devices):
            continue
        for carrying in carriers if waiting else [(False,) * len(op.inputs)]:
            layouts = placement_by(rule, axes_of, devices, waiting, carrying, "sum" if waiting else rule.op)
            sharding = OpSharding(op, chosen, layouts.inputs, layouts.outputs, mesh)
            if not even or sharding.is_even:
                found[sharding] = None
    return tuple(found)


def _is_possible(
    rule: Relation, axes_of: Mapping[str, tuple[str, ...]], waiting: tuple[str, ...], devices: Devices
) -> bool:
    """Whether each letter can be split over its axes, and no other reduction than a sum meets sums that wait."""
    if any(rule.exact(letter, axes, devices) != axes for letter, axes in axes_of.items()):
        return False
    return not waiting or rule.op == "sum" or axes_of.keys().isdisjoint(chain(*rule.reduced))


def _carriers(op: Op, constants: frozenset[str]) -> Iterator[tuple[bool, ...]]:
    """For each set of inputs whose pending sums the op can carry, whether each input is one of them."""
    names = [value.name for value in op.inputs]
    sets: list[Sequence[str]] = (
        [names] if op.operator.linear in ("together", "moves") else [[name] for name in dict.fromkeys(names)]
    )
    for each in sets:
        if carries(op, dict.fromkeys(each, "sum"), constants):
            yield tuple(name in each for name in names)
