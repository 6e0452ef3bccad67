"""What a cache keeps of a token, by kind of attention, and its bytes.

Of each token and layer are kept:

- with heads of keys and values, a key and a value for each: ``2 groups head_width`` numbers (Ainslie et al., *GQA*, 2023,
  arXiv:2305.13245, section 2.2; Pope et al., *Efficiently Scaling Transformer Inference*, 2022, arXiv:2211.05102,
  section 3.3);
- in a layer with a window of W tokens, those of the last W alone, in a ring (Jiang et al., *Mistral 7B*, 2023,
  arXiv:2310.06825, section 2, "rolling buffer cache");
- with latent attention the narrow vector and the rotated key, which all heads share: ``key_value_rank + rotary_width``
  numbers (DeepSeek-V2, 2024, arXiv:2405.04434, section 2.1.4, table 1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy.typing as npt

from parallelism.dtypes import bits_of
from parallelism.ir.core import Extent, checked_dtype
from parallelism.ir.core.extents import Expression, divided, largest, rounded_up

if TYPE_CHECKING:
    from parallelism.models.spec import TransformerSpec


class CacheArray(NamedTuple):
    """One array of a layer's cache."""

    name: str
    """``keys``, ``values``, or ``latent``."""
    heads: int
    features: int


def cache_arrays(spec: TransformerSpec) -> tuple[CacheArray, ...]:
    """The arrays that each layer keeps; ``ValueError`` for a model that no program of inference has."""
    for name in ("linear_attention", "attention_gate", "layer_parts"):
        if getattr(spec, name):
            raise ValueError(f"inference has layers with keys and values alone, and no {name} yet")
    latent = spec.attention
    if latent is not None:
        return (CacheArray("latent", 1, latent.key_value_rank + latent.rotary_width),)
    width = int(spec.head_width)
    return CacheArray("keys", spec.groups, width), CacheArray("values", spec.groups, width)


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
    """The bytes of the cache of one sequence of so many tokens, in all layers."""
    if not isinstance(tokens, Expression) and (type(tokens) is not int or tokens < 0):
        raise ValueError(f"tokens must be an integer of at least 0, got {tokens!r}")
    numbers = sum(array.heads * array.features for array in cache_arrays(spec))
    kept: Extent = 0
    for layer in range(spec.layers):
        kept = kept + columns_of(spec, layer, tokens)
    bits = numbers * bits_of(checked_dtype(dtype))
    return kept * (bits // 8) if bits % 8 == 0 else rounded_up(divided(kept * bits, 8))
