"""`TrainedModel`: the model that is to be trained, as a training step, and the sizes that say how it can be split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle, islice
from math import gcd
from typing import Any

import numpy.typing as npt

from parallelism.dtypes import is_floating
from parallelism.ir import Function, symbols
from parallelism.ir.core import checked_dtype
from parallelism.models import TransformerSpec, transformer
from parallelism.models.expert_feed_forward import slots_of
from parallelism.models.figures import attends, kind_of_layer, spec_like_layer, with_layers
from parallelism.planning.program_blocks import Blocks, count_of_parts, found_blocks
from parallelism.training.layer_blocks import EACH_LAYER, MOST_BLOCKS, MOST_OTHERS, LayerBlocks
from parallelism.training.stage_layers import balanced_ends, begins_of, even, head_layers
from parallelism.transforms import SGD, Adam, MixedPrecision, train_step

BATCH = "B"
"""The symbol for the rows of the batch."""
CORE = "attention.core"
"""The region of a block that selective recomputation runs again."""


@dataclass(frozen=True)
class TrainedModel:
    """A training step, and what its strategies need to know of it."""

    model: TransformerSpec | Function
    """The model whose step is transformed: in float32 where precision is mixed."""
    regions: frozenset[str]
    """The regions of the program of its loss."""
    prefix: str
    """The region whose numbered parts are the blocks of the model, such as ``block``; empty if there is none."""
    blocks: int
    """The number of blocks that stages are made of: these, or groups of them (`layer_blocks`)."""
    split_by_tp: tuple[tuple[str, int], ...]
    """What tensor parallelism splits, and the size that the number of devices must divide."""
    sequence: int | None
    """The length that sequence and context parallelism must divide; None: they are not known to fit."""
    precision: MixedPrecision | None
    optimizer: SGD | Adam

    @classmethod
    def of(
        cls,
        model: TransformerSpec | Function | str,
        optimizer: SGD | Adam,
        gradients: npt.DTypeLike = "float32",
        state: Mapping[str, npt.DTypeLike] | None = None,
        precision: MixedPrecision | None = None,
    ) -> TrainedModel:
        """The step of a model: of a spec, of the name of a published one, or of the program of a loss.

        A published one is trained in bfloat16, with its vocabulary padded (`TransformerSpec.padded`), as by the
        commands.  A spec is taken as it is.

        A spec in a dtype of 16 bits is trained in mixed precision: its main copy and the state of the optimizer are in
        float32, and its ``gradients`` in the dtype that is given, as is the ``state`` whose dtypes are
        (`parallelism.transforms.MixedPrecision`).  ``precision`` says all of this at once, and which products are in
        float8.  A program is trained in the dtypes that it has; a symbol of another name is that of its rows, if it is the
        only one.

        ``TypeError`` for another kind of value; ``ValueError`` for a program without a symbol, or with several; and for
        ``gradients`` in another dtype than float32, ``state`` or a ``precision``, where precision is not mixed.
        """
        if isinstance(model, str):
            model = replace(transformer(model).padded(), dtype="bfloat16")
        if isinstance(model, TransformerSpec):
            return cls._of_spec(model, optimizer, gradients, state or {}, precision)
        if not isinstance(model, Function):
            raise TypeError(
                f"a plan is for a TransformerSpec, its name, or a Function; got {type(model).__name__}"
            )
        _check_dtypes(gradients, state, precision, "a program")
        model = _with_rows(model)
        if model.symbols != {BATCH}:
            has = ", ".join(sorted(model.symbols)) or "no symbol"
            raise ValueError(
                f"@{model.name} must have the symbol {BATCH} for the rows of its batch and no other; it "
                f"has {has}"
            )
        model, prefix, layers = found_blocks(model)
        alike = Blocks.of(model, prefix, layers)
        blocks = layers if alike is None else alike.layer_blocks.count(layers)
        return cls(model, frozenset(model.regions), prefix, blocks, (), None, None, optimizer)

    @classmethod
    def _of_spec(
        cls,
        spec: TransformerSpec,
        optimizer: SGD | Adam,
        gradients: npt.DTypeLike,
        state: Mapping[str, npt.DTypeLike],
        precision: MixedPrecision | None,
    ) -> TrainedModel:
        dtype: Any = spec.dtype
        narrow = is_floating(dtype) and dtype.itemsize < 4
        wide = replace(spec, dtype="float32") if narrow else spec
        if not narrow:
            _check_dtypes(gradients, state, precision, f"a model in {dtype}")
        elif precision is None:
            dtypes: Any = state
            precision = MixedPrecision(dtype.name, gradients, **dtypes)
        elif precision.dtype != dtype.name:
            raise ValueError(f"{precision} is for a model in {precision.dtype}, got one in {dtype}")
        (rows,) = symbols(BATCH)
        attending = (i for i in range(spec.layers) if attends(spec, i))
        regions = frozenset(replace(wide, layers=1 + next(attending, 0)).function(rows).regions)
        return cls(
            wide,
            regions,
            "block",
            _layer_blocks(spec).count(spec.layers),
            _split_by_tp(spec),
            spec.sequence,
            precision,
            optimizer,
        )

    def at(self, tp: int) -> TrainedModel:
        """The model as so many devices of tensor parallelism compute it (`TransformerSpec.for_tensor_parallel`)."""
        if not isinstance(self.model, TransformerSpec):
            return self
        spec = self.model.for_tensor_parallel(tp)
        return self if spec is self.model else replace(self, model=spec)

    @property
    def only_tp(self) -> int:
        """The only number of devices of tensor parallelism that heads with copies are split over; 0: any that divide them."""
        spec = self.model
        if not isinstance(spec, TransformerSpec) or spec.key_value_copies == 1:
            return 0
        return spec.copied_groups

    @property
    def key_value_heads(self) -> int | None:
        """The heads of keys and values, which more devices of tensor parallelism may share; None if it is not known."""
        spec = self.model
        return spec.groups if isinstance(spec, TransformerSpec) and spec.attention is None else None

    @property
    def has_states(self) -> bool:
        """Whether layers have linear attention, which goes through a sequence token by token."""
        return isinstance(self.model, TransformerSpec) and self.model.linear_attention is not None

    @property
    def experts(self) -> int | None:
        """The number of experts, over which ``ep`` may split them; None: there are none."""
        if isinstance(self.model, Function):
            return _dealt_experts(self.model)
        return None if self.model.experts is None else self.model.experts.count

    @property
    def rows_of_expert(self) -> int | None:
        """The rows of a sequence that an expert takes, which sequence parallelism splits; None: there are no experts."""
        spec = self.model
        if isinstance(spec, Function) or spec.experts is None:
            return None
        rows: Any = slots_of(spec.experts, spec.sequence).rows
        return int(rows)

    @cached_property
    def layer_blocks(self) -> LayerBlocks:
        """Which layers of a Transformer, or which numbered parts of a program, are a block."""
        if isinstance(self.model, TransformerSpec):
            return _layer_blocks(self.model)
        return EACH_LAYER if self.alike is None else self.alike.layer_blocks

    @property
    def layers_are_alike(self) -> bool:
        """Whether all layers of a Transformer compute the same, and all of each is trained, not adapters alone."""
        spec = self.model
        if not isinstance(spec, TransformerSpec) or spec.lora is not None:
            return False
        return len({kind_of_layer(spec, layer) for layer in range(spec.layers)}) == 1

    @property
    def grouped(self) -> str:
        """Which layers stages do not part; empty where a stage may begin at any layer."""
        each = self.layer_blocks.each
        return (
            ""
            if each == 1
            else f"stages have whole blocks of {each} layers, whose kinds come again and again"
        )

    @property
    def first_alike(self) -> int:
        """The first block that is like all further ones, counted from 0: of DeepSeek-V3 that behind its dense blocks."""
        return self.layer_blocks.first

    @property
    def takes_turns(self) -> bool:
        """Whether kinds of layers take turns, so that no first few blocks are before equal ones: see `of_each_kind`."""
        return self.first_alike > MOST_OTHERS and self.of_each_kind != ()

    @cached_property
    def of_each_kind(self) -> tuple[tuple[TrainedModel, float], ...]:
        """Of a model whose layers with a state, attention and feed-forwards take turns: as many layers of each kind, and the
        share that the kind has of the model's; empty for other models."""
        spec = self.model
        if not isinstance(spec, TransformerSpec) or spec.lora or spec.next_tokens:
            return ()
        if not (spec.linear_attention or spec.layer_parts):
            return ()
        kinds = [kind_of_layer(spec, layer) for layer in range(spec.layers)]
        return tuple(
            (self._like_layer(kinds.index(kind)), kinds.count(kind) / spec.layers)
            for kind in dict.fromkeys(kinds)
        )

    def _like_layer(self, layer: int) -> TrainedModel:
        """The model with as many layers, all like this one."""
        spec: Any = self.model
        own = spec_like_layer(spec, layer)
        regions = frozenset(replace(own, layers=1).function(symbols(BATCH)[0]).regions)
        return replace(self, model=own, regions=regions)

    @property
    def dtype(self) -> str:
        """The dtype of products."""
        if self.precision is not None:
            return str(self.precision.dtype)
        if isinstance(self.model, TransformerSpec):
            return str(self.model.dtype)
        return str(next(value.type.dtype for value in self.model.inputs))

    @property
    def has_experts(self) -> bool:
        """Whether the model has experts."""
        return self.experts is not None

    @property
    def products(self) -> str:
        """The dtype of most products: ``float8`` or ``float4``, where those of the blocks are; else `dtype`."""
        return self.dtype if self.precision is None else self.precision.products_dtype

    @property
    def dtypes(self) -> str:
        """The dtype of products, and that of the main copies of weights where it is another."""
        if self.precision is None:
            return self.dtype
        gradients = (
            "" if self.precision.gradients == "float32" else f", gradients in {self.precision.gradients}"
        )
        main = self.precision.main or "float32"
        moments = ", ".join(
            f"{name}s in {kept}"
            for name in ("mean", "square")
            if (kept := getattr(self.precision, name)) is not None
        )
        products = f", {self.precision.of_products}" if self.precision.products else ""
        return f"{self.dtype}{products} with main copies in {main}{gradients}{moments and f', {moments}'}"

    @property
    def load(self) -> str:
        """How many rows experts are assumed to have; empty without experts."""
        spec = self.model if isinstance(self.model, TransformerSpec) else None
        if spec is None or spec.experts is None:
            return ""
        told = f"the fullest expert has {spec.experts.load:g} times the mean rows"
        if spec.experts.capacity is not None:
            told = f"experts accept {spec.experts.capacity:g} times their even share of rows"
        return f"{told}; {spec.experts.remark}" if spec.experts.remark else told

    def of_blocks(self, blocks: int) -> TrainedModel:
        """The same model with another number of blocks; itself if it `is_whole`."""
        if isinstance(self.model, Function):
            alike = self.alike
            return self if alike is None else replace(self, model=alike.of_blocks(blocks), blocks=blocks)
        layers = self.layer_blocks.layer_of(blocks)
        return replace(self, model=_with_layers(self.model, layers, self.layer_blocks.each), blocks=blocks)

    @cached_property
    def alike(self) -> Blocks | None:
        """The blocks of a program, if they are alike."""
        if not isinstance(self.model, Function):
            return None
        return Blocks.of(self.model, self.prefix, count_of_parts(self.model, self.prefix))

    @property
    def is_whole(self) -> bool:
        """Whether it is a program without blocks that are alike: it is laid out as a whole, in one stage."""
        return isinstance(self.model, Function) and self.alike is None

    @cached_property
    def reads_blocks_outside(self) -> bool:
        """Whether a program reads a weight of a block outside of the blocks, too."""
        return self.alike is not None and self.alike.reads_outside

    @property
    def ops(self) -> int:
        """The ops of a program; 0 of a model that is described by its figures."""
        return len(self.model.ops) if isinstance(self.model, Function) else 0

    @property
    def step(self) -> Function:
        """The training step on one device, with the symbol `BATCH` for the rows."""
        (rows,) = symbols(BATCH)
        loss = self.model.function(rows) if isinstance(self.model, TransformerSpec) else self.model
        return train_step(loss, self.optimizer)

    @property
    def recomputed(self) -> Mapping[str, str]:
        """The patterns of regions that each choice of recomputation runs again."""
        found = {"none": ""}
        if self.blocks:
            if any(path.endswith(f".{CORE}") for path in self.regions):
                found["selective"] = f"{self.prefix}.*.{CORE}"
            found["full"] = f"{self.prefix}.*"
        return found

    def layers_of(self, stages: int, *, balanced: bool = False) -> tuple[int, ...]:
        """The blocks of each stage, as even as can be; if ``balanced``, the head counts as the blocks that it costs."""
        if balanced and isinstance(self.model, TransformerSpec):
            return balanced_ends(self.blocks, stages, self.head)
        return even(self.blocks, stages)

    @cached_property
    def head(self) -> float:
        """How many blocks the head costs; 0 if it is not known."""
        if not isinstance(self.model, TransformerSpec):
            return 0.0
        return head_layers(self.model) / self.layer_blocks.each

    def begin(self, stages: int, *, balanced: bool = False) -> tuple[str, ...]:
        """The regions at which stages after the first begin: see `layers_of`; empty if there are no blocks."""
        if stages == 1 or not self.blocks:
            return ()
        return self.begin_of(self.layers_of(stages, balanced=balanced))

    def begin_of(self, counts: Sequence[int]) -> tuple[str, ...]:
        """The regions at which stages after the first begin, where the stages have so many blocks."""
        return begins_of(self.layer_blocks.layers_of(counts), self.prefix)


