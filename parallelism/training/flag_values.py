"""`FlagValues`: the values of Megatron-LM's flags, checked one by one."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from parallelism.display.quantities import short_errors
from parallelism.training.megatron_options import OPTIONS


@dataclass(frozen=True, kw_only=True)
class FlagValues:
    """Values of the flags (`parallelism.training.OPTIONS`) by their names with ``_``; None: not given."""

    num_layers: int | None = None
    hidden_size: int | None = None
    ffn_hidden_size: int | None = None
    num_attention_heads: int | None = None
    group_query_attention: bool | None = None
    num_query_groups: int | None = None
    seq_length: int | None = None
    vocab_size: int | None = None
    padded_vocab_size: int | None = None
    make_vocab_size_divisible_by: int | None = None
    tokenizer_type: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    kv_channels: int | None = None
    swiglu: bool | None = None
    normalization: str | None = None
    position_embedding_type: str | None = None
    no_position_embedding: bool | None = None
    use_rotary_position_embeddings: bool | None = None
    untie_embeddings_and_output_weights: bool | None = None
    disable_bias_linear: bool | None = None
    use_flash_attn: bool | None = None
    attention_backend: str | None = None
    transformer_impl: str | None = None
    use_mcore_models: bool | None = None
    cross_entropy_loss_fusion: bool | None = None
    attention_dropout: float | None = None
    hidden_dropout: float | None = None
    squared_relu: bool | None = None
    quick_geglu: bool | None = None
    qk_layernorm: bool | None = None
    add_qkv_bias: bool | None = None
    window_size: str | None = None
    window_attn_skip_freq: str | None = None
    num_experts: int | None = None
    moe_router_topk: int | None = None
    moe_ffn_hidden_size: int | None = None
    moe_layer_freq: str | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_latent_size: int | None = None
    moe_expert_capacity_factor: float | None = None
    moe_router_score_function: str | None = None
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_token_dispatcher_type: str | None = None
    moe_grouped_gemm: bool | None = None
    multi_latent_attention: bool | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_head_dim: int | None = None
    qk_pos_emb_head_dim: int | None = None
    v_head_dim: int | None = None
    mtp_num_layers: int | None = None
    document_lengths: str | None = None
    document_variation: float | None = None
    lora_rank: int | None = None
    lora_alpha: float | None = None
    lora_products: str | None = None
    tensor_model_parallel_size: int | None = None
    pipeline_model_parallel_size: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    num_virtual_stages_per_pipeline_rank: int | None = None
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    account_for_embedding_in_pipeline_split: bool | None = None
    account_for_loss_in_pipeline_split: bool | None = None
    pipeline_model_parallel_layout: str | None = None
    context_parallel_size: int | None = None
    cp_comm_type: str | None = None
    hierarchical_context_parallel_sizes: str | None = None
    expert_model_parallel_size: int | None = None
    expert_tensor_parallel_size: int | None = None
    sequence_parallel: bool | None = None
    tp_comm_overlap: bool | None = None
    use_distributed_optimizer: bool | None = None
    use_megatron_fsdp: bool | None = None
    data_parallel_sharding_strategy: str | None = None
    num_distributed_optimizer_instances: int | None = None
    outer_dp_sharding_strategy: str | None = None
    overlap_param_gather: bool | None = None
    overlap_grad_reduce: bool | None = None
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_activations: bool | None = None
    fp16: bool | None = None
    bf16: bool | None = None
    fp32: bool | None = None
    accumulate_allreduce_grads_in_fp32: bool | None = None
    grad_reduce_in_bf16: bool | None = None
    main_grads_dtype: str | None = None
    use_precision_aware_optimizer: bool | None = None
    main_params_dtype: str | None = None
    exp_avg_dtype: str | None = None
    exp_avg_sq_dtype: str | None = None
    fp8_format: str | None = None
    fp8: str | None = None
    fp8_recipe: str | None = None
    fp8_amax_history_len: int | None = None
    fp8_amax_compute_algo: str | None = None
    fp8_param_gather: bool | None = None
    fp4_format: str | None = None
    fp4: str | None = None
    fp4_recipe: str | None = None
    first_last_layers_bf16: bool | None = None
    num_layers_at_start_in_bf16: float | None = None
    num_layers_at_end_in_bf16: float | None = None
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    optimizer: str | None = None
    sgd_momentum: float | None = None
    loss_scale: float | None = None
    clip_grad: float | None = None

    @short_errors
    def __post_init__(self) -> None:
        for option in OPTIONS:
            value = getattr(self, option.field)
            if value is None:
                continue
            if option.choices and value not in option.choices + option.unmodelled:
                raise ValueError(f"--{option.name} must be one of {', '.join(option.choices)}, got {value!r}")
            counts = not (option.choices or option.switch or option.rate or option.amount or option.text)
            if counts and (type(value) is not int or value < 1):
                raise ValueError(f"--{option.name} must be a whole number of at least 1, got {value!r}")
            if option.rate and not 0 <= value < 1:
                raise ValueError(f"--{option.name} must be at least 0 and below 1, got {value!r}")
            if option.amount and not 0 <= value < inf:
                raise ValueError(f"--{option.name} must be at least 0 and finite, got {value!r}")
        if len(several := [f"--{name}" for name in ("fp16", "bf16", "fp32") if getattr(self, name)]) > 1:
            raise ValueError(f"{' and '.join(several)} exclude each other")

    def given(self, about: str | None = None) -> dict[str, Any]:
        """The flags that were given, by field; of those about the ``model``, the ``strategy`` or the ``batch``."""
        values = [
            (option, getattr(self, option.field)) for option in OPTIONS if about in (None, option.about)
        ]
        return {
            option.field: value for option, value in values if value or (option.rate and value is not None)
        }

    def words(self) -> tuple[str, ...]:
        """The flags as words of a command line."""
        words: list[str] = []
        given = self.given()
        for option in OPTIONS:
            if option.field in given:
                value = given[option.field]
                words.append(f"--{option.name}")
                if option.many:
                    words += value.split()
                elif not option.switch:
                    words.append(f"{value:g}" if option.rate or option.amount else str(value))
        return tuple(words)
