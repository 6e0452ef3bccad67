"""The table of operators.  An entry holds everything about one operator.

It has the rule that relates dims (`parallelism.ir.core.rules`), the dtypes of the outputs, the NumPy kernel, the
floating-point operations per point and the derivative.  Shapes, costs and possible splits follow from the rule.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import numpy as np

from parallelism.arrays import Array
from parallelism.dtypes import in_wider_dtype, is_narrow, is_narrow_integer
from parallelism.ir.core.errors import UnequalExtents
from parallelism.ir.core.extents import Expression, Extent
from parallelism.ir.core.rules import Rule, rule, terms_along
from parallelism.ir.core.types import TensorType
from parallelism.sharding import TensorSharding
from parallelism.spelling import did_you_mean

Attributes = tuple[tuple[str, Any], ...]

Linear = Literal["together", "each", "moves"] | tuple[int, ...]
"""In which inputs an operator is linear: what it makes of a sum of terms is the sum of what it makes of the terms.

``"together"``: in all inputs at once, f(a + b, c + d) = f(a, c) + f(b, d).  ``"moves"``: likewise, because every
element of the output is one of an input, or zero; so it can also be exchanged with a maximum or a product.  ``"each"``:
in any one input while the others stay as they are; numbers: in any one of these inputs.
"""


@dataclass(frozen=True)
class Operator:
    """One entry of the table.  All its functions take the attributes of an op as keywords.

    The kernel takes arrays and returns one, or a tuple if there are several outputs; `run` calls it.  The derivative
    takes the gradient of the output, the output and the inputs, all traced (`parallelism.ir.tracing`), and returns the
    gradient of each input or None.  The caller sums a gradient over broadcast dims and converts its dtype.  With
    several outputs, gradients and outputs are tuples; the gradient of an output that nothing depends on is None.
    """

    name: str
    rule: Callable[..., Rule]
    """``rule(*types, **attributes)`` returns the rule for inputs of these types."""
    dtypes: Callable[..., np.dtype[Any] | tuple[np.dtype[Any], ...]]
    """``dtypes(*types, **attributes)`` returns the dtype of all outputs, or a tuple with one for each."""
    kernel: Callable[..., Any]
    derivative: Callable[..., Sequence[Any]] | None = None
    flops: Callable[..., Extent] | int = 0
    """Floating-point operations: ``flops(rule, **attributes)``, or a number per point of the rule."""
    attributes: Mapping[str, str] = field(default_factory=dict)
    """The name of each attribute, and its kind: a key of `KINDS`."""
    optional: Mapping[str, str] = field(default_factory=dict)
    """Likewise, of attributes that an op may lack."""
    view: bool = False
    """Whether the output shares the memory of the first input."""
    reuses: bool = False
    """Whether the first output takes the memory of the first input, which no later op may read.  The kernel then has a
    parameter ``out``, an array to write into."""
    received: Callable[..., Extent] | None = None
    """For a collective or a message, ``received(*types, **attributes)`` returns the bytes that a device receives."""
    nbytes: Callable[[Sequence[TensorType], Sequence[TensorType]], Extent] | None = None
    """Bytes read and written, from the types of inputs and outputs; None: each input and each output once."""
    op_nbytes: Callable[[Any], Extent] | None = None
    """`nbytes` from the whole op, where its attributes say what is read."""
    linear: Linear = ()
    grows: bool = False
    """Whether its output may be larger than its inputs are together, not counting those that are broadcast."""
    indexed: str | None = None
    """The letter along which elements are picked by their numbers; see `of_a_part`."""
    part: str | None = None
    """The operator that computes a part of this one if the letter ``indexed`` is split."""
    gradient: Literal["passes", "stops", "starts"] = "passes"
    """Whether gradients pass from output to inputs.  ``"stops"``: no gradient reaches the inputs through it.
    ``"starts"``: the inputs have gradients, whatever follows the output, which has none."""
    passes_rounding: bool = False
    """Whether the gradients of its inputs and outputs in 8 bits have a wider dtype, that of the results of products."""
    leaders: Callable[[int, int], Collection[int]] | None = None
    """From the numbers of its inputs and of its outputs those, counted through, that decide how it is split; None: all.
    Scales are where their numbers are."""
    bits: bool = False
    """Whether it is an operator on the bits of numbers: those of a narrow float are not computed in float32."""
    lays: Callable[..., TensorSharding] | None = None
    """The layout that it gives to its output, from its attributes; None: it gives none."""

    def __post_init__(self) -> None:
        if not isinstance(self.linear, tuple) and self.linear not in ("together", "each", "moves"):
            raise ValueError(
                f"operator {self.name!r}: linear is 'together', 'each', 'moves' or a tuple of numbers of "
                f"inputs, got {self.linear!r}"
            )

    def run(self, arrays: Sequence[Array], attributes: Attributes, out: Array | None = None) -> Any:
        """What the kernel returns.  An op on narrow floats is computed in float32, and its result is rounded once;
        one on narrow integers in 8 bits, and its result wraps around.

        ``out`` is the first array, if an operator that reuses its memory is to write into it.
        """
        kernel = partial(self.kernel, **dict(attributes))
        if self.view or self.bits:
            return kernel(*arrays)
        if out is not None and not is_narrow(out.dtype) and not is_narrow_integer(out.dtype):
            return kernel(*arrays, out=out)

        def dtypes() -> list[np.dtype[Any]]:  # asked for narrow numbers only
            types = tuple(TensorType(array.dtype, array.shape) for array in arrays)
            return [output.dtype for output in meaning(self.name, types, attributes).outputs]

        result = in_wider_dtype(kernel, arrays, dtypes)
        if out is None:
            return result
        first, *others = result if isinstance(result, tuple) else (result,)
        out[...] = first
        return (out, *others) if others else out

    def is_linear_in(self, inputs: Collection[int], count: int) -> bool:
        """Whether it is linear in these of its ``count`` inputs at once, while the others stay as they are."""
        if self.linear in ("together", "moves"):
            return len(inputs) == count > 0
        return len(inputs) == 1 and (self.linear == "each" or not {*self.linear}.isdisjoint(inputs))


class Meaning(NamedTuple):
    """The rule of an op, and the types of its outputs."""

    rule: Rule
    outputs: tuple[TensorType, ...]


OPERATORS: dict[str, Operator] = {}
"""All operators by name.  The modules that define them fill it; `parallelism.ir` imports all of these."""


def register(operator: Operator) -> Operator:
    """Add an entry to the table; ``ValueError`` if the name is taken."""
    if operator.name in OPERATORS:
        raise ValueError(f"an operator named {operator.name!r} exists already")
    OPERATORS[operator.name] = operator
    return operator


def operator(kind: str) -> Operator:
    """The entry of this name; ``ValueError`` if there is none."""
    try:
        return OPERATORS[kind]
    except (KeyError, TypeError):  # TypeError: what cannot be a key
        raise ValueError(f"there is no operator {str(kind)[:80]!r}{did_you_mean(kind, OPERATORS)}") from None


def meaning(kind: str, types: tuple[TensorType, ...], attributes: Attributes) -> Meaning:
    """The rule of an op and the types of its outputs.

    ``ValueError`` or ``TypeError`` names the operator if the types or attributes do not fit.
    """
    entry = operator(kind)
    if attributes or entry.attributes:
        _check_attributes(entry, dict(attributes))
    try:
        return known_meaning(kind, types, attributes)
    except UnequalExtents as error:
        raise UnequalExtents(f"{kind}: {error}", *error.extents) from None
    except (ValueError, TypeError) as error:
        refused = TypeError if isinstance(error, TypeError) else ValueError
        raise refused(f"{kind}: {error}") from None


def _check_attributes(entry: Operator, given: Mapping[str, Any]) -> None:
    if given.keys() - entry.optional.keys() != entry.attributes.keys():
        raise ValueError(
            f"{entry.name}: its attributes are {', '.join(sorted(entry.attributes)) or 'none'}; got "
            f"{', '.join(sorted(given)) or 'none'}"
        )
    for name, wanted in {**entry.attributes, **entry.optional}.items():
        if name in given and not KINDS[wanted](given[name]):
            raise TypeError(f"{entry.name}: attribute {name} must be {wanted}, got {str(given[name])[:80]}")


@lru_cache(maxsize=8192)
def known_meaning(kind: str, types: tuple[TensorType, ...], attributes: Attributes) -> Meaning:
    """`meaning` of an op whose types and attributes were checked."""
    entry = OPERATORS[kind]
    given = dict(attributes)
    try:
        rule = entry.rule(*types, **given)
        dtypes = entry.dtypes(*types, **given)
    except TypeError as error:
        if "positional argument" in str(error):
            raise ValueError(f"it does not take {len(types)} inputs") from None
        raise
    each = dtypes if isinstance(dtypes, tuple) else (dtypes,) * len(rule.outputs)
    return Meaning(
        rule, tuple(TensorType(d, shape) for d, shape in zip(each, rule.output_shapes, strict=True))
    )


Span = tuple[Extent, Extent]
"""The start and the extent of a part of a dim."""


def of_a_part(
    kind: str, attributes: Attributes, block: Sequence[Span], indexed: tuple[Span, Extent] | None = None
) -> tuple[str, Attributes]:
    """The kind and the attributes of the op that computes only a part of an op.

    ``block`` is the part of the first output, by dims.  It changes two attributes: ``shape`` is always the shape of the
    output; ``starts`` is the output's position in a larger tensor.

    ``indexed`` has the part of the letter `Operator.indexed`, and the letter's whole extent, if the letter is split.
    ``extent`` is then the extent of the part, ``first`` the number of its first element, and ``whole`` the extent of
    all.  An operator without an attribute ``first`` becomes its `Operator.part`, which has it.
    """
    given = dict(attributes)
    if "shape" in given:
        given["shape"] = tuple(extent for _, extent in block)
    if "starts" in given:
        given["starts"] = tuple(a + b for a, (b, _) in zip(given["starts"], block, strict=True))
    if indexed is not None:
        (first, extent), whole = indexed
        if "extent" in given:
            given["extent"] = extent
        if "first" in given:
            given["first"] = given["first"] + first
        else:
            part = OPERATORS[kind].part
            assert part is not None, kind
            kind, given = part, {**given, "first": first, "whole": whole}
    return kind, tuple(sorted(given.items()))


# -- attributes --------------------------------------------------------------------------------------------------------


def _of(*types: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in types


def _each(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, tuple) and all(map(test, value))


KINDS: dict[str, Callable[[Any], bool]] = {
    "an integer": _of(int),
    "a number": _of(int, float),
    "a bool": _of(bool),
    "a string": lambda value: isinstance(value, str),
    "a dtype": lambda value: isinstance(value, np.dtype),
    "an extent": _of(int, Expression),
    "a shape": _each(_of(int, Expression)),
    "a list of integers": _each(_of(int)),
    "a list of strings": _each(lambda value: isinstance(value, str)),
    "a list of groups": _each(_each(_of(int))),
    "a list of pairs": _each(lambda value: _each(_of(int))(value) and len(value) == 2),
    "a number or a list of them": lambda value: all(
        map(_of(int, float, bool, Expression), value if isinstance(value, tuple) else (value,))
    ),
}
"""The kinds of attributes, each with a test of a value."""


def checked_axis(axis: int, ndim: int) -> int:
    """``axis``; ``ValueError`` unless it is in 0 ... ndim - 1."""
    if not 0 <= axis < ndim:
        raise ValueError(f"axis must be in 0 ... {ndim - 1} for {ndim} dims, got {axis}")
    return axis


# -- parts that many operators share -----------------------------------------------------------------------------------


def first_dtype(x: TensorType, *_: Any, **__: Any) -> np.dtype[Any]:
    """The dtype of the first input: that of the output of an operator that keeps the dtype."""
    return x.dtype


def along_whole(x: TensorType, axis: int) -> Rule:
    """The rule of an operator that keeps the shape and needs dim ``axis`` whole."""
    return rule("->".join(terms_along(x.ndim, checked_axis(axis, x.ndim), "z!", "z!")), [x.shape])
