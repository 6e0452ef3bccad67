"""The choices of layouts in a program, with their prices: what the integer program chooses from.

Every op is split in one of its ways (`op_shardings`, even ones only).  Every value lies in one layout: what its op
leaves is brought there at once, and where an op needs another layout, the value is brought from there, once for all ops
that need the same.  A value with one use lies as it is needed.  An input lies in any layout from the beginning, and an
output in any without a pending sum.  Given layouts stay.

The seconds of a choice are the sum of those of its ops and changes of layout, each as `simulate` prices it.  They are
those of the whole program, because all devices do the same at the same time.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.auto_sharding.alike import alike
from parallelism.auto_sharding.op_sharding import OpSharding, op_shardings
from parallelism.auto_sharding.prices import Prices
from parallelism.ir import Function, Op, TensorType
from parallelism.ir.passes import MARK
from parallelism.layouts import Devices
from parallelism.layouts.propagation import finite_constants
from parallelism.mesh import Mesh
from parallelism.sharding import TensorSharding

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
IMPOSSIBLE = np.inf
"""In place of the seconds of a change of layout that is not made: to a pending sum."""


class Within(NamedTuple):
    """A part of the choices."""

    letters: Sequence[Collection[tuple[str | None, ...]]]
    """For each op of the program the letters of its shardings; all shardings if there is none of them."""
    layouts: Mapping[str, Collection[TensorSharding]]
    """For each value layouts in which it may lie, besides those in which it is made or needed."""


class Use(NamedTuple):
    """A place where values of a class are used: an input of the ops of a class."""

    op: int
    """The number of the class of ops."""
    needed: Ints
    """For each sharding of the op the number of the layout that it needs."""


@dataclass(frozen=True)
class OpChoices:
    """The ways to split ops that are alike."""

    ops: tuple[int, ...]
    """Their numbers in the program."""
    shardings: tuple[OpSharding, ...]
    seconds: Floats
    """Of one op, by sharding."""


@dataclass(frozen=True)
class ValueChoices:
    """The layouts of values that are alike."""

    names: tuple[str, ...]
    type: TensorType
    made_by: tuple[int, Ints] | None
    """The class of the op that makes it, and for each of its shardings the layout that it leaves, as a number among
    ``made``.  None for inputs."""
    made: tuple[TensorSharding, ...]
    layouts: tuple[TensorSharding, ...]
    """In which it may lie."""
    needed: tuple[TensorSharding, ...]
    uses: tuple[Use, ...]
    first: Floats
    """Seconds from what is made (rows) to where it lies (columns)."""
    second: Floats
    """Seconds from where it lies (rows) to what is needed (columns)."""


@dataclass(frozen=True)
class Problem:
    """All choices of a program on a mesh."""

    function: Function
    mesh: Mesh
    ops: tuple[OpChoices, ...]
    values: tuple[ValueChoices, ...]
    tied: tuple[tuple[int, int], ...]
    """Classes of values that lie in the same layout."""
    class_of_op: tuple[int, ...]
    """For each op of the program the number of its class."""
    phases: tuple[int, ...]
    """For each class of ops: 0 in the forward, 1 in the backward, 2 after it."""
    bound_seconds: float = np.inf
    """No choice that was left out is faster than this; infinite if none was."""

    def seconds(
        self, ways: Sequence[int], lies: Sequence[int], kept: Collection[tuple[int, int]] | None = None
    ) -> float:
        """The seconds of a choice: for each class of ops a sharding, for each class of values a layout.

        ``kept`` has the copies (class of values, number of the layout) that are kept from the forward to the backward;
        the others are made again in each phase.  None: every copy is made once.
        """
        return self.op_seconds(ways) + self.move_seconds(ways, lies, kept)

    def op_seconds(self, ways: Sequence[int]) -> float:
        """The part of the ops."""
        return sum((len(each.ops) * float(each.seconds[way]) for each, way in zip(self.ops, ways, strict=True)), 0.0)

    def move_seconds(
        self, ways: Sequence[int], lies: Sequence[int], kept: Collection[tuple[int, int]] | None = None
    ) -> float:
        """The part of the changes of layout."""
        total = 0.0
        for number, (each, at) in enumerate(zip(self.values, lies, strict=True)):
            one = 0.0
            if each.made_by is not None:
                op, made = each.made_by
                one += float(each.first[made[ways[op]], at])
            copies = dict.fromkeys((made_in(phase, number, layout, kept), layout)
                                   for phase, layout in self.copies(number, ways, at))
            total += len(each.names) * (one + sum(float(each.second[at, layout]) for _, layout in copies))
        return total

    def number(self, name: str) -> int:
        """The class of a value; ``KeyError`` if the program has none of this name."""
        for number, each in enumerate(self.values):
            if name in each.names:
                return number
        raise KeyError(f"@{self.function.name} has no value %{name}")

    def holding(self, number: int, layout: int) -> "Problem":
        """The same choices, but one class of values lies in one of its layouts."""
        value = self.values[number]
        held = replace(value, layouts=(value.layouts[layout],), first=value.first[:, [layout]],
                       second=value.second[[layout], :])
        return replace(self, values=(*self.values[:number], held, *self.values[number + 1:]))

    def copies(self, value: int, ways: Sequence[int], lies: int) -> tuple[tuple[int, int], ...]:
        """The copies of a value of a class that lies so: the phase that needs one, and the number of its layout."""
        each = self.values[value]
        needed = ((self.phases[use.op], int(use.needed[ways[use.op]])) for use in each.uses)
        return tuple(dict.fromkeys(
            (phase, layout) for phase, layout in needed if each.needed[layout] != each.layouts[lies]))


def made_in(phase: int, value: int, layout: int, kept: Collection[tuple[int, int]] | None) -> int:
    """The phase in which the copy that a phase needs is made."""
    return 0 if kept is None or (phase == 1 and (value, layout) in kept) else phase


def problem_of(
    function: Function, mesh: Mesh, prices: Prices, *, blocks: str | None = None, ties: Iterable[tuple[str, str]] = (),
    within: Within | None = None,
) -> Problem:
    """The choices of a program, priced.

    ``blocks`` is a pattern of regions that are laid out alike; ``ties`` are pairs of names of values that lie alike.
    ``within`` leaves out all other choices.
    ``ValueError`` for a program with symbols or collectives, and for a name that is no value.
    """
    if symbols := ", ".join(sorted(function.symbols)):
        raise ValueError(f"@{function.name} has symbols, {symbols}; specialize it first")
    classes = alike(function, blocks)
    numbers = {each: number for number, each in enumerate(dict.fromkeys(classes.ops))}
    of_op = [numbers[each] for each in classes.ops]
    constants = finite_constants(function)
    firsts: dict[int, Op] = {}
    for op, number in zip(function.ops, of_op, strict=True):
        firsts.setdefault(number, op)
    shardings = [ways_of(op, mesh, constants) for op in firsts.values()]
    flat = iter(prices.ops([each for ways in shardings for each in ways]))
    ops = tuple(
        OpChoices(tuple(at for at, each in enumerate(of_op) if each == number), ways,
                  np.array([next(flat) for _ in ways]))
        for number, ways in enumerate(shardings))
    bound = np.inf
    if within is not None:
        bound = sum(len(each.ops) * float(each.seconds.min()) for each in ops)
        ops = tuple(_only(each, within.letters[each.ops[0]]) for each in ops)
    values = _values(function, mesh, of_op, classes.inputs, ops, prices, {name for pair in ties for name in pair},
                     None if within is None else within.layouts)
    place = {name: number for number, each in enumerate(values) for name in each.names}
    tied = []
    for pair in ties:
        for name in pair:
            if name not in place:
                raise ValueError(f"@{function.name} has no value %{name} to tie")
        if place[pair[0]] != place[pair[1]]:
            tied.append((place[pair[0]], place[pair[1]]))
    return Problem(
        function, mesh, ops, values, tuple(dict.fromkeys(tied)), tuple(of_op), _phases(function, of_op), bound)


def _only(choices: OpChoices, letters: Collection[tuple[str | None, ...]]) -> OpChoices:
    kept = [at for at, way in enumerate(choices.shardings) if way.letters in letters]
    if not kept:
        return choices
    return OpChoices(choices.ops, tuple(choices.shardings[at] for at in kept), choices.seconds[kept])


def _phases(function: Function, of_op: Sequence[int]) -> tuple[int, ...]:
    marked = [op.region is not None and f"{op.region}.".startswith(f"{MARK}.") for op in function.ops]
    first = marked.index(True) if True in marked else len(marked)
    last = len(marked) - marked[::-1].index(True) if True in marked else len(marked)
    found: dict[int, int] = {}
    for at, number in enumerate(of_op):
        found.setdefault(number, (at >= first) + (at >= last))
    return tuple(found[number] for number in range(len(found)))


def ways_of(op: Op, mesh: Mesh, constants: Iterable[str]) -> tuple[OpSharding, ...]:
    """The even shardings of an op; the one of a ``reshard``."""
    if op.kind == "reshard":
        layout = TensorSharding.parse(op["layout"]).over(op.inputs[0].type.ndim)
        return OpSharding(op, (None,) * len(mesh.axes), (layout,), (layout,), mesh),
    return op_shardings(op, mesh, constants=frozenset(constants), even=True)


class _Found(NamedTuple):
    names: list[str]
    type: TensorType
    made_by: tuple[int, int] | None
    uses: tuple[tuple[int, int], ...]
    given: TensorSharding | None
    returned: bool
    tied: bool


def _values(
    function: Function, mesh: Mesh, of_op: Sequence[int], inputs: Mapping[str, int], ops: Sequence[OpChoices],
    prices: Prices, tied: set[str], within: Mapping[str, Collection[TensorSharding]] | None,
) -> tuple[ValueChoices, ...]:
    uses: dict[str, dict[tuple[int, int], None]] = {value.name: {} for value in function.values}
    counts: Counter[str] = Counter()
    for op, number in zip(function.ops, of_op, strict=True):
        for place, value in enumerate(op.inputs):
            uses[value.name][number, place] = None
            counts[value.name] += 1
    returned = {value.name for value in function.outputs}
    made_by = {value.name: (number, place) for op, number in zip(function.ops, of_op, strict=True)
               for place, value in enumerate(op.outputs)}
    found: dict[object, _Found] = {}
    for value in function.values:
        made, name = made_by.get(value.name), value.name
        used = tuple(sorted(uses[name]))
        key = made or inputs[name], used, value.layout, name in returned, name in tied
        found.setdefault(key, _Found([], value.type, made, used, value.layout, name in returned, name in tied))
        found[key].names.append(name)
    drafts = [_draft(each, mesh, ops, within) for each in found.values()]
    asked = _Asked(prices)
    sides = [(asked.table(draft.made, draft.layouts, draft.type, np.ones((len(draft.made), len(draft.layouts)), bool)),
              asked.table(draft.layouts, draft.needed, draft.type, draft.moved)) for draft in drafts]
    seconds = asked.seconds()
    return tuple(
        ValueChoices(
            tuple(draft.of.names), draft.type, draft.made_by, draft.made, draft.layouts, draft.needed, draft.uses,
            seconds[first], seconds[second])
        for draft, (first, second) in zip(drafts, sides, strict=True))


class _Asked:
    """Tables of changes of layout that are to be priced.  Many values ask for the same, so each has a number."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.numbers: dict[tuple[TensorSharding, TensorSharding, TensorType], int] = {}
        self.tables: dict[object, Ints] = {}
        self.ids: dict[TensorSharding, int] = {}

    def table(
        self, rows: Sequence[TensorSharding], columns: Sequence[TensorSharding], type: TensorType,
        wanted: npt.NDArray[np.bool_],
    ) -> Ints:
        """The numbers of the changes from ``rows`` to ``columns``; -1 where one is not wanted or not possible."""
        key = *(tuple(self.ids.setdefault(each, len(self.ids)) for each in side) for side in (rows, columns)), type
        if key not in self.tables:
            table = np.full((len(rows), len(columns)), -1)
            for at, source in enumerate(rows):
                for to, target in enumerate(columns):
                    if reachable(source, target):
                        table[at, to] = self.numbers.setdefault((source, target, type), len(self.numbers))
            self.tables[key] = table
        return np.where(wanted, self.tables[key], -1)

    def seconds(self) -> Floats:
        """The seconds of each change by its number, and at the end what is impossible."""
        return np.array([*self.prices.moves(self.numbers), IMPOSSIBLE])


