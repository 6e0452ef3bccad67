"""A product of two tensors in letters: which dims of either are multiplied, kept and summed over.

    bmk,bkn->bmn    a batched matrix product         bsm,mf->bsf    a dense layer over batch and sequence

A letter in both operands and in the result is a batch dim, one in both operands only is summed over.  The gradients of
a product are products too: of ``mk,kn->mn`` that of A is ``mn,kn->mk``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallelism.operation import Device

Array = NDArray[Any]


@dataclass(frozen=True)
class Contraction:
    """``out[...] = sum of lhs[...] rhs[...]``, a letter for each dim; every letter stands in two of the three."""

    lhs: str
    rhs: str
    out: str

    @classmethod
    def matmul(cls, lhs_ndim: int, rhs_ndim: int) -> Contraction:
        """``C[..., m, n] = A[..., m, k] B[..., k, n]``; the batch dims of the operand with fewer are the last ones.

        >>> str(Contraction.matmul(3, 2)), str(Contraction.matmul(3, 3))
        ('amk,kn->amn', 'amk,akn->amn')
        """
        batch = "abcdefghij"[: max(lhs_ndim, rhs_ndim) - 2]
        left, right = (batch[len(batch) - (ndim - 2):] for ndim in (lhs_ndim, rhs_ndim))
        return cls(f"{left}mk", f"{right}kn", f"{batch}mn")

    @property
    def letters(self) -> str:
        """All of them: first those of the result, then those that are summed over."""
        return self.out + self.summed

    @property
    def summed(self) -> str:
        """The letters that are summed over."""
        return "".join(letter for letter in self.lhs if letter not in self.out)

    @property
    def lhs_gradient(self) -> Contraction:
        """What makes the gradient of the left operand, of that of the result and the right operand."""
        return Contraction(self.out, self.rhs, self.lhs)

    @property
    def rhs_gradient(self) -> Contraction:
        """What makes the gradient of the right operand, of the left operand and the gradient of the result."""
        return Contraction(self.lhs, self.out, self.rhs)

    def extents(self, lhs: Sequence[int], rhs: Sequence[int]) -> dict[str, int]:
        """The extent of each letter; ``ValueError`` where the operands differ."""
        extents = dict(zip(self.lhs, lhs, strict=True))
        for letter, extent in zip(self.rhs, rhs, strict=True):
            if extents.setdefault(letter, extent) != extent:
                raise ValueError(
                    f"{self}: dim {letter} is {extents[letter]} in the left operand of shape {tuple(lhs)} and "
                    f"{extent} in the right one of shape {tuple(rhs)}"
                )
        return extents

    def flops(self, extents: Mapping[str, int]) -> int:
        """Two for each multiply-add."""
        return 2 * prod(extents[letter] for letter in self.letters)

    def run(self, device: Device, a: Array, b: Array, *, shared: bool = False) -> Array:
        """The product of two local arrays, by `Device.matmul`, which counts its flops; a new array.

        ``shared``: it is about to be communicated, so it lies where peers read it without a copy.
        """
        extents = self.extents(a.shape, b.shape)
        batch = [letter for letter in self.out if letter in self.lhs and letter in self.rhs]
        rows = [letter for letter in self.out if letter not in self.rhs]
        columns = [letter for letter in self.out if letter not in self.lhs]
        summed = list(self.summed)
        left = _matrices(a, self.lhs, batch, rows, summed)
        right = _matrices(b, self.rhs, batch, summed, columns)
        out = None
        if shared:
            out = device.empty((*left.shape[:-1], right.shape[-1]), np.result_type(left, right))
        found = device.matmul(left, right, out=out).reshape([extents[letter] for letter in (*batch, *rows, *columns)])
        order = [*batch, *rows, *columns]
        return np.ascontiguousarray(found.transpose([order.index(letter) for letter in self.out]))

    def __str__(self) -> str:
        return f"{self.lhs},{self.rhs}->{self.out}"


def _matrices(x: Array, letters: str, batch: list[str], rows: list[str], columns: list[str]) -> Array:
    """``x`` with its dims as (batch..., rows, columns), the letters of each side as one dim."""
    moved = x.transpose([letters.index(letter) for letter in (*batch, *rows, *columns)])
    sizes = moved.shape
    b, r = len(batch), len(batch) + len(rows)
    return moved.reshape(*sizes[:b], prod(sizes[b:r]), prod(sizes[r:]))
