"""What has to hold for every operator: its dim rule, by running tiles of it; its derivative, by central differences."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from ir_examples import Bools, Example, Ints
from numpy.testing import assert_allclose, assert_array_equal

from parallelism import ir
from parallelism.ir.core import of_a_part
from parallelism.ir.passes.interpreter import run
from parallelism.sharding.partial import combine

# -- the dim rule, by tiles --------------------------------------------------------------------------------------------


def tile(rule, dims, array, letter, begin, end):
    """The part of an array that belongs to a part of one letter."""
    key = [slice(None)] * array.ndim
    for d, dim in enumerate(dims):
        if letter in dim:
            inner = array.shape[d] // rule.extents[letter]
            key[d] = slice(begin * inner, end * inner)
    return array[tuple(key)]


def local(rule, dims, letter, begin, end):
    """Where such a part starts, and its extent, by dims."""
    spans = []
    for dim, extent in zip(dims, rule.shape(dims), strict=True):
        inner = extent // rule.extents[letter] if letter in dim else None
        spans.append((0, extent) if inner is None else (inner * begin, inner * (end - begin)))
    return spans


def splittable(rule):
    """Letters that may be split where they stand: outermost in all their dims."""
    tensors = (*rule.inputs, *rule.outputs)
    return [
        letter for letter in rule.letters
        if letter not in rule.whole and rule.extents[letter] >= 2
        and all(dim[0] == letter for dims in tensors for dim in dims if letter in dim)
    ]


def cuts(extent, empty):
    """Two ways to cut: into up to three nearly equal pieces; into a small, a large and, if wanted, an empty one.
    """
    third = -(-extent // 3)
    yield [0, *range(third, extent, third), extent]
    yield [0, 1, extent, *([extent] if empty else [])]


def check_tiles(example, seed=0, inexact=()):
    """Every letter that may be split: the op on the pieces makes the pieces of what it makes."""
    op, arrays = example.op(), example.arrays(seed, whole=True)
    rule, whole = op.rule, run(op, arrays)
    for letter in splittable(rule):
        # an empty array has no largest or smallest element: there are no empty terms
        for places in cuts(rule.extents[letter], letter not in rule.reduced):
            parts = []
            for begin, end in pairwise(places):
                inputs = [tile(rule, dims, x, letter, begin, end) for dims, x in zip(rule.inputs, arrays, strict=True)]
                span = (begin, end - begin), rule.extents[letter]
                kind, attributes = of_a_part(op.kind, op.attributes, local(rule, rule.outputs[0], letter, begin, end),
                                             span if letter == op.operator.indexed else None)
                parts.append(run(Example(kind, tuple(map(like, inputs)), dict(attributes)).op(), inputs))
            for number, (dims, expected) in enumerate(zip(rule.outputs, whole, strict=True)):
                pieces = [part[number] for part in parts]
                at = [d for d, dim in enumerate(dims) if letter in dim]
                found = np.concatenate(pieces, axis=at[0]) if at else combine(rule.op, pieces)
                if example.kind in inexact:
                    assert_allclose(found, expected, rtol=1e-13, atol=1e-13)
                else:
                    assert_array_equal(found, expected)


def like(array):
    """The input of an example that an array is for."""
    if array.dtype.kind == "f":
        return array.shape
    return Ints(array.shape, 1) if array.dtype.kind == "i" else Bools(array.shape)


# -- derivatives, by central differences -------------------------------------------------------------------------------


def numeric(op, arrays, number, seeds, step=1e-6):
    """The gradient of sum(seed * output) for one input, element by element."""
    found = np.zeros(arrays[number].shape)
    for place in np.ndindex(found.shape):
        sides = []
        for sign in (1, -1):
            moved = [x.copy() for x in arrays]
            moved[number][place] += sign * step
            outputs = [y for y in run(op, moved) if y.dtype.kind == "f"]
            sides.append(sum(float((s * y).sum()) for s, y in zip(seeds, outputs, strict=True)))
        found[place] = (sides[0] - sides[1]) / (2 * step)
    return found


def check_gradient(example, seed=1):
    """The derivative of every floating-point input."""
    function, arrays = example.function(), example.arrays(seed)
    op = function.ops[0]
    grad = ir.gradient(function)
    rng = np.random.default_rng(seed + 100)
    alone = len(op.outputs) == 1 and not op.outputs[0].type.shape
    seeds = [np.ones(())] if alone else [
        rng.uniform(-1, 1, v.type.shape) for v in op.outputs if v.type.dtype.kind == "f"]
    found = ir.interpret(grad, [*arrays, *([] if alone else seeds)]).outputs
    floats = [i for i, x in enumerate(arrays) if x.dtype.kind == "f"]
    assert len(found) == len(floats)
    for number, gradient in zip(floats, found, strict=True):
        assert_allclose(gradient, numeric(op, arrays, number, seeds), rtol=1e-6, atol=1e-7)


def is_differentiable(example):
    """Whether it takes floats, makes floats and at most bools besides, and has a derivative of its own."""
    op = example.op()
    made = {value.type.dtype.name for value in op.outputs}
    if op.operator.passes_rounding:
        return False
    return (any(t.dtype.kind == "f" for t in op.types) and made in ({"float64"}, {"float64", "bool"})
            and op.operator.derivative is not None and op.kind not in JOINED)


JOINED = {"cross_entropy", "local_loss"}
"""Operators whose derivative goes through others that compute their inputs; it is tested with these."""
