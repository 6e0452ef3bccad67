"""The flags of Megatron-LM: the models and the runs that they say, and what is refused."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings, strategies as st

from parallelism.mesh import Mesh
from parallelism.models import Experts, LatentAttention, LoRA, TransformerSpec, transformer
from parallelism.simulation import simulate
from parallelism.training import OPTIONS, UNCHANGING, MegatronFlags, figures
from parallelism.training.strategy_run import strategy_run
from parallelism.transforms import ExpertParallel, Strategy

SMALL: dict[str, Any] = {
    "num_layers": 12, "hidden_size": 48, "num_attention_heads": 6, "seq_length": 24, "vocab_size": 130}
WIDE: dict[str, Any] = SMALL | {"fp32": True}


def test_every_option_is_a_field_and_none_is_without_effect() -> None:
    assert [each.name for each in fields(MegatronFlags)] == [option.field for option in OPTIONS]
    assert not {option.name for option in OPTIONS} & set(UNCHANGING)


def test_a_model_has_megatrons_defaults() -> None:
    assert MegatronFlags(**SMALL).spec() == TransformerSpec(
        layers=12, width=48, heads=6, sequence=24, vocabulary=256, attention_dropout=0.1, hidden_dropout=0.1,
        fused_attention=False)


def test_a_model_in_all_its_flags() -> None:
    flags = MegatronFlags(
        **SMALL, group_query_attention=True, num_query_groups=2, make_vocab_size_divisible_by=13, swiglu=True,
        normalization="RMSNorm", position_embedding_type="rope", untie_embeddings_and_output_weights=True,
        disable_bias_linear=True, use_flash_attn=True, attention_dropout=0.0, hidden_dropout=0.2)
    assert flags.spec() == TransformerSpec(
        layers=12, width=48, heads=6, sequence=24, vocabulary=130, key_value_heads=2, feed_forward=128,
        activation="swiglu", norm="rms", positions="rotary", tied=False, biases=False, attention_dropout=0.0,
        hidden_dropout=0.2)
    assert MegatronFlags(ffn_hidden_size=77, swiglu=True, **SMALL).spec().hidden == 77


def test_adapters_in_flags() -> None:
    assert MegatronFlags(**SMALL, lora_rank=4).spec().lora == LoRA(4, 32.0)
    told = MegatronFlags(**SMALL, lora_rank=4, lora_alpha=8.0, lora_products="qkv up")
    assert told.spec().lora == LoRA(4, 8.0, ("qkv", "up"))
    named = transformer("llama2-7b")
    assert MegatronFlags(lora_rank=4).spec(named).adapters.keys() == {
        f"{layer}.{name}.{side}" for layer in range(32) for name in ("qkv", "out") for side in ("down", "up")}
    assert MegatronFlags(lora_rank=4, lora_products="qkv up").words() == ("--lora-rank", "4", "--lora-products", "qkv", "up")
    for flags, error in (({"lora_alpha": 2.0}, "--lora-alpha needs --lora-rank"),
                         ({"lora_products": "qkv"}, "--lora-products needs --lora-rank"),
                         ({"lora_rank": 2, "lora_products": "qkw"}, "LoRA has adapters of 'qkw', which is no product")):
        with pytest.raises(ValueError, match=error):
            MegatronFlags(**SMALL, **flags).spec()


def test_packed_documents_in_flags() -> None:
    def lengths(**flags: Any) -> tuple[int, ...]:
        return MegatronFlags(**SMALL, **flags).spec().document_lengths

    assert (lengths(), lengths(document_lengths="6"), lengths(document_lengths="5 7,3")) == ((), (6,), (5, 7, 3))
    assert lengths(document_lengths="8", document_variation=0.5) == (13, 7, 4)
    told = MegatronFlags(document_lengths="5 7", document_variation=0.5)
    assert told.words() == ("--document-lengths", "5", "7", "--document-variation", "0.5")
    for flags, error in (({"document_variation": 0.5}, "--document-variation needs --document-lengths"),
                         ({"document_lengths": "5 x"}, "--document-lengths must be numbers of tokens, as 512 or 512 1024"),
                         ({"document_lengths": "5 7", "document_variation": 0.5}, "needs the mean length of documents"),
                         ({"document_lengths": "0"}, "documents must be a length of at least 1 token")):
        with pytest.raises(ValueError, match=error):
            lengths(**flags)


def test_experts_latent_attention_and_windows_in_flags() -> None:
    def spec(**more: Any) -> TransformerSpec:
        return MegatronFlags(**SMALL, **more).spec()

    plain = spec(num_experts=8, moe_ffn_hidden_size=5, moe_layer_freq="([0]*3+[1]*9)", moe_router_topk=3,
                 moe_shared_expert_intermediate_size=7, moe_router_num_groups=4, moe_router_group_topk=2,
                 moe_router_score_function="sigmoid", moe_expert_capacity_factor=1.5)
    assert plain.experts == Experts(count=8, chosen=3, width=5, shared_width=7, layers=(False,) * 3 + (True,) * 9,
                                    groups=4, groups_chosen=2, router="sigmoid", capacity=1.5)
    assert spec(num_experts=4, moe_layer_freq="2").experts == Experts(count=4, chosen=2, layers=(True, False) * 6)
    latent = spec(multi_latent_attention=True, q_lora_rank=12, v_head_dim=6, position_embedding_type="rope",
                  qk_layernorm=True, kv_channels=128, mtp_num_layers=1)
    assert latent.attention == LatentAttention(query_rank=12, key_value_rank=32, value_width=6)
    assert (latent.query_key_norm, latent.head_width, latent.next_tokens) == (False, 128 + 64, 1)
    windowed = spec(window_size="(7,0)", window_attn_skip_freq="4")
    assert (windowed.window, windowed.full_attention_every) == (8, 4)
    listed = spec(window_size="7,0", window_attn_skip_freq="[1,0]*6")
    assert listed.full_attention_every == (False, True) * 6 and spec(window_size="-1,0").window is None
    dense = spec(kv_channels=16, qk_layernorm=True, add_qkv_bias=True, disable_bias_linear=True, squared_relu=True)
    assert (dense.head_width, dense.query_key_norm, dense.biases, dense.activation) == (16, "head", ("qkv",), "relu2")
    assert spec(no_position_embedding=True).positions == "none" == spec(position_embedding_type="none").positions
    assert spec(quick_geglu=True).hidden == spec(swiglu=True).hidden


def test_experts_lie_on_devices_of_dp() -> None:
    given = SMALL | {"num_experts": 4, "global_batch_size": 16, "use_distributed_optimizer": True, "fp32": True}
    flags = MegatronFlags(**given, expert_model_parallel_size=4, pipeline_model_parallel_size=2)
    run = flags.run(16)
    assert dict(run.mesh.shape) == {"pp": 2, "dp": 2, "ep": 4} and str(run.strategy) == "dp ep zero=1 pp@block.6 1f1b:2"
    assert (run.microbatches, run.microbatch) == (2, 4)     # of a replica, whose four devices have a sequence each
    alone = flags.run(8)
    assert dict(alone.mesh.shape) == {"pp": 2, "ep": 4} and "zero:ep=1" in str(alone.strategy)
    for each in (run, alone):
        told = MegatronFlags.of(each)
        assert told is not None and told.run(each.mesh.size, each.model) == each  # type: ignore[arg-type]
    assert flags.idle(alone.mesh) == []
    assert MegatronFlags(**given, moe_token_dispatcher_type="allgather").unmodelled == [
        "--moe-token-dispatcher-type allgather"]


def test_the_flex_dispatcher_sends_a_token_once_to_each_node() -> None:
    given = SMALL | {"num_experts": 4, "global_batch_size": 16, "expert_model_parallel_size": 4, "fp32": True}
    plain, alltoall, flex = (
        MegatronFlags(**given, moe_token_dispatcher_type=each).run(8) for each in (None, "alltoall", "flex"))
    assert plain == alltoall and plain.model.experts is not None and not plain.model.experts.deduplicated
    assert flex.model.experts == replace(plain.model.experts, deduplicated=True)
    told = MegatronFlags.of(flex)
    assert told is not None and told.moe_token_dispatcher_type == "flex" and told.run(8, plain.model) == flex


@pytest.mark.parametrize(("flags", "devices", "text", "mesh"), [
    ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "expert_model_parallel_size": 4}, 8,
     "dp tp ep:ep+tp sp", {"pp": 1, "dp": 2, "ep": 2, "tp": 2}),
    ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "expert_model_parallel_size": 2}, 4,
     "dp tp ep:ep+tp sp", {"pp": 1, "dp": 2, "ep": 1, "tp": 2}),
    ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2, "expert_model_parallel_size": 2}, 4,
     "tp ep sp", {"pp": 1, "ep": 2, "tp": 2}),
    ({"context_parallel_size": 2, "expert_model_parallel_size": 4}, 8,
     "dp ring ep:ep+cp", {"pp": 1, "dp": 2, "ep": 2, "cp": 2}),
    ({"context_parallel_size": 4, "expert_model_parallel_size": 4}, 4, "ring ep:ep+cp", {"pp": 1, "ep": 1, "cp": 4}),
    ({"context_parallel_size": 4, "expert_model_parallel_size": 2}, 16,       # half of cp: all are replicas
     "dp ring ep", {"pp": 1, "dp": 2, "ep": 2, "cp": 4}),
    ({"context_parallel_size": 2, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1,
      "expert_model_parallel_size": 4, "use_distributed_optimizer": True}, 8,
     "dp ring tp ep:ep+cp+tp sp zero=1", {"pp": 1, "dp": 2, "ep": 1, "cp": 2, "tp": 2}),
])
def test_experts_lie_on_devices_of_tp_then_cp_then_dp(flags: dict[str, Any], devices: int, text: str,
                                                      mesh: dict[str, int]) -> None:
    given = SMALL | {"num_experts": 4, "global_batch_size": 16, "fp32": True, "attention_backend": "flash"}
    if "tensor_model_parallel_size" in flags:
        given |= {"sequence_parallel": True}
    run = MegatronFlags(**given, **flags).run(devices)
    assert dict(run.mesh.shape) == mesh and str(run.strategy).startswith(f"{text} pp")
    told = MegatronFlags.of(run)
    assert told is not None and told.run(devices, run.model) == run  # type: ignore[arg-type]


def test_experts_over_a_part_of_what_flags_count_first_are_told_by_none() -> None:
    given = SMALL | {"num_experts": 4, "global_batch_size": 16, "fp32": True, "attention_backend": "flash"}
    run = MegatronFlags(**given, context_parallel_size=2, expert_model_parallel_size=4).run(8)
    assert isinstance(run.model, TransformerSpec)
    beside_none = Strategy(*(ExpertParallel() if isinstance(each, ExpertParallel) else each
                             for each in run.strategy.transforms))
    assert MegatronFlags.of(replace(run, strategy=beside_none)) is None


@pytest.mark.parametrize(("flags", "message"), [
    ({"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 2}, "must be 1 or the --tensor-model-parallel-size, 4"),
    ({"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 1, "expert_model_parallel_size": 2}, "multiple of the"),
    ({"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 1, "expert_model_parallel_size": 4},
     "needs --sequence-parallel"),
    ({"expert_model_parallel_size": 8}, "must divide the 4 experts and the 8 devices"),
    ({"context_parallel_size": 4, "expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, "got 2"),
])
def test_experts_that_do_not_fit_the_devices(flags: dict[str, Any], message: str) -> None:
    given = SMALL | {"hidden_size": 64, "num_attention_heads": 8, "num_experts": 4, "global_batch_size": 16, "fp32": True}
    with pytest.raises(ValueError, match=message):
        MegatronFlags(**given, **flags).run(8)


def test_a_rate_of_0_was_given_too() -> None:
    without = MegatronFlags(**SMALL, attention_dropout=0.0, hidden_dropout=0.0)     # the default is 0.1
    assert without.given("model").items() >= {"attention_dropout": 0.0, "hidden_dropout": 0.0}.items()
    assert " ".join(without.words()).endswith("--attention-dropout 0 --hidden-dropout 0")
    assert without.spec().hidden_dropout == 0 != MegatronFlags(**SMALL).spec().hidden_dropout
    gpt = TransformerSpec(layers=12, width=48, heads=6, sequence=24, vocabulary=256, dropout=0.1)
    assert MegatronFlags(hidden_dropout=0.0).spec(gpt).hidden_dropout == 0


def test_flags_change_figures_of_a_published_model() -> None:
    llama = transformer("llama3-8b")
    assert MegatronFlags().spec(llama) == llama
    assert MegatronFlags(num_layers=3, seq_length=64).spec(llama).parameters < llama.parameters / 3
    assert MegatronFlags().spec(transformer("gpt2")).vocabulary == 50_304


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("given", "devices", "text", "mesh"), [
    ({}, 1, "pp 1f1b:1", Mesh(pp=1)),
    ({"fp32": None}, 1, "precision=bf16 pp 1f1b:1", Mesh(pp=1)),
    ({"bf16": True, "fp32": None, "global_batch_size": 12, "micro_batch_size": 2}, 3, "precision=bf16 dp pp 1f1b:2",
     Mesh(pp=1, dp=3)),
    ({"fp32": None, "accumulate_allreduce_grads_in_fp32": True, "use_precision_aware_optimizer": True,
      "main_grads_dtype": "fp32"}, 1, "precision=bf16 pp 1f1b:1", Mesh(pp=1)),
    ({"fp32": None, "grad_reduce_in_bf16": True}, 2, "precision=bf16,bf16 dp pp 1f1b:1", Mesh(pp=1, dp=2)),
    ({"bf16": True, "fp32": None, "main_grads_dtype": "bf16", "use_precision_aware_optimizer": True}, 1,
     "precision=bf16,bf16 pp 1f1b:1", Mesh(pp=1)),
    ({"fp16": True, "fp32": None, "tensor_model_parallel_size": 2, "sequence_parallel": True,
      "use_distributed_optimizer": True}, 6, "precision=f16 dp tp sp zero=1 pp 1f1b:1", Mesh(pp=1, dp=3, tp=2)),
    ({"tensor_model_parallel_size": 3, "pipeline_model_parallel_size": 2, "context_parallel_size": 4}, 24,
     "cp tp pp@block.6 1f1b:1", Mesh(pp=2, cp=4, tp=3)),
    ({"pipeline_model_parallel_size": 5, "global_batch_size": 3}, 5,
     "pp@block.2,block.4,block.7,block.10 1f1b:3", Mesh(pp=5)),
    ({"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 3, "global_batch_size": 8}, 4,
     "dp pp@block.3,block.6,block.9 interleaved_1f1b:4x2", Mesh(pp=2, dp=2)),
    ({"overlap_grad_reduce": True, "use_distributed_optimizer": True}, 3,
     "dp zero=1 overlap=160000000B pp 1f1b:1", Mesh(pp=1, dp=3)),
    ({"overlap_grad_reduce": True}, 50, "dp overlap=200000000B pp 1f1b:1", Mesh(pp=1, dp=50)),
    ({"overlap_grad_reduce": True}, 1, "pp 1f1b:1", Mesh(pp=1)),
    ({"recompute_granularity": "selective", "use_distributed_optimizer": True}, 1,
     "recompute=block.*.attention.core pp 1f1b:1", Mesh(pp=1)),
    ({"recompute_activations": True}, 1, "recompute=block.*.attention.core pp 1f1b:1", Mesh(pp=1)),
    ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, 1,
     "recompute=block.* pp 1f1b:1", Mesh(pp=1)),
    ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2,
      "pipeline_model_parallel_size": 2}, 2, "recompute=block.0,block.1,block.6,block.7 pp@block.6 1f1b:1", Mesh(pp=2)),
])
def test_what_a_run_is(given: dict[str, Any], devices: int, text: str, mesh: Mesh) -> None:
    run = MegatronFlags(**WIDE | given).run(devices)
    assert run.strategy == Strategy.parse(text)
    assert run.mesh == mesh and list(run.mesh.axes) == list(mesh.axes)
    assert run.batch == run.replicas * run.microbatches * run.microbatch


def test_stages_of_a_model_whose_layers_do_not_divide() -> None:
    """Grattafiori et al., 2024, section 3.3.2: 126 layers on 16 stages, one fewer on the first and on the last."""
    run = MegatronFlags(pipeline_model_parallel_size=16).run(16, transformer("llama3-405b"))
    starts = [0, *(int(each.removeprefix("block.")) for each in run.pipeline.begin), 126]
    assert [b - a for a, b in pairwise(starts)] == [7, *[8] * 14, 7]


@pytest.mark.slow
def test_clipping_and_loss_scaling_are_passes_over_the_gradients_of_a_step() -> None:
    """Scaling reads and writes each gradient once, clipping reads and writes it twice and reads it once more."""
    seconds, runs = [], []
    for more in ({}, {"clip_grad": 0.0, "loss_scale": 0.0}, {"clip_grad": 1.0}, {"clip_grad": 1.0, "loss_scale": 64.0}):
        flags = MegatronFlags(**WIDE | more | {
            "num_layers": 1, "hidden_size": 192, "global_batch_size": 2})
        run = flags.run(1)
        assert (run.clip, run.loss_scale) == tuple(more.get(name) or None for name in ("clip_grad", "loss_scale"))
        assert MegatronFlags.of(run).run(1, run.model) == run
        assert MegatronFlags.of(run).given("update") == {name: value for name, value in more.items() if value}
        if runs and run == runs[-1]:        # a clip and a scale of 0 are none
            seconds.append(seconds[-1])
        else:
            trace = simulate(run.step, "dgx-a100+megatron-a100", **run.placed)
            seconds.append(sum(event.nbytes for event in trace if event.kind == "compute" and event.stage is None))
        runs.append(run)
    parameters = run.model.parameters
    plain, none, clipped, scaled = seconds
    assert runs[0] == runs[1] and plain == none and clipped - plain == pytest.approx(5 * 4 * parameters, rel=0.05)
    assert scaled - clipped == pytest.approx(2 * 4 * parameters, rel=0.05)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("given", "devices", "error"), [
    ({"clip_grad": -1.0}, 1, "--clip-grad must be at least 0 and finite, got -1.0"),
    ({"loss_scale": float("inf")}, 1, "--loss-scale must be at least 0 and finite, got inf"),
    ({"num_layers": None, "vocab_size": None}, 1, "gpt needs --num-layers, --vocab-size"),
    ({"num_query_groups": 2}, 1, "--num-query-groups has a meaning with --group-query-attention"),
    ({"bf16": True, "fp16": True}, 1, "--fp16 and --bf16 exclude each other"),
    ({"grad_reduce_in_bf16": True, "accumulate_allreduce_grads_in_fp32": True}, 1,
     "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 exclude each other"),
    ({"grad_reduce_in_bf16": True, "fp16": True}, 1, "--grad-reduce-in-bf16 needs weights in bfloat16; leave out --fp16"),
    ({"main_grads_dtype": "bf16", "fp32": True}, 1, "--main-grads-dtype bf16 needs weights in bfloat16; leave out --fp32"),
    ({"main_grads_dtype": "bf16"}, 1, "--main-grads-dtype bf16 needs --use-precision-aware-optimizer"),
    ({"main_grads_dtype": "fp16"}, 1, "--main-grads-dtype must be one of fp32, bf16, got 'fp16'"),
    ({"num_experts": 6, "expert_model_parallel_size": 4}, 4, "divide the 6 experts and the 4 devices .* got 4"),
    ({"num_experts": 8, "expert_model_parallel_size": 8, "pipeline_model_parallel_size": 4}, 8,
     "divide the 8 experts and the 2 devices .* got 8"),
    ({"expert_model_parallel_size": 2}, 2, "divide the 1 experts"),
    ({"num_experts": 4, "moe_layer_freq": "[0]*3+[1]*8"}, 1, "--moe-layer-freq has 11 entries, the model 12 layers"),
    ({"num_experts": 4, "moe_layer_freq": "[0]*3+f(1)"}, 1, "must be a number, or a list of 0 and 1"),
    ({"num_experts": 4, "moe_layer_freq": "[1]*99999999"}, 1, "must be a number, or a list of 0 and 1"),
    ({"num_experts": 4, "moe_layer_freq": "(" * 3000}, 1, "must be a number, or a list of 0 and 1"),
    ({"num_experts": 4, "moe_layer_freq": "[2]*12"}, 1, "must be a number, or a list of 0 and 1"),
    ({"window_size": "x"}, 1, "--window-size must be the tokens before and behind one, as 1023,0; got 'x'"),
    ({"tensor_model_parallel_size": 2}, 3, "3 devices cannot be dealt"),
    ({"tensor_model_parallel_size": 4}, 4, "--tensor-model-parallel-size must divide the 6 heads, got 4"),
    ({"tensor_model_parallel_size": 3, "group_query_attention": True, "num_query_groups": 2}, 3, "2 heads of keys"),
    ({"context_parallel_size": 5}, 5, "--context-parallel-size must divide the 24 tokens, got 5"),
    ({"pipeline_model_parallel_size": 13}, 13, "at most the 12 layers, got 13"),
    ({"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 7}, 2, "12 layers are too few for 2 x 7"),
    ({"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 3, "global_batch_size": 3}, 2,
     "2 stages divide.*are 3"),
    ({"global_batch_size": 7, "micro_batch_size": 2}, 2, "2 x 2 = 4, got 7"),
    ({"recompute_method": "block"}, 1, "--recompute-granularity full only"),
    ({"recompute_granularity": "full", "recompute_num_layers": 2}, 1, "must be 1 here"),
    ({"recompute_granularity": "some"}, 1, "must be one of full, selective, got 'some'"),
    ({"hidden_size": 0}, 1, "--hidden-size must be a whole number of at least 1, got 0"),
    ({"hidden_dropout": 1.0}, 1, "--hidden-dropout must be at least 0 and below 1"),
    ({"hidden_size": 50}, 1, "heads must divide width"),
    ({"tensor_model_parallel_size": 2, "tp_comm_overlap": True}, 2, "--tp-comm-overlap needs --sequence-parallel"),
])
def test_what_does_not_fit_is_refused(given: dict[str, Any], devices: int, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        MegatronFlags(**SMALL | given).run(devices)


@settings(deadline=None)
@given(
    tp=st.sampled_from([1, 2, 3]), pp=st.sampled_from([1, 2, 3, 4]), dp=st.integers(1, 3), cp=st.sampled_from([1, 2]),
    each=st.sampled_from([None, 1, 2]), rounds=st.integers(1, 2), micro=st.integers(1, 2),
    switches=st.fixed_dictionaries({
        "sequence_parallel": st.booleans(), "use_distributed_optimizer": st.booleans(),
        "overlap_grad_reduce": st.booleans(), "tp_comm_overlap": st.booleans(),
        "recompute_granularity": st.sampled_from([None, "full", "selective"])}),
    block=st.sampled_from([None, 1, 2, 5]),
    precision=st.sampled_from([{}, {"fp32": True}, {"bf16": True}, {"fp16": True}, {"grad_reduce_in_bf16": True}]),
)
def test_a_run_is_told_in_flags_that_give_it_again(
    tp: int, pp: int, dp: int, cp: int, each: int | None, rounds: int, micro: int, switches: dict[str, Any],
    precision: dict[str, bool], block: int | None,
) -> None:
    assume(each is None or 12 % (pp * each) == 0)
    if block and switches["recompute_granularity"] == "full":
        switches = switches | {"recompute_method": "block", "recompute_num_layers": block}
    switches = switches | {"tp_comm_overlap": switches["tp_comm_overlap"] and switches["sequence_parallel"]}
    flags = MegatronFlags(
        **SMALL, **switches, **precision, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        context_parallel_size=cp, num_layers_per_virtual_pipeline_stage=each, micro_batch_size=micro,
        global_batch_size=dp * pp * rounds * micro)
    run = flags.run(dp * tp * pp * cp)
    told = MegatronFlags.of(run)
    assert told is not None
    assert told.run(run.mesh.size, run.model) == run  # type: ignore[arg-type]
    again, _ = Strategy.parse_on_mesh(run.strategy.text_on(run.mesh))
    assert again == run.strategy


def test_flags_of_an_axis_of_one_device_are_idle() -> None:
    flags = MegatronFlags(num_layers_per_virtual_pipeline_stage=1, sequence_parallel=True, overlap_grad_reduce=True,
                          tp_comm_overlap=True, use_distributed_optimizer=True, bf16=True)
    assert flags.idle(Mesh(pp=2, dp=2, tp=2)) == []
    assert flags.idle(Mesh(pp=1, dp=2)) == ["num_layers_per_virtual_pipeline_stage", "sequence_parallel", "tp_comm_overlap"]
    assert flags.idle(Mesh(pp=2, tp=2)) == ["use_distributed_optimizer", "overlap_grad_reduce"]


@pytest.mark.slow
def test_gradients_in_16_bits_take_half_of_the_bytes_kept_and_sent() -> None:
    """Of 4 replicas each keeps 2 bytes a parameter less, and half as many are summed."""
    flags = SMALL | {"use_distributed_optimizer": True, "global_batch_size": 8, "hidden_dropout": 0.0, "bf16": True}
    found = [figures(MegatronFlags(**flags | more).run(4), "dgx-a100") for more in ({}, {"grad_reduce_in_bf16": True})]
    wide, narrow = (each.trace for each in found)
    parameters = MegatronFlags(**flags).spec().parameters
    assert wide.peaks("gradients")[0] - narrow.peaks("gradients")[0] == 2 * parameters
    assert wide.peaks("optimizer") == narrow.peaks("optimizer") and wide.peaks("weights") == narrow.peaks("weights")
    received = [each.links["dp"]["bytes"] for each in found]
    assert received[0] - received[1] == 2 * parameters * 3 / 4
    assert MegatronFlags(use_precision_aware_optimizer=True).unmodelled == ["--use-precision-aware-optimizer"]


AWARE: dict[str, Any] = {"use_precision_aware_optimizer": True}


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "text", "nbytes"), [
    ({"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}, "bf16,mean:bf16,square:bf16", 4 + 2 + 2),
    ({"main_params_dtype": "fp16"}, "bf16,main:f16", 2 + 4 + 4),
    ({"exp_avg_dtype": "fp16", "exp_avg_sq_dtype": "fp32", "fp16": True}, "f16,mean:f16", 4 + 2 + 4),
    ({"main_params_dtype": "fp16", "exp_avg_sq_dtype": "bf16", "main_grads_dtype": "bf16"}, "bf16,bf16,main:f16,square:bf16",
     2 + 4 + 2),
])
def test_state_in_16_bits_takes_fewer_bytes(flags: dict[str, Any], text: str, nbytes: int) -> None:
    """4 bytes a parameter for the main copy and 8 for the moments, or 2 for each that has 16 bits; 4 devices share them."""
    given = MegatronFlags(**SMALL, **AWARE, **flags, use_distributed_optimizer=True)
    run = given.run(4)
    assert str(run.strategy) == f"precision={text} dp zero=1 pp 1f1b:1"
    held = figures(run, "dgx-a100").trace.peaks("optimizer")[0]
    assert held == nbytes * given.spec().parameters / 4 + 8
    again = MegatronFlags.of(run)
    assert again is not None and again.run(4, run.model) == run


@pytest.mark.parametrize(("flags", "message"), [
    ({"exp_avg_dtype": "bf16"}, "--exp-avg-dtype bf16 needs --use-precision-aware-optimizer"),
    (AWARE | {"main_params_dtype": "fp16", "fp32": True}, "--main-params-dtype fp16 needs weights of 16 bits; leave out"),
    (AWARE | {"exp_avg_sq_dtype": "fp16", "optimizer": "sgd"}, "--exp-avg-sq-dtype fp16 needs --optimizer adam"),
])
def test_state_in_16_bits_that_cannot_be(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MegatronFlags(**SMALL, **flags).run(1)


FLOAT8: dict[str, Any] = {"fp8_format": "hybrid"}


@pytest.mark.parametrize(("flags", "text"), [
    (FLOAT8, "products:f8,history:1"), ({"fp8": "e4m3"}, "products:f8e4m3fn,history:1"),
    (FLOAT8 | {"fp8_recipe": "tensorwise"}, "products:f8"),
    (FLOAT8 | {"fp8_recipe": "delayed", "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"},
     "products:f8,history:1024"),
    (FLOAT8 | {"fp8_amax_history_len": 16, "fp8_param_gather": True}, "products:f8,gathers:f8,history:16,amax:most_recent"),
    (FLOAT8 | {"fp8_recipe": "blockwise"}, "products:f8hybrid,recipe:block"),
    ({"fp8_format": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True}, "products:f8,recipe:mx,gathers:f8"),
    (FLOAT8 | {"first_last_layers_bf16": True}, "products:f8,history:1,first:1,last:1"),
    (FLOAT8 | {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 2},
     "products:f8,history:1,last:2"),
    ({"fp8_recipe": "mxfp8"}, ""), ({"fp4_recipe": "nvfp4"}, ""),
    ({"fp4_format": "e2m1"}, "products:f4,recipe:nvfp4"),
    ({"fp4": "e2m1", "fp4_recipe": "nvfp4", "first_last_layers_bf16": True}, "products:f4,recipe:nvfp4,first:1,last:1"),
])
def test_products_in_few_bits(flags: dict[str, Any], text: str) -> None:
    run = MegatronFlags(**SMALL, **flags).run(1)
    assert str(run.strategy) == f"precision=bf16{text and f',{text}'} pp 1f1b:1"
    again = MegatronFlags.of(run)
    assert again is not None and again.run(1, run.model) == run


@pytest.mark.parametrize(("flags", "message"), [
    ({"fp8_param_gather": True}, "--fp8-param-gather needs --fp8-format"),
    ({"first_last_layers_bf16": True}, "--first-last-layers-bf16 needs --fp8-format or --fp4-format"),
    ({"fp4_format": "e2m1", "fp32": True}, "--fp4-format needs weights in bfloat16; leave out --fp32"),
    ({"fp4": "e2m1", "fp8_param_gather": True}, "--fp8-param-gather needs --fp8-format"),
    (FLOAT8 | {"fp4_format": "e2m1"}, "--fp8-format and --fp4-format exclude each other"),
    ({"fp4_format": "e2m1", "fp4_recipe": "custom"}, "--fp4-recipe must be one of nvfp4, got 'custom'"),
    (FLOAT8 | {"fp16": True}, "--fp8-format needs weights in bfloat16; leave out --fp16"),
    (FLOAT8 | {"fp32": True}, "--fp8-format needs weights in bfloat16; leave out --fp32"),
    (FLOAT8 | {"fp8": "e4m3"}, "--fp8 e4m3 and --fp8-format hybrid exclude each other"),
    (FLOAT8 | {"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 1.5},
     "--num-layers-at-end-in-bf16 must be a whole number, got 1.5"),
    (FLOAT8 | {"fp8_recipe": "custom"}, "--fp8-recipe must be one of delayed, tensorwise, blockwise, mxfp8, got 'custom'"),
])
def test_flags_of_float8_that_cannot_be(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        MegatronFlags(**SMALL, **flags).run(1)


def test_flags_of_float8_without_those_that_they_need_are_told_to_change_nothing() -> None:
    given = MegatronFlags(**SMALL, fp8_recipe="mxfp8", num_layers_at_start_in_bf16=2)
    assert given.idle(Mesh(pp=1))[-2:] == ["fp8_recipe", "num_layers_at_start_in_bf16"]
    assert MegatronFlags(**SMALL, fp4_recipe="nvfp4").idle(Mesh(pp=1))[-1:] == ["fp4_recipe"]
    other = MegatronFlags(**SMALL, **FLOAT8, fp8_recipe="mxfp8", fp8_amax_history_len=8, fp8_amax_compute_algo="max")
    assert other.idle(Mesh(pp=1))[-2:] == ["fp8_amax_history_len", "fp8_amax_compute_algo"]
    needed = MegatronFlags(**SMALL, **FLOAT8, fp8_recipe="mxfp8", first_last_layers_bf16=True, num_layers_at_start_in_bf16=2)
    assert not {"fp8_recipe", "num_layers_at_start_in_bf16"}.intersection(needed.idle(Mesh(pp=1)))


def test_what_a_precision_aware_optimizer_does_besides_is_told() -> None:
    """With main copies in float32 it keeps those of their bits that weights in bfloat16 lack; and it knows 8 bits."""
    assert MegatronFlags(**AWARE, main_params_dtype="fp16").unmodelled == []
    assert MegatronFlags(**AWARE, fp16=True, exp_avg_dtype="fp8").unmodelled == ["--exp-avg-dtype fp8"]
    assert str(MegatronFlags(**SMALL, **AWARE, exp_avg_dtype="fp8").run(1).strategy) == "precision=bf16 pp 1f1b:1"


FSDP: dict[str, Any] = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}


@pytest.mark.parametrize(("flags", "text", "mesh"), [
    ({"use_megatron_fsdp": True}, "dp", Mesh(pp=1, dp=8)),
    ({"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim"}, "dp zero=1", Mesh(pp=1, dp=8)),
    ({"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads"}, "dp zero=2", Mesh(pp=1, dp=8)),
    (FSDP, "dp zero=3", Mesh(pp=1, dp=8)),
    (FSDP | {"num_distributed_optimizer_instances": 2}, "dp:replica dp zero=3", Mesh(pp=1, replica=2, dp=4)),
    (FSDP | {"num_distributed_optimizer_instances": 4, "outer_dp_sharding_strategy": "optim"},
     "dp:replica dp zero:replica=1 zero=3", Mesh(pp=1, replica=4, dp=2)),
    ({"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2}, "dp:replica dp zero=1",
     Mesh(pp=1, replica=2, dp=4)),
    ({"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 8}, "dp", Mesh(pp=1, dp=8)),
    (FSDP | {"tensor_model_parallel_size": 2, "num_distributed_optimizer_instances": 2}, "dp:replica dp tp zero=3",
     Mesh(pp=1, replica=2, dp=2, tp=2)),
])
def test_what_data_parallelism_shares_out(flags: dict[str, Any], text: str, mesh: Mesh) -> None:
    run = MegatronFlags(**WIDE, **flags).run(8)
    assert str(run.strategy) == f"{text} pp 1f1b:1" and run.mesh == mesh and [*run.mesh.shape] == [*mesh.shape]
    assert (run.replicas, run.batch, run.microbatch) == (8 // mesh.shape.get("tp", 1), run.replicas, 1)
    again = MegatronFlags.of(run)
    assert again is not None and again.run(8, run.model) == run
    assert again.given("strategy").get("num_distributed_optimizer_instances") == mesh.shape.get("replica")


def test_parameters_that_are_shared_out_are_gathered_ahead_if_the_flag_says_so() -> None:
    def overlap(**flags: Any) -> str:
        return str(MegatronFlags(**WIDE, overlap_grad_reduce=True, **flags).run(2).strategy)

    assert overlap(**FSDP, overlap_param_gather=True) == "dp zero=3 overlap pp 1f1b:1"
    assert overlap(**FSDP) == "dp zero=3 overlap=ahead:0 pp 1f1b:1"
    plain = {"use_distributed_optimizer": True, "overlap_param_gather": True}
    assert overlap(**plain) == overlap(use_distributed_optimizer=True) == "dp zero=1 overlap=156250KB pp 1f1b:1"
    assert MegatronFlags(**plain).unmodelled == ["--overlap-param-gather"]
    assert not MegatronFlags(**FSDP, overlap_grad_reduce=True, overlap_param_gather=True).unmodelled


@pytest.mark.slow
@pytest.mark.parametrize(("m", "n"), [(2, 4), (4, 2)])
def test_replicas_all_reduce_the_parts_of_gradients_and_devices_inside_gather(m: int, n: int) -> None:
    """Zhao et al., PyTorch FSDP, 2023, arXiv:2304.11277, section 3.2.2: of P parameters on m x n devices."""
    flags = MegatronFlags(**WIDE, **FSDP, num_distributed_optimizer_instances=m, position_embedding_type="rope")
    found = figures(flags.run(8), "dgx-h100")
    whole = 4 * flags.spec().parameters
    assert found.links["replica"]["bytes"] == pytest.approx(2 * whole / n * (m - 1) / m, rel=1e-3)
    # Gathered in the forward and, but for biases and norms, again in the backward, and reduce-scattered.
    assert found.links["dp"]["bytes"] == pytest.approx(3 * whole * (n - 1) / n, rel=0.02)
    assert {"dp", "zero"} <= {*found.parts}


@pytest.mark.parametrize(("flags", "message"), [
    ({"num_distributed_optimizer_instances": 2},
     "--num-distributed-optimizer-instances needs --use-distributed-optimizer or --use-megatron-fsdp"),
    (FSDP | {"num_distributed_optimizer_instances": 3},
     "--num-distributed-optimizer-instances must divide the 8 devices along dp, got 3"),
    (FSDP | {"outer_dp_sharding_strategy": "optim"}, "--outer-dp-sharding-strategy optim needs --data-parallel-sharding-"),
    ({"use_megatron_fsdp": True, "num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "optim"},
     "--outer-dp-sharding-strategy optim needs --data-parallel-sharding-strategy optim_grads_params and"),
])
def test_flags_about_sharding_that_need_others(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MegatronFlags(**WIDE, **flags).run(8)


def test_a_sharding_strategy_without_fsdp_changes_nothing() -> None:
    flags = MegatronFlags(**WIDE, data_parallel_sharding_strategy="optim")
    run = flags.run(8)
    assert str(run.strategy) == "dp pp 1f1b:1" and flags.idle(run.mesh) == ["data_parallel_sharding_strategy"]


def test_a_strategy_has_a_batch_that_its_replicas_and_microbatches_divide():
    strategy, mesh = Strategy.parse_on_mesh("dp=2 pp=2 1f1b:3")
    flags = MegatronFlags(**SMALL | {"global_batch_size": 24, "micro_batch_size": 4})
    assert strategy_run(flags, strategy, mesh).batch == 24
    with pytest.raises(ValueError, match="must be --micro-batch-size 5 times the 6 microbatches of all replicas, 30; got 24"):
        strategy_run(replace(flags, micro_batch_size=5), strategy, mesh)


LONG: dict[str, Any] = WIDE | {"use_flash_attn": True, "attention_dropout": 0.0, "seq_length": 48}


@pytest.mark.parametrize(("flags", "text", "mesh"), [
    ({}, "ring", Mesh(pp=1, cp=6)), ({"cp_comm_type": "all_gather"}, "cp", Mesh(pp=1, cp=6)),
    ({"attention_backend": "unfused", "use_flash_attn": None}, "cp", Mesh(pp=1, cp=6)),
    ({"cp_comm_type": "p2p"}, "ring", Mesh(pp=1, cp=6)), ({"cp_comm_type": "a2a a2a"}, "ulysses", Mesh(pp=1, cp=6)),
    ({"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": "2 3"}, "ring ulysses:cp_heads",
     Mesh(pp=1, cp=3, cp_heads=2)),
    ({"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": "3 2", "use_distributed_optimizer": True},
     "ring ulysses:cp_heads zero:cp=1", Mesh(pp=1, cp=2, cp_heads=3)),
])
def test_how_sequences_are_dealt(flags: dict[str, Any], text: str, mesh: Mesh) -> None:
    run = MegatronFlags(**LONG | flags, context_parallel_size=6).run(6)
    assert str(run.strategy) == f"{text} pp 1f1b:1" and run.mesh == mesh and [*run.mesh.shape] == [*mesh.shape]
    again = MegatronFlags.of(run)
    assert again is not None and again.run(6, run.model) == run


@pytest.mark.parametrize(("flags", "message"), [
    ({"cp_comm_type": "p2p a2a"}, "--cp-comm-type must be one of .*, a2a.p2p for all layers, got 'p2p a2a'"),
    ({"cp_comm_type": "ring"}, "--cp-comm-type must be one of .*, got 'ring'"),
    ({"cp_comm_type": "a2a+p2p"}, "needs two --hierarchical-context-parallel-sizes whose product .*-size, 4; got ''"),
    ({"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": "4 4"}, "whose product is .* 4; got '4 4'"),
    ({"cp_comm_type": "a2a"}, "deals heads to 4 devices, which must divide the 6 heads of keys and values"),
    ({"cp_comm_type": "p2p", "attention_backend": "unfused", "use_flash_attn": None}, "needs attention as one kernel"),
])
def test_how_sequences_cannot_be_dealt(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MegatronFlags(**LONG | flags, context_parallel_size=4).run(4)


def test_a_flag_about_contexts_changes_nothing_without_them() -> None:
    flags = MegatronFlags(**LONG, cp_comm_type="p2p")
    assert flags.idle(flags.run(1).mesh) == ["cp_comm_type"]


@pytest.mark.slow
@pytest.mark.parametrize(("exchange", "times"), [("all_gather", 3 * 2), ("p2p", 3 * 2), ("a2a", 8 / 3)])
def test_bytes_of_contexts_are_those_of_their_papers(exchange: str, times: float) -> None:
    """Keys and values, and in the backward these and their gradients: arXiv:2407.21783, 3.3.2; arXiv:2310.01889, 3.  Four
    all_to_alls of a device's part each way: arXiv:2309.14509, section 3."""
    flags = MegatronFlags(**LONG, cp_comm_type=exchange, context_parallel_size=3, micro_batch_size=2)
    run, n = flags.run(3), 3
    activation = 4 * 2 * 48 * 48  # bytes of a number, rows, tokens, features of keys and values
    found = sum(event.bytes_received for event in simulate(run.step, "dgx-h100", **run.placed)
                if event.rank == 1 and event.name in ("all_gather", "reduce_scatter", "all_to_all", "permute"))
    assert found == times * 12 * activation * (n - 1) / n


