"""`Precision`: the dtypes of weights, of the cache and of products, by the words that people use for them."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Precision:
    """The dtypes of the weights of products and of the cache in memory, and of the products; None: that of the model."""

    weights: str | None = None
    """``int8``: numbers of at most 8 bits, of whatever format."""
    cache: str | None = None
    products: str | None = None
    bits: int = 8
    """The bits of a weight: of 4, two are a byte."""

    @classmethod
    def parse(cls, text: str, cache: str | None = None) -> Precision:
        """``bf16``, ``fp16``, ``fp8`` (weights, products and cache), ``int8`` or ``int4`` (weights alone).

        ``cache`` is the dtype of the cache by another name, one of `CACHE_DTYPES`; None: as the first word has it.
        """
        found = PRECISIONS.get(text)
        if found is None:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {text!r}")
        if cache is None:
            return found
        if cache not in CACHE_DTYPES:
            raise ValueError(f"cache_dtype must be one of {', '.join(CACHE_DTYPES)}, got {cache!r}")
        return replace(found, cache=CACHE_DTYPES[cache] or found.cache)


PRECISIONS = {
    "bf16": Precision(),
    "fp16": Precision(),
    "fp8": Precision("int8", "float8_e4m3fn", "float8_e4m3fn"),
    "int8": Precision("int8"),
    "int4": Precision("int8", bits=4),
}
CACHE_DTYPES = {
    "auto": None,
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "int8": "int8",
}
"""The dtypes of a cache, by the names that vLLM and TensorRT-LLM have for them; ``auto``: as the precision has it."""
