"""The fields of configs whose layers keep a state: which layers have what, and what is refused."""

from __future__ import annotations

import pytest
from hugging_face_configs import CONFIGS

from parallelism.models import LinearAttention, from_config


def test_each_layer_is_what_the_file_says():
    nano = from_config(CONFIGS["nemotron-3-nano-30b-a3b"])
    assert (nano.layers, nano.layer_parts.count("attention"), sum(nano.linear_attention.layers)) == (52, 29, 23)
    assert [nano.has("feed_forward", layer) for layer in range(7)] == [False, True, False, True, False, False, True]
    assert [nano.is_linear(layer) for layer in range(7)] == [True, False, True, False, True, False, False]
    assert sum(nano.experts.layers) == 23 and nano.experts.shared_width == 3712 and nano.linear_attention.least_step == 0.001
    granite = from_config(CONFIGS["granite-4.0-h-small"])
    assert [layer for layer in range(40) if not granite.is_linear(layer)] == [5, 15, 25, 35]
    assert (granite.positions, granite.layer_parts, granite.experts.count) == ("none", None, 72)
    assert from_config(CONFIGS["granite-4.0-h-without-experts"]).hidden == 72
    bamba = from_config(CONFIGS["bamba-9b"])
    assert bamba.rotated == 64 and bamba.linear_attention.layers.index(False) == 9
    following = from_config(CONFIGS["qwen3-next-80b-a3b"])
    assert following.linear_attention == LinearAttention(
        kind="gated_delta", heads=32, head_width=128, state_width=128, groups=16, layers=(True, True, True, False) * 12)
    assert following.attention_gate and following.experts.shared_gate and following.rotated == 64


def test_older_words_mean_the_same():
    words = ["mamba", "moe", "attention", "mlp"], ["linear_attention", "moe", "full_attention", "mlp"]
    specs = {from_config({"model_type": "nemotron_h", "layers_block_type": each}) for each in words}
    specs |= {from_config({"model_type": "nemotron_h", **each}) for each in ({}, {"hybrid_override_pattern": "ME*-"})}
    assert len(specs) == 1
    other = {"model_type": "nemotron_h", "mamba_n_groups": 4, "mamba_chunk_size": 32}
    assert from_config(other).linear_attention.groups == 4 and from_config(other).linear_attention.chunk == 32
    text = {"hidden_size": 96, "num_hidden_layers": 4, "mtp_num_hidden_layers": 1}
    spec = from_config({"model_type": "qwen3_5", "text_config": text})
    assert spec == from_config({"model_type": "qwen3_5_text", **text})
    assert any("mtp_num_hidden_layers=1 is left out" in remark for remark in spec.remarks)


def test_a_file_without_states_has_none():
    spec = from_config({"model_type": "qwen3_5_text", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2})
    assert spec.linear_attention is None and spec.attention_gate
    dense = from_config({"model_type": "nemotron_h", "layers_block_type": ["attention", "mlp"]})
    assert (dense.linear_attention, dense.experts) == (None, None)


def test_multipliers_of_falcon_h1_are_in_scales_and_weights():
    given = {"key_multiplier": 0.5, "embedding_multiplier": 3.0, "lm_head_multiplier": 0.25, "ssm_in_multiplier": 7.0}
    spec = from_config(CONFIGS["falcon-h1-7b"] | given)
    assert (spec.attention_scale, spec.embedding_scale, spec.logit_scale) == (0.5 / 128**0.5, 3.0, 0.25)
    assert spec == from_config(CONFIGS["falcon-h1-7b"] | given | {"ssm_in_multiplier": 1.0})
    linear = spec.linear_attention
    assert (linear.beside, linear.gate, linear.inner, linear.state_width, linear.groups) == (True, "alone", 3072, 256, 1)
    normed = [from_config(CONFIGS["falcon-h1-7b"] | {"mamba_rms_norm": True, "mamba_norm_before_gate": each}).linear_attention
              for each in (True, False)]
    assert [each.gate for each in normed] == ["last", "first"]


def test_layers_of_olmo_hybrid_have_norms_of_their_own():
    spec = from_config({"model_type": "olmo_hybrid", "rope_parameters": {"rope_theta": None}})
    assert (spec.positions, spec.norm_places, spec.linear_attention.norm_places) == ("none", "after", "before")
    assert spec.linear_attention.layers == ((True,) * 3 + (False,)) * 8 and spec.linear_attention.doubled_rates
    assert (spec.linear_attention.state_width, spec.linear_attention.head_width) == (96, 192)
    assert from_config({"model_type": "olmo_hybrid"}).positions == "rotary"


def test_layers_of_kimi_are_counted_from_1():
    spec = from_config(CONFIGS["kimi-linear-48b-a3b"])
    attending = [layer for layer, is_linear in enumerate(spec.linear_attention.layers) if not is_linear]
    assert attending == [3, 7, 11, 15, 19, 23, 26]
    assert (spec.positions, spec.attention.query_rank, spec.experts.layers.index(True)) == ("none", None, 1)
    own = from_config({"model_type": "kimi_linear"})
    assert [layer for layer, is_linear in enumerate(own.linear_attention.layers) if not is_linear] == [4, 8, 12, 16, 20, 24]
    assert own.cache_bytes(1) - own.cache_bytes(0) == 6 * (512 + 64) * 2
    kinds = ["full_attention", *["linear_attention"] * 26]
    listed = from_config({"model_type": "kimi_linear", "layer_types": kinds, "mlp_layer_types": ["sparse", *["dense"] * 26]})
    assert listed.linear_attention.layers.index(False) == 0 and listed.experts.layers.count(True) == 1


def test_widths_of_lfm2_follow_its_rule():
    fields = {"model_type": "lfm2", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
              "num_key_value_heads": 2, "full_attn_idxs": [1]}
    assert from_config(fields | {"block_ff_dim": 12_288}).hidden == 8192
    assert from_config(fields | {"block_ff_dim": 100, "block_multiple_of": 7}).hidden == 70            # of 66
    assert from_config(fields | {"block_ff_dim": 100, "block_ffn_dim_multiplier": None}).hidden == 66
    assert from_config(fields | {"block_ff_dim": 100, "block_auto_adjust_ff_dim": False}).hidden == 100
    spec = from_config(fields)
    assert spec.tied and spec.linear_attention.layers == (True, False) and spec.rotary_base == 1e6
    assert spec == from_config({**fields, "full_attn_idxs": None, "layer_types": ["conv", "full_attention"]})
    assert from_config(fields | {"full_attn_idxs": None}).linear_attention is None


@pytest.mark.parametrize(("fields", "message"), [
    ({"model_type": "nemotron_h", "moe_latent_size": 1.5}, "moe_latent_size must be a whole number from 1 to"),
    ({"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "layers_block_type must be a list of linear_attention, "),
    ({"model_type": "bamba", "time_step_limit": [0.0, 0.1]}, "time_step_limit must be a lower bound and infinity, got a"),
    ({"model_type": "bamba", "hidden_act": "gelu"}, "hidden_act=.gelu. changes the arithmetic"),
    ({"model_type": "qwen3_next", "attn_output_gate": False}, "attn_output_gate=False changes the arithmetic"),
    ({"model_type": "granitemoehybrid", "position_embedding_type": "alibi"}, "position_embedding_type=.alibi. changes"),
    ({"model_type": "llama", "layer_types": ["linear_attention"] * 32}, "layer_types has .linear_attention., which is not"),
    ({"model_type": "mamba2", "n_groups": 3}, "groups of linear attention must divide its heads, got groups=3 and heads=128"),
])
def test_what_is_not_modelled_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        from_config(fields)