@pytest.mark.slow
def test_what_travels_round_a_ring_is_under_way_while_a_device_attends() -> None:
    run = MegatronFlags(**LONG | {"seq_length": 3072, "hidden_size": 768}, cp_comm_type="p2p", context_parallel_size=4).run(4)
    trace = simulate(run.step, "dgx-h100", **run.placed)
    events = [event for event in trace.by_rank()[2] if event.kind in ("compute", "collective")]
    attended = [event for event in events if event.name.startswith("attention_block")]
    sent = [event for event in events if event.name == "permute"]
    assert len(attended) == 12 * 2 * 4 and len(sent) == 12 * 3 * 2 * 3
    exposed = 0
    for event in sent:
        end = event.start_seconds + event.duration_seconds
        exposed += not any(each.start_seconds < end and event.start_seconds < each.start_seconds + each.duration_seconds
                           for each in attended)
    assert exposed == 12 * 2  # of each layer the gradients of keys and of values that come home at the end


def test_layers_of_each_stage_that_run_again_are_told_in_flags() -> None:
    flags = MegatronFlags(**WIDE, recompute_granularity="full", recompute_method="block", recompute_num_layers=2,
                          pipeline_model_parallel_size=5)
    told = MegatronFlags.of(flags.run(5))
    assert told is not None and told.given("strategy") == flags.given("strategy") | {"tensor_model_parallel_size": 1}


