"""Decoders after GPT-2, with layer norms and no gate: what each is beyond its fields, after transformers 5.24.0."""

from __future__ import annotations

from parallelism.models.hugging_face.config import MOST_LAYERS, Config
from parallelism.models.hugging_face.layers import (
    Figures,
    activation,
    dropouts,
    every,
    sizes,
    width_of_head,
)
from parallelism.models.hugging_face.rotary import rotary_of


def gpt2(config: Config) -> Figures:
    config.must("scale_attn_weights", True)
    config.must("scale_attn_by_inverse_layer_idx", None, False)
    config.must("add_cross_attention", None, False)
    return {
        "layers": config.whole("n_layer", most=MOST_LAYERS),
        "width": config.whole("n_embd"),
        "heads": config.whole("n_head"),
        "feed_forward": config.whole_or_none("n_inner"),
        "vocabulary": config.whole("vocab_size"),
        "sequence": config.whole("n_positions"),
        "tied": config.switch("tie_word_embeddings"),
        "activation": activation(config, "activation_function", gated=False),
        "epsilon": config.number("layer_norm_epsilon"),
        **dropouts(config, "attn_pdrop", "resid_pdrop", "embd_pdrop"),
    }


def gptj(config: Config) -> Figures:
    """GPT-J: attention and feed-forward behind one norm, and a head with a bias."""
    rotated = {
        "partial_rotary_factor": config.whole("rotary_dim")
        / (config.whole("n_embd") // config.whole("n_head"))
    }
    found = gpt2(config)
    named = config.with_fields(**rotated)
    return {
        **found,
        **rotary_of(named, found["width"] // found["heads"], found["sequence"]),
        "biases": ("up", "down", "head"),
        "parallel": "one_norm",
    }


def gpt_neox(config: Config) -> Figures:
    found = sizes(config) | {"key_value_heads": None, "head_width": None}
    return {
        **found,
        **rotary_of(config, width_of_head(found), found["sequence"]),
        **dropouts(config, "attention_dropout", "hidden_dropout", None),
        "activation": activation(config, gated=False),
        "epsilon": config.number("layer_norm_eps"),
        "biases": True if config.switch("attention_bias") else ("up", "down"),
        "parallel": config.switch("use_parallel_residual"),
    }


def mpt(config: Config) -> Figures:
    own = config.within(
        "attn_config", {"attn_type": "multihead_attention", "alibi": True, "alibi_bias_max": 8}
    )
    own.must("attn_type", "multihead_attention")
    own.must("alibi", True)
    own.must("alibi_bias_max", 8)
    for name in ("clip_qkv", "qk_ln", "prefix_lm", "attn_pdrop"):
        own.must(name, None, False, 0)
    config.must("no_bias", True)
    config.must("expansion_ratio", 4)
    config.must("logit_scale", None)
    config.must("resid_pdrop", None, 0)
    config.must("emb_pdrop", None, 0)
    return {
        "layers": config.whole("n_layers", most=MOST_LAYERS),
        "width": config.whole("d_model"),
        "heads": config.whole("n_heads"),
        "vocabulary": config.whole("vocab_size"),
        "sequence": config.whole("max_seq_len"),
        "tied": config.switch("tie_word_embeddings"),
        "activation": "gelu_exact",
        "norm_parameters": "weights",
        "epsilon": config.number("layer_norm_epsilon"),
        "positions": "alibi",
        "biases": False,
        "attention_scale": own.number_or_none("softmax_scale"),
    }


def falcon(config: Config) -> Figures:
    width, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    new = config.switch("new_decoder_architecture")
    several = new or not config.switch("multi_query")
    norms = config.whole_or_none("num_ln_in_parallel_attn") or (2 if new else 1)
    parallel: bool | str = (norms == 2 or "one_norm") if new or config.switch("parallel_attn") else False
    sequence = config.whole("max_position_embeddings")
    found = {
        "layers": config.whole("num_hidden_layers", most=MOST_LAYERS),
        "width": width,
        "heads": heads,
        "key_value_heads": config.whole_or_none("num_kv_heads") if several else 1,
        "feed_forward": config.whole_or_none("ffn_hidden_size"),
        "vocabulary": config.whole("vocab_size"),
        "sequence": sequence,
        "tied": config.switch("tie_word_embeddings"),
        "activation": activation(config, "activation", gated=False),
        "epsilon": config.number("layer_norm_epsilon"),
        "biases": config.switch("bias"),
        "parallel": parallel,
        **dropouts(config, "attention_dropout", "hidden_dropout", None),
    }
    if config.switch("alibi"):
        return found | {"positions": "alibi", "alibi_scale": (width // heads) ** -0.5}
    return found | rotary_of(config, width // heads, sequence)


def bloom(config: Config) -> Figures:
    config.must("apply_residual_connection_post_layernorm", None, False)
    return {
        "layers": config.whole("n_layer", most=MOST_LAYERS),
        "width": config.whole("hidden_size"),
        "heads": config.whole("n_head"),
        "vocabulary": config.whole("vocab_size"),
        "sequence": config.whole("seq_length"),
        "tied": config.switch("tie_word_embeddings"),
        "epsilon": config.number("layer_norm_epsilon"),
        "positions": "alibi",
        "embedding_norm": True,
        **dropouts(config, "attention_dropout", "hidden_dropout", None),
    }


def gpt_bigcode(config: Config) -> Figures:
    """SantaCoder and StarCoder 1: a GPT-2 with one head of keys and values."""
    named = config.with_fields(scale_attn_by_inverse_layer_idx=None)
    return gpt2(named) | {"key_value_heads": 1 if config.switch("multi_query") else None}


def gpt_neo(config: Config) -> Figures:
    """GPT-Neo: scores are not scaled, and ``attention_types`` says which layers have a window."""
    layers = config.whole("num_layers", most=MOST_LAYERS)
    kinds = _kinds_of_attention(config, layers)
    found: Figures = {
        "layers": layers,
        "width": config.whole("hidden_size"),
        "heads": config.whole("num_heads"),
        "feed_forward": config.whole_or_none("intermediate_size"),
        "vocabulary": config.whole("vocab_size"),
        "sequence": config.whole("max_position_embeddings"),
        "tied": config.switch("tie_word_embeddings"),
        "activation": activation(config, "activation_function", gated=False),
        "epsilon": config.number("layer_norm_epsilon"),
        "biases": ("out", "up", "down"),
        "attention_scale": 1.0,
        **dropouts(config, "attention_dropout", "resid_dropout", "embed_dropout"),
    }
    if "local" not in kinds:
        return found
    windows = {
        "window": config.whole("window_size"),
        "full_attention_every": every([kind == "global" for kind in kinds]),
    }
    return found | windows


def _kinds_of_attention(config: Config, layers: int) -> list[str]:
    """``global`` or ``local`` for each layer, by a list of pairs: several kinds, and how often they are repeated."""
    expected = f"a list of kinds, global or local, and their repetitions, {layers} in all"
    given = config.get("attention_types")
    kinds: list[str] = []
    for pair in given if isinstance(given, list | tuple) else ():
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise config.wrong("attention_types", expected, given)
        several, times = pair
        if not isinstance(several, list | tuple) or type(times) is not int or not 0 <= times <= MOST_LAYERS:
            raise config.wrong("attention_types", expected, given)
        kinds += list(several[:MOST_LAYERS]) * times
        if len(kinds) > layers:
            break
    if len(kinds) != layers or any(kind not in ("global", "local") for kind in kinds):
        raise config.wrong("attention_types", expected, given)
    return kinds


def opt(config: Config) -> Figures:
    """OPT.  The two rows in front of its table of positions, which no token reads, are left out."""
    width = config.whole("hidden_size")
    config.must("do_layer_norm_before", True)
    config.must("_remove_final_layer_norm", None, False)
    config.must("layer_norm_elementwise_affine", True)
    config.must("word_embed_proj_dim", None, width)
    config.must("layerdrop", None, 0)
    return {
        "layers": config.whole("num_hidden_layers", most=MOST_LAYERS),
        "width": width,
        "heads": config.whole("num_attention_heads"),
        "feed_forward": config.whole("ffn_dim"),
        "vocabulary": config.whole("vocab_size"),
        "sequence": config.whole("max_position_embeddings"),
        "tied": config.switch("tie_word_embeddings"),
        "activation": activation(config, "activation_function", gated=False),
        "biases": config.switch("enable_bias"),
        **dropouts(config, "attention_dropout", "dropout", None),
        "remarks": (
            f"two rows of positions that no token reads are left out: {2 * width:,} parameters of transformers",
        ),
    }
