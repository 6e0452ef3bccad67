"""Architectures without experts: what each is beyond its fields, after the modelling code of transformers 5.24.0."""

from __future__ import annotations

from math import sqrt

from parallelism.models.hugging_face.config import MOST_LAYERS, Config
from parallelism.models.hugging_face.layers import (
    Figures,
    activation,
    all_biases,
    every,
    llama_like,
    sizes,
    width_of_head,
    windows,
)
from parallelism.models.hugging_face.rotary import rotary_of


def llama(config: Config) -> Figures:
    """Llama 1 to 3, SmolLM 1 and 2."""
    return llama_like(config) | {"biases": all_biases(config)}


def mistral(config: Config) -> Figures:
    found = llama_like(config)
    return found | {"biases": ()} | windows(config, found["layers"], [False] * found["layers"])


def qwen2(config: Config) -> Figures:
    found = llama_like(config)
    return found | {"biases": ("qkv",)} | qwen_windows(config, found["layers"])


def qwen3(config: Config) -> Figures:
    found = llama_like(config)
    return found | {"query_key_norm": "head"} | qwen_windows(config, found["layers"])


def qwen_windows(config: Config, layers: int) -> Figures:
    """The windows of Qwen's dense models: of the layers from ``max_window_layers`` on."""
    first = config.whole("max_window_layers", 0)
    found = windows(config, layers, [layer < first for layer in range(layers)])
    return found if config.switch("use_sliding_window") else {}


def gemma(config: Config) -> Figures:
    """Gemma 1, whose ``gelu`` is the tanh form."""
    config.must("use_bidirectional_attention", None, False)
    found = llama_like(config)
    own = {"activation": "geglu"} if config.get("hidden_act") == "gelu" else {}
    return found | own | {"embedding_scale": sqrt(found["width"])}


def gemma2(config: Config) -> Figures:
    return _gemma(config, 2)


def gemma3(config: Config) -> Figures:
    pattern = config.whole("sliding_window_pattern")
    found = _gemma(config, pattern) | {"query_key_norm": "head"}
    local = config.number("rope_local_base_freq", 10000.0)
    return {"window_rotary_base": local} | found if found.get("window") else found


def _gemma(config: Config, pattern: int) -> Figures:
    config.must("use_bidirectional_attention", None, False)
    named = Config(
        config.name, {**config.values, "hidden_act": config.get("hidden_activation")}, config.defaults
    )
    found = llama_like(named, base=config.number("rope_theta", 10000.0))
    layers, scalar = found["layers"], config.number("query_pre_attn_scalar")
    return {
        **found,
        **windows(config, layers, [(layer + 1) % pattern == 0 for layer in range(layers)]),
        "embedding_scale": sqrt(found["width"]),
        "norm_places": "both",
        "attention_scale": None if scalar == width_of_head(found) else scalar**-0.5,
        "attention_softcap": config.number_or_none("attn_logit_softcapping"),
        "logit_softcap": config.number_or_none("final_logit_softcapping"),
    }


def phi(config: Config) -> Figures:
    """Phi 1 to 2: attention and feed-forward behind one norm, and a head with a bias."""
    found = sizes(config)
    return {
        **found,
        **rotary_of(config, width_of_head(found), found["sequence"]),
        **dropouts(config, "attention_dropout", "resid_pdrop", "embd_pdrop"),
        "activation": activation(config, gated=False),
        "epsilon": config.number("layer_norm_eps"),
        "biases": ("qkv", "out", "up", "down", "head"),
        "parallel": "one_norm",
        "query_key_norm": "head" if config.switch("qk_layernorm") else False,
    }


def phi3(config: Config) -> Figures:
    found = llama_like(config) | {"biases": ()}
    found |= dropouts(config, "attention_dropout", "resid_pdrop", None)
    return found | windows(config, found["layers"], [False] * found["layers"])


def olmo(config: Config) -> Figures:
    config.must("clip_qkv", None)
    plain = Config(config.name, {**config.values, "rms_norm_eps": 1e-5}, config.defaults)
    found = llama_like(plain)
    return found | {"norm": "layer", "norm_parameters": "none"}


def olmo2(config: Config) -> Figures:
    found = llama_like(config)
    return found | {"norm_places": "after", "query_key_norm": "all_heads"}


def olmo3(config: Config) -> Figures:
    found = llama_like(config, 500000.0) | {"norm_places": "after", "query_key_norm": "all_heads"}
    layers = found["layers"]
    return found | windows(config, layers, [(layer + 1) % 4 == 0 for layer in range(layers)])


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


def starcoder2(config: Config) -> Figures:
    found = sizes(config)
    return {
        **found,
        **rotary_of(config, width_of_head(found), found["sequence"]),
        **windows(config, found["layers"], [False] * found["layers"]),
        **dropouts(config, "attention_dropout", "residual_dropout", "embedding_dropout"),
        "activation": activation(config, gated=False),
        "epsilon": config.number("norm_epsilon"),
        "biases": config.switch("use_bias"),
    }


def nemotron(config: Config) -> Figures:
    """Nemotron 3 and 4; the weight of a norm is stored less 1."""
    found = sizes(config)
    return {
        **found,
        **rotary_of(config, width_of_head(found), found["sequence"]),
        "activation": activation(config, gated=False),
        "epsilon": config.number("norm_eps"),
        "biases": all_biases(config),
        "attention_dropout": config.number("attention_dropout", 0.0),
    }