def test_what_megatron_has_no_flags_for_is_told_in_none() -> None:
    run = MegatronFlags(**WIDE).run(4)
    for text in ("dp pp gpipe:1", "dp overlap pp 1f1b:1", "dp recompute=block.1 pp 1f1b:1",
                 "dp recompute=block.0.attention pp 1f1b:1", "dp pp@block.5.feed_forward 1f1b:1"):
        other = type(run)(run.model, 4, Strategy.parse(text), Mesh(pp=2 if "@" in text else 1, dp=2), run.optimizer)
        assert MegatronFlags.of(other) is None, text


@pytest.mark.parametrize(("devices", "text"), [
    (4, "precision=bf16 cp zero:cp=1 overlap=156250KB pp 1f1b:2"),
    (8, "precision=bf16 dp cp zero=1 overlap=156250KB pp 1f1b:2")])
def test_the_distributed_optimizer_shares_out_over_dp_and_cp(devices, text):
    flags = MegatronFlags(
        num_layers=2, hidden_size=16, num_attention_heads=4, seq_length=8, vocab_size=128, context_parallel_size=4,
        use_distributed_optimizer=True, overlap_grad_reduce=True, micro_batch_size=1, global_batch_size=2 * devices // 4)
    assert str(flags.run(devices).strategy) == text
