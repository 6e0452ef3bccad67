"""`MegatronFlags`: a training run in the flags of Megatron-LM.

flags = MegatronFlags(num_layers=40, hidden_size=5120, num_attention_heads=40, seq_length=2048, vocab_size=51200,
                      tensor_model_parallel_size=4, pipeline_model_parallel_size=2, bf16=True)
run = flags.run(devices=64)
simulate(run.step, "dgx-a100", mesh=run.mesh, batch=run.batch, fold=True)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

from parallelism.mesh import Mesh
from parallelism.models import TransformerSpec
from parallelism.training.expert_split import ExpertSplit
from parallelism.training.megatron_options import OPTIONS
from parallelism.training.model_flags import ModelFlags
from parallelism.training.precision_flags import (
    gradients_of,
    idle_of_products,
    left_out as of_precision,
    precision_flags,
    precision_of,
)
from parallelism.training.sequence_split import HEADS_AXIS, SequenceSplit
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
from parallelism.training.state_sharding import FULLY_SHARDED, STRATEGIES, StateSharding
from parallelism.training.training_run import ADAM_W, TrainingRun
from parallelism.transforms import (
    SGD,
    Adam,
    ContextParallel,
    MixedPrecision,
    Overlap,
    Pipeline,
    Recompute,
    SequenceParallel,
    Strategy,
    TensorOverlap,
    TensorParallel,
    Transform,
    Zero,
)
from parallelism.transforms.words import REPLICA

_OF_FSDP = ("data_parallel_sharding_strategy", "outer_dp_sharding_strategy")
"""The flags that have a meaning with ``--use-megatron-fsdp`` only."""
ATTENTION_CORE = "block.*.attention.core"
SGD_MOMENTUM = 0.9
"""The momentum of Megatron-LM."""


def overlap_of(replicas: int, ahead: int = 1, *, shared_out: bool = False) -> Overlap:
    """``--overlap-grad-reduce``, in the buckets of Megatron-LM: of 40 million gradients, or a million for each replica.

    They are float32 (``ddp_config.bucket_size`` in megatron/core/distributed/distributed_data_parallel.py).  Devices along
    cp are replicas, too.  Parameters that are ``shared_out``, as by FSDP, are gathered so many blocks ``ahead``, and
    gradients are summed block by block: each ``TransformerLayer`` is a unit (megatron/core/distributed/fsdp in version
    0.16.1: mcore_fsdp_adapter.py, and `_get_parameter_groups`, which cuts a unit into no buckets).
    """
    if shared_out:
        return Overlap(ahead=ahead)
    return Overlap(4 * max(40_000_000, 1_000_000 * replicas), ahead)


@dataclass(frozen=True, kw_only=True)
class MegatronFlags(ModelFlags):
    """Values of the flags (`parallelism.training.OPTIONS`) by their names with ``_``; None: not given.

    Flags that change nothing here (`parallelism.training.UNCHANGING`) are words of the command line only.

    Defaults are those of Megatron-LM, with these differences.  Weights are in bfloat16, with a main copy in float32,
    unless ``fp16`` or ``fp32`` is given; the latter is no flag of Megatron-LM.  The vocabulary is padded to a multiple
    of 128, not of 128 times ``tensor_model_parallel_size``: so plans with different sizes train the same model.  Where
    stages cannot have equally many layers, the first and the last have fewer, because they have the embedding and the
    head.  Adam is AdamW; ``optimizer="sgd"`` has a momentum of 0.9 unless ``sgd_momentum`` says otherwise.
    ``cp_comm_type`` is ``p2p``, but ``all_gather`` where attention is not one kernel.  Gradients are in float32, with
    ``fp16`` as well, unless ``grad_reduce_in_bf16`` or ``main_grads_dtype`` says otherwise.  They are clipped only if
    ``clip_grad`` says so, and scaled only if ``loss_scale`` does, by this constant.
    """

    @property
    def unmodelled(self) -> list[str]:
        """The flags of which the value changes nothing here, as words."""
        left_out = [
            f"--{option.name} {getattr(self, option.field)}"
            for option in OPTIONS
            if getattr(self, option.field) in option.unmodelled
        ]
        left_out += of_precision(self)
        return left_out + ["--overlap-param-gather"] * bool(
            self.overlap_param_gather and not self._gathers_ahead
        )

    def idle(self, mesh: Mesh) -> list[str]:
        """The fields that were given and change nothing on a mesh, because it has one device along their axis."""

        def is_idle(field: str) -> bool:
            return field in _AXES and all(mesh.shape.get(axis, 1) == 1 for axis in _AXES[field].split())

        idle = list(filter(is_idle, self.given("strategy")))
        if not self.use_megatron_fsdp:
            idle += [field for field in _OF_FSDP if getattr(self, field) and field not in idle]
        idle += idle_of_products(self)
        return idle + ["sgd_momentum"] * (self.sgd_momentum is not None and self.optimizer != "sgd")

    @property
    def trained_by(self) -> SGD | Adam:
        """The optimizer.  Its learning rate changes neither the time nor the memory of a step."""
        if self.optimizer != "sgd":
            return ADAM_W
        return SGD(ADAM_W.lr, SGD_MOMENTUM if self.sgd_momentum is None else self.sgd_momentum)

    @property
    def gradients(self) -> str:
        """The dtype in which gradients are added up, over microbatches and devices, and given to the optimizer.

        ``ValueError`` for flags that exclude each other, as in Megatron-LM.
        """
        return gradients_of(self)

    @property
    def _gathers_ahead(self) -> bool:
        """Whether weights that are shared out are gathered before they are needed."""
        return bool(
            self.overlap_param_gather
            and self.overlap_grad_reduce
            and StateSharding.of(self).stage == FULLY_SHARDED
        )

    @property
    def _ahead(self) -> int:
        """How many blocks ahead weights are gathered; 1 where they are not shared out, which is as good as any."""
        return int(self._gathers_ahead or StateSharding.of(self).stage < FULLY_SHARDED)

    # -- the run -------------------------------------------------------------------------------------------------------

    def run(self, devices: int, named: TransformerSpec | None = None) -> TrainingRun:
        """The run on so many devices, those along dp being what the others leave.

        ``ValueError`` for flags that do not fit together, or not these devices.
        """
        tp, cp, pp = (
            getattr(self, f"{name}_parallel_size") or 1
            for name in ("tensor_model", "context", "pipeline_model")
        )
        spec = self.spec(named).for_tensor_parallel(tp)
        if devices % (tp * cp * pp):
            raise ValueError(
                f"{devices} devices must be a multiple of the {tp} x {cp} x {pp} devices of tensor, context and "
                "pipeline parallelism"
            )
        replicas = devices // (tp * cp * pp)
        sequences = SequenceSplit.of(self, spec)
        experts = ExpertSplit.of(self, spec, sequences.axes(cp), replicas)
        shared = StateSharding.of(self).axes(replicas // experts.own)
        micro = self.micro_batch_size or 1
        batch = self.global_batch_size or micro * replicas
        if batch % (micro * replicas):
            raise ValueError(
                "--global-batch-size must be a multiple of --micro-batch-size and the devices along dp, "
                f"{micro} x {replicas} = {micro * replicas}, got {batch}"
            )
        for extent, what, axis, size in (
            (spec.heads, "heads", "tensor-model", tp),
            (spec.copied_groups, "heads of keys and values", "tensor-model", tp),
            (spec.sequence, "tokens", "context", cp),
        ):
            if extent % size:
                raise ValueError(f"--{axis}-parallel-size must divide the {extent} {what}, got {size}")
        microbatches = batch // (micro * replicas)
        chunks, counts = self.cut(spec, pp)
        if chunks > 1 and microbatches % pp:
            raise ValueError(
                f"an interleaved schedule needs a number of microbatches that {pp} stages divide; "
                f"{batch} sequences in microbatches of {micro} on {replicas} replicas are {microbatches}"
            )
        schedule = "interleaved_1f1b" if chunks > 1 else "1f1b"
        pipeline = Pipeline("pp", microbatches, schedule, chunks, begins_of(counts))
        sequences.check(spec, cp, tp)
        sizes = {"pp": pp, **shared, **experts.axes(), **sequences.axes(cp), "tp": tp}
        mesh = Mesh(**{axis: size for axis, size in sizes.items() if size > 1 or axis in ("pp", "ep")})
        return TrainingRun(
            spec,
            batch,
            Strategy(*self._transforms(mesh, counts, sequences, experts), pipeline),
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
        embedding = bool(self.account_for_embedding_in_pipeline_split)
        loss = bool(self.account_for_loss_in_pipeline_split)
        if pp == 1:
            return 1, (spec.layers,)
        if len(self._cut_flags) > 1:
            raise ValueError(f"{' and '.join(self._cut_flags)} exclude each other")
        if self.pipeline_model_parallel_layout is not None:
            counts = layout_counts(self.pipeline_model_parallel_layout, spec.layers, spec.next_tokens)
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

        def given(names: Sequence[str]) -> list[str]:
            return [name for name in names if getattr(self, name) is not None]

        layout, *others = (given(kind)[:1] for kind in kinds)
        found = [*layout, *chain.from_iterable(others)]
        if len(given(numbers)) > 1 or (layout and given(numbers)):
            found = [*layout, *given(numbers)]
        return [f"--{name.replace('_', '-')}" for name in found]

    def _transforms(
        self, mesh: Mesh, counts: tuple[int, ...], sequences: SequenceSplit, experts: ExpertSplit
    ) -> Iterator[Transform]:
        precision = precision_of(self)
        if precision is not None:
            yield precision
        replicas = prod(mesh.shape.get(axis, 1) for axis in ("dp", REPLICA, "cp", HEADS_AXIS))
        sharding = StateSharding.of(self)
        shared_out = sharding.stage == FULLY_SHARDED
        overlap = (
            overlap_of(replicas, self._ahead, shared_out=shared_out) if self.overlap_grad_reduce else None
        )
        yield from sharding.transforms(mesh, overlap)
        yield from experts.transforms()
        yield from sequences.transforms(mesh.shape)
        if "tp" in mesh.axes:
            yield TensorParallel()
            if self.sequence_parallel:
                yield SequenceParallel()
            if self.tp_comm_overlap:
                yield self._tensor_overlap()
        yield from self._recompute(counts)

    def _tensor_overlap(self) -> TensorOverlap:
        """``--tp-comm-overlap``.  ``ValueError`` without sequence parallelism, as in Megatron-LM."""
        if not self.sequence_parallel:
            raise ValueError("--tp-comm-overlap needs --sequence-parallel")
        return TensorOverlap()

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
        context = [each for each in run.strategy.transforms if isinstance(each, ContextParallel)]
        exchanges = {each.axis: each.exchange for each in context}
        experts = ExpertSplit.flags(run.strategy.transforms, shape)
        if experts is None:
            return None
        flags = cls(
            tensor_model_parallel_size=shape.get("tp", 1),
            pipeline_model_parallel_size=shape["pp"],
            **SequenceSplit.flags(exchanges, shape),
            **experts,
            moe_token_dispatcher_type="flex"
            if run.model.experts is not None and run.model.experts.deduplicated
            else None,
            num_layers_per_virtual_pipeline_stage=layers // stages
            if pipeline.chunks > 1 and layers % stages == 0 and is_even
            else None,
            num_virtual_stages_per_pipeline_rank=pipeline.chunks
            if pipeline.chunks > 1 and layers % stages and is_even
            else None,
            pipeline_model_parallel_layout=None if is_even else layout_text(counts),
            sequence_parallel=SequenceParallel in kinds,
            tp_comm_overlap=TensorOverlap in kinds,
            overlap_grad_reduce=Overlap in kinds,
            **_sharding_flags(run),
            recompute_granularity=_granularity(again),
            recompute_method="block" if most else None,
            recompute_num_layers=most,
            **precision_flags(precision),
            micro_batch_size=run.microbatch // shape.get("ep", 1),
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


def _sharding_flags(run: TrainingRun) -> dict[str, Any]:
    """The flags of how far the state is shared out, by field."""
    stages = {each.axis: each.stage for each in run.strategy.transforms if isinstance(each, Zero)}
    outer = stages.pop(REPLICA, 0)
    stage = max(stages.values(), default=0)
    flags: dict[str, Any] = {"use_distributed_optimizer": stage > 0}
    if REPLICA in run.mesh.axes:
        flags["num_distributed_optimizer_instances"] = run.mesh.shape[REPLICA]
    if stage < 2:
        return flags
    words = {number: word for word, number in STRATEGIES.items()}
    overlap = next((each for each in run.strategy.transforms if isinstance(each, Overlap)), None)
    return flags | {
        "use_distributed_optimizer": None,
        "use_megatron_fsdp": True,
        "data_parallel_sharding_strategy": words[stage],
        "outer_dp_sharding_strategy": words[outer] if outer else None,
        "overlap_param_gather": True
        if stage == FULLY_SHARDED and overlap is not None and overlap.ahead
        else None,
    }


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
    "tp_comm_overlap": "tp",
    **dict.fromkeys(("cp_comm_type", "hierarchical_context_parallel_sizes"), f"cp {HEADS_AXIS}"),
    "use_distributed_optimizer": "dp ep",
    **dict.fromkeys(_OF_FSDP, "dp ep"),
    "use_megatron_fsdp": "dp ep",
    "overlap_grad_reduce": "dp",
}
"""Flags that need several devices along an axis, or along one of two."""


def _granularity(again: Recompute | None) -> str | None:
    if again is None:
        return None
    return "selective" if again == Recompute(ATTENTION_CORE) else "full"
