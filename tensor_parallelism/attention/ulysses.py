"""Ulysses: all_to_alls turn all heads of some rows into some heads of all rows, and back.

Jacobs et al., *DeepSpeed Ulysses*, 2023, arXiv:2309.14509.

    device 0    rows 0:3 of heads 0 1 2 3        rows 0:6 of heads 0 1
    device 1    rows 3:6 of heads 0 1 2 3   ->   rows 0:6 of heads 2 3

If the query heads of several devices attend with one key-value head, it is sent to each of them.  Its gradient is the
sum of the gradients that they send back.
"""

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
    """The values that the backward needs: all rows of some heads, and the output by rows, too."""

    q: Array
    k: Array
    v: Array
    attended: Attended
    mixed: Array
    """The attention output of the rows of this device, with all heads."""

    def backward(self, device: Device, plan: AttentionPlan, grad: Array) -> Array:
        """The gradients of a device's queries, keys and values in one array, from the gradient of its rows' output.

        **Communication**: four all_to_alls, of the gradients of the output, of queries, keys and values.
        """
        q, k, v, attended, mixed = self
        mine = plan.exchanged[device.position(plan.sharding.split.rows)]
        whole = (range(plan.shapes.x[1]),)
        grad = _to_heads(device, plan, grad, 0)
        q_grad, k_grad, v_grad = (device.empty(x.shape, x.dtype) for x in (q, k, v))
        rows = BlockwiseBackward(device, q, whole, mine.serves, attended, grad, q_grad, mask=plan.mask)
        device.hold(GRADIENTS, k_grad.nbytes + v_grad.nbytes)
        rows.add(k, v, whole, k_grad, v_grad, first=True, last=True)
        q_rows, *of_keys = (_to_rows(device, plan, x) for x in (q_grad, k_grad, v_grad))
        device.hold(GRADIENTS, -k_grad.nbytes - v_grad.nbytes)
        device.hold(KEYS, -k.nbytes - v.nbytes)
        device.hold(STATISTICS, -attended.lse.nbytes)
        device.hold(ACTIVATIONS, -q.nbytes - attended.out.nbytes - mixed.nbytes)
        return np.concatenate(
            (q_rows, *(gather_heads(x, _keys(plan), plan.shapes.kv_heads) for x in of_keys)), axis=2
        )


def ulysses_forward(device: Device, plan: AttentionPlan, projected: list[Array]) -> UlyssesKept:
    """The attention output of a device's rows.

    ``projected`` has the queries, keys and values of this device; it is emptied, to free them early.

    **Communication**: four all_to_alls, of queries, keys, values and of the output.
    """
    mine = plan.exchanged[device.position(plan.sharding.split.rows)]
    whole = (range(plan.shapes.x[1]),)
    q = _to_heads(device, plan, projected.pop(0), 0)
    k, v = (_to_heads(device, plan, spread_heads(projected.pop(0), _keys(plan)), 1) for _ in range(2))
    device.hold(ACTIVATIONS, q.nbytes)
    device.hold(KEYS, k.nbytes + v.nbytes)
    rows = BlockwiseAttention(device, q, whole, mine.serves, mask=plan.mask)
    rows.add(k, v, whole)
    attended = rows.result()
    mixed = _to_rows(device, plan, attended.out)
    device.hold(ACTIVATIONS, attended.out.nbytes + mixed.nbytes)
    device.hold(STATISTICS, attended.lse.nbytes)
    return UlyssesKept(q, k, v, attended, mixed)


def _keys(plan: AttentionPlan) -> list[int]:
    """The key-value heads that are sent to each device, one device after the other."""
    return [head for heads in plan.exchanged for head in heads.keys]


def _to_heads(device: Device, plan: AttentionPlan, x: Array, kind: int) -> Array:
    """All rows of some heads, from some rows of all heads: query heads (``kind`` 0) or key-value heads (1)."""
    return _exchanged(device, plan, x, 2, [len(heads[kind]) for heads in plan.exchanged])


def _to_rows(device: Device, plan: AttentionPlan, x: Array) -> Array:
    """Some rows of all heads, from all rows of some heads."""
    return _exchanged(device, plan, x, 1, [sum(map(len, runs)) for runs in plan.runs])


def _exchanged(device: Device, plan: AttentionPlan, x: Array, split_dim: int, sizes: list[int]) -> Array:
    even = tuple(sizes) == split_sizes(sum(sizes), (len(sizes),))  # a call without sizes is checked only once
    found: Array = device.all_to_all(
        x,
        plan.sharding.split.rows,
        split_dim=split_dim,
        concat_dim=3 - split_dim,
        split_sizes=None if even else sizes,
    )
    return found
