"""A feed-forward of experts, recorded: which experts a token takes, its rows there and back, and the loss that balances.

Rows are dealt by index (`parallelism.ir.operators.dispatch`), and the experts' products are einsums with a dim of experts.
Where experts are split over an axis with the rows of the batch, the rows that were dealt go from the devices of their
sequences to those of their experts, and back, by all_to_all.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil, gcd
from typing import Any, NamedTuple

import numpy as np

from parallelism.ir.core import Expression, Extent
from parallelism.ir.core.extents import divided, rounded_up
from parallelism.ir.tracing.current import region
from parallelism.ir.tracing.tracing import apply
from parallelism.models.block_parts import Parts
from parallelism.models.expert_layers import Experts
from parallelism.models.figures import GATED, has_bias

UNEVEN = 1.05
"""Slots are rounded up by at most this factor, so that a split sequence has as many of them in each part."""
SMALLEST = 1e-20
"""What is added to a sum of gates before it divides."""
WEIGHTED = ("swiglu", "geglu", "clamped_swiglu", "relu2")
"""The activations that are one op with the gates of experts.  Megatron-Core has such a kernel of ``--quick-geglu``, not of a
GELU with a gate."""


class Slots(NamedTuple):
    """How many rows of a sequence an expert takes; see `parallelism.ir.operators.dispatch`."""

    rows: Extent
    """Of a whole sequence."""
    each: Extent
    """The slots of a chunk of the sequence."""
    drops: bool


def slots_of(experts: Experts, tokens: Extent) -> Slots:
    """The slots of an expert for a sequence of so many tokens; of a symbol of them in one chunk, without a capacity.

    With a capacity they are that factor of the even share, ``chosen * tokens / count``, rounded up.  Without one they are
    the even share times ``load``, and as many chunks share them as can be evenly.
    """
    if isinstance(tokens, Expression):
        load = Fraction(experts.load).limit_denominator(1000)
        share = rounded_up(
            divided(load.numerator * experts.chosen * tokens, load.denominator * experts.count)
        )
        return Slots(share, share, drops=False)
    even = experts.chosen * tokens / experts.count
    if experts.capacity is not None:
        count = min(tokens, ceil(experts.capacity * even))
        return Slots(count, count, drops=True)
    count = min(tokens, _rounded(experts.load * even, tokens))
    return Slots(count, count // gcd(tokens, count), drops=False)


def _rounded(share: float, tokens: int) -> int:
    """A number of slots of at least a share: itself, or a multiple of a power of 2 that divides the tokens."""
    least = ceil(round(share, 6))
    if least == round(share, 6):
        return least
    step = tokens & -tokens
    while ceil(least / step) * step > UNEVEN * share and step > 1:
        step //= 2
    return ceil(least / step) * step


def expert_feed_forward(parts: Parts, x: Any, block: str) -> Any:
    """What the experts of a block make of ``x``, of shape ``(batch, sequence, width)``, behind its norm.

    Of token t with experts e and gates g it is ``sum(g * expert_e(x[t]))``, and what the shared experts make of x[t].  The
    names of the parameters begin with ``block``.  The loss that balances the experts is added to ``parts.losses``.
    """
    spec = parts.spec
    experts = spec.experts
    assert experts is not None
    with region("router"):
        logits = parts.product(x, block, "router")
        logits = logits.astype(np.result_type(logits.dtype, np.float32))
        scores = apply(experts.router, logits, **({"axis": 2} if experts.router == "softmax" else {}))
        chosen, gates = choose(experts, scores)
        if experts.balance:
            parts.losses.append(experts.balance * balance_loss(experts, scores, chosen))
    given = x
    if experts.latent is not None:
        with region("latent"):
            given = parts.product(x, block, "latent_down")
    slots = slots_of(experts, x.shape[1])
    how: dict[str, Any] = {"each": slots.each, "first": 0, "drops": slots.drops}
    sent = {"sent": str(experts.tokens)} if experts.deduplicated else {}
    with region("dispatch"):
        shape = (experts.count, x.shape[0], slots.rows)
        rows = apply("dispatch", given, chosen, shape=(*shape, given.shape[2]), **how, **sent)
        gates = apply("dispatch_gates", gates.astype(x.dtype), chosen, shape=shape, **how)
    with region("experts"):
        rows = _experts(parts, rows, gates, block, gates_inputs=experts.gates_inputs)
    with region("combine"):
        mixed = apply("combine", rows, chosen, **how, **sent)
    if experts.latent is not None:
        with region("latent"):
            mixed = parts.product(mixed, block, "latent_up")
    if not experts.shared_width:
        return mixed
    with region("shared"):
        return mixed + _shared(parts, x, block)


def choose(experts: Experts, scores: Any) -> tuple[Any, Any]:
    """The experts of each token and their gates, both of shape ``(batch, sequence, chosen)``.

    ``scores`` of shape ``(batch, sequence, count)`` are positive.  Of equal ones the lower number comes first.
    """
    preferred = scores if experts.groups == 1 else _of_best_groups(experts, scores)
    chosen = np.argsort(-preferred, axis=2)[:, :, : experts.chosen]
    gates = np.take_along_axis(scores, chosen, axis=2)
    if experts.normalized:
        gates = gates / (np.sum(gates, axis=2, keepdims=True) + SMALLEST)
    return chosen, gates * experts.scale if experts.scale != 1 else gates


def _of_best_groups(experts: Experts, scores: Any) -> Any:
    """The scores, and -1 for experts outside of the best groups of a token."""
    batch, tokens, count = scores.shape
    inside = scores.reshape((batch, tokens, experts.groups, count // experts.groups))
    if experts.group_best == 1:
        best = np.max(inside, axis=3)
    else:
        best = np.sum(np.sort(inside, axis=3)[:, :, :, -experts.group_best :], axis=3)
    groups = np.argsort(-best, axis=2)[:, :, : experts.groups_chosen]
    is_best = np.sum(apply("one_hot", groups, extent=experts.groups, dtype=scores.dtype), axis=2)
    return np.where(is_best[..., None] > 0, inside, -1).reshape(scores.shape)


def balance_loss(experts: Experts, scores: Any, chosen: Any) -> Any:
    """``count * sum(f * p)``, averaged over sequences: f is the share of the choices that an expert gets, p its mean score.

    It is 1 if both are even (Fedus et al., *Switch Transformers*, 2021, arXiv:2101.03961, equation 4, where a token has one
    choice).  f has no gradient.
    """
    choices = np.sum(apply("one_hot", chosen, extent=experts.count, dtype=scores.dtype), axis=2)
    shares = np.mean(choices, axis=1) / experts.chosen
    return np.mean(np.sum(shares * np.mean(scores, axis=1), axis=1)) * experts.count


def _experts(parts: Parts, rows: Any, gates: Any, block: str, *, gates_inputs: bool) -> Any:
    """What the experts make of their rows, ``(experts, batch, slots, width)``, times the gates of these."""
    spec, p = parts.spec, parts.p
    if gates_inputs:
        rows = np.einsum("ebch,ebc->ebch", rows, gates)
    with region("up"):
        hidden = _product(parts, "ebch,ehf->ebcf", rows, f"{block}expert_up")
        gate = (
            [_product(parts, "ebch,ehf->ebcf", rows, f"{block}expert_gate")]
            if spec.activation in GATED
            else []
        )
    with region("activation"):
        hidden = _activated(spec.activation, (*gate, hidden), None if gates_inputs else gates)
    with region("down"):
        made = np.einsum("ebcf,efh->ebch", hidden, p[f"{block}expert_down"])
        if has_bias(spec, "expert_down"):
            made = apply("gated_bias", made, gates, p[f"{block}expert_down_bias"])
        return made


def _activated(activation: str, inputs: Sequence[Any], gates: Any) -> Any:
    """The activation of the rows, times their gates, unless these are None.

    They are one op where Megatron-Core has one kernel for both: it keeps its inputs alone for the backward.
    """
    if gates is None:
        return apply(activation, *inputs)
    if activation in WEIGHTED:
        return apply(f"weighted_{activation}", *inputs, gates)
    return np.einsum("ebcf,ebc->ebcf", apply(activation, *inputs), gates)


def _product(parts: Parts, equation: str, rows: Any, name: str) -> Any:
    """A product of each expert, with its bias if it has one."""
    made = np.einsum(equation, rows, parts.p[name])
    if not has_bias(parts.spec, name.rpartition(".")[2]):
        return made
    return made + parts.p[f"{name}_bias"][:, None, None, :]


def _shared(parts: Parts, x: Any, block: str) -> Any:
    """What the experts make that every token takes."""
    experts = parts.spec.experts
    assert experts is not None
    with region("up"):
        hidden = parts.product(x, block, "shared_up")
        gate = [parts.product(x, block, "shared_gate")] if parts.spec.activation in GATED else []
    with region("activation"):
        hidden = parts.activated(*gate, hidden)
    with region("down"):
        made = parts.product(hidden, block, "shared_down")
    if not experts.shared_gate:
        return made
    with region("router"):
        return made * apply("sigmoid", parts.product(x, block, "shared_router"))
