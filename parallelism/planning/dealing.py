"""How replicas, sequences and experts of a plan are dealt to devices: the rules of the settings about these."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from parallelism.arrays import Bools, Ints
from parallelism.models import TransformerSpec
from parallelism.planning.trained import TrainedModel
from parallelism.training.megatron import overlap_of
from parallelism.training.sequence_split import TYPES, SequenceSplit
from parallelism.training.state_sharding import FULLY_SHARDED
from parallelism.transforms import DataParallel, ExpertParallel, Strategy, Transform, Zero
from parallelism.transforms.words import REPLICA, SHORTHANDS

Columns = Mapping[str, Ints]
"""The settings of many plans: a column for each setting, a row for each plan."""
Settings = Mapping[str, Any]
"""The settings of one plan, by name."""


def spelled_out(fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with what ``fsdp=64`` and ``hsdp="8x8"`` mean in their place, as in the text of a strategy.

    ``fsdp=64`` is ``dp=64, zero=3, overlap=True``; ``hsdp="8x4"`` is ``dp=32, instances=8`` and the same.  Another
    ``overlap`` beside them counts.  ``ValueError`` for one that is written otherwise, or beside a setting that it says.
    """
    found = {name: value for name, value in fixed.items() if name not in SHORTHANDS}
    given = [name for name in SHORTHANDS if fixed.get(name) is not None]
    for name in given:
        means = _meaning(name, fixed[name])
        if both := [each for each in means if found.get(each) is not None]:
            raise ValueError(f"{name}={fixed[name]!r} says {both[0]}, too; leave one of them out")
        found |= {"overlap": True, **found, **means}
    return found


def _meaning(name: str, value: Any) -> dict[str, Any]:
    """The settings that ``fsdp`` or ``hsdp`` with this value stands for, without overlap."""
    if name == "fsdp":
        if type(value) is not int:
            raise ValueError(
                f"fsdp is the number of devices that share the weights, as fsdp=64; got {value!r}"
            )
        return {"dp": value, "zero": 3}
    extents = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", value) if isinstance(value, str) else None
    if extents is None:
        raise ValueError(
            f"hsdp is REPLICASxDEVICES: hsdp=8x4 is 8 replicas, each on 4 devices that share its weights; got {value!r}"
        )
    outer, inner = map(int, extents.groups())
    return {"dp": outer * inner, "zero": 3, "instances": outer}


def replicas(model: TrainedModel, settings: Settings) -> Transform | None:
    """Data parallelism; with several instances of the optimizer, over an axis of these and one inside of each."""
    if settings["dp"] == 1:
        return None
    if settings.get("instances", 1) == 1:  # pieces are laid out without it
        return DataParallel("dp")
    return Strategy(DataParallel(REPLICA), DataParallel("dp"))


