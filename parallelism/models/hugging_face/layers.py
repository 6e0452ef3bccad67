"""What most architectures have in common, as figures of a `TransformerSpec`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parallelism.models.hugging_face.config import MOST_LAYERS, Config
from parallelism.models.hugging_face.rotary import rotary_of

Figures = dict[str, Any]

PLAIN = {
    "gelu": "gelu_exact",
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate"), "gelu"),
    **{name: name for name in ("relu", "relu2", "silu")},
    "swish": "silu",
}
"""Activations by their names in transformers."""
GATED = {"gelu_exact": "geglu_exact", "gelu": "geglu", "relu": "reglu", "silu": "swiglu"}
"""With a gate."""


def activation(config: Config, name: str = "hidden_act", *, gated: bool) -> str:
    """The activation that a field says."""
    found = PLAIN.get(config.text(name))
    if found is None or (gated and found not in GATED):
        known = [each for each, plain in PLAIN.items() if not gated or plain in GATED]
        raise config.wrong(name, f"one of {', '.join(known)}", config.get(name))
    return GATED[found] if gated else found


def sizes(config: Config) -> Figures:
    """Layers, widths, heads and the vocabulary, by the usual names."""
    width, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    head_width = config.whole_or_none("head_dim")
    if head_width is None and width % heads:
        head_width = width // heads or config.whole("head_dim")
    return {
        "layers": config.whole("num_hidden_layers", most=MOST_LAYERS),
        "width": width,
        "heads": heads,
        "key_value_heads": config.whole_or_none("num_key_value_heads"),
        "head_width": head_width,
        "feed_forward": config.whole("intermediate_size"),
        "vocabulary": config.whole("vocab_size"),
        "sequence": config.whole("max_position_embeddings"),
        "tied": config.switch("tie_word_embeddings"),
    }


def llama_like(config: Config, base: float = 10000.0) -> Figures:
    """A decoder with RMS norms, rotary positions, a gate and no biases."""
    found = sizes(config)
    return {
        **found,
        **rotary_of(config, width_of_head(found), found["sequence"], base),
        "activation": activation(config, gated=True),
        "norm": "rms",
        "epsilon": config.number("rms_norm_eps"),
        "biases": attention_biases(config),
        "attention_dropout": config.number("attention_dropout", 0.0),
    }


def width_of_head(found: Figures) -> int:
    """The features of a head of these sizes."""
    return int(found["head_width"] or found["width"] // found["heads"])


def attention_biases(config: Config) -> tuple[str, ...]:
    """The products of attention, if ``attention_bias`` gives them biases."""
    return ("qkv", "out") if config.switch("attention_bias") else ()


def all_biases(config: Config) -> tuple[str, ...]:
    """The products that have biases by ``attention_bias`` and ``mlp_bias``."""
    return (*attention_biases(config), *(("gate", "up", "down") if config.switch("mlp_bias") else ()))


def windows(config: Config, layers: int, full: Sequence[bool]) -> Figures:
    """The window of ``sliding_window``, and the layers without: those of ``layer_types``, or ``full``."""
    types = config.listed("layer_types", layers, (str,))
    if types is not None:
        full = [kind == "full_attention" for kind in types]
    if all(full) or config.get("sliding_window") is None:
        return {}
    return {"window": config.whole("sliding_window"), "full_attention_every": every(full)}


def every(chosen: Sequence[bool]) -> int | tuple[bool, ...] | None:
    """A choice of layers as a figure: n where they are those with ``(i + 1) % n == 0``."""
    if not any(chosen):
        return None
    first = list(chosen).index(True) + 1
    if all(bool(each) == ((layer + 1) % first == 0) for layer, each in enumerate(chosen)):
        return first
    return tuple(bool(each) for each in chosen)


def dropouts(config: Config, attention: str, hidden: str, embedding: str | None) -> Figures:
    """The rates of dropout.  A model has one rate of hidden values, that behind the embedding included."""
    rates = {name: config.number(name, 0.0) for name in (attention, hidden, embedding) if name is not None}
    if embedding is not None and rates[embedding] != rates[hidden]:
        raise ValueError(
            f"{config.name}: {embedding}={rates[embedding]:g} must be {hidden}={rates[hidden]:g}: dropout behind the "
            "embedding has the rate of hidden values"
        )
    return {"attention_dropout": rates[attention], "hidden_dropout": rates[hidden]}
