"""Random numbers and bits.  Those of a counter depend only on a seed, a step and the position in the whole tensor.

A shard therefore has the same numbers as that part of the whole tensor, on any mesh.  ``whole`` is the shape of the
tensor, ``starts`` the position where the part begins, ``shape`` the shape of the part.  The step is an input, a single
integer.  `bitcast` gives the same bits another dtype, `unpacked` the signed integers of 4 bits of bytes that have two each.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from parallelism.dtypes import bits_of, is_floating, limits_of
from parallelism.ir.core import (
    Operator,
    Rule,
    Shape,
    TensorType,
    elementwise,
    is_negative,
    product,
    register,
    shape_text,
)
from parallelism.ir.core.rules import rule, terms_along
from parallelism.ir.core.table import checked_axis
from parallelism.ir.operators.activations import floating, one_shape
from parallelism.ir.operators.shapes import created
from parallelism.ir.operators.token_order import ORDER
from parallelism.ir.tracing.tracing import apply
from parallelism.kernels import dropout, dropout_mask, splitmix64
from parallelism.kernels.counter_bits import BIT_GENERATORS
from parallelism.kernels.scaled_numbers import unpacked_integers
from parallelism.kernels.token_order import TokenOrder, part_of


def _rule(step: TensorType, seed: int, whole: Shape, starts: Shape, shape: Shape, rate: float = 0) -> Rule:
    if not 0 <= seed < 2**64 or not 0 <= rate < 1:
        raise ValueError(
            f"the seed must be in [0, 2**64) and the rate in [0, 1), got seed={seed} and rate={rate}"
        )
    if step.shape or step.dtype.kind not in "iu":
        raise TypeError(f"the step must be a single integer, got {step}")
    new = created(shape, starts)
    for part, start, extent in zip(shape, starts, whole, strict=True):
        if is_negative(start) or is_negative(extent - start - part):
            raise ValueError(
                f"a part of shape {shape_text(shape)} that starts at {shape_text(starts)} is not inside "
                f"{shape_text(whole)}"
            )
    return replace(new, inputs=((),))


def _block(starts: Sequence[int], shape: Sequence[int]) -> list[slice]:
    return [slice(start, start + n) for start, n in zip(starts, shape, strict=True)]


def _uniform(
    step: Any,
    seed: int,
    whole: Sequence[int],
    starts: Sequence[int],
    shape: Sequence[int],
    dtype: np.dtype[Any],
) -> Any:
    """Uniform numbers in [0, 1), from as many upper bits of SplitMix64 as the dtype's mantissa has."""
    key = int(splitmix64(seed, [int(step)])[0])
    places = (
        np.ravel_multi_index(
            np.meshgrid(*(np.arange(s.start, s.stop) for s in _block(starts, shape)), indexing="ij"), whole
        )
        if shape and 0 not in shape
        else np.zeros(shape, np.int64)
    )
    bits = limits_of(dtype).nmant + 1
    return ((splitmix64(key, places) >> np.uint64(64 - bits)) * 0.5**bits).astype(dtype)


def _uniform_dtype(step: TensorType, dtype: np.dtype[Any], **_: Any) -> np.dtype[Any]:
    if not is_floating(dtype):
        raise TypeError(f"uniform numbers must be floating-point, got {dtype}")
    return dtype


_PART = {"seed": "an integer", "whole": "a shape", "starts": "a shape", "shape": "a shape"}

register(
    Operator(
        "dropout_mask",
        lambda step, rate, seed, whole, starts, shape: _rule(step, seed, whole, starts, shape, rate),
        lambda step, **_: np.dtype(bool),
        lambda step, rate, seed, whole, starts, shape: dropout_mask(
            rate, seed, int(step), whole, _block(starts, shape)
        ),
        flops=10,
        attributes={"rate": "a number", **_PART},
    )
)
register(
    Operator(
        "uniform",
        lambda step, seed, whole, starts, shape, dtype: _rule(step, seed, whole, starts, shape),
        _uniform_dtype,
        _uniform,
        flops=10,
        attributes={"dtype": "a dtype", **_PART},
    )
)


# -- dropout -----------------------------------------------------------------------------------------------------------


def _dropout_rule(
    x: TensorType, step: TensorType, rate: float, seed: int, whole: Shape, starts: Shape, order: str = ""
) -> Rule:
    """The values and the mask, of one byte per element, which the gradient reads."""
    if order:
        TokenOrder.parse(order)
    new = _rule(step, seed, whole, starts, x.shape, rate)
    (names,) = new.outputs
    return Rule((names, ()), (names, names), new.extents, new.whole)


