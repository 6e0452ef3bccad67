"""Rows that a mask chooses, as ``x[mask]`` does: how many there are depends on the numbers.

Layers of experts are often written so.  An expert looks up the rows of the tokens that chose it, and adds what it makes of
them to what these tokens have so far.  A program has no such number.  Here the chosen rows lie in the slots of
`parallelism.ir.operators.dispatch`: looking them up is a `dispatch`, and adding to their tokens is a `combine`.  An expert
has slots for its even share of the tokens, ``chosen * tokens / count``.  A simulation counts with it, and a run has room for
all.  A mask that is no choice of experts has a slot for each row.

A slot that holds no row has numbers without a meaning.  So nothing may go over the rows, such as their mean: `check`
refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from parallelism.interop.expert_rows.choices import even_slots, sequences_of, values_before
from parallelism.interop.folding import (
    Spread,
    emit,
    filled,
    recorded_op,
    same_everywhere,
    spread,
    unspread,
    whole,
)
from parallelism.interop.moving_elements import reshaped, transposed
from parallelism.ir.core import Builder, Extent, Function, Op, Rule, Value
from parallelism.ir.core.extents import quotient
from parallelism.ir.core.rules import Dim
from parallelism.ir.core.table import meaning
from parallelism.ir.tracing import Traced
from parallelism.models.expert_feed_forward import Slots

DEALT = "dispatch", "dispatch_gates"
"""The operators whose output has slots."""
RETURNED = "combine"
"""The operator whose first input has slots."""
SLOTS = 2
"""The dim of them in both."""
MASKING = {
    *("equal", "not_equal", "greater", "greater_equal", "less", "less_equal"),
    *("logical_and", "logical_or", "logical_not", "any", "all", "max", "min", "where"),
    *("convert", "reshape", "transpose", "slice", "take", "concatenate", "broadcast_to"),
    *("iota", "constant"),
}
"""The operators that masks are made with, out of the numbers of the chosen experts."""
FIRST_STAND_IN = -(2**62)
"""The number in what stands for the places of the first mask: no place, and no number of a program."""


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows that one mask chooses, in whatever shape."""

    experts: Any
    """``(1, tokens, k)``: 0 where a choice is the mask's, else 1."""
    slots: Slots
    """Of all tokens."""
    refused: Callable[[], Exception]
    """Makes the error that says that these rows cannot be in a program."""

    @property
    def how(self) -> dict[str, Any]:
        """Attributes of the operators that deal these rows."""
        return {"each": self.slots.each, "first": 0, "drops": False}


@dataclass(frozen=True)
class Chosen:
    """The rows of a mask of one shape."""

    of: Rows
    shape: tuple[Extent, ...]
    """Of the mask."""
    choice: int | None
    """The dim of the mask that has the k choices of a token; None: a token is an element of the mask."""

    @property
    def tokens(self) -> list[int]:
        """The dims of the mask that are those of tokens."""
        return [d for d in range(len(self.shape)) if d != self.choice]


class View(NamedTuple):
    """Indices of the chosen rows: which dims of the mask they are of."""

    chosen: Chosen
    dims: np.ndarray[Any, Any]
    """As the array of indices, in which the dim of the rows has extent 1."""
    rows: int
    """That dim."""


class Load(NamedTuple):
    """The share of the elements of a mask that are chosen: ``chosen`` of ``of`` times the tokens."""

    chosen: int
    of: int
    tokens: Extent
    """The tokens that choose."""
    dim: int | None
    """The dim of the mask that has the choices of a token; None: it has one element for each token."""


