"""Which of the open extents of a module's arguments are equal: operands of one shape say so, and products.

A text writes ``?`` for each.  Ops without a meaning here leave the extents of their results unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from parallelism.interop.stablehlo.module import Module, Node
from parallelism.interop.stablehlo.shapes import fields, numbers
from parallelism.ir.core import TensorType

Place = tuple[int, int]
"""A value and one of its dims."""
# fmt: off
_NAMES = [
    "add", "subtract", "multiply", "divide", "power", "remainder", "maximum", "minimum", "atan2",
    "negate", "abs", "sqrt", "rsqrt", "cbrt", "exponential", "exponential_minus_one", "log",
    "log_plus_one", "logistic", "sine", "cosine", "tan", "tanh", "floor", "ceil", "sign",
    "round_nearest_even", "round_nearest_afz", "is_finite", "shift_left", "shift_right_logical",
    "shift_right_arithmetic", "xor", "and", "or", "not", "compare", "select", "clamp", "convert",
    "reduce_precision", "popcnt", "count_leading_zeros", "optimization_barrier",
]
# fmt: on
_OF_ONE_SHAPE = frozenset(f"stablehlo.{name}" for name in _NAMES)
"""Ops whose operands and result have one shape."""


class EqualExtents:
    """The extents of a module's main function, in classes of equal ones."""

    def __init__(self, module: Module) -> None:
        self._same: dict[Place, Place | int] = {}
        block = module.main.body
        self.shapes: dict[int, list[Place | int]] = {}
        for number, type in zip(block.arguments, block.types, strict=True):
            if isinstance(type, TensorType):
                self.shapes[number] = _shape(number, type)
        for node in block.nodes:
            follow = _FOLLOWING.get(node.kind) or (_of_one_shape if node.kind in _OF_ONE_SHAPE else None)
            known = all(operand in self.shapes for operand in node.operands)
            found = follow(self, node) if follow is not None and known and len(node.results) == 1 else None
            for number, type in zip(node.results, node.types, strict=True):
                if not isinstance(type, TensorType):
                    continue
                self.shapes[number] = own = _shape(number, type)
                if found is not None and len(found) == len(own):
                    self.equal(own, found)

    def first(self, extent: Place | int) -> Place | int:
        """The first of the extents that are equal to this one, or their number."""
        while not isinstance(extent, int) and extent in self._same:
            extent = self._same[extent]
        return extent

    def equal(self, some: Sequence[Place | int], others: Sequence[Place | int]) -> None:
        """These are equal, one by one.  Two different numbers stay as they are: reading says what is wrong."""
        for pair in zip(some, others, strict=True):
            a, b = map(self.first, pair)
            if a == b or (isinstance(a, int) and isinstance(b, int)):
                continue
            kept, merged = (a, b) if isinstance(a, int) or (not isinstance(b, int) and a < b) else (b, a)
            assert not isinstance(merged, int)
            self._same[merged] = kept


def _shape(number: int, type: TensorType) -> list[Place | int]:
    """The extents of a value, those that are open as its dims."""
    return [n if isinstance(n, int) else (number, d) for d, n in enumerate(type.shape)]


def _of_one_shape(all: EqualExtents, node: Node) -> list[Place | int] | None:
    """Operands without dims, as the bounds of a clamp, go with any shape."""
    shapes = [shape for number in node.operands if (shape := all.shapes[number])]
    if not shapes or len({*map(len, shapes)}) > 1:
        return None
    for shape in shapes[1:]:
        all.equal(shapes[0], shape)
    return shapes[0]


def _product(all: EqualExtents, node: Node) -> list[Place | int]:
    named = fields(node.attributes["dot_dimension_numbers"])
    batch, summed, left = [], [], []
    for number, side in zip(node.operands, ("lhs", "rhs"), strict=True):
        shape = all.shapes[number]
        shared = named.get(f"{side}_batching_dimensions", ())
        contracted = named.get(f"{side}_contracting_dimensions", ())
        batch.append([shape[d] for d in shared])
        summed.append([shape[d] for d in contracted])
        left += [n for d, n in enumerate(shape) if d not in (*shared, *contracted)]
    all.equal(*batch)
    all.equal(*summed)
    return [*batch[0], *left]


def _transposed(all: EqualExtents, node: Node) -> list[Place | int]:
    shape = all.shapes[node.operands[0]]
    return [shape[d] for d in numbers(node, "permutation")]


def _reduced(all: EqualExtents, node: Node) -> list[Place | int]:
    gone = numbers(node, "dimensions")
    return [n for d, n in enumerate(all.shapes[node.operands[0]]) if d not in gone]


_FOLLOWING: dict[str, Callable[[EqualExtents, Node], list[Place | int] | None]] = {
    "stablehlo.dot_general": _product,
    "stablehlo.transpose": _transposed,
    "stablehlo.reduce": _reduced,
}
"""The extents of the result of an op, from those of its operands."""
