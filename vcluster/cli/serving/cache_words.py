"""``--cache`` of `simulate` and `plan`: the cache of keys and values that inference with a Transformer needs."""

from __future__ import annotations

from typing import Any

from parallelism.display.quantities import count, decimal_bytes
from parallelism.models import TransformerSpec
from vcluster.cli.command_line import Arguments

CACHE: Arguments = {
    "--cache": {
        "action": "store_true",
        "help": "tell the bytes of keys and values that a sequence of a Transformer needs in inference",
    }
}


def cache_of(model: Any, dtype: str) -> dict[str, Any]:
    """The figures of the cache of one sequence, of all its tokens.  ``ValueError`` for what is no Transformer."""
    if not isinstance(model, TransformerSpec):
        raise ValueError("--cache is for a Transformer by its name, its figures or its config.json")
    kept = dtype if dtype in ("bfloat16", "float16", "float32") else "bfloat16"
    return {
        "tokens": model.sequence,
        "dtype": kept,
        "bytes": model.cache_bytes(model.sequence, kept),
        "bytes_of_a_token": model.cache_bytes(1, kept) - model.cache_bytes(0, kept),
        "bytes_of_states": model.cache_bytes(0, kept),
    }


def cache_text(cache: dict[str, Any]) -> str:
    """The figures in a line."""
    states = cache["bytes_of_states"]
    told = f", {decimal_bytes(states)} of them for states" if states else ""
    return (
        f"cache of keys and values: {decimal_bytes(cache['bytes'])} for a sequence of {count(cache['tokens'])} tokens in "
        f"{cache['dtype']}, {decimal_bytes(cache['bytes_of_a_token'])} for the first token{told}"
    )
