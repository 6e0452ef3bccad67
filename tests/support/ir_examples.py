"""Every operator of the IR at work on a few shapes, with arrays to put in: what the tests of the table go through."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from parallelism.dtypes import as_dtype
from parallelism.ir import Function, Op, TensorType, Value
from parallelism.ir.core.table import meaning

F64, I64, BOOL = np.dtype(np.float64), np.dtype(np.int64), np.dtype(bool)


@dataclass(frozen=True)
class Ints:
    """An input of integers from 0 on, below ``bound``."""

    shape: tuple[int, ...]
    bound: int


@dataclass(frozen=True)
class Bools:
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Example:
    kind: str
    inputs: tuple[Any, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    low: float = -2.0
    high: float = 2.0

    @property
    def types(self):
        return tuple(
            TensorType(I64, x.shape) if isinstance(x, Ints) else TensorType(BOOL, x.shape) if isinstance(x, Bools)
            else TensorType(F64, x) for x in self.inputs
        )

    def arrays(self, seed=0, *, whole=False):
        """Arrays to put in; with ``whole`` of whole numbers only, whose sums and products are exact."""
        rng = np.random.default_rng(seed)
        made = [
            rng.integers(0, x.bound, x.shape) if isinstance(x, Ints) else rng.random(x.shape) < 0.5
            if isinstance(x, Bools) else rng.integers(int(np.ceil(self.low)), int(self.high) + 1, x) * 1.0 if whole
            else rng.uniform(self.low, self.high, x) for x in self.inputs
        ]
        return [np.asarray(x) for x in made]

    def op(self):
        inputs = tuple(Value(f"x{i}", type) for i, type in enumerate(self.types))
        op = Op(self.kind, inputs, self.attributes, ())
        outputs = meaning(self.kind, op.types, op.attributes).outputs
        return Op(self.kind, inputs, self.attributes, tuple(Value(f"y{i}", type) for i, type in enumerate(outputs)))

    def function(self):
        op = self.op()
        return Function("example", op.inputs, (op,), op.outputs)

    def __str__(self):
        return f"{self.kind}-{'-'.join(str(getattr(x, 'shape', x)) for x in self.inputs)}".replace(" ", "")


POSITIVE = 0.5
"""The least number put into functions that take positive ones."""

PAIRS = (((3, 2), (3, 2)), ((5, 1, 2), (3, 1)), ((), (4,)), ((0, 3), (1,)))
ONES = ((5, 3), (), (0, 2), (1, 7, 1))
EXAMPLES: list[Example] = []


def example(kind, *inputs, low=-2.0, high=2.0, **attributes):
    EXAMPLES.append(Example(kind, inputs, attributes, low, high))


for _kind in ("add", "subtract", "multiply", "maximum", "minimum", "logaddexp", "equal", "not_equal", "less",
              "less_equal", "greater", "greater_equal"):
    for _pair in PAIRS:
        example(_kind, *_pair)
for _shape in ONES:
    example("arccosh", _shape, low=1.5)
for _kind in ("divide", "power", "arctan2", "hypot", "floor_divide", "remainder", "fmod"):
    for _pair in PAIRS:
        example(_kind, *_pair, low=POSITIVE)
for _kind in ("negative", "absolute", "square", "exp", "expm1", "sin", "cos", "tanh", "sign", "floor", "ceil", "rint",
              "isfinite", "isnan", "relu", "gelu", "silu", "sigmoid", "trunc", "sinh", "cosh", "arctan", "exp2",
              "arcsinh", "erf"):
    for _shape in ONES:
        example(_kind, _shape)
for _kind in ("arcsin", "arccos", "tan", "arctanh"):
    for _shape in ONES:
        example(_kind, _shape, low=-0.9, high=0.9)
for _kind in ("sqrt", "reciprocal", "log", "log1p", "log2", "log10", "cbrt"):
    for _shape in ONES:
        example(_kind, _shape, low=POSITIVE)
for _kind in ("logical_and", "logical_or", "logical_xor"):
    example(_kind, Bools((3, 2)), Bools((2,)))
for _kind in ("bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"):
    example(_kind, Ints((3, 2), 9), Ints((2,), 9))
example("logical_not", Bools((3, 2)))
example("invert", Ints((3, 2), 9))
example("where", Bools((3, 1)), (3, 2), (2,))
example("where", Bools((3, 2)), (), (3, 2))
example("convert", (3, 2), dtype=F64)
example("convert", (1,), dtype=F64)
example("convert", Ints((3, 2), 5), dtype=np.dtype(np.float32))
example("widen", (3, 2), dtype=F64)
example("widen", (1,), dtype=F64)

example("bitcast", (3, 2), dtype=I64)
example("bitcast", Ints((), 9), dtype=F64)
example("unpacked", Ints((3, 2), 256), dtype=F64, packed=0)
example("unpacked", Ints((1, 5, 7), 256), dtype=I64, packed=1)
example("random_bits", Ints((2,), 99), algorithm="three_fry", shape=(3, 4), dtype=I64)
example("random_bits", Ints((3,), 99), algorithm="philox", shape=(5,), dtype=np.dtype(np.uint32))
example("scatter", (4, 3), Ints((2,), 4), (2, 3), axis=0, op="sum")
example("scatter", (1, 4), Ints((1,), 4), (1, 1), axis=1, op="sum")
example("scatter", (2, 5), Ints((3,), 5), (2, 3), axis=1, op="sum")
example("scatter", (2,), Ints((0,), 1), (0,), axis=0, op="sum")
for _op in ("max", "min", "prod"):
    example("scatter", (4, 3), Ints((6,), 4), (6, 3), axis=0, op=_op)
    example("scatter", (1, 2), Ints((3,), 3), (1, 3), axis=1, op=_op)

example("einsum", (3, 4), (4, 5), equation="ij,jk->ik")
example("einsum", (2, 3, 4), (4, 3), (2,), equation="abc,cb,a->ca")
example("einsum", (3, 4), equation="ij->j")
example("einsum", (3, 4), (2,), equation="ij,k->ki")
example("einsum", (3, 1), (1, 2), equation="ij,jk->ik")
example("einsum", (3, 0), (0, 2), equation="ij,jk->ik")
example("matmul", (3, 4), (4, 5))
example("matmul", (2, 1, 3, 4), (5, 4, 1))
example("matmul", (1, 3), (2, 3, 4))

for _kind in ("sum", "prod", "max", "min"):
    example(_kind, (3, 4, 2), axes=(0, 2), keepdims=False)
    example(_kind, (3, 1), axes=(1,), keepdims=True)
    example(_kind, (5,), axes=(), keepdims=False)
example("sum", (0, 3), axes=(0,), keepdims=False)
for _kind in ("any", "all"):
    example(_kind, Bools((3, 4)), axes=(1,), keepdims=False)
for _kind in ("argmax", "argmin"):
    example(_kind, (3, 4), axis=1)
for _kind in ("cumsum", "flip", "sort", "argsort"):
    example(_kind, (3, 4), axis=1)
    example(_kind, (3,), axis=0)
    example(_kind, (2, 1, 5), axis=1)

for _before, _after in (((6, 4), (2, 3, 4)), ((2, 3, 5), (6, 5)), ((6, 4), (8, 3)), ((4, 6), (2, 12)), ((1, 3), (3,)),
                        ((5,), (5, 1)), ((), (1, 1)), ((0, 3), (3, 0, 2)), ((2, 3, 4), (4, 3, 2)), ((12, 5), (3, 20))):
    example("reshape", _before, shape=_after)
example("transpose", (2, 3, 4), permutation=(2, 0, 1))
example("transpose", (1, 5), permutation=(1, 0))
example("broadcast_to", (3, 1), shape=(2, 3, 4))
example("broadcast_to", (), shape=(3,))
example("concatenate", (2, 3), (2, 1), (2, 4), axis=1)
example("concatenate", (3,), axis=0)
example("split", (5, 3), axis=0, sizes=(2, 0, 3))
example("split", (5, 3), axis=1, sizes=(3,))
example("split", (1, 7), axis=1, sizes=(6, 1))
example("chunk", (6, 2), axis=0, number=1, count=3)
example("chunk", (1, 7), axis=1, number=0, count=1)
example("chunk", (2, 6), axis=1, number=1, count=2)
example("joined_chunks", (4, 3), (4, 3), (4, 3), axis=0, group=2)
example("joined_chunks", (1, 5), axis=1, group=1)
example("slice", (1, 5), axis=1, begin=4, end=5, step=3)
example("slice", (3, 7), axis=1, begin=1, end=6, step=2)
example("slice", (3, 7), axis=0, begin=2, end=2, step=1)
example("place", (3, 2), axis=1, begin=1, step=3, extent=6)
example("place", (3, 2), axis=0, begin=0, step=1, extent=3)
example("place", (5, 1), axis=1, begin=0, step=2, extent=1)
example("windows", (1, 1, 5), axis=1, size=1, step=1)
example("windows", (2, 7, 3), axis=1, size=3, step=2)
example("windows", (5,), axis=0, size=5, step=1)
example("windows", (2, 8), axis=1, size=2, step=4)
example("windows_sum", (5, 1, 1), axis=1, step=1, extent=1)
example("windows_sum", (2, 2, 2), axis=1, step=4, extent=8)
example("windows_sum", (2, 3, 4, 3), axis=1, step=2, extent=7)
example("constant", value=2.5, shape=(3, 2), dtype=F64)
example("constant", value=(1, 2, 3, 4, 5, 6), shape=(3, 2), dtype=I64)
example("constant", value=(), shape=(0, 2), dtype=F64)
example("iota", dim=1, shape=(3, 4), starts=(0, 10), dtype=I64)

example("take", (5, 3), Ints((2, 4), 5), axis=0)
example("take", (2, 5, 3), Ints((), 5), axis=1)
example("take", (1, 3), Ints((1, 2), 1), axis=0)
example("take_gradient", (1, 3), Ints((1,), 1), axis=0, extent=1)
example("take_gradient", (2, 4, 3), Ints((2, 4), 5), axis=0, extent=5)
example("take_gradient", (2, 4, 3), Ints((4,), 5), axis=1, extent=5)
example("take_gradient", (4,), Ints((4,), 5), axis=0, extent=5)
example("take_gradient", (0, 3), Ints((0,), 5), axis=0, extent=5)
example("take_along", (3, 5), Ints((3, 2), 5), axis=1)
example("take_along", (1, 7), Ints((3, 7), 1), axis=0)
example("take_along_gradient", (3, 2), Ints((3, 2), 5), axis=1, extent=5)
example("take_along_gradient", (3, 1), Ints((3, 1), 1), axis=1, extent=1)
example("take_along_part", (3, 5), Ints((3, 2), 9), axis=1, first=3, whole=9)
example("take_along_part", (1, 7), Ints((3, 7), 3), axis=0, first=1, whole=3)
example("take_along_gradient_part", (3, 2), Ints((3, 2), 9), axis=1, extent=5, first=3, whole=9)
example("take_along_gradient_part", (3, 1), Ints((3, 1), 4), axis=1, extent=1, first=2, whole=4)
example("take_part", (5, 3), Ints((2, 4), 9), axis=0, first=3, whole=9)
example("take_part", (2, 1, 3), Ints((5,), 2), axis=1, first=1, whole=2)
example("take_gradient_part", (2, 4, 3), Ints((2, 4), 9), axis=0, extent=5, first=3, whole=9)
example("take_gradient_part", (1,), Ints((1,), 7), axis=0, extent=7, first=0, whole=7)
example("token_order", shape=(5,), starts=(3,), order="0:cp")
example("token_order", shape=(5,), starts=(3,), order="0:2+3/11")
example("arranged", (2, 5, 3), Ints((4,), 5), axis=1)
example("arranged", (1,), Ints((1,), 1), axis=0)
example("arranged_gradient", (2, 4, 3), Ints((4,), 5), axis=1, extent=5)
example("arranged_gradient", (3,), Ints((3,), 3), axis=0, extent=3)
example("arranged_gradient", (1, 2), Ints((1,), 3), axis=0, extent=3)
for first in (0, 2):
    dealt = {"each": 2, "first": first, "drops": True}
    example("dispatch", (2, 6, 3), Ints((2, 6, 2), 5), shape=(3, 2, 6, 3), **dealt)
    example("combine", (3, 2, 6, 5), Ints((2, 6, 2), 5), **dealt)
    example("dispatch_gates", (2, 6, 2), Ints((2, 6, 2), 5), shape=(3, 2, 6), **dealt)
    example("collect_gates", (3, 2, 6), Ints((2, 6, 2), 5), **dealt)
whole = {"each": 3, "first": 0, "drops": True}
example("dispatch", (1, 7, 1), Ints((1, 7, 2), 4), shape=(4, 1, 3, 1), **whole)
example("combine", (4, 1, 3, 1), Ints((1, 7, 2), 4), **whole)
example("dispatch_gates", (1, 7, 2), Ints((1, 7, 2), 4), shape=(4, 1, 3), **whole)
example("collect_gates", (4, 1, 3), Ints((1, 7, 2), 4), **whole)
for _kind in ("gated_bias", "gated_bias_gradient"):
    example(_kind, (2, 3, 2, 4), (2, 3, 2), (2, 4))
    example(_kind, (1, 2, 3, 1), (1, 2, 3), (1, 1))
example("one_hot", Ints((3, 2), 5), extent=5, dtype=F64)

GATED = ("swiglu", "geglu", "geglu_exact", "reglu", "clamped_swiglu")
for _kind in ("gelu_gradient", "silu_gradient", "relu2_gradient", "gelu_exact_gradient", *GATED, "accumulate"):
    for _shape in ONES:
        example(_kind, _shape, _shape)
for _shape in ONES:
    for _kind in GATED:
        example(f"{_kind}_gradient", _shape, _shape, _shape)
    for _kind in ("relu2", "gelu_exact"):
        example(_kind, _shape)
    for _kind in ("swiglu", "geglu", "clamped_swiglu", "relu2") if _shape else ():
        _inputs = (_shape,) * (2 if _kind in GATED else 1)
        example(f"weighted_{_kind}", *_inputs, _shape[:-1])
        example(f"weighted_{_kind}_gradient", _shape, *_inputs, _shape[:-1])
for _kind in ("softmax", "log_softmax"):
    example(_kind, (3, 4), axis=1)
    example(_kind, (2, 1, 3), axis=0)
example("layer_norm", (3, 2, 4), (4,), (4,), epsilon=1e-5)
example("layer_norm", (5, 1), (1,), (1,), epsilon=0.5)
example("rms_norm", (3, 4), (4,), epsilon=1e-5)
example("rms_norm", (1,), (1,), epsilon=0.5)
example("softmax_gradient", (3, 4), (3, 4), axis=0, scale=0.5)
example("softmax_gradient", (2, 1, 5), (2, 1, 5), axis=2, scale=1.0)
example("layer_norm_gradient", (3, 2, 4), (3, 2, 4), (4,), epsilon=1e-5)
example("layer_norm_gradient", (5, 1), (5, 1), (1,), epsilon=0.5)
example("rms_norm_gradient", (5, 1), (5, 1), (1,), epsilon=0.5)
example("rms_norm_gradient", (2, 3), (2, 3), (3,), epsilon=1e-3)


for _kind in ("gated_rms_norm", "gated_rms_norm_gradient"):
    _before = [(2, 3, 4)] if _kind.endswith("gradient") else []
    example(_kind, *_before, (2, 3, 4), (2, 3, 4), (4,), epsilon=1e-3, gate_first=False)
    example(_kind, *_before, (2, 3, 4), (2, 3, 4), (3, 4), epsilon=0.5, gate_first=True)
    example(_kind, *[(5, 1)] * len(_before), (5, 1), (5, 1), (1,), epsilon=0.5, gate_first=True)
for _kind in ("short_convolution", "short_convolution_gradient"):
    for _x, _taps, _bias in (((2, 5, 3), 4, True), ((1, 2, 3, 2), 4, False), ((3, 4, 1), 1, True)):
        _given = [_x] * (2 if _kind.endswith("gradient") else 1)
        example(_kind, *_given, (*_x[2:], _taps), *([_x[2:]] if _bias else []))
        example(_kind, *_given, (*_x[2:], _taps), plain=True)


def linear_attention(kind, batch, tokens, groups, served, width, values, *, of_features=False, **more):
    """An example of linear attention, or of its gradient; decays may be those ``of_features`` of keys."""
    keys, heads = (batch, tokens, groups, width), (batch, tokens, groups * served)
    y, decays = (*heads, values), (*heads, width) if of_features else heads
    how = {"chunk": 2, "delta": False, "unit": False, "scale": 0.5} | more
    return Example(kind, (*([y] if kind.endswith("gradient") else []), keys, keys, y, decays, heads), how, low=-1, high=1)


for _kind in ("linear_attention", "linear_attention_gradient"):
    EXAMPLES.append(linear_attention(_kind, 2, 5, 2, 2, 3, 1))
    EXAMPLES.append(linear_attention(_kind, 2, 3, 1, 3, 2, 3, chunk=4, delta=True, unit=True))
    EXAMPLES.append(linear_attention(_kind, 1, 4, 2, 1, 1, 2, delta=True))
    EXAMPLES.append(linear_attention(_kind, 2, 3, 2, 1, 3, 2, delta=True, of_features=True))


def in_slots(kind, replicas, tokens, slots, *sizes, **more):
    """An example of an operator on what sequences keep in slots; without a second size it is the convolution's."""
    where = Ints((replicas, tokens), 4), Ints((replicas, tokens, 1), slots)
    if kind == "cached_short_convolution":
        channels, taps, bias = sizes
        given = (replicas, tokens, *channels), (*channels, taps), *([channels] if bias else [])
        kept = replicas, slots, taps - 1, *channels
        return Example(kind, (kept, *given, *where), {"read": slots} | more)
    groups, served, width, values = sizes
    plain = linear_attention("linear_attention", replicas, tokens, groups, served, width, values, **more)
    states = (replicas, slots, groups * served, width, values)
    how = plain.attributes | {"read": slots, "scored": 1}
    return Example(kind, (states, *plain.inputs, *where), how, low=-1, high=1)


