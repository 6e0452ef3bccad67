"""The defaults of the configuration classes of transformers 5.24.0, of architectures without experts."""

from __future__ import annotations

from typing import Any

USUAL: dict[str, Any] = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_attention_heads": 32,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}
MISTRAL = USUAL | {
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
QWEN = USUAL | {
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
GEMMA = USUAL | {
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
GEMMA_2 = GEMMA | {
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
GEMMA_3 = GEMMA_2 | {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "sliding_window_pattern": 6,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
OLMO = USUAL | {"vocab_size": 50_304}
OLMO_2 = OLMO | {"rms_norm_eps": 1e-5}
GRANITE = USUAL | {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
COHERE = USUAL | {
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
GPT_2 = {
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
NEOX = {
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
PHI = {
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
PHI_3 = USUAL | {
    "vocab_size": 32_064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
MPT = {
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
FALCON = {
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
BLOOM = {
    "vocab_size": 250_880,
    "hidden_size": 64,
    "n_layer": 2,
    "n_head": 8,
    "layer_norm_epsilon": 1e-5,
    "seq_length": 2048,
    "tie_word_embeddings": True,
}
STARCODER_2 = {
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
NEMOTRON = {
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
SMOLLM_3 = USUAL | {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "no_rope_layer_interval": 4,
    "tie_word_embeddings": True,
}
SEED_OSS = USUAL | {
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
ARCEE = USUAL | {
    "hidden_size": 2560,
    "intermediate_size": 18_432,
    "max_position_embeddings": 4096,
    "hidden_act": "relu2",
    "rms_norm_eps": 1e-5,
}
GLM = USUAL | {
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
EXAONE_4 = USUAL | {
    "vocab_size": 102_400,
    "intermediate_size": 16_384,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}
STABLELM = USUAL | {
    "vocab_size": 50_304,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "layer_norm_eps": 1e-5,
    "partial_rotary_factor": 0.25,
}
GPT_J = {
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
GPT_BIGCODE = GPT_2 | {
    "activation_function": "gelu_pytorch_tanh",
    "multi_query": True,
}
CODEGEN = GPT_J
GPT_NEO = {
    "vocab_size": 50_257,
    "hidden_size": 2048,
    "num_layers": 24,
    "num_heads": 16,
    "max_position_embeddings": 2048,
    "activation_function": "gelu_new",
    "attention_types": [[["global", "local"], 12]],
    "window_size": 256,
    "layer_norm_epsilon": 1e-05,
    "tie_word_embeddings": True,
}
OPT = {
    "vocab_size": 50_272,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
    "max_position_embeddings": 2048,
    "activation_function": "relu",
    "dropout": 0.1,
    "do_layer_norm_before": True,
    "layer_norm_elementwise_affine": True,
    "enable_bias": True,
    "tie_word_embeddings": True,
}
PERSIMMON = {
    "vocab_size": 262_144,
    "hidden_size": 4096,
    "intermediate_size": 16_384,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "hidden_act": "relu2",
    "max_position_embeddings": 16_384,
    "layer_norm_eps": 1e-05,
    "partial_rotary_factor": 0.5,
    "qk_layernorm": True,
}
ERNIE_4_5 = USUAL | {
    "vocab_size": 103_424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": True,
}
HELIUM = USUAL | {
    "vocab_size": 48_000,
    "hidden_size": 2560,
    "intermediate_size": 7040,
    "num_hidden_layers": 24,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-08,
}
CWM = USUAL | {
    "vocab_size": 128_256,
    "hidden_size": 6144,
    "intermediate_size": 21_504,
    "num_hidden_layers": 64,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-05,
    "sliding_window": 8192,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 1000000.0,
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
INTERNLM_3 = USUAL | {
    "vocab_size": 128_512,
    "intermediate_size": 10_240,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-05,
}
HYPERCLOVA_X = USUAL | {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "use_post_norm": True,
}
GRANITE_SWA = GRANITE | {
    "vocab_size": 100_352,
    "hidden_size": 2560,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": True,
    "sliding_window": 128,
}
JAIS_2 = USUAL | {
    "vocab_size": 150_272,
    "hidden_size": 3328,
    "intermediate_size": 26_624,
    "num_attention_heads": 26,
    "hidden_act": "relu2",
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-05,
    "attention_bias": True,
    "mlp_bias": True,
}
MINISTRAL_3 = USUAL | {
    "vocab_size": 131_072,
    "intermediate_size": 14_336,
    "num_hidden_layers": 34,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
NANOCHAT = USUAL | {
    "vocab_size": 50_304,
    "hidden_size": 768,
    "intermediate_size": 8192,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "hidden_act": "relu2",
    "final_logit_softcapping": 15.0,
}
MINICPM_3 = USUAL | {
    "vocab_size": 73_448,
    "hidden_size": 2560,
    "intermediate_size": 6400,
    "num_hidden_layers": 62,
    "num_attention_heads": 40,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": True,
    "kv_lora_rank": 256,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
}
YOUTU = USUAL | {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
QWEN_2_VL = QWEN | {
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
    "rope_theta": 1_000_000.0,
}
QWEN_3_VL = QWEN | {"head_dim": 128, "max_position_embeddings": 128_000, "rope_theta": 500_000.0}
GLM_4_V = GLM | {
    "head_dim": None,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 1.0,
}
