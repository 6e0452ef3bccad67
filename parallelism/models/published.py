"""Published Transformers by name.  A preset has the published figures; dropout and dtype are not among them.

GPT-2
    Radford et al., *Language Models are Unsupervised Multitask Learners*, 2019, table 2; the vocabulary and the
    sequence of section 2.2 and 2.3.  Heads are those of the released models.
GPT-3
    Brown et al., *Language Models are Few-Shot Learners*, 2020, arXiv:2005.14165, table 2.1, with the vocabulary of
    GPT-2 and sequences of 2048.  The table has two slips: 24 heads of 128 for a width of 2048 (here 16 heads), and a
    width of 5140 for 40 heads of 128 (here 5120).
Megatron
    Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, 2022, arXiv:2205.05198,
    table 3; vocabulary and sequence of section 6.
Llama
    Touvron et al., *LLaMA*, 2023, arXiv:2302.13971, table 2; the widths of the feed-forward blocks are two thirds of
    four times the width (section 2.2), rounded up to a multiple of 256.
Llama 2
    Touvron et al., *Llama 2*, 2023, arXiv:2307.09288, table 1 and section 2.2; the other figures are those of the
    released models' ``params.json``.
Llama 3
    Grattafiori et al., *The Llama 3 Herd of Models*, 2024, arXiv:2407.21783, table 3 and sections 3.2 and 3.4.1; the
    vocabulary with all special tokens, 128,256, is that of the released models.
Mistral
    Jiang et al., *Mistral 7B*, 2023, arXiv:2310.06825, table 1.  Its sliding window of 4096 is left out.
MPT 70B
    The configuration of Databricks' llm-foundry (``scripts/train/benchmarking``), with biases and learned positions.

All others are read from the fields of their `config.json`: `parallelism.models.hugging_face.released` has them, with the
repository of each.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from parallelism.display.quantities import short_errors
from parallelism.models.hugging_face.reading import from_config
from parallelism.models.hugging_face.released import RELEASED, SEQUENCES
from parallelism.models.spec import TransformerSpec
from parallelism.spelling import did_you_mean


def _gpt(layers: int, width: int, heads: int, vocabulary: int, sequence: int) -> TransformerSpec:
    return TransformerSpec(layers=layers, width=width, heads=heads, vocabulary=vocabulary, sequence=sequence)


def _llama(
    layers: int, width: int, heads: int, feed_forward: int, vocabulary: int = 32_000, **figures: Any
) -> Any:
    return TransformerSpec(
        layers=layers,
        width=width,
        heads=heads,
        feed_forward=feed_forward,
        vocabulary=vocabulary,
        activation="swiglu",
        norm="rms",
        positions="rotary",
        biases=False,
        tied=False,
        **figures,
    )


_LLAMA_1: dict[str, Any] = {"sequence": 2048, "epsilon": 1e-6}
_LLAMA_2: dict[str, Any] = {"sequence": 4096}
_LLAMA_3: dict[str, Any] = {
    "sequence": 8192,
    "key_value_heads": 8,
    "vocabulary": 128_256,
    "rotary_base": 500_000.0,
}

TRANSFORMERS: dict[str, TransformerSpec] = {
    "gpt2": _gpt(12, 768, 12, 50_257, 1024),
    "gpt2-medium": _gpt(24, 1024, 16, 50_257, 1024),
    "gpt2-large": _gpt(36, 1280, 20, 50_257, 1024),
    "gpt2-xl": _gpt(48, 1600, 25, 50_257, 1024),
    "gpt3-125m": _gpt(12, 768, 12, 50_257, 2048),
    "gpt3-350m": _gpt(24, 1024, 16, 50_257, 2048),
    "gpt3-760m": _gpt(24, 1536, 16, 50_257, 2048),
    "gpt3-1.3b": _gpt(24, 2048, 16, 50_257, 2048),
    "gpt3-2.7b": _gpt(32, 2560, 32, 50_257, 2048),
    "gpt3-6.7b": _gpt(32, 4096, 32, 50_257, 2048),
    "gpt3-13b": _gpt(40, 5120, 40, 50_257, 2048),
    "gpt3-175b": _gpt(96, 12_288, 96, 50_257, 2048),
    "megatron-22b": _gpt(48, 6144, 64, 51_200, 2048),
    "megatron-175b": _gpt(96, 12_288, 96, 51_200, 2048),
    "megatron-530b": _gpt(105, 20_480, 128, 51_200, 2048),
    "megatron-1t": _gpt(128, 25_600, 160, 51_200, 2048),
    "llama-7b": _llama(32, 4096, 32, 11_008, **_LLAMA_1),
    "llama-13b": _llama(40, 5120, 40, 13_824, **_LLAMA_1),
    "llama-33b": _llama(60, 6656, 52, 17_920, **_LLAMA_1),
    "llama-65b": _llama(80, 8192, 64, 22_016, **_LLAMA_1),
    "llama2-7b": _llama(32, 4096, 32, 11_008, **_LLAMA_2),
    "llama2-13b": _llama(40, 5120, 40, 13_824, **_LLAMA_2),
    "llama2-70b": _llama(80, 8192, 64, 28_672, key_value_heads=8, **_LLAMA_2),
    "llama3-8b": _llama(32, 4096, 32, 14_336, **_LLAMA_3),
    "llama3-70b": _llama(80, 8192, 64, 28_672, **_LLAMA_3),
    "llama3-405b": _llama(126, 16_384, 128, 53_248, **_LLAMA_3),
    "mpt-70b": _gpt(80, 8192, 64, 50_368, 2048),
    "mistral-7b": _llama(32, 4096, 32, 14_336, sequence=8192, key_value_heads=8),
}
"""The published Transformers by name."""


for _name, (_, _fields) in RELEASED.items():
    TRANSFORMERS[_name] = replace(from_config(_fields, sequence=SEQUENCES.get(_name)), remarks=())


_AFFIXES = re.compile(r"-(?:instruct|base|chat|it|pt|hf|v\d+\.\d+|\d+k|\d{4})(?=-|$)")
"""Parts of the name of a repository that say nothing of the figures."""


@short_errors
def transformer(name: str) -> TransformerSpec:
    """The published Transformer of this name; upper case and ``_`` are read as in ``gpt3-175b``.

    Names may have an organisation in front, as ``Qwen/Qwen3-8B``.  ``ValueError`` names the nearest one if there is
    none.

    >>> transformer("gpt2").parameters
    124439808
    >>> transformer("meta-llama/Llama-3.1-8B-Instruct") is transformer("llama3.1-8b")
    True
    """
    found = published_name(name)
    if found is None:
        hint = did_you_mean(name, TRANSFORMERS) or f": they are {', '.join(TRANSFORMERS)}"
        raise ValueError(f"there is no Transformer {name!r}{hint}")
    return TRANSFORMERS[found]


def published_positions(name: str) -> int:
    """The most tokens of a sequence that a published Transformer is made for: those of its config, where it has one.

    >>> published_positions("llama3.1-8b"), transformer("llama3.1-8b").sequence
    (131072, 8192)
    """
    spec = transformer(name)
    known = published_name(name)
    return from_config(RELEASED[known][1]).sequence if known in RELEASED else spec.sequence


def published_name(name: str) -> str | None:
    """The name here of a published Transformer, which may have an organisation in front; None if it is none."""
    plain = name.lower().replace("_", "-")
    if plain in TRANSFORMERS:
        return plain
    if plain.count("/") != 1:
        return None
    plain = _AFFIXES.sub("", plain.partition("/")[2].removeprefix("meta-"))
    by_key = {each.replace("-", ""): each for each in TRANSFORMERS}
    return by_key.get(plain.replace("-", ""))
