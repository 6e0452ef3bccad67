"""The defaults of the configuration classes of transformers 5.24.0, of architectures with layers that keep a state."""

from __future__ import annotations

from math import inf

from parallelism.models.hugging_face.class_defaults import USUAL
from parallelism.models.hugging_face.expert_defaults import GRANITE_MOE

_MAMBA = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "time_step_limit": [0.0, inf],
}
BAMBA = USUAL | {
    **_MAMBA,
    "vocab_size": 128_000,
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262_144,
}
FALCON_H1 = USUAL | {
    **_MAMBA,
    "vocab_size": 128_000,
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "mamba_d_ssm": 1024,
    "mamba_norm_before_gate": True,
    **dict.fromkeys(("key_multiplier", "embedding_multiplier", "lm_head_multiplier"), 1.0),
}
OLMO_HYBRID = USUAL | {
    "vocab_size": 100_352,
    "hidden_size": 3840,
    "num_attention_heads": 30,
    "max_position_embeddings": 65_536,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
}
KIMI_LINEAR = USUAL | {
    "vocab_size": 163_840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.446,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1_048_576,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4,
}
LFM2 = {
    "vocab_size": 65_536,
    "hidden_size": 2560,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}
LFM2_MOE = LFM2 | {
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts_per_tok": 4,
    "num_experts": 32,
    "use_expert_bias": True,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}
GRANITE_HYBRID = GRANITE_MOE | {**_MAMBA, "shared_intermediate_size": 1024}
NEMOTRON_H = {
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "hybrid_override_pattern": "ME*-",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "intermediate_size": 21_504,
    "mlp_hidden_act": "relu2",
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "n_groups": 8,
    "conv_kernel": 4,
    "time_step_min": 0.001,
    "use_conv_bias": True,
    "chunk_size": 128,
    "n_routed_experts": 8,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "layer_norm_epsilon": 1e-5,
}
MAMBA_2 = {
    "num_heads": 128,
    "head_dim": 64,
    "vocab_size": 32_768,
    "hidden_size": 4096,
    "state_size": 128,
    "num_hidden_layers": 64,
    "layer_norm_epsilon": 1e-5,
    "conv_kernel": 4,
    "n_groups": 8,
    "use_conv_bias": True,
    "hidden_act": "silu",
    "time_step_limit": [0.0, inf],
    "chunk_size": 256,
    "max_position_embeddings": 2048,
}
"""The class has no length of sequences: it is that of the paper's models (arXiv:2405.21060, section D.2)."""
_DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "head_dim": 256,
    "num_attention_heads": 16,
    "max_position_embeddings": 32_768,
}
QWEN_3_NEXT = USUAL | {
    **_DELTA,
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
}
QWEN_3_5 = USUAL | {
    **_DELTA,
    "vocab_size": 248_320,
    "intermediate_size": 12_288,
    "num_key_value_heads": 4,
}
QWEN_3_5_MOE = QWEN_3_5 | {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}
