"""Architectures with layers that keep a state: what each is beyond its fields, after transformers 5.24.0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, sqrt
from typing import Any

from parallelism.models.expert_layers import Experts
from parallelism.models.hugging_face.config import Config
from parallelism.models.hugging_face.dense import multipliers
from parallelism.models.hugging_face.latent import latent_attention
from parallelism.models.hugging_face.layers import (
    Figures,
    activation,
    all_biases,
    llama_like,
    sizes,
    width_of_head,
)
from parallelism.models.hugging_face.with_experts import balanced_router, granite_moe, qwen_experts
from parallelism.models.linear_attention import KIMI_DELTA, LinearAttention

LINEAR, FULL, EXPERTS, DENSE = "linear_attention", "full_attention", "moe", "mlp"
OLDER_KINDS = {"mamba": LINEAR, "attention": FULL}
"""Kinds of layers in older files."""
_PATTERN = {"M": LINEAR, "*": FULL, "E": EXPERTS, "-": DENSE}
"""The letters of ``hybrid_override_pattern``."""
_USUAL_MAMBA = {
    "heads": "mamba_n_heads",
    "head_width": "mamba_d_head",
    "state_width": "mamba_d_state",
    "groups": "mamba_n_groups",
    "taps": "mamba_d_conv",
    "chunk": "mamba_chunk_size",
}
"""The figures of Mamba-2 by the fields of Bamba and Granite."""


def bamba(config: Config) -> Figures:
    """Bamba: a Llama with Mamba-2 in most layers, and half of the features of a head rotated in the others."""
    found = llama_like(config.with_fields(partial_rotary_factor=0.5))
    attending = config.numbers("attn_layer_indices")
    linear = tuple(layer not in attending for layer in range(found["layers"]))
    return found | _with_mamba(config, linear, (*all_biases(config), *_mamba_biases(config)))


def falcon_h1(config: Config) -> Figures:
    """Falcon-H1: a Llama with Mamba-2 beside attention in every layer.

    Its multipliers of products are taken into the weights of these, as the weights of Gemma's norms are: no count, time or
    byte depends on them.
    """
    found = llama_like(config)
    config.must("hidden_act", "silu")
    inner = config.whole_or_none("mamba_d_ssm") or config.whole("mamba_expand") * found["width"]
    if config.get("mamba_d_head") in (None, "auto"):
        config = config.with_fields(mamba_d_head=inner // config.whole("mamba_n_heads"))
    gate = "alone"
    if config.switch("mamba_rms_norm"):
        gate = "last" if config.switch("mamba_norm_before_gate") else "first"
    biases = {
        "convolution": config.switch("mamba_conv_bias"),
        "state_in": config.switch("mamba_proj_bias"),
        "state_out": config.switch("projectors_bias"),
    }
    layer = mamba(config, _USUAL_MAMBA)
    return found | {
        "attention_scale": config.number("key_multiplier") / sqrt(width_of_head(found)),
        "embedding_scale": config.number("embedding_multiplier"),
        "logit_scale": config.number("lm_head_multiplier"),
        "linear_attention": replace(layer, beside=True, gate=gate, least_step=_least_step(config)),
        "biases": (*all_biases(config), *(name for name, has_bias in biases.items() if has_bias)),
    }


def granite_hybrid(config: Config) -> Figures:
    """Granite 4: a Granite with Mamba-2 in most layers, no positions in most models, and experts in some of them."""
    config.must("position_embedding_type", None, "rope", "nope")
    if config.get("num_local_experts"):
        found = granite_moe(config)
    else:
        plain = config.with_fields(intermediate_size=config.get("shared_intermediate_size"))
        found = llama_like(plain) | multipliers(plain)
    if config.get("position_embedding_type") != "rope":
        found |= {"positions": "none"}
    kinds = kinds_of_layers(config, found["layers"]) or [LINEAR] * found["layers"]
    linear = tuple(kind == LINEAR for kind in kinds)
    return found | _with_mamba(config, linear, (*found["biases"], *_mamba_biases(config)))


def _with_mamba(config: Config, linear: tuple[bool, ...], biases: tuple[str, ...]) -> Figures:
    """What Bamba and Granite have beside attention."""
    config.must("hidden_act", "silu")
    if config.get("mamba_d_head") in (None, "auto"):
        inner = config.whole("mamba_expand") * config.whole("hidden_size")
        config = config.with_fields(mamba_d_head=inner // config.whole("mamba_n_heads"))
    layer = mamba(config, _USUAL_MAMBA)
    return {
        "linear_attention": replace(layer, layers=linear, least_step=_least_step(config))
        if any(linear)
        else None,
        "biases": biases,
    }


def _mamba_biases(config: Config) -> tuple[str, ...]:
    convolution = ("convolution",) if config.switch("mamba_conv_bias") else ()
    return (*convolution, *(("state_in", "state_out") if config.switch("mamba_proj_bias") else ()))


def mamba(config: Config, names: Mapping[str, str]) -> LinearAttention:
    """Mamba-2 in all layers, by the fields of these names."""
    figures: dict[str, Any] = {figure: config.whole(name) for figure, name in names.items()}
    return LinearAttention(**figures)


def _least_step(config: Config) -> float:
    """The lower bound of ``time_step_limit``, which may have no upper one."""
    limits = config.listed("time_step_limit", 2, (int, float)) or (0.0, inf)
    if limits[1] != inf:
        raise config.wrong("time_step_limit", "a lower bound and infinity", limits)
    return float(limits[0])


def kinds_of_layers(config: Config, layers: int) -> Sequence[str] | None:
    """The kind of each layer, in the words of transformers 5; None where the file does not say it."""
    for name in ("layer_types", "layers_block_type"):
        kinds = config.listed(name, layers, (str,))
        if kinds is not None:
            return [OLDER_KINDS.get(kind, kind) for kind in kinds]
    return None


def nemotron_h(config: Config) -> Figures:
    """Nemotron-H, Nemotron Nano 2 and 3: each layer is Mamba-2, attention, a feed-forward or experts, behind one norm."""
    config.must("mamba_hidden_act", "silu")
    config.must("sliding_window", None)
    kinds = _kinds_of_nemotron(config)
    found = sizes(config.with_fields(num_hidden_layers=len(kinds)))
    linear, routed = (tuple(kind == each for kind in kinds) for each in (LINEAR, EXPERTS))
    biases = {
        "convolution": config.switch("use_conv_bias"),
        **dict.fromkeys(("state_in", "state_out"), config.switch("use_bias")),
        **dict.fromkeys(("up", "down", "shared_up", "shared_down"), config.switch("mlp_bias")),
        **dict.fromkeys(("latent_down", "latent_up"), config.switch("mlp_bias")),
    }
    layer = mamba(
        config,
        {
            "heads": "mamba_num_heads",
            "head_width": "mamba_head_dim",
            "state_width": "ssm_state_size",
            "groups": "n_groups",
            "taps": "conv_kernel",
            "chunk": "chunk_size",
        },
    )
    step = config.number("time_step_min")
    return {
        **found,
        "norm": "rms",
        "epsilon": config.number("layer_norm_epsilon"),
        "positions": "none",
        "activation": activation(config, "mlp_hidden_act", gated=False),
        "attention_dropout": config.number("attention_dropout", 0.0),
        "biases": tuple(name for name, has_bias in biases.items() if has_bias),
        "layer_parts": tuple("attention" if kind in (LINEAR, FULL) else "feed_forward" for kind in kinds),
        "linear_attention": replace(layer, layers=linear, least_step=step) if any(linear) else None,
        "experts": _nemotron_experts(config, routed) if any(routed) else None,
    }


def _kinds_of_nemotron(config: Config) -> Sequence[str]:
    """The kinds of the layers: listed, or the letters of a pattern; their number is that of the layers."""
    for name in ("layers_block_type", "layer_types"):
        listed = config.get(name)
        if isinstance(listed, list | tuple):
            kinds = kinds_of_layers(config.with_fields(layer_types=listed), len(listed)) or []
            break
    else:
        pattern = config.text("hybrid_override_pattern")
        kinds = [_PATTERN.get(letter, letter) for letter in pattern]
    if not kinds or not {*kinds} <= {*_PATTERN.values()}:
        raise config.wrong("layers_block_type", f"a list of {', '.join(_PATTERN.values())}", kinds)
    return kinds


def _nemotron_experts(config: Config, layers: tuple[bool, ...]) -> Experts:
    return Experts(
        count=config.whole("n_routed_experts"),
        chosen=config.whole("num_experts_per_tok"),
        width=config.whole("moe_intermediate_size"),
        latent=config.whole_or_none("moe_latent_size"),
        shared_width=config.whole("moe_shared_expert_intermediate_size"),
        layers=layers,
        scale=config.number("routed_scaling_factor"),
        **balanced_router(config),
    )


def mamba2(config: Config) -> Figures:
    """Mamba-2 in all layers, and nothing else; a file says no length of its sequences."""
    config.must("hidden_act", "silu")
    layers, heads = config.whole("num_hidden_layers", most=10_000), config.whole("num_heads")
    names = {
        "heads": "num_heads",
        "head_width": "head_dim",
        "state_width": "state_size",
        "groups": "n_groups",
        "taps": "conv_kernel",
        "chunk": "chunk_size",
    }
    biases = {
        "convolution": config.switch("use_conv_bias"),
        **dict.fromkeys(("state_in", "state_out"), config.switch("use_bias")),
    }
    return {
        "layers": layers,
        "width": config.whole("hidden_size"),
        "heads": heads,
        "head_width": config.whole("head_dim"),
        "feed_forward": config.whole("hidden_size"),
        "vocabulary": config.whole("vocab_size"),
        "sequence": config.whole("max_position_embeddings"),
        "tied": config.switch("tie_word_embeddings"),
        "norm": "rms",
        "epsilon": config.number("layer_norm_epsilon"),
        "positions": "none",
        "biases": tuple(name for name, has_bias in biases.items() if has_bias),
        "layer_parts": ("attention",) * layers,
        "linear_attention": replace(mamba(config, names), least_step=_least_step(config)),
    }


def olmo_hybrid(config: Config) -> Figures:
    """OLMo hybrid: the gated delta rule in three of four layers, behind norms, and the attention of OLMo 3 in the others,
    before norms and mostly without positions."""
    config.must("hidden_act", "silu")
    is_rotated = config.group("rope_parameters").get("rope_theta", 0) is not None
    found = llama_like(config if is_rotated else config.with_fields(rope_parameters=None))
    layers, heads = found["layers"], found["heads"]
    kinds = kinds_of_layers(config, layers)
    if kinds is None:
        kinds = [FULL if (layer + 1) % 4 == 0 else LINEAR for layer in range(layers)]
        kinds[-1] = kinds[-1] if FULL in kinds else FULL
    key_heads = config.whole_or_none("linear_num_key_heads") or heads
    key_width = config.whole_or_none("linear_key_head_dim") or int(0.75 * found["width"] / key_heads)
    linear = LinearAttention(
        kind="gated_delta",
        heads=config.whole_or_none("linear_num_value_heads") or heads,
        head_width=config.whole_or_none("linear_value_head_dim") or 2 * key_width,
        state_width=key_width,
        groups=key_heads,
        taps=config.whole("linear_conv_kernel_dim"),
        layers=tuple(kind == LINEAR for kind in kinds),
        epsilon=1e-5,
        norm_places="before",
        doubled_rates=config.switch("linear_allow_neg_eigval"),
    )
    return found | {
        "positions": "rotary" if is_rotated else "none",
        "norm_places": "after",
        "query_key_norm": "all_heads",
        "linear_attention": linear,
    }


def kimi_linear(config: Config) -> Figures:
    """Kimi Linear: the delta rule with decays of each feature in three of four layers, latent attention without positions in
    the others, and the experts of DeepSeek-V3."""
    given = config.within("linear_attn_config", {})
    config = config.with_fields(rope_parameters=None, rope_scaling=None)
    found = latent_attention(config)
    layers = found["layers"]
    linear = LinearAttention(
        kind=KIMI_DELTA,
        heads=given.whole_or_none("num_heads") or config.whole("linear_num_heads"),
        groups=given.whole_or_none("num_heads") or config.whole("linear_num_heads"),
        head_width=given.whole_or_none("head_dim") or config.whole("linear_head_dim"),
        state_width=given.whole_or_none("head_dim") or config.whole("linear_head_dim"),
        taps=given.whole_or_none("short_conv_kernel_size") or config.whole("linear_conv_kernel_dim"),
        layers=_layers_of_kimi(config, given, layers),
    )
    dense = config.whole("first_k_dense_replace", least=0)
    kinds = config.listed("mlp_layer_types", layers, (str,))
    routed = (
        [layer >= dense for layer in range(layers)] if kinds is None else [each == "sparse" for each in kinds]
    )
    width = config.whole("moe_intermediate_size")
    experts = Experts(
        count=config.whole("n_routed_experts"),
        chosen=config.whole("num_experts_per_tok"),
        width=width,
        shared_width=width * config.whole("n_shared_experts"),
        layers=tuple(routed),
        scale=config.number("routed_scaling_factor"),
        **balanced_router(config),
    )
    return found | {"positions": "none", "linear_attention": linear, "experts": experts}


def _layers_of_kimi(config: Config, given: Config, layers: int) -> tuple[bool, ...]:
    """Whether each layer has the delta rule: as listed, or counted from 1 in ``kda_layers``."""
    kinds = config.listed("layer_types", layers, (str,))
    numbers = given.numbers("kda_layers")
    if numbers:
        return tuple(layer + 1 in numbers for layer in range(layers))
    if kinds is not None:
        return tuple(kind == LINEAR for kind in kinds)
    return tuple(layer == 0 or layer % 4 != 0 for layer in range(layers))


def qwen3_next(config: Config) -> Figures:
    """Qwen3-Next: the gated delta rule in three of four layers, and attention with a gate in the others."""
    shared = {"shared_width": config.whole("shared_expert_intermediate_size"), "shared_gate": True}
    found = _qwen(config)
    return found | {"experts": qwen_experts(config, found["layers"], shared)}


def qwen3_5(config: Config) -> Figures:
    """Qwen3.5 without experts."""
    return _qwen(config)


def qwen3_5_moe(config: Config) -> Figures:
    """Qwen3.5 with experts in all layers."""
    named = config.with_fields(intermediate_size=config.get("moe_intermediate_size"))
    return qwen3_next(named.with_fields(norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=None))


def _qwen(config: Config) -> Figures:
    config.must("attn_output_gate", None, True)
    found = llama_like(config)
    layers, interval = found["layers"], config.whole("full_attention_interval")
    kinds = kinds_of_layers(config, layers)
    linear = tuple(kind == LINEAR for kind in kinds or ())
    if kinds is None:
        linear = tuple((layer + 1) % interval != 0 for layer in range(layers))
    return found | {
        "query_key_norm": "head",
        "attention_gate": True,
        "linear_attention": _gated_delta(config, linear) if any(linear) else None,
    }


def _gated_delta(config: Config, layers: tuple[bool, ...]) -> LinearAttention:
    return LinearAttention(
        kind="gated_delta",
        heads=config.whole("linear_num_value_heads"),
        head_width=config.whole("linear_value_head_dim"),
        state_width=config.whole("linear_key_head_dim"),
        groups=config.whole("linear_num_key_heads"),
        taps=config.whole("linear_conv_kernel_dim"),
        layers=layers,
    )
