"""`MegatronFlags`: a training run in the flags of Megatron-LM.

flags = MegatronFlags(num_layers=40, hidden_size=5120, num_attention_heads=40, seq_length=2048, vocab_size=51200,
                      tensor_model_parallel_size=4, pipeline_model_parallel_size=2, bf16=True)
run = flags.run(devices=64)
simulate(run.step, "dgx-a100", mesh=run.mesh, batch=run.batch, fold=True)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from parallelism.display.quantities import shortened
from parallelism.mesh import Mesh
from parallelism.models import TransformerSpec
from parallelism.models.spec import VOCABULARY_MULTIPLE
from parallelism.training.flag_values import FlagValues
from parallelism.training.megatron_options import OPTIONS
from parallelism.training.stage_layers import (
    begins_of,
    counts_of,
    even,
    first_layers,
    layout_counts,
    layout_text,
    with_counted_ends,
    with_ends,
)
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


def overlap_of(replicas: int) -> Overlap:
    """``--overlap-grad-reduce``, in the buckets of Megatron-LM: of 40 million gradients, or a million for each replica.

    They are float32 (``ddp_config.bucket_size`` in megatron/core/distributed/distributed_data_parallel.py).
    """
    return Overlap(4 * max(40_000_000, 1_000_000 * replicas))


@dataclass(frozen=True, kw_only=True)
class MegatronFlags(FlagValues):
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
        chunks, counts = self.cut(spec, pp)
        if chunks > 1 and microbatches % pp:
            raise ValueError(
                f"an interleaved schedule needs a number of microbatches that {pp} stages divide; "
                f"{batch} sequences in microbatches of {micro} on {dp} replicas are {microbatches}"
            )
        schedule = "interleaved_1f1b" if chunks > 1 else "1f1b"
        pipeline = Pipeline("pp", microbatches, schedule, chunks, begins_of(counts))
        sizes = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
        mesh = Mesh(**{axis: size for axis, size in sizes.items() if size > 1 or axis == "pp"})
        return TrainingRun(
            spec,
            batch,
            Strategy(*self._transforms(mesh, counts), pipeline),
            mesh,
            self.trained_by,
            clip=self.clip_grad or None,
            loss_scale=self.loss_scale or None,
        )

    def cut(self, spec: TransformerSpec, pp: int) -> tuple[int, tuple[int, ...]]:
        """The stages of each rank, and the layers of each stage (`parallelism.training.stage_layers`).

        Where Megatron-LM wants stages of equally many layers, and their number does not allow it, they are as even as can
        be.  ``ValueError`` for flags that exclude each other, and for too few layers.
        """
        ends = [self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers]
        embedding, loss = (
            bool(self.account_for_embedding_in_pipeline_split),
            bool(self.account_for_loss_in_pipeline_split),
        )
        if pp == 1:
            return 1, (spec.layers,)
        if len(self._cut_flags) > 1:
            raise ValueError(f"{' and '.join(self._cut_flags)} exclude each other")
        if self.pipeline_model_parallel_layout is not None:
            counts = layout_counts(self.pipeline_model_parallel_layout, spec.layers)
            if len(counts) % pp:
                raise ValueError(
                    f"--pipeline-model-parallel-layout has {len(counts)} stages, which {pp} ranks cannot share equally"
                )
            return len(counts) // pp, counts
        items = spec.layers + embedding + loss
        if pp > items:
            raise ValueError(f"--pipeline-model-parallel-size must be at most the {items} layers, got {pp}")
        chunks = self.num_virtual_stages_per_pipeline_rank or 1
        if (each := self.num_layers_per_virtual_pipeline_stage) is not None:
            chunks = -(-items // (pp * each))
        if any(each is not None for each in ends):
            return chunks, with_ends(spec.layers, pp, chunks, *ends)
        if pp * chunks > items:
            raise ValueError(
                f"--num-virtual-stages-per-pipeline-rank: {items} layers are too few for {pp} x {chunks} stages"
            )
        return chunks, with_counted_ends(spec.layers, pp * chunks, embedding=embedding, loss=loss)

    @property
    def _cut_flags(self) -> list[str]:
        """The flags that were given about the layers of stages, one of each kind."""
        kinds = (
            ("pipeline_model_parallel_layout",),
            ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
            ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
        )
        numbers = ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage")
        given = [next((name for name in kind if getattr(self, name) is not None), None) for kind in kinds]
        of_numbers = [name for name in numbers if getattr(self, name) is not None]
        if len(of_numbers) > 1 or (given[0] and of_numbers):
            given = [given[0], *of_numbers]
        return [f"--{name.replace('_', '-')}" for name in given if name is not None]

    def _transforms(self, mesh: Mesh, counts: tuple[int, ...]) -> Iterator[Transform]:
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
        yield from self._recompute(counts)

    def _recompute(self, counts: tuple[int, ...]) -> Iterator[Transform]:
        granularity = self.recompute_granularity or ("selective" if self.recompute_activations else None)
        if granularity != "full" and (self.recompute_method or self.recompute_num_layers):
            raise ValueError(
                "--recompute-method and --recompute-num-layers have a meaning with "
                "--recompute-granularity full only"
            )
        if granularity == "selective":
            yield Recompute(ATTENTION_CORE)
        elif granularity == "full" and self.recompute_method == "block":
            most, layers = self.recompute_num_layers or 1, sum(counts)
            again = [
                layer
                for start, count in zip(first_layers(counts), counts, strict=True)
                for layer in range(start, start + min(most, count))
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
        shape, pipeline, layers = run.mesh.shape, run.pipeline, run.model.layers
        again: Any = kinds.get(Recompute)
        precision: Any = kinds.get(MixedPrecision)
        stages = shape["pp"] * pipeline.chunks
        counts = counts_of(pipeline.begin, layers)
        if counts is None or len(counts) != stages:
            return None
        most = None if again is None else _most_again(again, counts)
        is_even = counts == even(layers, stages)
        flags = cls(
            tensor_model_parallel_size=shape.get("tp", 1),
            pipeline_model_parallel_size=shape["pp"],
            context_parallel_size=shape.get("cp"),
            num_layers_per_virtual_pipeline_stage=layers // stages
            if pipeline.chunks > 1 and layers % stages == 0 and is_even
            else None,
            num_virtual_stages_per_pipeline_rank=pipeline.chunks
            if pipeline.chunks > 1 and layers % stages and is_even
            else None,
            pipeline_model_parallel_layout=None if is_even else layout_text(counts),
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


def _most_again(again: Recompute, counts: Sequence[int]) -> int | None:
    """The most layers of a stage that run again, if the regions are single layers; None if they are others."""
    numbers = [name.removeprefix("block.") for name in again.regions]
    if not all(number.isdecimal() for number in numbers):
        return None
    most = 0
    for start, count in zip(first_layers(counts), counts, strict=True):
        most = max(most, sum(start <= int(number) < start + count for number in numbers))
    return most


_AXES = {
    **dict.fromkeys(
        (
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
            "pipeline_model_parallel_layout",
        ),
        "pp",
    ),
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
