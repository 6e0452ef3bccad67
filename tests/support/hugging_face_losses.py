"""The losses that transformers 5.24.0 computes with small models of each architecture, whose weights are made from names.

`loss_of` computes the same with the program of `from_config`.  In an environment with transformers and torch,
`python tests/support/hugging_face_losses.py` computes the record again and prints what differs; `--print` prints it.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np
from hugging_face_configs import model_of, parameters_of

from parallelism.ir import interpret
from parallelism.models import TransformerSpec, from_config

VOCABULARY, TOKENS, BATCH = 31, 16, 2

_SIZES = {"num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 40, "vocab_size": VOCABULARY,
          "max_position_embeddings": TOKENS}
_WIDE = _SIZES | {"hidden_size": 24, "head_dim": 8, "num_key_value_heads": 2}
_PLAIN = _SIZES | {"hidden_size": 32}
_GROUPED = _PLAIN | {"num_key_value_heads": 2}
_GPT = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": TOKENS, "vocab_size": VOCABULARY, "attn_pdrop": 0.0,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0}
_LATENT = _SIZES | {"hidden_size": 24, "num_key_value_heads": 4, "q_lora_rank": 10, "kv_lora_rank": 6, "qk_nope_head_dim": 8,
                    "qk_rope_head_dim": 4, "v_head_dim": 6}
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 12,
           "n_shared_experts": 2, "first_k_dense_replace": 1}
_FOUR = {"num_local_experts": 4, "num_experts_per_tok": 2}
_FOUR_OF_QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_GRANITE = {"embedding_multiplier": 2.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 3.0}
_LLAMA_3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": TOKENS,
         "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
_OF_IMAGES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_WINDOWS = {"sliding_window": 4}
_EVEN_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_GEMMA = _WIDE | _WINDOWS | {"query_pre_attn_scalar": 10}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 6, "mamba_n_groups": 2, "mamba_d_state": 5, "mamba_chunk_size": 6}
_FALCON = {"key_multiplier": 0.7, "embedding_multiplier": 1.5, "lm_head_multiplier": 0.6, "mlp_multipliers": [0.8, 1.3],
           "attention_in_multiplier": 0.9, "attention_out_multiplier": 1.2, "ssm_in_multiplier": 1.1,
           "ssm_out_multiplier": 0.85, "ssm_multipliers": [0.75, 1.25, 0.65, 1.35, 0.95]}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 6, "linear_value_head_dim": 5,
          "head_dim": 16, "num_key_value_heads": 2, "hidden_size": 24, "full_attention_interval": 2}
_OF_DELTA = _SIZES | _DELTA | _FOUR_OF_QWEN | {"shared_expert_intermediate_size": 20}

CASES: dict[str, dict[str, Any]] = {
    "llama": _WIDE | {"attention_bias": True, "mlp_bias": True, "rope_parameters": _LLAMA_3},
    "mistral": _WIDE | _WINDOWS,
    "qwen2": _WIDE | _WINDOWS | {"use_sliding_window": True, "max_window_layers": 2},
    "qwen3": _WIDE,
    "gemma": _WIDE,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA | _EVEN_WINDOWS,
    "vaultgemma": _GEMMA,
    "phi": _GROUPED | {"partial_rotary_factor": 0.5},
    "phi3": _GROUPED | {"original_max_position_embeddings": TOKENS},
    "olmo": _PLAIN,
    "olmo2": _GROUPED,
    "olmo3": _GROUPED | _WINDOWS,
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gptj": _GPT | {"rotary_dim": 4},
    "codegen": _GPT | {"rotary_dim": 4, "n_ctx": TOKENS},
    "gpt_neo": {"hidden_size": 32, "num_layers": 4, "num_heads": 4, "vocab_size": VOCABULARY, "window_size": 4,
                "max_position_embeddings": TOKENS, "attention_types": [[["global", "local"], 2]]},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": VOCABULARY, "max_seq_len": TOKENS},
    "gpt_neox": _PLAIN,
    "opt": _PLAIN | {"ffn_dim": 40},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "seq_length": TOKENS},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY,
               "max_position_embeddings": TOKENS},
    "persimmon": _PLAIN,
    "starcoder2": _GROUPED,
    "nemotron": _WIDE,
    "granite": _GROUPED | _GRANITE,
    "granite_swa": _GROUPED | _GRANITE | _WINDOWS | {"layer_rope_theta": [0, 3e4, 3e4, 0]},
    "hyperclovax": _GROUPED | _GRANITE,
    "cohere": _GROUPED,
    "cohere2": _GROUPED | _WINDOWS,
    "smollm3": _GROUPED,
    "seed_oss": _WIDE,
    "glm": _WIDE,
    "glm4": _WIDE,
    "exaone4": _WIDE | _WINDOWS | {"sliding_window_pattern": 2},
    "arcee": _WIDE,
    "stablelm": _GROUPED,
    "ernie4_5": _WIDE | {"use_bias": True},
    "helium": _GROUPED | {"head_dim": 8, "attention_bias": True, "mlp_bias": True},
    "cwm": _WIDE | _WINDOWS | {"rope_parameters": _LLAMA_3},
    "internlm3": _WIDE | {"attention_bias": True, "mlp_bias": True},
    "jais2": _GROUPED,
    "ministral3": _WIDE | _WINDOWS | {"rope_parameters": _YARN},
    "nanochat": _GROUPED,
    "minicpm3": _LATENT | {"dim_model_base": 10},
    "youtu": _LATENT,
    "mixtral": _WIDE | _FOUR,
    "qwen2_moe": _WIDE | _FOUR_OF_QWEN | {"shared_expert_intermediate_size": 20},
    "qwen3_moe": _WIDE | _FOUR_OF_QWEN | {"norm_topk_prob": True},
    "mellum": _WIDE | _FOUR_OF_QWEN | _WINDOWS | _EVEN_WINDOWS | {"mlp_layer_types": ["dense", "sparse"] * 2},
    "olmoe": _PLAIN | {"num_experts": 4, "num_experts_per_tok": 2},
    "flex_olmo": _GROUPED | {"num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": _GROUPED | _FOUR | _GRANITE,
    "granitemoeshared": _GROUPED | _FOUR | {"shared_intermediate_size": 20},
    "granitemoe_swa": _GROUPED | _FOUR | _WINDOWS | {"shared_intermediate_size": 12},
    "gpt_oss": _WIDE | _FOUR | _WINDOWS | {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
    "llama4_text": _WIDE | _FOUR | {"intermediate_size_mlp": 36, "attention_chunk_size": TOKENS, "no_rope_layers": None,
                                    "attn_temperature_tuning": False, "interleave_moe_layer_step": 2},
    "deepseek_v2": _LATENT | _ROUTED | {"q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "deepseek_v3": _LATENT | _ROUTED,
    "glm4_moe": _WIDE | _ROUTED | {"use_qk_norm": True},
    "glm4_moe_lite": _LATENT | _ROUTED,
    "sarvam_mla": _LATENT | _ROUTED | {"q_lora_rank": None},
    "sarvam_moe": _WIDE | _ROUTED,
    "solar_open": _WIDE | _ROUTED | {"first_k_dense_replace": 0},
    "dots1": _WIDE | _ROUTED,
    "exaone_moe": _WIDE | _WINDOWS | {"num_experts": 8, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1,
                                      "num_shared_experts": 2, "moe_intermediate_size": 12},
    "minimax_m2": _WIDE | _FOUR | {"rotary_dim": 4},
    "aria_text": _WIDE | {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 2},
    "qwen2_vl_text": _GROUPED | {"rope_parameters": _OF_IMAGES},
    "qwen2_5_vl_text": _GROUPED | {"rope_parameters": _OF_IMAGES},
    "qwen3_vl_text": _WIDE,
    "qwen3_vl_moe_text": _WIDE | _FOUR_OF_QWEN,
    "glm4v_text": _GROUPED | {"rope_parameters": _OF_IMAGES},
    "glm4v_moe_text": _WIDE | _ROUTED | {"rope_parameters": _OF_IMAGES | {"mrope_section": [1, 1, 0]}},
    "ernie4_5_moe": _GROUPED | {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 2, "moe_intermediate_size": 12,
                                "moe_layer_start_index": 1, "moe_layer_end_index": 2},
    "bamba": _WIDE | _MAMBA | {"attn_layer_indices": [1], "attention_bias": True, "mamba_proj_bias": True},
    "granitemoehybrid": _WIDE | _MAMBA | _FOUR | _GRANITE | {
        "layer_types": ["mamba", "attention", "mamba", "attention"], "shared_intermediate_size": 20,
        "time_step_limit": [0.7, float("inf")]},
    "nemotron_h": _WIDE | _ROUTED | {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"], "mamba_num_heads": 8,
        "mamba_head_dim": 6, "n_groups": 2, "ssm_state_size": 5, "chunk_size": 6, "time_step_min": 0.6,
        "moe_shared_expert_intermediate_size": 20, "mlp_bias": True, "moe_latent_size": 10},
    "mamba2": {"num_heads": 8, "head_dim": 6, "n_groups": 2, "state_size": 5, "chunk_size": 6, "hidden_size": 24,
               "num_hidden_layers": 3, "vocab_size": VOCABULARY, "max_position_embeddings": TOKENS},
    "falcon_h1": _WIDE | _MAMBA | {
        "mamba_d_ssm": 48, "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "projectors_bias": True,
        "mamba_rms_norm": True, **_FALCON},
    "olmo_hybrid": _SIZES | {
        "hidden_size": 32, "num_key_value_heads": 2, "rope_parameters": {"rope_theta": None, "rope_type": "default"},
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5},
    "kimi_linear": _LATENT | {
        "q_lora_rank": None, "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 8, "num_experts": 8, "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1,
        "moe_intermediate_size": 12, "n_shared_experts": 2, "first_k_dense_replace": 1, "linear_head_dim": 6,
        "linear_num_heads": 4},
    "lfm2": _GROUPED | {"full_attn_idxs": [1, 3], "conv_bias": True, "block_multiple_of": 8, "conv_L_cache": 3},
    "lfm2_moe": _GROUPED | _FOUR_OF_QWEN | {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_dense_layers": 1},
    "qwen3_next": _OF_DELTA | {"mlp_only_layers": [1], "attention_bias": True},
    "qwen3_5_text": _SIZES | _DELTA | {"layer_types": ["linear_attention", "full_attention"] * 2},
    "qwen3_5_moe_text": _OF_DELTA,
}
"""The fields of a small model of each architecture, by its ``model_type``."""

LOSSES: dict[str, float] = {
    "llama": 4.092011, "mistral": 4.011724, "qwen2": 3.974120, "qwen3": 3.917578, "gemma": 4.493212, "gemma2": 4.228992,
    "gemma3_text": 4.345515, "vaultgemma": 4.324473, "phi": 4.690131, "phi3": 4.256380, "olmo": 4.158909,
    "olmo2": 4.197855, "olmo3": 4.143672, "gpt2": 4.073556, "gpt_bigcode": 4.403538, "gptj": 4.606842,
    "codegen": 4.606842, "gpt_neo": 4.266500, "mpt": 3.921771, "gpt_neox": 4.562486, "opt": 4.614147, "bloom": 4.467839,
    "falcon": 4.413172, "persimmon": 4.450352, "starcoder2": 4.730602, "nemotron": 4.142422, "granite": 3.642358,
    "granite_swa": 3.504707, "hyperclovax": 8.271712, "cohere": 3.463451, "cohere2": 3.450354, "smollm3": 3.937340,
    "seed_oss": 3.914679, "glm": 3.943635, "glm4": 4.217462, "exaone4": 4.132346, "arcee": 4.383344, "stablelm": 4.200165,
    "ernie4_5": 3.602861, "helium": 4.229272, "cwm": 4.017999, "internlm3": 4.004443, "jais2": 4.973066,
    "ministral3": 4.011036, "nanochat": 4.463961, "minicpm3": 3.747266, "youtu": 4.465445, "mixtral": 3.891898,
    "qwen2_moe": 4.149413, "qwen3_moe": 4.550352, "mellum": 4.040132, "olmoe": 3.926463, "flex_olmo": 4.212974,
    "granitemoe": 3.672304, "granitemoeshared": 3.973524, "granitemoe_swa": 3.830565, "gpt_oss": 3.554249,
    "llama4_text": 3.808155, "deepseek_v2": 3.828241, "deepseek_v3": 3.730414, "glm4_moe": 4.003044,
    "glm4_moe_lite": 3.601613, "sarvam_mla": 3.930096, "sarvam_moe": 4.193436, "solar_open": 4.257577, "dots1": 3.955229,
    "exaone_moe": 3.747813, "minimax_m2": 3.757788, "aria_text": 3.806031, "qwen2_vl_text": 4.048041,
    "qwen2_5_vl_text": 4.048041, "qwen3_vl_text": 3.901966, "qwen3_vl_moe_text": 4.246244, "glm4v_text": 4.048000,
    "glm4v_moe_text": 4.068328, "ernie4_5_moe": 3.957923, "bamba": 4.660947, "granitemoehybrid": 3.608232,
    "falcon_h1": 3.815020, "olmo_hybrid": 4.051939, "lfm2": 4.206591, "lfm2_moe": 4.216894,
    "kimi_linear": 4.070832,
    "nemotron_h": 4.391554, "mamba2": 4.460346, "qwen3_next": 4.254241, "qwen3_5_text": 4.117590,
    "qwen3_5_moe_text": 4.267628,
}
"""What transformers computes of them."""


def spec_of(kind: str) -> TransformerSpec:
    """The model in float64, without dropout."""
    spec = from_config({"model_type": kind, **CASES[kind]})
    return replace(spec, dtype=np.float64, dropout=0.0, attention_dropout=0.0, hidden_dropout=0.0)


def weight_of(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A parameter, made from its name: matrices that keep the size of values, vectors around 1 and biases around 0."""
    random = np.random.default_rng(crc32(name.encode()))
    values = random.standard_normal(shape)
    if len(shape) > 1:
        return values * 1.3 * shape[-1] ** -0.5
    return 0.2 * values + ("norm" in name and "bias" not in name)


