"""Operators at work on shapes by chance: how an example of each is drawn.  A new operator needs a line in `MAKERS`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from ir_examples import (
    ALONE,
    BOOL,
    F64,
    I64,
    POSITIVE,
    Bools,
    Example,
    Ints,
    attention,
    in_slots,
    linear_attention,
    of_cache,
)

from parallelism.dtypes import as_dtype

EXTENTS = (1, 2, 3, 5, 7)
BOOLEAN = ("logical_and", "logical_or", "logical_xor", "logical_not", "any", "all")
INTEGER = ("bitwise_and", "bitwise_or", "bitwise_xor", "invert", "left_shift", "right_shift")

Maker = Callable[[str, np.random.Generator], Example]
MAKERS: dict[str, Maker] = {}


def maker(*kinds):
    def keep(make):
        MAKERS.update(dict.fromkeys(kinds, make))
        return make

    return keep


def drawn(kind, seed):
    """The example of ``kind`` that belongs to a seed."""
    return MAKERS[kind](kind, np.random.default_rng([seed, *kind.encode()]))


def made(kind, *inputs, **attributes):
    low, high = (-0.9, 0.9) if kind in BOUNDED else (POSITIVE if kind in TO_BE_POSITIVE else -2.0, 2.0)
    given = tuple(Bools(x) if kind in BOOLEAN else Ints(x, 9) if kind in INTEGER else x for x in inputs)
    return Example(kind, given, attributes, low, high)


def extents(rng, least=0, most=3):
    return tuple(int(n) for n in rng.choice(EXTENTS, rng.integers(least, most + 1)))


def of_dim(rng, shape):
    return int(rng.integers(len(shape)))


def fitting(rng, shape):
    """A shape that NumPy broadcasts to this one."""
    kept = shape[int(rng.integers(len(shape) + 1)):] if rng.random() < 0.5 else shape
    return tuple(1 if rng.random() < 0.3 else n for n in kept)


def replaced(shape, axis, *extents):
    return (*shape[:axis], *extents, *shape[axis + 1:])


TO_BE_POSITIVE = ("sqrt", "reciprocal", "log", "log1p", "log2", "log10", "cbrt", "divide", "power", "arctan2", "hypot",
                  "floor_divide", "remainder", "fmod")
BOUNDED = ("arcsin", "arccos", "tan", "arctanh")


@maker("negative", "absolute", "square", "exp", "expm1", "sin", "cos", "tanh", "sign", "floor", "ceil", "rint",
       "isfinite", "isnan", "relu", "gelu", "silu", "sigmoid", "sqrt", "reciprocal", "log", "log1p", "logical_not",
       "invert", "trunc", "sinh", "cosh", "arctan", "exp2", "arcsin", "arccos", "tan", "log2", "log10", "cbrt",
       "arcsinh", "arctanh", "erf", "relu2", "gelu_exact", "stop_gradient", "local_loss")
def _one(kind, rng):
    return made(kind, () if kind == "local_loss" else extents(rng))


@maker("add", "subtract", "multiply", "maximum", "minimum", "logaddexp", "equal", "not_equal", "less", "less_equal",
       "greater", "greater_equal", "divide", "power", "arctan2", "hypot", "floor_divide", "remainder", "logical_and",
       "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor", "fmod", "left_shift", "right_shift")
def _two(kind, rng):
    shape = extents(rng)
    pair = [shape, fitting(rng, shape)]
    rng.shuffle(pair)
    return made(kind, *map(tuple, pair))


@maker("arccosh")
def _above_one(kind, rng):
    return Example(kind, (extents(rng),), {}, 1.5)


@maker("bitcast")
def _bitcast(kind, rng):
    return made(kind, extents(rng), dtype=I64)


@maker("scatter")
def _scatter(kind, rng):
    shape = extents(rng, least=1)
    axis, count = of_dim(rng, shape), int(rng.integers(4))
    places = min(count, shape[axis])
    op = ("sum", "set")[int(rng.integers(2))]
    return Example(kind, (shape, Ints((places,), shape[axis]), replaced(shape, axis, places)), {"axis": axis, "op": op})


@maker("group_collective")
def _group_collective(kind, rng):
    shape = extents(rng, least=1)
    return Example(kind, (shape,), {"collective": "all_gather", "groups": ((0,),), "group": 1, "shape": shape,
                                    "dim": of_dim(rng, shape), "concat_dim": 0, "op": "sum"})


@maker("random_bits")
def _random_bits(kind, rng):
    algorithm, words = (("three_fry", 2), ("philox", 2), ("philox", 3))[int(rng.integers(3))]
    return Example(kind, (Ints((words,), 99),), {"algorithm": algorithm, "shape": extents(rng), "dtype": I64})


@maker("gelu_gradient", "silu_gradient", "relu2_gradient", "gelu_exact_gradient", "swiglu", "geglu", "geglu_exact", "reglu",
       "clamped_swiglu", "accumulate")
def _alike(kind, rng):
    return Example(kind, (extents(rng),) * 2)


@maker("swiglu_gradient", "geglu_gradient", "geglu_exact_gradient", "reglu_gradient", "clamped_swiglu_gradient")
def _gate(kind, rng):
    return Example(kind, (extents(rng),) * 3)


@maker(*(f"weighted_{name}{end}" for name in ("swiglu", "geglu", "clamped_swiglu", "relu2") for end in ("", "_gradient")))
def _weighted(kind, rng):
    shape = tuple(extents(rng)) + (3,)
    whole = (shape,) * ((1 if "relu2" in kind else 2) + kind.endswith("_gradient"))
    return Example(kind, (*whole, shape[:-1]))


@maker("where")
def _where(kind, rng):
    shape = extents(rng)
    return Example(kind, (Bools(fitting(rng, shape)), fitting(rng, shape), fitting(rng, shape)))


@maker("convert")
def _convert(kind, rng):
    shape = extents(rng)
    dtypes = [F64, I64, BOOL, np.dtype("f4"), np.dtype("u1")]
    return Example(kind, ([shape, Ints(shape, 5), Bools(shape)][rng.integers(3)],), {"dtype": dtypes[rng.integers(5)]})


@maker("widen")
def _widen(kind, rng):
    return Example(kind, (extents(rng),), {"dtype": F64})


@maker("quantize", "requantize")
def _quantize(kind, rng):
    parts = extents(rng, 1, 3)
    grains = tuple(int(n) for n in rng.integers(1, 4, len(parts)))
    shape = tuple(n * grain for n, grain in zip(parts, grains, strict=True))
    before = tuple(n if rng.random() < 0.5 else 1 for n in shape)
    how = {"grains": grains, "blocks": grains}
    if rng.random() < 0.5:
        return made(kind, *((shape,) if kind == "quantize" else (shape, before)), **how,
                    dtype=as_dtype("float8_e4m3fn"), recipe="block")
    packed = int(rng.integers(0, len(parts)))
    shape = tuple(2 * n if dim == packed else n for dim, n in enumerate(shape))
    how |= {"dtype": np.dtype(np.uint8), "recipe": "nvfp4", "packed": packed, "tensor_grains": shape}
    if kind == "quantize":
        return made(kind, shape, **how)
    pairs = Ints(tuple(n // 2 if dim == packed else n for dim, n in enumerate(shape)), 255)
    return Example(kind, (pairs, before, tuple(1 for _ in shape)), {**how, "was_packed": packed})


@maker("unpacked")
def _unpacked(kind, rng):
    shape = extents(rng, 1, 3)
    return Example(kind, (Ints(shape, 256),), {"dtype": F64, "packed": int(rng.integers(len(shape)))})


@maker("copied")
def _copied(kind, rng):
    return made(kind, extents(rng))


@maker("quantize_by")
def _quantize_by(kind, rng):
    return Example(kind, (extents(rng, 0, 3), ()), {"dtype": as_dtype("float8_e4m3fn")}, low=POSITIVE)


@maker("recorded")
def _recorded(kind, rng):
    return made(kind, extents(rng, 1, 1), ())


@maker("scale_of")
def _scale_of(kind, rng):
    return made(kind, extents(rng, 1, 1), (), most=448.0, newest=bool(rng.integers(2)))


@maker("standing_for")
def _standing_for(kind, rng):
    shape = extents(rng)
    return made(kind, shape, shape)


@maker("scaled_einsum")
def _scaled_einsum(kind, rng):
    parts = {letter: int(rng.integers(1, 4)) for letter in "ijk"}
    whole = {letter: n * int(rng.integers(1, 3)) for letter, n in parts.items()}

    def both(term):
        return (tuple(of[letter] for letter in term) for of in (whole, parts))

    return made(kind, *both("ij"), *both("jk"), equation="ij,jk->ik", dtype=np.dtype(np.float64), apart="",
                backward=as_dtype("float8_e5m2"), recipe="tensor")


@maker("saturate")
def _saturate(kind, rng):
    return Example(kind, (extents(rng),), {"dtype": [I64, np.dtype("u1")][rng.integers(2)]})


@maker("einsum")
def _einsum(kind, rng):
    sizes = dict(zip("abcde", rng.choice((1, 2, 3), 5).tolist(), strict=True))
    terms = ["".join(rng.permutation(list("abcde"))[:rng.integers(4)]) for _ in range(rng.integers(1, 4))]
    there = sorted(set("".join(terms)))
    out = "".join(rng.permutation(there)[:rng.integers(4)]) if there else ""
    return Example(kind, tuple(tuple(sizes[x] for x in term) for term in terms),
                   {"equation": f"{','.join(terms)}->{out}"})


@maker("matmul")
def _matmul(kind, rng):
    batch, (m, k, n) = extents(rng, 0, 2), extents(rng, 3)
    pair = [batch, fitting(rng, batch)]
    return Example(kind, ((*pair[0], m, k), (*pair[1], k, n)))


@maker("sum", "prod", "max", "min", "any", "all")
def _reduction(kind, rng):
    shape = extents(rng)
    axes = tuple(d for d in range(len(shape)) if rng.random() < 0.5)
    return made(kind, shape, axes=axes, keepdims=bool(rng.random() < 0.5))


@maker("argmax", "argmin", "cumsum", "flip", "sort", "argsort", "softmax", "log_softmax")
def _along(kind, rng):
    shape = extents(rng, 1)
    return Example(kind, (shape,), {"axis": of_dim(rng, shape)})


@maker("reshape")
def _reshape(kind, rng):
    factors = rng.choice((1, 2, 2, 3, 5), rng.integers(1, 6)).tolist()

    def grouped():
        cuts = sorted(rng.integers(0, len(factors) + 1, rng.integers(4)).tolist())
        return tuple(int(np.prod(factors[a:b], dtype=int))
                     for a, b in zip([0, *cuts], [*cuts, len(factors)], strict=True))

    return Example(kind, (grouped(),), {"shape": grouped()})


@maker("transpose")
def _transpose(kind, rng):
    shape = extents(rng)
    return Example(kind, (shape,), {"permutation": tuple(rng.permutation(len(shape)).tolist())})


@maker("broadcast_to")
def _broadcast_to(kind, rng):
    shape = extents(rng)
    return Example(kind, (fitting(rng, shape),), {"shape": shape})


@maker("concatenate")
def _concatenate(kind, rng):
    shape = extents(rng, 1)
    axis = of_dim(rng, shape)
    return Example(kind, tuple(replaced(shape, axis, n) for n in extents(rng, 1)), {"axis": axis})


@maker("split")
def _split(kind, rng):
    shape, sizes = extents(rng, 1), (*extents(rng, 1), int(rng.integers(2)))
    axis = of_dim(rng, shape)
    return Example(kind, (replaced(shape, axis, sum(sizes)),), {"axis": axis, "sizes": sizes})


@maker("chunk")
def _chunk(kind, rng):
    shape, count = extents(rng, 1), int(rng.integers(1, 4))
    axis = of_dim(rng, shape)
    return Example(kind, (replaced(shape, axis, count * shape[axis]),),
                   {"axis": axis, "number": int(rng.integers(count)), "count": count})


@maker("joined_chunks")
def _joined_chunks(kind, rng):
    shape, group = extents(rng, 1), int(rng.integers(1, 4))
    axis = of_dim(rng, shape)
    chunks = (replaced(shape, axis, group * shape[axis]),) * int(rng.integers(1, 4))
    return Example(kind, chunks, {"axis": axis, "group": group})


@maker("slice")
def _slice(kind, rng):
    shape = extents(rng, 1)
    axis = of_dim(rng, shape)
    begin, end = sorted(rng.integers(0, shape[axis] + 1, 2).tolist())
    return Example(kind, (shape,), {"axis": axis, "begin": begin, "end": end, "step": int(rng.integers(1, 4))})


@maker("place")
def _place(kind, rng):
    shape = extents(rng, 1)
    axis, (begin, spare), step = of_dim(rng, shape), rng.integers(0, 3, 2).tolist(), int(rng.integers(1, 4))
    return Example(kind, (shape,), {"axis": axis, "begin": begin, "step": step,
                                    "extent": begin + (shape[axis] - 1) * step + 1 + spare})


@maker("windows", "windows_sum")
def _windows(kind, rng):
    shape = extents(rng, 1)
    axis = of_dim(rng, shape)
    size, step, count = rng.integers(1, 4, 3).tolist()
    extent = (count - 1) * step + size + int(rng.integers(step))
    if kind == "windows":
        return Example(kind, (replaced(shape, axis, extent),), {"axis": axis, "size": size, "step": step})
    return Example(kind, ((*replaced(shape, axis, count), size),), {"axis": axis, "step": step, "extent": extent})


@maker("constant")
def _constant(kind, rng):
    shape = extents(rng)
    values = tuple(rng.integers(0, 9, int(np.prod(shape, dtype=int))).tolist())
    return Example(kind, (), {"value": values if rng.random() < 0.5 else 3, "shape": shape, "dtype": F64})


@maker("iota")
def _iota(kind, rng):
    shape = extents(rng, 1)
    return Example(kind, (), {"dim": of_dim(rng, shape), "shape": shape, "dtype": I64,
                              "starts": tuple(rng.integers(0, 9, len(shape)).tolist())})


@maker("take", "take_gradient", "take_part", "take_gradient_part")
def _take(kind, rng):
    shape, places = extents(rng, 1), extents(rng, 0, 2)
    axis = of_dim(rng, shape)
    first, spare = rng.integers(0, 3, 2).tolist() if kind.endswith("part") else (0, 0)
    whole = first + shape[axis] + spare
    part = {"first": first, "whole": whole} if kind.endswith("part") else {}
    picked = Ints(places, whole)
    if "gradient" not in kind:
        return Example(kind, (shape, picked), {"axis": axis, **part})
    return Example(kind, (replaced(shape, axis, *places), picked), {"axis": axis, "extent": shape[axis], **part})


@maker("token_order")
def _token_order(kind, rng):
    tokens, start = (int(n) for n in rng.integers(1, 9, 2))
    order = rng.choice(["0:cp", f"0:{rng.integers(1, 5)}/{start + tokens}"])
    return Example(kind, (), {"shape": (tokens,), "starts": (start,), "order": str(order)})


@maker("arranged", "arranged_gradient")
def _arranged(kind, rng):
    shape, tokens = extents(rng, 1), int(rng.choice(EXTENTS))
    axis = of_dim(rng, shape)
    order = Ints((tokens,), shape[axis])
    if kind == "arranged":
        return Example(kind, (shape, order), {"axis": axis})
    return Example(kind, (replaced(shape, axis, tokens), order), {"axis": axis, "extent": shape[axis]})


@maker("take_along", "take_along_gradient", "take_along_part", "take_along_gradient_part")
def _take_along(kind, rng):
    shape = extents(rng, 1)
    axis = of_dim(rng, shape)
    places = replaced(shape, axis, int(rng.integers(1, 4)))
    first, spare = rng.integers(0, 3, 2).tolist() if kind.endswith("part") else (0, 0)
    whole = first + shape[axis] + spare
    part = {"first": first, "whole": whole} if kind.endswith("part") else {}
    picked = Ints(places, whole)
    if "gradient" not in kind:
        return Example(kind, (shape, picked), {"axis": axis, **part})
    return Example(kind, (places, picked), {"axis": axis, "extent": shape[axis], **part})


@maker("one_hot")
def _one_hot(kind, rng):
    return Example(kind, (Ints(extents(rng), 5),), {"extent": 5, "dtype": F64})


@maker("dispatch", "combine", "dispatch_gates", "collect_gates")
def _dealt(kind, rng):
    experts, batch, chunks, inside, each, k, width = (int(n) for n in rng.choice((1, 2, 3), 7))
    first, tokens = int(rng.integers(0, 3)), chunks * inside
    chosen = Ints((batch, tokens, k), experts + first + 1)
    slots = (experts, batch, chunks * each, *([width] if kind in ("dispatch", "combine") else []))
    given = (batch, tokens, width if kind == "dispatch" else k)
    how = {"each": each, "first": first, "drops": True}
    if kind in ("combine", "collect_gates"):
        return Example(kind, (slots, chosen), how)
    return Example(kind, (given, chosen), {"shape": slots, **how})


@maker("gated_bias", "gated_bias_gradient")
def _gated_bias(kind, rng):
    experts, batch, slots, width = (int(n) for n in rng.choice((1, 2, 3), 4))
    return Example(kind, ((experts, batch, slots, width), (experts, batch, slots), (experts, width)))


@maker("softmax_gradient")
def _softmax_gradient(kind, rng):
    shape = extents(rng, 1)
    return Example(kind, (shape, shape), {"axis": of_dim(rng, shape), "scale": float(rng.choice([1, 0.25]))})


@maker("layer_norm_gradient", "rms_norm_gradient")
def _normalized_gradient(kind, rng):
    shape = extents(rng, 1)
    return Example(kind, (shape, shape, shape[-1:]), {"epsilon": 0.5})


MASKS = "whole", "causal", "causal:2", "causal/2,1", "whole/3"


@maker("attention", "attention_gradient")
def _attention(kind, rng):
    batch, rows, groups, served, width = (int(n) for n in rng.choice((1, 2, 3), 5))
    rate = float(rng.choice([0, 0.5]))
    starts = (*rng.integers(0, 3, 3).tolist(), 0)
    mask = MASKS[rng.integers(len(MASKS))]
    return attention(kind, batch, rows, rows + starts[1], groups * served, groups, width, mask=mask, rate=rate,
                     starts=starts, values=int(rng.choice((width, 3))))


@maker("context_attention", "context_attention_gradient", "attention_block", "attention_block_gradient")
def _attention_of_blocks(kind, rng):
    batch, extent, groups, served, width = (int(n) for n in rng.choice((1, 2, 3), 5))
    blocks = int(rng.integers(1, 4))
    more = {"blocks": blocks, "number": int(rng.integers(blocks))} if "block" in kind else {}
    rows = extent * blocks
    return attention(kind, batch, rows, rows, groups * served, groups, width, mask=MASKS[rng.integers(len(MASKS))],
                     rate=float(rng.choice([0, 0.5])), values=int(rng.choice((width, 3))), **more)


@maker("linear_attention", "linear_attention_gradient")
def _linear_attention(kind, rng):
    sizes = (int(n) for n in rng.choice((1, 2, 3), 6))
    delta, unit = (bool(n) for n in rng.integers(2, size=2))
    return linear_attention(kind, *sizes, chunk=int(rng.integers(1, 5)), delta=delta, unit=unit,
                            of_features=bool(rng.integers(2)))


@maker("cached_linear_attention")
def _of_states(kind, rng):
    sizes = (int(n) for n in rng.choice((1, 2, 3), 7))
    delta, unit = (bool(n) for n in rng.integers(2, size=2))
    return in_slots(kind, *sizes, chunk=int(rng.integers(1, 5)), delta=delta, unit=unit, of_features=bool(rng.integers(2)))


@maker("cached_short_convolution")
def _of_last_tokens(kind, rng):
    sizes = (int(n) for n in rng.choice((1, 2, 3, 5), 3))
    return in_slots(kind, *sizes, extents(rng)[:2] or (2,), int(rng.integers(2, 5)), bool(rng.integers(2)))


@maker("short_convolution", "short_convolution_gradient")
def _short_convolution(kind, rng):
    channels, taps = extents(rng)[:2] or (2,), int(rng.integers(1, 5))
    x = (*(int(n) for n in rng.choice((1, 2, 5), 2)), *channels)
    given = [x] * (2 if kind.endswith("gradient") else 1)
    return Example(kind, (*given, (*channels, taps), *([channels] if rng.integers(2) else [])))


@maker("gated_rms_norm", "gated_rms_norm_gradient")
def _gated_rms_norm(kind, rng):
    shape = (*extents(rng), 2, 3)
    weight = shape[-int(rng.integers(1, len(shape))):]
    given = [shape] * (3 if kind.endswith("gradient") else 2)
    return Example(kind, (*given, weight), {"epsilon": 0.5, "gate_first": bool(rng.integers(2))})


@maker("deal")
def _deal(kind, rng):
    return Example(kind, (extents(rng, 2),), {"axes": ("cp",), "before": 1, "after": 0})


@maker("ring_shift")
def _ring_shift(kind, rng):
    shape = extents(rng, 1)
    return Example(kind, (shape,), {"axes": ("cp",), "group": shape[0], "dim": 0})


@maker("attention_weights")
def _attention_weights(kind, rng):
    shape = (*extents(rng), int(rng.integers(1, 5)))
    shape = (*shape, shape[-1]) if len(shape) < 2 else shape
    return Example(kind, (shape,), {"scale": 0.5, "mask": MASKS[rng.integers(len(MASKS))],
                                    "starts": tuple(rng.integers(0, 4, len(shape)).tolist())})


@maker("rotary", "scaled_rotary")
def _rotary(kind, rng):
    shape = (*extents(rng, 2), 2 * int(rng.integers(1, 4)))
    more = {} if kind == "rotary" else {"scaling": str(rng.choice(["linear:4.0", "llama3:4,1,4,64", "yarn:4,32,1,4,0"]))}
    return Example(kind, (shape,), {**more, "base": 100.0, "inverse": bool(rng.integers(2)),
                                    "starts": tuple(rng.integers(0, 4, len(shape)).tolist())})


@maker("rotary_at", "scaled_rotary_at")
def _rotary_at(kind, rng):
    shape = (*extents(rng, 3, 3), 2 * int(rng.integers(1, 4)))
    more = {} if kind == "rotary_at" else {"scaling": str(rng.choice(["linear:4.0", "llama3:4,1,4,64", "yarn:4,32,1,4,0"]))}
    return Example(kind, (shape, Ints(shape[:2], 30)), {**more, "base": 100.0})


@maker("write_cache", "cached_attention", "cached_latent_attention")
def _of_cache(kind, rng):
    replicas, tokens, pages, places, groups, width, own, values = (rng.integers(1, 5, 8)).tolist()
    groups = 1 if kind == "cached_latent_attention" else groups
    more = {} if kind == "write_cache" else {
        "values": min(values, width) if kind == "cached_latent_attention" else values,
        "mask": str(rng.choice(["causal", "causal:3", "causal;cap=0.5"])),
    }
    heads = groups * int(rng.integers(1, 4))
    return of_cache(kind, replicas, tokens, pages, places, heads, groups, width, own=own, **more)


@maker("exponential_sums", "cross_entropy", "cross_entropy_gradient")
def _entropy(kind, rng):
    shape = extents(rng, 1)
    rows = shape[:-1]
    if kind == "exponential_sums":
        return Example(kind, (shape, rows))
    first, spare = rng.integers(0, 3, 2).tolist()
    whole = first + shape[-1] + spare
    grad = [()] if kind == "cross_entropy_gradient" else []
    return Example(kind, (*grad, shape, Ints(rows, whole), rows, rows), {"rows": 8, "first": first, "whole": whole},
                   low=1)


@maker("layer_norm", "rms_norm")
def _normalized(kind, rng):
    shape = extents(rng, 1)
    weights = [shape[-1:]] * (2 if kind == "layer_norm" else 1)
    return Example(kind, (shape, *weights), {"epsilon": 0.5})


@maker("mean_squared_error", "softmax_cross_entropy")
def _loss(kind, rng):
    shape = (int(rng.choice(EXTENTS)), int(rng.choice((1, 2, 4))))
    return Example(kind, (shape, shape if kind == "mean_squared_error" else Ints(shape[:1], shape[1])), {"rows": 8})


@maker("dropout_gradient")
def _dropout_gradient(kind, rng):
    shape = extents(rng)
    return Example(kind, (shape, Bools(shape)), {"rate": 0.5})


@maker("dropout_mask", "uniform", "dropout")
def _random(kind, rng):
    shape = extents(rng)
    starts, spare = rng.integers(0, 4, (2, len(shape))).tolist()
    whole = tuple(a + b + c for a, b, c in zip(starts, shape, spare, strict=True))
    part = {"seed": 3, "whole": whole, "starts": tuple(starts)}
    if kind == "dropout":
        return Example(kind, (shape, Ints((), 9)), {**part, "rate": 0.5})
    return Example(kind, (Ints((), 9),), {**part, "shape": shape,
                                          **({"dtype": F64} if kind == "uniform" else {"rate": 0.5})})


@maker("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "reshard", "all_slice", "relayout")
def _collective(kind, rng):
    shape = extents(rng, 2)
    dim = of_dim(rng, shape)
    other = (dim + 1) % len(shape)
    attributes = {
        "all_reduce": {"op": "sum"}, "all_gather": {"dim": dim, "extent": shape[dim]},
        "reduce_scatter": {"dim": dim, "extent": shape[dim], "op": "sum"}, "permute": {"pairs": ((0, 0),)},
        "all_to_all": {"split_dim": dim, "split_extent": shape[dim], "concat_dim": other,
                       "concat_extent": shape[other]},
    }
    dims = ["None"] * len(shape)
    before, after = (f"[{', '.join([*dims[:d], 'tp', *dims[d + 1:]])}]" for d in (dim, other))
    attributes["all_slice"] = attributes["all_gather"]
    attributes["relayout"] = {"step": "exchange", "before": before, "after": after, "whole": shape, "shape": shape,
                              "received": 0}
    if kind == "reshard":
        return Example(kind, (shape,), {"layout": before})
    given = Ints(shape, 9) if kind in ("all_slice", "relayout") else shape
    return Example(kind, (given,), {**ALONE, **attributes[kind]})
