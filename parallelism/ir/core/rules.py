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

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, islice
from math import gcd
from operator import mul
from string import ascii_letters
from typing import Any

from parallelism.ir.core.errors import UnequalExtents
from parallelism.ir.core.extents import Expression, Extent, product, quotient

Dim = tuple[str, ...]
Shape = tuple[Extent, ...]

LETTERS = ascii_letters + "".join(filter(str.isalpha, map(chr, range(0xC0, 0x2000))))
"""Names of dims in rules.  Those behind z are for what joins or makes many arrays, as the steps of a recurrent layer."""
_DIM = re.compile(r"\(\w*\)|\w")
_WHOLE = re.compile(r"(\w)!")


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
        return tuple(
            dict.fromkeys(
                letter
                for tensor in (*self.inputs, *self.outputs)
                for dim in tensor
                for letter in dim
                if letter != "1"
            )
        )

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
        return tuple(map(self._extent, dims))

    def _extent(self, dim: Dim) -> Extent:
        return product(self.extents[letter] for letter in dim if letter != "1")

    def __str__(self) -> str:
        sides = [",".join(map(self._term, side)) for side in (self.inputs, self.outputs)]
        return "->".join(sides)

    def _term(self, tensor: Sequence[Dim]) -> str:
        """The dims of a tensor as they are written: ``(ij)k!``."""
        text = ""
        for dim in tensor:
            letters = "".join(letter + "!" * (letter in self.whole) for letter in dim)
            text += letters if len(dim) == 1 else f"({letters})"
        return text


def rule(
    text: str, shapes: Sequence[Shape], new: Mapping[str, Extent] | None = None, op: str = "sum"
) -> Rule:
    """The rule written in ``text`` for inputs of these shapes.  ``new`` has the extents of letters of outputs only.

    ``ValueError`` if the inputs do not fit: a wrong number of dims, or two extents for one letter.
    """
    inputs, outputs, whole = _read(text)
    if not shapes and inputs == ((),):
        inputs = ()  # "->ij" is the text for no input as well as for a scalar
    extents: dict[str, Extent] = dict(new or {})
    where: dict[str, int] = {}
    if len(inputs) != len(shapes):
        raise ValueError(f"it takes {len(inputs)} inputs ({text}), not {len(shapes)}")
    for number, (dims, shape) in enumerate(zip(inputs, shapes, strict=True)):
        if len(dims) != len(shape):
            raise ValueError(
                f"input {number} must have {len(dims)} dims ({text}), got {len(shape)}: shape "
                f"{shape_text(shape)}"
            )
        for letter, extent in ((dim[0], n) for dim, n in zip(dims, shape, strict=True) if len(dim) == 1):
            known = 1 if letter == "1" else extents.setdefault(letter, extent)
            if known != extent:
                other = (
                    f" in input {where[letter]}, of shape {shape_text(shapes[where[letter]])}"
                    if letter in where
                    else ""
                )
                told = (
                    f"dim {letter} of {text} is {known}{other}, and {extent} in input {number}, of shape "
                    f"{shape_text(shape)}"
                )
                raise UnequalExtents(told, known, extent)
            where.setdefault(letter, number)
    return Rule(inputs, outputs, extents, whole, op)


def shape_text(shape: Sequence[Extent]) -> str:
    """The text of a shape, for messages."""
    return f"({', '.join(map(str, shape))})"


@lru_cache(maxsize=4096)
def _read(text: str) -> tuple[tuple[tuple[Dim, ...], ...], tuple[tuple[Dim, ...], ...], frozenset[str]]:
    inputs, outputs = (tuple(map(_dims, side.split(","))) for side in text.replace("!", "").split("->"))
    return inputs, outputs, frozenset(_WHOLE.findall(text))


def _dims(term: str) -> tuple[Dim, ...]:
    return tuple(tuple(dim.strip("()")) for dim in _DIM.findall(term))


# -- rules that many operators share -----------------------------------------------------------------------------------


def letters(count: int, skip: str = "") -> str:
    """The first ``count`` letters, without those of ``skip``."""
    return "".join(islice((letter for letter in LETTERS if letter not in skip), count))


def elementwise(shapes: Sequence[Shape]) -> Rule:
    """The rule of an elementwise operator.  Inputs are broadcast as in NumPy."""
    out = broadcast(shapes)
    names = letters(len(out))
    return rule(f"{','.join(broadcast_term(shape, out, names) for shape in shapes)}->{names}", shapes)


