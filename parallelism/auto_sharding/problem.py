"""The choices of layouts in a program, with their prices: what the integer program chooses from.

Every op has one of its even shardings (`op_shardings`).  Every value has one layout: what its op makes in another one
is resharded to it at once, and where ops need another one, the value is resharded from it, once for all ops that need
the same.  A value with one use has the layout that is needed.  An input may have any layout from the beginning, and an
output any without a pending sum.  Given layouts stay.

The seconds of a choice are the sum of those of its ops and changes of layout, each as `simulate` prices it.  They are
those of the whole program, because all devices do the same at the same time.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, product
from typing import NamedTuple

import numpy as np

from parallelism.arrays import Floats, Ints
from parallelism.auto_sharding.op_sharding import OpSharding, op_shardings
from parallelism.auto_sharding.prices import Prices
from parallelism.auto_sharding.repeated_blocks import layout_classes
from parallelism.ir import Function, Op, TensorType
from parallelism.ir.passes import MARK
from parallelism.ir.passes.given_arrays import without_number
from parallelism.layouts import Devices
from parallelism.layouts.propagation import finite_constants
from parallelism.mesh import Mesh
from parallelism.sharding import TensorSharding

IMPOSSIBLE = np.inf
"""In place of the seconds of a change of layout that cannot be made: to a pending sum."""


class Candidates(NamedTuple):
    """The choices that a search tries, of all there are."""

    letters: Sequence[Collection[tuple[str | None, ...]]]
    """For each op of the program the letters of the shardings to try; if it has none of these, all are tried."""
    layouts: Mapping[str, Collection[TensorSharding]]
    """For each value the layouts to try, besides those in which it is made or needed."""


class Use(NamedTuple):
    """An input of the ops of a class, at which values of a class are used."""

    op: int
    """The number of the class of ops."""
    needed: Ints
    """For each sharding of the op the number of the layout that it needs."""


@dataclass(frozen=True)
class OpChoices:
    """The shardings among which one is chosen for all ops of a class."""

    ops: tuple[int, ...]
    """Their numbers in the program."""
    shardings: tuple[OpSharding, ...]
    seconds: Floats
    """The seconds of one op, by sharding."""


@dataclass(frozen=True)
class ValueChoices:
    """The layouts among which one is chosen for all values of a class."""

    names: tuple[str, ...]
    type: TensorType
    made_by: tuple[int, Ints] | None
    """The class of the op that makes it, and for each of its shardings the layout that it leaves, as a number among
    ``made``.  None for inputs."""
    made: tuple[TensorSharding, ...]
    """The layouts in which its op may make it."""
    layouts: tuple[TensorSharding, ...]
    """The layouts that it may have."""
    needed: tuple[TensorSharding, ...]
    """The layouts in which ops may need it."""
    uses: tuple[Use, ...]
    first: Floats
    """Seconds from each of ``made`` (rows) to each of ``layouts`` (columns)."""
    second: Floats
    """Seconds from each of ``layouts`` (rows) to each of ``needed`` (columns)."""


@dataclass(frozen=True)
class Problem:
    """All choices of a program on a mesh."""

    function: Function
    mesh: Mesh
    ops: tuple[OpChoices, ...]
    values: tuple[ValueChoices, ...]
    tied: tuple[tuple[int, int], ...]
    """Classes of values that have the same layout."""
    class_of_op: tuple[int, ...]
    """For each op of the program the number of its class."""
    phases: tuple[int, ...]
    """For each class of ops: 0 in the forward, 1 in the backward, 2 after it."""
    bound_seconds: float = np.inf
    """No choice that was left out is faster than this; infinite if none was."""

    def seconds(
        self,
        sharding_of: Sequence[int],
        layout_of: Sequence[int],
        kept: Collection[tuple[int, int]] | None = None,
    ) -> float:
        """The seconds of a choice: for each class of ops a sharding, for each class of values a layout.

        ``kept`` has the copies (class of values, number of the layout) that are kept from the forward to the backward;
        the others are made again in each phase.  None: every copy is made once.
        """
        return self.op_seconds(sharding_of) + self.move_seconds(sharding_of, layout_of, kept)

    def op_seconds(self, sharding_of: Sequence[int]) -> float:
        """The seconds that ops take."""
        chosen = zip(self.ops, sharding_of, strict=True)
        return sum((len(each.ops) * float(each.seconds[sharding]) for each, sharding in chosen), 0.0)

    def move_seconds(
        self,
        sharding_of: Sequence[int],
        layout_of: Sequence[int],
        kept: Collection[tuple[int, int]] | None = None,
    ) -> float:
        """The seconds that changes of layout take."""
        total = 0.0
        for number, (each, at) in enumerate(zip(self.values, layout_of, strict=True)):
            one = 0.0
            if each.made_by is not None:
                op, made = each.made_by
                one += float(each.first[made[sharding_of[op]], at])
            copies = dict.fromkeys(
                (made_in(phase, number, layout, kept), layout)
                for phase, layout in self.copies(number, sharding_of, at)
            )
            total += len(each.names) * (one + sum(float(each.second[at, layout]) for _, layout in copies))
        return total

    def number(self, name: str) -> int:
        """The class of a value; ``KeyError`` if the program has none of this name."""
        for number, each in enumerate(self.values):
            if name in each.names:
                return number
        raise KeyError(f"@{self.function.name} has no value %{name}")

    def holding(self, number: int, layout: int) -> "Problem":
        """The same choices, but one class of values has only one of its layouts."""
        value = self.values[number]
        held = replace(
            value,
            layouts=(value.layouts[layout],),
            first=value.first[:, [layout]],
            second=value.second[[layout], :],
        )
        return replace(self, values=(*self.values[:number], held, *self.values[number + 1 :]))

    def copies(self, value: int, sharding_of: Sequence[int], at: int) -> tuple[tuple[int, int], ...]:
        """The copies of a value of a class in layout ``at``: the phase that needs one, and the number of its layout."""
        each = self.values[value]
        needed = ((self.phases[use.op], int(use.needed[sharding_of[use.op]])) for use in each.uses)
        return tuple(
            dict.fromkeys(
                (phase, layout) for phase, layout in needed if each.needed[layout] != each.layouts[at]
            )
        )


def made_in(phase: int, value: int, layout: int, kept: Collection[tuple[int, int]] | None) -> int:
    """The phase in which the copy that a phase needs is made."""
    return 0 if kept is None or (phase == 1 and (value, layout) in kept) else phase


def problem_of(
    function: Function,
    mesh: Mesh,
    prices: Prices,
    *,
    blocks: str | None = None,
    ties: Iterable[tuple[str, str]] = (),
    within: Candidates | None = None,
) -> Problem:
    """The choices of a program, priced.

    Regions that match ``blocks`` get the same layouts, and so do the values that a pair of ``ties`` names.  ``within``
    leaves out all other choices.

    ``ValueError`` for a program with symbols or collectives, and for a name that is no value.
    """
    if function.symbols:
        raise without_number(function.name, function.symbols)
    classes = layout_classes(function, blocks)
    numbers = {each: number for number, each in enumerate(dict.fromkeys(classes.ops))}
    of_op = [numbers[each] for each in classes.ops]
    ops = _op_choices(function, mesh, of_op, prices)
    bound = np.inf
    if within is not None:
        bound = sum(len(each.ops) * float(each.seconds.min()) for each in ops)
        ops = tuple(_only(each, within.letters[each.ops[0]]) for each in ops)
    values = _values(
        function,
        mesh,
        of_op,
        classes.inputs,
        ops,
        prices,
        {name for pair in ties for name in pair},
        None if within is None else within.layouts,
    )
    class_of = {name: number for number, each in enumerate(values) for name in each.names}
    tied: dict[tuple[int, int], None] = {}
    for pair in ties:
        for name in pair:
            if name not in class_of:
                raise ValueError(f"@{function.name} has no value %{name} to tie")
        a, b = class_of[pair[0]], class_of[pair[1]]
        if a != b:
            tied[a, b] = None
    return Problem(function, mesh, ops, values, tuple(tied), tuple(of_op), _phases(function, of_op), bound)


def _op_choices(
    function: Function, mesh: Mesh, of_op: Sequence[int], prices: Prices
) -> tuple[OpChoices, ...]:
    """The shardings of each class of ops, priced together."""
    members: dict[int, list[int]] = {}
    for at, number in enumerate(of_op):
        members.setdefault(number, []).append(at)
    constants = finite_constants(function)
    shardings = [even_shardings(function.ops[ops[0]], mesh, constants) for ops in members.values()]
    seconds = iter(prices.ops([*chain(*shardings)]))
    return tuple(
        OpChoices(tuple(ops), own, np.array([*islice(seconds, len(own))]))
        for ops, own in zip(members.values(), shardings, strict=True)
    )


def _only(choices: OpChoices, letters: Collection[tuple[str | None, ...]]) -> OpChoices:
    """The shardings with these letters; all if there is none of them."""
    kept = [at for at, sharding in enumerate(choices.shardings) if sharding.letters in letters]
    if not kept:
        return choices
    return OpChoices(choices.ops, tuple(choices.shardings[at] for at in kept), choices.seconds[kept])


def _phases(function: Function, of_op: Sequence[int]) -> tuple[int, ...]:
    """The phase of each class of ops; the backward lasts from the first to the last op with its mark."""
    marked = [op.region is not None and f"{op.region}.".startswith(f"{MARK}.") for op in function.ops]
    first = marked.index(True) if True in marked else len(marked)
    last = len(marked) - marked[::-1].index(True) if True in marked else len(marked)
    found: dict[int, int] = {}
    for at, number in enumerate(of_op):
        found.setdefault(number, (at >= first) + (at >= last))
    return tuple(found[number] for number in range(len(found)))


def even_shardings(op: Op, mesh: Mesh, constants: Iterable[str]) -> tuple[OpSharding, ...]:
    """The even shardings of an op; the one of a ``reshard``."""
    if op.kind == "reshard":
        layout = TensorSharding.parse(op["layout"]).over(op.inputs[0].type.ndim)
        return (OpSharding(op, (None,) * len(mesh.axes), (layout,), (layout,), mesh),)
    return op_shardings(op, mesh, constants=frozenset(constants), even=True)


class _ValueClass(NamedTuple):
    """Values that are made by the same output of a class of ops, and used by the same inputs."""

    names: list[str]
    type: TensorType
    made_by: tuple[int, int] | None
    """The class of ops, and the number of its output; None for inputs of the program."""
    uses: tuple[tuple[int, int], ...]
    """The classes of ops, and the number of the input of each."""
    given: TensorSharding | None
    returned: bool
    tied: bool

    @property
    def is_moved_once(self) -> bool:
        """Whether the value has the layout that its only use needs."""
        return len(self.uses) == 1 and not self.returned and self.given is None and not self.tied


def _values(
    function: Function,
    mesh: Mesh,
    of_op: Sequence[int],
    inputs: Mapping[str, int],
    ops: Sequence[OpChoices],
    prices: Prices,
    tied: set[str],
    within: Mapping[str, Collection[TensorSharding]] | None,
) -> tuple[ValueChoices, ...]:
    """The choices of each class of values; all changes of layout are priced together."""
    classes = _value_classes(function, of_op, inputs, tied)
    drafts = [_draft(each, mesh, ops, within) for each in classes]
    changes = _Changes(prices)
    firsts, seconds = [], []
    for value_class, draft in zip(classes, drafts, strict=True):
        firsts.append(changes.table(draft.made, draft.layouts, draft.type))
        seconds.append(
            changes.table(draft.layouts, draft.needed, draft.type, stays=value_class.is_moved_once)
        )
    prices_of = changes.seconds()
    return tuple(
        replace(draft, first=prices_of[first], second=prices_of[second])
        for draft, first, second in zip(drafts, firsts, seconds, strict=True)
    )


def _value_classes(
    function: Function, of_op: Sequence[int], inputs: Mapping[str, int], tied: set[str]
) -> list[_ValueClass]:
    uses: dict[str, dict[tuple[int, int], None]] = {value.name: {} for value in function.values}
    made_by: dict[str, tuple[int, int]] = {}
    for op, number in zip(function.ops, of_op, strict=True):
        for position, value in enumerate(op.inputs):
            uses[value.name][number, position] = None
        for position, value in enumerate(op.outputs):
            made_by[value.name] = number, position
    returned = {value.name for value in function.outputs}
    found: dict[object, _ValueClass] = {}
    for value in function.values:
        made, name = made_by.get(value.name), value.name
        used = tuple(sorted(uses[name]))
        key = made or inputs[name], used, value.layout, name in returned, name in tied
        found.setdefault(
            key, _ValueClass([], value.type, made, used, value.layout, name in returned, name in tied)
        )
        found[key].names.append(name)
    return list(found.values())


class _Changes:
    """Tables of changes of layout that are to be priced.  Many values need the same, so each has a number."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.numbers: dict[tuple[TensorSharding, TensorSharding, TensorType], int] = {}
        self.tables: dict[object, Ints] = {}
        self.ids: dict[TensorSharding, int] = {}

    def table(
        self,
        rows: Sequence[TensorSharding],
        columns: Sequence[TensorSharding],
        type: TensorType,
        *,
        stays: bool = False,
    ) -> Ints:
        """The numbers of the changes from ``rows`` to ``columns``; -1 where one is not possible.

        With ``stays`` it is -1 too wherever the layout would change.
        """
        key = self._ids(rows), self._ids(columns), type
        if key not in self.tables:
            table = np.full((len(rows), len(columns)), -1)
            for at, source in enumerate(rows):
                for to, target in enumerate(columns):
                    if reachable(source, target):
                        table[at, to] = self.numbers.setdefault((source, target, type), len(self.numbers))
            self.tables[key] = table
        return np.where(np.not_equal.outer(*key[:2]), -1, self.tables[key]) if stays else self.tables[key]

    def _ids(self, layouts: Sequence[TensorSharding]) -> tuple[int, ...]:
        """A number for each layout, because a layout takes long to hash."""
        return tuple(self.ids.setdefault(each, len(self.ids)) for each in layouts)

    def seconds(self) -> Floats:
        """The seconds of each change of layout: entry n is for change number n.

        The last entry is infinite, so that the number -1 of an impossible change selects it.
        """
        return np.array([*self.prices.moves(self.numbers), IMPOSSIBLE])


