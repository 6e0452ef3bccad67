"""Operators that multiply and sum: ``einsum`` and ``matmul``."""

import re
from typing import Any

import numpy as np

from parallelism.dtypes import common_dtype
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
from parallelism.ir.tracing import apply

FACTORS = {
    "einsum": (True, True),
    "matmul": (True, True),
    "scaled_einsum": (True, False, True, False),
}
"""Operators of products of two matrices: for each input whether it is a factor, rather than the scales of one."""
_EQUATION = re.compile(r"[a-zA-Z]*(,[a-zA-Z]*)*->[a-zA-Z]*")


def _flops(rule: Rule, **_: Any) -> Extent:
    """Per point: one multiplication for each operand after the first, and one addition if a dim is summed."""
    each = len(rule.inputs) - 1 + bool(rule.reduced)
    return each * rule.points if each else 0


def product_shape(op: Op) -> tuple[Extent, Extent, Extent, Extent] | None:
    """The (count, m, n, k) of an op that consists of products of two matrices: m x k with k x n; None for others."""
    factors = FACTORS.get(op.kind)
    if factors is None or len(op.inputs) != len(factors):
        return None
    rule = op.rule
    a, b = (
        {letter for dim in rule.inputs[place] for letter in dim}
        for place, is_factor in enumerate(factors)
        if is_factor
    )
    out = rule.outputs[0]
    kept = {letter for dim in out for letter in dim}
    if not (a & b) - kept:
        return None
    count, m, n, k = (
        product(rule.extents[letter] for letter in sorted(letters - {"1"}))
        for letters in (a & b & kept, (a & kept) - b, (b & kept) - a, (a | b) - kept)
    )
    return count, m, n, k


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
        there = "".join(
            letter for letter in term if letter in out or any(letter in other for other in others)
        )
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
    operands = tuple(
        x.reshape([n for letter, n in zip(term, x.shape, strict=True) if letter != "1"])
        for x, term in ((a, left), (b, right))
    )
    grads = contraction_gradients(g, operands, [left.replace("1", ""), right.replace("1", "")], out)
    return [grad.reshape(x.shape) for grad, x in zip(grads, (a, b), strict=True)]


register(
    Operator("matmul", _matmul_rule, _dtype, np.matmul, _matmul_derivative, _flops, linear="each", grows=True)
)
