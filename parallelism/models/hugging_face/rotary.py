"""The rotary positions that a `config.json` says, in its older fields and in those of transformers 5."""

from __future__ import annotations

from collections.abc import Mapping
from math import log, sqrt
from typing import Any

from parallelism.kernels import RotaryScaling
from parallelism.models.hugging_face.config import Config

_FULL, _SLIDING = "full_attention", "sliding_attention"


def rotary_of(config: Config, head_width: int, sequence: int, base: float = 10000.0) -> dict[str, Any]:
    """The figures of a `TransformerSpec` with rotary positions; ``base`` is the one of the configuration class.

    ``rope_parameters``, or ``rope_scaling`` and ``rope_theta``.
    """
    given = config.group("rope_scaling") or config.group("rope_parameters")
    if isinstance(given.get(_FULL), Mapping):
        return _by_layers(config, given, head_width, sequence, base)
    fields = _fields(config, given, base)
    share = config.get("rotary_pct")
    share = fields.number("partial_rotary_factor", 1.0 if share is None else config.number("rotary_pct"))
    width = int(head_width * share)
    found: dict[str, Any] = {"positions": "rotary", "rotary_base": fields.number("rope_theta")}
    if width != head_width:
        found["rotary_width"] = width
    return found | _scaling(config, fields, width, sequence)


def _fields(config: Config, given: Mapping[str, Any], base: float) -> Config:
    """The parameters as fields, with those that stand beside them in older files."""
    outside: dict[str, Any] = {"rope_theta": base}
    for name, other in (("rope_theta", "rotary_emb_base"), ("partial_rotary_factor", "")):
        value = config.get(name) if config.get(name) is not None else config.get(other)
        if value is not None:
            outside[name] = value
    return Config(f"{config.name}, rope_parameters", given, outside)


def _by_layers(
    config: Config, given: Mapping[str, Any], head_width: int, sequence: int, base: float
) -> dict[str, Any]:
    """Parameters of layers with a window and of the others, as Gemma 3 has them."""
    kinds = Config(f"{config.name}, rope_parameters", given)
    full = _fields(config, kinds.group(_FULL), base)
    found: dict[str, Any] = {"positions": "rotary", "rotary_base": full.number("rope_theta")}
    found |= _scaling(config, full, head_width, sequence)
    if kinds.group(_SLIDING):
        sliding = _fields(config, kinds.group(_SLIDING), base)
        sliding.must("rope_type", None, "default")
        found |= {"window_rotary_base": sliding.number("rope_theta")}
    return found


def _scaling(config: Config, fields: Config, width: int, sequence: int) -> dict[str, Any]:
    """The stretch of frequencies."""
    kind = fields.get("rope_type") or fields.get("type") or "default"
    if kind in ("default", "dynamic"):  # dynamic begins beyond the longest sequence
        return {}
    if kind == "mrope":
        return {}
    if kind == "linear":
        return {"rotary_scaling": str(RotaryScaling("linear", (fields.number("factor"),)))}
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        numbers = (*map(fields.number, names), float(_original(config, fields)))
        return {"rotary_scaling": str(RotaryScaling("llama3", numbers))}
    if kind in ("yarn", "deepseek_yarn"):
        return _yarn(config, fields)
    if kind in ("longrope", "su"):
        return _longrope(config, fields, width, sequence)
    raise ValueError(f"{config.name}: rope_type={kind!r} changes the arithmetic and is not modelled")


def _original(config: Config, fields: Config) -> int:
    name = "original_max_position_embeddings"
    if config.get(name) is not None:
        return config.whole(name)
    return config.whole("max_position_embeddings") if fields.get(name) is None else fields.whole(name)


def _yarn(config: Config, fields: Config) -> dict[str, Any]:
    length = _original(config, fields)
    factor = fields.number("factor", config.whole("max_position_embeddings") / length)
    whole = fields.get("truncate") is None or fields.switch("truncate")
    numbers = (
        factor,
        fields.number("beta_fast", 32.0),
        fields.number("beta_slow", 1.0),
        float(length),
        float(whole),
    )
    scale, all_dims = fields.number("mscale", 0.0), fields.number("mscale_all_dim", 0.0)
    multiplier = (
        _yarn_scale(factor, scale) / _yarn_scale(factor, all_dims)
        if scale and all_dims
        else _yarn_scale(factor)
    )
    multiplier = fields.number("attention_factor", multiplier)
    return {"rotary_scaling": str(RotaryScaling("yarn", numbers)), "rotary_factor": multiplier}


def _yarn_scale(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * log(factor) + 1.0


def latent_scale(config: Config, width: int) -> float | None:
    """What DeepSeek's code multiplies scores by; None: 1 / sqrt(width)."""
    fields = _fields(config, config.group("rope_scaling") or config.group("rope_parameters"), 10000.0)
    all_dims = fields.number("mscale_all_dim", 0.0)
    if not all_dims or (fields.get("rope_type") or fields.get("type")) in (None, "default"):
        return None
    return float(_yarn_scale(fields.number("factor", 1.0), all_dims) ** 2 / sqrt(width))


def _longrope(config: Config, fields: Config, width: int, sequence: int) -> dict[str, Any]:
    length = _original(config, fields)
    factors = fields.listed("long_factor" if sequence > length else "short_factor", width // 2, (int, float))
    longer = fields.number("factor", config.whole("max_position_embeddings") / length)
    multiplier = 1.0 if longer <= 1 else sqrt(1 + log(longer) / log(length))
    if factors is None:
        raise fields.wrong("long_factor and short_factor", f"lists of {width // 2}", None)
    scaling = RotaryScaling("factors", tuple(float(factor) for factor in factors))
    return {"rotary_scaling": str(scaling), "rotary_factor": fields.number("attention_factor", multiplier)}
