"""Products of narrow floats with scales: `quantize`, `requantize`, `standing_for` and `scaled_einsum`.

    q, s = quantize(x)                       x is about q * s, with one scale for each block of elements
    q, s = requantize(q, s)                  the same numbers with other blocks
    y    = scaled_einsum(a, sa, b, sb)       the product of both operands, each with its scales

A *block* is what shares a scale, and begins where the shard of a device begins: ``blocks`` has its extent along each dim,
0 for all that the device has.  ``grains`` says how scales are kept: a scale for each so many elements of a dim.  A block
may be longer than a grain; then its scale is kept several times.  So a dim can be split between any two grains, and what
is gathered of other devices has their scales.

The gradient of ``x`` is that of ``q * s``: rounding is passed over (Bengio et al., *Estimating or Propagating Gradients
Through Stochastic Neurons*, 2013, arXiv:1308.3432: the straight-through estimator).  The backward of a product
quantizes the gradient of its result, and multiplies it with both operands, as they are kept.

The `RECIPES` are those of NVIDIA's Transformer Engine: one scale for a tensor (Micikevicius et al., *FP8 Formats for Deep
Learning*, 2022, arXiv:2209.05433); 1 x 128 elements of activations and 128 x 128 of weights (DeepSeek-AI, *DeepSeek-V3
Technical Report*, 2024, arXiv:2412.19437, section 3.3); and 32 elements (Rouhani et al., *Microscaling Data Formats for
Deep Learning*, 2023, arXiv:2310.10537).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from string import ascii_letters
from typing import Any

import numpy as np

from parallelism.arrays import Array
from parallelism.dtypes import as_dtype, is_floating, limits_of
from parallelism.ir.core import Extent, Op, Operator, Rule, TensorType, product, register, rule
from parallelism.ir.core.extents import quotient
from parallelism.ir.tracing import apply

WHOLE = 0
"""The extent of a block that has all that a device has of a dim."""
EXPONENTS = np.dtype(np.uint8)
"""The dtype of scales that are powers of 2, as exponents plus 127 (E8M0)."""
_BIAS = 127


@dataclass(frozen=True)
class Recipe:
    """How operands of products are scaled."""

    name: str
    block: int
    """The elements of the contracted dim that share a scale; `WHOLE`: all of the tensor."""
    square: bool = False
    """Whether blocks of weights are square, so that both passes use one copy."""
    scales: str = "float32"
    """The dtype of the scales; ``uint8``: exponents."""
    power_of_two: bool = False
    """Whether scales are powers of 2."""
    backward: str = "float8_e4m3fn"
    """The dtype of the gradients of results, unless it is said."""


RECIPES = {
    each.name: each
    for each in (
        Recipe("tensor", WHOLE, backward="float8_e5m2"),
        Recipe("block", 128, square=True, power_of_two=True),
        Recipe("mx", 32, scales="uint8", power_of_two=True),
    )
}
"""The recipes by name."""
MOST_PARTS = 16
"""The scale of a whole tensor is kept for each of so many parts of a dim: over so many devices it can be split."""
LEAST_PARTS = 8
"""The scales of blocks are kept for each of a multiple of so many parts of a dim, if its extent is one."""


def _parts(shape: Sequence[Extent], grains: Sequence[int]) -> tuple[Extent | None, ...]:
    """The number of grains along each dim; None: the grain does not divide the extent."""
    pairs = zip(shape, grains, strict=True)
    return tuple(extent if grain == 1 else quotient((extent,), (grain,)) for extent, grain in pairs)


def _grain(extent: Extent, parts: Extent) -> Extent | None:
    """The elements of each of so many parts of a dim; None: the dim does not have as many."""
    if extent == parts:
        return 1
    return quotient((extent,), (parts,)) if parts != 0 else None


def grain_of(extent: Extent, block: int) -> int:
    """The elements along a dim of this extent for which one scale is kept, where blocks are so long.

    It is the whole block, unless the dim could then not be split over 8 devices.
    """
    if not isinstance(extent, int):
        return 1
    if block == WHOLE:
        return extent // gcd(extent, MOST_PARTS) if extent else 1
    parts = gcd(extent, LEAST_PARTS)
    grains = (n for n in range(min(block, extent), 0, -1) if extent % n == 0 and block % n == 0)
    return next((n for n in grains if (extent // n) % parts == 0), 1)


# -- quantize ----------------------------------------------------------------------------------------------------------

_HOW = {
    "blocks": "a list of integers",
    "dtype": "a dtype",
    "grains": "a list of integers",
    "recipe": "a string",
}


def _scaled_terms(shape: Sequence[Extent], scales: Sequence[Extent]) -> tuple[str, str, dict[str, Extent]]:
    """The terms of a tensor and of its scales, and the extents of their letters."""
    outer, inner = ascii_letters[: len(shape)], ascii_letters[len(shape) : 2 * len(shape)]
    extents: dict[str, Extent] = {}
    term = ""
    for u, v, extent, parts in zip(outer, inner, shape, scales, strict=True):
        grain = _grain(extent, parts)
        if grain is None:
            raise ValueError(f"{extent} elements do not have {parts} scales")
        extents[u] = parts
        if grain == 1:
            term += u
            continue
        extents[v] = grain
        term += f"({u}{v}!)"
    return term, outer, extents


def _quantize_rule(
    x: TensorType, grains: Sequence[int], blocks: Sequence[int], recipe: str, **_: Any
) -> Rule:
    if recipe not in RECIPES:
        raise ValueError(f"a recipe is one of {', '.join(RECIPES)}, got {recipe!r}")
    if not len(grains) == len(blocks) == x.ndim:
        raise ValueError(
            f"grains and blocks have a number for each of {x.ndim} dims, got {grains} and {blocks}"
        )
    scales = _parts(x.shape, grains)
    if None in scales or min(grains, default=1) < 1:
        raise ValueError(f"grains divide the extents {x.shape}, got {grains}")
    term, kept, extents = _scaled_terms(x.shape, [each for each in scales if each is not None])
    return rule(f"{term}->{term},{kept}", [x.shape], extents)


def _quantized_dtypes(x: TensorType, dtype: Any, recipe: str, **_: Any) -> tuple[Any, Any]:
    if not is_floating(x.dtype):
        raise TypeError(f"floating-point numbers are quantized, got {x}")
    return dtype, as_dtype(RECIPES[recipe].scales)


def _quantize(
    x: Array, dtype: Any, grains: Sequence[int], blocks: Sequence[int], recipe: str
) -> tuple[Array, Array]:
    wide = x.astype(np.float32, copy=False)
    largest = _largest(np.abs(wide), grains, blocks)
    how, most = RECIPES[recipe], np.float32(limits_of(dtype).max)
    scales = np.where(largest > 0, largest / most, np.float32(1))
    exponents = _exponents(scales)
    if how.power_of_two:
        scales = np.ldexp(np.float32(1), exponents)
    scaled = np.clip(wide / _spread(scales, wide.shape), -most, most)
    kept = (exponents + _BIAS).astype(EXPONENTS) if how.scales == EXPONENTS.name else scales
    return scaled.astype(dtype), kept


def _exponents(scales: Array) -> Array:
    """The exponents of the least powers of 2 that are not less than the scales."""
    fractions, exponents = np.frexp(scales)
    return np.clip(np.where(fractions == 0.5, exponents - 1, exponents), 1 - _BIAS, _BIAS)


def _largest(sizes: Array, grains: Sequence[int], blocks: Sequence[int]) -> Array:
    """The largest size in the block of each grain."""
    if not sizes.size:
        return np.zeros([n // grain for n, grain in zip(sizes.shape, grains, strict=True)], np.float32)
    for dim, (grain, block) in enumerate(zip(grains, blocks, strict=True)):
        extent = sizes.shape[dim]
        starts = np.arange(0, extent, block or extent)
        of_blocks = np.maximum.reduceat(sizes, starts, axis=dim)
        sizes = np.take(of_blocks, np.arange(0, extent, grain) // (block or extent), axis=dim)
    return sizes


def _spread(scales: Array, shape: Sequence[int]) -> Array:
    """The scales for each element of an array of this shape."""
    for dim, extent in enumerate(shape):
        kept = scales.shape[dim]
        if kept != extent:
            scales = np.repeat(scales, extent // kept, axis=dim)
    return scales


def restored(q: Array, scales: Array) -> Array:
    """The numbers in float32 that quantized ones stand for."""
    if scales.dtype == EXPONENTS:
        scales = np.exp2(scales.astype(np.float32) - _BIAS)
    wide: Array = q.astype(np.float32, copy=False) * _spread(scales, q.shape)
    return wide


def _quantize_derivative(g: Any, y: Any, x: Any, **_: Any) -> list[Any]:
    return [g[0]]


def _nbytes(op: Op) -> Extent:
    """Each array once; what has one scale for all of it is read once more before, for its largest element."""
    moved = sum((value.type.nbytes for value in (*op.inputs, *op.outputs)), 0)
    return moved + op.inputs[0].type.nbytes if WHOLE in op["blocks"] else moved


register(
    Operator(
        "quantize",
        _quantize_rule,
        _quantized_dtypes,
        _quantize,
        _quantize_derivative,
        3,
        _HOW,
        op_nbytes=_nbytes,
        passes_rounding=True,
    )
)


def _requantize_rule(
    q: TensorType, scales: TensorType, grains: Sequence[int], blocks: Sequence[int], recipe: str, **_: Any
) -> Rule:
    """A dim may be split where both kinds of scales can be."""
    parts = _parts(q.shape, grains)
    names = iter(ascii_letters)
    extents: dict[str, Extent] = {}
    terms = ["", "", ""]
    for extent, before, after in zip(q.shape, scales.shape, parts, strict=True):
        common = _common_parts(before, after)
        u = next(names)
        extents[u] = common
        for place, own in enumerate((extent, before, after)):
            rest = 1 if own == common else quotient((own,), (common,)) if own is not None else None
            if rest is None:
                raise ValueError(f"{own} scales cannot be kept for a dim of {extent}")
            if rest == 1:
                terms[place] += u
                continue
            v = next(names)
            extents[v] = rest
            terms[place] += f"({u}{v}!)"
    return rule(f"{terms[0]},{terms[1]}->{terms[0]},{terms[2]}", [q.shape, scales.shape], extents)


def _common_parts(before: Extent, after: Extent | None) -> Extent:
    if before == after:
        return before
    return gcd(before, after) if isinstance(before, int) and isinstance(after, int) else 1


def _of_elements(rule: Rule, **_: Any) -> Extent:
    """Four operations for each element, whatever parts its dims have for scales."""
    return 4 * product(rule.shape(rule.inputs[0]))


def _requantize(q: Array, scales: Array, **how: Any) -> tuple[Array, Array]:
    return _quantize(restored(q, scales), **how)


register(
    Operator(
        "requantize",
        _requantize_rule,
        lambda q, scales, dtype, recipe, **_: (dtype, as_dtype(RECIPES[recipe].scales)),
        _requantize,
        None,
        _of_elements,
        _HOW,
    )
)


# -- a copy that is kept -----------------------------------------------------------------------------------------------


def _standing_rule(q: TensorType, x: TensorType) -> Rule:
    names = ascii_letters[: q.ndim]
    return rule(f"{names},{names}->{names}", [q.shape, x.shape])


register(
    Operator(
        "standing_for",
        _standing_rule,
        lambda q, x: q.dtype,
        lambda q, x: q,
        lambda g, y, q, x: [None, g],
        view=True,
        linear="together",
        passes_rounding=True,
    )
)


# -- products ----------------------------------------------------------------------------------------------------------


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


def scaling_of(
    term: str, shape: Sequence[Extent], contracted: str, recipe: str, apart: str, *, weight: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The grains and the blocks of an operand.

    ``apart`` has the letters of which each element has scales of its own: rows of the batch, and experts.  In recipes
    with blocks these lie along the last letter that is contracted; those of a ``weight`` may be square.
    """
    how = RECIPES[recipe]
    if how.block == WHOLE:
        long = [letter for letter in term if letter not in apart]
    else:
        long = [letter for letter in term if letter in contracted][-1:]
        if weight and how.square:
            long += [letter for letter in term if letter not in contracted and letter not in apart][-1:]
    grains, blocks = [], []
    for letter, extent in zip(term, shape, strict=True):
        grains.append(grain_of(extent, how.block) if letter in long else 1)
        blocks.append(how.block if letter in long else 1)
    return tuple(grains), tuple(blocks)


