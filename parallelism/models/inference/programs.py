"""The programs of inference: a prompt into the cache, one token more of each sequence, and a step of an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from parallelism.ir.core import Extent, Function, TensorType, checked_dtype
from parallelism.ir.core.extents import ceil_div
from parallelism.ir.recording import record
from parallelism.ir.tracing.current import region
from parallelism.ir.tracing.tracing import apply
from parallelism.models.block_parts import Parameters
from parallelism.models.feed_forward import feed_forward
from parallelism.models.figures import NEXT, is_product
from parallelism.models.forward import Forward, checked_program
from parallelism.models.inference.attention import CachedAttention, Places
from parallelism.models.inference.caches import STATES, cache_arrays, cache_kinds, columns_of, kinds_of

if TYPE_CHECKING:
    from parallelism.models.spec import TransformerSpec

Types = dict[str, TensorType]


@dataclass(frozen=True)
class Part:
    """The blocks ``first`` to ``last - 1``, those of a stage; the first stage has the embedding, the last the head."""

    first: int
    last: int
    layers: int

    @property
    def begins(self) -> bool:
        return self.first == 0

    @property
    def ends(self) -> bool:
        return self.last == self.layers

    def weights(self, spec: TransformerSpec) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters that the stage has."""
        found = {}
        for name, shape in spec.weights.items():
            block, _, _ = name.partition(".")
            if block == NEXT:
                continue
            if block.isdecimal():
                has = self.first <= int(block) < self.last
            elif block in ("positions", "embedding_norm", "embedding_norm_bias"):
                has = self.begins
            elif block == "tokens":
                has = self.begins or (self.ends and spec.tied)
            else:
                has = self.ends
            if has:
                found[name] = shape
        return found


class CachedForward(Forward):
    """A forward whose blocks attend to a cache."""

    def __init__(self, spec: TransformerSpec, p: Parameters, cache: dict[str, Any], places: Places) -> None:
        if any(spec.rates):  # nothing is dropped where nothing is trained
            spec = replace(spec, dropout=0.0, attention_dropout=None, hidden_dropout=None)
        super().__init__(spec, p, None)
        self.attention = CachedAttention(self.parts, places, cache)
        self.places = places

    def embedded(self, tokens: Any) -> Any:
        """The values of tokens, ``(replicas, tokens, width)``."""
        spec, p = self.spec, self.p
        with region("embedding"):
            x = apply("take", p["tokens"], np.maximum(tokens, 0), axis=0)
            if spec.embedding_scale != 1:
                x = x * spec.embedding_scale
            if spec.positions == "learned":
                x = x + apply("take", p["positions"], np.maximum(self.places.positions, 0), axis=0)
            return self.parts.norm(x, "embedding_norm") if spec.embedding_norm else x

    def blocks(self, x: Any, part: Part) -> Any:
        """What the blocks of a part make of ``x``."""
        for layer in range(part.first, part.last):
            with region(f"block.{layer}"):
                x = self._block(x, layer, f"{layer}.")
        return x

    def picked_logits(self, x: Any, picked: Any) -> Any:
        """The logits of the tokens at these places, ``(replicas, picked, vocabulary)``; None: of all tokens."""
        with region("head"):
            if picked is not None:
                chosen = apply("one_hot", picked, extent=x.shape[1], dtype=x.dtype)
                x = np.einsum("brt,bth->brh", chosen, x)
            return self._logits(self.parts.norm(x, "norm"))

    def _self_attention(self, x: Any, layer: int, block: str) -> Any:
        return self.attention(x, layer, block)

    def _linear_attention(self, x: Any, layer: int, block: str) -> Any:
        return self.attention.linear(x, layer, block)

    def _fed_forward(self, x: Any, layer: int, block: str) -> Any:
        """Experts get the tokens of all sequences of a decode as those of one."""
        experts = self.spec.experts
        if experts is None or not experts.at(layer) or x.shape[1] != 1 or x.shape[0] == 1:
            return feed_forward(self.parts, x, layer, block)
        joined = feed_forward(self.parts, x.reshape((1, x.shape[0], x.shape[2])), layer, block)
        return joined.reshape(x.shape)