def _with_rows(program: Function) -> Function:
    """The program with its only symbol called `BATCH`; as it is if it has several, or none."""
    if len(program.symbols) != 1 or BATCH in program.symbols:
        return program
    (name,) = program.symbols
    (rows,) = symbols(BATCH)
    return program.specialize(**{name: rows})


def _check_dtypes(
    gradients: npt.DTypeLike,
    state: Mapping[str, npt.DTypeLike] | None,
    precision: MixedPrecision | None,
    what: str,
) -> None:
    """``ValueError`` for gradients or state in dtypes of their own, or a precision, where precision is not mixed."""
    if precision is not None:
        raise ValueError(f"{precision} is for a TransformerSpec whose dtype has 16 bits; got {what}")
    if state:
        raise ValueError(
            f"state={dict(state)} is for mixed precision, a TransformerSpec whose dtype has 16 bits; got {what}"
        )
    if (found := checked_dtype(gradients)) != "float32":
        raise ValueError(
            f"gradients={found.name} is for mixed precision, a TransformerSpec whose dtype has 16 bits; got {what}"
        )


def _dealt_experts(function: Function) -> int | None:
    """The number of experts to which a program deals tokens, over which they may be split; None: it deals none."""
    counts = {op["shape"][0] for op in function.ops if op.kind == "dispatch"}
    whole = [count for count in counts if isinstance(count, int)]
    return gcd(*whole) if whole else None


