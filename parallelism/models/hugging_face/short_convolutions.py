"""LFM2: short convolutions between two gates in most layers, and attention in the others; after transformers 5.24.0."""

from __future__ import annotations

from parallelism.models.expert_layers import Experts
from parallelism.models.hugging_face.config import Config
from parallelism.models.hugging_face.layers import Figures, sizes, width_of_head
from parallelism.models.hugging_face.rotary import rotary_of
from parallelism.models.linear_attention import CONVOLUTION, LinearAttention

CONVOLVED, FULL = "conv", "full_attention"
"""The words for kinds of layers."""


def lfm2(config: Config) -> Figures:
    """LFM2; its feed-forward is as wide as a rule makes of what the file says."""
    return _lfm2(config) | {"feed_forward": _adjusted(config)}


def lfm2_moe(config: Config) -> Figures:
    """LFM2 with experts behind the first layers."""
    experts = Experts(
        count=config.whole("num_experts"),
        chosen=config.whole("num_experts_per_tok"),
        width=config.whole("moe_intermediate_size"),
        dense_layers=config.whole("num_dense_layers", least=0),
        router="sigmoid",
        normalized=config.switch("norm_topk_prob"),
        balance_bias=config.switch("use_expert_bias"),
        scale=config.number("routed_scaling_factor"),
    )
    return _lfm2(config) | {"experts": experts}


def _lfm2(config: Config) -> Figures:
    found = sizes(config)
    layers, heads = found["layers"], found["heads"]
    kinds = config.listed("layer_types", layers, (str,))
    if kinds is None:
        full = config.numbers("full_attn_idxs") or set(range(layers))
        kinds = [FULL if layer in full else CONVOLVED for layer in range(layers)]
    convolved = tuple(kind == CONVOLVED for kind in kinds)
    linear = LinearAttention(
        kind=CONVOLUTION,
        heads=heads,
        groups=heads,
        head_width=found["width"] // heads,
        taps=config.whole("conv_L_cache"),
        layers=convolved,
    )
    has_bias = config.switch("conv_bias")
    return {
        **found,
        **rotary_of(config, width_of_head(found), found["sequence"], 1_000_000.0),
        "activation": "swiglu",
        "norm": "rms",
        "epsilon": config.number("norm_eps"),
        "query_key_norm": "head",
        "biases": ("state_in", "convolution", "state_out") if has_bias else (),
        "linear_attention": linear if any(convolved) else None,
    }


def _adjusted(config: Config) -> int:
    """Two thirds of the width of the file, times a factor, rounded up to a multiple."""
    width = config.whole("intermediate_size")
    if not config.switch("block_auto_adjust_ff_dim"):
        return width
    width = int(2 * width / 3)
    factor = config.number_or_none("block_ffn_dim_multiplier")
    if factor is None:
        return width
    multiple = config.whole("block_multiple_of")
    return -(-int(factor * width) // multiple) * multiple
