"""A Transformer on a mesh for inference: its stages, its replicas of attention, and the layouts of each stage's program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any

from parallelism.arrays import Array
from parallelism.ir import symbol
from parallelism.ir.core import Extent, Function
from parallelism.layouts import Localized, annotate, localize
from parallelism.mesh import Mesh
from parallelism.models import TransformerSpec
from parallelism.models.inference import Part, engine_step, prefill
from parallelism.models.inference.caches import FULL, STATES, WINDOW, kinds_of
from parallelism.serving.copied_heads import copied, with_copies
from parallelism.serving.engine import EngineSettings
from parallelism.serving.quantized import QuantizedWeights
from parallelism.sharding import TensorSharding
from parallelism.transforms import (
    ContextParallel,
    DataParallel,
    ExpertParallel,
    Pipeline,
    Strategy,
    TensorParallel,
)

TOKENS, PICKED, REPLICAS = "t", "r", "x"
READ, SCORED, TABLE = "read", "scored", "pages"
"""The beginnings of the names of symbols, which end with the kind of layers."""
OF_TOKENS = ("tokens", "hidden", "at.positions", "at.ends")
"""The inputs of a step that have a dim of tokens, besides tables of pages."""
ALONE = Mesh(one=1)
_AXES = {
    "tp": TensorParallel,
    "dp": DataParallel,
    "ep": ExpertParallel,
    "cp": ContextParallel,
    "pp": Pipeline,
}
"""The transform of each axis of a mesh, where no strategy is given."""


def usual_strategy(mesh: Mesh) -> Strategy:
    """The strategy that the names of the axes of a mesh say.  ``ValueError`` for an axis of another name."""
    unknown = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in _AXES]
    if unknown:
        raise ValueError(
            f"the axes of a mesh for inference are {', '.join(_AXES)}, got {unknown[0]!r}; strategy= says what others are"
        )
    return Strategy(*(_AXES[axis](axis) for axis, size in mesh.shape.items() if size > 1))


@dataclass(frozen=True)
class Placement:
    """A model under a strategy on a mesh.

    Blocks are dealt evenly to the stages of the axis of a `Pipeline`, the longer parts first.  Tokens of requests are split
    over the axes of `DataParallel` and `ExpertParallel`: each device along them is a replica of attention, with requests and
    a cache of its own.  Over the axis of `ContextParallel` the tokens of a step are split: each device has the whole cache,
    into which all write the keys and values of all tokens, and its own tokens attend to it.  Heads of keys and values that
    are fewer than the devices of tensor parallelism are copied.

    ``ValueError`` for other transforms, and for a mesh that does not fit.
    """

    model: TransformerSpec
    mesh: Mesh
    strategy: Strategy

    def __post_init__(self) -> None:
        for transform in self.strategy.transforms:
            if not isinstance(transform, tuple(_AXES.values())):
                raise ValueError(f"{transform}: inference is split by tp, dp, ep, cp and pp")
            if isinstance(transform, ContextParallel) and transform.exchange != "all_gather":
                raise ValueError(f"{transform}: inference gathers keys and values, which is cp")
            axis = str(getattr(transform, "axis", None))
            if axis not in self.mesh.shape:
                raise ValueError(
                    f"{transform} needs an axis {axis!r}; the axes of {self.mesh!r} are "
                    f"{', '.join(map(repr, self.mesh.axes))}"
                )
        named = {transform.axis for kind in _AXES.values() for transform in self._of(kind)}
        idle = [axis for axis, size in self.mesh.shape.items() if size > 1 and axis not in named]
        if idle:
            raise ValueError(
                f"no transform uses the axis {idle[0]!r} of {self.mesh!r}; the strategy is {self.strategy}"
            )
        if self.stages > self.model.layers:
            raise ValueError(f"{self.model.layers} layers cannot be dealt to {self.stages} stages")
        if self._of(ExpertParallel) and self.model.experts is None:
            raise ValueError(f"{self._of(ExpertParallel)[0]}: the model has no experts")
        _ = self.spec

    def _of(self, kind: type[Any]) -> list[Any]:
        return [transform for transform in self.strategy.transforms if isinstance(transform, kind)]

    @property
    def pipeline(self) -> str | None:
        """The axis of the stages; None: there is one stage."""
        found = self._of(Pipeline)
        return found[0].axis if found else None

    @property
    def stages(self) -> int:
        """The number of stages."""
        return 1 if self.pipeline is None else self.mesh.shape[self.pipeline]

    @cached_property
    def replicas(self) -> int:
        """The number of replicas of attention."""
        axes = {transform.axis for kind in (DataParallel, ExpertParallel) for transform in self._of(kind)}
        return prod(self.mesh.shape[axis] for axis in axes)

    @cached_property
    def sharing_experts(self) -> int:
        """The number of replicas of attention that share the experts."""
        return prod(self.mesh.shape[transform.axis] for transform in self._of(ExpertParallel))

    @cached_property
    def context(self) -> int:
        """The number of devices that share the tokens of a step."""
        return prod(self.mesh.shape[transform.axis] for transform in self._of(ContextParallel))

    @property
    def inner_strategy(self) -> Strategy:
        """The strategy inside a stage."""
        return Strategy(*(each for each in self.strategy.transforms if not isinstance(each, Pipeline)))

    @cached_property
    def inside(self) -> Mesh:
        """The mesh inside a stage."""
        shape = {axis: size for axis, size in self.mesh.shape.items() if axis != self.pipeline}
        return Mesh(**shape) if shape else ALONE

    @cached_property
    def spec(self) -> TransformerSpec:
        """The model with its heads copied."""
        devices = prod(self.mesh.shape[transform.axis] for transform in self._of(TensorParallel))
        return with_copies(self.model, devices)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The blocks of each stage."""
        layers, stages = self.model.layers, self.stages
        each, more = divmod(layers, stages)
        cuts = [0]
        for stage in range(stages):
            cuts.append(cuts[-1] + each + (stage < more))
        return tuple(Part(first, last, layers) for first, last in pairwise(cuts))

    def place(self, rank: int) -> tuple[int, int]:
        """The stage of a rank, and its rank inside the stage."""
        index = self.mesh.index(rank)
        stage = 0 if self.pipeline is None else index[self.pipeline]
        if self.inside == ALONE:
            return stage, 0
        return stage, self.inside.rank(**{axis: index[axis] for axis in self.inside.axes})

    def parameters(self, given: Mapping[str, Array]) -> dict[str, Array]:
        """The parameters of `spec`: those of the model, with heads copied."""
        if self.spec is self.model:
            return dict(given)
        return {name: copied(self.model, self.spec, name, array) for name, array in given.items()}

    # -- programs ------------------------------------------------------------------------------------------------------

    def function(
        self, part: Part, settings: EngineSettings, cache_dtype: Any = None, weights_dtype: Any = None
    ) -> Function:
        """The program of some blocks for an engine, laid out, with symbols for what differs from step to step."""
        kinds = kinds_of(self.spec)
        tables: dict[str, Extent] = {FULL: symbol(TABLE), WINDOW: settings.ring_pages(self.spec), STATES: 1}
        step = engine_step(
            self.spec,
            symbol(TOKENS),
            pages={kind: (settings.pages[kind], tables[kind]) for kind in kinds},
            page_tokens=settings.page_tokens,
            read={kind: symbol(f"{READ}_{kind}") for kind in kinds},
            scored={kind: symbol(f"{SCORED}_{kind}") for kind in kinds},
            picked=symbol(PICKED),
            replicas=self.replicas,
            cache_dtype=cache_dtype,
            weights_dtype=weights_dtype,
            part=part,
        )
        return self._as_in_prefill(self._split(step, part), part)

    def localized(
        self,
        part: Part,
        settings: EngineSettings,
        cache_dtype: Any = None,
        weights_dtype: Any = None,
        quantized: QuantizedWeights | None = None,
    ) -> Localized:
        """The program of some blocks on the mesh inside a stage."""
        function = self.function(part, settings, cache_dtype, weights_dtype)
        if quantized is not None:
            function = quantized.program(function)
        hidden = next(value for value in function.inputs if value.name in ("tokens", "hidden"))
        if part.ends:  # whoever chooses a token has the logits of the whole vocabulary
            kept = _whole_logits(hidden.layout)
        else:  # what a stage sends lies as what the next one gets
            kept = _hidden_as(hidden.layout)
        return localize(annotate(function, {function.outputs[0]: kept}), self.inside)

    def _split(self, function: Function, part: Part) -> Function:
        """A program of a stage under the strategy; where a stage has no experts, their axis splits tokens alone."""
        apart = (Pipeline, ContextParallel)
        transforms = [each for each in self.strategy.transforms if not isinstance(each, apart)]
        experts = self.spec.experts
        if experts is None or not any(experts.at(layer) for layer in range(part.first, part.last)):
            for i, each in enumerate(transforms):
                if isinstance(each, ExpertParallel):
                    transforms[i] = DataParallel(each.axis)
        split: Function = Strategy(*transforms)(function) if transforms else function
        split = self._with_head_split(split)
        return self._with_tokens_split(split) if self.context > 1 else split

    def _with_head_split(self, function: Function) -> Function:
        """A program whose last product is split by the vocabulary over the axes of `TensorParallel`, as its table of tokens
        is: `TensorParallel` leaves it whole where no loss sums over the vocabulary.
        """
        axes = tuple(transform.axis for transform in self._of(TensorParallel))
        heads = [value for value in function.inputs if value.name in ("p.head", "p.head_bias")]
        return annotate(
            function,
            {value: TensorSharding(axes or None, *[None] * (value.type.ndim - 1)) for value in heads},
        )

    def _with_tokens_split(self, function: Function) -> Function:
        """A program whose inputs for each token are split over the axes of `ContextParallel`."""
        axes = tuple(transform.axis for transform in self._of(ContextParallel))
        layouts = {}
        for value in function.inputs:
            if value.name in OF_TOKENS or value.name.endswith("_table"):
                dims = (
                    [()] * value.type.ndim
                    if value.layout is None
                    else [dim.axes for dim in value.layout.dims]
                )
                dims[1] = axes
                layouts[value.name] = TensorSharding(*(each or None for each in dims))
        return annotate(function, layouts)

    def _as_in_prefill(self, function: Function, part: Part) -> Function:
        """A program with its parameters laid out as in the program of a prompt.

        There products are those of training; here those of latent attention are taken into others, which look like products
        of experts.
        """
        if self.spec.attention is None or not self.strategy.transforms:
            return function
        usual = self._split(prefill(self.spec, self.replicas, symbol(TOKENS), part=part), part)
        return annotate(
            function, {value.name: value.layout for value in usual.inputs if value.name.startswith("p.")}
        )


def _whole_logits(layout: TensorSharding | None) -> TensorSharding:
    """The layout of logits whose replicas lie as those of the input of a stage."""
    replicas = () if layout is None else layout.dims[0].axes
    return TensorSharding(replicas or None, None, None)


def _hidden_as(layout: TensorSharding | None) -> TensorSharding:
    """The layout of hidden values whose replicas and tokens lie as those of the input of a stage."""
    dims = [(), ()] if layout is None else [dim.axes for dim in layout.dims[:2]]
    return TensorSharding(*(axes or None for axes in dims), None)
