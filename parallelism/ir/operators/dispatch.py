"""Operators that deal tokens to experts, and back: `dispatch`, `combine`, `dispatch_gates` and `collect_gates`; and
`gated_bias`, which adds an expert's bias to each of its rows, times the gate of the row.

``experts``, of shape ``(b, s, k)``, has the numbers of the k experts of each token.  An expert has c *slots* for each
of the b sequences.  The tokens of a sequence lie in chunks, one after the other, and each chunk has ``each`` slots of
every expert: c is ``each`` times the number of chunks.  Within a chunk all first choices come before all second ones,
and earlier tokens before later ones (Lepikhin et al., *GShard*, 2020, arXiv:2006.16668, algorithm 1); a choice for which
no slot is left is dropped.

    dispatch(x, experts)             (b, s, h) -> (e, b, c, h)    the row of a token in each of its slots; else zeros
    combine(rows, experts)           (e, b, c, h) -> (b, s, h)    for each token the sum of the rows in its slots
    dispatch_gates(gates, experts)   (b, s, k) -> (e, b, c)       as dispatch, with a number for each choice
    collect_gates(gates, experts)    (e, b, c) -> (b, s, k)       the number in the slot of each choice; else zero
    gated_bias(rows, gates, bias)    (e, b, c, h) -> (e, b, c, h) ``rows + gates * bias``, with a bias (e, h)

With one chunk a sequence must be whole.  With several, sequences may be split where chunks end, and each device deals
its own tokens.  If e is split, a device has the experts from ``first`` on, and what it combines is a part of the sums.

``sent``, where it is given, is how rows travel between devices: the algorithm of the all_to_alls before and after.

``drops`` says whether choices are dropped where the fullest expert needs more slots than there are.  If not, the slots
are those of a mean load, for simulations, and a run makes room for all (`parallelism.ir.passes.room`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Array
from parallelism.ir.core import Operator, Rule, TensorType, first_dtype, register, rule
from parallelism.ir.core.extents import Extent, product, quotient
from parallelism.ir.operators.activations import floating
from parallelism.ir.tracing import apply

_ATTRIBUTES = {"each": "an extent", "first": "an extent", "drops": "a bool"}
_OPTIONAL = {"sent": "a string"}
_SHAPED = {**_ATTRIBUTES, "shape": "a shape"}


class _Slots(NamedTuple):
    """The choices that have a slot, as indices."""

    experts: Array
    sequences: Array
    slots: Array
    tokens: Array
    choices: Array


def _slots(experts: Array, count: int, slots: int, each: int, first: int, drops: bool) -> _Slots:
    """The slots of the experts ``first`` to ``first + count - 1``, of which each has so many ``slots`` a sequence.

    ``ValueError`` if a choice has no slot although none is to be dropped.
    """
    sequences, tokens, k = experts.shape
    chunks = slots // each if each else 0
    if not (chunks and count and experts.size):
        return _Slots(*np.zeros((5, 0), np.int64))
    inside = tokens // chunks
    in_order = experts.reshape(sequences, chunks, inside, k).swapaxes(2, 3).reshape(sequences, chunks, -1)
    own = in_order[..., None] == first + np.arange(count)
    places = np.cumsum(own, axis=2, dtype=np.int64) - 1
    sequence, chunk, number, expert = np.nonzero(own & (places < each))
    if not drops and len(expert) < np.count_nonzero(own):
        late = np.count_nonzero(own) - len(expert)
        raise ValueError(
            f"{late} choices find no slot, and none may be dropped: an expert has {each} for {inside} tokens, each of "
            f"which must choose it at most once"
        )
    slot = chunk * each + places[sequence, chunk, number, expert]
    return _Slots(expert, sequence, slot, chunk * inside + number % inside, number // inside)


# -- rules -------------------------------------------------------------------------------------------------------------


def _terms(tokens: Extent, slots: Extent, each: Extent) -> tuple[str, str, dict[str, Extent]]:
    """The terms of the tokens and of the slots of a sequence, and the extents of the letters inside them."""
    chunks = quotient((slots,), (each,)) if each != 0 else None
    inside = None if chunks is None or chunks == 0 else quotient((tokens,), (chunks,))
    if chunks == 1 or slots == 0 or tokens == 0:
        return "v!", "w!", {"v": tokens, "w": slots}
    if chunks is None or inside is None:
        raise ValueError(
            f"slots come in as many times each as there are chunks of the tokens, got {slots} slots, "
            f"each={each} and {tokens} tokens"
        )
    return "(uv!)", "(uw!)", {"u": chunks, "v": inside, "w": each}


def _checked(experts: TensorType, ndim: int, x: TensorType) -> None:
    if experts.dtype.kind not in "iu" or experts.ndim != 3:
        raise TypeError(f"experts must be integers of 3 dims, got {experts}")
    if x.ndim != ndim:
        raise ValueError(f"an input of {ndim} dims is dealt, got {x}")


def _dispatch_rule(x: TensorType, experts: TensorType, shape: Any, each: Extent, **_: Any) -> Rule:
    _checked(experts, 3, x)
    tokens, slots, inside = _terms(x.shape[1], shape[2], each)
    found = rule(f"b{tokens}h,b{tokens}k!->eb{slots}h", [x.shape, experts.shape], {"e": shape[0], **inside})
    return _of_shape(found, shape)


def _gates_rule(gates: TensorType, experts: TensorType, shape: Any, each: Extent, **_: Any) -> Rule:
    _checked(experts, 3, gates)
    tokens, slots, inside = _terms(gates.shape[1], shape[2], each)
    found = rule(
        f"b{tokens}k!,b{tokens}k!->eb{slots}", [gates.shape, experts.shape], {"e": shape[0], **inside}
    )
    return _of_shape(found, shape)


def _combine_rule(rows: TensorType, experts: TensorType, each: Extent, **_: Any) -> Rule:
    _checked(experts, 4, rows)
    tokens, slots, inside = _terms(experts.shape[1], rows.shape[2], each)
    return rule(f"eb{slots}h,b{tokens}k!->b{tokens}h", [rows.shape, experts.shape], inside)


def _collect_rule(gates: TensorType, experts: TensorType, each: Extent, **_: Any) -> Rule:
    _checked(experts, 3, gates)
    tokens, slots, inside = _terms(experts.shape[1], gates.shape[2], each)
    return rule(f"eb{slots},b{tokens}k!->b{tokens}k!", [gates.shape, experts.shape], inside)


def _of_shape(found: Rule, shape: Any) -> Rule:
    """The rule; ``ValueError`` if its output is of another shape."""
    if found.output_shapes[0] != tuple(shape):
        raise ValueError(f"shape must be {found.output_shapes[0]}, got {shape}")
    return found


def _additions(found: Rule, **_: Any) -> Extent:
    """One for each element of a row that is added to its token."""
    return product(found.extents[letter] for letter in found.letters if letter not in "vk")


# -- kernels -----------------------------------------------------------------------------------------------------------


def _dispatch(
    x: Array, experts: Array, shape: Any, each: int, first: int, drops: bool, sent: str = ""
) -> Array:
    rows = np.zeros(shape, x.dtype)
    at = _slots(experts, shape[0], shape[2], each, first, drops)
    rows[at.experts, at.sequences, at.slots] = x[at.sequences, at.tokens]
    return rows


def _combine(rows: Array, experts: Array, each: int, first: int, drops: bool, sent: str = "") -> Array:
    sums = np.zeros((*experts.shape[:2], rows.shape[3]), rows.dtype)
    at = _slots(experts, rows.shape[0], rows.shape[2], each, first, drops)
    for choice in range(experts.shape[2]):
        mine = at.choices == choice  # each token once
        sums[at.sequences[mine], at.tokens[mine]] += rows[
            at.experts[mine], at.sequences[mine], at.slots[mine]
        ]
    return sums


def _dispatch_gates(gates: Array, experts: Array, shape: Any, each: int, first: int, drops: bool) -> Array:
    dealt = np.zeros(shape, gates.dtype)
    at = _slots(experts, shape[0], shape[2], each, first, drops)
    dealt[at.experts, at.sequences, at.slots] = gates[at.sequences, at.tokens, at.choices]
    return dealt


def _collect_gates(gates: Array, experts: Array, each: int, first: int, drops: bool) -> Array:
    found = np.zeros(experts.shape, gates.dtype)
    at = _slots(experts, gates.shape[0], gates.shape[2], each, first, drops)
    found[at.sequences, at.tokens, at.choices] = gates[at.experts, at.sequences, at.slots]
    return found


def _gated_bias(rows: Array, gates: Array, bias: Array) -> Array:
    added: Array = rows + gates[..., None] * bias[:, None, None]
    return added


def _gated_bias_gradient(grad: Array, gates: Array, bias: Array) -> tuple[Array, Array]:
    """The gradients of the gates and of the bias; that of the rows is ``grad`` itself."""
    return np.einsum("ebch,eh->ebc", grad, bias), np.einsum("ebch,ebc->eh", grad, gates)


def _gated_bias_second(g: Any, y: Any, grad: Any, gates: Any, bias: Any) -> list[Any]:
    """The derivative of the gradient, which is linear in ``grad``, and in the gates and the bias."""
    to_gates = np.zeros_like(gates) if g[0] is None else g[0]
    to_bias = np.zeros_like(bias) if g[1] is None else g[1]
    return [
        to_gates[..., None] * bias[:, None, None] + gates[..., None] * to_bias[:, None, None],
        np.einsum("ebch,eh->ebc", grad, to_bias),
        np.einsum("ebch,ebc->eh", grad, to_gates),
    ]


# -- the table ---------------------------------------------------------------------------------------------------------


def _dealing(name: str, rule: Callable[..., Rule], kernel: Callable[..., Array], back: str) -> Operator:
    """An operator that puts something into slots; its derivative, ``back``, takes it out of them."""

    def derivative(g: Any, y: Any, x: Any, experts: Any, shape: Any, **how: Any) -> list[Any]:
        return [apply(back, g, experts, **how), None]

    return Operator(
        name,
        rule,
        first_dtype,
        kernel,
        derivative,
        attributes=_SHAPED,
        optional=_OPTIONAL if name == "dispatch" else {},
        linear=(0,),
        grows=True,
        indexed="e",
    )


def _returning(
    name: str, rule: Callable[..., Rule], kernel: Callable[..., Array], back: str, flops: Any
) -> Operator:
    """An operator that takes something out of slots; its derivative, ``back``, puts it there."""

    def derivative(g: Any, y: Any, rows: Any, experts: Any, **how: Any) -> list[Any]:
        return [apply(back, g, experts, shape=rows.shape, **how), None]

    return Operator(
        name,
        rule,
        first_dtype,
        kernel,
        derivative,
        flops,
        attributes=_ATTRIBUTES,
        optional=_OPTIONAL if name == "combine" else {},
        linear=(0,),
        grows=True,
        indexed="e",
    )


register(_dealing("dispatch", _dispatch_rule, _dispatch, "combine"))
register(_dealing("dispatch_gates", _gates_rule, _dispatch_gates, "collect_gates"))
register(_returning("combine", _combine_rule, _combine, "dispatch", _additions))
register(_returning("collect_gates", _collect_rule, _collect_gates, "dispatch_gates", 0))
register(
    Operator(
        "gated_bias",
        lambda rows, gates, bias: rule("ebch,ebc,eh->ebch", [rows.shape, gates.shape, bias.shape]),
        floating,
        _gated_bias,
        lambda g, y, rows, gates, bias: [g, *apply("gated_bias_gradient", g, gates, bias)],
        2,
    )
)
register(
    Operator(
        "gated_bias_gradient",
        lambda grad, gates, bias: rule("ebch,ebc,eh->ebc,eh", [grad.shape, gates.shape, bias.shape]),
        floating,
        _gated_bias_gradient,
        _gated_bias_second,
        4,
        linear=(0,),
    )
)
