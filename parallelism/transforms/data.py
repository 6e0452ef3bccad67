"""Parallelism along dims of the batch: its rows (data parallelism) and its sequences (context parallelism)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from parallelism.ir.core import Extent, Function, Op, TensorType, Value, frozen_attributes
from parallelism.ir.operators.linear_attention import WHOLE_SEQUENCES
from parallelism.kernels import Scores
from parallelism.kernels.token_order import TokenOrder
from parallelism.layouts.localization.local_program import free_name
from parallelism.layouts.propagation.annotation import laid_out
from parallelism.sharding import TensorSharding
from parallelism.transforms.dims import Place, axes_of, dims_of, layout, lettered, orders_of, relation_of
from parallelism.transforms.parts import Parts
from parallelism.transforms.words import checked_axis, word


@dataclass(frozen=True)
class DataParallel:
    """The rows of the batch are split over ``axis``.

    The rows are the dims of the inputs that no parameter has (`parallelism.transforms.dims.batch_class`).  If they are
    split already, ``axis`` goes around the other axes.

    **Communication** in a step: each gradient is summed once over the axis, by an all_reduce, and so is the loss.  Of
    P bytes of gradients a device receives 2 P (n - 1) / n by ring (Rajbhandari et al., *ZeRO*, 2020, arXiv:1910.02054,
    section 7.1).

    ``ValueError`` if the batch is split over ``axis`` already, and if the program has no such dim.
    """

    axis: str = "dp"
    phase: ClassVar[int] = 10

    def __post_init__(self) -> None:
        checked_axis(self)

    def __call__(self, function: Function) -> Function:
        parts = Parts.of(function)
        if parts.rows is None:
            raise ValueError(
                f"{self}: the inputs of @{function.name} have no rows to split: every dim is that of a "
                "parameter, too"
            )
        return split_class(self, parts, parts.rows).joined()

    def __str__(self) -> str:
        return word("dp", self.axis)


EXCHANGES = {"all_gather": "cp", "p2p": "ring", "a2a": "ulysses"}
"""How attention sees whole sequences, in the words of Megatron-LM, and the word of a strategy for it."""
ROWS, HEADS = 1, 2
"""The dims of queries, keys and values."""


@dataclass(frozen=True)
class ContextParallel:
    """The sequences of the batch are split over ``axis``: each device has some of the tokens of every row.

    The dim is one of the inputs that is not that of the rows, and no dim of a weight or of a table
    (`parallelism.transforms.dims.sequence_class`).  Gradients of parameters are summed over the axis, as in
    `DataParallel`.  What needs a sequence whole gathers it.  Attention as one operator does so by ``exchange``:

    - ``all_gather``: it gathers keys and values, forward and backward, and reduce-scatters their gradients (Dubey et al.,
      *The Llama 3 Herd of Models*, 2024, arXiv:2407.21783, section 3.3.2).  Of n devices with K bytes of keys and as many
      of values in all, a device receives 2 K (n - 1) / n forward, and twice that backward.
    - ``p2p``: blocks of keys and values travel round a ring, and each device attends to a block when it arrives (Liu et
      al., *Ring Attention*, 2023, arXiv:2310.01889): as many bytes, and no more than two blocks at a time.
    - ``a2a``: an all_to_all each of queries, keys, values and result gives each device all tokens of some heads (Jacobs et
      al., *DeepSpeed Ulysses*, 2023, arXiv:2309.14509, section 3).  With Q bytes of queries a device receives
      2 (Q + K) (n - 1) / n^2 forward, and as many backward.

    Over two axes with ``p2p`` and ``a2a`` both go together (Fang and Zhao, *USP*, 2024, arXiv:2405.07719); ``a2a`` is over
    the inner one.

    Under a causal mask the last tokens attend to the most others.  Then ``all_gather`` and ``p2p`` deal tokens as a
    zigzag (`in_zigzag`), so that each device has as many scores (Dubey et al., section 3.3.2); with ``a2a`` it has all
    tokens of its heads.  Programs whose operators need tokens in their order keep it.

    ``ValueError`` if the sequences are split over ``axis`` already, if the program has no such dim, and for an exchange
    other than ``all_gather`` if no attention is one operator.
    """

    axis: str = "cp"
    exchange: str = "all_gather"
    phase: ClassVar[int] = 12

    def __post_init__(self) -> None:
        checked_axis(self)
        if self.exchange not in EXCHANGES:
            raise ValueError(
                f"the exchange of ContextParallel must be one of {', '.join(EXCHANGES)}, got {self.exchange!r}"
            )

    def __call__(self, function: Function) -> Function:
        parts = Parts.of(function)
        if parts.sequence is None:
            raise ValueError(
                f"{self}: the inputs of @{function.name} have no sequence to split: besides the rows "
                "every dim is that of a weight, or no op has it"
            )
        if _is_shared_out(parts):
            raise ValueError(
                f"{self}: what @{function.name} holds is shared out over its replicas already; {self} comes before Zero, "
                "which shares it out over both, or both in one Strategy"
            )
        if (told := next((op for op in parts.forward.ops if op.kind in WHOLE_SEQUENCES), None)) is not None:
            raise ValueError(
                f"{self}: {told.kind} of @{function.name}, in {told.region or 'no region'}, goes through a sequence token by "
                "token and cannot be split along it; TensorParallel splits its heads"
            )
        by_heads = self.exchange == "a2a"
        if not by_heads:
            parts = in_zigzag(parts, self.axis)
        assert parts.sequence is not None
        split = split_class(self, parts, parts.sequence, around=not by_heads)
        if self.exchange == "all_gather":
            return split.joined()
        ops = [new for op in split.forward.ops for new in self._exchanged(parts, op)]
        if [*split.forward.ops] == ops:
            raise ValueError(
                f"{self}: no attention of @{function.name} is one operator over a whole sequence; all_gather, written cp, "
                "splits it"
            )
        return replace(split, forward=replace(split.forward, ops=tuple(ops))).joined()

    def _exchanged(self, parts: Parts, op: Op) -> list[Op]:
        """The ops in place of one: of attention of one sequence to itself, with its rows dealt by this exchange."""
        if op.kind not in ("attention", "context_attention"):
            return [op]
        if any(parts.classes.of(value, ROWS) != parts.sequence for value in op.inputs[:2]):
            return [op]
        if self.exchange == "p2p":
            return [replace(op, kind="context_attention")]
        names = {value.name for value in parts.forward.values}
        of_heads = [Value(free_name(f"{value.name}.heads", names), value.type) for value in op.inputs[:3]]
        mixed, lse = op.outputs
        inner = Value(free_name(f"{mixed.name}.heads", names), mixed.type)
        given = [self._deal(op, *pair) for pair in zip(op.inputs, of_heads, strict=False)]
        attention = op.with_values((*of_heads, *op.inputs[3:]), (inner, lse))
        return [*given, attention, self._deal(op, inner, mixed, back=True)]

    def _deal(self, op: Op, x: Value, y: Value, *, back: bool = False) -> Op:
        """The op that deals heads in place of tokens, or tokens in place of heads."""
        before, after = (HEADS, ROWS) if back else (ROWS, HEADS)
        attributes = {"axes": (self.axis,), "before": before, "after": after}
        return Op("deal", (x,), frozen_attributes(attributes), (y,), op.region)

    def __str__(self) -> str:
        return word(EXCHANGES[self.exchange], self.axis)


def _is_shared_out(parts: Parts) -> bool:
    """Whether `Zero` has split the state, the gradients or the parameters over an axis of the batch."""
    if parts.update is None:
        return False
    of_batch = axes_of(*parts.dealt)
    own = [axes_of(value) for value in parts.parameters if value.type.ndim]
    everywhere = set.intersection(*own) if own else set()
    laid = [value.layout for value in (*parts.state, *parts.gradients) if value.layout]
    laid += [TensorSharding.parse(op["layout"]) for op in parts.update.ops if op.kind == "reshard"]
    somewhere = {axis for each in laid for axis in each.axes}
    return not of_batch.isdisjoint(everywhere | (somewhere - set().union(*own)))


def split_class(transform: Any, parts: Parts, chosen: Place, *, around: bool = True) -> Parts:
    """The parts with the dims of a class split over the axis of a transform, around what splits them already, or inside.

    Inputs other than parameters are split, what is picked of inputs, and activations that have a layout.  (Otherwise a
    split of activations, as by `SequenceParallel`, would also be one of the tokens that were picked, and the table in
    which these are looked up would be gathered.)
    """
    layouts, parameters = {}, {*parts.weights}
    picking = (op for op in parts.forward.ops if op.kind == "arranged")
    picked = (op.outputs[0] for op in picking if op.inputs[0] not in parameters)
    inputs = {*parts.forward.inputs, *parts.dealt, *picked}
    for value in parts.forward.values:
        if value in parameters or (value.layout is None and value not in inputs):
            continue
        for dim in range(value.type.ndim):
            if parts.classes.of(value, dim) == chosen:
                axes = dims_of(value)
                if any(transform.axis in each for each in axes):
                    raise ValueError(
                        f"{transform}: %{value.name} of @{parts.name} is split over {transform.axis!r} "
                        f"already, {value.layout and value.layout.short()}"
                    )
                axes[dim] = (transform.axis, *axes[dim]) if around else (*axes[dim], transform.axis)
                layouts[value.name] = layout(axes, value.layout)
                break
    return parts.laid(layouts)


# -- tokens in zigzag order --------------------------------------------------------------------------------------------

_ATTENTION = ("attention", "context_attention")
_DISPATCH = ("dispatch", "combine", "dispatch_gates", "collect_gates")
_PLACED = (*_ATTENTION, "rotary", "scaled_rotary", "dropout")
"""Operators that know the positions of tokens, in any order of these."""


def in_zigzag(parts: Parts, axis: str) -> Parts:
    """The parts with tokens as a zigzag over ``axis``, around other axes; as they are if nothing is gained by it.

    Of the batch, and of what parameters have for each position, the tokens of a device are picked
    (`parallelism.ir.operators.token_order`).  Attention, rotary positions and dropout know where they stand.
    """
    forward = parts.forward
    if orders_of(forward):
        return replace(parts, forward=replace(forward, ops=tuple(_with_axis(op, axis) for op in forward.ops)))
    is_causal = any(op.kind in _ATTENTION and Scores.parse(op["mask"]).mask.causal for op in forward.ops)
    if not (is_causal and _in_any_order(parts)):
        return parts
    names = {value.name for value in forward.values}
    given = set(forward.inputs)
    picked: dict[Value, Value] = {}
    whole: dict[str, TensorSharding] = {}
    ops: list[Op] = []
    for op in forward.ops:
        for value in op.inputs:
            dim = _token_dim(parts, value) if value in given and value not in picked else None
            if dim is None:
                continue
            made, picked[value] = _picked(value, dim, axis, op.region, names)
            ops += made
            if value.layout is not None:
                axes = dims_of(value)
                axes[dim] = ()
                whole[value.name] = layout(axes, value.layout)
        inputs = tuple(picked.get(value, value) for value in op.inputs)
        ops.append(_placed(parts, op, axis).with_values(inputs, op.outputs))
    return replace(parts, forward=laid_out(replace(forward, ops=tuple(ops)), whole))


def _token_dim(parts: Parts, value: Value) -> int | None:
    """The dim of a value along which it has tokens of sequences; None if there is none."""
    return next(
        (dim for dim in range(value.type.ndim) if parts.classes.of(value, dim) == parts.sequence), None
    )


def _picked(value: Value, dim: int, axis: str, region: str | None, names: set[str]) -> tuple[list[Op], Value]:
    """The ops that pick the tokens of a value in their order, and what they make."""
    extent, axes = value.type.shape[dim], dims_of(value)[dim]
    order = Value(
        free_name(f"{value.name}.order", names),
        TensorType(np.int64, (extent,)),
        layout([axes]) if axes else None,
    )
    dealt = Value(free_name(f"{value.name}.dealt", names), value.type, value.layout)
    given = {"shape": (extent,), "starts": (0,), "order": str(TokenOrder(0, (axis,)))}
    return [
        Op("token_order", (), frozen_attributes(given), (order,), region),
        Op("arranged", (value, order), frozen_attributes({"axis": dim}), (dealt,), region),
    ], dealt


def _placed(parts: Parts, op: Op, axis: str) -> Op:
    """The op with the order of the tokens, if it depends on their positions."""
    dim = _token_dim(parts, op.outputs[0]) if op.kind in _PLACED else None
    if dim is None:
        return op
    return replace(
        op, attributes=frozen_attributes({**dict(op.attributes), "order": str(TokenOrder(dim, (axis,)))})
    )


def _with_axis(op: Op, axis: str) -> Op:
    """The op with its order of tokens, if it has one, over one axis more."""
    given = dict(op.attributes)
    if "order" not in given:
        return op
    order = TokenOrder.parse(given["order"])
    order = replace(order, axes=(axis, *order.axes))
    return replace(op, attributes=frozen_attributes({**given, "order": str(order)}))


def _in_any_order(parts: Parts) -> bool:
    """Whether a program computes the same if the tokens of its sequences stand in another order.

    Then every op works on each token alone, sums over tokens, or knows where they stand; and no result has tokens.
    """
    forward = parts.forward
    if any(_token_dim(parts, value) is not None for value in forward.outputs):
        return False
    given = [(value, dim) for value in forward.inputs if (dim := _token_dim(parts, value)) is not None]
    lengths = {value.type.shape[dim] for value, dim in given}
    return len(lengths) == 1 and all(_takes_any_order(parts, op, lengths) for op in forward.ops)


def _takes_any_order(parts: Parts, op: Op, lengths: Collection[Extent]) -> bool:
    """Whether an op computes the same with the tokens in another order; sequences have one of these ``lengths``."""
    if op.kind in _DISPATCH:
        return not op["drops"]  # an expert has a slot for every token
    indexed, extents = relation_of(op).indexed, set[Extent]()
    for number, (value, letters) in enumerate(lettered(op)):
        dims = [dim for dim in range(value.type.ndim) if parts.classes.of(value, dim) == parts.sequence]
        if op.kind in _ATTENTION:
            if number < 3 and dims != [ROWS]:
                return False  # attention to another sequence
        elif len(dims) > 1 or any(letters[dim] in (None, indexed) for dim in dims):
            return False
        extents |= {value.type.shape[dim] for dim in dims}
    if op.kind in _PLACED:
        return extents <= {*lengths}
    return len(extents) < 2 and not (extents and "starts" in op.operator.attributes)