EXAMPLES.append(in_slots("cached_linear_attention", 2, 5, 3, 2, 2, 3, 1))
EXAMPLES.append(in_slots("cached_linear_attention", 1, 4, 1, 1, 3, 2, 3, chunk=3, delta=True, unit=True))
EXAMPLES.append(in_slots("cached_linear_attention", 2, 3, 2, 2, 1, 3, 2, delta=True, of_features=True))
EXAMPLES.append(in_slots("cached_short_convolution", 2, 5, 3, (4,), 3, True))
EXAMPLES.append(in_slots("cached_short_convolution", 1, 3, 2, (2, 3), 4, False, plain=True))


EXCHANGING = {"context_attention", "context_attention_gradient", "attention_block", "attention_block_gradient", "ring_shift"}
"""What needs the tiles of others along a dim: `parallelism.layouts.localization.sequences` has them sent."""


def attention(kind, batch, rows, columns, heads, groups, width, *, mask="causal", rate=0.0, starts=(0, 0, 0, 0),
              values=None, **more):
    """An example of attention, or of its gradient; the rows may be a part of all rows."""
    q, k = (batch, rows, heads, width), (batch, columns, groups, width)
    y, v = ((*each[:3], values or width) for each in (q, k))
    lse = (batch, heads, rows)
    before = (y, y, lse) if kind.endswith("gradient") else (y, lse) if more.get("number") else ()
    inputs = (*before, q, k, v)
    whole = tuple(2 * start + extent for start, extent in zip(starts, q, strict=True))
    return Example(kind, (*inputs, *([Ints((), 9)] if rate else [])), {
        "scale": 0.5, "mask": mask, "rate": rate, "seed": 3, "whole": whole, "starts": starts, **more})


