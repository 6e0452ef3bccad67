"""`PublishedRun`: a published run of training, a row of ``tables/training_runs.csv``, and the step that it describes."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.resources import files
from typing import Any

from parallelism.hardware import Hardware
from parallelism.models import TransformerSpec, transformer
from parallelism.planning.assembled_steps import figures_of_run
from parallelism.training import MegatronFlags, TrainingRun, figures
from parallelism.training.strategy_run import strategy_run
from parallelism.transforms import Strategy

_FEW_LAYERS = (2, 4)
NAMED = {
    "grok1-314b": "grok1-314b",
    "qwen3_30b_a3b": "qwen3-30b-a3b",
    "qwen3_235b_a22b": "qwen3-235b-a22b",
    "gpt-oss-120b": "gpt-oss-120b",
    "deepseekv3": "deepseek-v3",
}
"""The models with experts, by what the sources call them: their names here, from which a row has all but its depth."""
_FLOAT8: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    "fp8-cs": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
}
"""Flags by what a row says of its precision, where no source tells a history of maxima."""
_FLOAT8_OF_NEMO: dict[str, Any] = {
    "fp8_format": "hybrid",
    "fp8_recipe": "delayed",
    "fp8_amax_history_len": 1024,
    "fp8_amax_compute_algo": "max",
    "fp8_param_gather": True,
}
"""Those of ``fp8`` under NeMo: the one recipe in float8 of its package of 2024, ``nemo_toolkit`` 2.1.0
(``nemo/collections/llm/recipes/precision/mixed_precision.py``, ``bf16_with_fp8_mixed``)."""
NEMO = "NeMo"
BRIDGE = "Megatron Bridge"
_OF_REPLICAS = frozenset(("gpus", "gbs", "step_s", "src"))
_RANK = 16
"""That of adapters, which no source tells; those of attention are the usual ones."""
_ACTIVATIONS = {"gelu": {}, "swiglu": {"swiglu": True}, "relu2": {"squared_relu": True}}


@dataclass(frozen=True)
class PublishedRun:
    """A row of the table: what a source says of a run, as text by the name of the column."""

    number: int
    """Its place in the table."""
    columns: Mapping[str, str]

    def __hash__(self) -> int:
        return hash(self.number)

    @property
    def measured_seconds(self) -> float:
        """The seconds of a step."""
        return float(self.columns["step_s"])

    @property
    def devices(self) -> int:
        """The number of GPUs."""
        return self._whole("gpus")

    @property
    def alike(self) -> tuple[str, ...]:
        """What runs have in common that differ in the number of their replicas alone."""
        return tuple(value for name, value in self.columns.items() if name not in _OF_REPLICAS)

    @property
    def what(self) -> str:
        """What tells the run from others of its model, in words."""
        told = f"{self.devices} GPUs, {self._whole('seq')} tokens"
        split = [f"{axis}={self.columns[axis]}" for axis in ("tp", "pp", "cp") if self.columns[axis] != "1"]
        return " ".join([f"{told}, {self._whole('gbs')} x" if split else told, *split])

    @property
    def named(self) -> str | None:
        """The name of the model, if it has one here."""
        return NAMED.get(self.columns["model"])

    @cached_property
    def model_flags(self) -> dict[str, Any]:
        """The model and the batch as flags of Megatron-LM."""
        row = self.columns
        batch: dict[str, Any] = {
            "num_layers": self._whole("layers"),
            "seq_length": self._whole("seq"),
            "micro_batch_size": self._whole("mbs"),
            "global_batch_size": self._whole("gbs"),
        }
        if row["dispatcher"]:
            batch["moe_token_dispatcher_type"] = row["dispatcher"]
        if self.named is not None:
            return batch
        flags: dict[str, Any] = {
            **batch,
            "hidden_size": self._whole("width"),
            "ffn_hidden_size": self._whole("ffn"),
            "num_attention_heads": self._whole("heads"),
            "vocab_size": self._whole("vocab"),
            "attention_backend": "flash",
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            **_ACTIVATIONS[row["act"]],
        }
        if row["kv"] != row["heads"]:
            flags |= {"group_query_attention": True, "num_query_groups": self._whole("kv")}
        if row["norm"] == "rms":
            flags["normalization"] = "RMSNorm"
        if row["pos"] == "rotary":
            flags["position_embedding_type"] = "rope"
        if row["tied"] == "False":
            flags["untie_embeddings_and_output_weights"] = True
        if row["biases"] == "False":
            flags["disable_bias_linear"] = True
        if row["peft"] == "lora":
            flags["lora_rank"] = _RANK
        return flags

    @cached_property
    def strategy(self) -> str | None:
        """The strategy in words, where devices share the weights as FSDP does; None where flags say it."""
        sharing = self._whole("fsdp")
        if not sharing:
            return None
        row, devices = self.columns, self.devices
        split = f"fsdp={devices}" if sharing == devices else f"hsdp={devices // sharing}x{sharing}"
        if row["zero"] != "3":
            split = f"dp={devices} zero={row['zero']} overlap"
        # A policy of recomputation other than a whole block computes less again.
        again = "" if row["recompute"] == "none" else "recompute=block.*"
        precision = "precision=bf16,bf16" if row["mp_mode"] == "PURE" else "precision=bf16"
        precision += ",products:f8" if row["precision"] != "bf16" else ""
        count = self._whole("gbs") // devices // self._whole("mbs")
        return " ".join(f"{precision} {split} {again} pp=1 1f1b:{count}".split())

    @cached_property
    def flags(self) -> MegatronFlags:
        """All that flags of Megatron-LM say of the run."""
        if self.strategy is not None:
            return MegatronFlags(**self.model_flags)
        row = self.columns
        split: dict[str, Any] = {
            "bf16": True,
            "tensor_model_parallel_size": self._whole("tp"),
            "pipeline_model_parallel_size": self._whole("pp"),
            "context_parallel_size": self._whole("cp"),
            "expert_model_parallel_size": self._whole("ep") if row["ep"] != "1" else None,
            "expert_tensor_parallel_size": 1 if self._has_whole_experts else None,
            "sequence_parallel": row["tp"] != "1" or None,
            "cp_comm_type": "p2p" if row["cp"] != "1" else None,
            "num_virtual_stages_per_pipeline_rank": self._whole("vp") if row["vp"] != "1" else None,
            "use_distributed_optimizer": row["zero"] == "1" or None,
            "overlap_grad_reduce": row["dp_overlap"] == "True" or None,
            "recompute_granularity": "selective" if row["recompute"] == "selective" else None,
        }
        is_of_nemo = row["precision"] == "fp8" and row["software"] == NEMO
        return MegatronFlags(
            **self.model_flags, **split, **(_FLOAT8_OF_NEMO if is_of_nemo else _FLOAT8[row["precision"]])
        )

    @property
    def _has_whole_experts(self) -> bool:
        """Whether tensor parallelism does not split an expert: so say the recipes of Megatron Bridge.  Of others no source
        says it; where the experts are on more devices than there are replicas, they can lie in no other way."""
        if self.columns["tp"] == "1":
            return False
        split = self._whole("tp") * self._whole("cp") * self._whole("pp")
        return self.columns["software"] == BRIDGE or self._whole("ep") > self.devices // split

    @property
    def words(self) -> tuple[str, ...]:
        """The run as the words behind ``python -m vcluster simulate``."""
        told = ("--strategy", self.strategy) if self.strategy is not None else ()
        where = ("--hardware", self.columns["hw"], "--devices", str(self.devices))
        return (self.named or "gpt", *self.flags.words(), *told, *where)

    @cached_property
    def run(self) -> TrainingRun:
        """The step on its devices."""
        return self.of_layers(self._whole("layers"))

    @cached_property
    def flops(self) -> float:
        """The model's floating-point operations of a step, of one device."""
        spec = self.flags.spec(self._spec)
        return spec.flops(self._whole("gbs") * spec.sequence) / self.devices

    def of_layers(self, layers: int) -> TrainingRun:
        """The same step of a model with another number of layers."""
        flags = MegatronFlags(**{**self.flags.given(), "num_layers": layers})
        if self.strategy is None:
            return flags.run(self.devices, self._spec)
        return strategy_run(flags, *Strategy.parse_on_mesh(self.strategy))

    @property
    def _spec(self) -> TransformerSpec | None:
        """The model by its name; None where the row has its figures."""
        return None if self.named is None else transformer(self.named)

    def _whole(self, name: str) -> int:
        return int(self.columns[name] or 0)


def training_seconds(published: PublishedRun, hardware: Hardware) -> float:
    """What a simulation says of the step.

    Where every device has all layers, models of two and of four layers are simulated, and each layer beyond takes what
    the last two take.
    """
    if published.strategy is None:
        return figures_of_run(published.run, hardware).seconds
    few, more = (figures(published.of_layers(layers), hardware).seconds for layers in _FEW_LAYERS)
    layers = published.flags.num_layers or 0
    return few + (more - few) * (layers - _FEW_LAYERS[0]) / (_FEW_LAYERS[1] - _FEW_LAYERS[0])


@lru_cache(maxsize=1)
def published_runs() -> tuple[PublishedRun, ...]:
    """All rows of the table."""
    text = files("vcluster.calibration").joinpath("tables", "training_runs.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    return tuple(PublishedRun(number, row) for number, row in enumerate(rows))
