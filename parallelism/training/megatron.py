"""`MegatronFlags`: a training run in the flags of Megatron-LM.

flags = MegatronFlags(num_layers=40, hidden_size=5120, num_attention_heads=40, seq_length=2048, vocab_size=51200,
                      tensor_model_parallel_size=4, pipeline_model_parallel_size=2, bf16=True)
run = flags.run(devices=64)
simulate(run.step, "dgx-a100", mesh=run.mesh, batch=run.batch, fold=True)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import inf
from typing import Any

from parallelism.display.quantities import short_errors, shortened
from parallelism.mesh import Mesh
from parallelism.models import TransformerSpec
from parallelism.models.spec import VOCABULARY_MULTIPLE
from parallelism.training.megatron_options import OPTIONS
from parallelism.training.training_run import ADAM_W, TrainingRun
from parallelism.transforms import (
    SGD,
    Adam,
    ContextParallel,
    DataParallel,
    MixedPrecision,
    Overlap,
    Pipeline,
    Recompute,
    SequenceParallel,
    Strategy,
    TensorParallel,
    Transform,
    Zero,
)

ATTENTION_CORE = "block.*.attention.core"
SGD_MOMENTUM = 0.9
"""That of Megatron-LM."""


def first_layers(layers: int, stages: int) -> tuple[int, ...]:
    """The first layer of each stage, of stages that have equally many layers or one fewer.

    Those with fewer come first and last, because there are the embedding and the head.
    """
    few, longer = layers // stages, longer_stages(layers, stages)
    return 0, *accumulate(few + (stage in longer) for stage in range(stages - 1))


def longer_stages(layers: int, stages: int) -> range:
    """The stages that have one layer more than the others; none if all have equally many."""
    more = layers % stages
    before = (stages - more + 1) // 2 if more else 0
    return range(before, before + more)


def overlap_of(replicas: int) -> Overlap:
    """``--overlap-grad-reduce``, in the buckets of Megatron-LM: of 40 million gradients, or a million for each replica.

    They are float32 (``ddp_config.bucket_size`` in megatron/core/distributed/distributed_data_parallel.py).
    """
    return Overlap(4 * max(40_000_000, 1_000_000 * replicas))


@dataclass(frozen=True, kw_only=True)
class MegatronFlags:
    """Values of the flags (`parallelism.training.OPTIONS`) by their names with ``_``; None: not given.

    Flags that change nothing here (`parallelism.training.UNCHANGING`) are words of the command line only.

    Defaults are those of Megatron-LM, with these differences.  Weights are in bfloat16, with a main copy in float32,
    unless ``fp16`` or ``fp32`` is given; the latter is no flag of Megatron-LM.  The vocabulary is padded to a multiple
    of 128, not of 128 times ``tensor_model_parallel_size``: so plans with different sizes train the same model.  Where
    stages cannot have equally many layers, the first and the last have fewer, because they have the embedding and the
    head.  Adam is AdamW; ``optimizer="sgd"`` has a momentum of 0.9 unless ``sgd_momentum`` says otherwise.
    Gradients are clipped only if ``clip_grad`` says so, and scaled only if ``loss_scale`` does,
    by this constant.
    """

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
    attention_dropout: float | None = None
    hidden_dropout: float | None = None
    num_experts: int | None = None
    moe_router_topk: int | None = None
    tensor_model_parallel_size: int | None = None
    pipeline_model_parallel_size: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    context_parallel_size: int | None = None
    expert_model_parallel_size: int | None = None
    sequence_parallel: bool | None = None
    use_distributed_optimizer: bool | None = None
    overlap_grad_reduce: bool | None = None
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_activations: bool | None = None
    fp16: bool | None = None
    bf16: bool | None = None
    fp32: bool | None = None
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
        if self.num_experts or self.moe_router_topk or (self.expert_model_parallel_size or 1) > 1:
            raise ValueError(
                "--num-experts: a TransformerSpec has no experts; parallelism.models.mixture has a layer "
                "of them"
            )

    def given(self, about: str | None = None) -> dict[str, Any]:
        """The flags that were given, by field; of those about the ``model``, the ``strategy`` or the ``batch``."""
        values = [
            (option, getattr(self, option.field)) for option in OPTIONS if about in (None, option.about)
        ]
        return {
            option.field: value for option, value in values if value or (option.rate and value is not None)
        }

    @property
    def unmodelled(self) -> list[str]:
        """The flags of which the value changes nothing here, as words."""
        left_out = [
            f"--{option.name} {getattr(self, option.field)}"
            for option in OPTIONS
            if getattr(self, option.field) in option.unmodelled
        ]
        return left_out + ["--no-position-embedding"] * bool(
            self.no_position_embedding and self._positions != "rotary"
        )

    @property
    def _positions(self) -> str | None:
        """How positions enter, in the words of a `TransformerSpec`; None if no flag says it."""
        if self.use_rotary_position_embeddings:
            return "rotary"
        return _POSITIONS.get(self.position_embedding_type or "")

    def idle(self, mesh: Mesh) -> list[str]:
        """The fields that were given and change nothing on a mesh, because it has one device along their axis."""
        idle = [
            field
            for field in self.given("strategy")
            if field in _AXES and mesh.shape.get(_AXES[field], 1) == 1
        ]
        return idle + ["sgd_momentum"] * (self.sgd_momentum is not None and self.optimizer != "sgd")

    def words(self) -> tuple[str, ...]:
        """The flags as words of a command line."""
        words: list[str] = []
        given = self.given()
        for option in OPTIONS:
            if option.field in given:
                value = given[option.field]
                words.append(f"--{option.name}")
                if not option.switch:
                    words.append(f"{value:g}" if option.rate or option.amount else str(value))
        return tuple(words)

    # -- the model -----------------------------------------------------------------------------------------------------

    def spec(self, named: TransformerSpec | None = None) -> TransformerSpec:
        """The model; with the ``named`` one, the flags that were given replace its figures.

        ``ValueError`` names the flags that are missing, and figures that do not fit together.
        """
        if named is None:
            self._check_needed()
        if self.num_query_groups is not None and not self.group_query_attention:
            raise ValueError("--num-query-groups has a meaning with --group-query-attention only")
        figures: dict[str, Any] = {
            "layers": self.num_layers,
            "width": self.hidden_size,
            "heads": self.num_attention_heads,
            "sequence": self.seq_length,
            "vocabulary": self.padded_vocab_size or self.vocabulary(named),
            "feed_forward": self.ffn_hidden_size,
            "activation": self.swiglu and "swiglu",
            "norm": _NORMS.get(self.normalization or ""),
            "positions": self._positions,
            "tied": False if self.untie_embeddings_and_output_weights else None,
            "biases": False if self.disable_bias_linear else None,
            "key_value_heads": (self.num_query_groups or 1) if self.group_query_attention else None,
            "attention_dropout": self.attention_dropout,
            "hidden_dropout": self.hidden_dropout,
            "fused_attention": self._fused_attention,
        }
        figures = {name: value for name, value in figures.items() if value is not None}
        if named is not None:
            spec = replace(named, **figures)
        else:
            if self.swiglu and self.ffn_hidden_size is None:
                figures["feed_forward"] = int(4 * figures["width"] * 2 / 3) // 64 * 64
            usual = {"attention_dropout": 0.1, "hidden_dropout": 0.1, "fused_attention": False}
            spec = TransformerSpec(**usual | figures)
        if self.kv_channels not in (None, spec.head_width):
            raise ValueError(
                f"--kv-channels: heads of {spec.width // spec.heads} features are modelled, those of --hidden-size by "
                f"--num-attention-heads; got {self.kv_channels}"
            )
        if self.padded_vocab_size:
            return spec
        return spec.padded(self.make_vocab_size_divisible_by or VOCABULARY_MULTIPLE)

    def _check_needed(self) -> None:
        """``ValueError`` where a figure of a model without a name is missing."""
        needed = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
        missing = [f"--{name.replace('_', '-')}" for name in needed if getattr(self, name) is None]
        has_vocabulary = self.padded_vocab_size or self.vocabulary(None)
        if missing or not (has_vocabulary or self.tokenizer_type):
            missing += [] if has_vocabulary else ["--vocab-size"]
            raise ValueError(f"gpt needs {', '.join(missing)}")
        if not has_vocabulary:
            raise ValueError(
                f"--tokenizer-type {shortened(self.tokenizer_type, 40)[1:-1]} does not say how large the vocabulary is; give "
                "--vocab-size, such as --set vocab-size=32000"
            )

    def vocabulary(self, named: TransformerSpec | None) -> int | None:
        """The size of the vocabulary that is said, or that a model without a name has by its tokenizer."""
        if self.vocab_size is not None or named is not None:
            return self.vocab_size
        if self.tokenizer_type is None and self.vocab_file and self.merge_file:
            return VOCABULARIES["GPT2BPETokenizer"]
        return VOCABULARIES.get(self.tokenizer_type or "")

    @property
    def _fused_attention(self) -> bool | None:
        """Whether attention is fused; None if no flag says it."""
        if self.use_flash_attn:
            return True
        if self.attention_backend is not None:
            return self.attention_backend not in ("unfused", "local")
        if self.transformer_impl is not None:
            return self.transformer_impl != "local"
        return self.use_mcore_models

    @property
    def trained_by(self) -> SGD | Adam:
        """The optimizer.  Its learning rate changes neither the time nor the memory of a step."""
        if self.optimizer != "sgd":
            return ADAM_W
        return SGD(ADAM_W.lr, SGD_MOMENTUM if self.sgd_momentum is None else self.sgd_momentum)

    # -- the run -------------------------------------------------------------------------------------------------------

    def run(self, devices: int, named: TransformerSpec | None = None) -> TrainingRun:
        """The run on so many devices, those along dp being what the others leave.

        ``ValueError`` for flags that do not fit together, or not these devices.
        """
        spec = self.spec(named)
        tp, cp, pp = (
            getattr(self, f"{name}_parallel_size") or 1
            for name in ("tensor_model", "context", "pipeline_model")
        )
        if devices % (tp * cp * pp):
            raise ValueError(
                f"{devices} devices cannot be dealt to tensor, context and pipeline parallelism of {tp} x "
                f"{cp} x {pp} devices"
            )
        dp = devices // (tp * cp * pp)
        micro = self.micro_batch_size or 1
        batch = self.global_batch_size or micro * dp
        if batch % (micro * dp):
            raise ValueError(
                "--global-batch-size must be a multiple of --micro-batch-size and the devices along dp, "
                f"{micro} x {dp} = {micro * dp}, got {batch}"
            )
        for extent, what, axis, size in (
            (spec.heads, "heads", "tensor-model", tp),
            (spec.groups, "heads of keys and values", "tensor-model", tp),
            (spec.sequence, "tokens", "context", cp),
        ):
            if extent % size:
                raise ValueError(f"--{axis}-parallel-size must divide the {extent} {what}, got {size}")
        microbatches = batch // (micro * dp)
        chunks, begins = self._cut(spec, pp)
        if chunks > 1 and microbatches % pp:
            raise ValueError(
                f"an interleaved schedule needs a number of microbatches that {pp} stages divide; "
                f"{batch} sequences in microbatches of {micro} on {dp} replicas are {microbatches}"
            )
        pipeline = Pipeline("pp", microbatches, "interleaved_1f1b" if chunks > 1 else "1f1b", chunks, begins)
        sizes = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
        mesh = Mesh(**{axis: size for axis, size in sizes.items() if size > 1 or axis == "pp"})
        return TrainingRun(
            spec,
            batch,
            Strategy(*self._transforms(mesh, begins, spec.layers), pipeline),
            mesh,
            self.trained_by,
            clip=self.clip_grad or None,
            loss_scale=self.loss_scale or None,
        )

    def _cut(self, spec: TransformerSpec, pp: int) -> tuple[int, tuple[str, ...]]:
        """The stages of each rank, and the regions at which all stages but the first begin."""
        layers, each = spec.layers, self.num_layers_per_virtual_pipeline_stage
        if pp > layers:
            raise ValueError(f"--pipeline-model-parallel-size must be at most the {layers} layers, got {pp}")
        chunks = 1
        if each is not None:
            if layers % (pp * each):
                raise ValueError(
                    f"--num-layers-per-virtual-pipeline-stage: {layers} layers cannot be dealt to {pp} "
                    f"stages in parts of {each}"
                )
            chunks = layers // (pp * each) if pp > 1 else 1
        return chunks, tuple(f"block.{layer}" for layer in first_layers(layers, pp * chunks)[1:])

    def _transforms(self, mesh: Mesh, begins: tuple[str, ...], layers: int) -> Iterator[Transform]:
        if not self.fp32:
            yield MixedPrecision("float16" if self.fp16 else "bfloat16")
        if "dp" in mesh.axes:
            yield DataParallel()
            if self.use_distributed_optimizer:
                yield Zero(1)
            if self.overlap_grad_reduce:
                yield overlap_of(mesh.shape["dp"])
        if "cp" in mesh.axes:
            yield ContextParallel()
        if "tp" in mesh.axes:
            yield TensorParallel()
            if self.sequence_parallel:
                yield SequenceParallel()
        yield from self._recompute(begins, layers)

    def _recompute(self, begins: tuple[str, ...], layers: int) -> Iterator[Transform]:
        granularity = self.recompute_granularity or ("selective" if self.recompute_activations else None)
        if granularity != "full" and (self.recompute_method or self.recompute_num_layers):
            raise ValueError(
                "--recompute-method and --recompute-num-layers have a meaning with "
                "--recompute-granularity full only"
            )
        if granularity == "selective":
            yield Recompute(ATTENTION_CORE)
        elif granularity == "full" and self.recompute_method == "block":
            starts = [0, *(int(each.removeprefix("block.")) for each in begins), layers]
            most = self.recompute_num_layers or 1
            again = [
                layer for start, end in pairwise(starts) for layer in range(start, min(start + most, end))
            ]
            yield Recompute("block.*" if len(again) == layers else [f"block.{layer}" for layer in again])
        elif granularity == "full":
            if (self.recompute_num_layers or 1) > 1:
                raise ValueError(
                    "--recompute-num-layers with --recompute-method uniform must be 1 here: each layer "
                    f"runs again by itself; got {self.recompute_num_layers}"
                )
            yield Recompute("block.*")

    # -- back ----------------------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, run: TrainingRun) -> MegatronFlags | None:
        """The flags about strategy and batch that give such a run of its model; None if there are none."""
        if not isinstance(run.model, TransformerSpec) or run.pipeline is None:
            return None
        kinds = {type(each): each for each in run.strategy.transforms}
        shape, pipeline = run.mesh.shape, run.pipeline
        again: Any = kinds.get(Recompute)
        precision: Any = kinds.get(MixedPrecision)
        stages = shape["pp"] * pipeline.chunks
        most = None if again is None else _most_again(again, run.model.layers, stages)
        flags = cls(
            tensor_model_parallel_size=shape.get("tp", 1),
            pipeline_model_parallel_size=shape["pp"],
            context_parallel_size=shape.get("cp"),
            num_layers_per_virtual_pipeline_stage=run.model.layers // stages if pipeline.chunks > 1 else None,
            sequence_parallel=SequenceParallel in kinds,
            use_distributed_optimizer=Zero in kinds,
            overlap_grad_reduce=Overlap in kinds,
            recompute_granularity=None
            if again is None
            else "selective"
            if again == Recompute(ATTENTION_CORE)
            else "full",
            recompute_method="block" if most else None,
            recompute_num_layers=most,
            fp16=precision == MixedPrecision("float16"),
            bf16=precision == MixedPrecision("bfloat16"),
            fp32=precision is None,
            micro_batch_size=run.microbatch,
            global_batch_size=run.batch,
            clip_grad=run.clip,
            loss_scale=run.loss_scale,
            **update_flags(run.optimizer),
        )
        try:
            found = flags.run(run.mesh.size, run.model)
        except ValueError:
            return None
        return flags if found == run else None


def update_flags(optimizer: SGD | Adam) -> dict[str, Any]:
    """The flags of an optimizer, by field; none of the usual one, and of those that have no flags."""
    if not isinstance(optimizer, SGD):
        return {}
    return {"optimizer": "sgd", "sgd_momentum": optimizer.momentum}


def _most_again(again: Recompute, layers: int, stages: int) -> int | None:
    """The most layers of a stage that run again, if the regions are single layers; None if they are others."""
    numbers = [name.removeprefix("block.") for name in again.regions]
    if not all(number.isdecimal() for number in numbers):
        return None
    starts = [*first_layers(layers, stages), layers]
    most = 0
    for start, end in pairwise(starts):
        most = max(most, sum(start <= int(number) < end for number in numbers))
    return most


_AXES = {
    "num_layers_per_virtual_pipeline_stage": "pp",
    "sequence_parallel": "tp",
    "use_distributed_optimizer": "dp",
    "overlap_grad_reduce": "dp",
}
"""Flags that need several devices along an axis."""
_NORMS = {"LayerNorm": "layer", "RMSNorm": "rms"}
_POSITIONS = {"learned_absolute": "learned", "rope": "rotary", "yarn": "rotary", "mrope": "rotary"}
VOCABULARIES = {
    "GPT2BPETokenizer": 50_257,
    "Llama2Tokenizer": 32_000,
    "BertWordPieceLowerCase": 30_522,
    "BertWordPieceCase": 28_996,
}
"""The sizes of the vocabularies of tokenizers that have but one."""
