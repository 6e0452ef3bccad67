"""A contraction is a product of two tensors, written with a letter for each dim.

    bmk,bkn->bmn    a batched matrix product         bsm,mf->bsf    a dense layer over batch and sequence

A letter in both operands and in the result is a batch dim; a letter only in both operands is summed.  The gradients of
a product are products, too: for ``mk,kn->mn`` the gradient of A is ``mn,kn->mk``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import NamedTuple, Self

import numpy as np

from parallelism.arrays import Array
from parallelism.operation import Device

Order = tuple[int, ...]
Arrangement = tuple[Order | None, tuple[int, ...]]
"""The new order of the dims, None if it does not change, and the shape after that."""


class _Arrangements(NamedTuple):
    """How operands of given shapes become matrices, and the product of these the result."""

    lhs: Arrangement
    rhs: Arrangement
    out: tuple[int, ...]
    """The shape of the product of matrices."""
    result: tuple[int, ...]
    """The shape of the result before its dims are reordered."""
    order: Order | None
    """The final order of the dims of the result."""


@dataclass(frozen=True)
class Contraction:
    """``out[...] = sum of lhs[...] rhs[...]``, with a letter for each dim.  Every letter is in at least two of them.

    >>> from tensor_parallelism import Contraction
    >>> product = Contraction("bsm", "mf", "bsf")
    >>> product.summed, product.flops(product.extents((2, 5, 3), (3, 4)))
    ('m', 240)
    """

    lhs: str
    rhs: str
    out: str

    @classmethod
    def matmul(cls, lhs_ndim: int, rhs_ndim: int) -> Self:
        """``C[..., m, n] = A[..., m, k] B[..., k, n]``; the batch dims of the operand with fewer are the last ones.

        >>> str(Contraction.matmul(3, 2)), str(Contraction.matmul(3, 3))
        ('amk,kn->amn', 'amk,akn->amn')
        """
        batch = "abcdefghij"[: max(lhs_ndim, rhs_ndim) - 2]
        left, right = (batch[len(batch) - (ndim - 2) :] for ndim in (lhs_ndim, rhs_ndim))
        return cls(f"{left}mk", f"{right}kn", f"{batch}mn")

    @property
    def letters(self) -> str:
        """All letters: first those of the result, then the summed ones."""
        return self.out + self.summed

    @property
    def summed(self) -> str:
        """The summed letters."""
        return "".join(letter for letter in self.lhs if letter not in self.out)

    @property
    def lhs_gradient(self) -> Self:
        """The product that computes the gradient of the left operand, from that of the result and the right operand."""
        return replace(self, lhs=self.out, out=self.lhs)

    @property
    def rhs_gradient(self) -> Self:
        """The product that computes the gradient of the right operand, from the left one and that of the result."""
        return replace(self, rhs=self.out, out=self.rhs)

    def extents(self, lhs: Sequence[int], rhs: Sequence[int]) -> dict[str, int]:
        """The extent of each letter.  ``ValueError`` if the operands differ."""
        extents = dict(zip(self.lhs, lhs, strict=True))
        for letter, extent in zip(self.rhs, rhs, strict=True):
            if extents.setdefault(letter, extent) != extent:
                raise ValueError(
                    f"{self}: dim {letter} is {extents[letter]} in the left operand of shape {tuple(lhs)} and "
                    f"{extent} in the right one of shape {tuple(rhs)}"
                )
        return extents

    def flops(self, extents: Mapping[str, int]) -> int:
        """The flops of the product: two for each multiply-add."""
        return 2 * prod(extents[letter] for letter in self.letters)

    def run(self, device: Device, a: Array, b: Array, *, shared: bool = False) -> Array:
        """The product of two local arrays as a new array, by `Device.matmul`, which records its flops.

        ``shared`` says that the result will be communicated; it is then allocated where peers read it without a copy.
        """
        arranged = _arrangements(self, a.shape, b.shape)
        left, right = _matrices(a, arranged.lhs), _matrices(b, arranged.rhs)
        out = device.empty(arranged.out, np.result_type(left, right)) if shared else None
        product: Array = device.matmul(left, right, out=out).reshape(arranged.result)
        return product if arranged.order is None else np.ascontiguousarray(product.transpose(arranged.order))

    def __str__(self) -> str:
        return f"{self.lhs},{self.rhs}->{self.out}"


@lru_cache(maxsize=1024)
def _arrangements(of: Contraction, a: tuple[int, ...], b: tuple[int, ...]) -> _Arrangements:
    batch = "".join(letter for letter in of.out if letter in of.lhs and letter in of.rhs)
    rows = "".join(letter for letter in of.out if letter not in of.rhs)
    columns = "".join(letter for letter in of.out if letter not in of.lhs)
    extents = of.extents(a, b)
    shape = tuple(extents[letter] for letter in batch)

    def elements(letters: str) -> int:
        return prod(extents[letter] for letter in letters)

    m = elements(rows)
    k = elements(of.summed)
    n = elements(columns)
    made = batch + rows + columns
    return _Arrangements(
        (_order(of.lhs, batch + rows + of.summed), (*shape, m, k)),
        (_order(of.rhs, batch + of.summed + columns), (*shape, k, n)),
        (*shape, m, n),
        tuple(extents[letter] for letter in made),
        _order(made, of.out),
    )


def _order(given: str, wanted: str) -> Order | None:
    """The order in which the dims of an array are those wanted; None if it is the given one."""
    return None if given == wanted else tuple(map(given.index, wanted))


def _matrices(x: Array, arrangement: Arrangement) -> Array:
    order, shape = arrangement
    return (x if order is None else x.transpose(order)).reshape(shape)