def broadcast_term(shape: Shape, out: Shape, names: str) -> str:
    """The term of a tensor that is broadcast to the shape ``out``, with the letters ``names``.

    A dim that is broadcast is written 1.
    """
    term = ""
    first = len(out) - len(shape)
    for extent, wide, name in zip(shape, out[first:], names[first:], strict=True):
        term += "1" if extent == 1 and wide != 1 else name
    return term


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """The shape to which NumPy broadcasts these shapes.  A symbol is equal to itself and fits 1."""
    out: list[Extent] = [1] * max(map(len, shapes))
    for shape in shapes:
        for d, extent in enumerate(shape, len(out) - len(shape)):
            if out[d] == 1:
                out[d] = extent
            elif extent not in (1, out[d]):
                told = f"shapes {' and '.join(map(shape_text, shapes))} do not fit together: {out[d]} is not {extent}"
                raise UnequalExtents(told, out[d], extent)
    return tuple(out)


def along(ndim: int, axis: int, inside: str) -> str:
    """Letters for ``ndim`` dims, with the text ``inside`` in place of dim ``axis``."""
    return terms_along(ndim, axis, inside)[0]


def terms_along(ndim: int, axis: int, *insides: str) -> list[str]:
    """The terms of tensors that differ along dim ``axis`` only, where each has the text of one of ``insides``."""
    names = letters(ndim - 1, "".join(insides))
    return [names[:axis] + inside + names[axis:] for inside in insides]


def reshape(before: Shape, after: Shape) -> Rule:
    """The rule of a reshape: the common factors of the dims of both shapes, outermost first."""
    names = iter(ascii_letters)
    extents: dict[str, Extent] = {}
    sides: list[list[list[str]]] = []  # by shape and dim, the letters found so far,
    rests: list[list[tuple[list[str], Any]]] = []  # and what is left of the dims that are not done
    for shape in (before, after):
        side: list[list[str]] = [[] for _ in shape]
        sides.append(side)
        rests.append([(dim, n) for dim, n in zip(side, shape, strict=True) if n != 1])
    while all(rests) and (factor := _common(*rests)) is not None:
        letter = next(names)
        extents[letter] = factor
        for rest in rests:
            dim, extent = rest[0]
            dim.append(letter)
            remaining = quotient((extent,), (factor,))
            rest[:1] = [] if remaining == 1 else [(dim, remaining)]
    # A split of a dim splits its outer factors first; the factors that two dims do not share are kept whole.
    shared = {*extents}
    for letter, (dim, extent) in zip(names, chain(*rests), strict=False):
        extents[letter] = extent
        dim.append(letter)
    inputs, outputs = (tuple(map(_dim, side)) for side in sides)
    return Rule((inputs,), (outputs,), extents, frozenset(extents.keys() - shared))


def _dim(letters: list[str]) -> Dim:
    return tuple(letters) or ("1",)


def _common(left: Sequence[tuple[Any, Extent]], right: Sequence[tuple[Any, Extent]]) -> Extent | None:
    """The outermost factor that the first extents share: of numbers the greatest common divisor, of others the smaller
    one, if it divides the other, or what two multiples of one expression share; else None.

    The extents are the second members of the pairs.  What follows in both has equally many elements for each index of
    such a factor, however it is cut into dims.
    """
    m, *after_m = [extent for _, extent in left]
    n, *after_n = [extent for _, extent in right]
    if m == n:
        return m or None
    if isinstance(m, int) and isinstance(n, int):
        shared = gcd(m, n) if m and n else 1
        return shared if shared > 1 else None
    for small, large, after in ((n, m, after_n), (m, n, after_m)):
        remaining = quotient((large,), (small,)) if small != 0 else None
        if remaining is not None and (_is_whole(remaining) or remaining in accumulate(after, mul)):
            return small
    return _common_multiple(m, n)


def _common_multiple(m: Extent, n: Extent) -> Extent | None:
    """What is left of ``m`` and of ``n`` without the numbers p and q, where m / n = p / q; None if there is no such."""
    ratio = quotient((m,), (n,)) if n != 0 else None
    if not isinstance(ratio, Expression) or [monomial for monomial, _ in ratio.terms] != [()]:
        return None
    ((_, fraction),) = ratio.terms
    shared = quotient((m,), (fraction.numerator,))
    return shared if shared is not None and _is_whole(shared) else None


def _is_whole(extent: Extent) -> bool:
    """Whether an extent is a whole number for any numbers of its symbols."""
    if isinstance(extent, int):
        return True
    if not isinstance(extent, Expression) or any(factor.denominator != 1 for _, factor in extent.terms):
        return False
    return all(power > 0 for monomial, _ in extent.terms for _, power in monomial)