def tokens_and_targets() -> np.ndarray:
    return np.random.default_rng(1).integers(0, VOCABULARY, (2, BATCH, TOKENS))


def loss_of(kind: str) -> float:
    """The loss that the program of the spec computes."""
    spec = spec_of(kind)
    arrays = {f"p.{name}": weight_of(name, tuple(map(int, shape))) for name, shape in spec.weights.items()}
    arrays["tokens"], arrays["targets"] = tokens_and_targets()
    return float(interpret(spec.function(batch=BATCH), arrays).outputs[0])


# -- where transformers has the same weights --------------------------------------------------------------------------

NEIGHBOURS = {"glm", "glm4", "glm4v_text", "cohere", "cohere2", "gptj", "codegen", "ernie4_5", "ernie4_5_moe", "helium",
              "llama4_text", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "sarvam_mla"}
"""Architectures that rotate pairs of neighbours, as a `TransformerSpec` does; others rotate two halves of a head."""
LESS_1 = {"gemma", "gemma2", "gemma3_text", "vaultgemma", "nemotron", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
"""Those that store the weight of a norm less 1."""
_LAYER = r"(?:layers|h|blocks)\.(\d+)\."
_PLACES = {
    "tokens": "embed_tokens|wte|word_embeddings|embed_in|model.embeddings|backbone.embeddings",
    "positions": "wpe|embed_positions",
    "head": "lm_head|embed_out",
    "norm": "model.norm|language_model.norm|ln_f|norm_f|final_layer_norm|final_layernorm|model.final_layernorm|"
            "model.embedding_norm",
    "state_norm": "mamba.norm|linear_attn.norm|mixer.norm|linear_attn.o_norm|self_attn.o_norm",
    "latent_down": "fc1_latent_proj",
    "latent_up": "fc2_latent_proj",
    "decay_down": "f_a_proj",
    "decay_up": "f_b_proj",
    "gate_down": "g_a_proj",
    "gate_up": "g_b_proj",
    "state_out": "mamba.out_proj|linear_attn.out_proj|mixer.out_proj|linear_attn.o_proj|conv.out_proj|o_proj",
    "rate_bias": "dt_bias",
    "decay": "A_log",
    "skip": "D",
    "embedding_norm": "word_embeddings_layernorm",
    "out": "o_proj|self_attn.dense|attention.dense|attn.c_proj|out_proj|self_attention.dense",
    "down": "down_proj|feed_forward.w2|fc2|dense_4h_to_h|mlp.c_proj|fc_out",
    "router": "gate|router|router.layer",
    "shared_router": "shared_expert_gate",
    "query": "q_proj",
    "query_down": "q_a_proj",
    "query_up": "q_b_proj",
    "key_value_down": "kv_a_proj_with_mqa",
    "key_value_up": "kv_b_proj",
    "query_norm": "q_norm|q_layernorm|q_a_layernorm",
    "key_norm": "k_norm|k_layernorm",
    "key_value_norm": "kv_a_layernorm",
    "shared_down": "shared_experts.down_proj|shared_expert.down_proj|shared_mlp.output_linear",
}
"""The modules of a parameter, by the ends of their names."""


class Stored:
    """The arrays of a model of transformers by their names: here their places in one flat array."""

    def __init__(self, kind: str, spec: TransformerSpec, places: dict[str, np.ndarray]) -> None:
        self.kind, self.spec, self.places = kind, spec, places

    def find(self, modules: str, layer: int | None, what: str = "weight") -> np.ndarray | None:
        """The array of the first of these modules (or parameters) that is there, in a layer or outside of all."""
        for module in modules.split("|"):
            end = re.compile(rf"(?:^|\.){re.escape(module)}(?:\.{what})?$" if what else rf"\.{re.escape(module)}$")
            for name, array in self.places.items():
                inside = re.search(_LAYER, name)
                if end.search(name) and (None if inside is None else int(inside[1])) == layer:
                    return array
        return None

    def need(self, modules: str, layer: int | None, what: str = "weight") -> np.ndarray:
        found = self.find(modules, layer, what)
        assert found is not None, (self.kind, modules, layer, [*self.places])
        return found

    def of(self, name: str) -> np.ndarray:
        """The places of the parameter that a `TransformerSpec` calls so, in its shape."""
        number, _, inside = name.rpartition(".")
        layer = int(number) if number else None
        what = "bias" if inside.endswith("_bias") and inside != "rate_bias" else "weight"
        inside = inside if inside == "rate_bias" else inside.removesuffix("_bias")
        if inside == "qkv":
            return self._qkv(layer, what)
        if inside in ("rate_bias", "decay", "skip"):
            return self.need(_PLACES[inside], layer, "").reshape(-1)
        if inside in ("state_in", "convolution"):
            return self._of_state(inside, layer, what)
        if inside in ("gate", "up", "shared_gate", "shared_up"):
            return self._first_product(inside, layer, what)
        if inside.startswith("expert_"):
            return self._experts(inside.removeprefix("expert_"), layer, what)
        if inside == "sinks":
            return self.need("sinks", layer, "")
        if re.fullmatch("norm[12](_after)?", inside):
            return self.need(self._norm(inside, layer), layer, what)
        array = self.need(_PLACES[inside], layer, what)
        if inside == "positions":
            return array[-TOKENS:]
        if inside in ("query_norm", "key_norm") and self.spec.attention is None:
            return self._rotated(array, int(self.spec.head_width), self.spec.rotated)
        if inside in ("query", "query_up", "key_value_down"):
            array = self._latent(array, inside)
        transposed = array.ndim == 2 and inside not in ("tokens", "head") and not self._by_rows(inside)
        return array.T if transposed else array

    def _by_rows(self, inside: str) -> bool:
        """Whether the product is stored as here: inputs by outputs."""
        return self.kind == "gpt2" and inside in ("out", "up", "down")

    def _order(self, width: int, rotated: int) -> np.ndarray:
        """The features of a head as here, where the rotated ones are pairs of neighbours."""
        order = np.arange(width)
        if self.kind not in NEIGHBOURS and self.spec.positions == "rotary":
            order[:rotated] = order[:rotated].reshape(2, rotated // 2).T.reshape(-1)
        if self.kind == "nanochat":  # it rotates the other way
            order = order.reshape(-1, 2)[:, ::-1].reshape(-1)
        return order

    def _rotated(self, array: np.ndarray, width: int, rotated: int) -> np.ndarray:
        heads = array.reshape(-1, width, *array.shape[1:])
        return heads[:, self._order(width, rotated)].reshape(array.shape)

    def _latent(self, array: np.ndarray, inside: str) -> np.ndarray:
        """Products of latent attention; the last features of a query and of the shared key are rotated."""
        latent = self.spec.attention
        plain, rotated = latent.head_width, latent.rotary_width
        if inside == "key_value_down":
            plain = latent.key_value_rank
        order = [*range(plain), *(plain + self._order(rotated, rotated))]
        return array.reshape(-1, plain + rotated, *array.shape[1:])[:, order].reshape(array.shape)

    def _qkv(self, layer: int | None, what: str) -> np.ndarray:
        spec = self.spec
        heads, groups, width = spec.heads, spec.groups, int(spec.head_width)
        if (q := self.find("q_proj", layer, what)) is not None:
            k, v = self.need("k_proj", layer, what), self.need("v_proj", layer, what)
        elif (joined := self.find("qkv_proj|c_attn|Wqkv", layer, what)) is not None:
            joined = joined.T if self.kind == "gpt2" else joined
            q, k, v = np.split(joined, [heads * width, (heads + groups) * width])
            if self.kind == "codegen":  # four parts of queries, values and keys
                parts = joined.reshape(4, 3, -1, *joined.shape[1:])
                q, v, k = (parts[:, i].reshape(-1, *joined.shape[1:]) for i in range(3))
        else:  # by groups: queries, a key and a value
            joined = self.need("query_key_value", layer, what)
            parts = joined.reshape(groups, heads // groups + 2, width, *joined.shape[1:])
            q, k, v = parts[:, :-2], parts[:, -2], parts[:, -1]
        gates: list[np.ndarray] = []
        if spec.attention_gate:     # behind the features of each head of queries
            rest = q.shape[1:]
            q, gate = q.reshape(heads, 2, width, *rest).swapaxes(0, 1)
            q, gates = q.reshape(-1, *rest), [gate.reshape(groups, -1, width, *rest)]
        order, rest = self._order(width, spec.rotated), joined.shape[1:] if q.ndim > 2 else q.shape[1:]
        parts = [
            q.reshape(heads, width, *rest)[:, order].reshape(groups, -1, width, *rest),
            k.reshape(groups, 1, width, *rest)[:, :, order],
            v.reshape(groups, 1, width, *rest),
            *gates,
        ]
        return np.concatenate(parts, axis=1).reshape(-1, *rest).T

    def _of_state(self, inside: str, layer: int | None, what: str) -> np.ndarray:
        """The product before a state, or the convolution: columns of a group follow each other, of what gates, of values,
        keys, queries and numbers."""
        linear = self.spec.linear_attention
        if linear.kind == "convolution":
            return self._of_convolution(inside, layer, what)
        groups, count = linear.groups, linear.heads // linear.groups
        letters = "vkqn" if self.kind == "kimi_linear" else "zvkqn"
        sizes = dict(zip(letters, linear.parts, strict=True))

        def parts_of(array: np.ndarray, order: str) -> dict[str, np.ndarray]:
            """The rows of each part, by group; all of a part follow each other."""
            ends = np.cumsum([groups * sizes[part] for part in order])[:-1]
            split = np.split(array, ends)
            return {part: rows.reshape(groups, sizes[part], -1) for part, rows in zip(order, split, strict=True)}

        if inside == "convolution":
            array = self.need("conv1d", layer, what)
            found = parts_of(array, "qkv" if linear.is_delta else "vkq")
            joined = np.concatenate([found[part] for part in "vkq"], axis=1).reshape(len(array), -1)
            return joined[:, 0] if what == "bias" else joined
        if not linear.is_delta:
            found = parts_of(self.need("in_proj", layer, what), "zvkqn")
        elif (joined := self.find("in_proj_qkvz", layer, what)) is not None:        # by groups already
            rows = joined.reshape(groups, -1, joined.shape[-1])
            ends = np.cumsum([sizes[part] for part in "qkv"])
            found = dict(zip("qkvz", np.split(rows, ends, axis=1), strict=True))
            found["n"] = self.need("in_proj_ba", layer, what).reshape(groups, 2 * count, -1)
        elif self.kind == "kimi_linear":
            found = {part: self.need(f"{name}_proj", layer, what) for part, name in zip("vkqn", "vkqb", strict=True)}
            found = {part: rows.reshape(groups, -1, rows.shape[-1]) for part, rows in found.items()}
        elif self.kind == "olmo_hybrid":
            names = zip("zvkqba", "gvkqba", strict=True)
            found = {part: self.need(f"linear_attn.{name}_proj", layer, what) for part, name in names}
            found = {part: rows.reshape(groups, -1, rows.shape[-1]) for part, rows in found.items()}
            found["n"] = np.concatenate([found["b"], found["a"]], axis=1)
        else:
            found = parts_of(self.need("in_proj_qkv", layer, what), "qkv")
            names = (("z", "in_proj_z"), ("b", "in_proj_b"), ("a", "in_proj_a"))
            found |= {part: self.need(name, layer, what) for part, name in names}
            found |= {part: found[part].reshape(groups, -1, found[part].shape[-1]) for part in "zba"}
            found["n"] = np.concatenate([found["b"], found["a"]], axis=1)
        joined = np.concatenate([found[part] for part in letters], axis=1)
        joined = joined.reshape(-1, joined.shape[-1])
        return joined[:, 0] if what == "bias" else joined.T

    def _of_convolution(self, inside: str, layer: int | None, what: str) -> np.ndarray:
        """Both gates and the channels of a short convolution, by groups of channels: the gate behind it comes first."""
        if inside == "convolution":
            array = self.need("conv.conv", layer, what)
            return array if what == "bias" else array.reshape(len(array), -1)
        first, last, channels = np.split(self.need("conv.in_proj", layer, what), 3)
        groups = self.spec.linear_attention.groups
        parts = [part.reshape(groups, -1, *part.shape[1:]) for part in (last, first, channels)]
        joined = np.concatenate(parts, axis=1)
        return joined.reshape(-1, *joined.shape[2:]).T

    def factors(self, name: str) -> np.ndarray | float:
        """What a parameter has been multiplied by here: the multipliers of Falcon-H1."""
        if self.kind != "falcon_h1":
            return 1.0
        given, inside = CASES[self.kind], name.rpartition(".")[2]
        gate, down = given["mlp_multipliers"]
        parts = self.spec.linear_attention.parts
        columns = np.tile(np.repeat(given["ssm_multipliers"], parts), self.spec.linear_attention.groups)
        found = {
            "qkv": given["attention_in_multiplier"],
            "state_in": columns * given["ssm_in_multiplier"], "state_in_bias": columns,
            **dict.fromkeys(("out", "out_bias"), given["attention_out_multiplier"]),
            **dict.fromkeys(("state_out", "state_out_bias"), given["ssm_out_multiplier"]),
            **dict.fromkeys(("gate", "gate_bias"), gate), **dict.fromkeys(("down", "down_bias"), down),
        }
        return found.get(inside, 1.0)

    def _first_product(self, inside: str, layer: int | None, what: str) -> np.ndarray:
        """Of a feed-forward, dense or shared; both products may be stored as one."""
        shared, part = inside.startswith("shared_"), inside.removeprefix("shared_")
        modules = f"mlp.{part}_proj|feed_forward.{part}_proj|ffn.{part}_proj"
        modules += f"|feed_forward.{'w1' if part == 'gate' else 'w3'}"
        if shared:
            modules = f"shared_experts.{part}_proj|shared_expert.{part}_proj"
        elif part == "up":
            modules += "|fc1|dense_h_to_4h|c_fc|fc_in|mixer.up_proj"
        array = self.find(modules, layer, what)
        if array is None:
            joined = self.need("shared_mlp.input_linear" if shared else "gate_up_proj", layer, what)
            array = joined[: len(joined) // 2] if part == "gate" else joined[len(joined) // 2 :]
        return array if array.ndim == 1 or self._by_rows(inside) else array.T

    def _experts(self, part: str, layer: int | None, what: str) -> np.ndarray:
        suffix = "_bias" if what == "bias" else ""
        ours = self.kind in ("gpt_oss", "llama4_text", "aria_text")  # inputs by outputs
        if part == "down":
            array = self.need(f"experts.down_proj{suffix}|experts.fc2|block_sparse_moe.output_linear", layer)
            return array if ours else array.swapaxes(1, 2)
        if (array := self.find("experts.up_proj", layer)) is not None:     # without a gate
            return array.swapaxes(1, 2)
        joined = self.need(f"experts.gate_up_proj{suffix}|experts.fc1|block_sparse_moe.input_linear", layer)
        joined = joined if ours else joined.swapaxes(1, 2)
        if self.kind == "gpt_oss":
            return joined[..., part == "up" :: 2]
        half = joined.shape[-1] // 2
        return joined[..., :half] if part == "gate" else joined[..., half:]

    def _norm(self, inside: str, layer: int | None) -> str:
        """The modules of a norm of a block; norms behind attention and feed-forward may stand alone."""
        after_first = self.kind in ("gemma2", "gemma3_text")  # with both, their second norm is behind attention
        second = "pre_feedforward_layernorm|pre_ff_layernorm" + ("" if after_first else "|post_attention_layernorm")
        return {
            "norm1": f"input_layernorm|operator_norm|ln_1|norm_1|self_attn_layer_norm|layers.{layer}.norm",
            "norm2": f"{second}|ffn_norm|ln_2|norm_2|final_layer_norm|layers.{layer}.norm",
            "norm1_after": "post_self_attn_layernorm|post_norm1|post_attention_layernorm",
            "norm2_after": "post_mlp_layernorm|post_norm2|post_feedforward_layernorm",
        }[inside]


def loss_of_transformers(kind: str) -> float:
    """The loss that a model of transformers computes with the same weights."""
    import torch

    spec = spec_of(kind)
    fields = {"model_type": kind, **CASES[kind], "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1}
    model = model_of(fields, attn_implementation="eager", experts_implementation="eager").double().eval()
    parameters = parameters_of(model)
    counts = np.cumsum([0, *(parameter.numel() for parameter in parameters.values())])
    numbers = {name: np.arange(counts[i], counts[i + 1]).reshape(parameter.shape)
               for i, (name, parameter) in enumerate(parameters.items())}
    stored, flat = Stored(kind, spec, numbers), np.zeros(counts[-1])
    for name, shape in spec.weights.items():
        shape = tuple(map(int, shape))
        places = stored.of(name)
        assert places.shape == shape, (kind, name, places.shape, shape)
        is_less = kind in LESS_1 and "norm" in name and "bias" not in name and "state" not in name
        less = 1 if is_less else 0
        flat[places] = weight_of(name, shape) / stored.factors(name) - less
    tokens, targets = map(torch.tensor, tokens_and_targets())
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.tensor(flat[numbers[name]]))
        logits = model(tokens).logits.double()
        return float(torch.nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1)))


def main() -> int:
    import transformers

    found = {kind: loss_of_transformers(kind) for kind in CASES}
    if "--print" in sys.argv:
        print(*(f'    "{kind}": {loss:.6f},' for kind, loss in found.items()), sep="\n")
    wrong = [kind for kind, loss in found.items() if abs(loss - LOSSES.get(kind, 0.0)) > 2e-6]
    print(f"transformers {transformers.__version__}: {len(found)} models, of which differ from the record: {wrong}")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
