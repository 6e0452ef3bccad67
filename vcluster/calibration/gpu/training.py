"""Steps of small Transformers: what they took beside what the simulator predicts.  Nothing is fitted to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from parallelism.display import in_columns
from parallelism.display.quantities import seconds as shown_seconds
from parallelism.hardware import Hardware
from parallelism.training import MegatronFlags, TrainingRun, figures
from vcluster.calibration.gpu.models import Model


@dataclass(frozen=True)
class HeldOut:
    """A step that was measured, and its prediction by constants that were not fitted to it."""

    name: str
    measured: float
    predicted: float
    flops: float
    """The model's floating-point operations of a step, as MFU counts them."""
    peak: float
    """The flops per second of the device in the dtype of the products."""

    @property
    def error(self) -> float:
        """The error of the prediction, as a part of what was measured."""
        return self.predicted / self.measured - 1

    @property
    def mfu(self) -> float:
        """The measured model flops utilization."""
        return self.flops / self.measured / self.peak


def run_of(model: Model) -> TrainingRun:
    """The training run of a measured model on one device, for the simulator."""
    sizes, gpt = model.sizes, model.sizes.is_gpt
    return MegatronFlags(
        num_layers=model.layers,
        hidden_size=sizes.width,
        ffn_hidden_size=sizes.feed_forward,
        num_attention_heads=sizes.heads,
        seq_length=model.tokens,
        vocab_size=model.vocabulary,
        group_query_attention=sizes.key_value_heads != sizes.heads or None,
        num_query_groups=sizes.key_value_heads if sizes.key_value_heads != sizes.heads else None,
        swiglu=not gpt or None,
        normalization=None if gpt else "RMSNorm",
        position_embedding_type=None if gpt else "rope",
        untie_embeddings_and_output_weights=not gpt or None,
        disable_bias_linear=not gpt or None,
        use_flash_attn=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=True,
        micro_batch_size=model.microbatch,
        global_batch_size=model.microbatch * model.microbatches,
    ).run(1)


def predicted(model: Model, hardware: Hardware, measured: float) -> HeldOut:
    """The prediction of a step beside what it took."""
    run = run_of(model)
    told = figures(run, hardware.placed([0]))
    peak = hardware.peak(run.dtype)
    return HeldOut(model.name, measured, told.seconds, told.mfu * told.seconds * peak, peak)


def mean_error(rows: Sequence[HeldOut]) -> float:
    """The mean error of predictions, without signs."""
    return mean(abs(row.error) for row in rows)


def table(rows: list[HeldOut]) -> str:
    """Predicted beside measured, and what one constant utilization would say: the median of these very steps."""
    if not rows:
        return "no step was measured"
    usual = median(row.mfu for row in rows)
    cells = [("step of", "measured", "predicted", "error", "", "constant MFU", "error")]
    errors, of_constant = [], []
    for row in rows:
        constant = row.flops / (usual * row.peak)
        errors.append(row.error)
        of_constant.append(constant / row.measured - 1)
        cells.append(
            (
                row.name,
                shown_seconds(row.measured),
                shown_seconds(row.predicted),
                f"{errors[-1]:+.1%}",
                "held out",
                shown_seconds(constant),
                f"{of_constant[-1]:+.1%}",
            )
        )
    means = [sum(map(abs, each)) / len(rows) for each in (errors, of_constant)]
    return "\n".join(
        [
            *in_columns(cells, 2),
            f"mean error {means[0]:.1%} held out; of one constant MFU {means[1]:.1%}. The constant is {usual:.1%}, the "
            "median of",
            "these very steps, which favours it; the prediction has seen none of them.",
        ]
    )