def _product_rule(
    a: TensorType, scales_a: TensorType, b: TensorType, scales_b: TensorType, equation: str, **_: Any
) -> Rule:
    terms = ProductTerms.of(equation)
    extents: dict[str, Extent] = {}
    inner: dict[str, Extent] = {}
    for term, type, scales in ((terms.a, a, scales_a), (terms.b, b, scales_b)):
        if not len(term) == type.ndim == scales.ndim:
            raise ValueError(
                f"{equation}: an operand {type} with scales {scales} does not have the dims {term}"
            )
        for letter, extent, parts in zip(term, type.shape, scales.shape, strict=True):
            grain = _grain(extent, parts)
            if (
                grain is None
                or extents.setdefault(letter, parts) != parts
                or inner.setdefault(letter, grain) != grain
            ):
                raise ValueError(f"{equation}: both operands have scales for the same parts of dim {letter}")
    free = (letter for letter in ascii_letters if letter not in extents)
    names = {letter: next(free) for letter, grain in inner.items() if grain != 1}

    def written(term: str) -> str:
        return "".join(f"({letter}{names[letter]}!)" if letter in names else letter for letter in term)

    known = extents | {name: inner[letter] for letter, name in names.items()}
    text = f"{written(terms.a)},{terms.a},{written(terms.b)},{terms.b}->{written(terms.result)}"
    return rule(text, [a.shape, scales_a.shape, b.shape, scales_b.shape], known)