def _dropout(
    x: Any, step: Any, rate: float, seed: int, whole: Sequence[int], starts: Sequence[int], order: str = ""
) -> Any:
    mask = dropout_mask(rate, seed, int(step), whole, part_of(order, starts, x.shape))
    return dropout(x, mask, rate), mask


def _dropout_gradient_rule(grad: TensorType, mask: TensorType, rate: float) -> Rule:
    if mask.dtype != bool or not 0 <= rate < 1:
        raise TypeError(
            f"the mask must be of bools (i1) and the rate in [0, 1), got {mask.dtype} and rate={rate}"
        )
    return one_shape(grad, mask)


register(
    Operator(
        "dropout",
        _dropout_rule,
        lambda x, step, **_: (floating(x), np.dtype(bool)),
        _dropout,
        lambda g, y, x, step, rate, **_: [
            None if g[0] is None else apply("dropout_gradient", g[0], y[1], rate=rate),
            None,
        ],
        10,
        {"rate": "a number", "seed": "an integer", "whole": "a shape", "starts": "a shape"},
        ORDER,
    )
)
register(
    Operator(
        "dropout_gradient",
        _dropout_gradient_rule,
        lambda grad, mask, rate: floating(grad),
        lambda grad, mask, rate: dropout(grad, mask, rate),
        lambda g, y, grad, mask, rate: [apply("dropout_gradient", g, mask, rate=rate), None],
        1,
        {"rate": "a number"},
        linear=(0,),
    )
)


# -- bits --------------------------------------------------------------------------------------------------------------


def _bitcast_dtype(x: TensorType, dtype: np.dtype[Any]) -> np.dtype[Any]:
    if bits_of(x.dtype) != bits_of(dtype) or bool in (x.dtype, dtype):
        raise TypeError(
            f"a bitcast is between numbers of the same width: {x.dtype} has {bits_of(x.dtype)} bits, {dtype} has "
            f"{bits_of(dtype)}"
        )
    return dtype


register(
    Operator(
        "bitcast",
        lambda x, dtype: elementwise([x.shape]),
        _bitcast_dtype,
        lambda x, dtype: np.array(x, order="C").reshape(-1).view(dtype).reshape(x.shape),
        attributes={"dtype": "a dtype"},
        bits=True,
    )
)


def _unpacked_rule(x: TensorType, packed: int, dtype: Any) -> Rule:
    """``z -> (zy!)`` along the dim that is packed."""
    if x.dtype.kind not in "iu":
        raise TypeError(f"bytes are unpacked, got {x}")
    checked_axis(packed, x.ndim)
    return rule("->".join(terms_along(x.ndim, packed, "z", "(zy!)")), [x.shape], {"y": 2})


register(
    Operator(
        "unpacked",
        _unpacked_rule,
        lambda x, packed, dtype: dtype,
        unpacked_integers,
        flops=1,
        attributes={"dtype": "a dtype", "packed": "an integer"},
        grows=True,
    )
)


def _bits_rule(state: TensorType, algorithm: str, shape: Shape, dtype: np.dtype[Any]) -> Rule:
    """``z! -> z!, shape``: the next state and the bits, which are needed whole because the state runs through them."""
    if algorithm not in BIT_GENERATORS:
        raise ValueError(f"the algorithm must be one of {', '.join(BIT_GENERATORS)}, got {algorithm!r}")
    words = BIT_GENERATORS[algorithm][0]
    if state.dtype.name not in ("int64", "uint64") or state.ndim != 1 or state.shape[0] not in words:
        raise TypeError(
            f"the state of {algorithm} must have {' or '.join(map(str, words))} words of 64 bits, got {state}"
        )
    if dtype.kind not in "iu":
        raise TypeError(f"random bits must be integers, got {dtype}")
    new = created(shape)
    letters = "".join(dim[0] for dim in new.outputs[0])
    own = next(letter for letter in "zyx" if letter not in letters)
    names = ((own,),)
    return replace(
        new,
        inputs=(names,),
        outputs=(names, new.outputs[0]),
        extents={**new.extents, own: state.shape[0]},
        whole=frozenset({own, *letters}),
    )


def _random_bits(state: Any, algorithm: str, shape: Sequence[int], dtype: np.dtype[Any]) -> tuple[Any, Any]:
    following, bits = BIT_GENERATORS[algorithm][1](state.view(np.uint64), tuple(shape), dtype)
    return following.view(state.dtype), bits


register(
    Operator(
        "random_bits",
        _bits_rule,
        lambda state, dtype, **_: (state.dtype, dtype),
        _random_bits,
        # A block of some 90 integer operations gives 8 or 16 bytes.
        flops=lambda rule, **_: 10 * product(rule.shape(rule.outputs[1])),
        attributes={"algorithm": "a string", "shape": "a shape", "dtype": "a dtype"},
    )
)
