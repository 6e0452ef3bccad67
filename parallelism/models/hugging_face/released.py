"""The figures of published models as the fields of their `config.json`, written by hand, with the repository of each.

``SEQUENCES`` has the tokens of a sequence of pretraining where they were published, and differ from the longest
sequence: DeepSeek-V2 (arXiv:2405.04434, section 3.1.2), DeepSeek-V3 (arXiv:2412.19437, section 4.2), Llama 3.1
(arXiv:2407.21783, section 3.4.1; 3.2 began from its weights), Qwen2.5 (arXiv:2412.15115, section 3.3), Qwen3
(arXiv:2505.09388, section 3.2), Gemma 3 (arXiv:2503.19786, section 2.1), Kimi K2 (arXiv:2507.20534, section 2), GLM-4.5
(arXiv:2508.06471, section 2), Phi-4 (arXiv:2412.08905, section 3), gpt-oss (``initial_context_length``).  Mistral AI has not
published those of Mixtral: they are those of NVIDIA's published runs (NeMo's performance summary).
"""

from __future__ import annotations

from typing import Any

from parallelism.models.hugging_face.with_experts import GPT_OSS_YARN

_LLAMA_3 = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
}
_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_DEEPSEEK = {
    "num_attention_heads": 128,
    "moe_layer_freq": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_group": 8,
    "max_position_embeddings": 163_840,
}
_DEEPSEEK_ROPE = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}
_QWEN = {"num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0}
_QWEN_2 = _QWEN | {"model_type": "qwen2", "vocab_size": 152_064, "max_position_embeddings": 131_072}
_QWEN_2_SMALL = _QWEN | {
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
_QWEN_3 = _QWEN | {"vocab_size": 151_936, "head_dim": 128, "max_position_embeddings": 40_960}
_QWEN_3_MOE = _QWEN_3 | {
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
_MISTRAL = {
    "model_type": "mistral",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "sliding_window": None,
    "vocab_size": 131_072,
}
_GEMMA_3 = {"model_type": "gemma3_text", "head_dim": 256, "sliding_window": 1024}
_GEMMA_3_ROPE = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
_GLM_4_5 = {
    "model_type": "glm4_moe",
    "vocab_size": 151_552,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
}
_GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "rope_theta": 150_000,
    "rope_scaling": GPT_OSS_YARN,
}
_OLMO_2 = {
    "model_type": "olmo2",
    "vocab_size": 100_352,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500_000,
}
_NEMOTRON = {
    "model_type": "nemotron",
    "vocab_size": 256_000,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "hidden_act": "relu2",
    "norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
}


def _sized(layers: int, width: int, heads: int, feed_forward: int, **others: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": feed_forward,
        **others,
    }


def _mixtral(layers: int, width: int, heads: int, feed_forward: int, longest: int) -> dict[str, Any]:
    return {
        "model_type": "mixtral",
        **_sized(layers, width, heads, feed_forward, num_key_value_heads=8, vocab_size=32_000),
        "max_position_embeddings": longest,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
    }


RELEASED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3.1-8b": (
        "meta-llama/Llama-3.1-8B",
        _LLAMA_3 | _sized(32, 4096, 32, 14_336, rope_scaling=_LLAMA_3_ROPE),
    ),
    "llama3.1-70b": (
        "meta-llama/Llama-3.1-70B",
        _LLAMA_3 | _sized(80, 8192, 64, 28_672, rope_scaling=_LLAMA_3_ROPE),
    ),
    "llama3.1-405b": (
        "meta-llama/Llama-3.1-405B",
        _LLAMA_3 | _sized(126, 16_384, 128, 53_248, rope_scaling=_LLAMA_3_ROPE),
    ),
    "llama3.2-1b": (
        "meta-llama/Llama-3.2-1B",
        _LLAMA_3
        | _sized(16, 2048, 32, 8192, head_dim=64, tie_word_embeddings=True)
        | {"rope_scaling": _LLAMA_3_ROPE | {"factor": 32.0}},
    ),
    "llama3.2-3b": (
        "meta-llama/Llama-3.2-3B",
        _LLAMA_3
        | _sized(28, 3072, 24, 8192, head_dim=128, tie_word_embeddings=True)
        | {"rope_scaling": _LLAMA_3_ROPE | {"factor": 32.0}},
    ),
    "mixtral-8x7b": ("mistralai/Mixtral-8x7B-v0.1", _mixtral(32, 4096, 32, 14_336, 32_768)),
    "mixtral-8x22b": ("mistralai/Mixtral-8x22B-v0.1", _mixtral(56, 6144, 48, 16_384, 65_536)),
    "deepseek-v2-lite": (
        "deepseek-ai/DeepSeek-V2-Lite",
        _DEEPSEEK
        | _sized(27, 2048, 16, 10_944, model_type="deepseek_v2", vocab_size=102_400, q_lora_rank=None)
        | {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "topk_method": "greedy"}
        | {"n_group": 1, "topk_group": 1, "moe_intermediate_size": 1408, "first_k_dense_replace": 1}
        | {"routed_scaling_factor": 1.0, "norm_topk_prob": False}
        | {"rope_scaling": _DEEPSEEK_ROPE | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek-v2": (
        "deepseek-ai/DeepSeek-V2",
        _DEEPSEEK
        | _sized(60, 5120, 128, 12_288, model_type="deepseek_v2", vocab_size=102_400)
        | {"n_routed_experts": 160, "n_shared_experts": 2, "num_experts_per_tok": 6}
        | {"topk_method": "group_limited_greedy", "topk_group": 3, "moe_intermediate_size": 1536}
        | {"first_k_dense_replace": 1, "routed_scaling_factor": 16.0, "norm_topk_prob": False}
        | {"rope_scaling": _DEEPSEEK_ROPE | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek-v3": (
        "deepseek-ai/DeepSeek-V3",
        _DEEPSEEK
        | _sized(61, 7168, 128, 18_432, model_type="deepseek_v3", vocab_size=129_280)
        | {"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "topk_group": 4}
        | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_intermediate_size": 2048}
        | {"first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
        | {"rope_scaling": _DEEPSEEK_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "kimi-k2": (
        "moonshotai/Kimi-K2-Base",
        _DEEPSEEK
        | _sized(61, 7168, 64, 18_432, model_type="deepseek_v3", vocab_size=163_840)
        | {
            "n_routed_experts": 384,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 1,
            "topk_group": 1,
        }
        | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_intermediate_size": 2048}
        | {"first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "norm_topk_prob": True}
        | {"rope_theta": 50_000.0, "max_position_embeddings": 131_072}
        | {
            "rope_scaling": _DEEPSEEK_ROPE
            | {"factor": 32, "beta_fast": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
        },
    ),
    "qwen2.5-0.5b": (
        "Qwen/Qwen2.5-0.5B",
        _QWEN_2_SMALL | _sized(24, 896, 14, 4864, num_key_value_heads=2),
    ),
    "qwen2.5-1.5b": (
        "Qwen/Qwen2.5-1.5B",
        _QWEN_2_SMALL | _sized(28, 1536, 12, 8960, num_key_value_heads=2),
    ),
    "qwen2.5-3b": (
        "Qwen/Qwen2.5-3B",
        _QWEN_2_SMALL | _sized(36, 2048, 16, 11_008, num_key_value_heads=2),
    ),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B", _QWEN_2 | _sized(28, 3584, 28, 18_944, num_key_value_heads=4)),
    "qwen2.5-14b": ("Qwen/Qwen2.5-14B", _QWEN_2 | _sized(48, 5120, 40, 13_824)),
    "qwen2.5-32b": ("Qwen/Qwen2.5-32B", _QWEN_2 | _sized(64, 5120, 40, 27_648)),
    "qwen2.5-72b": ("Qwen/Qwen2.5-72B", _QWEN_2 | _sized(80, 8192, 64, 29_568)),
    "qwen3-0.6b": (
        "Qwen/Qwen3-0.6B",
        _QWEN_3 | _sized(28, 1024, 16, 3072, model_type="qwen3", tie_word_embeddings=True),
    ),
    "qwen3-1.7b": (
        "Qwen/Qwen3-1.7B",
        _QWEN_3 | _sized(28, 2048, 16, 6144, model_type="qwen3", tie_word_embeddings=True),
    ),
    "qwen3-4b": (
        "Qwen/Qwen3-4B",
        _QWEN_3 | _sized(36, 2560, 32, 9728, model_type="qwen3", tie_word_embeddings=True),
    ),
    "qwen3-8b": ("Qwen/Qwen3-8B", _QWEN_3 | _sized(36, 4096, 32, 12_288, model_type="qwen3")),
    "qwen3-14b": ("Qwen/Qwen3-14B", _QWEN_3 | _sized(40, 5120, 40, 17_408, model_type="qwen3")),
    "qwen3-32b": ("Qwen/Qwen3-32B", _QWEN_3 | _sized(64, 5120, 64, 25_600, model_type="qwen3")),
    "qwen3-30b-a3b": (
        "Qwen/Qwen3-30B-A3B",
        _QWEN_3_MOE | _sized(48, 2048, 32, 6144, moe_intermediate_size=768),
    ),
    "qwen3-235b-a22b": (
        "Qwen/Qwen3-235B-A22B",
        _QWEN_3_MOE | _sized(94, 4096, 64, 12_288, moe_intermediate_size=1536),
    ),
    "qwen3-coder-480b-a35b": (
        "Qwen/Qwen3-Coder-480B-A35B-Instruct",
        _QWEN_3_MOE
        | _sized(62, 6144, 96, 8192, moe_intermediate_size=2560)
        | {"num_key_value_heads": 8, "num_experts": 160, "max_position_embeddings": 262_144}
        | {"rope_theta": 10_000_000.0},
    ),
    "glm4.5": (
        "zai-org/GLM-4.5-Base",
        _GLM_4_5
        | _sized(92, 5120, 96, 12_288, moe_intermediate_size=1536, n_routed_experts=160, use_qk_norm=True)
        | {"first_k_dense_replace": 3, "routed_scaling_factor": 2.5},
    ),
    "glm4.5-air": (
        "zai-org/GLM-4.5-Air-Base",
        _GLM_4_5
        | _sized(46, 4096, 96, 10_944, moe_intermediate_size=1408, n_routed_experts=128, use_qk_norm=False)
        | {"first_k_dense_replace": 1, "routed_scaling_factor": 1.0},
    ),
    "minimax-m2": (
        "MiniMaxAI/MiniMax-M2",
        _sized(62, 3072, 48, 1536, model_type="minimax_m2", num_key_value_heads=8, head_dim=128)
        | {"num_local_experts": 256, "num_experts_per_tok": 8, "vocab_size": 200_064, "rotary_dim": 64}
        | {"rope_theta": 5_000_000.0, "max_position_embeddings": 196_608},
    ),
    "mistral-nemo": (
        "mistralai/Mistral-Nemo-Base-2407",
        _MISTRAL
        | _sized(40, 5120, 32, 14_336, max_position_embeddings=131_072)
        | {"rope_theta": 1_000_000.0},
    ),
    "mistral-small-24b": (
        "mistralai/Mistral-Small-24B-Base-2501",
        _MISTRAL
        | _sized(40, 5120, 32, 32_768, max_position_embeddings=32_768)
        | {"rope_theta": 100_000_000.0},
    ),
    "smollm3-3b": (
        "HuggingFaceTB/SmolLM3-3B-Base",
        _sized(36, 2048, 16, 11_008, model_type="smollm3", num_key_value_heads=4),
    ),
    "gemma2-9b": (
        "google/gemma-2-9b",
        _sized(42, 3584, 16, 14_336, model_type="gemma2", num_key_value_heads=8),
    ),
    "gemma2-27b": (
        "google/gemma-2-27b",
        _sized(46, 4608, 32, 36_864, model_type="gemma2", num_key_value_heads=16, head_dim=128)
        | {"query_pre_attn_scalar": 144},
    ),
    "gemma3-1b": (
        "google/gemma-3-1b-pt",
        _GEMMA_3
        | _sized(26, 1152, 4, 6912, num_key_value_heads=1, vocab_size=262_144)
        | {"sliding_window": 512, "max_position_embeddings": 32_768},
    ),
    "gemma3-4b": (
        "google/gemma-3-4b-pt",
        _GEMMA_3 | _sized(34, 2560, 8, 10_240, num_key_value_heads=4) | _GEMMA_3_ROPE,
    ),
    "gemma3-12b": (
        "google/gemma-3-12b-pt",
        _GEMMA_3 | _sized(48, 3840, 16, 15_360, num_key_value_heads=8) | _GEMMA_3_ROPE,
    ),
    "gemma3-27b": (
        "google/gemma-3-27b-pt",
        _sized(62, 5376, 32, 21_504, model_type="gemma3_text", num_key_value_heads=16, head_dim=128)
        | {"query_pre_attn_scalar": 168, "sliding_window": 1024}
        | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "gpt-oss-20b": ("openai/gpt-oss-20b", _GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32}),
    "gpt-oss-120b": ("openai/gpt-oss-120b", _GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128}),
    "phi3-mini": (
        "microsoft/Phi-3-mini-4k-instruct",
        _sized(32, 3072, 32, 8192, model_type="phi3", sliding_window=2047),
    ),
    "phi4": (
        "microsoft/phi-4",
        _sized(40, 5120, 40, 17_920, model_type="phi3", num_key_value_heads=10, vocab_size=100_352)
        | {"sliding_window": None, "rope_theta": 250_000.0, "max_position_embeddings": 16_384},
    ),
    "olmo2-7b": ("allenai/OLMo-2-1124-7B", _OLMO_2 | _sized(32, 4096, 32, 11_008)),
    "olmo2-13b": ("allenai/OLMo-2-1124-13B", _OLMO_2 | _sized(40, 5120, 40, 13_824)),
    "olmo2-32b": ("allenai/OLMo-2-0325-32B", _OLMO_2 | _sized(64, 5120, 40, 27_648, num_key_value_heads=8)),
    "nemotron-15b": ("arXiv:2402.16819, table 1", _NEMOTRON | _sized(32, 6144, 48, 24_576)),
    "nemotron-340b": ("nvidia/Nemotron-4-340B-Base", _NEMOTRON | _sized(96, 18_432, 96, 73_728)),
    "grok1-314b": (
        "xai-org/grok-1",
        _sized(64, 6144, 48, 32_768, model_type="grok1", vocab_size=131_072, num_key_value_heads=8),
    ),
    "mpt-7b": (
        "mosaicml/mpt-7b",
        {"model_type": "mpt", "n_layers": 32, "d_model": 4096, "n_heads": 32, "vocab_size": 50_432},
    ),
    "mpt-30b": (
        "mosaicml/mpt-30b",
        {"model_type": "mpt", "n_layers": 48, "d_model": 7168, "n_heads": 64, "vocab_size": 50_432}
        | {"max_seq_len": 8192},
    ),
    "falcon-7b": (
        "tiiuae/falcon-7b",
        {"model_type": "falcon", "num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71},
    ),
    "falcon-40b": (
        "tiiuae/falcon-40b",
        {"model_type": "falcon", "num_hidden_layers": 60, "hidden_size": 8192, "num_attention_heads": 128}
        | {"new_decoder_architecture": True, "num_kv_heads": 8},
    ),
    "bloom-176b": (
        "bigscience/bloom",
        {"model_type": "bloom", "n_layer": 70, "hidden_size": 14_336, "n_head": 112, "vocab_size": 250_880},
    ),
}
"""The repository and the fields of each."""

SEQUENCES = {
    **dict.fromkeys(("mixtral-8x7b", "mixtral-8x22b", "gpt-oss-20b", "gpt-oss-120b"), 4096),
    **dict.fromkeys(("deepseek-v2-lite", "deepseek-v2", "deepseek-v3"), 4096),
    **dict.fromkeys(("kimi-k2", "glm4.5", "glm4.5-air", "phi4"), 4096),
    **{name: 4096 for name in RELEASED if name.startswith(("qwen2.5-", "qwen3-"))},
    **{name: 8192 for name in RELEASED if name.startswith("llama3.")},
    **{name: 32_768 for name in RELEASED if name.startswith("gemma3-")},
}