def split_of_sequences(model: TrainedModel, settings: Settings) -> SequenceSplit | None:
    """How the sequences of a plan are dealt to devices; None if its heads do not allow it."""
    exchange = settings.get("exchange", "all_gather")
    if isinstance(exchange, SequenceSplit):  # pieces are laid out for any tp
        return exchange
    spec = model.model
    heads = max(1, spec.groups // settings["tp"]) if isinstance(spec, TransformerSpec) else 0
    return SequenceSplit.over(exchange, settings["cp"], heads)


def sequences(model: TrainedModel, settings: Settings) -> Transform | None:
    split = split_of_sequences(model, settings)
    if settings["cp"] == 1 or split is None:
        return None
    return Strategy(*split.transforms(split.axes(settings["cp"])))


EXPERTS_OVER = ("ep", "ep+tp", "ep+cp", "ep+cp+tp")
"""The axes over which experts may be split."""


def experts(model: TrainedModel, settings: Settings) -> Transform | None:
    """The transform that splits experts over ``ep``, and over the other axes that ``experts_over`` names."""
    beside = axes_beside_experts(model, settings)
    return ExpertParallel("ep", beside) if settings["ep"] > 1 or beside else None


def axes_beside_experts(model: TrainedModel, settings: Settings) -> tuple[str, ...]:
    """The axes with several devices over which experts are split beside ``ep``, outermost first."""
    over = settings.get("experts_over", EXPERTS_OVER[0]).split("+")
    found: list[str] = []
    split = split_of_sequences(model, settings) if "cp" in over and settings["cp"] > 1 else None
    if split is not None:
        found += [axis for axis, devices in split.axes(settings["cp"]).items() if devices > 1]
    if "tp" in over and settings["tp"] > 1:
        found.append("tp")
    return tuple(found)


def checked_experts_over(name: str, value: Any, model: TrainedModel) -> str:
    if value not in EXPERTS_OVER:
        raise ValueError(f"{name} must be one of {', '.join(EXPERTS_OVER)}, got {value!r}")
    if value != EXPERTS_OVER[0] and not model.experts:
        raise ValueError(f"{name}={value} needs a model with experts")
    return str(value)


def experts_do_not_fit(columns: Columns, model: TrainedModel) -> Bools:
    """By row, whether the devices do not divide the experts; whether tp splits them and not the tokens; and whether cp
    splits experts that tp splits inside.  In the latter cases rows of other experts would have to be dealt anew."""

    def split_by(axis: str) -> Bools:
        """By row, whether an axis splits the experts."""
        return np.array([axis in over.split("+") for over in columns["experts_over"].tolist()], np.bool_)

    over_cp, over_tp = split_by("cp"), split_by("tp")
    devices = columns["ep"] * np.where(over_cp, columns["cp"], 1) * np.where(over_tp, columns["tp"], 1)
    inside = over_cp & ~over_tp & (columns["cp"] > 1) & (columns["tp"] > 1)
    whole_tokens = over_tp & (columns["tp"] > 1) & (columns["sp"] == 0)
    wrong: Bools = ((model.experts or 1) % devices != 0) | inside | whole_tokens
    return wrong


def experts_over_words(settings: Settings) -> str:
    """The words of a plan that says ``experts_over``; empty where only ``ep`` splits experts."""
    axes = settings["experts_over"].split("+")
    several = [axis for axis in axes if axis == "ep" or settings[axis] > 1]
    return f"experts={'+'.join(several)}" if len(several) > 1 else ""


def tried_exchanges(model: TrainedModel) -> tuple[str, ...]:
    """Those that are compared if none is named: all where attention is one kernel."""
    spec = model.model
    return TYPES if isinstance(spec, TransformerSpec) and spec.fused_attention else TYPES[:1]


def checked_exchange(name: str, value: Any, model: TrainedModel) -> str:
    if value not in TYPES:
        raise ValueError(f"{name} must be one of {', '.join(TYPES)}, got {value!r}")
    if value != TYPES[0] and isinstance(model.model, TransformerSpec) and not model.model.fused_attention:
        raise ValueError(f"{name}={value} needs attention as one kernel, fused_attention=True")
    return str(value)


def heads_do_not_fit(columns: Columns, model: TrainedModel) -> Bools:
    rows = zip(columns["exchange"].tolist(), columns["cp"].tolist(), columns["tp"].tolist(), strict=True)
    wrong = [
        cp > 1 and split_of_sequences(model, {"exchange": exchange, "cp": cp, "tp": tp}) is None
        for exchange, cp, tp in rows
    ]
    return np.array(wrong, np.bool_)


def instances_do_not_fit(columns: Columns, model: TrainedModel) -> Bools:
    dp, instances = columns["dp"], columns["instances"]
    wrong: Bools = (instances > 1) & ((columns["zero"] == 0) | (dp % instances != 0) | (dp <= instances))
    return wrong


def zero(model: TrainedModel, settings: Settings) -> Transform | None:
    """ZeRO over the devices that have a parameter: along ``dp`` and ``cp``, and along ``ep`` for what is no expert."""
    if not settings["zero"]:
        return None
    return Zero(settings["zero"], next(axis for axis in ("dp", "ep", "cp") if settings[axis] > 1))


def overlap(model: TrainedModel, given: Settings) -> Transform | None:
    """Sums of gradients beside the backward; gathers of parameters, too, where these are shared out."""
    if not given["overlap"]:
        return None
    return overlap_of(given["dp"] * given["cp"], shared_out=given["zero"] == FULLY_SHARDED)


def deals_otherwise(settings: Settings) -> bool:
    return bool(settings["cp"] > 1 and settings["exchange"] != TYPES[0])