def cache_types(
    spec: TransformerSpec, part: Part, shapes: Callable[[str], tuple[Extent, ...]], dtype: npt.DTypeLike
) -> Types:
    """The types of the cache of a part; ``shapes`` of a kind are the replicas, pages and places, or replicas and slots."""
    return {
        f"{layer}.{array.name}": TensorType(
            checked_dtype(array.dtype or dtype), (*shapes(array.kind), *array.shape)
        )
        for layer in range(part.first, part.last)
        for array in cache_arrays(spec, layer)
    }


def _weight_types(spec: TransformerSpec, part: Part, product_dtype: npt.DTypeLike | None = None) -> Types:
    """The types of the parameters; the weights of products in blocks may be of another dtype (`is_product`)."""
    found = {}
    for name, shape in part.weights(spec).items():
        is_narrow = product_dtype is not None and is_product(name, len(shape))
        dtype = product_dtype if is_narrow else spec.dtype
        found[name] = TensorType(checked_dtype(dtype), shape)
    return found


def _whole(spec: TransformerSpec) -> Part:
    return Part(0, spec.layers, spec.layers)


def _integers(*shape: Extent) -> TensorType:
    return TensorType(np.int64, shape)


def _entry(spec: TransformerSpec, part: Part, replicas: Extent, tokens: Extent) -> TensorType:
    """What a stage gets: tokens, or hidden values of the stage before."""
    if part.begins:
        return _integers(replicas, tokens)
    return TensorType(spec.dtype, (replicas, tokens, spec.width))


def _recorded(
    spec: TransformerSpec,
    part: Part,
    cache: Types,
    places: Callable[[Mapping[str, Any]], Places],
    entry: TensorType,
    others: Types,
    picks: Callable[[Mapping[str, Any]], Any],
    name: str,
    weights_dtype: npt.DTypeLike | None = None,
) -> Function:
    """A program: ``p``, ``cache``, ``tokens`` or ``hidden``, then the others."""
    checked_program(spec)

    def step(p: Parameters, cache: dict[str, Any], x: Any, given: dict[str, Any]) -> Any:
        forward = CachedForward(spec, p, cache, places(given))
        x = forward.blocks(forward.embedded(x) if part.begins else x, part)
        if part.ends:
            x = forward.picked_logits(x, picks(given))
        return (x, *(forward.attention.made[name] for name in cache))

    def of_tokens(p: Parameters, cache: dict[str, Any], tokens: Any, at: dict[str, Any]) -> Any:
        return step(p, cache, tokens, at)

    def of_hidden(p: Parameters, cache: dict[str, Any], hidden: Any, at: dict[str, Any]) -> Any:
        return step(p, cache, hidden, at)

    return record(
        of_tokens if part.begins else of_hidden,
        _weight_types(spec, part, weights_dtype),
        cache,
        entry,
        others,
        name=name,
    )


def _one_page(spec: TransformerSpec, batch: Extent, context: Extent) -> Callable[[str], tuple[Extent, ...]]:
    """A cache of one page, or one slot, for each sequence."""

    def shape(kind: str) -> tuple[Extent, ...]:
        return (batch, 1) if kind == STATES else (batch, 1, _kept(spec, kind, context))

    return shape


def _first_page(batch: Extent, tokens: Extent) -> Any:
    return apply("constant", shape=(batch, tokens, 1), value=0, dtype=np.dtype(np.int64))


def decode(
    spec: TransformerSpec,
    batch: Extent,
    context: Extent,
    *,
    cache_dtype: npt.DTypeLike | None = None,
    part: Part | None = None,
) -> Function:
    """One token more of each of ``batch`` sequences, of which the cache has room for ``context`` tokens."""
    part = part or _whole(spec)
    read = {kind: _kept(spec, kind, context) for kind in kinds_of(spec)}
    scored = read | {STATES: 0}

    def places(given: Mapping[str, Any]) -> Places:
        lengths = given["lengths"].reshape((batch, 1))
        tables = dict.fromkeys(kinds_of(spec), _first_page(batch, 1))
        return Places(lengths, lengths + 1, tables, read, scored)

    return _recorded(
        spec,
        part,
        cache_types(spec, part, _one_page(spec, batch, context), cache_dtype or spec.dtype),
        places,
        _entry(spec, part, batch, 1),
        {"lengths": _integers(batch)},
        lambda given: None,
        "decode",
    )


