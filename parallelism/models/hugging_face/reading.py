"""`from_config`: the `config.json` of a Hugging Face model as a `TransformerSpec`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallelism.display.quantities import short_errors, shortened
from parallelism.models.hugging_face.architectures import ARCHITECTURES, CLASSES, TYPES, Architecture
from parallelism.models.hugging_face.config import Config
from parallelism.models.spec import TransformerSpec
from parallelism.spelling import closest_few

FILE = "config.json"
MOST_BYTES = 1 << 20
"""A config has a few thousand bytes."""
_HEAD = re.compile(r"(?:ForCausalLM|LMHeadModel|ForConditionalGeneration|Model)$")
"""How classes end that can be read."""
_NEXT_TOKENS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
_SIZES = re.compile(r"(?:num|n)_(?:hidden_)?layers?|hidden_size|n_embd|d_model|vocab_size")
"""Fields that a file of a model has."""


@short_errors
def from_config(
    path: str | os.PathLike[str] | Mapping[str, Any], *, sequence: int | None = None
) -> TransformerSpec:
    """The model of a `config.json`: of a file, of a folder that has one, or of its fields.

    It has the parameters of what ``AutoModelForCausalLM.from_config`` of transformers 5.24.0 builds, but for two rows of
    positions of OPT that no token reads.  Fields that a
    file leaves out have the values of the architecture's configuration class.  Of a multimodal model it is the language
    model, in ``text_config``.  Modules that predict further tokens are left out: ``replace(spec, next_tokens=1)`` has
    them.  ``remarks`` of the result say so.  ``sequence`` is a number of tokens in place of
    ``max_position_embeddings``.  The dtype is float32, whatever the file says of its weights.

    ``ValueError`` for an architecture that is not known, for fields of wrong types, and for those that change the
    arithmetic and are not modelled; ``OSError`` where there is no file.

    >>> from_config({"model_type": "mixtral"}).parameters
    46702792704
    """
    name, values = ("the config", path) if isinstance(path, Mapping) else _loaded(Path(path))
    values, remarks = _text_config(name, values)
    kind, architecture = _architecture(name, values)
    if sequence is not None:
        values = {**values, _sequence_field(architecture): sequence}
    config = Config(name, values, architecture.defaults, architecture.others)
    _check_common(config, kind, architecture)
    figures = architecture.read(config)
    missing = [
        each
        for each in architecture.defaults
        if _SIZES.fullmatch(each) and not _has(architecture, values, each)
    ]
    if missing:
        told = ", ".join(f"{each}={architecture.defaults[each]}" for each in missing)
        remarks.append(f"{name} leaves out what {kind} has as {told}")
    for each in _NEXT_TOKENS:
        if values.get(each):
            remarks.append(
                f"{each}={shortened(values[each], 40)} is left out, as transformers does: next_tokens of a "
                "TransformerSpec adds modules that predict further tokens"
            )
    remarks += figures.pop("remarks", ())
    try:
        return TransformerSpec(**figures, remarks=tuple(remarks))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _check_common(config: Config, kind: str, architecture: Architecture) -> None:
    """Refuses what no architecture may have, or only another one."""
    config.must("is_encoder_decoder", None, False)
    if kind != "llama4_text":
        config.must("attention_chunk_size", None)
    types = config.get("layer_types")
    for each in types if isinstance(types, list | tuple) else ():
        if each not in ("full_attention", "sliding_attention", *architecture.kinds):
            raise ValueError(f"{config.name}: layer_types has {shortened(each, 40)}, which is not modelled")


def _has(architecture: Architecture, values: Mapping[str, Any], field: str) -> bool:
    return field in values or architecture.others.get(field) in values


def _sequence_field(architecture: Architecture) -> str:
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    return next(name for name in names if name in architecture.defaults)


def _loaded(path: Path) -> tuple[str, Mapping[str, Any]]:
    """The name of a file, and its fields."""
    if path.is_dir():
        path = path / FILE
    name = shortened(str(path))[1:-1] if len(str(path)) > 200 else str(path)
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise ValueError(f"{name} has {size:,} bytes; the config of a model has at most {MOST_BYTES:,}")
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        why = (
            "it is nested too deeply"
            if isinstance(error, RecursionError)
            else shortened(str(error), 100)[1:-1]
        )
        raise ValueError(f"{name} is no JSON: {why}") from None
    if not isinstance(values, dict):
        raise ValueError(
            f"{name} must be an object of fields, as config.json of a model, got {type(values).__name__}"
        )
    return name, values


def _text_config(name: str, values: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """The fields of the language model, and what is to be said about it."""
    text = values.get("text_config")
    if text is None:
        return values, []
    if not isinstance(text, Mapping):
        raise ValueError(f"{name}: text_config must be an object, got {type(text).__name__}")
    tied = {each: values[each] for each in ("tie_word_embeddings",) if each in values}
    kind = values.get("model_type", "a multimodal model")
    said = (
        f"{name} is of {shortened(kind, 40)}: its text_config is read, the language model without the others"
    )
    kind_outside = {"model_type": kind} if "model_type" in values else {}
    return {**kind_outside, **text, **tied}, [said]  # transformers asks the whole model whether it is tied


def _architecture(name: str, values: Mapping[str, Any]) -> tuple[str, Architecture]:
    """The architecture of a file, with its word."""
    classes = values.get("architectures") or []
    if not isinstance(classes, list | tuple) or not all(isinstance(each, str) for each in classes):
        raise ValueError(f"{name}: architectures must be a list of names, got {shortened(classes, 60)}")
    for each in classes:
        if not _HEAD.search(each):
            raise ValueError(f"{name}: {each[:60]} is no causal language model")
    kind = values.get("model_type")
    if kind is None and classes:
        plain = _HEAD.sub("", classes[0]).lower()
        kind = CLASSES.get(plain, plain)
    if kind is None:
        raise ValueError(f"{name} says no model_type; the architectures are {', '.join(ARCHITECTURES)}")
    if not isinstance(kind, str):
        raise ValueError(f"{name}: model_type must be a word, got {shortened(kind, 60)}")
    kind = TYPES.get(kind, kind)
    if kind not in ARCHITECTURES:
        near = closest_few(kind[:60], ARCHITECTURES)
        known = f"the nearest are {', '.join(near)}" if near else f"they are {', '.join(ARCHITECTURES)}"
        raise ValueError(
            f"{name}: the architecture {shortened(kind, 60)} is not known; {known}; parallelism.interop.from_torch reads "
            "the program of any model of PyTorch"
        )
    return kind, ARCHITECTURES[kind]