def _layer_blocks(spec: TransformerSpec) -> LayerBlocks:
    """The blocks of a Transformer.  Nothing before the first layer is trained beside adapters: its input has no gradient."""
    if spec.layers > MOST_BLOCKS:
        return EACH_LAYER
    adapted = spec.lora is not None
    return LayerBlocks.of(
        [(adapted and layer == 0, *kind_of_layer(spec, layer)) for layer in range(spec.layers)]
    )


def _with_layers(spec: TransformerSpec, layers: int, each: int) -> TransformerSpec:
    """A spec with so many layers.  Those beyond its own are as its last block of ``each`` layers, again and again."""
    own = range(spec.layers - each, spec.layers)
    return with_layers(
        spec, [*range(spec.layers), *islice(cycle(own), max(0, layers - spec.layers))][:layers]
    )


def _split_by_tp(spec: TransformerSpec) -> tuple[tuple[str, int], ...]:
    """What tensor parallelism splits of a Transformer."""
    layers = range(spec.layers)
    experts = spec.experts
    found = [("heads", spec.heads)]
    found += [] if spec.attention is None else [("heads of keys and values", spec.groups)]
    if spec.linear_attention is not None:
        found.append(("the groups of linear attention", spec.linear_attention.groups))
    if any(spec.has("feed_forward", i) and (experts is None or not experts.at(i)) for i in layers):
        found.append(("the feed-forward width", spec.hidden))
    if experts is not None:
        found.append(("the width of an expert", spec.expert_width))
    if experts is not None and experts.shared_width:
        found.append(("the width of the shared experts", experts.shared_width))
    return (*found, ("the vocabulary", spec.vocabulary), ("the width", spec.width))
