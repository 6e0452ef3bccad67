"""The shapes of the parameters of a Transformer, and the floating-point operations of its products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from parallelism.ir.core.types import MOST_BYTES
from parallelism.ir.operators.masked_scores import allowed_scores
from parallelism.kernels import Mask

if TYPE_CHECKING:
    from parallelism.models.spec import TransformerSpec

Shape = tuple[int, ...]

GATED = ("swiglu", "geglu", "geglu_exact", "reglu", "clamped_swiglu")
"""Activations of two inputs: the first, behind a product of its own, gates the second."""
NORM_PLACES = ("before", "after", "both")
NEXT = "next"
"""What the names of modules that predict further tokens begin with."""
PARTS_OF_QKV = ("query", "key_value")
"""The weights in place of ``qkv`` where heads of keys and values are copied."""
_NOT_EVERY_BIAS = ("router", "shared_router", "head")
"""Products that have a bias only where their name is said."""


def is_product(name: str, dims: int) -> bool:
    """Whether a parameter is the weight of a product in a block: routers and convolutions are none that is narrow."""
    return dims > 1 and name[0].isdecimal() and not name.endswith(("router", "_bias", "convolution"))


def weights_of(spec: TransformerSpec) -> dict[str, Shape]:
    """The shape of each parameter, by name; see `TransformerSpec.weights`."""
    h = spec.width
    shapes: dict[str, Shape] = {"tokens": (spec.vocabulary, h)}
    shapes |= {"positions": (spec.sequence, h)} if spec.positions == "learned" else {}
    if spec.embedding_norm:
        shapes |= _norms(spec, {"embedding_norm": h})
    for layer in range(spec.layers):
        shapes |= {f"{layer}.{name}": shape for name, shape in block_weights(spec, layer).items()}
    shapes |= _norms(spec, {"norm": h})
    if not spec.tied:
        shapes["head"] = (spec.vocabulary, h)
    if "head" in spec.biased:
        shapes["head_bias"] = (spec.vocabulary,)
    for module in range(spec.next_tokens):
        shapes |= {f"{NEXT}.{module}.{name}": shape for name, shape in _next_weights(spec).items()}
    return shapes


def _next_weights(spec: TransformerSpec) -> dict[str, Shape]:
    """The parameters of a module that predicts one more token: two norms, a product, a block and a norm."""
    h = spec.width
    own = _norms(spec, {"hidden_norm": h, "embedding_norm": h}) | {"joined": (2 * h, h)}
    return own | block_weights(spec, spec.layers - 1) | _norms(spec, {"norm": h})


def block_weights(spec: TransformerSpec, layer: int) -> dict[str, Shape]:
    """The parameters of a block, without its number."""
    first, second = norms_of_block(spec, layer)
    attention, feed_forward = mixer_weights(spec, layer), feed_forward_weights(spec, layer)
    first, second = first if attention else (), second if feed_forward else ()
    block = _norm_weights(spec, dict.fromkeys(first, spec.width)) | attention
    block |= _norm_weights(spec, dict.fromkeys(second, spec.width)) | feed_forward
    block |= _norm_biases(spec, dict.fromkeys((*first, *second), spec.width))
    return block | _biases(spec, attention | feed_forward)


def norm_places_of(spec: TransformerSpec, layer: int) -> str:
    """Where the norms of a layer stand."""
    linear = spec.linear_attention
    own = linear.norm_places if linear is not None and spec.is_linear(layer) else None
    return own or spec.norm_places


def norms_of_block(spec: TransformerSpec, layer: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the norms around the attention of a block, and around its feed-forward."""
    first: tuple[str, ...] = ("norm1", "norm1_after")
    second: tuple[str, ...] = ("norm2", "norm2_after")
    places = norm_places_of(spec, layer)
    if places == "before":
        first, second = first[:1], second[:1]
    elif places == "after":
        first, second = first[1:], second[1:]
    return first, () if spec.parallel == "one_norm" else second


def mixer_weights(spec: TransformerSpec, layer: int) -> dict[str, Shape]:
    """The parameters of the attention of a block, linear or not, but its biases and norms before and after it."""
    weights = attention_weights(spec) if attends(spec, layer) else {}
    if spec.linear_attention is not None and has_state(spec, layer):
        weights |= spec.linear_attention.weights(spec.width)
    return weights