for _kind in ("attention", "attention_gradient"):
    EXAMPLES.append(attention(_kind, 2, 3, 3, 2, 2, 2))
    EXAMPLES.append(attention(_kind, 1, 5, 5, 4, 2, 3, rate=0.5))
    EXAMPLES.append(attention(_kind, 2, 2, 4, 6, 2, 1, mask="whole"))
    EXAMPLES.append(attention(_kind, 1, 2, 5, 3, 1, 2, rate=0.25, starts=(1, 3, 3, 0)))
    EXAMPLES.append(attention(_kind, 2, 3, 3, 4, 2, 5, values=3))
    EXAMPLES.append(attention(_kind, 1, 3, 3, 4, 2, 3, mask="causal:2;cap=0.5;alibi=4x0.5"))
for _kind in ("context_attention", "context_attention_gradient"):
    EXAMPLES.append(attention(_kind, 2, 3, 3, 2, 2, 2))
    EXAMPLES.append(attention(_kind, 1, 5, 5, 4, 2, 3, rate=0.5))
    EXAMPLES.append(attention(_kind, 2, 3, 3, 4, 2, 5, values=3, mask="causal:2;cap=0.5;alibi=4x0.5"))
for _kind in ("attention_block", "attention_block_gradient"):
    EXAMPLES.append(attention(_kind, 2, 6, 6, 2, 2, 2, blocks=2, number=0))
    EXAMPLES.append(attention(_kind, 1, 5, 5, 4, 2, 3, rate=0.5, blocks=5, number=3))
    EXAMPLES.append(attention(_kind, 1, 6, 6, 3, 1, 1, mask="whole", blocks=3, number=1, values=2))