def granite(config: Config) -> Figures:
    return llama_like(config) | multipliers(config) | {"biases": all_biases(config)}


def multipliers(config: Config) -> Figures:
    """Those of Granite."""
    return {
        "embedding_scale": config.number("embedding_multiplier"),
        "attention_scale": config.number("attention_multiplier"),
        "residual_scale": config.number("residual_multiplier"),
        "logit_scale": 1 / config.number("logits_scaling"),
    }


def smollm3(config: Config) -> Figures:
    found = llama_like(config, 2000000.0)
    layers, interval = found["layers"], config.whole("no_rope_layer_interval")
    rotated = config.listed("no_rope_layers", layers, (int,))  # 1 where there are rotary positions
    plain = [(layer + 1) % interval == 0 for layer in range(layers)]
    if rotated is not None:
        plain = [not each for each in rotated]
    found |= {"unrotated_every": every(plain), "biases": all_biases(config)}
    if not config.switch("use_sliding_window"):
        return found
    return found | windows(config, layers, [not each for each in plain])


def seed_oss(config: Config) -> Figures:
    found = llama_like(config) | dropouts(config, "attention_dropout", "residual_dropout", None)
    biases = {
        "qkv": config.switch("attention_bias"),
        "out": config.switch("attention_out_bias"),
        **dict.fromkeys(("gate", "up", "down"), config.switch("mlp_bias")),
    }
    return found | {"biases": tuple(name for name, has_bias in biases.items() if has_bias)}


def arcee(config: Config) -> Figures:
    """Arcee's AFM: a Llama whose feed-forward has no gate."""
    plain = Config(config.name, {**config.values, "hidden_act": "silu"}, config.defaults)
    found = llama_like(plain) | {"activation": activation(config, gated=False)}
    mlp = ("up", "down") if config.switch("mlp_bias") else ()
    return found | {"biases": (*found["biases"], *mlp)}


def glm(config: Config) -> Figures:
    """GLM-4 of 2024: half of the features of a head are rotated."""
    return llama_like(config) | {"biases": ("qkv",) if config.switch("attention_bias") else ()}


def glm4(config: Config) -> Figures:
    """GLM-4 of 2025, with norms around attention and feed-forward."""
    return glm(config) | {"norm_places": "both"}


def exaone4(config: Config) -> Figures:
    """Layers without a window have no positions, if others have one."""
    found = llama_like(config) | {"norm_places": "after", "query_key_norm": "head"}
    layers, full = found["layers"], [True]
    if config.get("sliding_window") is not None and config.get("layer_types") is None:
        pattern = config.whole("sliding_window_pattern")
        full = [(layer + 1) % pattern == 0 for layer in range(layers)]
    found |= windows(config, layers, full)
    return found | {"unrotated_every": found.get("full_attention_every")}


def stablelm(config: Config) -> Figures:
    config.must("qk_layernorm", None, False)
    named = Config(
        config.name, {**config.values, "rms_norm_eps": config.get("layer_norm_eps")}, config.defaults
    )
    return {
        **llama_like(named),
        **dropouts(config, "attention_dropout", "hidden_dropout", None),
        "norm": "layer",
        "biases": ("qkv",) if config.switch("use_qkv_bias") else (),
        "parallel": "one_norm" if config.switch("use_parallel_residual") else False,
    }


def gptj(config: Config) -> Figures:
    """GPT-J: attention and feed-forward behind one norm, and a head with a bias."""
    rotated = {
        "partial_rotary_factor": config.whole("rotary_dim")
        / (config.whole("n_embd") // config.whole("n_head"))
    }
    found = gpt2(config)
    named = Config(config.name, {**config.values, **rotated}, config.defaults)
    return {
        **found,
        **rotary_of(named, found["width"] // found["heads"], found["sequence"]),
        "biases": ("up", "down", "head"),
        "parallel": "one_norm",
    }


def cohere(config: Config) -> Figures:
    config.must("use_qk_norm", None, False)
    return _cohere(config, 500000.0)


def cohere2(config: Config) -> Figures:
    """Layers without a window have no positions."""
    found = _cohere(config, 10000.0)
    layers, pattern = found["layers"], config.whole("sliding_window_pattern")
    found |= windows(config, layers, [(layer + 1) % pattern == 0 for layer in range(layers)])
    return found | {"unrotated_every": found.get("full_attention_every")}


def _cohere(config: Config, base: float) -> Figures:
    named = Config(
        config.name, {**config.values, "rms_norm_eps": config.get("layer_norm_eps")}, config.defaults
    )
    return {
        **llama_like(named, base),
        "norm": "layer",
        "norm_parameters": "weights",
        "parallel": "one_norm",
        "logit_scale": config.number("logit_scale"),
    }


def dropouts(config: Config, attention: str, hidden: str, embedding: str | None) -> Figures:
    """The rates of dropout.  A model has one rate of hidden values, that behind the embedding included."""
    rates = {name: config.number(name, 0.0) for name in (attention, hidden, embedding) if name is not None}
    if embedding is not None and rates[embedding] != rates[hidden]:
        raise ValueError(
            f"{config.name}: {embedding}={rates[embedding]:g} must be {hidden}={rates[hidden]:g}: dropout behind the "
            "embedding has the rate of hidden values"
        )
    return {"attention_dropout": rates[attention], "hidden_dropout": rates[hidden]}