def has_state(spec: TransformerSpec, layer: int) -> bool:
    """Whether a layer has linear attention."""
    return spec.has("attention", layer) and spec.is_linear(layer)


def attends(spec: TransformerSpec, layer: int) -> bool:
    """Whether a layer has attention to keys and values."""
    linear = spec.linear_attention
    is_alone = linear is not None and linear.at(layer) and not linear.beside
    return spec.has("attention", layer) and not is_alone


def check_layer_parts(spec: TransformerSpec) -> None:
    """``ValueError`` for parts of layers that there are not, and for what cannot be combined with linear attention."""
    if spec.layer_parts is not None:
        object.__setattr__(spec, "layer_parts", tuple(spec.layer_parts))
        known = ("attention", "feed_forward", "both")
        if wrong := [each for each in spec.layer_parts if each not in known]:
            raise ValueError(f"layer_parts must be of {', '.join(known)}, got {wrong[0]!r}")
        if spec.parallel:
            raise ValueError(f"parallel={spec.parallel} needs layers with both parts: layer_parts=None")
    if spec.linear_attention is not None and spec.documents is not None:
        raise ValueError(
            "linear attention needs documents=None: its state goes on from a document to the next"
        )
    if spec.linear_attention is not None and spec.linear_attention.norm_places not in (None, *NORM_PLACES):
        told, got = ", ".join(NORM_PLACES), spec.linear_attention.norm_places
        raise ValueError(f"norm_places of linear attention must be one of {told}, or None; got {got!r}")
    if spec.attention_gate and spec.attention is not None:
        raise ValueError("latent attention has no gate: attention_gate=False")


def kind_of_layer(spec: TransformerSpec, layer: int) -> tuple[Any, ...]:
    """What tells a layer from layers that do not compute the same."""
    has_experts = spec.experts is not None and spec.experts.at(layer)
    parts = "both" if spec.layer_parts is None else spec.layer_parts[layer]
    if parts == "feed_forward":
        return parts, has_experts
    has_experts = has_experts and parts == "both"
    if not attends(spec, layer):
        return parts, has_experts, "linear"
    found = parts, has_experts, spec.window_of(layer), spec.is_rotated(layer)
    return (*found, "beside linear") if spec.is_linear(layer) else found


def spec_like_layer(spec: TransformerSpec, layer: int) -> TransformerSpec:
    """The model with as many layers, all like this one."""
    has_experts = spec.experts is not None and spec.experts.at(layer) and spec.has("feed_forward", layer)
    linear = spec.linear_attention if has_state(spec, layer) else None
    experts = spec.experts if has_experts else None
    changes: dict[str, Any] = {
        "linear_attention": linear and replace(linear, layers=None),
        "experts": experts and replace(experts, layers=(True,) * spec.layers),
        "key_value_heads": spec.key_value_heads if attends(spec, layer) else None,
        "window": spec.window_of(layer),
        "full_attention_every": None,
        "unrotated_every": None if spec.positions != "rotary" or spec.is_rotated(layer) else 1,
    }
    if spec.layer_parts is not None:
        changes["layer_parts"] = (spec.layer_parts[layer],) * spec.layers
    return replace(spec, **changes)


def with_layers(spec: TransformerSpec, layers: Sequence[int]) -> TransformerSpec:
    """The model with these of its layers, in this order."""
    changes: dict[str, Any] = {"layers": len(layers)}
    if spec.full_attention_every is not None:
        changes["full_attention_every"] = tuple(spec.window_of(layer) is None for layer in layers)
    if spec.unrotated_every is not None:
        changes["unrotated_every"] = tuple(not spec.is_rotated(layer) for layer in layers)
    if spec.layer_parts is not None:
        changes["layer_parts"] = tuple(spec.layer_parts[layer] for layer in layers)
    for name in ("experts", "linear_attention"):
        part = getattr(spec, name)
        if part is not None:
            changes[name] = replace(part, layers=tuple(part.at(layer) for layer in layers))
    return replace(spec, **changes)