def of_cache(kind, replicas, tokens, pages, places, heads, groups, width, *, own=2, values=None, **more):
    """An example of an operator on a cache in pages; a token's sequence has ``own`` of them."""
    where = (Ints((replicas, tokens), own * places), Ints((replicas, tokens), own * places + 1),
             Ints((replicas, tokens, own), pages))
    keys = (replicas, pages, places, groups, width)
    if kind == "write_cache":
        return Example(kind, (keys, (replicas, tokens, groups, width), *where))
    q = (replicas, tokens, heads, width)
    how = {"scale": 0.5, "mask": "causal", "starts": (0, 0, 0, 0), "read": own * places, "scored": tokens} | more
    if kind == "cached_latent_attention":
        return Example(kind, (q, keys, *where), how | {"width": values or width})
    return Example(kind, (q, keys, (*keys[:4], values or width), *where), how)


for _kind in ("write_cache", "cached_attention"):
    EXAMPLES.append(of_cache(_kind, 2, 3, 5, 2, 4, 2, 3))
    EXAMPLES.append(of_cache(_kind, 1, 4, 3, 4, 3, 3, 1, own=1, **({} if _kind == "write_cache" else {"values": 2})))
EXAMPLES.append(of_cache("cached_attention", 3, 2, 4, 3, 4, 2, 2, mask="causal:2;cap=0.5;alibi=4x0.5"))
EXAMPLES.append(of_cache("cached_latent_attention", 2, 3, 5, 2, 4, 1, 5, values=3))
EXAMPLES.append(of_cache("cached_latent_attention", 1, 2, 3, 7, 3, 1, 4, own=3))
for _kind, _more in (("rotary_at", {}), ("scaled_rotary_at", {"scaling": "linear:4.0"})):
    example(_kind, (2, 3, 5, 4), Ints((2, 3), 20), base=100.0, **_more)
    example(_kind, (3, 1, 1, 2), Ints((3, 1), 9), base=7.0, **_more)
