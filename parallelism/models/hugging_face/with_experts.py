"""Architectures with experts: what each is beyond its fields, after the modelling code of transformers 5.24.0."""

from __future__ import annotations

from typing import Any

from parallelism.models.expert_layers import Experts
from parallelism.models.hugging_face.config import Config
from parallelism.models.hugging_face.dense import ernie_biases, exaone4, granite_windows, multipliers
from parallelism.models.hugging_face.latent import latent_attention
from parallelism.models.hugging_face.layers import Figures, every, llama_like, windows

GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The rotary positions of a gpt-oss that says nothing about them."""


def mixtral(config: Config) -> Figures:
    config.must("router_jitter_noise", None, 0)
    found = llama_like(config, 1000000.0) | {"biases": ()}
    found |= windows(config, found["layers"], [False] * found["layers"])
    return found | {"experts": Experts(**_chosen(config, "num_local_experts"))}


def qwen2_moe(config: Config) -> Figures:
    found = llama_like(config)
    layers = found["layers"]
    full = [True] * layers
    if config.switch("use_sliding_window"):
        last = config.whole("max_window_layers", 0)
        full = [layer % 2 == 1 or layer >= last for layer in range(layers)]
    shared = {"shared_width": config.whole("shared_expert_intermediate_size"), "shared_gate": True}
    return {
        **found,
        **windows(config, layers, full),
        "biases": ("qkv",) if config.switch("qkv_bias") else (),
        "experts": qwen_experts(config, layers, shared),
    }


def qwen3_moe(config: Config) -> Figures:
    found = llama_like(config) | {"query_key_norm": "head"}
    layers = found["layers"]
    if config.switch("use_sliding_window"):
        found |= windows(config, layers, [False] * layers)
    return found | {"experts": qwen_experts(config, layers, {})}


def qwen_experts(config: Config, layers: int, shared: dict[str, Any]) -> Experts | None:
    """The experts of Qwen's models, with what shared ones they have; None without experts."""
    if config.get("num_experts") == 0:
        return None
    step, dense = config.whole("decoder_sparse_step"), config.numbers("mlp_only_layers")
    listed = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
    if not any(listed):
        return None
    return Experts(
        **_chosen(config, "num_experts"),
        width=config.whole("moe_intermediate_size"),
        normalized=config.switch("norm_topk_prob"),
        every=step,
        layers=listed if dense else None,
        **shared,
    )


def olmoe(config: Config, base: float = 10000.0) -> Figures:
    config.must("clip_qkv", None)
    experts = Experts(**_chosen(config, "num_experts"), normalized=config.switch("norm_topk_prob"))
    found = llama_like(config, base)
    return found | {"query_key_norm": "all_heads", "experts": experts}


def flex_olmo(config: Config) -> Figures:
    """FlexOlmo: the experts of OLMoE in the blocks of OLMo 2."""
    return olmoe(config, 500000.0) | {"norm_places": "after"}


def granite_moe(config: Config) -> Figures:
    shared = config.whole("shared_intermediate_size", 0) if config.get("shared_intermediate_size") else 0
    experts = Experts(**_chosen(config, "num_local_experts"), shared_width=shared)
    return llama_like(config) | multipliers(config) | {"experts": experts}


def granite_moe_swa(config: Config) -> Figures:
    return granite_moe(config) | granite_windows(config)


def mellum(config: Config) -> Figures:
    """Mellum 2: the experts of Qwen 3, and layers with a window."""
    found = llama_like(config) | {"query_key_norm": "head"}
    layers = found["layers"]
    sparse = _sparse_layers(config, layers)
    experts = Experts(
        **_chosen(config, "num_experts"),
        width=config.whole("moe_intermediate_size"),
        normalized=config.switch("norm_topk_prob"),
        layers=sparse,
    )
    has_experts = sparse is None or any(sparse)
    return {
        **found,
        **windows(config, layers, [True] * layers),
        "experts": experts if has_experts else None,
    }


def aria(config: Config) -> Figures:
    """The language model of Aria."""
    config.must("mlp_bias", None, False)
    width = config.whole("intermediate_size")
    shared = width * config.whole("moe_num_shared_experts", least=0)
    experts = Experts(**_chosen(config, "moe_num_experts"), width=width, shared_width=shared)
    return llama_like(config) | {"experts": experts}


