"""The architectures that are read: for each the function that reads it, and the fields of its configuration class.

The defaults are those of the classes in transformers 5.24.0; Grok 1 has those of its port
(https://huggingface.co/keyfan/grok-1-hf).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parallelism.models.hugging_face import dense, with_experts
from parallelism.models.hugging_face.config import Config


@dataclass(frozen=True)
class Architecture:
    """How the figures of a `TransformerSpec` are read from the fields of a file."""

    read: Callable[[Config], dict[str, Any]]
    defaults: Mapping[str, Any]
    others: Mapping[str, str] = field(default_factory=dict)
    """Further names of fields, in old files."""


_EXPERTS = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}
_DEEPSEEK = {"n_routed_experts": "num_local_experts"}

_USUAL: dict[str, Any] = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_attention_heads": 32,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}
_MISTRAL = _USUAL | {
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
_MIXTRAL = _MISTRAL | {
    "sliding_window": None,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}
_QWEN = _USUAL | {
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN_MOE = _QWEN | {
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "decoder_sparse_step": 1,
}
_GEMMA = _USUAL | {
    "vocab_size": 256_000,
    "hidden_size": 3072,
    "intermediate_size": 24_576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
_GEMMA_2 = _GEMMA | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA_3 = _GEMMA_2 | {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "sliding_window_pattern": 6,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
_OLMO = _USUAL | {"vocab_size": 50_304}
_OLMO_2 = _OLMO | {"rms_norm_eps": 1e-5}
_OLMOE = _OLMO_2 | {
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "max_position_embeddings": 4096,
    "num_experts_per_tok": 8,
    "num_experts": 64,
}
_GRANITE = _USUAL | {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
_GRANITE_MOE = _GRANITE | {"num_local_experts": 8, "num_experts_per_tok": 2}
_COHERE = _USUAL | {
    "vocab_size": 256_000,
    "hidden_size": 8192,
    "intermediate_size": 22_528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
}
_DEEPSEEK_2 = _USUAL | {
    "vocab_size": 102_400,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "moe_intermediate_size": 1407,
}
_DEEPSEEK_3 = _USUAL | {
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
}
_GPT_OSS = {
    "num_hidden_layers": 36,
    "num_local_experts": 128,
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "attention_bias": True,
}
_LLAMA_4 = _USUAL | {
    "vocab_size": 202_048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
}
_GROK = _USUAL | {
    "vocab_size": 131_072,
    "hidden_size": 6144,
    "intermediate_size": 32_768,
    "num_hidden_layers": 64,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "attn_output_multiplier": 0.08838834764831845,
    "max_attn_value": 30.0,
    "max_position_embeddings": 8192,
    "embedding_multiplier_scale": 78.38367176906169,
    "output_multiplier_scale": 0.5773502691896257,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 2,
    "num_experts": 8,
    "tie_word_embeddings": True,
}
_GPT_2 = {
    "vocab_size": 50_257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "activation_function": "gelu_new",
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
}
_NEOX = {
    "vocab_size": 50_432,
    "hidden_size": 6144,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "intermediate_size": 24_576,
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "use_parallel_residual": True,
    "rotary_pct": 0.25,
    "attention_bias": True,
}
_PHI = {
    "vocab_size": 51_200,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "hidden_act": "gelu_new",
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
}
_PHI_3 = _USUAL | {
    "vocab_size": 32_064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
_MPT = {
    "d_model": 2048,
    "n_heads": 16,
    "n_layers": 24,
    "expansion_ratio": 4,
    "max_seq_len": 2048,
    "vocab_size": 50_368,
    "layer_norm_epsilon": 1e-5,
    "no_bias": True,
    "tie_word_embeddings": True,
}
_FALCON = {
    "vocab_size": 65_024,
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "layer_norm_epsilon": 1e-5,
    "multi_query": True,
    "parallel_attn": True,
    "max_position_embeddings": 2048,
    "activation": "gelu",
    "tie_word_embeddings": True,
}
_BLOOM = {
    "vocab_size": 250_880,
    "hidden_size": 64,
    "n_layer": 2,
    "n_head": 8,
    "layer_norm_epsilon": 1e-5,
    "seq_length": 2048,
    "tie_word_embeddings": True,
}
_STARCODER_2 = {
    "vocab_size": 49_152,
    "hidden_size": 3072,
    "intermediate_size": 12_288,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "norm_epsilon": 1e-5,
    "use_bias": True,
    "tie_word_embeddings": True,
}
_NEMOTRON = {
    "vocab_size": 256_000,
    "hidden_size": 6144,
    "intermediate_size": 24_576,
    "num_hidden_layers": 32,
    "num_attention_heads": 48,
    "hidden_act": "relu2",
    "max_position_embeddings": 4096,
    "norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
}
_SMOLLM_3 = _USUAL | {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "no_rope_layer_interval": 4,
    "tie_word_embeddings": True,
}

_GPT_2_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}
_SEED_OSS = _USUAL | {
    "vocab_size": 155_136,
    "intermediate_size": 27_648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524_288,
    "attention_bias": True,
    "attention_dropout": 0.1,
    "residual_dropout": 0.1,
}
_ARCEE = _USUAL | {
    "hidden_size": 2560,
    "intermediate_size": 18_432,
    "max_position_embeddings": 4096,
    "hidden_act": "relu2",
    "rms_norm_eps": 1e-5,
}
_GLM = _USUAL | {
    "vocab_size": 151_552,
    "intermediate_size": 13_696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
_GLM_4_MOE = _USUAL | {
    "vocab_size": 151_552,
    "intermediate_size": 10_944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}
_DOTS_1 = _USUAL | {
    "vocab_size": 152_064,
    "hidden_size": 4608,
    "intermediate_size": 10_944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 62,
    "num_key_value_heads": 32,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "norm_topk_prob": False,
    "sliding_window": 4096,
    "max_window_layers": 62,
}
_MINIMAX_M2 = _USUAL | {
    "vocab_size": 200_064,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 196_608,
    "num_experts_per_tok": 8,
    "num_local_experts": 256,
}
_EXAONE_4 = _USUAL | {
    "vocab_size": 102_400,
    "intermediate_size": 16_384,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}
_STABLELM = _USUAL | {
    "vocab_size": 50_304,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "layer_norm_eps": 1e-5,
    "partial_rotary_factor": 0.25,
}
_GPT_J = {
    "n_layer": 28,
    "n_embd": 4096,
    "n_head": 16,
    "n_positions": 2048,
    "vocab_size": 50_400,
    "rotary_dim": 64,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(dense.llama, _USUAL),
    "mistral": Architecture(dense.mistral, _MISTRAL),
    "mixtral": Architecture(with_experts.mixtral, _MIXTRAL, _EXPERTS),
    "qwen2": Architecture(dense.qwen2, _QWEN),
    "qwen2_moe": Architecture(
        with_experts.qwen2_moe,
        _QWEN_MOE
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
    "qwen3": Architecture(dense.qwen3, _QWEN | {"head_dim": 128}),
    "qwen3_moe": Architecture(
        with_experts.qwen3_moe,
        _QWEN_MOE
        | {
            "intermediate_size": 6144,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
        },
        _EXPERTS,
    ),
    "gemma": Architecture(dense.gemma, _GEMMA),
    "gemma2": Architecture(dense.gemma2, _GEMMA_2),
    "gemma3_text": Architecture(dense.gemma3, _GEMMA_3),
    "phi": Architecture(dense.phi, _PHI),
    "phi3": Architecture(dense.phi3, _PHI_3),
    "olmo": Architecture(dense.olmo, _OLMO),
    "olmo2": Architecture(dense.olmo2, _OLMO_2),
    "olmo3": Architecture(dense.olmo3, _OLMO_2 | {"sliding_window": 4096}),
    "olmoe": Architecture(with_experts.olmoe, _OLMOE, _EXPERTS),
    "gpt2": Architecture(
        dense.gpt2,
        _GPT_2,
        _GPT_2_NAMES,
    ),
    "gpt_neox": Architecture(dense.gpt_neox, _NEOX),
    "mpt": Architecture(
        dense.mpt,
        _MPT,
        {"d_model": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"},
    ),
    "falcon": Architecture(
        dense.falcon,
        _FALCON,
        {"hidden_size": "n_embed", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    ),
    "bloom": Architecture(
        dense.bloom,
        _BLOOM,
        {"hidden_size": "n_embed", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"},
    ),
    "starcoder2": Architecture(dense.starcoder2, _STARCODER_2),
    "nemotron": Architecture(dense.nemotron, _NEMOTRON),
    "granite": Architecture(dense.granite, _GRANITE),
    "granitemoe": Architecture(with_experts.granite_moe, _GRANITE_MOE),
    "granitemoeshared": Architecture(with_experts.granite_moe, _GRANITE_MOE),
    "cohere": Architecture(dense.cohere, _COHERE),
    "cohere2": Architecture(dense.cohere2, _COHERE | {"sliding_window": 4096, "sliding_window_pattern": 4}),
    "deepseek_v2": Architecture(with_experts.deepseek_v2, _DEEPSEEK_2, _DEEPSEEK),
    "deepseek_v3": Architecture(with_experts.deepseek_v3, _DEEPSEEK_3, _DEEPSEEK),
    "gpt_oss": Architecture(with_experts.gpt_oss, _GPT_OSS, _EXPERTS),
    "smollm3": Architecture(dense.smollm3, _SMOLLM_3),
    "llama4_text": Architecture(with_experts.llama4, _LLAMA_4),
    "grok1": Architecture(with_experts.grok1, _GROK),
    "glm": Architecture(dense.glm, _GLM),
    "glm4": Architecture(dense.glm4, _GLM),
    "glm4_moe": Architecture(with_experts.glm4_moe, _GLM_4_MOE, _DEEPSEEK),
    "dots1": Architecture(with_experts.dots1, _DOTS_1, _DEEPSEEK),
    "minimax_m2": Architecture(with_experts.minimax_m2, _MINIMAX_M2, _EXPERTS),
    "seed_oss": Architecture(dense.seed_oss, _SEED_OSS),
    "exaone4": Architecture(dense.exaone4, _EXAONE_4),
    "arcee": Architecture(dense.arcee, _ARCEE),
    "stablelm": Architecture(dense.stablelm, _STABLELM),
    "gptj": Architecture(dense.gptj, _GPT_J, _GPT_2_NAMES),
}
"""By ``model_type``."""

TYPES = {
    "grok-1": "grok1",
    "grok_1": "grok1",
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "RefinedWeb": "falcon",
    "RefinedWebModel": "falcon",
    "kimi_k2": "deepseek_v3",
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
}
"""The architectures whose class is named otherwise, in lower case and without what a head is called."""
