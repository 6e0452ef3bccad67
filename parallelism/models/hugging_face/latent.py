"""Latent attention, as DeepSeek's configurations say it."""

from __future__ import annotations

from parallelism.models.hugging_face.config import Config
from parallelism.models.hugging_face.layers import Figures, llama_like, sizes
from parallelism.models.hugging_face.rotary import latent_scale, rotary_of
from parallelism.models.latent_attention import LatentAttention


def latent_attention(config: Config) -> Figures:
    """A Llama with latent attention in place of heads of queries, keys and values."""
    named = config.with_fields(head_dim=None)
    found = sizes(named) | {"key_value_heads": None, "head_width": None}
    width = config.whole_or_none("v_head_dim")
    latent = LatentAttention(
        query_rank=config.whole_or_none("q_lora_rank"),
        key_value_rank=config.whole("kv_lora_rank"),
        head_width=config.whole("qk_nope_head_dim"),
        rotary_width=config.whole("qk_rope_head_dim"),
        value_width=found["width"] // found["heads"] if width is None else width,
    )
    attention = ("query_down", "key_value_down", "out") if config.switch("attention_bias") else ()
    return {
        **llama_like(named),
        **found,
        **rotary_of(config, latent.rotary_width, found["sequence"]),
        "rotary_width": None,
        "biases": attention,
        "attention": latent,
        "attention_scale": latent_scale(config, latent.query_width),
    }