def ernie4_5_moe(config: Config) -> Figures:
    """ERNIE 4.5: softmax routers with a bias that balances loads, in the layers between two bounds."""
    found = llama_like(config, 500000.0)
    layers, interval = found["layers"], config.whole("moe_layer_interval")
    first, last = (
        config.whole("moe_layer_start_index", least=0),
        config.whole("moe_layer_end_index", least=-1),
    )
    last = layers - 1 if last == -1 else last
    with_experts = tuple((i + 1) % interval == 0 and first <= i <= last for i in range(layers))
    biases = ernie_biases(config)
    if not any(with_experts):
        return found | {"biases": biases}
    shared = config.whole("moe_num_shared_experts", least=0)
    width = config.whole("moe_intermediate_size")
    experts = Experts(
        **_chosen(config, "num_experts"),
        width=width,
        shared_width=width * shared,
        balance_bias=True,
        **_places_of_experts(with_experts),
    )
    if biases:
        biases = (*biases, *(("shared_gate", "shared_up", "shared_down") if shared else ()), "head")
    return found | {"biases": biases, "experts": experts}


def exaone_moe(config: Config) -> Figures:
    """K-EXAONE: the experts of DeepSeek-V3, and layers without a window, which have no positions."""
    plain = exaone4(config)
    return plain | {
        "norm_places": "before",
        "experts": _routed(config, plain["layers"], balanced_router(config)),
    }


def deepseek_v2(config: Config) -> Figures:
    config.must("scoring_func", None, "softmax")
    method = config.get("topk_method")
    config.must("topk_method", "greedy", "group_limited_greedy")
    groups: dict[str, Any] = {}
    if method == "group_limited_greedy":
        groups = {"groups": config.whole("n_group"), "groups_chosen": config.whole("topk_group")}
    found = _deepseek(config, {"normalized": config.switch("norm_topk_prob"), **groups})
    mlp = (
        ("gate", "up", "down", "shared_gate", "shared_up", "shared_down") if config.switch("mlp_bias") else ()
    )
    return found | {"biases": (*found["biases"], *mlp)}


def deepseek_v3(config: Config) -> Figures:
    return _deepseek(config, balanced_router(config))