for _kind in ((2, 6, 3), (1, 5), (7,)):
    example("deal", (*_kind, 3), axes=("cp", "x"), before=0, after=len(_kind))
    example("ring_shift", _kind, axes=("cp",), group=_kind[-1], dim=len(_kind) - 1)
example("attention_weights", (2, 3, 3), scale=0.5, mask="causal", starts=(0, 0, 0))
example("attention_weights", (1, 2, 7), scale=2.0, mask="causal:3", starts=(0, 5, 0))
example("attention_weights", (3, 4), scale=1, mask="whole", starts=(0, 0))
example("attention_weights", (2, 5, 2), scale=0.5, mask="causal:2", starts=(0, 1, 0))      # the last rows attend to none
example("rotary", (3, 2, 4), base=100.0, inverse=False, starts=(0, 0, 0))
example("rotary", (2, 5, 1, 2), base=7.0, inverse=True, starts=(0, 4, 0, 0))
example("scaled_rotary", (3, 2, 4), base=100.0, inverse=False, starts=(0, 0, 0), scaling="linear:4.0")
example("scaled_rotary", (2, 5, 1, 2), base=7.0, inverse=True, starts=(0, 4, 0, 0), scaling="yarn:4,32,1,4,0")
for _kind in ("dropout", "dropout_gradient"):
    for _x in ((3, 5), (1,), ()):
        if _kind == "dropout":
            example(_kind, _x, Ints((), 9), rate=0.5, seed=3, whole=tuple(n + 2 for n in _x), starts=(1,) * len(_x))
        else:
            example(_kind, _x, Bools(_x), rate=0.25)