def reachable(source: TensorSharding, target: TensorSharding) -> bool:
    """Whether a value may be brought from one layout to another: no sum becomes pending."""
    return source == target or not target.partial


def _draft(
    of: _ValueClass,
    mesh: Mesh,
    ops: Sequence[OpChoices],
    within: Mapping[str, Collection[TensorSharding]] | None,
) -> ValueChoices:
    """The choices of a class of values, before its changes of layout have prices."""
    made: dict[TensorSharding, int] = {}
    made_by = None
    if of.made_by is not None:
        op, output = of.made_by
        made_by = (
            op,
            np.array([made.setdefault(each.outputs[output], len(made)) for each in ops[op].shardings]),
        )
    needed: dict[TensorSharding, int] = {}
    uses = []
    for op, input in of.uses:
        numbers = [needed.setdefault(each.inputs[input], len(needed)) for each in ops[op].shardings]
        uses.append(Use(op, np.array(numbers)))
    if of.given is not None:
        layouts = [of.given]
    elif of.is_moved_once:
        layouts = [each for each in needed if not each.partial or each in made]
    else:
        layouts = [*made, *(each for each in needed if not each.partial)]
        if within is not None:
            layouts += [each for name in of.names for each in within[name]]
        elif of.returned or of.tied or not layouts:
            layouts += even_layouts(of.type, mesh)
        if of.returned:
            layouts = [each for each in layouts if not each.partial]
    no_prices: Floats = np.zeros((0, 0))
    return ValueChoices(
        tuple(of.names),
        of.type,
        made_by,
        tuple(made),
        tuple(dict.fromkeys(layouts)),
        tuple(needed),
        tuple(uses),
        no_prices,
        no_prices,
    )


def even_layouts(type: TensorType, mesh: Mesh) -> list[TensorSharding]:
    """The layouts without pending sums in which all devices hold equally much; axes in the order of the mesh."""
    devices, found = Devices.of(mesh), []
    parted = [axis for axis, n in mesh.shape.items() if n > 1]
    for chosen in product([None, *range(type.ndim)], repeat=len(parted)):
        dims: list[list[str]] = [[] for _ in range(type.ndim)]
        for axis, dim in zip(parted, chosen, strict=True):
            if dim is not None:
                dims[dim].append(axis)
        split = tuple(map(tuple, dims))
        if all(
            devices.cut(n, axes) is None and (not axes or n != 1)
            for n, axes in zip(type.shape, split, strict=True)
        ):
            found.append(TensorSharding(*split))
    return found