def balanced_router(config: Config) -> dict[str, Any]:
    """The router of DeepSeek-V3: sigmoids, groups, and a bias for each expert that balances their loads."""
    config.must("scoring_func", None, "sigmoid")
    config.must("topk_method", None, "noaux_tc")
    groups, count = config.whole("n_group"), config.whole("n_routed_experts")
    return {
        "router": "sigmoid",
        "balance_bias": True,
        "normalized": config.switch("norm_topk_prob"),
        "groups": groups,
        "groups_chosen": config.whole("topk_group"),
        "group_best": min(2, max(1, count // groups)),
    }


def glm4_moe(config: Config) -> Figures:
    """GLM-4.5: the experts of DeepSeek-V3 behind grouped queries."""
    found = llama_like(config)
    return {
        **found,
        "biases": ("qkv",) if config.switch("attention_bias") else (),
        "query_key_norm": "head" if config.switch("use_qk_norm") else False,
        "experts": _routed(config, found["layers"], balanced_router(config)),
    }


def dots1(config: Config) -> Figures:
    """dots.llm1: the same with norms of queries and keys, and windows from ``max_window_layers`` on."""
    found = llama_like(config) | {"query_key_norm": "head"}
    layers, first = found["layers"], config.whole("max_window_layers", 0)
    found |= windows(config, layers, [layer < first for layer in range(layers)])
    return found | {"experts": _routed(config, layers, balanced_router(config))}


def minimax_m2(config: Config) -> Figures:
    config.must("router_jitter_noise", None, 0)
    rotated = {}
    if config.get("rotary_dim") is not None:
        rotated = {"partial_rotary_factor": config.whole("rotary_dim") / config.whole("head_dim")}
    named = config.with_fields(**rotated)
    router = Experts(**_chosen(config, "num_local_experts"), router="sigmoid", balance_bias=True)
    return llama_like(named, 5000000.0) | {"query_key_norm": "all_heads", "experts": router}


def _deepseek(config: Config, router: dict[str, Any]) -> Figures:
    config.must("moe_layer_freq", None, 1)
    found = latent_attention(config)
    return found | {"experts": _routed(config, found["layers"], router)}


def _routed(config: Config, layers: int, router: dict[str, Any]) -> Experts | None:
    """Experts by DeepSeek's fields, behind some dense layers; None if all are dense."""
    width, dense = config.whole("moe_intermediate_size"), config.whole("first_k_dense_replace", 0)
    sparse = _sparse_layers(config, layers) or tuple(layer >= dense for layer in range(layers))
    if not any(sparse):
        return None
    shared = config.whole("n_shared_experts", 0) if config.get("n_shared_experts") else 0
    return Experts(
        **_chosen(config, "n_routed_experts"),
        width=width,
        shared_width=width * shared,
        **_places_of_experts(sparse),
        scale=config.number("routed_scaling_factor"),
        **router,
    )


def _sparse_layers(config: Config, layers: int) -> tuple[bool, ...] | None:
    """Whether each layer has experts, by ``mlp_layer_types``; None where the file does not say it."""
    kinds = config.listed("mlp_layer_types", layers, (str,))
    if kinds is None:
        return None
    for kind in kinds:
        if kind not in ("dense", "sparse"):
            raise config.wrong("mlp_layer_types", "a list of dense and sparse", kind)
    return tuple(kind == "sparse" for kind in kinds)


def _places_of_experts(sparse: tuple[bool, ...]) -> dict[str, Any]:
    """The layers with experts: how many dense ones come first, or, where dense ones follow, each layer by itself."""
    first = sparse.index(True)
    return {"dense_layers": first} if all(sparse[first:]) else {"layers": sparse}


def gpt_oss(config: Config) -> Figures:
    config.must("swiglu_alpha", 1.702)
    config.must("swiglu_limit", 7.0)
    rope = (
        {}
        if config.get("rope_scaling") or config.get("rope_parameters")
        else {"rope_parameters": GPT_OSS_YARN}
    )
    found = llama_like(config.with_fields(**rope), 150000.0)
    layers = found["layers"]
    return {
        **found,
        **windows(config, layers, [layer % 2 == 1 for layer in range(layers)]),
        "activation": "clamped_swiglu",
        "attention_sinks": True,
        "biases": (*found["biases"], "router", "expert_gate", "expert_up", "expert_down"),
        "experts": Experts(**_chosen(config, "num_local_experts")),
    }


def llama4(config: Config) -> Figures:
    found = llama_like(config, 500000.0)
    layers, sequence, interval = found["layers"], found["sequence"], config.whole("no_rope_layer_interval")
    given = config.listed("no_rope_layers", layers, (int,))  # 1 where there are rotary positions
    rotated = (
        [(layer + 1) % interval != 0 for layer in range(layers)] if given is None else [*map(bool, given)]
    )
    _check_llama4(config, rotated, sequence)
    step = config.whole("interleave_moe_layer_step")
    listed = config.numbers("moe_layers")
    experts = Experts(
        **_chosen(config, "num_local_experts"),
        width=config.whole("intermediate_size"),
        shared_width=config.whole("intermediate_size"),
        every=step,
        layers=None
        if config.get("moe_layers") is None
        else tuple(layer in listed for layer in range(layers)),
        router="sigmoid",
        normalized=False,
        gates_inputs=True,
    )
    return {
        **found,
        "feed_forward": config.whole("intermediate_size_mlp"),
        "unrotated_every": every([not each for each in rotated]),
        "query_key_norm": "without_weights" if config.switch("use_qk_norm") else False,
        "experts": experts,
    }


def _check_llama4(config: Config, rotated: list[bool], sequence: int) -> None:
    """Refuses what begins beyond a number of tokens, where sequences are longer."""
    chunk = config.whole_or_none("attention_chunk_size")
    types = config.listed("layer_types", len(rotated), (str,))
    chunked = any(rotated) if types is None else "chunked_attention" in types
    if chunk is not None and chunked and chunk < sequence:
        raise ValueError(
            f"{config.name}: attention_chunk_size={chunk}: chunked attention is not modelled; with sequences of at most "
            f"{chunk} tokens, not {sequence}, it is full attention (sequence=, --seq-length)"
        )
    tuned, floor = config.switch("attn_temperature_tuning"), config.number("floor_scale")
    if tuned and not all(rotated) and sequence >= floor:
        raise ValueError(
            f"{config.name}: attn_temperature_tuning is not modelled; with sequences of fewer than floor_scale={floor:g} "
            f"tokens, not {sequence}, it changes nothing (sequence=, --seq-length)"
        )


def grok1(config: Config) -> Figures:
    """Grok 1 (https://github.com/xai-org/grok-1, ``model.py``), by the fields of its ports to transformers."""
    own = {"hidden_act": "gelu_pytorch_tanh", "attention_dropout": 0.0}
    found = llama_like(config.with_fields(**own)) | {"biases": ()}
    return {
        **found,
        "norm_places": "both",
        "attention_scale": config.number("attn_output_multiplier"),
        "attention_softcap": config.number("max_attn_value"),
        "embedding_scale": config.number("embedding_multiplier_scale"),
        "logit_scale": config.number("output_multiplier_scale"),
        "experts": Experts(**_chosen(config, "num_experts"), normalized=False),
    }


def _chosen(config: Config, count: str) -> dict[str, Any]:
    return {"count": config.whole(count), "chosen": config.whole("num_experts_per_tok")}
