"""Products of narrow floats with scales: `quantize`, `requantize`, `standing_for` and `scaled_einsum`.

    q, s = quantize(x)                       x is about q * s, with one scale for each block of elements
    q, s = requantize(q, s)                  the same numbers with other blocks
    y    = scaled_einsum(a, sa, b, sb)       the product of both operands, each with its scales

    q, m = quantize_by(x, s)                 with one scale that is given; m is the largest size of x
    h    = recorded(h, m)                    a history of such maxima, with one more
    s    = scale_of(h, s)                    the scale of the next step

A *block* is what shares a scale, and begins where the shard of a device begins: ``blocks`` has its extent along each dim,
0 for all that the device has.  ``grains`` says how scales are kept: a scale for each so many elements of a dim.  A block
may be longer than a grain; then its scale is kept several times.  So a dim can be split between any two grains, and what
is gathered of other devices has their scales.

Numbers of 4 bits lie in pairs in bytes, along the dim ``packed``: there ``q`` has half the extent of ``x``.  Where scales
have scales themselves (`Recipe.nested`), these are a third array with the grains ``tensor_grains``: q, s, t = quantize(x).

The gradient of ``x`` is that of ``q * s``: rounding is passed over (Bengio et al., *Estimating or Propagating Gradients
Through Stochastic Neurons*, 2013, arXiv:1308.3432: the straight-through estimator).  The gradient of ``q`` has the dims of
``x``.  The backward of a product quantizes the gradient of its result, and multiplies it with both operands, as they are
kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, reduce
from itertools import starmap
from math import gcd
from string import ascii_letters
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Array, with_extent
from parallelism.dtypes import as_dtype, is_floating
from parallelism.ir.core import Extent, Op, Operator, Rule, TensorType, product, register, rule
from parallelism.ir.core.extents import quotient
from parallelism.ir.core.rules import elementwise
from parallelism.ir.core.table import first_dtype
from parallelism.ir.operators.contractions import ProductTerms, product_extents, unpacked_shape
from parallelism.ir.tracing import apply
from parallelism.kernels.scaled_numbers import (
    APART,
    RECIPES,
    WHOLE,
    grain_of,
    quantized,
    quantized_by,
    recorded,
    restored,
    scale_of,
)

_HOW = {
    "blocks": "a list of integers",
    "dtype": "a dtype",
    "grains": "a list of integers",
    "recipe": "a string",
}
_OF_PAIRS = {"packed": "an integer", "tensor_grains": "a list of integers"}


class Scaling(NamedTuple):
    """How an operand is scaled."""

    grains: tuple[int, ...]
    blocks: tuple[int, ...]
    packed: int | None = None
    """The dim along which two numbers lie in a byte."""
    tensor_grains: tuple[int, ...] | None = None
    """The grains of the scales of all of a tensor; `APART` where each element is a tensor of its own."""

    @property
    def attributes(self) -> dict[str, Any]:
        """Those that `quantize` and `requantize` take."""
        return {name: given for name, given in self._asdict().items() if given is not None}


# -- dims in parts -----------------------------------------------------------------------------------------------------

Laid = tuple[str, Sequence[Extent]]
"""The letters of an array, and its shape."""


def _in_parts(inputs: Sequence[Laid], outputs: Sequence[Laid]) -> Rule:
    """The rule of arrays that have the same dims in parts of other sizes: a dim can be split where all can be.

    Of a letter with extents of 8, 4 and 2 the outer 2 can be split.
    """
    extents: dict[str, list[Extent]] = {}
    for term, shape in (*inputs, *outputs):
        for letter, extent in zip(term, shape, strict=True):
            extents.setdefault(letter, []).append(extent)
    common = {letter: _common(found) for letter, found in extents.items()}
    known: dict[str, Extent] = dict(common)
    free = (letter for letter in ascii_letters if letter not in extents)
    inner: dict[tuple[str, Extent], str] = {}

    def written(term: str, shape: Sequence[Extent]) -> str:
        text = ""
        for letter, extent in zip(term, shape, strict=True):
            rest = _parts_of(extent, common[letter])
            if rest is None:
                raise ValueError(f"a dim of {extent} does not consist of {common[letter]} parts")
            if rest == 1:
                text += letter
                continue
            if (letter, rest) not in inner:
                inner[letter, rest] = next(free)
                known[inner[letter, rest]] = rest
            text += f"({letter}{inner[letter, rest]}!)"
        return text

    terms = [",".join(starmap(written, side)) for side in (inputs, outputs)]
    return rule("->".join(terms), [tuple(shape) for _, shape in inputs], known)


def _common(extents: Sequence[Extent]) -> Extent:
    """The number of parts that all of these extents have."""
    numbers = [extent for extent in extents if isinstance(extent, int)]
    if len(numbers) == len(extents):
        return reduce(gcd, numbers)
    for parts in reversed(extents):
        if parts != 0 and None not in [_parts_of(extent, parts) for extent in extents]:
            return parts
    return 1


def _parts_of(extent: Extent, parts: Extent) -> Extent | None:
    """The elements of each of so many parts of a dim; None: the dim does not have as many."""
    if extent == parts:
        return 1
    return quotient((extent,), (parts,)) if parts != 0 else None


# -- quantize ----------------------------------------------------------------------------------------------------------


def _quantized_shapes(
    shape: Sequence[Extent],
    grains: Sequence[int],
    blocks: Sequence[int],
    recipe: str,
    packed: int | None = None,
    tensor_grains: Sequence[int] | None = None,
    **_: Any,
) -> list[Sequence[Extent]]:
    """The shapes of the numbers in few bits, of their scales, and of the scales of these."""
    if recipe not in RECIPES:
        raise ValueError(f"a recipe is one of {', '.join(RECIPES)}, got {recipe!r}")
    how, ndim = RECIPES[recipe], len(shape)
    if not len(grains) == len(blocks) == ndim:
        raise ValueError(
            f"grains and blocks have a number for each of {ndim} dims, got {grains} and {blocks}"
        )
    if (packed is not None) != how.pairs or (tensor_grains is not None) != how.nested:
        raise ValueError(
            f"the recipe {recipe} {'needs' if how.pairs else 'takes no'} packed and tensor_grains, got {packed} and "
            f"{tensor_grains}"
        )
    found = [_packed_shape(shape, packed), _kept_shape(shape, grains)]
    if tensor_grains is not None:
        if len(tensor_grains) != ndim:
            raise ValueError(f"tensor_grains have a number for each of {ndim} dims, got {tensor_grains}")
        whole_grains = [1 if grain == APART else grain for grain in tensor_grains]
        found.append(_kept_shape(shape, whole_grains))
    return found


def _kept_shape(shape: Sequence[Extent], grains: Sequence[int]) -> Sequence[Extent]:
    """The shape of scales with these grains."""
    parts = [_quotient(extent, grain) for extent, grain in zip(shape, grains, strict=True)]
    kept = [each for each in parts if each is not None]
    if len(kept) < len(parts):
        raise ValueError(f"grains divide the extents {shape}, got {tuple(grains)}")
    return kept


def _quotient(extent: Extent, grain: int) -> Extent | None:
    if grain == 1:
        return extent
    return quotient((extent,), (grain,)) if grain > 1 else None


def _packed_shape(shape: Sequence[Extent], packed: int | None) -> Sequence[Extent]:
    """The shape of an array whose numbers lie in pairs along a dim."""
    if packed is None:
        return shape
    half = _quotient(shape[packed], 2) if 0 <= packed < len(shape) else None
    if half is None:
        raise ValueError(f"packed is a dim of even extent, got {packed} for the shape {shape}")
    return with_extent(shape, packed, half)


def _quantize_rule(x: TensorType, **how: Any) -> Rule:
    names = ascii_letters[: x.ndim]
    return _in_parts([(names, x.shape)], [(names, shape) for shape in _quantized_shapes(x.shape, **how)])


def _quantized_dtypes(*given: TensorType, dtype: Any, recipe: str, **_: Any) -> tuple[Any, ...]:
    how = RECIPES[recipe]
    if len(given) == 1 and not is_floating(given[0].dtype):
        raise TypeError(f"floating-point numbers are quantized, got {given[0]}")
    of_tensor = (np.dtype(np.float32),) if how.nested else ()
    return (dtype, as_dtype(how.scales), *of_tensor)


def _quantize_derivative(g: Any, y: Any, x: Any, **_: Any) -> list[Any]:
    return [g[0]]


def _nbytes(op: Op) -> Extent:
    """Each array once; what has one scale for all of it is read once more before, for its largest element."""
    moved = sum((value.type.nbytes for value in (*op.inputs, *op.outputs)), 0)
    again = WHOLE in op["blocks"] or RECIPES[op["recipe"]].nested
    return moved + op.inputs[0].type.nbytes if again else moved


def _flops_of_elements(each: int) -> Callable[..., Extent]:
    """So many operations for each element, whatever parts its dims have for scales."""

    def flops(rule: Rule, *, was_packed: int | None = None, **_: Any) -> Extent:
        shape = rule.shape(rule.inputs[0])
        return each * product(unpacked_shape(shape, was_packed))

    return flops


register(
    Operator(
        "quantize",
        _quantize_rule,
        _quantized_dtypes,
        quantized,
        _quantize_derivative,
        _flops_of_elements(3),
        _HOW,
        _OF_PAIRS,
        op_nbytes=_nbytes,
        passes_rounding=True,
        leaders=lambda inputs, outputs: (0, 1),
    )
)


def _requantize_rule(q: TensorType, *scales: TensorType, was_packed: int | None = None, **how: Any) -> Rule:
    """A dim may be split where both kinds of scales can be."""
    names = ascii_letters[: q.ndim]
    after = _quantized_shapes(unpacked_shape(q.shape, was_packed), **how)
    return _in_parts([(names, each.shape) for each in (q, *scales)], [(names, shape) for shape in after])


def _requantize(q: Array, *scales: Array, was_packed: int | None = None, **how: Any) -> tuple[Array, ...]:
    return quantized(restored(q, *scales, packed=was_packed), **how)


register(
    Operator(
        "requantize",
        _requantize_rule,
        _quantized_dtypes,
        _requantize,
        None,
        _flops_of_elements(4),
        _HOW,
        {**_OF_PAIRS, "was_packed": "an integer"},
        leaders=lambda inputs, outputs: (0, inputs),
    )
)


# -- scales from earlier steps -----------------------------------------------------------------------------------------


def _quantize_by_rule(x: TensorType, scale: TensorType, dtype: Any) -> Rule:
    names = ascii_letters[: x.ndim]
    return rule(f"{names},->{names},", [x.shape, scale.shape], op="max")


def _dtypes_by_scale(x: TensorType, scale: TensorType, dtype: Any) -> tuple[Any, Any]:
    if not is_floating(x.dtype):
        raise TypeError(f"floating-point numbers are quantized, got {x}")
    return dtype, np.dtype(np.float32)


register(
    Operator(
        "quantize_by",
        _quantize_by_rule,
        _dtypes_by_scale,
        quantized_by,
        # The gradient of the scale is what the update makes the next one of: the largest size, as a value of its own.
        lambda g, y, x, scale, **_: [g[0], apply("copied", y[1])],
        3,
        {"dtype": "a dtype"},
        passes_rounding=True,
        leaders=lambda inputs, outputs: (0, inputs),
    )
)
# A gradient has memory of its own, which an update may take.
register(
    Operator("copied", lambda x: elementwise([x.shape]), first_dtype, lambda x: x.copy(), linear="moves")
)
register(
    Operator(
        "recorded",
        lambda history, maximum: rule("a!,->a!", [history.shape, maximum.shape]),
        lambda history, maximum: history.dtype,
        recorded,
        reuses=True,
        linear="moves",
    )
)
register(
    Operator(
        "scale_of",
        lambda history, scale, **_: rule("a!,->", [history.shape, scale.shape]),
        lambda history, scale, **_: scale.dtype,
        scale_of,
        None,
        1,
        {"most": "a number", "newest": "a bool"},
    )
)


# -- a copy that is kept -----------------------------------------------------------------------------------------------


def _standing_rule(q: TensorType, x: TensorType) -> Rule:
    names = ascii_letters[: q.ndim]
    return _in_parts([(names, q.shape), (names, x.shape)], [(names, q.shape)])


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


def scaling_of(
    term: str, shape: Sequence[Extent], contracted: str, recipe: str, apart: str, *, weight: bool = False
) -> Scaling:
    """How an operand is scaled.

    ``apart`` has the letters of which each element has scales of its own: rows of the batch, and experts.  In recipes
    with blocks these lie along the last letter that is contracted; those of a ``weight`` may be square.

    ``ValueError`` if numbers lie in pairs, and no dim has an even extent.
    """
    how = RECIPES[recipe]
    if how.block == WHOLE:
        long = [letter for letter in term if letter not in apart]
    else:
        long = [letter for letter in term if letter in contracted][-1:]
        if weight and how.square:
            long += [letter for letter in term if letter not in contracted and letter not in apart][-1:]
    packed = _dim_of_pairs(term, shape, long, apart) if how.pairs else None
    grains, blocks = [], []
    for dim, (letter, extent) in enumerate(zip(term, shape, strict=True)):
        least = 2 if dim == packed else 1
        grains.append(grain_of(extent, how.block, least) if letter in long else 1)
        blocks.append(how.block if letter in long else 1)
    of_tensor = None
    if how.nested:
        of_tensor = tuple(
            APART if letter in apart else grain_of(extent, WHOLE)
            for letter, extent in zip(term, shape, strict=True)
        )
    return Scaling(tuple(grains), tuple(blocks), packed, of_tensor)


def _dim_of_pairs(term: str, shape: Sequence[Extent], long: Sequence[str], apart: str) -> int:
    """The dim along which two numbers lie in a byte: that of the blocks, if its extent is even."""
    for letter in (*long, *reversed(term)):
        extent = shape[term.index(letter)]
        if isinstance(extent, int) and extent % 2 == 0 and (letter in long or letter not in apart):
            return term.index(letter)
    raise ValueError(f"two numbers of 4 bits lie in a byte, so a dim of an operand must be even; got {shape}")


def _product_rule(*types: TensorType, equation: str, packed: Sequence[int] = (), **_: Any) -> Rule:
    terms, half = ProductTerms.of(equation), len(types) // 2
    if len(types) not in (4, 5, 6):
        raise ValueError(f"it does not take {len(types)} inputs")
    arrays: list[Laid] = []
    parts: dict[str, tuple[Extent, ...]] = {}
    for place, (term, operand) in enumerate(((terms.a, types[:half]), (terms.b, types[half : 2 * half]))):
        # A scale that was given is one number.
        kept = [type for type in operand if type.ndim or type is operand[0]]
        if any(type.ndim != len(term) for type in kept):
            of_scales = " and ".join(map(str, operand[1:]))
            raise ValueError(
                f"{equation}: an operand {operand[0]} with scales {of_scales} does not have the dims {term}"
            )
        for type in operand:
            arrays.append((term if type in kept else "", type.shape))
        whole = unpacked_shape(operand[0].shape, packed[place] if packed else None)
        for dim, letter in enumerate(term):
            own = (whole[dim], *(type.shape[dim] for type in kept[1:]))
            if None in [_parts_of(own[0], each) for each in own[1:]] or parts.setdefault(letter, own) != own:
                raise ValueError(f"{equation}: both operands have scales for the same parts of dim {letter}")
    arrays += [("", type.shape) for type in types[2 * half :]]
    result = [parts[letter][0] for letter in terms.result]
    return _in_parts(arrays, [(terms.result, result)])


def _product(*arrays: Array, equation: str, dtype: Any, packed: Sequence[int] = (), **_: Any) -> Array:
    half = len(arrays) // 2
    of_a, of_b = packed or (None, None)
    a, b = restored(*arrays[:half], packed=of_a), restored(*arrays[half : 2 * half], packed=of_b)
    result: Array = np.einsum(equation, a, b, optimize=True).astype(dtype, copy=False)
    return result


class _Kept(NamedTuple):
    """An operand of a product as the forward keeps it."""

    term: str
    arrays: Sequence[Any]
    packed: int | None
    is_weight: bool

    def again(self, recipe: str, contracted: str, apart: str) -> _Kept:
        """It with the blocks that a product needs which contracts these letters."""
        q, scales = self.arrays[:2]
        shape = unpacked_shape(q.shape, self.packed)
        scaling = scaling_of(self.term, shape, contracted, recipe, apart, weight=self.is_weight)
        if tuple(_kept_shape(shape, scaling.grains)) == scales.shape:
            return self
        was_packed = {} if self.packed is None else {"was_packed": self.packed}
        arrays = apply(
            "requantize", *self.arrays, dtype=q.dtype, recipe=recipe, **scaling.attributes, **was_packed
        )
        return _Kept(self.term, arrays, scaling.packed, self.is_weight)


class _Gradients:
    """The gradient of the result of a product, as the products of the backward take it."""

    def __init__(self, g: Any, given: Sequence[Any], how: Mapping[str, Any]) -> None:
        self.g, self.how = g, how
        self.scale = next(iter(given), None)
        """Its scale, if that is from earlier steps."""
        self.quantized: dict[Scaling, Any] = {}

    @cached_property
    def by_scale(self) -> tuple[Any, Any]:
        """It in 8 bits with the scale, and its largest size."""
        q, maximum = apply("quantize_by", self.g, self.scale, dtype=self.how["backward"])
        return q, maximum

    def operands(self, scaling: Scaling, kept: _Kept, contracted: str) -> tuple[Sequence[Any], _Kept]:
        """It and another operand, each with scales for a product that contracts these letters."""
        recipe = self.how["recipe"]
        if self.scale is not None:
            return (self.by_scale[0], self.scale), kept
        if scaling not in self.quantized:
            self.quantized[scaling] = apply(
                "quantize", self.g, dtype=self.how["backward"], recipe=recipe, **scaling.attributes
            )
        return self.quantized[scaling], kept.again(recipe, contracted, self.how["apart"])


def _product_derivative(
    g: Any, y: Any, *operands: Any, equation: str, dtype: Any, packed: Sequence[int] = (), **how: Any
) -> list[Any]:
    terms, half = ProductTerms.of(equation), len(operands) // 2
    of_a, of_b = packed or (None, None)
    a = _Kept(terms.a, operands[:half], of_a, is_weight=False)
    b = _Kept(terms.b, operands[half : 2 * half], of_b, is_weight=True)
    of_result = _Gradients(g, operands[2 * half :], how)

    def gradient(own: str, kept: _Kept) -> Any:
        """The gradient of the operand with the letters ``own``, from the other one."""
        contracted = ProductTerms(terms.result, kept.term, own).contracted
        scaling = scaling_of(terms.result, g.shape, contracted, how["recipe"], how["apart"])
        arrays, other = of_result.operands(scaling, kept, contracted)
        of_pairs = {"packed": (scaling.packed, other.packed)} if packed else {}
        return apply(
            "scaled_einsum",
            *arrays,
            *other.arrays,
            equation=f"{terms.result},{other.term}->{own}",
            dtype=dtype,
            **how,
            **of_pairs,
        )

    of_scales = [None] * (half - 1)
    of_scale = [] if of_result.scale is None else [apply("copied", of_result.by_scale[1])]
    return [gradient(terms.a, b), *of_scales, gradient(terms.b, a), *of_scales, *of_scale]


def _flops(rule: Rule, *, equation: str, packed: Sequence[int] = (), **_: Any) -> Extent:
    """A multiplication and an addition at each point, as of a product without scales."""
    second = len(rule.inputs) // 2
    a, b = rule.shape(rule.inputs[0]), rule.shape(rule.inputs[second])
    return 2 * product(product_extents(equation, a, b, packed).values())


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
        {"packed": "a list of integers"},
        grows=True,
        passes_rounding=True,
        leaders=lambda inputs, outputs: (0, inputs // 2, inputs),
    )
)