example("exponential_sums", (2, 3, 4), (2, 3), low=0, high=2)
example("exponential_sums", (1,), ())
for _x, _whole, _first in (((2, 3, 4), 4, 0), ((3, 5), 9, 2), ((1,), 1, 0)):
    _y = _x[:-1]
    example("cross_entropy", _x, Ints(_y, _whole), _y, _y, low=1, rows=5, first=_first, whole=_whole)
    example("cross_entropy_gradient", (), _x, Ints(_y, _whole), _y, _y, low=1, rows=5, first=_first, whole=_whole)
example("mean_squared_error", (3, 2), (3, 2), rows=4)
example("mean_squared_error", (5, 1), (5, 1), rows=1)
example("softmax_cross_entropy", (3, 4), Ints((3,), 4), rows=5)
example("softmax_cross_entropy", (1, 7), Ints((1,), 7), rows=1)
example("softmax_cross_entropy", (5, 1), Ints((5,), 1), rows=5)
example("dropout_mask", Ints((), 9), rate=0.5, seed=3, whole=(9, 5), starts=(2, 0), shape=(4, 5))
example("uniform", Ints((), 9), seed=3, whole=(9, 5), starts=(2, 1), shape=(4, 3), dtype=F64)

ALONE = {"axes": ("tp",), "group": 1}
for _shape in ((3, 2, 4), (1, 5, 1)):
    _x, _y, _z = _shape
    example("all_reduce", _shape, **ALONE, op="sum")
    example("all_gather", _shape, **ALONE, dim=1, extent=_y)
    example("reduce_scatter", _shape, **ALONE, dim=0, extent=_x, op="sum")
    example("all_to_all", _shape, **ALONE, split_dim=0, split_extent=_x, concat_dim=1, concat_extent=_y)
    example("permute", _shape, **ALONE, pairs=((0, 0),))
    example("group_collective", _shape, collective="all_reduce", groups=((0,),), group=1, shape=_shape, dim=0,
            concat_dim=1, op="sum")
    example("reshard", _shape, layout="[dp, None, tp]")
    example("stop_gradient", _shape)
    example("local_loss", ())
    example("all_slice", Ints(_shape, 9), **ALONE, dim=1, extent=_y)
    example("relayout", Ints(_shape, 9), **ALONE, step="permute", before="[tp, dp, None]", after="[dp, tp, None]",
            whole=_shape, shape=_shape, received=0)

