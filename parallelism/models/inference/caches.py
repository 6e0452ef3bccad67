"""What a cache keeps of a token, by kind of attention, and its bytes.

Of each token and layer are kept:

- with heads of keys and values, a key and a value for each: ``2 groups head_width`` numbers (Ainslie et al., *GQA*, 2023,
  arXiv:2305.13245, section 2.2; Pope et al., *Efficiently Scaling Transformer Inference*, 2022, arXiv:2211.05102,
  section 3.3);
- in a layer with a window of W tokens, those of the last W alone, in a ring (Jiang et al., *Mistral 7B*, 2023,
  arXiv:2310.06825, section 2, "rolling buffer cache");
- with latent attention the narrow vector and the rotated key, which all heads share: ``key_value_rank + rotary_width``
  numbers (DeepSeek-V2, 2024, arXiv:2405.04434, section 2.1.4, table 1).

Of each sequence, however long, a layer with linear attention keeps its states, ``heads state_width head_width`` numbers in
the dtype of sums, and the last ``taps - 1`` tokens before its convolution, in that of the model.  So does SGLang 0.5.23
(``sglang/srt/configs/mamba_utils.py``): float32, unless the model's config says another dtype, and bfloat16.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy.typing as npt

from parallelism.dtypes import bits_of
from parallelism.ir.core import Extent, TensorType, checked_dtype
from parallelism.ir.core.extents import Expression, divided, largest, rounded_up
from parallelism.ir.operators.attention import sums_dtype
from parallelism.models.figures import attends, has_state
from parallelism.models.linear_attention import CONVOLUTION

if TYPE_CHECKING:
    from parallelism.models.spec import TransformerSpec


FULL, WINDOW, STATES = "full", "window", "states"
"""The kinds of layers by what they keep: every token, a window of them, or a state of each sequence."""


class CacheArray(NamedTuple):
    """One array of a layer's cache."""

    name: str
    """``keys``, ``values``, ``latent``; ``state`` or ``convolution``."""
    kind: str
    shape: tuple[int, ...]
    """What is kept of a token: heads and features; or of a sequence."""
    dtype: npt.DTypeLike | None = None
    """None: that of the cache."""


def cache_kinds(spec: TransformerSpec, layer: int) -> tuple[str, ...]:
    """What a layer keeps, that of attention first; nothing if it has a feed-forward alone."""
    found: tuple[str, ...] = ()
    if attends(spec, layer):
        found = (FULL if spec.window_of(layer) is None else WINDOW,)
    return (*found, STATES) if has_state(spec, layer) else found


def kinds_of(spec: TransformerSpec) -> tuple[str, ...]:
    """The kinds of layers of a model, by what they keep."""
    kinds = {kind for layer in range(spec.layers) for kind in cache_kinds(spec, layer)}
    return tuple(kind for kind in (FULL, WINDOW, STATES) if kind in kinds)


def cache_arrays(spec: TransformerSpec, layer: int) -> tuple[CacheArray, ...]:
    """The arrays that a layer keeps."""
    found: list[CacheArray] = []
    for kind in cache_kinds(spec, layer):
        found += _of_states(spec) if kind == STATES else _of_attention(spec, kind)
    return tuple(found)


def _of_attention(spec: TransformerSpec, kind: str) -> list[CacheArray]:
    latent = spec.attention
    if latent is not None:
        return [CacheArray("latent", kind, (1, latent.key_value_rank + latent.rotary_width))]
    each = spec.groups, int(spec.head_width)
    return [CacheArray(name, kind, each) for name in ("keys", "values")]


def _of_states(spec: TransformerSpec) -> list[CacheArray]:
    linear = spec.linear_attention
    assert linear is not None
    last = linear.taps - 1, linear.groups, sum(linear.convolved)
    found = [CacheArray("convolution", STATES, last, spec.dtype)]
    if linear.kind != CONVOLUTION:
        state = linear.heads, linear.state_width, linear.head_width
        found.append(CacheArray("state", STATES, state, sums_dtype(checked_dtype(spec.dtype))))
    return found


def columns_of(spec: TransformerSpec, layer: int, tokens: Extent) -> Extent:
    """The tokens of a sequence of so many that a layer keeps."""
    window = spec.window_of(layer)
    if window is None:
        return tokens
    if isinstance(tokens, Expression):
        smaller: Extent = tokens + window - largest(tokens, window)
        return smaller
    return min(tokens, window)


def cache_bytes(spec: TransformerSpec, tokens: Extent, dtype: npt.DTypeLike = "bfloat16") -> Extent:
    """The bytes of the cache of one sequence of so many tokens, in all layers; of 0 tokens those of its states."""
    if not isinstance(tokens, Expression) and (type(tokens) is not int or tokens < 0):
        raise ValueError(f"tokens must be an integer of at least 0, got {tokens!r}")
    kept: Extent = 0
    states: Extent = 0
    numbers = 0
    for layer in range(spec.layers):
        arrays = cache_arrays(spec, layer)
        for array in arrays:
            if array.kind == STATES:
                states = states + TensorType(array.dtype or dtype, array.shape).nbytes
        if attends(spec, layer):
            numbers = sum(prod(array.shape) for array in arrays if array.kind != STATES)
            kept = kept + columns_of(spec, layer, tokens)
    bits = numbers * bits_of(checked_dtype(dtype))
    return states + (kept * (bits // 8) if bits % 8 == 0 else rounded_up(divided(kept * bits, 8)))
