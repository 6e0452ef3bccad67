"""Operators on bits: the same bits as another dtype, and random bits from a counter (`parallelism.kernels`)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from parallelism.dtypes import bits_of
from parallelism.ir.core import Operator, Rule, Shape, TensorType, elementwise, product, register
from parallelism.ir.operators.shapes import created
from parallelism.kernels.counter_bits import BIT_GENERATORS


def _bitcast_dtype(x: TensorType, dtype: np.dtype[Any]) -> np.dtype[Any]:
    if bits_of(x.dtype) != bits_of(dtype) or bool in (x.dtype, dtype):
        raise TypeError(f"{x.dtype} and {dtype} must be numbers of equally many bits")
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