@dataclass(frozen=True)
class _Draft:
    """A class of values without prices."""

    of: _Found
    type: TensorType
    made_by: tuple[int, Ints] | None
    made: tuple[TensorSharding, ...]
    layouts: tuple[TensorSharding, ...]
    needed: tuple[TensorSharding, ...]
    uses: tuple[Use, ...]

    @property
    def moved(self) -> npt.NDArray[np.bool_]:
        """Which changes may be made from where the value lies (rows) to what is needed (columns)."""
        if self.is_moved_once:
            return np.array([[a == b for b in self.needed] for a in self.layouts], bool).reshape(
                len(self.layouts), len(self.needed))
        return np.ones((len(self.layouts), len(self.needed)), bool)

    @property
    def is_moved_once(self) -> bool:
        """Whether the value lies as its only use needs it."""
        return len(self.uses) == 1 and not self.of.returned and self.of.given is None and not self.of.tied


def reachable(source: TensorSharding, target: TensorSharding) -> bool:
    """Whether a value may be brought from one layout to another: no sum becomes pending."""
    return source == target or not target.partial


def _draft(
    found: _Found, mesh: Mesh, ops: Sequence[OpChoices], within: Mapping[str, Collection[TensorSharding]] | None
) -> _Draft:
    made: dict[TensorSharding, int] = {}
    made_by = None
    if found.made_by is not None:
        op, place = found.made_by
        made_by = op, np.array([made.setdefault(way.outputs[place], len(made)) for way in ops[op].shardings])
    needed: dict[TensorSharding, int] = {}
    uses = tuple(
        Use(op, np.array([needed.setdefault(way.inputs[place], len(needed)) for way in ops[op].shardings]))
        for op, place in found.uses)
    draft = _Draft(found, found.type, made_by, tuple(made), (), tuple(needed), uses)
    if found.given is not None:
        layouts = [found.given]
    elif draft.is_moved_once:
        layouts = [each for each in needed if not each.partial or each in made]
    else:
        layouts = [*made, *(each for each in needed if not each.partial)]
        if within is not None:
            layouts += [each for name in found.names for each in within[name]]
        elif found.returned or found.tied or not layouts:
            layouts += even_layouts(found.type, mesh)
        if found.returned:
            layouts = [each for each in layouts if not each.partial]
    return _Draft(found, found.type, made_by, tuple(made), tuple(dict.fromkeys(layouts)), tuple(needed), uses)


def even_layouts(type: TensorType, mesh: Mesh) -> list[TensorSharding]:
    """The layouts without pending sums in which all devices hold equally much; axes in the order of the mesh."""
    devices, found = Devices.of(mesh), []
    axes = [axis for axis, n in mesh.shape.items() if n > 1]
    for chosen in product([None, *range(type.ndim)], repeat=len(axes)):
        dims = tuple(tuple(axis for axis, dim in zip(axes, chosen, strict=True) if dim == d) for d in range(type.ndim))
        if all(devices.cut(n, split) is None and (not split or n != 1)
               for n, split in zip(type.shape, dims, strict=True)):
            found.append(TensorSharding(*dims))
    return found