def prefill(
    spec: TransformerSpec,
    batch: Extent,
    tokens: Extent,
    context: Extent | None = None,
    *,
    cache_dtype: npt.DTypeLike | None = None,
    part: Part | None = None,
) -> Function:
    """Prompts of at most ``tokens`` tokens into an empty cache with room for ``context``; None: for the prompt."""
    part, context = part or _whole(spec), tokens if context is None else context
    chunks = ceil_div(tokens, spec.linear_attention.tokens_of_chunk) if spec.linear_attention else 0

    def places(given: Mapping[str, Any]) -> Places:
        lengths = given["lengths"].reshape((batch, 1))
        order = apply("iota", shape=(batch, tokens), dim=1, starts=(0, 0), dtype=np.dtype(np.int64))
        positions = np.where(order < lengths, order, -1)
        tables = dict.fromkeys(kinds_of(spec), _first_page(batch, tokens))
        ends = np.where(order < lengths, lengths, 0)
        return Places(positions, ends, tables, {STATES: 1}, {STATES: chunks}, is_first=True)

    return _recorded(
        spec,
        part,
        cache_types(spec, part, _one_page(spec, batch, context), cache_dtype or spec.dtype),
        places,
        _entry(spec, part, batch, tokens),
        {"lengths": _integers(batch)},
        lambda given: given["lengths"].reshape((batch, 1)) - 1,
        "prefill",
    )


def engine_step(
    spec: TransformerSpec,
    tokens: Extent,
    *,
    pages: Mapping[str, tuple[Extent, Extent]],
    page_tokens: Extent,
    read: Mapping[str, Extent],
    scored: Mapping[str, Extent],
    picked: Extent | None,
    replicas: Extent = 1,
    cache_dtype: npt.DTypeLike | None = None,
    weights_dtype: npt.DTypeLike | None = None,
    part: Part | None = None,
) -> Function:
    """A step of an engine: tokens of any sequences at any positions, whose caches lie in pages.

    ``pages`` says for each kind of layers how many there are, and how many a sequence may have: of states one.
    ``picked``: so many tokens have logits; None: all.  ``weights_dtype`` is that of the weights of products in blocks:
    integers are multiplied as they are, so a step with them is priced, and not run.
    """
    part = part or _whole(spec)

    def shapes(kind: str) -> tuple[Extent, ...]:
        slots = replicas, pages[kind][0]
        return slots if kind == STATES else (*slots, page_tokens)

    def places(given: Mapping[str, Any]) -> Places:
        tables = {kind: given[f"{kind}_table"] for kind in kinds_of(spec)}
        return Places(given["positions"], given["ends"], tables, read, scored)

    others = {name: _integers(replicas, tokens) for name in ("positions", "ends")}
    for kind in kinds_of(spec):
        others[f"{kind}_table"] = _integers(replicas, tokens, pages[kind][1])
    if picked is not None and part.ends:
        others["picked"] = _integers(replicas, picked)
    return _recorded(
        spec,
        part,
        cache_types(spec, part, shapes, cache_dtype or spec.dtype),
        places,
        _entry(spec, part, replicas, tokens),
        others,
        lambda given: given.get("picked"),
        "engine_step",
        weights_dtype,
    )


def _kept(spec: TransformerSpec, kind: str, context: Extent) -> Extent:
    """The places of a sequence in layers of a kind; of states one."""
    if kind == STATES:
        return 1
    layer = next(layer for layer in range(spec.layers) if kind in cache_kinds(spec, layer))
    return columns_of(spec, layer, context)