class ChosenRows:
    """The rows of all masks of a program that is being read."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.chosen: dict[str, Chosen] = {}
        """By the name of the value that stands for the places of the rows."""
        self.rows: dict[Hashable, Rows] = {}
        """By what the mask is: two of the same numbers in other shapes choose the same rows."""
        self.choices: dict[Value, tuple[int, int]] = {}
        """The numbers of the experts that tokens choose: how many a token chooses, and of how many."""

    def note_choice(self, places: Any, chosen: Extent, count: Extent) -> None:
        """``places`` has for each token the numbers of so many ``chosen`` of ``count``."""
        if (
            isinstance(places, Traced)
            and isinstance(chosen, int)
            and isinstance(count, int)
            and chosen < count
        ):
            self.choices[places.value] = chosen, count

    def places(self, mask: Any, refused: Callable[[], Exception]) -> Any:
        """What stands for the places of the elements of a mask that are not zero, of shape ``(dims, rows)``.

        None for a mask whose rows cannot be dealt.
        """
        mask = whole(mask)
        if not isinstance(mask, Traced) or not mask.shape:
            return None
        load = self._load(mask.value)
        choice = None if load is None else load.dim
        key = self._key(self._without_reshapes(mask.value)), choice
        if key not in self.rows:
            self.rows[key] = self._rows(mask, load, refused)
        of = self.rows[key]
        shape = (len(mask.shape), of.slots.rows)
        value = FIRST_STAND_IN + len(self.chosen)  # equal constants would be one value
        stand_in = recorded_op("constant", value=value, shape=shape, dtype=np.dtype(np.int64))
        self.chosen[stand_in.value.name] = Chosen(of, tuple(mask.shape), choice)
        return stand_in

    def _rows(self, mask: Traced, load: Load | None, refused: Callable[[], Exception]) -> Rows:
        dims = [*range(len(mask.shape))]
        choice = None if load is None else load.dim
        k: Extent = 1
        if choice is not None:
            dims = [*dims[:choice], *dims[choice + 1 :], choice]
            k = mask.shape[choice]
        tokens = prod(mask.shape[d] for d in dims[: len(dims) - (choice is not None)])
        is_other = emit("equal", mask, np.zeros((), mask.dtype))
        experts = transposed(emit("convert", is_other, dtype=np.dtype(np.int32)), dims)
        return Rows(whole(reshaped(experts, (1, tokens, k))), self._slots(mask, tokens, load), refused)

    def looked_up(self, data: Any, columns: Sequence[Any]) -> Any:
        """``data[columns[0], columns[1], ...]`` where the columns are places of chosen rows; else None."""
        found = self._together(columns)
        if found is None:
            return None
        chosen, dims = found
        before, rest = tuple(columns[0].shape), tuple(data.shape[len(columns) :])
        if not _fits(chosen, dims, data.shape):
            return None
        if (alike := _alike(data, len(dims), (*before, *rest))) is not None:
            return alike
        if chosen.choice in dims:
            return None if prod(rest) != 1 else self._gates(chosen, dims, data, (*before, *rest))
        tokens, width = chosen.of.experts.shape[1], prod(rest)
        rows = whole(reshaped(data, (1, tokens, width)))
        shape = (1, 1, chosen.of.slots.rows, width)
        return reshaped(
            emit("dispatch", rows, chosen.of.experts, shape=shape, **chosen.of.how), (*before, *rest)
        )

    def _gates(self, chosen: Chosen, dims: Sequence[int], data: Any, shape: tuple[Extent, ...]) -> Any:
        """One number for each chosen row, of those that each choice of each token has."""
        order = [i for i, d in enumerate(dims) if d != chosen.choice] + [dims.index(chosen.choice or 0)]
        moved = transposed(reshaped(data, data.shape[: len(dims)]), order)
        gates = whole(reshaped(moved, chosen.of.experts.shape))
        dealt = emit(
            "dispatch_gates", gates, chosen.of.experts, shape=(1, 1, chosen.of.slots.rows), **chosen.of.how
        )
        return reshaped(dealt, shape)

    def put(self, data: Any, columns: Sequence[Any], updates: Any, op: str) -> Any:
        """``data`` with updates at the places of chosen rows, or their sum; None if the columns are no such places.

        ``op`` is that of a `scatter`: ``set`` or ``sum``.
        """
        found = self._together(columns)
        if found is None or op not in ("set", "sum"):
            return None
        chosen, dims = found
        if chosen.choice in dims or not _fits(chosen, dims, data.shape):
            return None
        zero = same_everywhere(data)
        if op == "sum" or (zero is not None and zero == 0):
            return _added(data, self._returned(chosen, data, updates))
        if (added := self._added_to(chosen, data, updates)) is not None:
            return _added(data, self._returned(chosen, data, added))
        is_other = emit("min", chosen.of.experts, axes=(0, 2), keepdims=False)
        is_chosen = emit("equal", is_other, np.zeros((), np.int32))
        behind = len(data.shape) - len(dims)
        where = reshaped(is_chosen, (*data.shape[: len(dims)], *[1] * behind))
        return emit("where", whole(where), whole(self._returned(chosen, data, updates)), whole(data))

    def _returned(self, chosen: Chosen, data: Any, updates: Any) -> Any:
        """The updates at their tokens, and zeros elsewhere, in the shape of ``data``."""
        tokens = chosen.of.experts.shape[1]
        width = quotient(data.shape, (tokens,))
        assert width is not None
        rows = whole(reshaped(updates, (1, 1, chosen.of.slots.rows, width)))
        sums = emit("combine", rows, chosen.of.experts, **chosen.of.how)
        assert sums.shape == (1, tokens, width)
        return reshaped(sums, data.shape)

    def _added_to(self, chosen: Chosen, data: Any, updates: Any) -> Any:
        """What is added to the rows that were looked up in ``data``, where this is what is put in; else None.

        ``out[mask] += rows`` is written so.
        """
        op = self._maker(updates)
        if op is None or op.kind != "add" or not isinstance(data, Traced):
            return None
        for rows, added in (op.inputs, op.inputs[::-1]):
            dealt = self._behind(rows)
            if dealt is None or dealt.kind != "dispatch" or dealt.inputs[1] != chosen.of.experts.value:
                continue
            if self._without_reshapes(dealt.inputs[0]) == self._without_reshapes(data.value):
                of_rows = Traced(self.builder, added)
                return of_rows if added.type == op.outputs[0].type else None
        return None

    # -- where indices come from ---------------------------------------------------------------------------------------

    def _maker(self, x: Any) -> Op | None:
        return self.builder.maker(x.value) if isinstance(x, Traced) else None

    def _behind(self, x: Value) -> Op | None:
        """The op that makes a value, but for reshapes."""
        return self.builder.maker(self._without_reshapes(x))

    def _without_reshapes(self, x: Value) -> Value:
        while (op := self.builder.maker(x)) is not None and op.kind == "reshape":
            x = op.inputs[0]
        return x

    def _key(self, x: Value) -> Hashable:
        """Values with equal keys have the same numbers: they are made in the same way of the same values."""
        op = self.builder.maker(x)
        if op is None or op.kind not in MASKING:
            return x.name
        return op.kind, op.attributes, *map(self._key, op.inputs)

    def _together(self, columns: Sequence[Any]) -> tuple[Chosen, list[int]] | None:
        """The mask whose rows all columns are places of, and the dim of the mask that each is of."""
        if not self.chosen:
            return None
        dims, masks = [], []
        for column in columns:
            array = unspread(column)
            view = self._view(array.value) if isinstance(array, Traced) else None
            if view is None or view.dims.size != 1:
                return None
            dims.append(int(view.dims.reshape(())))
            masks.append(view.chosen)
        if not masks or any(mask != masks[0] for mask in masks):
            return None
        return masks[0], dims

    def _view(self, x: Value) -> View | None:
        """Which places of chosen rows a value has; None if it is something else."""
        if (chosen := self.chosen.get(x.name)) is not None:
            return View(chosen, np.arange(len(chosen.shape)).reshape(-1, 1), 1)
        op = self.builder.maker(x)
        rule = None if op is None else _MOVED.get(op.kind)
        if op is None or rule is None:
            return None
        views = [self._view(each) for each in op.inputs]
        known = [view for view in views if view is not None]
        if len(known) < len(views) or any(view.chosen != known[0].chosen for view in known):
            return None
        return rule(op, known)

    def _load(self, mask: Value) -> Load | None:
        """How many of the elements of a mask are chosen, if it is made of a choice of experts; None if that is not known."""
        chosen_by = next(
            (each for each in values_before(self.builder.maker, mask, MASKING) if each in self.choices), None
        )
        if chosen_by is None:
            return None
        chosen, count = self.choices[chosen_by]
        shape, choices = mask.type.shape, prod(chosen_by.type.shape)
        tokens = quotient((choices,), (chosen,))
        assert tokens is not None
        if prod(shape) == tokens:
            return Load(chosen, count, tokens, None)
        if prod(shape) != choices:
            return None
        last = len(shape) - 1
        dim = next((d for d in (last, 0) if last and shape[d] == chosen), None)
        return Load(1 if dim is None else chosen, count, tokens, dim)

    def _slots(self, mask: Traced, tokens: Extent, load: Load | None) -> Slots:
        """The slots of all tokens: those of an even load in each sequence; one for each token if that is not known."""
        if load is None:
            return Slots(tokens, 1, drops=False)
        batch = sequences_of(self.builder.maker, mask.value, load.tokens)
        length = quotient((tokens,), (batch,))
        assert length is not None
        own = even_slots(load.chosen, load.of, length)
        return Slots(batch * own.rows, own.each, drops=False)


def _fits(chosen: Chosen, dims: Sequence[int], shape: Sequence[Extent]) -> bool:
    """Whether an array begins with these dims of the mask, and they say which token it is: each once, in their order.

    A dim of the mask that has one element says nothing.
    """
    tokens = [d for d in dims if d != chosen.choice]
    needed = {d for d in chosen.tokens if chosen.shape[d] != 1}
    in_order = tokens == sorted(set(tokens)) and len({*dims}) == len(dims)
    extents = [chosen.shape[d] for d in dims]
    return in_order and needed <= {*tokens} and extents == [*shape[: len(dims)]]


def _alike(data: Any, depth: int, shape: tuple[Extent, ...]) -> Any:
    """The rows of an array whose rows are all the same; None if they are not."""
    if (value := same_everywhere(data)) is not None:
        return filled(value, shape, data.dtype)
    if not isinstance(data, Spread) or any(n != 1 for n in data.array.shape[:depth]):
        return None
    own = data.array.shape[depth:]
    return spread(reshaped(data.array, (*[1] * (len(shape) - len(own)), *own)), shape)


def _added(data: Any, sums: Any) -> Any:
    zero = same_everywhere(data)
    return sums if zero is not None and zero == 0 else emit("add", whole(data), whole(sums))


# -- indices that were moved -------------------------------------------------------------------------------------------


def _transposed_view(op: Op, views: Sequence[View]) -> View:
    (view,) = views
    order = list(op["permutation"])
    return View(view.chosen, view.dims.transpose(order), order.index(view.rows))


def _cut_view(op: Op, views: Sequence[View]) -> View | None:
    (view,) = views
    if op["axis"] == view.rows:
        return None
    cut = [slice(None)] * view.dims.ndim
    cut[op["axis"]] = slice(op["begin"], op["end"], op["step"])
    return View(view.chosen, view.dims[tuple(cut)], view.rows)


def _reshaped_view(op: Op, views: Sequence[View]) -> View | None:
    """The rows are the same dim if as many other elements stand before it."""
    (view,) = views
    shape, rows = op.outputs[0].type.shape, view.chosen.of.slots.rows
    before = prod(view.dims.shape[: view.rows])
    for d, extent in enumerate(shape):
        others = (*shape[:d], *shape[d + 1 :])
        if extent == rows and prod(shape[:d]) == before and prod(others) == view.dims.size:
            return View(view.chosen, view.dims.reshape([*shape[:d], 1, *shape[d + 1 :]]), d)
    return None


def _joined_view(op: Op, views: Sequence[View]) -> View | None:
    rows = views[0].rows
    if any(view.rows != rows for view in views) or op["axis"] == rows:
        return None
    return View(views[0].chosen, np.concatenate([view.dims for view in views], op["axis"]), rows)


def _same_view(op: Op, views: Sequence[View]) -> View | None:
    return views[0] if op.outputs[0].type.shape == op.inputs[0].type.shape else None


_MOVED: dict[str, Callable[[Op, Sequence[View]], View | None]] = {
    "transpose": _transposed_view,
    "slice": _cut_view,
    "reshape": _reshaped_view,
    "concatenate": _joined_view,
    "convert": _same_view,
}
"""For each kind of op what its output has of the places that its inputs have."""


# -- nothing goes over the rows ----------------------------------------------------------------------------------------

Slotted = dict[int, Rows]
"""The dims of a value that are slots of chosen rows."""


def check(program: Function, rows: ChosenRows) -> None:
    """Raises the error of rows that are used otherwise than row by row, and of places that are used as numbers."""
    masks = {each.experts.value.name: each for each in rows.rows.values()}
    if not masks:
        return
    slotted: dict[str, Slotted] = {}
    for op in program.ops:
        for value in op.outputs:
            if value.name in rows.chosen:
                raise rows.chosen[value.name].of.refused()
        found = _slotted(op, [slotted.get(value.name, {}) for value in op.inputs], masks)
        slotted.update(zip([value.name for value in op.outputs], found, strict=True))
    for value in program.outputs:
        for of in slotted.get(value.name, {}).values():
            raise of.refused()


def _slotted(op: Op, inputs: Sequence[Slotted], masks: Mapping[str, Rows]) -> Sequence[Slotted]:
    """The slots of each output of an op."""
    of = masks.get(op.inputs[1].name) if op.kind in (*DEALT, RETURNED) else None
    if of is not None and op.kind in DEALT:
        if any(inputs):
            raise of.refused()
        return [{SLOTS: of}]
    if of is not None:
        if inputs[0] != {SLOTS: of}:
            raise of.refused()
        return [{}]
    return _row_by_row(op, inputs) if any(inputs) else [{} for _ in op.outputs]


def _row_by_row(op: Op, inputs: Sequence[Slotted]) -> Sequence[Slotted]:
    """As `_slotted`, for an op that makes each row of its outputs of the same row of its inputs."""
    rule = meaning(op.kind, tuple(value.type for value in op.inputs), op.attributes).rule
    of_dim: dict[Dim, Rows] = {}
    for dims, slots in zip(rule.inputs, inputs, strict=True):
        for d, of in slots.items():
            if of_dim.setdefault(dims[d], of) is not of:
                raise of.refused()
    for dim, of in of_dim.items():
        goes_over = any(letter in rule.whole or letter in rule.reduced for letter in dim)
        is_kept = all(_touched(dims, dim) == [dim] for dims in rule.outputs)
        if goes_over or not is_kept or _is_numbered(rule, inputs, dim):
            raise of.refused()
    outputs = []
    for dims in rule.outputs:
        found = Slotted()
        for d, dim in enumerate(dims):
            if dim in of_dim:
                found[d] = of_dim[dim]
        outputs.append(found)
    return outputs


def _is_numbered(rule: Rule, inputs: Sequence[Slotted], dim: Dim) -> bool:
    """Whether an input has an element for each slot, and is of no row."""
    for dims, slots in zip(rule.inputs, inputs, strict=True):
        others = [each for d, each in enumerate(dims) if d not in slots]
        if _touched(others, dim):
            return True
    return False


def _touched(dims: Sequence[Dim], dim: Dim) -> list[Dim]:
    """Those that have a part of this dim."""
    return [each for each in dims if set(each) & set(dim)]