def attention_weights(spec: TransformerSpec) -> dict[str, Shape]:
    """The parameters of the attention of a block, but its biases and norms before and after it."""
    if spec.attention is not None:
        return _latent_weights(spec)
    h, width = spec.width, spec.head_width
    queries, others = spec.heads * width * (1 + spec.attention_gate), 2 * spec.groups * width
    weights: dict[str, Shape] = {"qkv": (h, queries + others)}
    if spec.key_value_copies > 1:
        weights = {"query": (h, queries), "key_value": (h, others)}
    if spec.query_key_norm == "head":
        weights |= _norms(spec, {"query_norm": width, "key_norm": width})
    elif spec.query_key_norm == "all_heads":
        weights |= _norms(spec, {"query_norm": spec.heads * width, "key_norm": spec.groups * width})
    weights |= {"sinks": (spec.heads,)} if spec.attention_sinks else {}
    return weights | {"out": (spec.heads * width, h)}


def _latent_weights(spec: TransformerSpec) -> dict[str, Shape]:
    latent, h = spec.attention, spec.width
    assert latent is not None
    queries = spec.heads * latent.query_width
    weights: dict[str, Shape] = {"query": (h, queries)}
    if latent.query_rank is not None:
        weights = {
            "query_down": (h, latent.query_rank),
            "query_norm": (latent.query_rank,),
            "query_up": (latent.query_rank, queries),
        }
    made = spec.heads * (latent.head_width + latent.value_width)
    return weights | {
        "key_value_down": (h, latent.key_value_rank + latent.rotary_width),
        "key_value_norm": (latent.key_value_rank,),
        "key_value_up": (latent.key_value_rank, made),
        "out": (spec.heads * latent.value_width, h),
    }


def feed_forward_weights(spec: TransformerSpec, layer: int) -> dict[str, Shape]:
    """The parameters of the feed-forward of a block, but its biases and the norms before and after it."""
    h, experts = spec.width, spec.experts
    if not spec.has("feed_forward", layer):
        return {}
    if experts is None or not experts.at(layer):
        return _feed_forward(spec, "", h, spec.hidden)
    weights: dict[str, Shape] = {"router": (h, experts.count)}
    if experts.latent is not None:
        weights |= {"latent_down": (h, experts.latent), "latent_up": (experts.latent, h)}
    for name, shape in _feed_forward(spec, "expert_", experts.latent or h, spec.expert_width).items():
        weights[name] = (experts.count, *shape)
    if experts.shared_width:
        weights |= _feed_forward(spec, "shared_", h, experts.shared_width)
        weights |= {"shared_router": (h, 1)} if experts.shared_gate else {}
    return weights


def _feed_forward(spec: TransformerSpec, prefix: str, width: int, hidden: int) -> dict[str, Shape]:
    gate = {f"{prefix}gate": (width, hidden)} if spec.activation in GATED else {}
    return {**gate, f"{prefix}up": (width, hidden), f"{prefix}down": (hidden, width)}


def _biases(spec: TransformerSpec, weights: dict[str, Shape]) -> dict[str, Shape]:
    """The biases of the products among these weights: of an expert's product one for each expert."""
    found: dict[str, Shape] = {}
    for name, shape in weights.items():
        if len(shape) > 1 and has_bias(spec, name):
            channels = shape[0] if name == "convolution" else shape[-1]
            found[f"{name}_bias"] = (*shape[:-2], channels)
    return found


def has_bias(spec: TransformerSpec, product: str) -> bool:
    """Whether a product, by the name of its weight in a block, has a bias."""
    if spec.biases is True:
        return product not in _NOT_EVERY_BIAS
    if spec.key_value_copies > 1 and product in PARTS_OF_QKV:
        return "qkv" in spec.biased
    return product in spec.biased


def _norms(spec: TransformerSpec, widths: dict[str, int]) -> dict[str, Shape]:
    return _norm_weights(spec, widths) | _norm_biases(spec, widths)


def _norm_weights(spec: TransformerSpec, widths: dict[str, int]) -> dict[str, Shape]:
    return {} if spec.norm_parameters == "none" else {name: (width,) for name, width in widths.items()}


