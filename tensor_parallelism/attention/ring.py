"""Ring attention: rows stay in place, blocks of keys and values move around a ring (Liu et al., 2023,
arXiv:2310.01889).

    step        0     1     2     3                 on 4 devices; device 1 computes with these blocks
    forward     1     0     3     2                 each block comes from the left neighbour
    backward    2     3     0     1                 each block moves back in the other direction

The forward ends with the block of the right neighbour, and the backward begins with it.  So the last block of the
backward is the device's own, and the summed gradients of the block are then in their place.  While a device computes
with a block, the next one arrives: it never holds more than these two.
"""

from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Array
from parallelism.kernels import Attended
from parallelism.operation import Device, Work
from tensor_parallelism.attention.blocks import (
    ACTIVATIONS,
    GRADIENTS,
    KEYS,
    STATISTICS,
    BlockwiseAttention,
    BlockwiseBackward,
)
from tensor_parallelism.attention.plan import AttentionPlan


class RingKept(NamedTuple):
    """The values that the backward needs."""

    q: Array
    block: list[tuple[Array, Array]]
    """Keys and values of the last block.  The backward of a ring removes it, so that there are never more than two."""
    attended: Attended

    @property
    def mixed(self) -> Array:
        """The attention output of the rows of this device."""
        return self.attended.out

    def backward(self, device: Device, plan: AttentionPlan, grad: Array) -> Array:
        """The gradients of a device's queries, keys and values in one array, from the gradient of its rows' output.

        **Communication**: on g devices g-1 shifts of a block, each while the block before is computed with, and g-1
        shifts of the gradients of a block.  ``ValueError`` in a second run, because the block is no longer there.
        """
        place = device.position(plan.sharding.split.rows)
        size = len(plan.runs)
        if not self.block:
            raise ValueError(
                "the backward of ring attention runs once for each forward: the keys and values that were "
                "saved have been passed on"
            )
        block: Any = self.block[0]
        if size > 1:
            self.block.clear()
        heads, keys = self.q.shape[2], block[0].shape[2]
        grads_of_all = np.empty((*self.q.shape[:2], heads + 2 * keys, self.q.shape[3]), self.q.dtype)
        q_grad, *own = np.split(grads_of_all, [heads, heads + keys], axis=2)
        rows = BlockwiseBackward(
            device,
            self.q,
            plan.runs[place],
            plan.serves(device.rank),
            self.attended,
            grad,
            q_grad,
            mask=plan.mask,
        )
        grads: Any = own if size == 1 else device.empty(block.shape, block.dtype)
        device.hold(GRADIENTS, sum(one.nbytes for one in grads))
        for step in range(size):
            at = (place + 1 + step) % size
            coming = _passed_on(device, plan, block, at, by=-1) if step < size - 1 else None
            rows.add(
                block[0], block[1], plan.runs[at], grads[0], grads[1], first=step == 0, last=step == size - 1
            )
            if coming is not None:
                device.hold(KEYS, -block.nbytes)
                block = coming.wait()
                del coming
                device.hold(GRADIENTS, block.nbytes)
                sent = grads.nbytes
                grads = device.shift(grads, plan.sharding.split.rows, by=-1)
                device.hold(GRADIENTS, -sent)
        device.hold(KEYS, -sum(one.nbytes for one in block))
        device.hold(GRADIENTS, -sum(one.nbytes for one in grads))
        device.hold(STATISTICS, -self.attended.lse.nbytes)
        device.hold(ACTIVATIONS, -self.q.nbytes - self.mixed.nbytes)
        if size > 1:
            own[0][...], own[1][...] = grads
        return grads_of_all


def ring_forward(device: Device, plan: AttentionPlan, projected: list[Array]) -> RingKept:
    """The rows of a device attend to every block; without a ring there is one block.

    ``projected`` has the queries, keys and values of this device; it is emptied, to free them early.

    **Communication**: on g devices g-1 shifts by one.  Each runs while the block before is computed with.
    """
    place = device.position(plan.sharding.split.rows)
    size = len(plan.runs)
    q, k, v = projected
    block: Any = k, v
    if size > 1:
        q = np.ascontiguousarray(q)
        block = device.empty((2, *k.shape), k.dtype)
        block[0], block[1] = k, v  # one array that peers can read: a pair would be copied more often
    projected.clear()
    device.hold(ACTIVATIONS, q.nbytes)
    device.hold(KEYS, k.nbytes + v.nbytes)
    del k, v
    rows = BlockwiseAttention(device, q, plan.runs[place], plan.serves(device.rank), mask=plan.mask)
    for step in range(size):
        at = (place - step) % size
        coming = _passed_on(device, plan, block, at, by=1) if step < size - 1 else None
        rows.add(block[0], block[1], plan.runs[at])
        if coming is not None:
            device.hold(KEYS, -block.nbytes)
            block = coming.wait()
            del coming
    attended = rows.result()
    device.hold(ACTIVATIONS, attended.out.nbytes)
    device.hold(STATISTICS, attended.lse.nbytes)
    return RingKept(q, [block], attended)


def _passed_on(device: Device, plan: AttentionPlan, block: Array, at: int, *, by: int) -> Work[Array]:
    """Passes block ``at`` on to a neighbour.  From now on the block that the other neighbour sends is held, too."""
    pair, batch, _, heads, head_dim = block.shape
    rows = sum(map(len, plan.runs[(at - by) % len(plan.runs)]))
    device.hold(KEYS, pair * batch * rows * heads * head_dim * block.itemsize)
    return device.shift(block, plan.sharding.split.rows, by=by, async_op=True)
