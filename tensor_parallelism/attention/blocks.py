"""Blockwise attention: the rows of one device attend to keys and values that arrive block by block.

Blocks that are masked completely are not computed.  A device records the flops of the others as ``attention`` and
``attention_backward``, and the memory of their scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from parallelism.arrays import Array
from parallelism.kernels import (
    Attended,
    attend,
    attend_backward,
    attend_backward_flops,
    attend_flops,
    causal_mask,
    gather_heads,
    merge,
    row_products,
    spread_heads,
)
from parallelism.operation import Device
from tensor_parallelism.attention.shares import Piece, Runs, pieces

ACTIVATIONS, KEYS, STATISTICS = "activations", "keys and values", "softmax statistics"
SCORES, GATHERED, GRADIENTS = "scores", "gathered", "gradients of keys and values"
"""What memory is held for: the first three from the forward to the end of the backward."""


class BlockwiseAttention:
    """The forward for the queries of one device: `add` a block of keys and values at a time, then read `result`."""

    def __init__(self, device: Device, q: Array, rows: Runs, serves: Sequence[int], *, causal: bool) -> None:
        self._device = device
        self._q = q
        self._rows = rows
        self._serves = serves
        self._causal = causal
        self._parts: dict[int, Attended] = {}

    def add(self, k: Array, v: Array, columns: Runs) -> None:
        """Attend to a block.  ``columns`` are its positions in the sequence; add each block once."""
        todo = pieces(self._rows, columns, causal=self._causal)
        if not todo:
            return
        k, v = spread_heads(k, self._serves), spread_heads(v, self._serves)
        for piece in todo:
            q = self._q[:, piece.rows]
            with _computing(self._device, "attention", attend_flops, q, piece, scores=1):
                part = attend(q, k[:, piece.columns], v[:, piece.columns], _mask(piece, self._rows, columns))
                before = self._parts.get(piece.run)
                self._parts[piece.run] = part if before is None else merge(before, part)

    def result(self) -> Attended:
        """The result in the shape of the queries, and the log-sum-exp of all scores of each row."""
        batch, _, heads, _ = self._q.shape
        parts = []
        for number, run in enumerate(self._rows):
            shape = (batch, len(run), heads, self._q.shape[3])
            nothing = Attended(np.zeros(shape, self._q.dtype), np.zeros((batch, heads, len(run)), self._q.dtype))
            parts.append(self._parts.get(number, nothing))
        if len(parts) == 1:
            return parts[0]
        return Attended(np.concatenate([part.out for part in parts], axis=1),
                        np.concatenate([part.lse for part in parts], axis=2))


class BlockwiseBackward:
    """The backward: `add` computes the gradients of a block, and sums the gradient of the queries in ``q_grad``."""

    def __init__(
        self, device: Device, q: Array, rows: Runs, serves: Sequence[int], attended: Attended, grad: Array,
        q_grad: Array, *, causal: bool,
    ) -> None:
        """``q_grad`` is overwritten."""
        self._device = device
        self._q = q
        self._rows = rows
        self._serves = serves
        self._lse = attended.lse
        self._delta = row_products(attended.out, grad)
        self._grad = grad
        self._causal = causal
        self._q_grad = q_grad
        self._nothing_yet = True
        """In ``q_grad``."""

    def add(
        self, k: Array, v: Array, columns: Runs, k_grad: Array, v_grad: Array, *, first: bool, last: bool
    ) -> None:
        """Add to the gradients of a block's keys and values in place; with ``first``, overwrite them.

        ``last`` says that no other block follows for these queries.
        """
        todo = pieces(self._rows, columns, causal=self._causal)
        k_all, v_all = spread_heads(k, self._serves), spread_heads(v, self._serves)
        if first and self._nothing_yet and len(todo) == 1 and k_all is k and _is_whole(todo[0], self._q, k):
            with _computing(self._device, "attention_backward", attend_backward_flops, self._q, todo[0], scores=2):
                attend_backward(
                    self._q, k, v, self._lse, self._delta, self._grad, _mask(todo[0], self._rows, columns),
                    out=(self._q_grad, k_grad, v_grad),
                )
            self._nothing_yet = False
            return
        for fresh, grads in ((first, (k_grad, v_grad)), (self._nothing_yet and (last or todo), (self._q_grad,))):
            for one in grads if fresh else ():
                one.fill(0)
        self._nothing_yet = self._nothing_yet and not todo
        for piece in todo:
            rows, here = piece.rows, piece.columns
            q = self._q[:, rows]
            with _computing(self._device, "attention_backward", attend_backward_flops, q, piece, scores=2):
                by_q, by_k, by_v = attend_backward(
                    q, k_all[:, here], v_all[:, here], self._lse[:, :, rows], self._delta[:, :, rows],
                    self._grad[:, rows], _mask(piece, self._rows, columns),
                )
                self._q_grad[:, rows] += by_q
                k_grad[:, here] += gather_heads(by_k, self._serves, k.shape[2])
                v_grad[:, here] += gather_heads(by_v, self._serves, v.shape[2])


@contextmanager
def _computing(device: Device, name: str, flops: Any, q: Array, piece: Piece, *, scores: int) -> Iterator[None]:
    """Record the flops of one piece, and hold the memory of this number of arrays of scores."""
    batch, rows, heads, head_dim = q.shape
    columns = piece.columns.stop - piece.columns.start
    nbytes = scores * batch * heads * rows * columns * q.itemsize
    device.hold(SCORES, nbytes)
    with device.compute(name, flops=flops(batch, heads, rows, columns, head_dim), dtype=q.dtype):
        yield
    device.hold(SCORES, -nbytes)


def _is_whole(piece: Piece, q: Array, k: Array) -> bool:
    return piece.rows == slice(0, q.shape[1]) and piece.columns == slice(0, k.shape[1])


def _mask(piece: Piece, rows: Runs, columns: Runs) -> Array | None:
    if not piece.masked:
        return None
    return causal_mask(_places(rows)[piece.rows], _places(columns)[piece.columns])


def _places(runs: Runs) -> Array:
    return np.concatenate([np.arange(run.start, run.stop) for run in runs])
