"""The architectures that are read: for each the function that reads it, and the fields of its configuration class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parallelism.models.hugging_face import (
    class_defaults as defaults,
    dense,
    expert_defaults,
    gpt_like,
    hybrid,
    hybrid_defaults,
    short_convolutions,
    with_experts,
)
from parallelism.models.hugging_face.config import Config


@dataclass(frozen=True)
class Architecture:
    """How the figures of a `TransformerSpec` are read from the fields of a file."""

    read: Callable[[Config], dict[str, Any]]
    defaults: Mapping[str, Any]
    others: Mapping[str, str] = field(default_factory=dict)
    """Further names of fields, in old files."""
    kinds: tuple[str, ...] = ()
    """Kinds of layers that it reads beside full attention and attention with a window."""


_EXPERTS = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}
_DEEPSEEK = {"n_routed_experts": "num_local_experts"}
_SHARED_AND_ROUTED = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}

_STATES = (hybrid.LINEAR, *hybrid.OLDER_KINDS)
_NEMOTRON_H_NAMES = {
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "chunk_size": "mamba_chunk_size",
    "use_conv_bias": "mamba_conv_bias",
    "time_step_min": "mamba_dt_min",
}

_KIMI_NAMES = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "scoring_func": "moe_router_activation_func",
}
_LFM2_NAMES = {"tie_word_embeddings": "tie_embedding", "intermediate_size": "block_ff_dim"}
_GPT_2_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(dense.llama, defaults.USUAL),
    "mistral": Architecture(dense.mistral, defaults.MISTRAL),
    "mixtral": Architecture(with_experts.mixtral, expert_defaults.MIXTRAL, _EXPERTS),
    "qwen2": Architecture(dense.qwen2, defaults.QWEN),
    "qwen2_moe": Architecture(
        with_experts.qwen2_moe,
        expert_defaults.QWEN_MOE
        | {
            "intermediate_size": 5632,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "qkv_bias": True,
        },
        _EXPERTS,
    ),
    "qwen3": Architecture(dense.qwen3, defaults.QWEN | {"head_dim": 128}),
    "qwen3_moe": Architecture(
        with_experts.qwen3_moe,
        expert_defaults.QWEN_MOE
        | {
            "intermediate_size": 6144,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
        },
        _EXPERTS,
    ),
    "gemma": Architecture(dense.gemma, defaults.GEMMA),
    "gemma2": Architecture(dense.gemma2, defaults.GEMMA_2),
    "gemma3_text": Architecture(dense.gemma3, defaults.GEMMA_3),
    "phi": Architecture(dense.phi, defaults.PHI),
    "phi3": Architecture(dense.phi3, defaults.PHI_3),
    "olmo": Architecture(dense.olmo, defaults.OLMO),
    "olmo2": Architecture(dense.olmo2, defaults.OLMO_2),
    "olmo3": Architecture(dense.olmo3, defaults.OLMO_2 | {"sliding_window": 4096}),
    "olmoe": Architecture(with_experts.olmoe, expert_defaults.OLMOE, _EXPERTS),
    "gpt2": Architecture(
        gpt_like.gpt2,
        defaults.GPT_2,
        _GPT_2_NAMES,
    ),
    "gpt_neox": Architecture(gpt_like.gpt_neox, defaults.NEOX),
    "mpt": Architecture(
        gpt_like.mpt,
        defaults.MPT,
        {"d_model": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"},
    ),
    "falcon": Architecture(
        gpt_like.falcon,
        defaults.FALCON,
        {"hidden_size": "n_embed", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    ),
    "bloom": Architecture(
        gpt_like.bloom,
        defaults.BLOOM,
        {"hidden_size": "n_embed", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"},
    ),
    "starcoder2": Architecture(dense.starcoder2, defaults.STARCODER_2),
    "nemotron": Architecture(dense.nemotron, defaults.NEMOTRON),
    "granite": Architecture(dense.granite, defaults.GRANITE),
    "granitemoe": Architecture(with_experts.granite_moe, expert_defaults.GRANITE_MOE),
    "granitemoeshared": Architecture(with_experts.granite_moe, expert_defaults.GRANITE_MOE),
    "cohere": Architecture(dense.cohere, defaults.COHERE),
    "cohere2": Architecture(
        dense.cohere2, defaults.COHERE | {"sliding_window": 4096, "sliding_window_pattern": 4}
    ),
    "deepseek_v2": Architecture(with_experts.deepseek_v2, expert_defaults.DEEPSEEK_2, _DEEPSEEK),
    "deepseek_v3": Architecture(with_experts.deepseek_v3, expert_defaults.DEEPSEEK_3, _DEEPSEEK),
    "gpt_oss": Architecture(with_experts.gpt_oss, expert_defaults.GPT_OSS, _EXPERTS),
    "smollm3": Architecture(dense.smollm3, defaults.SMOLLM_3),
    "llama4_text": Architecture(with_experts.llama4, expert_defaults.LLAMA_4, kinds=("chunked_attention",)),
    "grok1": Architecture(with_experts.grok1, expert_defaults.GROK),
    "glm": Architecture(dense.glm, defaults.GLM),
    "glm4": Architecture(dense.glm4, defaults.GLM),
    "glm4_moe": Architecture(with_experts.glm4_moe, expert_defaults.GLM_4_MOE, _DEEPSEEK),
    "dots1": Architecture(with_experts.dots1, expert_defaults.DOTS_1, _DEEPSEEK),
    "minimax_m2": Architecture(with_experts.minimax_m2, expert_defaults.MINIMAX_M2, _EXPERTS),
    "seed_oss": Architecture(dense.seed_oss, defaults.SEED_OSS),
    "exaone4": Architecture(dense.exaone4, defaults.EXAONE_4),
    "arcee": Architecture(dense.arcee, defaults.ARCEE),
    "stablelm": Architecture(dense.stablelm, defaults.STABLELM),
    "gptj": Architecture(gpt_like.gptj, defaults.GPT_J, _GPT_2_NAMES),
    "codegen": Architecture(gpt_like.gptj, defaults.CODEGEN, _GPT_2_NAMES),
    "gpt_bigcode": Architecture(gpt_like.gpt_bigcode, defaults.GPT_BIGCODE, _GPT_2_NAMES),
    "gpt_neo": Architecture(
        gpt_like.gpt_neo,
        defaults.GPT_NEO,
        {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"},
    ),
    "opt": Architecture(gpt_like.opt, defaults.OPT),
    "persimmon": Architecture(dense.persimmon, defaults.PERSIMMON),
    "ernie4_5": Architecture(dense.ernie4_5, defaults.ERNIE_4_5),
    "helium": Architecture(dense.helium, defaults.HELIUM),
    "cwm": Architecture(dense.cwm, defaults.CWM),
    "internlm3": Architecture(
        dense.llama, defaults.INTERNLM_3, {"attention_bias": "qkv_bias", "mlp_bias": "bias"}
    ),
    "hyperclovax": Architecture(dense.hyperclovax, defaults.HYPERCLOVA_X),
    "granite_swa": Architecture(dense.granite_swa, defaults.GRANITE_SWA),
    "jais2": Architecture(dense.jais2, defaults.JAIS_2),
    "ministral3": Architecture(dense.ministral3, defaults.MINISTRAL_3),
    "vaultgemma": Architecture(dense.vaultgemma, defaults.GEMMA_2),
    "nanochat": Architecture(dense.nanochat, defaults.NANOCHAT),
    "minicpm3": Architecture(dense.minicpm3, defaults.MINICPM_3),
    "youtu": Architecture(dense.youtu, defaults.YOUTU),
    "qwen2_vl_text": Architecture(dense.qwen2, defaults.QWEN_2_VL),
    "qwen2_5_vl_text": Architecture(dense.qwen2, defaults.QWEN_2_VL),
    "qwen3_vl_text": Architecture(dense.qwen3, defaults.QWEN_3_VL),
    "qwen3_vl_moe_text": Architecture(with_experts.qwen3_moe, expert_defaults.QWEN_3_VL_MOE, _EXPERTS),
    "glm4v_text": Architecture(dense.glm4, defaults.GLM_4_V),
    "glm4v_moe_text": Architecture(with_experts.glm4_moe, expert_defaults.GLM_4_V_MOE, _DEEPSEEK),
    "flex_olmo": Architecture(with_experts.flex_olmo, expert_defaults.FLEX_OLMO, _EXPERTS),
    "granitemoe_swa": Architecture(with_experts.granite_moe_swa, expert_defaults.GRANITE_MOE_SWA),
    "mellum": Architecture(with_experts.mellum, expert_defaults.MELLUM, _EXPERTS),
    "aria_text": Architecture(with_experts.aria, expert_defaults.ARIA, {"num_experts_per_tok": "moe_topk"}),
    "ernie4_5_moe": Architecture(
        with_experts.ernie4_5_moe,
        expert_defaults.ERNIE_4_5_MOE,
        {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    ),
    "exaone_moe": Architecture(with_experts.exaone_moe, expert_defaults.EXAONE_MOE, _SHARED_AND_ROUTED),
    "solar_open": Architecture(with_experts.glm4_moe, expert_defaults.SOLAR_OPEN, _DEEPSEEK),
    "glm4_moe_lite": Architecture(with_experts.deepseek_v3, expert_defaults.GLM_4_MOE_LITE, _DEEPSEEK),
    "sarvam_mla": Architecture(with_experts.deepseek_v3, expert_defaults.SARVAM_MLA, _SHARED_AND_ROUTED),
    "sarvam_moe": Architecture(
        with_experts.glm4_moe,
        expert_defaults.SARVAM_MOE,
        _SHARED_AND_ROUTED | {"attention_bias": "use_qkv_bias"},
    ),
    "bamba": Architecture(hybrid.bamba, hybrid_defaults.BAMBA),
    "granitemoehybrid": Architecture(hybrid.granite_hybrid, hybrid_defaults.GRANITE_HYBRID, kinds=_STATES),
    "nemotron_h": Architecture(
        hybrid.nemotron_h,
        hybrid_defaults.NEMOTRON_H,
        _NEMOTRON_H_NAMES,
        (*_STATES, hybrid.EXPERTS, hybrid.DENSE),
    ),
    "falcon_h1": Architecture(hybrid.falcon_h1, hybrid_defaults.FALCON_H1),
    "olmo_hybrid": Architecture(hybrid.olmo_hybrid, hybrid_defaults.OLMO_HYBRID, kinds=_STATES),
    "kimi_linear": Architecture(hybrid.kimi_linear, hybrid_defaults.KIMI_LINEAR, _KIMI_NAMES, _STATES),
    "lfm2": Architecture(
        short_convolutions.lfm2, hybrid_defaults.LFM2, _LFM2_NAMES, (short_convolutions.CONVOLVED,)
    ),
    "lfm2_moe": Architecture(
        short_convolutions.lfm2_moe,
        hybrid_defaults.LFM2_MOE,
        _LFM2_NAMES | _EXPERTS,
        (short_convolutions.CONVOLVED,),
    ),
    "mamba2": Architecture(hybrid.mamba2, hybrid_defaults.MAMBA_2),
    "qwen3_next": Architecture(hybrid.qwen3_next, hybrid_defaults.QWEN_3_NEXT, _EXPERTS, _STATES),
    "qwen3_5_text": Architecture(hybrid.qwen3_5, hybrid_defaults.QWEN_3_5, kinds=_STATES),
    "qwen3_5_moe_text": Architecture(hybrid.qwen3_5_moe, hybrid_defaults.QWEN_3_5_MOE, _EXPERTS, _STATES),
}
"""By ``model_type``."""

TYPES = {
    "grok-1": "grok1",
    "grok_1": "grok1",
    "gemma3": "gemma3_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "llama4": "llama4_text",
    "RefinedWeb": "falcon",
    "RefinedWebModel": "falcon",
    "kimi_k2": "deepseek_v3",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""Other words for them."""
CLASSES = {
    "gptneox": "gpt_neox",
    "gptoss": "gpt_oss",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "deepseekv2": "deepseek_v2",
    "deepseekv3": "deepseek_v3",
    "gptneoxlm": "gpt_neox",
    "grok1model": "grok1",
    "glm4moe": "glm4_moe",
    "minimaxm2": "minimax_m2",
    "seedoss": "seed_oss",
    "nemotronh": "nemotron_h",
    "qwen3next": "qwen3_next",
    "falconh1": "falcon_h1",
    "olmohybrid": "olmo_hybrid",
    "kimilinear": "kimi_linear",
    "lfm2moe": "lfm2_moe",
}
"""The architectures whose class is named otherwise, in lower case and without what a head is called."""
