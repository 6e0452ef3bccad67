"""Blockwise attention: the rows of one device attend to keys and values that arrive block by block.

Blocks that are masked completely are not computed.  A device records the flops of the others as ``attention`` and
``attention_backward``, and the memory of their scores.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from parallelism.arrays import Array
from parallelism.kernels import (
    Attended,
    Mask,
    attend,
    attend_backward,
    attend_backward_flops,
    attend_flops,
    gather_heads,
    merge,
    row_products,
    spread_heads,
)
from parallelism.operation import Device
from tensor_parallelism.attention.shares import Runs, Tile, tiles

ACTIVATIONS, KEYS, STATISTICS = "activations", "keys and values", "softmax statistics"
SCORES, GATHERED, GRADIENTS = "scores", "gathered", "gradients of keys and values"
"""What memory is held for: the first three from the forward to the end of the backward."""


@dataclass
class _Blockwise:
    """The queries of one device, the positions of their rows, and the key-value head of each query head."""

    device: Device
    q: Array
    rows: Runs
    serves: Sequence[int]
    mask: Mask = field(kw_only=True)

    def allowed(self, tile: Tile, columns: Runs) -> Array | None:
        """Which rows of a tile attend to which of its columns; None: all to all."""
        if not tile.masked:
            return None
        return self.mask.allowed(_places(self.rows)[tile.rows], _places(columns)[tile.columns])


@dataclass
class BlockwiseAttention(_Blockwise):
    """The forward for the queries of one device: `add` a block of keys and values at a time, then read `result`."""

    parts: dict[int, Attended] = field(default_factory=dict)
    """By run of rows, the result of the blocks so far."""

    def add(self, k: Array, v: Array, columns: Runs) -> None:
        """Attend to a block.  ``columns`` are its positions in the sequence; add each block once."""
        todo = tiles(self.rows, columns, self.mask)
        if not todo:
            return
        k, v = spread_heads(k, self.serves), spread_heads(v, self.serves)
        for tile in todo:
            q = self.q[:, tile.rows]
            with _computing(self.device, "attention", attend_flops, q, tile, scores=1):
                part = attend(q, k[:, tile.columns], v[:, tile.columns], self.allowed(tile, columns))
                before = self.parts.get(tile.run)
                self.parts[tile.run] = part if before is None else merge(before, part)

    def result(self) -> Attended:
        """The result in the shape of the queries, and the log-sum-exp of all scores of each row."""
        batch, _, heads, head_dim = self.q.shape
        dtype = self.q.dtype
        parts = [
            self.parts.get(number)
            or Attended(
                np.zeros((batch, len(run), heads, head_dim), dtype), np.zeros((batch, heads, len(run)), dtype)
            )
            for number, run in enumerate(self.rows)
        ]
        if len(parts) == 1:
            return parts[0]
        return Attended(
            np.concatenate([part.out for part in parts], axis=1),
            np.concatenate([part.lse for part in parts], axis=2),
        )


@dataclass
class BlockwiseBackward(_Blockwise):
    """The backward: `add` computes the gradients of a block, and sums the gradient of the queries in ``q_grad``."""

    attended: Attended
    grad: Array
    q_grad: Array
    """It is overwritten."""
    nothing_yet: bool = field(default=True, init=False)
    """In ``q_grad``."""

    def __post_init__(self) -> None:
        self.delta = row_products(self.attended.out, self.grad)

    def add(
        self, k: Array, v: Array, columns: Runs, k_grad: Array, v_grad: Array, *, first: bool, last: bool
    ) -> None:
        """Add to the gradients of a block's keys and values in place; with ``first``, overwrite them.

        ``last`` says that no other block follows for these queries.
        """
        todo, lse = tiles(self.rows, columns, self.mask), self.attended.lse
        k_all, v_all = spread_heads(k, self.serves), spread_heads(v, self.serves)
        if first and self.nothing_yet and len(todo) == 1 and k_all is k and _is_whole(todo[0], self.q, k):
            with _computing(
                self.device, "attention_backward", attend_backward_flops, self.q, todo[0], scores=2
            ):
                attend_backward(
                    self.q,
                    k,
                    v,
                    lse,
                    self.delta,
                    self.grad,
                    self.allowed(todo[0], columns),
                    out=(self.q_grad, k_grad, v_grad),
                )
            self.nothing_yet = False
            return
        for fresh, grads in (
            (first, (k_grad, v_grad)),
            (self.nothing_yet and (last or todo), (self.q_grad,)),
        ):
            for one in grads if fresh else ():
                one.fill(0)
        self.nothing_yet = self.nothing_yet and not todo
        for tile in todo:
            rows, here = tile.rows, tile.columns
            q = self.q[:, rows]
            with _computing(self.device, "attention_backward", attend_backward_flops, q, tile, scores=2):
                by_q, by_k, by_v = attend_backward(
                    q,
                    k_all[:, here],
                    v_all[:, here],
                    lse[:, :, rows],
                    self.delta[:, :, rows],
                    self.grad[:, rows],
                    self.allowed(tile, columns),
                )
                self.q_grad[:, rows] += by_q
                k_grad[:, here] += gather_heads(by_k, self.serves, k.shape[2])
                v_grad[:, here] += gather_heads(by_v, self.serves, v.shape[2])


@contextmanager
def _computing(device: Device, name: str, flops: Any, q: Array, tile: Tile, *, scores: int) -> Iterator[None]:
    """Record the flops of one tile, and hold the memory of this number of arrays of scores."""
    batch, rows, heads, head_dim = q.shape
    columns = tile.columns.stop - tile.columns.start
    nbytes = scores * batch * heads * rows * columns * q.itemsize
    device.hold(SCORES, nbytes)
    with device.compute(name, flops=flops(batch, heads, rows, columns, head_dim), dtype=q.dtype):
        yield
    device.hold(SCORES, -nbytes)


def _is_whole(tile: Tile, q: Array, k: Array) -> bool:
    return tile.rows == slice(0, q.shape[1]) and tile.columns == slice(0, k.shape[1])


def _places(runs: Runs) -> Array:
    return np.concatenate([np.arange(run.start, run.stop) for run in runs])
