"""Operators that multiply and sum: ``einsum`` and ``matmul``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from parallelism.dtypes import FLOAT4, as_dtype, common_dtype
from parallelism.ir.core import (
    Extent,
    Op,
    Operator,
    Rule,
    TensorType,
    broadcast,
    broadcast_term,
    letters,
    product,
    register,
    rule,
)
from parallelism.ir.core.rules import Dim
from parallelism.ir.tracing import apply

PRODUCTS = frozenset(("einsum", "matmul", "scaled_einsum"))
"""Operators of products of two matrices."""
_EQUATION = re.compile(r"[a-zA-Z]*(,[a-zA-Z]*)*->[a-zA-Z]*")


def _flops(rule: Rule, **_: Any) -> Extent:
    """Per point: one multiplication for each operand after the first, and one addition if a dim is summed."""
    each = len(rule.inputs) - 1 + bool(rule.reduced)
    return each * rule.points if each else 0


@dataclass(frozen=True)
class ProductTerms:
    """The letters of a product: those of ``a``, of ``b`` and of the result."""

    a: str
    b: str
    result: str

    @classmethod
    def of(cls, equation: str) -> ProductTerms:
        """Of an equation such as ``bsd,dn->bsn``."""
        left, result = equation.split("->")
        a, b = left.split(",")
        return cls(a, b, result)

    @property
    def contracted(self) -> str:
        """The letters that are summed over, in the order of ``a``."""
        return "".join(letter for letter in self.a if letter in self.b and letter not in self.result)


def unpacked_shape(shape: Sequence[Extent], packed: int | None) -> tuple[Extent, ...]:
    """The shape of the numbers of an array that has two of them in a byte along a dim; None: it has no such."""
    return tuple(2 * extent if dim == packed else extent for dim, extent in enumerate(shape))


def product_extents(
    equation: str, a: Sequence[Extent], b: Sequence[Extent], packed: Sequence[int] = ()
) -> dict[str, Extent]:
    """The extent of each letter of a product of arrays of these shapes, which may be packed along a dim each."""
    terms, (of_a, of_b) = ProductTerms.of(equation), packed or (None, None)
    extents = dict(zip(terms.a, unpacked_shape(a, of_a), strict=True))
    return extents | dict(zip(terms.b, unpacked_shape(b, of_b), strict=True))


class Letters(NamedTuple):
    """The letters of the dims of a product of two operands; None for a dim that is not one letter."""

    a: tuple[str | None, ...]
    b: tuple[str | None, ...]
    result: tuple[str | None, ...]


def product_letters(op: Op) -> Letters | None:
    """The `Letters` of an op that multiplies two operands, which may have scales; None for any other op.

    None also for operands of 4 bits, of which two numbers lie in a byte.
    """
    if op.kind not in PRODUCTS or _packed(op):
        return None
    if op.kind == "scaled_einsum":
        terms = ProductTerms.of(op["equation"])
        return Letters(tuple(terms.a), tuple(terms.b), tuple(terms.result))
    if len(op.inputs) != 2:
        return None
    rule = op.rule
    return Letters(*map(_single_letters, (*rule.inputs, rule.outputs[0])))


def _single_letters(dims: Sequence[Dim]) -> tuple[str | None, ...]:
    """The letter of each dim; None for one that has several or is broadcast."""
    return tuple(dim[0] if len(dim) == 1 and dim != ("1",) else None for dim in dims)


def product_shape(op: Op) -> tuple[Extent, Extent, Extent, Extent] | None:
    """The (count, m, n, k) of an op that consists of products of two matrices: m x k with k x n; None for others."""
    if op.kind not in PRODUCTS:
        return None
    if op.kind == "scaled_einsum":
        terms, shapes = ProductTerms.of(op["equation"]), [value.type.shape for value in op.inputs]
        extents = product_extents(op["equation"], shapes[0], shapes[len(shapes) // 2], _packed(op))
        a, b, kept = ({*term} for term in (terms.a, terms.b, terms.result))
    elif len(op.inputs) == 2:
        rule = op.rule
        extents = dict(rule.extents)
        a, b, kept = (set(chain(*dims)) for dims in (*rule.inputs, rule.outputs[0]))
    else:
        return None
    if not (a & b) - kept:
        return None

    def points(letters: set[str]) -> Extent:
        return product(extents[letter] for letter in sorted(letters - {"1"}))

    return points(a & b & kept), points((a & kept) - b), points((b & kept) - a), points((a | b) - kept)


def factor_dtype(op: Op) -> np.dtype[Any]:
    """The dtype of the numbers that an op multiplies."""
    return as_dtype(FLOAT4) if _packed(op) else op.inputs[0].type.dtype


def _packed(op: Op) -> Sequence[int]:
    """The dims along which the operands of a product have two numbers in a byte; empty if they have not."""
    found: Sequence[int] = dict(op.attributes).get("packed", ())
    return found


def _dtype(*types: TensorType, **_: Any) -> np.dtype[Any]:
    return common_dtype(*(type.dtype for type in types))


# -- einsum ------------------------------------------------------------------------------------------------------------


def _einsum_rule(*types: TensorType, equation: str) -> Rule:
    if not _EQUATION.fullmatch(equation):
        raise ValueError(f"an equation is written with letters, as ij,jk->ik, got {equation[:80]!r}")
    left, right = equation.split("->")
    for term in (*left.split(","), right):
        if len(set(term)) != len(term):
            raise ValueError(f"{equation}: a letter appears twice in {term}; diagonals are not supported")
    if not set(right) <= set(left):
        raise ValueError(f"{equation}: the result has letters that no input has")
    return rule(equation, [type.shape for type in types])


def _einsum_derivative(g: Any, y: Any, *x: Any, equation: str) -> list[Any]:
    left, out = equation.split("->")
    return contraction_gradients(g, x, left.split(","), out)


def contraction_gradients(g: Any, x: tuple[Any, ...], terms: list[str], out: str) -> list[Any]:
    """The gradients of all operands: each is the product of ``g`` with the other operands.

    It is broadcast along the dims that only this operand has.
    """
    grads = []
    for i, (array, term) in enumerate(zip(x, terms, strict=True)):
        others = [*terms[:i], *terms[i + 1 :]]
        elsewhere = {*out}.union(*others)
        there = "".join(letter for letter in term if letter in elsewhere)
        grad = apply("einsum", g, *x[:i], *x[i + 1 :], equation=f"{','.join([out, *others])}->{there}")
        if there != term:
            grad = grad.reshape(
                [n if letter in there else 1 for letter, n in zip(term, array.shape, strict=True)]
            )
            grad = apply("broadcast_to", grad, shape=array.shape)
        grads.append(grad)
    return grads


register(
    Operator(
        "einsum",
        _einsum_rule,
        _dtype,
        lambda *arrays, equation: np.einsum(equation, *arrays, optimize=len(arrays) > 1),
        _einsum_derivative,
        _flops,
        {"equation": "a string"},
        linear="each",
        grows=True,
    )
)


# -- matmul ------------------------------------------------------------------------------------------------------------


def _terms(a: TensorType, b: TensorType) -> tuple[str, str, str]:
    """The terms of ``...mk, ...kn -> ...mn``.  A batch dim that is broadcast is written 1."""
    if a.ndim < 2 or b.ndim < 2:
        raise ValueError(f"both inputs must be matrices or stacks of matrices, got {a} and {b}")
    batch = broadcast([a.shape[:-2], b.shape[:-2]])
    names = letters(len(batch), "mkn")
    left, right = (broadcast_term(type.shape[:-2], batch, names) for type in (a, b))
    return f"{left}mk", f"{right}kn", f"{names}mn"


def matmul_equation(a: TensorType, b: TensorType) -> str:
    """The product of two matrices, or of stacks of them, as an equation; a dim that is broadcast is written 1."""
    return "{},{}->{}".format(*_terms(a, b))


def _matmul_rule(a: TensorType, b: TensorType) -> Rule:
    return rule(matmul_equation(a, b), [a.shape, b.shape])


def _matmul_derivative(g: Any, y: Any, a: Any, b: Any) -> list[Any]:
    left, right, out = _terms(a.type, b.type)
    operands = _without_broadcast(a, left), _without_broadcast(b, right)
    grads = contraction_gradients(g, operands, [left.replace("1", ""), right.replace("1", "")], out)
    return [grad.reshape(x.shape) for grad, x in zip(grads, (a, b), strict=True)]


def _without_broadcast(x: Any, term: str) -> Any:
    return x.reshape([n for letter, n in zip(term, x.shape, strict=True) if letter != "1"])


register(
    Operator("matmul", _matmul_rule, _dtype, np.matmul, _matmul_derivative, _flops, linear="each", grows=True)
)