def _product(
    a: Array, scales_a: Array, b: Array, scales_b: Array, equation: str, dtype: Any, **_: Any
) -> Array:
    wide = np.einsum(equation, restored(a, scales_a), restored(b, scales_b), optimize=True)
    result: Array = wide.astype(dtype, copy=False)
    return result


def _product_derivative(
    g: Any, y: Any, a: Any, scales_a: Any, b: Any, scales_b: Any, *, equation: str, dtype: Any, **how: Any
) -> list[Any]:
    terms = ProductTerms.of(equation)
    recipe, apart = how["recipe"], how["apart"]
    quantized: dict[Any, Any] = {}

    def gradient(own: str, other: str, kept: Any, *, weight: bool) -> Any:
        """The gradient of the operand with the letters ``own``, from the other one."""
        contracted = ProductTerms(terms.result, other, own).contracted
        scaling = scaling_of(terms.result, g.shape, contracted, recipe, apart)
        if scaling not in quantized:
            grains, blocks = scaling
            quantized[scaling] = apply(
                "quantize", g, grains=grains, blocks=blocks, dtype=how["backward"], recipe=recipe
            )
        of_other = _kept_again(kept, other, weight=weight, recipe=recipe, contracted=contracted, apart=apart)
        written = f"{terms.result},{other}->{own}"
        return apply("scaled_einsum", *quantized[scaling], *of_other, equation=written, dtype=dtype, **how)

    of_a = gradient(terms.a, terms.b, (b, scales_b), weight=True)
    of_b = gradient(terms.b, terms.a, (a, scales_a), weight=False)
    return [of_a, None, of_b, None]


def _kept_again(kept: Any, term: str, *, weight: bool, recipe: str, contracted: str, apart: str) -> Any:
    """An operand as it is kept, with the blocks that a product needs which contracts these letters."""
    q, scales = kept
    grains, blocks = scaling_of(term, q.shape, contracted, recipe, apart, weight=weight)
    if _parts(q.shape, grains) == scales.shape:
        return kept
    return apply("requantize", q, scales, grains=grains, blocks=blocks, dtype=q.dtype, recipe=recipe)


def _flops(rule: Rule, **_: Any) -> Extent:
    """A multiplication and an addition at each point, as of a product without scales."""
    return 2 * rule.points


register(
    Operator(
        "scaled_einsum",
        _product_rule,
        lambda *types, dtype, **_: dtype,
        _product,
        _product_derivative,
        _flops,
        {
            "apart": "a string",
            "backward": "a dtype",
            "dtype": "a dtype",
            "equation": "a string",
            "recipe": "a string",
        },
        grows=True,
        passes_rounding=True,
    )
)
