"""Ulysses: all_to_alls between all heads of some rows and some heads of all rows.

Jacobs et al., *DeepSpeed Ulysses*, 2023, arXiv:2309.14509.

    device 0    rows 0:3 of heads 0 1 2 3        rows 0:6 of heads 0 1
    device 1    rows 3:6 of heads 0 1 2 3   ->   rows 0:6 of heads 2 3

A key-value head that the query heads of several devices attend with goes to each of them; its gradient is the sum of
what they send back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from parallelism.arrays import Array
from parallelism.kernels import Attended, gather_heads, spread_heads
from parallelism.mesh import split_sizes
from parallelism.operation import Device
from tensor_parallelism.attention.blocks import (
    ACTIVATIONS,
    GRADIENTS,
    KEYS,
    STATISTICS,
    BlockwiseAttention,
    BlockwiseBackward,
)
from tensor_parallelism.attention.plan import AttentionPlan


class UlyssesKept(NamedTuple):
    """What the backward needs: all rows of some heads, and the result as rows once more."""

    q: Array
    k: Array
    v: Array
    attended: Attended
    mixed: Array
    """What the rows of this device attended to, of all heads."""


def ulysses_forward(device: Device, plan: AttentionPlan, made: list[Array]) -> UlyssesKept:
    """What a device's rows attend to.  ``made``, its queries, keys and values, is emptied.

    **Communication**: four all_to_alls, of queries, keys, values and of the result.
    """
    mine = plan.exchanged[device.position(plan.sharding.split.rows)]
    queries, keys = ([len(heads[i]) for heads in plan.exchanged] for i in (0, 1))
    q = _to_heads(device, plan, made.pop(0), queries)
    k, v = (_to_heads(device, plan, spread_heads(made.pop(0), _keys(plan)), keys) for _ in range(2))
    device.hold(ACTIVATIONS, q.nbytes)
    device.hold(KEYS, k.nbytes + v.nbytes)
    whole = (range(plan.shapes.x[1]),)
    rows = BlockwiseAttention(device, q, whole, mine.serves, causal=plan.causal)
    rows.add(k, v, whole)
    attended = rows.result()
    mixed = _to_rows(device, plan, attended.out)
    device.hold(ACTIVATIONS, attended.out.nbytes + mixed.nbytes)
    device.hold(STATISTICS, attended.lse.nbytes)
    return UlyssesKept(q, k, v, attended, mixed)


def ulysses_backward(
    device: Device, plan: AttentionPlan, kept: UlyssesKept, grad: Array
) -> Array:
    """The gradients of a device's queries, keys and values side by side, from that of its rows' results.

    **Communication**: four all_to_alls, of the gradients of the result, of queries, keys and values.
    """
    q, k, v, attended, mixed = kept
    mine = plan.exchanged[device.position(plan.sharding.split.rows)]
    grad = _to_heads(device, plan, grad, [len(heads.queries) for heads in plan.exchanged])
    whole = (range(plan.shapes.x[1]),)
    q_grad, k_grad, v_grad = (device.empty(x.shape, x.dtype) for x in (q, k, v))
    rows = BlockwiseBackward(device, q, whole, mine.serves, attended, grad, q_grad, causal=plan.causal)
    device.hold(GRADIENTS, k_grad.nbytes + v_grad.nbytes)
    rows.add(k, v, whole, k_grad, v_grad, first=True, last=True)
    q_rows, k_rows, v_rows = (_to_rows(device, plan, x) for x in (q_grad, k_grad, v_grad))
    device.hold(GRADIENTS, -k_grad.nbytes - v_grad.nbytes)
    device.hold(KEYS, -k.nbytes - v.nbytes)
    device.hold(STATISTICS, -attended.lse.nbytes)
    device.hold(ACTIVATIONS, -q.nbytes - attended.out.nbytes - mixed.nbytes)
    k_rows, v_rows = (gather_heads(x, _keys(plan), plan.shapes.kv_heads) for x in (k_rows, v_rows))
    return np.concatenate((q_rows, k_rows, v_rows), axis=2)


def _keys(plan: AttentionPlan) -> list[int]:
    """The key-value heads that go to each device in turn."""
    return [head for heads in plan.exchanged for head in heads.keys]


def _to_heads(device: Device, plan: AttentionPlan, x: Array, heads: Sequence[int]) -> Array:
    """All rows of some heads, from some rows of all heads."""
    found: Array = device.all_to_all(
        x, plan.sharding.split.rows, split_dim=2, concat_dim=1, split_sizes=_unless_even(heads))
    return found


def _to_rows(device: Device, plan: AttentionPlan, x: Array) -> Array:
    """And back."""
    rows = [sum(map(len, runs)) for runs in plan.runs]
    found: Array = device.all_to_all(
        x, plan.sharding.split.rows, split_dim=1, concat_dim=2, split_sizes=_unless_even(rows))
    return found


def _unless_even(sizes: Sequence[int]) -> Sequence[int] | None:
    """Sizes that are to be said; a call without them is checked but once."""
    return None if tuple(sizes) == split_sizes(sum(sizes), (len(sizes),)) else sizes