for _dtype, _recipe in (("float8_e4m3fn", "block"), ("float8_e5m2", "mx")):
    for _kind, _scales in (("quantize", ()), ("requantize", ((3, 2, 1),))):
        _how = {"dtype": as_dtype(_dtype), "recipe": _recipe}
        example(_kind, (3, 4, 6), *_scales, grains=(1, 2, 3), blocks=(1, 2, 3), **_how)
        example(_kind, (3, 4, 7), *_scales, grains=(3, 1, 7), blocks=(3, 1, 7), **_how)
_how = {"dtype": np.dtype(np.uint8), "recipe": "nvfp4", "packed": 1, "tensor_grains": (0, 2, 3)}
example("quantize", (3, 4, 6), grains=(1, 2, 3), blocks=(1, 4, 3), **_how)
example("requantize", Ints((3, 2, 6), 255), (3, 2, 1), (3, 1, 1), grains=(1, 2, 3), blocks=(1, 2, 3), was_packed=1, **_how)
for _shape in ((3, 2), (1, 7), (0, 2)):
    example("standing_for", _shape, _shape)
    example("quantize_by", _shape, (), low=POSITIVE, dtype=as_dtype("float8_e5m2"))     # a scale is positive
    example("copied", _shape)
for _shape in ((3,), (1,)):
    example("recorded", _shape, ())
    example("scale_of", _shape, (), most=448.0, newest=False)
example("standing_for", Ints((3, 2), 255), (3, 4))
_SCALED = {"dtype": F64, "backward": as_dtype("float8_e5m2"), "recipe": "tensor", "apart": "i"}
example("scaled_einsum", (3, 4), (3, 2), (4, 5), (2, 1), equation="ij,jk->ik", **_SCALED)
example("scaled_einsum", (3, 7, 4), (3, 7, 2), (3, 4, 6), (3, 2, 3), equation="ibj,ijk->ibk", **_SCALED)
example("scaled_einsum", (1, 5), (1, 5), (3, 5), (3, 5), equation="ij,kj->ik", **_SCALED)
example("scaled_einsum", Ints((3, 2), 255), (3, 2), (1, 1), Ints((4, 3), 255), (2, 1), (1, 1), equation="ij,jk->ik",
        **{**_SCALED, "backward": np.dtype(np.uint8), "recipe": "nvfp4", "packed": (1, 1)})
example("saturate", (3, 2), dtype=I64)
example("saturate", (1,), dtype=np.dtype(np.uint8))
