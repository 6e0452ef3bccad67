"""What the operators mean that `parallelism.interop.torch_experts`, `torch_masks` and `torch_sorting` write into a file.

    Deal(x, experts, gates)           for each expert the rows of the tokens that chose it, and the gates of these rows
    Product(rows, weights)            the rows of each expert times its weight ``(e, f, h)``, or ``transposed`` ``(e, h, f)``
    Combine(rows, of_rows, experts)   for each token the sum of its rows, times their gates
    Put(x, mask, values)              ``x`` with the values at the places of the mask, or their sum if they are ``added``
    Sort(x)                           ``x`` sorted along an axis, and the places of its numbers; equal ones keep their order
    GroupedProduct(rows, weights, ends)   the rows up to each end, from the one before, times the weight of their group

Tokens come without their sequences, as ``(n, h)``, because models flatten them.  The sequences are found again behind the
reshape that did it, so that a program can be split along the batch.  Each expert has the slots that
`parallelism.ir.operators.dispatch` describes, ``(e, batch, slots, h)``; no choice is dropped.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from parallelism.interop.expert_rows.groups import Groups
from parallelism.interop.folding import convert, emit, whole
from parallelism.interop.moving_elements import part, reshaped, sorted_places
from parallelism.interop.onnx_models.graph import GraphNode
from parallelism.interop.onnx_models.reading import Reader, meaning
from parallelism.ir.core import Extent
from parallelism.models.expert_feed_forward import Slots, slots_of
from parallelism.models.expert_layers import Experts


@meaning("vcluster.Deal")
def _deal(reader: Reader, node: GraphNode, x: list[Any]) -> list[Any]:
    tokens, experts, gates = map(whole, x)
    batch, length = _sequences(reader, tokens)
    count, chosen = int(node.get("count", 0)), experts.shape[1]
    slots = _slots(count, chosen, length)
    how: dict[str, Any] = {"each": slots.each, "first": 0, "drops": False}
    shape = (count, batch, slots.rows)
    experts = reshaped(experts, (batch, length, chosen))
    rows = reshaped(tokens, (batch, length, tokens.shape[1]))
    return [
        emit("dispatch", rows, experts, shape=(*shape, tokens.shape[1]), **how),
        emit("dispatch_gates", reshaped(gates, (batch, length, chosen)), experts, shape=shape, **how),
    ]


@meaning("vcluster.Product")
def _product(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    weight = "ehf" if node.get("transposed", 0) else "efh"
    return emit("einsum", whole(x[0]), whole(x[1]), equation=f"ebch,{weight}->ebcf")


@meaning("vcluster.Combine")
def _combine(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    rows, gates, experts = map(whole, x)
    count, batch, _, width = rows.shape
    tokens, chosen = experts.shape
    length = tokens // batch
    slots = _slots(count, chosen, length)
    experts = reshaped(experts, (batch, length, chosen))
    wide = np.result_type(rows.dtype, gates.dtype)  # as the software multiplies; it sends what it then rounds
    gated = emit("einsum", convert(rows, wide), convert(gates, wide), equation="ebch,ebc->ebch")
    mixed = emit("combine", convert(gated, rows.dtype), experts, each=slots.each, first=0, drops=False)
    return reshaped(mixed, (tokens, width))


@meaning("vcluster.Put")
def _put(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    data, mask, values = x
    refused = partial(reader.uncounted, node, 0, "how many elements are put in")
    places = reader.chosen_rows.places(mask, refused)
    op = "sum" if node.get("added", 0) else "set"
    columns = [reshaped(part(places, 0, d, d + 1), places.shape[1:]) for d in range(places.shape[0])]
    found = reader.chosen_rows.put(data, columns, values, op)
    if found is None:
        raise refused()
    return found


@meaning("vcluster.Sort")
def _sort(reader: Reader, node: GraphNode, x: list[Any]) -> list[Any]:
    if not x[0].shape:
        return [x[0], np.zeros((), np.int64)]
    axis = int(node.get("axis", 0))
    places = sorted_places(whole(x[0]), axis, descending=bool(node.get("descending", 0)))
    return [emit("take_along", whole(x[0]), whole(places), axis=axis), places]


@meaning("vcluster.GroupedProduct")
def _grouped_product(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    rows, weights, ends = map(whole, x)
    return Groups(ends, rows.shape[0]).multiplied(rows, weights)


def _slots(count: Extent, chosen: Extent, length: Extent) -> Slots:
    """The slots of each expert for a sequence, with an even load."""
    if not (isinstance(count, int) and isinstance(chosen, int)):
        raise ValueError(f"the numbers of experts must be known, got {chosen} of {count}")
    return slots_of(Experts(count=count, chosen=chosen), length)


def _sequences(reader: Reader, tokens: Any) -> tuple[Extent, Extent]:
    """The batch and the length of the sequences of tokens ``(n, h)``: those before they were flattened; else one of all."""
    op = reader.builder.maker(tokens.value)
    if op is not None and op.kind == "reshape":
        before = op.inputs[0].type.shape
        if len(before) == 3 and before[2] == tokens.shape[1]:
            return before[0], before[1]
    return 1, tokens.shape[0]
