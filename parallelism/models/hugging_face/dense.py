"""Architectures without experts: what each is beyond its fields, after the modelling code of transformers 5.24.0."""

from __future__ import annotations

from math import sqrt

from parallelism.models.hugging_face.config import MOST_LAYERS, Config
from parallelism.models.hugging_face.latent import latent_attention
from parallelism.models.hugging_face.layers import (
    Figures,
    activation,
    all_biases,
    dropouts,
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
    named = config.with_fields(hidden_act=config.get("hidden_activation"))
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
    plain = config.with_fields(rms_norm_eps=1e-5)
    found = llama_like(plain)
    return found | {"norm": "layer", "norm_parameters": "none"}


def olmo2(config: Config) -> Figures:
    found = llama_like(config)
    return found | {"norm_places": "after", "query_key_norm": "all_heads"}


def olmo3(config: Config) -> Figures:
    found = llama_like(config, 500000.0) | {"norm_places": "after", "query_key_norm": "all_heads"}
    layers = found["layers"]
    return found | windows(config, layers, [(layer + 1) % 4 == 0 for layer in range(layers)])


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
    plain = config.with_fields(hidden_act="silu")
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
    named = config.with_fields(rms_norm_eps=config.get("layer_norm_eps"))
    return {
        **llama_like(named),
        **dropouts(config, "attention_dropout", "hidden_dropout", None),
        "norm": "layer",
        "biases": ("qkv",) if config.switch("use_qkv_bias") else (),
        "parallel": "one_norm" if config.switch("use_parallel_residual") else False,
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
    named = config.with_fields(rms_norm_eps=config.get("layer_norm_eps"))
    return {
        **llama_like(named, base),
        "norm": "layer",
        "norm_parameters": "weights",
        "parallel": "one_norm",
        "logit_scale": config.number("logit_scale"),
    }


def vaultgemma(config: Config) -> Figures:
    """Gemma 2 without the norms behind attention and feed-forward."""
    return _gemma(config, 2) | {"norm_places": "before"}


def persimmon(config: Config) -> Figures:
    found = sizes(config) | {"key_value_heads": None, "head_width": None}
    return {
        **found,
        **rotary_of(config, width_of_head(found), found["sequence"]),
        **dropouts(config, "attention_dropout", "hidden_dropout", None),
        "activation": activation(config, gated=False),
        "epsilon": config.number("layer_norm_eps"),
        "query_key_norm": "head" if config.switch("qk_layernorm") else False,
    }


def ernie4_5(config: Config) -> Figures:
    """ERNIE 4.5 without experts."""
    return llama_like(config, 500000.0) | {"biases": ernie_biases(config)}


def ernie_biases(config: Config) -> tuple[str, ...]:
    """The products that have biases by ``use_bias``."""
    return ("qkv", "out", "gate", "up", "down") if config.switch("use_bias") else ()


def helium(config: Config) -> Figures:
    """Helium: a Llama whose product behind attention has no bias."""
    found = llama_like(config, 100000.0)
    return found | {"biases": tuple(name for name in all_biases(config) if name != "out")}


def cwm(config: Config) -> Figures:
    """Code World Model: of four layers the first has no window."""
    found = llama_like(config, 1000000.0) | {"biases": ()}
    layers = found["layers"]
    return found | windows(config, layers, [layer % 4 == 0 for layer in range(layers)])


def hyperclovax(config: Config) -> Figures:
    """HyperCLOVA X: a Granite whose logits are multiplied, with norms around attention and feed-forward."""
    scale = config.number_or_none("attention_multiplier")
    found = granite(config.with_fields(attention_multiplier=1.0 if scale is None else scale))
    found |= {"attention_scale": scale, "logit_scale": config.number("logits_scaling")}
    return found | ({"norm_places": "both"} if config.switch("use_post_norm") else {})


def granite_swa(config: Config) -> Figures:
    """A Granite with windows and a learned score of each head in the sum of the softmax."""
    return granite(config) | granite_windows(config)


def granite_windows(config: Config) -> Figures:
    """What Granite's models with windows have beyond the others: sinks, windows, and layers without positions."""
    layers = config.whole("num_hidden_layers", most=MOST_LAYERS)
    found = windows(config, layers, [layer % 4 == 0 for layer in range(layers)])
    bases = config.listed("layer_rope_theta", layers, (int, float))
    if bases is not None:
        rotated = sorted({float(base) for base in bases if base})
        if len(rotated) > 1:
            raise config.wrong("layer_rope_theta", "one base, or 0 where there are no positions", bases)
        if rotated:
            found["rotary_base"] = rotated[0]
        found["unrotated_every"] = every([not base for base in bases])
    return found | {"attention_sinks": True}


def jais2(config: Config) -> Figures:
    """Jais 2: a Llama with layer norms, and a feed-forward without a gate."""
    found = llama_like(config.with_fields(rms_norm_eps=config.get("layer_norm_eps"), hidden_act="silu"))
    mlp = ("up", "down") if config.switch("mlp_bias") else ()
    return found | {
        "norm": "layer",
        "activation": activation(config, gated=False),
        "biases": (*found["biases"], *mlp),
    }


def ministral3(config: Config) -> Figures:
    """Ministral 3: a Mistral that multiplies the queries of tokens beyond its first training length."""
    found = mistral(config)
    rope = config.within("rope_parameters", {})
    beta = rope.number("llama_4_scaling_beta", 0.0)
    length = rope.whole_or_none("original_max_position_embeddings")
    if beta and length is not None and found["sequence"] > length:
        raise ValueError(
            f"{config.name}: llama_4_scaling_beta={beta:g} is not modelled; with sequences of at most {length} tokens, "
            f"not {found['sequence']}, it changes nothing (sequence=, --seq-length)"
        )
    return found


def nanochat(config: Config) -> Figures:
    """nanochat: norms without weights, one of them behind the embedding, and queries and keys of unit length."""
    plain = config.with_fields(hidden_act="silu")
    return llama_like(plain) | {
        "activation": activation(config, gated=False),
        "norm_parameters": "none",
        "embedding_norm": True,
        "query_key_norm": "without_weights",
        "logit_softcap": config.number_or_none("final_logit_softcapping"),
    }


def minicpm3(config: Config) -> Figures:
    """MiniCPM 3: latent attention, and factors for embedding, residual sums and logits."""
    found = latent_attention(config)
    layers, width = found["layers"], found["width"]
    depth, base = config.number_or_none("scale_depth"), config.number_or_none("dim_model_base")
    return found | {
        "embedding_scale": config.number("scale_emb"),
        "residual_scale": 1.0 if depth is None else depth / sqrt(layers),
        "logit_scale": 1.0 if base is None else base / width,
        "biases": (*found["biases"], *(("gate", "up", "down") if config.switch("mlp_bias") else ())),
    }


def youtu(config: Config) -> Figures:
    """Youtu-LLM: the latent attention of DeepSeek-V3 without experts."""
    return latent_attention(config)