def _norm_biases(spec: TransformerSpec, widths: dict[str, int]) -> dict[str, Shape]:
    if spec.norm != "layer" or spec.norm_parameters != "all":
        return {}
    return {f"{name}_bias": (width,) for name, width in widths.items()}


# -- counts ------------------------------------------------------------------------------------------------------------


def parameters_of(spec: TransformerSpec) -> tuple[int, int]:
    """The number of parameters: of the model, and of the modules that predict further tokens."""
    model = further = 0
    for name, shape in spec.weights.items():
        if name.startswith(f"{NEXT}."):
            further += prod(shape)
        else:
            model += prod(shape)
    return model, further


def check_countable(spec: TransformerSpec) -> None:
    """``ValueError`` where the bytes of a training step of one sequence would not fit the 64 bits in which they are counted.

    A parameter has 16 bytes at most: itself and its gradient, its copy in float32 and two moments.  Each product leaves a
    few arrays of its shape behind.
    """
    products = sum(shape[-1] for shape in (spec.weights | spec.adapters).values() if len(shape) > 1)
    products += spec.vocabulary
    scores = 0 if spec.fused_attention else spec.layers * spec.heads * spec.sequence
    counts = {
        "parameters": sum(parameters_of(spec)),
        "numbers that the products of a sequence write": spec.sequence * (products + scores),
    }
    for what, count in counts.items():
        if 16 * count > MOST_BYTES:
            raise ValueError(f"a model may have at most {MOST_BYTES // 16:,} {what}, got {count:,}")


def idle_parameters(spec: TransformerSpec) -> int:
    """The number of parameters of the experts that a token does not take."""
    experts = spec.experts
    if experts is None:
        return 0
    found = 0
    for layer in range(spec.layers):
        if not experts.at(layer) or not spec.has("feed_forward", layer):
            continue
        for name, shape in block_weights(spec, layer).items():
            if name.startswith("expert_"):
                found += prod(shape) // experts.count * (experts.count - experts.chosen)
    return found


def forward_flops_of(spec: TransformerSpec, tokens: int) -> int:
    """Floating-point operations of the products of a forward on so many tokens; see `TransformerSpec.flops`."""
    of_layers = 2 * sum(_product_weights(spec, layer) for layer in range(spec.layers))
    of_layers += 2 * sum(map(prod, spec.adapters.values()))
    head = 2 * spec.width * spec.vocabulary
    further = spec.next_tokens * (4 * spec.width**2 + 2 * _product_weights(spec, spec.layers - 1) + head)
    latent = spec.attention
    scored = 2 * spec.head_width if latent is None else latent.query_width + latent.value_width
    layers = [*range(spec.layers), *[spec.layers - 1] * spec.next_tokens]
    scores = 2 * sum(attends(spec, layer) for layer in layers) * spec.heads * scored * _scores(spec)
    states = 0
    if spec.linear_attention is not None:
        states = sum(has_state(spec, layer) for layer in layers) * spec.linear_attention.state_flops
    return tokens * (of_layers + head + further + states) + tokens * scores // spec.sequence


def frozen_flops_of(spec: TransformerSpec, tokens: int) -> int:
    """Those of the gradients of frozen weights on so many tokens, which nobody computes; 0 where all weights are trained."""
    if spec.lora is None:
        return 0
    products = sum(_product_weights(spec, layer) for layer in range(spec.layers))
    return 2 * tokens * (products + spec.width * spec.vocabulary)


def _scores(spec: TransformerSpec) -> int:
    """The scores of a head in a sequence: of each token with all of its document."""
    mask = Mask(documents=spec.document_lengths)
    return int(allowed_scores(mask, spec.sequence, spec.sequence))


def _product_weights(spec: TransformerSpec, layer: int) -> int:
    """The elements of the weights of a block that a token is multiplied with, those of adapters not among them."""
    weights, experts = mixer_weights(spec, layer) | feed_forward_weights(spec, layer), spec.experts
    products = 0
    for name, shape in weights.items():
        if len(shape) == 1:
            continue
        chosen = experts.chosen if experts is not None and name.startswith("expert_") else 1
        products += chosen * prod(shape[-2:])
    return products
