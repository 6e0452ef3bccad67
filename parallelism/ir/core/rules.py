"""A rule relates the dims of an operator's inputs and outputs, as in an einsum.

    ij,jk->ik           j is in the inputs only: it is reduced, by a sum unless the rule says otherwise
    ij!->ij!            j is needed whole: a part of it cannot be computed alone (a softmax along j)
    (ij)k->ijk          a dim is composed of two, the first one slowest (a reshape)
    1j,ij->ij           a dim of extent 1 is broadcast
    ij->1j              a reduced dim is kept with extent 1, or a dim of extent 1 is new

A rule determines the shapes of the outputs, which dims may be split over devices, which outputs are then partial (a
reduction over shards is pending), and how many points the operator visits; flops are counted per point.  An output is
reduced over each letter that it does not have and that is not needed whole, even if another output has the letter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from string import ascii_letters

from parallelism.ir.core.extents import Extent, product, quotient

Dim = tuple[str, ...]
Shape = tuple[Extent, ...]


@dataclass(frozen=True)
class Rule:
    """The dims of inputs and outputs in letters, and the extent of each letter."""

    inputs: tuple[tuple[Dim, ...], ...]
    outputs: tuple[tuple[Dim, ...], ...]
    extents: Mapping[str, Extent]
    whole: frozenset[str]
    """Letters that cannot be split."""
    op: str = "sum"
    """How the parts of a reduced dim are combined: sum, prod, max or min."""

    @property
    def reduced(self) -> tuple[str, ...]:
        """The letters that an operator reduces over, in order."""
        kept = {letter for output in self.outputs for dim in output for letter in dim}
        return tuple(letter for letter in self.letters if letter not in kept and letter not in self.whole)

    @property
    def letters(self) -> tuple[str, ...]:
        """All letters, in the order in which they appear."""
        return tuple(dict.fromkeys(
            letter for tensor in (*self.inputs, *self.outputs) for dim in tensor for letter in dim if letter != "1"
        ))

    @property
    def output_shapes(self) -> tuple[Shape, ...]:
        """The shape of each output."""
        return tuple(self.shape(output) for output in self.outputs)

    @property
    def points(self) -> Extent:
        """The number of points that the operator visits: the product of the extents of all letters."""
        return product(self.extents[letter] for letter in self.letters)

    def shape(self, dims: Sequence[Dim]) -> Shape:
        """The extents of these dims."""
        return tuple(product(self.extents[letter] for letter in dim if letter != "1") for dim in dims)

    def __str__(self) -> str:
        sides = (",".join("".join(map(self._written, tensor)) for tensor in side)
                 for side in (self.inputs, self.outputs))
        return "->".join(sides)

    def _written(self, dim: Dim) -> str:
        letters = "".join(f"{letter}!" if letter in self.whole else letter for letter in dim)
        return letters if len(dim) == 1 else f"({letters})"


def rule(text: str, shapes: Sequence[Shape], new: Mapping[str, Extent] | None = None, op: str = "sum") -> Rule:
    """The rule written in ``text`` for inputs of these shapes.  ``new`` has the extents of letters of outputs only.

    ``ValueError`` if the inputs do not fit: a wrong number of dims, or two extents for one letter.
    """
    inputs, outputs, whole = _read(text)
    if not shapes and inputs == ((),):
        inputs = ()                     # "->ij" is the text for no input as well as for a scalar
    extents: dict[str, Extent] = dict(new or {})
    where: dict[str, int] = {}
    if len(inputs) != len(shapes):
        raise ValueError(f"it takes {len(inputs)} inputs ({text}), not {len(shapes)}")
    for number, (dims, shape) in enumerate(zip(inputs, shapes, strict=True)):
        if len(dims) != len(shape):
            raise ValueError(f"input {number} must have {len(dims)} dims ({text}), got {len(shape)}: shape "
                             f"{shape_text(shape)}")
        for dim, extent in zip(dims, shape, strict=True):
            if len(dim) != 1:
                continue
            letter, = dim
            known = 1 if letter == "1" else extents.setdefault(letter, extent)
            if known != extent:
                other = ""
                if letter in where:
                    other = f" in input {where[letter]}, of shape {shape_text(shapes[where[letter]])}"
                raise ValueError(f"dim {letter} of {text} is {known}{other}, and {extent} in input {number}, of shape "
                                 f"{shape_text(shape)}")
            where.setdefault(letter, number)
    return Rule(inputs, outputs, extents, whole, op)


def shape_text(shape: Sequence[Extent]) -> str:
    """The text of a shape, for messages."""
    return f"({', '.join(map(str, shape))})"


@lru_cache(maxsize=4096)
def _read(text: str) -> tuple[tuple[tuple[Dim, ...], ...], tuple[tuple[Dim, ...], ...], frozenset[str]]:
    left, right = text.split("->")
    whole: set[str] = set()
    return _side(left, whole), _side(right, whole), frozenset(whole)


def _side(text: str, whole: set[str]) -> tuple[tuple[Dim, ...], ...]:
    tensors = []
    for tensor in text.split(","):
        dims: list[Dim] = []
        group: list[str] | None = None
        for mark in tensor:
            if mark == "(":
                group = []
            elif mark == ")":
                dims.append(tuple(group or ()))
                group = None
            elif mark == "!":
                whole.add((group or dims[-1])[-1])
            elif group is not None:
                group.append(mark)
            else:
                dims.append((mark,))
        tensors.append(tuple(dims))
    return tuple(tensors)


# -- rules that many operators share -----------------------------------------------------------------------------------


def letters(count: int, skip: str = "") -> str:
    """The first ``count`` letters, without those of ``skip``."""
    return "".join(letter for letter in ascii_letters if letter not in skip)[:count]


def elementwise(shapes: Sequence[Shape]) -> Rule:
    """The rule of an elementwise operator.  Inputs are broadcast as in NumPy."""
    out = broadcast(shapes)
    names = letters(len(out))
    texts = []
    for shape in shapes:
        first = len(out) - len(shape)
        texts.append("".join(
            "1" if extent == 1 and out[first + d] != 1 else names[first + d] for d, extent in enumerate(shape)
        ))
    return rule(f"{','.join(texts)}->{names}", shapes)


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """The shape to which NumPy broadcasts these shapes.  A symbol is equal to itself and fits 1."""
    out: list[Extent] = [1] * max(map(len, shapes))
    for shape in shapes:
        for d, extent in enumerate(shape, len(out) - len(shape)):
            if out[d] == 1:
                out[d] = extent
            elif extent not in (1, out[d]):
                raise ValueError(f"shapes {' and '.join(map(shape_text, shapes))} do not fit together: {out[d]} is not "
                                 f"{extent}")
    return tuple(out)


def along(ndim: int, axis: int, inside: str) -> str:
    """Letters for ``ndim`` dims, with the text ``inside`` in place of dim ``axis``."""
    names = letters(ndim - 1, inside)
    return names[:axis] + inside + names[axis:]


def reshape(before: Shape, after: Shape) -> Rule:
    """The rule of a reshape: the common factors of the dims of both shapes, outermost first."""
    names = iter(ascii_letters)
    extents: dict[str, Extent] = {}
    sides: tuple[list[list[str]], list[list[str]]] = [[] for _ in before], [[] for _ in after]
    whole: set[str] = set()
    left, right = [(d, n) for d, n in enumerate(before) if n != 1], [(d, n) for d, n in enumerate(after) if n != 1]
    while left and right:
        (i, m), (j, n) = left[0], right[0]
        factor = _common(m, n, [n for _, n in left[1:]], [n for _, n in right[1:]])
        if factor is None:
            break
        letter = next(names)
        extents[letter] = factor
        sides[0][i].append(letter)
        sides[1][j].append(letter)
        for rest, extent, at in ((left, m, i), (right, n, j)):
            remaining = quotient((extent,), (factor,))
            assert remaining is not None
            rest[:1] = [] if remaining == 1 else [(at, remaining)]
    for side, rest in zip(sides, (left, right), strict=True):
        for d, extent in rest:
            letter = next(names)
            extents[letter] = extent
            whole.add(letter)
            side[d].append(letter)
    # A split of a dim splits its outer factors first; the factors that two dims do not share are kept whole.
    dims = [tuple(tuple(names) or ("1",) for names in side) for side in sides]
    return Rule((dims[0],), (dims[1],), extents, frozenset(whole))


def _common(m: Extent, n: Extent, after_m: Sequence[Extent], after_n: Sequence[Extent]) -> Extent | None:
    """The outermost factor that both extents share: the smaller of them, if it divides the other; else None."""
    if m == n:
        return m if m != 0 else None
    if isinstance(m, int) and isinstance(n, int):
        return min(m, n) if min(m, n) and max(m, n) % min(m, n) == 0 else None
    for small, large, after in ((n, m, after_n), (m, n, after_m)):
        remaining = quotient((large,), (small,)) if small != 0 else None
        if remaining is not None and any(remaining == product(after[:k]) for k in range(1, len(after) + 1)):
            return small
    return None
