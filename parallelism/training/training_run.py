"""`TrainingRun`: a step of training as a value, before it is placed on any hardware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from parallelism.hardware import Hardware
from parallelism.ir import Function, symbols
from parallelism.ir.core.extents import specialized
from parallelism.ir.operators.attention import hidden_flops
from parallelism.kernels.optimizers import SGD, Adam, AdamW
from parallelism.mesh import Mesh
from parallelism.models import TransformerSpec
from parallelism.transforms import (
    DataParallel,
    MixedPrecision,
    Pipeline,
    Recompute,
    Step,
    Strategy,
    train_step,
)

ADAM_W = AdamW(1e-4)
"""The usual optimizer."""
TOLD_FROM = 2
"""How many times the rate of float32 that of 16 bits is where it is told."""
ROWS = "B"
"""The symbol of the rows of the batch, which a pipeline deals to replicas and microbatches."""


@dataclass(frozen=True)
class TrainingRun:
    """A model, the rows of a batch, and how both are split.

    ``model`` is a `TransformerSpec`, or the program of a loss with a symbol ``B`` for the rows.  A strategy without a
    `Pipeline` has one stage, which works on the whole batch at once.  ``ValueError`` for a mesh that lacks an axis of
    the strategy, and for a batch that cannot be dealt to replicas and microbatches of equal size.
    """

    model: TransformerSpec | Function
    batch: int
    strategy: Strategy
    mesh: Mesh
    optimizer: SGD | Adam = ADAM_W
    clip: float | None = None
    """The largest norm of all gradients together; None: they are not clipped."""
    loss_scale: float | None = None
    """What the loss is multiplied by before it is differentiated; None: it is not."""

    def __post_init__(self) -> None:
        self.strategy.text_on(self.mesh)  # refuses axes that the mesh does not have
        if self.pipeline is not None and self.pipeline.shares:
            self._check_shares(self.pipeline)
        elif self.batch % (self.replicas * self.microbatches):
            raise ValueError(
                f"a batch of {self.batch} rows cannot be dealt to {self.replicas} replicas of "
                f"{self.microbatches} microbatches of equal size"
            )

    def _check_shares(self, pipeline: Pipeline) -> None:
        """``ValueError`` if the rows of a replica cannot be dealt to microbatches of equal size."""
        for rows in pipeline.rows_of_replicas(self.batch, self.replicas) or ():
            if rows % self.microbatches:
                raise ValueError(
                    f"the {rows} rows of a replica cannot be dealt to {self.microbatches} microbatches of equal size"
                )

    @property
    def pipeline(self) -> Pipeline | None:
        """The stages and their schedule; None for a single stage without microbatches."""
        return next((each for each in self.strategy.transforms if isinstance(each, Pipeline)), None)

    @property
    def microbatches(self) -> int:
        """The number of microbatches of a replica."""
        return self.pipeline.microbatches if self.pipeline else 1

    @property
    def replicas(self) -> int:
        """The number of replicas of the pipeline: the devices along the axes of data parallelism."""
        axes = {each.axis for each in self.strategy.transforms if isinstance(each, DataParallel)} | {"dp"}
        return prod(self.mesh.shape.get(axis, 1) for axis in axes)

    @property
    def microbatch(self) -> int:
        """The rows of a microbatch; of replicas that have not equally many, their mean, rounded down."""
        return self.batch // (self.replicas * self.microbatches)

    @property
    def dtype(self) -> str:
        """The dtype of products: that of mixed precision, or that of the model."""
        narrow = [each for each in self.strategy.transforms if isinstance(each, MixedPrecision)]
        if narrow:
            return str(narrow[0].dtype)
        if isinstance(self.model, TransformerSpec):
            return str(self.model.dtype)
        return str(next(value.type.dtype for value in self.model.inputs))

    @property
    def has_experts(self) -> bool:
        """Whether the model has experts."""
        return isinstance(self.model, TransformerSpec) and self.model.experts is not None

    @property
    def products(self) -> str:
        """The dtype of most products: ``float8`` or ``float4``, where those of the blocks are; else `dtype`."""
        narrow = [each for each in self.strategy.transforms if isinstance(each, MixedPrecision)]
        return narrow[0].products_dtype if narrow else self.dtype

    @cached_property
    def step(self) -> Step | Function:
        """The program of the step, maybe cut into a pipeline."""
        what = self.model, self.optimizer, self.clip, self.loss_scale
        made: Any
        if self.pipeline is not None:
            cut = [each for each in self.strategy.transforms if isinstance(each, Pipeline | Recompute)]
            inner = tuple(each for each in self.strategy.transforms if each not in cut)
            made = Strategy(*cut)(_split_step(*what, inner))
        else:
            made = self.strategy(_train_step(*what).specialize(**{ROWS: self.batch}))
        return made  # type: ignore[no-any-return]

    @property
    def hidden_flops(self) -> int:
        """Those of the scores that masks of attention hide, forward and backward: a fused kernel does not compute them."""
        step = _train_step(self.model, self.optimizer, self.clip, self.loss_scale)
        hidden = sum((hidden_flops(op) for op in step.ops), 0)
        return int(specialized(hidden, {ROWS: self.batch}))

    @property
    def placed(self) -> Mapping[str, Any]:
        """The arguments of `parallelism.simulate` besides the step and the hardware: the mesh, and for stages the batch."""
        return {"mesh": self.mesh, "batch": self.batch if self.pipeline else None}


def precision_remark(dtype: str, hardware: Hardware) -> str:
    """That products in float32 are slow on this hardware, in a sentence; empty if they are not, or of another dtype.

    Devices with units for products of 16 bits, such as NVIDIA's tensor cores, reach several times the rate with them.
    """
    rates = hardware.flops_per_second
    narrow = next((name for name in ("bfloat16", "float16") if name in rates), None)
    if dtype != "float32" or narrow is None or rates[narrow] < TOLD_FROM * rates.get(dtype, rates[narrow]):
        return ""
    return (
        f"{hardware.name} has {rates[dtype] / 1e12:.3g} Tflop/s for float32 and {rates[narrow] / 1e12:.4g} for "
        f'{narrow}, which mixed precision uses: dtype="{narrow}" of a TransformerSpec, precision={narrow} in a '
        f"strategy"
    )


@lru_cache(maxsize=4)
def _train_step(
    model: TransformerSpec | Function, optimizer: SGD | Adam, clip: float | None, loss_scale: float | None
) -> Function:
    """The step before it is split, which runs of one model have in common."""
    function = model.function(symbols(ROWS)[0]) if isinstance(model, TransformerSpec) else model
    return train_step(function, optimizer, clip=clip, loss_scale=loss_scale)


@lru_cache(maxsize=2)
def _split_step(
    model: TransformerSpec | Function,
    optimizer: SGD | Adam,
    clip: float | None,
    loss_scale: float | None,
    transforms: tuple[Any, ...],
) -> Function:
    """The split step before it is cut into stages, which runs that differ in their pipelines alone have in common."""
    found: Any = Strategy(*transforms)(_train_step(model, optimizer, clip, loss_scale))
    assert isinstance(found, Function)
    return found
