"""A small GPT as a pipeline of tensor-parallel stages: `Transformer` describes it, its steps run it on a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Array
from parallelism.kernels import ACTIVATIONS, Adam, Optimizer
from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.pipelining import Pipeline
from parallelism.sharding import TensorSharding
from pipeline_parallelism.microbatches import Microbatches
from pipeline_parallelism.model import dealt, inner_mesh
from pipeline_parallelism.steps import PredictStep, ResetStep
from pipeline_parallelism.trained_stage import Layer
from pipeline_parallelism.training import TrainStep
from pipeline_parallelism.transformer_layers import Axes, BlockLayer, EmbeddingLayer, HeadLayer
from pipeline_parallelism.transformer_stage import AnyLayer, TransformerStage

POLICIES = ("megatron", "sequence")
_ADAM = Adam()


@dataclass(frozen=True)
class Transformer:
    """A language model: an embedding, ``blocks`` causal blocks and a head, dealt to the stages as so many layers.

    >>> gpt = Transformer(vocabulary=256, width=64, heads=4, blocks=4, pipeline=Pipeline(stages=2, microbatches=4))
    >>> [list(gpt.layers_of(stage)) for stage in range(2)]
    [[0, 1, 2], [3, 4, 5]]

    Layer 0 is the `Embedding`, layers 1 to ``blocks`` are each a `TransformerBlock` with rotary positions, the last is
    a `LayerNorm` and the `VocabularyLoss`, whose table is its own.  Stages lie on the pipeline's axis, replicas on
    ``dp``; a mesh axis ``tp`` splits vocabulary, heads and hidden dim inside a stage, and by ``policy="sequence"`` also
    the rows between them: see `TransformerBlockPolicy`.  So ``Mesh(dp=2, pp=2, tp=2)`` trains a pipeline of 2 stages,
    and `VirtualCluster(1)` the same model with ``Pipeline(1, 1)`` in one process.

    Layer ``i`` draws its parameters from ``numpy.random.default_rng((seed, i))``, whatever the mesh.  They live in
    ``device.state`` from the first step on, each rank's shards of them, under this description.

    By default there are as many ``kv_heads`` as heads, all heads together are as wide as x, and ``hidden`` is four
    times that.  ``ValueError`` for numbers, names or a pipeline that do not fit; and, on the host, before anything is
    sent, for a mesh over which they cannot be shared, and for tokens outside the vocabulary.
    """

    vocabulary: int
    width: int
    heads: int
    blocks: int
    pipeline: Pipeline
    kv_heads: int | None = None
    head_dim: int | None = None
    hidden: int | None = None
    policy: str = "megatron"
    activation: str = "gelu"
    rotary_base: float = 10000.0
    dtype: npt.DTypeLike = np.float64
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "heads", "blocks", "kv_heads", "head_dim", "hidden"):
            value = getattr(self, name)
            if value is None and name in ("kv_heads", "head_dim", "hidden"):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise ValueError(f"{name} of a Transformer is an integer of at least 1, got {value!r}")
            object.__setattr__(self, name, int(value))
        if self.policy not in POLICIES:
            raise ValueError(f"policy is one of {', '.join(POLICIES)}, got {self.policy!r}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation is one of {', '.join(ACTIVATIONS)}, got {self.activation!r}")
        if self.pipeline.stages > self.layer_count:
            raise ValueError(f"{self.pipeline.stages} stages need a layer each; blocks={self.blocks} makes "
                             f"{self.layer_count} layers: the embedding, the blocks, the head")
        if self.pipeline.schedule.local:
            raise ValueError(f"a Transformer has one loss, at its end; schedule {self.pipeline.schedule.name!r} needs "
                             f"one for each stage")
        if np.dtype(self.dtype).kind != "f":
            raise ValueError(f"the dtype of a Transformer must be a floating one, got {np.dtype(self.dtype)}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        self._check_shapes(Mesh(inside=1), (1, 1))

    # ------------------------------------------------------------------------------------------ what it is

    @property
    def layer_count(self) -> int:
        """How many layers there are: embedding, blocks and head."""
        return self.blocks + 2

    @property
    def inside(self) -> tuple[str, ...]:
        """The mesh axes over which a stage is spread."""
        return ("tp",)

    def layers_of(self, stage: int) -> range:
        """The layers of a stage: as even as can be, the longer stages first."""
        return dealt(self.layer_count, self.pipeline.stages, stage)

    def parameter_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """The parameters of a layer, by name, in the order in which they are returned."""
        return dict(self._part(layer, ()).shapes)

    def layouts(self, layer: int, mesh: Mesh) -> dict[str, TensorSharding]:
        """How the parameters of a layer lie inside a stage."""
        return dict(self._part(layer, self._axes(mesh)).layouts)

    def initial_layers(self, layers: Iterable[int]) -> list[Layer]:
        """The parameters of these layers before the first step, whole."""
        found: list[Layer] = []
        for number in layers:
            drawn = self._part(number, ()).drawn(np.random.default_rng((self.seed, number)))
            found.append(tuple(array.astype(self.dtype) for array in drawn.values()))
        return found

    def initial_parameters(self) -> list[Layer]:
        """Those of every layer before the first step."""
        return self.initial_layers(range(self.layer_count))

    # ------------------------------------------------------------------------------------- on a cluster

    def train_step(
        self, optimizer: Optimizer = _ADAM, returns: str | Iterable[str] = ("loss", "parameters", "gradients")
    ) -> TrainStep:
        """One step of training, ``cluster.run(step, tokens, targets)``; its result is a `Training`.

        ``tokens`` and ``targets`` are integers (rows, sequence): text, and the same text one token on.  The loss is the
        mean over all of them.  **Communication**: at each cut, forward and backward, a message for each microbatch of
        its rows x sequence x width on every rank of ``tp`` (of that, its share of the sequence, by
        ``policy="sequence"``); over ``tp`` what the `TransformerBlock`, the `Embedding` and the `VocabularyLoss` say;
        over ``dp`` an all_reduce of the gradients of each stage, and one of the loss.
        """
        return TrainStep(self, optimizer, returns)

    def predict_step(self) -> PredictStep:
        """The logits (rows, sequence, vocabulary) of what comes after each token: ``cluster.run(step, tokens)``."""
        return PredictStep(self)

    def reset_step(self) -> ResetStep:
        """Frees what the model has in the devices, so that the next step begins anew: ``cluster.run(step)``."""
        return ResetStep(self)

    # ------------------------------------------------------------------------------ what the steps ask for

    def initial_shards(self, mesh: Mesh, rank: int, layers: Iterable[int]) -> list[Layer]:
        """What a rank holds of `initial_layers`; they are drawn whole and cut, so that every mesh has the same."""
        return [
            tuple(
                array[layout.slices(array.shape, mesh, rank)].copy()
                for array, layout in zip(*self.initial_layers([number]), self.layouts(number, mesh).values(),
                                         strict=True)
            )
            for number in layers
        ]

    def join_layers(self, mesh: Mesh, layers: Sequence[int], shards: Sequence[list[Layer]]) -> list[Layer]:
        """These layers whole, from the shards of the ranks of a stage."""
        inner = inner_mesh(mesh, self.inside)
        return [
            tuple(
                layout.unshard([part[place][i] for part in shards], inner)
                for i, layout in enumerate(self.layouts(number, inner).values())
            )
            for place, number in enumerate(layers)
        ]

    def join_outputs(self, mesh: Mesh, shards: Sequence[Array]) -> Array:
        """The logits whole."""
        inner = inner_mesh(mesh, self.inside)
        return TensorSharding(None, None, self._axes(inner)).unshard(list(shards), inner)

    def check_mesh(self, mesh: Mesh, x: Array) -> None:
        """``ValueError`` if the heads cannot be shared by the ranks of ``tp``."""
        self._check_shapes(mesh, x.shape)

    def stage(self, device: Device, number: int, layers: list[Layer], work: Microbatches) -> TransformerStage:
        """A stage for one step; its operations, and what they have planned, stay in the device."""
        made: dict[int, AnyLayer] = device.state.setdefault(("pipeline_parallelism.Transformer operations", self), {})
        for layer in self.layers_of(number):
            if layer not in made:
                made[layer] = self._part(layer, self._axes(device.mesh))
        return TransformerStage(device, [made[layer] for layer in self.layers_of(number)], layers, work)

    def rows_over(self, axes: Axes) -> Axes:
        """Over what the rows lie between products, if these are over ``axes``."""
        return axes if self.policy == "sequence" else ()

    def _axes(self, mesh: Mesh) -> Axes:
        return tuple(axis for axis in mesh.axes if axis in self.inside)

    def _part(self, layer: int, axes: Axes) -> AnyLayer:
        if layer == 0:
            return EmbeddingLayer(self, axes)
        return HeadLayer(self, axes) if layer == self.layer_count - 1 else BlockLayer(self, axes)

    def _check_shapes(self, mesh: Mesh, tokens: tuple[int, ...]) -> None:
        block = BlockLayer(self, self._axes(mesh))
        block.operation.plan([(*tokens, self.width), *block.shapes.values()], mesh, self.dtype)

    # ------------------------------------------------------------------------------------------- the data

    def check_inputs(self, x: npt.ArrayLike) -> Array:
        """Tokens as an array; ``TypeError`` if they are no integers, ``ValueError`` for others than there can be."""
        return self._tokens("tokens", x)

    def check_batch(self, x: npt.ArrayLike, targets: npt.ArrayLike) -> tuple[Array, Array]:
        """Tokens and targets as arrays, of the same shape."""
        tokens, wanted = self._tokens("tokens", x), self._tokens("targets", targets)
        if tokens.shape != wanted.shape:
            raise ValueError(f"targets are of the shape of the tokens, {tokens.shape}, got {wanted.shape}")
        return tokens, wanted

    def _tokens(self, name: str, given: npt.ArrayLike) -> Array:
        array: npt.NDArray[Any] = np.asarray(given)
        if array.ndim != 2 or 0 in array.shape:
            raise ValueError(f"{name} must have shape (rows, sequence), both at least 1, got {array.shape}")
        if array.dtype.kind not in "iu":
            raise TypeError(f"{name} must be integers, got {array.dtype}")
        wrong = array[(array < 0) | (array >= self.vocabulary)]
        if len(wrong):
            raise ValueError(f"{name} must be 0 to {self.vocabulary - 1}, the vocabulary, got {wrong[0]}")
        return array.astype(np.int64, copy=False)
