"""Fields of the config.json of models, by hand, and what transformers 5.24.0 builds of them, counted on its meta device.

In an environment with transformers and torch, `python tests/support/hugging_face_configs.py` counts again and prints
what differs; `--print` prints all counts.
"""

from __future__ import annotations

import sys
from typing import Any

VERSION = "5.24.0"
"""The version of transformers that counted."""

ONE_LANGUAGE_MODEL = ("gemma3", "llama4", "aria")
"""Multimodal models whose language model transformers has as a causal one, too."""


def sized(kind: str, layers: int, width: int, heads: int, feed_forward: int, **others: Any) -> dict[str, Any]:
    return {"model_type": kind, "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads,
            "intermediate_size": feed_forward, **others}


SMALL = {"num_hidden_layers": 5, "hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 88, "vocab_size": 101,
         "max_position_embeddings": 64}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12, "n_routed_experts": 8,
          "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 20}

KIMI_FULL = [4, 8, 12, 16, 20, 24, 27]
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2"},
    "gpt2-xl": {"model_type": "gpt2", "n_embd": 1600, "n_head": 25, "n_layer": 48},
    "cerebras-gpt-590m": {"model_type": "gpt2", "n_embd": 1536, "n_head": 12, "n_layer": 18, "n_inner": 6144,
                          "n_positions": 2048, "activation_function": "gelu"},
    "llama2-7b": sized("llama", 32, 4096, 32, 11_008, rms_norm_eps=1e-5, max_position_embeddings=4096),
    "llama2-70b": sized("llama", 80, 8192, 64, 28_672, num_key_value_heads=8),
    "smollm2-135m": sized("llama", 30, 576, 9, 1536, num_key_value_heads=3, vocab_size=49_152, tie_word_embeddings=True),
    "smollm2-1.7b": sized("llama", 24, 2048, 32, 8192, vocab_size=49_152, tie_word_embeddings=True),
    "mistral-7b": sized("mistral", 32, 4096, 32, 14_336, sliding_window=4096),
    "qwen2-0.5b": sized("qwen2", 24, 896, 14, 4864, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen1.5-moe-a2.7b": {"model_type": "qwen2_moe"},
    "qwen2-57b-a14b": sized("qwen2_moe", 28, 3584, 28, 18_944, num_key_value_heads=4, num_experts=64, num_experts_per_tok=8,
                            moe_intermediate_size=2560, shared_expert_intermediate_size=20_480),
    "gemma-2b": sized("gemma", 18, 2048, 8, 16_384, num_key_value_heads=1),
    "gemma-7b": {"model_type": "gemma"},
    "gemma2-2b": {"model_type": "gemma2"},
    "phi-1.5": {"model_type": "phi"},
    "phi-2": sized("phi", 32, 2560, 32, 10_240, partial_rotary_factor=0.4),
    "phi3-medium": sized("phi3", 40, 5120, 40, 17_920, num_key_value_heads=10),
    "olmo-1b": sized("olmo", 16, 2048, 16, 8192, tie_word_embeddings=True),
    "olmo-7b": {"model_type": "olmo"},
    "olmo3-7b": sized("olmo3", 32, 4096, 32, 11_008, vocab_size=100_278, max_position_embeddings=65_536),
    "olmoe-1b-7b": sized("olmoe", 16, 2048, 16, 1024),
    "gpt-neox-20b": {"model_type": "gpt_neox", "vocab_size": 50_432},
    "pythia-160m": sized("gpt_neox", 12, 768, 12, 3072, vocab_size=50_304),
    "pythia-6.9b": sized("gpt_neox", 32, 4096, 32, 16_384),
    "falcon-rw-1b": {"model_type": "falcon", "num_hidden_layers": 24, "hidden_size": 2048, "num_attention_heads": 32,
                     "vocab_size": 50_304, "alibi": True, "bias": True, "multi_query": False, "parallel_attn": False},
    "falcon-180b": {"model_type": "falcon", "num_hidden_layers": 80, "hidden_size": 14_848, "num_attention_heads": 232,
                    "num_kv_heads": 8, "new_decoder_architecture": True},
    "bloom-560m": {"model_type": "bloom", "n_layer": 24, "hidden_size": 1024, "n_head": 16},
    "starcoder2-3b": sized("starcoder2", 30, 3072, 24, 12_288, num_key_value_heads=2, sliding_window=4096),
    "starcoder2-15b": sized("starcoder2", 40, 6144, 48, 24_576, num_key_value_heads=4, tie_word_embeddings=False),
    "minitron-8b": sized("nemotron", 32, 4096, 32, 16_384, num_key_value_heads=8, head_dim=128),
    "granite-3.1-8b": sized("granite", 40, 4096, 32, 12_800, num_key_value_heads=8, vocab_size=49_155,
                            tie_word_embeddings=True, embedding_multiplier=12.0, logits_scaling=16.0,
                            residual_multiplier=0.22, attention_multiplier=0.0078125),
    "granite-3.1-3b-a800m": sized("granitemoe", 32, 1536, 24, 512, num_key_value_heads=8, vocab_size=49_155,
                                  num_local_experts=40, num_experts_per_tok=8, tie_word_embeddings=True),
    "command-r": {"model_type": "cohere"},
    "llama4-scout-text": {"model_type": "llama4_text", "num_local_experts": 16, "attention_chunk_size": None,
                          "attn_temperature_tuning": False},
    "llama4-maverick-text": {"model_type": "llama4_text", "num_local_experts": 128, "interleave_moe_layer_step": 2,
                             "use_qk_norm": False, "max_position_embeddings": 8191},
    "glm-4-9b": {"model_type": "glm"},
    "glm-4-9b-0414": {"model_type": "glm4"},
    "glm-4-32b-0414": sized("glm4", 61, 6144, 48, 23_040, num_key_value_heads=8, head_dim=128, attention_bias=False),
    "dots.llm1": sized("dots1", 62, 4096, 32, 10_944, n_routed_experts=128, n_shared_experts=2, num_experts_per_tok=6,
                       first_k_dense_replace=1, norm_topk_prob=True),
    "seed-oss-36b": sized("seed_oss", 64, 5120, 80, 27_648),
    "exaone4-32b": sized("exaone4", 64, 5120, 40, 27_392, num_key_value_heads=8, max_position_embeddings=131_072),
    "exaone4-1.2b": sized("exaone4", 30, 2048, 32, 4096, num_key_value_heads=8, layer_types=["full_attention"] * 30,
                          tie_word_embeddings=True),
    "afm-4.5b": sized("arcee", 36, 2560, 20, 18_432, num_key_value_heads=4, head_dim=128),
    "stablelm-3b": {"model_type": "stablelm"},
    "stablelm-2-12b": sized("stablelm", 40, 5120, 32, 13_824, num_key_value_heads=8, use_parallel_residual=True),
    "gpt-j-6b": {"model_type": "gptj"},
    "opt-6.7b": {"model_type": "opt", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
                 "ffn_dim": 16_384},
    "gpt-neo-1.3b": {"model_type": "gpt_neo"},
    "codegen-6b": {"model_type": "codegen", "n_embd": 4096, "n_layer": 33, "n_head": 16, "vocab_size": 51_200},
    "starcoder-15b": {"model_type": "gpt_bigcode", "n_embd": 6144, "n_layer": 40, "n_head": 48, "n_inner": 24_576,
                      "n_positions": 8192, "vocab_size": 49_152, "activation_function": "gelu"},
    "persimmon-8b": {"model_type": "persimmon"},
    "ernie-4.5-0.3b": {"model_type": "ernie4_5"},
    "helium-1-preview-2b": {"model_type": "helium"},
    "cwm-32b": {"model_type": "cwm"},
    "internlm3-8b": {"model_type": "internlm3"},
    "hyperclova of its class": {"model_type": "hyperclovax"},
    "granite-swash-2b": {"model_type": "granite_swa"},
    "jais-2-8b": {"model_type": "jais2"},
    "ministral-3-8b": sized("ministral3", 34, 4096, 32, 14_336, max_position_embeddings=16_384),
    "vaultgemma-1b": sized("vaultgemma", 26, 1152, 4, 6912, num_key_value_heads=4),
    "nanochat-d20": sized("nanochat", 20, 1280, 10, 5120, num_key_value_heads=10, vocab_size=65_536),
    "minicpm3-4b": {"model_type": "minicpm3"},
    "youtu-llm-2b": {"model_type": "youtu"},
    "flex_olmo of its class": {"model_type": "flex_olmo"},
    "granitemoe_swa of its class": {"model_type": "granitemoe_swa"},
    "mellum-2-12b": {"model_type": "mellum"},
    "aria of its class": {"model_type": "aria_text"},
    "ernie-4.5-21b-a3b": {"model_type": "ernie4_5_moe"},
    "exaone_moe of its class": {"model_type": "exaone_moe"},
    "solar-open-100b": {"model_type": "solar_open"},
    "glm-4.7-flash": {"model_type": "glm4_moe_lite"},
    "sarvam-105b": {"model_type": "sarvam_mla"},
    "sarvam-30b": {"model_type": "sarvam_moe"},
    "qwen2-vl-72b text": {"model_type": "qwen2_vl_text"},
    "qwen2.5-vl-7b text": sized("qwen2_5_vl_text", 28, 3584, 28, 18_944, num_key_value_heads=4, tie_word_embeddings=False),
    "qwen3-vl-8b text": sized("qwen3_vl_text", 36, 4096, 32, 12_288, num_key_value_heads=8, tie_word_embeddings=False),
    "qwen3_vl_moe of its class": {"model_type": "qwen3_vl_moe_text"},
    "glm4v of its class": {"model_type": "glm4v_text"},
    "glm4v_moe of its class": {"model_type": "glm4v_moe_text", "head_dim": 64},
    # with each field that changes the parameters
    "opt without biases": {"model_type": "opt", "num_hidden_layers": 3, "hidden_size": 96, "num_attention_heads": 6,
                           "ffn_dim": 88, "vocab_size": 101, "max_position_embeddings": 64, "enable_bias": False,
                           "tie_word_embeddings": False},
    "gpt_bigcode with all heads": {"model_type": "gpt_bigcode", "n_embd": 96, "n_layer": 3, "n_head": 6, "n_positions": 64,
                                   "vocab_size": 101, "multi_query": False},
    "gpt_neo with a width": {"model_type": "gpt_neo", "num_layers": 3, "hidden_size": 96, "num_heads": 6,
                             "vocab_size": 101, "max_position_embeddings": 64, "intermediate_size": 88,
                             "attention_types": [[["global"], 1], [["local"], 2]]},
    "persimmon without norms of queries": SMALL | {"model_type": "persimmon", "qk_layernorm": False},
    "ernie4_5 with biases": SMALL | {"model_type": "ernie4_5", "use_bias": True, "head_dim": 24, "num_key_value_heads": 2},
    "helium with biases": SMALL | {"model_type": "helium", "head_dim": 16, "attention_bias": True, "mlp_bias": True,
                                   "num_key_value_heads": 2},
    "internlm3 with biases": SMALL | {"model_type": "internlm3", "attention_bias": True, "mlp_bias": True, "head_dim": 24},
    "hyperclovax without norms behind": SMALL | {"model_type": "hyperclovax", "use_post_norm": False, "attention_bias": True},
    "jais2 without biases": SMALL | {"model_type": "jais2", "attention_bias": False, "mlp_bias": False, "head_dim": 24},
    "minicpm3 without a rank": SMALL | LATENT | {"model_type": "minicpm3", "q_lora_rank": None, "attention_bias": True,
                                                 "mlp_bias": True, "v_head_dim": None},
    "youtu with biases": SMALL | LATENT | {"model_type": "youtu", "attention_bias": True, "q_lora_rank": 20},
    "ernie4_5_moe with biases": SMALL | {"model_type": "ernie4_5_moe", "use_bias": True, "num_key_value_heads": 2,
                                         "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 20,
                                         "moe_layer_start_index": 1, "moe_layer_end_index": 3, "moe_layer_interval": 2},
    "exaone_moe with two dense layers": SMALL | {"model_type": "exaone_moe", "first_k_dense_replace": 2, "num_experts": 8,
                                                 "num_experts_per_tok": 2, "num_shared_experts": 2, "head_dim": 24,
                                                 "moe_intermediate_size": 20, "num_key_value_heads": 2},
    "mellum with dense layers": SMALL | {"model_type": "mellum", "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 24,
                                         "moe_intermediate_size": 20, "num_key_value_heads": 2,
                                         "mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse"]},
    "glm4_moe_lite of sparse layers": SMALL | LATENT | {"model_type": "glm4_moe_lite", "q_lora_rank": 20,
                                                        "mlp_layer_types": ["sparse"] * 5},
    "llama with biases": SMALL | {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2},
    "llama with wide heads": SMALL | {"model_type": "llama", "head_dim": 24, "tie_word_embeddings": True},
    "seed_oss with all biases": SMALL | {"model_type": "seed_oss", "attention_out_bias": True, "mlp_bias": True,
                                         "num_key_value_heads": 2, "head_dim": 8},
    "arcee with biases": SMALL | {"model_type": "arcee", "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2},
    "stablelm with biases": SMALL | {"model_type": "stablelm", "use_qkv_bias": True, "num_key_value_heads": 2},
    "glm4_moe of dense layers": SMALL | {"model_type": "glm4_moe", "first_k_dense_replace": 5, "num_key_value_heads": 2},
    "dots1 with biases": SMALL | {"model_type": "dots1", "attention_bias": True, "num_key_value_heads": 2, "n_group": 2,
                                  "n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2,
                                  "moe_intermediate_size": 20},
    "qwen3 with biases": SMALL | {"model_type": "qwen3", "attention_bias": True, "num_key_value_heads": 3, "head_dim": 8},
    "qwen3_moe with dense layers": SMALL | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
                                            "moe_intermediate_size": 20, "decoder_sparse_step": 2, "mlp_only_layers": [1],
                                            "num_key_value_heads": 2},
    "qwen2_moe without biases": SMALL | {"model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2,
                                         "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28,
                                         "qkv_bias": False, "num_key_value_heads": 2},
    "phi with norms of queries": SMALL | {"model_type": "phi", "qk_layernorm": True, "num_key_value_heads": 2},
    "olmo2 with groups": SMALL | {"model_type": "olmo2", "num_key_value_heads": 2, "attention_bias": True},
    "gpt_neox in a row": SMALL | {"model_type": "gpt_neox", "use_parallel_residual": False, "attention_bias": False},
    "gpt_neox tied": SMALL | {"model_type": "gpt_neox", "tie_word_embeddings": True},
    "starcoder2 without biases": SMALL | {"model_type": "starcoder2", "use_bias": False},
    "nemotron with biases": SMALL | {"model_type": "nemotron", "num_key_value_heads": 2, "mlp_bias": True, "head_dim": 12},
    "granitemoeshared": SMALL | {"model_type": "granitemoeshared", "num_local_experts": 4, "num_experts_per_tok": 2,
                                 "shared_intermediate_size": 36},
    "deepseek_v2 with biases": SMALL | LATENT | {"model_type": "deepseek_v2", "q_lora_rank": 20, "attention_bias": True,
                                                 "mlp_bias": True, "first_k_dense_replace": 2},
    "deepseek_v3 without a rank": SMALL | LATENT | {"model_type": "deepseek_v3", "q_lora_rank": None, "n_group": 2,
                                                    "topk_group": 1, "first_k_dense_replace": 5},
    "gpt_oss without biases": SMALL | {"model_type": "gpt_oss", "attention_bias": False, "num_local_experts": 4,
                                       "num_key_value_heads": 2, "head_dim": 24},
    "falcon with a norm": {"model_type": "falcon", "num_hidden_layers": 3, "hidden_size": 96, "num_attention_heads": 6,
                           "num_kv_heads": 2, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1,
                           "ffn_hidden_size": 88, "bias": True, "tie_word_embeddings": False},
    "bamba-9b": {"model_type": "bamba", "attn_layer_indices": [9, 18, 27], "mamba_d_state": 128, "vocab_size": 128_256},
    "falcon-h1-7b": sized(
        "falcon_h1", 44, 3072, 12, 12_288, num_key_value_heads=2, head_dim=128, vocab_size=130_048, mamba_d_ssm=3072,
        mamba_n_heads=24, mamba_d_head=128),
    "falcon-h1-34b": sized(
        "falcon_h1", 72, 5120, 20, 21_504, num_key_value_heads=4, head_dim=128, vocab_size=261_120, mamba_d_ssm=4096,
        mamba_n_heads=32, mamba_d_head=128, mamba_n_groups=2),
    "falcon-h1 with norms": sized(
        "falcon_h1", 2, 96, 6, 88, num_key_value_heads=2, vocab_size=101, mamba_d_ssm=None, mamba_n_heads=8,
        mamba_rms_norm=True, mamba_proj_bias=True, projectors_bias=True, mlp_bias=True),
    "kimi-linear-48b-a3b": {
        "model_type": "kimi_linear", "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "head_dim": 72,
        "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_expert_group": 1,
        "model_max_length": 1_048_576, "first_k_dense_replace": 1, "linear_attn_config": {
            "full_attn_layers": KIMI_FULL, "kda_layers": [layer for layer in range(1, 28) if layer not in KIMI_FULL],
            "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4}},
    "kimi_linear of its class": {"model_type": "kimi_linear"},
    "olmo-hybrid-7b": {"model_type": "olmo_hybrid"},
    "lfm2-1.2b": {"model_type": "lfm2", "hidden_size": 2048, "block_ff_dim": 12_288, "num_hidden_layers": 16,
                  "full_attn_idxs": [2, 5, 8, 10, 12, 14]},
    "lfm2 of its class": {"model_type": "lfm2", "conv_bias": True, "block_auto_adjust_ff_dim": False},
    "lfm2-8b-a1b": {"model_type": "lfm2_moe", "num_hidden_layers": 24, "layer_types": [
        "full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)]},
    "granite-4.0-h-small": sized(
        "granitemoehybrid", 40, 4096, 32, 768, num_key_value_heads=8, vocab_size=100_352, tie_word_embeddings=True,
        num_local_experts=72, num_experts_per_tok=10, shared_intermediate_size=1536, mamba_d_state=128,
        layer_types=["attention" if layer % 10 == 5 else "mamba" for layer in range(40)]),
    "granite-4.0-h-without-experts": sized(
        "granitemoehybrid", 4, 96, 6, 88, num_local_experts=0, shared_intermediate_size=72, mamba_n_heads=8, vocab_size=101),
    "nemotron-3-nano-30b-a3b": {
        "model_type": "nemotron_h", "hidden_size": 2688, "num_key_value_heads": 2, "mamba_num_heads": 64,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "n_routed_experts": 128,
        "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
        "routed_scaling_factor": 2.5, "max_position_embeddings": 262_144},
    "nemotron-3-super-120b-a12b": {
        "model_type": "nemotron_h", "num_key_value_heads": 2, "n_routed_experts": 512, "num_experts_per_tok": 22,
        "moe_intermediate_size": 2688, "moe_latent_size": 1024, "moe_shared_expert_intermediate_size": 5376,
        "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*" + 4 * "EMEMEMEMEM*" + "EMEMEMEM*EMEMEMEME"},
    "nemotron-h-default": {"model_type": "nemotron_h", "use_bias": True, "mlp_bias": True},
    "mamba2-2.7b": {"model_type": "mamba2", "hidden_size": 2560, "num_heads": 80, "n_groups": 1, "vocab_size": 50_288,
                    "tie_word_embeddings": True},
    "qwen3-next-80b-a3b": {"model_type": "qwen3_next"},
    "qwen3.5-default": {"model_type": "qwen3_5_text"},
    "qwen3.5-35b-a3b": {"model_type": "qwen3_5_moe_text"},
}

COUNTS: dict[str, int] = {
    "gpt2": 124_439_808, "gpt2-xl": 1_557_611_200, "cerebras-gpt-590m": 590_310_912, "llama2-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192, "smollm2-135m": 134_515_008, "smollm2-1.7b": 1_711_376_384, "smollm3-3b": 3_075_098_624,
    "mistral-7b": 7_241_732_096, "mistral-nemo": 12_247_782_400, "mistral-small-24b": 23_572_403_200,
    "qwen2-0.5b": 494_032_768, "qwen1.5-moe-a2.7b": 14_315_784_192, "qwen2-57b-a14b": 57_408_658_944,
    "gemma-2b": 2_506_172_416, "gemma-7b": 8_537_680_896, "gemma2-2b": 2_614_341_888, "gemma3-1b": 999_885_952,
    "gemma3-12b": 11_766_034_176, "phi-1.5": 1_418_270_720, "phi-2": 2_779_683_840, "phi3-medium": 13_960_238_080,
    "olmo-1b": 1_176_764_416, "olmo-7b": 6_888_095_744, "olmo3-7b": 7_298_011_136, "olmoe-1b-7b": 6_919_161_856,
    "gpt-neox-20b": 20_554_567_680, "pythia-160m": 162_322_944, "pythia-6.9b": 6_857_302_016, "falcon-rw-1b": 1_311_625_216,
    "falcon-180b": 178_557_088_768, "bloom-560m": 559_214_592, "starcoder2-3b": 3_030_371_328,
    "starcoder2-15b": 15_957_889_024, "minitron-8b": 7_734_829_056, "granite-3.1-8b": 8_170_848_256,
    "granite-3.1-3b-a800m": 3_298_793_472, "command-r": 34_980_831_232, "llama4-scout-text": 107_769_861_120,
    "llama4-maverick-text": 400_711_848_960, "llama with biases": 272_688, "llama with wide heads": 413_952,
    "qwen3 with biases": 217_328, "qwen3_moe with dense layers": 268_288, "qwen2_moe without biases": 301_248,
    "phi with norms of queries": 230_525, "olmo2 with groups": 271_968, "gpt_neox in a row": 291_224,
    "gpt_neox tied": 283_448, "starcoder2 without biases": 219_168, "nemotron with biases": 199_064,
    "granitemoeshared": 765_408, "deepseek_v2 with biases": 318_732, "deepseek_v3 without a rank": 235_568,
    "gpt_oss without biases": 719_058, "falcon with a norm": 12_611_112, "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496, "llama3.1-405b": 405_853_388_800, "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824, "mixtral-8x7b": 46_702_792_704, "mixtral-8x22b": 140_620_634_112,
    "deepseek-v2-lite": 15_706_484_224, "deepseek-v2": 235_741_434_880, "deepseek-v3": 671_026_404_352,
    "qwen2.5-7b": 7_615_616_512, "qwen2.5-32b": 32_763_876_352, "qwen2.5-72b": 72_706_203_648, "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560, "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320, "gemma3-27b": 27_009_346_304, "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672, "phi3-mini": 3_821_079_552, "olmo2-7b": 7_298_617_344, "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936, "nemotron-15b": 15_628_775_424, "nemotron-340b": 341_029_195_776, "mpt-7b": 6_649_286_656,
    "mpt-30b": 29_957_200_896, "falcon-7b": 6_921_720_704, "falcon-40b": 41_303_293_952, "bloom-176b": 176_247_271_424,
    "glm-4-9b": 9_399_951_360, "glm-4-9b-0414": 9_400_279_040, "glm-4-32b-0414": 33_141_749_760,
    "glm4.5-air": 106_852_245_504, "glm4.5": 352_797_814_784, "dots.llm1": 142_774_373_888, "minimax-m2": 228_689_748_992,
    "seed-oss-36b": 36_151_104_512, "exaone4-32b": 32_003_216_384, "exaone4-1.2b": 1_279_391_488, "afm-4.5b": 4_127_644_160,
    "stablelm-3b": 2_795_443_200, "stablelm-2-12b": 11_630_438_400, "gpt-j-6b": 6_050_882_784,
    "seed_oss with all biases": 210_848, "arcee with biases": 230_008, "stablelm with biases": 271_904,
    "glm4_moe of dense layers": 270_048, "dots1 with biases": 407_808,
    "opt-6.7b": 6_658_465_792, "gpt-neo-1.3b": 1_315_575_808, "codegen-6b": 7_064_213_504,
    "starcoder-15b": 15_517_456_384, "persimmon-8b": 9_397_175_296, "ernie-4.5-0.3b": 360_748_032,
    "helium-1-preview-2b": 2_172_643_840, "cwm-32b": 32_581_097_472, "internlm3-8b": 8_804_241_408,
    "hyperclova of its class": 6_738_677_760, "granite-swash-2b": 2_144_463_840, "jais-2-8b": 8_090_401_280,
    "ministral-3-8b": 8_489_553_920, "vaultgemma-1b": 1_038_741_120, "nanochat-d20": 560_988_160,
    "minicpm3-4b": 4_073_875_968, "youtu-llm-2b": 1_961_560_064, "flex_olmo of its class": 33_270_665_216,
    "granitemoe_swa of its class": 37_039_117_312, "mellum-2-12b": 12_149_923_072, "aria of its class": 18_517_069_824,
    "ernie-4.5-21b-a3b": 21_825_436_160, "exaone_moe of its class": 28_550_639_616, "solar-open-100b": 102_651_793_408,
    "glm-4.7-flash": 29_943_390_976, "sarvam-105b": 106_031_763_456, "sarvam-30b": 32_152_648_064,
    "opt without biases": 188_160, "gpt_bigcode with all heads": 351_552, "gpt_neo with a width": 179_304,
    "persimmon without norms of queries": 293_144, "ernie4_5 with biases": 324_832, "helium with biases": 272_208,
    "internlm3 with biases": 334_528, "hyperclovax without norms behind": 333_408, "jais2 without biases": 382_464,
    "minicpm3 without a rank": 241_252, "youtu with biases": 208_892, "ernie4_5_moe with biases": 328_949,
    "exaone_moe with two dense layers": 430_800, "mellum with dense layers": 396_240,
    "glm4_moe_lite of sparse layers": 383_028,
    "qwen2-vl-72b text": 72_706_203_648, "qwen2.5-vl-7b text": 7_615_616_512, "qwen3-vl-8b text": 8_190_735_360,
    "qwen3_vl_moe of its class": 13_173_956_608, "glm4v of its class": 9_400_279_040,
    "glm4v_moe of its class": 104_342_673_408, "kimi-k2": 1_026_408_209_408, "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688, "qwen2.5-14b": 14_770_033_664,
    "qwen3-1.7b": 1_720_574_976, "qwen3-coder-480b-a35b": 480_154_875_392, "gemma3-4b": 3_880_263_168,
    "phi4": 14_659_507_200,
    "bamba-9b": 9_780_235_392,
    "falcon-h1-7b": 7_585_513_568,
    "falcon-h1-34b": 33_642_221_312,
    "falcon-h1 with norms": 340_160,
    "kimi-linear-48b-a3b": 49_122_675_072,
    "kimi_linear of its class": 49_133_074_464,
    "olmo-hybrid-7b": 7_430_870_688,
    "lfm2-1.2b": 1_170_340_608,
    "lfm2 of its class": 3_712_130_560,
    "lfm2-8b-a1b": 8_339_929_856,
    "granite-4.0-h-small": 32_207_337_984,
    "granite-4.0-h-without-experts": 539_008,
    "nemotron-3-nano-30b-a3b": 31_577_937_344,
    "nemotron-3-super-120b-a12b": 120_668_687_360,
    "nemotron-h-default": 1_968_415_752,
    "mamba2-2.7b": 2_702_599_680,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "qwen3.5-default": 8_953_803_264,
    "qwen3.5-35b-a3b": 34_660_610_688,
}
"""Parameters, as VERSION of transformers counts them: of CONFIGS, and of the models that are read by name."""


def model_of(fields: dict[str, Any], **others: Any) -> Any:
    """What transformers builds of these fields; a multimodal model where they are of its language model."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    kind, given = fields["model_type"], {name: value for name, value in fields.items() if name != "model_type"}
    whole = kind.removesuffix("_text")
    if kind == whole or whole in ONE_LANGUAGE_MODEL:
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**given), **others)
    text = CONFIG_MAPPING[whole](text_config=given).text_config
    tied = getattr(text, "tie_word_embeddings", False)  # of the whole model in real files
    config = CONFIG_MAPPING[whole](text_config=given, vision_config={"depth": 1}, tie_word_embeddings=tied)
    return AutoModelForImageTextToText.from_config(config, **others)


def parameters_of(model: Any) -> dict[str, Any]:
    """The parameters of a language model, those of images left out."""
    return {name: each for name, each in model.named_parameters() if "visual" not in name}


def counted(fields: dict[str, Any]) -> int:
    """The parameters of what transformers builds of these fields.

    Tied tables count once.  Buffers never count, and neither does a bias that balances the loads of experts, which ERNIE
    keeps as a parameter without a gradient.  OPT's table of positions has two rows that no token reads: see `gpt_like.opt`.
    """
    import torch

    with torch.device("meta"):
        model = model_of(fields)
    unread = 2 * model.config.hidden_size if fields["model_type"] == "opt" else 0
    return sum(each.numel() for each in parameters_of(model).values() if each.requires_grad) - unread


def main() -> int:
    import transformers

    from parallelism.models.hugging_face.released import RELEASED

    released = {name: fields for name, (_, fields) in RELEASED.items() if fields["model_type"] != "grok1"}
    found = {name: counted(fields) for name, fields in (CONFIGS | released).items()}
    if "--print" in sys.argv:
        print(*(f'    "{name}": {count:_},' for name, count in found.items()), sep="\n")
    wrong = {name: count for name, count in found.items() if count != COUNTS.get(name)}
    print(f"transformers {transformers.__version__}: {len(found)} models, {len(wrong)} differ from the record")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
