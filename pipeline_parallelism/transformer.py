"""`Transformer` describes a small GPT as a pipeline of tensor-parallel stages; its steps run on a cluster."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Array, plain_array
from parallelism.kernels import ACTIVATIONS, Adam, Optimizer
from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.pipelining import Pipeline
from parallelism.sharding import TensorSharding
from pipeline_parallelism.batch_steps import PredictStep, TrainStep
from pipeline_parallelism.microbatches import Microbatches
from pipeline_parallelism.model import Model, inner_mesh
from pipeline_parallelism.state_steps import ResetStep
from pipeline_parallelism.trained_stage import Layers
from pipeline_parallelism.transformer_stage import (
    AnyLayer,
    Axes,
    BlockLayer,
    EmbeddingLayer,
    HeadLayer,
    TransformerStage,
)

POLICIES = ("megatron", "sequence")
_ADAM = Adam()


@dataclass(frozen=True)
class Transformer(Model):
    """A language model: an embedding, ``blocks`` causal blocks and a head, split over the stages layer by layer.

    >>> gpt = Transformer(vocabulary=256, width=64, heads=4, blocks=4, pipeline=Pipeline(stages=2, microbatches=4))
    >>> [list(gpt.layers_of(stage)) for stage in range(2)]
    [[0, 1, 2], [3, 4, 5]]

    Layer 0 is the `Embedding`; layers 1 to ``blocks`` are each a `TransformerBlock` with rotary positions; the last is
    a `LayerNorm` and the `VocabularyLoss` with its own table.  The pipeline's axis has the stages, ``dp`` the replicas.
    A mesh axis ``tp`` splits vocabulary, heads and hidden dim inside a stage; with ``policy="sequence"`` it also splits
    the rows between them: see `TransformerBlockPolicy`.  So ``Mesh(dp=2, pp=2, tp=2)`` trains a pipeline of 2 stages,
    and `VirtualCluster(1)` trains the same model with ``Pipeline(1, 1)`` on one device.

    Layer ``i`` draws its parameters from ``numpy.random.default_rng((seed, i))``, whatever the mesh.  From the first
    step on, each rank keeps its shards in ``device.state`` under this description.

    The defaults are: as many ``kv_heads`` as heads; heads that are together as wide as x; ``hidden`` four times that.
    ``ValueError`` for numbers, names or a pipeline that do not fit.  The host raises it before anything is sent for a
    mesh that cannot split the model, and for tokens outside the vocabulary.
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
        for name, known in (("policy", POLICIES), ("activation", ACTIVATIONS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is one of {', '.join(known)}, got {getattr(self, name)!r}")
        if self.pipeline.stages > self.layer_count:
            raise ValueError(
                f"{self.pipeline.stages} stages need a layer each; blocks={self.blocks} makes "
                f"{self.layer_count} layers: the embedding, the blocks, the head"
            )
        if self.pipeline.schedule.local:
            raise ValueError(
                f"a Transformer has one loss, at its end; schedule {self.pipeline.schedule.name!r} needs "
                f"one for each stage"
            )
        if np.dtype(self.dtype).kind != "f":
            raise ValueError(f"the dtype of a Transformer must be a floating one, got {np.dtype(self.dtype)}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        _check_shapes(self, Mesh(inside=1), (1, 1))

    # ------------------------------------------------------------------------------------------ layers

    @property
    def layer_count(self) -> int:
        """The number of layers: embedding, blocks and head."""
        return self.blocks + 2

    @property
    def inside(self) -> tuple[str, ...]:
        """The mesh axes over which a stage is spread."""
        return ("tp",)

    def parameter_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters of a layer, by name, in the order in which they are returned."""
        return dict(self._part(layer, ()).shapes)

    def layouts(self, layer: int, mesh: Mesh) -> dict[str, TensorSharding]:
        """The layouts of the parameters of a layer inside a stage, by name."""
        return dict(self._part(layer, self._axes(mesh)).layouts)

    def initial_layers(self, layers: Iterable[int]) -> Layers:
        """The whole parameters of these layers before the first step."""
        drawn = []
        for number in layers:
            arrays = self._part(number, ()).drawn(np.random.default_rng((self.seed, number))).values()
            drawn.append(tuple(array.astype(self.dtype) for array in arrays))
        return drawn

    # ------------------------------------------------------------------------------------- on a cluster

    def train_step(
        self, optimizer: Optimizer = _ADAM, returns: str | Iterable[str] = ("loss", "parameters", "gradients")
    ) -> TrainStep:
        """One step of training.  ``cluster.run(step, tokens, targets).result`` is a `Training`.

        ``tokens`` and ``targets`` are integers of shape ``(rows, sequence)``: a text, and the same text shifted by one
        token.  The loss is the mean over all targets.  **Communication**: at each cut, forward and backward, one
        message for each microbatch and rank of ``tp``, of rows x sequence x width elements (with ``policy="sequence"``,
        the rank's share of the sequence).  Over ``tp``: see `TransformerBlock`, `Embedding` and `VocabularyLoss`.
        Over ``dp``: an all_reduce of the gradients of each stage, and one of the loss.
        """
        return TrainStep(self, optimizer, returns)

    def predict_step(self) -> PredictStep:
        """A step that computes the logits ``(rows, sequence, vocabulary)`` of the next tokens."""
        return PredictStep(self)

    def reset_step(self) -> ResetStep:
        """A step that frees the model's state in the devices: ``cluster.run(step)``.  Training then starts again."""
        return ResetStep(self)

    # ------------------------------------------------------------------------------ the Model protocol

    def initial_shards(self, mesh: Mesh, rank: int, layers: Iterable[int]) -> Layers:
        """The rank's shards of `initial_layers`.  Layers are drawn whole and then split, so every mesh has the same."""
        shards = []
        for number in layers:
            (whole,) = self.initial_layers([number])
            layouts = self.layouts(number, mesh).values()
            shards.append(
                tuple(
                    x[layout.slices(x.shape, mesh, rank)].copy()
                    for x, layout in zip(whole, layouts, strict=True)
                )
            )
        return shards

    def join_layers(self, mesh: Mesh, layers: Sequence[int], shards: Sequence[Layers]) -> Layers:
        """The whole layers, from the shards of the ranks of a stage."""
        inner = inner_mesh(mesh, self.inside)
        whole = []
        for place, number in enumerate(layers):
            parts = zip(*(part[place] for part in shards), strict=True)
            layouts = self.layouts(number, inner).values()
            whole.append(
                tuple(layout.unshard(each, inner) for layout, each in zip(layouts, parts, strict=True))
            )
        return whole

    def join_outputs(self, mesh: Mesh, shards: Sequence[Array]) -> Array:
        """The whole logits, from the shards of the ranks of the last stage."""
        inner = inner_mesh(mesh, self.inside)
        return TensorSharding(None, None, self._axes(inner)).unshard(list(shards), inner)

    def check_mesh(self, mesh: Mesh, x: Array) -> None:
        """``ValueError`` if the heads cannot be split over the ranks of ``tp``."""
        _check_shapes(self, mesh, x.shape)

    def stage(self, device: Device, number: int, layers: Layers, work: Microbatches) -> TransformerStage:
        """A stage for one step.  Its operations and their plans are kept in the device."""
        key = "pipeline_parallelism.Transformer operations", self, number
        if key not in device.state:
            device.state[key] = [
                self._part(layer, self._axes(device.mesh)) for layer in self.layers_of(number)
            ]
        return TransformerStage(device, device.state[key], layers, work)

    def rows_over(self, axes: Axes) -> Axes:
        """The axes that split the rows between products that are split over ``axes``."""
        return axes if self.policy == "sequence" else ()

    def _axes(self, mesh: Mesh) -> Axes:
        return tuple(axis for axis in mesh.axes if axis in self.inside)

    def _part(self, layer: int, axes: Axes) -> AnyLayer:
        if layer == 0:
            return EmbeddingLayer(self, axes)
        return HeadLayer(self, axes) if layer == self.layer_count - 1 else BlockLayer(self, axes)

    # ------------------------------------------------------------------------------------------- the data

    def check_inputs(self, x: npt.ArrayLike) -> Array:
        """Tokens as an array; ``TypeError`` unless integers, ``ValueError`` for a token outside the vocabulary."""
        return self._tokens("tokens", x)

    def check_batch(self, x: npt.ArrayLike, targets: npt.ArrayLike) -> tuple[Array, Array]:
        """Tokens and targets as arrays, of the same shape."""
        tokens, wanted = self._tokens("tokens", x), self._tokens("targets", targets)
        if tokens.shape != wanted.shape:
            raise ValueError(f"targets must have the shape of the tokens, {tokens.shape}, got {wanted.shape}")
        return tokens, wanted

    def _tokens(self, name: str, given: npt.ArrayLike) -> Array:
        array = plain_array(name, given)
        if array.ndim != 2 or 0 in array.shape:
            raise ValueError(f"{name} must have shape (rows, sequence), both at least 1, got {array.shape}")
        if array.dtype.kind not in "iu":
            raise TypeError(f"{name} must be integers, got {array.dtype}")
        if len(wrong := array[(array < 0) | (array >= self.vocabulary)]):
            raise ValueError(f"{name} must be 0 to {self.vocabulary - 1}, the vocabulary, got {wrong[0]}")
        return array.astype(np.int64, copy=False)


@lru_cache(maxsize=256)  # every step asks, and a model that is trained asks the same every time
def _check_shapes(model: Transformer, mesh: Mesh, tokens: tuple[int, ...]) -> None:
    block = BlockLayer(model, model._axes(mesh))
    block.operation.plan([(*tokens, model.width), *block.shapes.values()], mesh, model.dtype)
