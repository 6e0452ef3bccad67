"""`Setting`: all that planning knows of one setting of a plan; and `SETTINGS`, the table of these records.

A new setting is a record here, and the transform that it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import numpy as np

from parallelism.arrays import Bools, Ints, plain_number
from parallelism.display.quantities import short_errors
from parallelism.pipelining.generators import SCHEDULES
from parallelism.planning.dealing import (
    EXPERTS_OVER,
    Columns,
    Settings,
    checked_exchange,
    checked_experts_over,
    deals_otherwise,
    experts,
    experts_do_not_fit,
    experts_over_words,
    heads_do_not_fit,
    instances_do_not_fit,
    overlap,
    replicas,
    sequences,
    spelled_out,
    tried_exchanges,
    zero,
)
from parallelism.planning.trained import TrainedModel
from parallelism.spelling import did_you_mean
from parallelism.training.layer_blocks import MOST_BLOCKS
from parallelism.training.state_sharding import FULLY_SHARDED
from parallelism.transforms import (
    Recompute,
    SequenceParallel,
    TensorOverlap,
    TensorParallel,
    Transform,
)
from parallelism.transforms.words import SHORTHANDS

AXES = ("pp", "dp", "ep", "cp", "tp")
"""The mesh axes of a plan, outermost first in Megatron-LM's order."""
MOST = {"devices": 1 << 20, "batch": 10**9, "blocks": MOST_BLOCKS}
"""What is planned for at most: beyond it, products of settings would not fit 64 bits, or a search take hours."""
TRIED_SCHEDULES = ("1f1b", "interleaved_1f1b")
"""GPipe takes as long as 1F1B, and more memory."""


def no_words(settings: Settings) -> str:
    """What the text of a plan says of a setting that it does not show."""
    return ""


def no_transform(model: TrainedModel, settings: Settings) -> Transform | None:
    """The transform of a setting that makes none by itself."""
    return None


@dataclass(frozen=True)
class Setting:
    """One setting of a plan: its values, when they are possible, and what they change."""

    name: str
    check: Callable[[str, Any, TrainedModel], Any]
    """``(name, value, model)``: a value that somebody names, as plans have it: an integer, or a text if it ``is_text``.
    ``ValueError`` for a wrong one."""
    tried: Callable[[TrainedModel], Sequence[Any]] | None = None
    """The values that are tried if none is named; None: they follow from other settings."""
    is_switch: bool = False
    """Whether it is on or off."""
    is_text: bool = False
    """Whether its values are texts.  The columns of a space then have their numbers."""
    useful: Callable[[Columns], Bools] | None = None
    """By row, whether it may have another value than 0; None: in every row."""
    differs: Callable[[Columns, TrainedModel], Bools] | None = None
    """By row, whether another value than 0 makes another plan; the others are left out.  None: in every row."""
    needs: str = ""
    """Why the other rows are refused, if 0 is not among the values that are named."""
    derived: Callable[[Columns, TrainedModel], Ints] | None = None
    """By row, its value if none is named."""
    conflict: Callable[[Columns, TrainedModel], Bools] | None = None
    """By row, whether its value does not fit the model; ``conflict_reason`` says why."""
    conflict_reason: str = ""
    transform: Callable[[TrainedModel, Settings], Transform | None] = no_transform
    """The transform that it makes; None where it makes none."""
    words: Callable[[Settings], str] = no_words
    """What the text of a plan says of it; empty for what is usual."""
    place_in_text: int = 80
    """Its words stand before those of settings with a larger number."""
    flag: str = ""
    """The flag of Megatron-LM that restricts it, as a field of `parallelism.training.MegatronFlags`."""
    from_pieces: Callable[[Any], bool] | None = None
    """Whether a plan with this value may be put together from pieces; None: only if it is off.  Other plans are
    simulated one by one."""
    same_program: Mapping[Any, Any] = field(default_factory=dict, hash=False)
    """Values that give the program of another value in a pipeline, and that value."""
    saves_memory: bool = False
    """Whether other values of it are searched where no plan fits."""
    last_resort: Any = None
    """A value that is tried only where no plan fits."""

    def program_of(self, value: Any) -> Any:
        """The value that stands for all with the same program."""
        return self.same_program.get(value, value)

    def column_of(self, values: Ints) -> Ints:
        """`program_of` for a column."""
        for value, other in self.same_program.items():
            values = np.where(values == value, other, values)
        return values

    def is_from_pieces(self, value: Any) -> bool:
        """Whether a plan with this value may be put together from pieces."""
        return not value if self.from_pieces is None else self.from_pieces(value)


class SettingTable:
    """All settings of plans: those of the package, and those that were registered.  It iterates over their names.

    The order is that in which a space is crossed with them: of plans that take as long, the first is told first.
    """

    def __init__(self, *own: Setting) -> None:
        self.records = {setting.name: setting for setting in own}
        """By name."""
        self.own = frozenset(self.records)
        """The names of those of the package."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.records)

    def __contains__(self, name: object) -> bool:
        return name in self.records

    def __getitem__(self, name: str) -> Setting:
        return self.records[name]

    @property
    def registered(self) -> list[Setting]:
        """Those from outside."""
        return [setting for setting in self.records.values() if setting.name not in self.own]

    @property
    def options(self) -> list[Setting]:
        """Those that are neither part of the mesh nor of the pipeline."""
        return [
            setting for setting in self.records.values() if setting.name not in (*AXES, *PIPELINE, "order")
        ]

    @property
    def in_text(self) -> list[Setting]:
        """In the order of their words in the text of a plan."""
        return sorted(self.records.values(), key=lambda setting: setting.place_in_text)

    def with_flag(self) -> dict[str, str]:
        """The names of settings by the flags of Megatron-LM that restrict them."""
        return {setting.flag: setting.name for setting in self.records.values() if setting.flag}


def transforms_of(model: TrainedModel, settings: Settings) -> list[Transform]:
    """The transforms of the given settings of a plan, without its pipeline; mixed precision, if the model has it."""
    found: list[Transform] = [model.precision] if model.precision is not None else []
    for name in settings:
        transform = SETTINGS[name].transform(model, settings)
        if transform is not None:
            found.append(transform)
    return found


def split_text(settings: Settings) -> str:
    """A plan in a few words: what is not usual in its settings, and its microbatch."""
    words = [setting.words(settings) for setting in SETTINGS.in_text]
    return " ".join(filter(None, words))


@short_errors
def checked_settings(fixed: Mapping[str, Any], model: TrainedModel) -> dict[str, list[Any]]:
    """The values that each setting may have.  ``ValueError`` for a setting, or a value, that there is not."""
    fixed = spelled_out(fixed)
    check_names(fixed)
    return {name: _values(SETTINGS[name], value, model) for name, value in fixed.items() if value is not None}


@short_errors
def check_names(fixed: Iterable[str]) -> None:
    """``ValueError`` for a setting that there is not."""
    for name in fixed:
        if name not in SETTINGS:
            known = (*SETTINGS, *SHORTHANDS)
            hint = did_you_mean(name, known) or f"; they are {', '.join(known)}"
            raise ValueError(f"a plan has no setting {name!r}{hint}")


def _values(setting: Setting, value: Any, model: TrainedModel) -> list[Any]:
    several = list(value) if isinstance(value, list | tuple | set | range) else [value]
    if not several:
        raise ValueError(f"{setting.name} must have at least one value")
    return list(dict.fromkeys(setting.check(setting.name, plain_number(each), model) for each in several))


def register_setting(setting: Setting) -> None:
    """Add a setting to those that a search combines.

    It is then varied, named as an argument of `find_plan`, applied by its transform, and told in plans.

    ``ValueError`` for a name that another setting has.
    """
    if setting.name in SETTINGS:
        raise ValueError(f"a setting {setting.name!r} is there already")
    SETTINGS.records[setting.name] = setting


def forget_setting(name: str) -> None:
    """Take out a setting that was registered.  ``ValueError`` for a name that was not."""
    if name in SETTINGS.own or name not in SETTINGS:
        raise ValueError(f"no setting {name!r} was registered")
    del SETTINGS.records[name]


# -- checks of one value -----------------------------------------------------------------------------------------------


def count_of(most: str) -> Callable[[str, Any, TrainedModel], int]:
    """The check of a number from 1 to one of `MOST`."""

    def check(name: str, value: Any, model: TrainedModel) -> int:
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if value > MOST[most]:
            raise ValueError(f"{name} must be at most {MOST[most]:,}, got {value}")
        return value

    return check


def switch(name: str, value: Any, model: TrainedModel) -> int:
    """The check of a setting that is on or off."""
    if value not in (True, False):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return int(value)


def _stage_of_zero(name: str, value: Any, model: TrainedModel) -> int:
    if value not in (0, 1, 2, 3) or isinstance(value, bool):
        raise ValueError(f"zero must be 0, 1, 2 or 3, got {value!r}")
    return int(value)


def _schedule(name: str, value: Any, model: TrainedModel) -> str:
    known = SCHEDULES.find(value) if isinstance(value, str) else None
    if known is None or not known.trains_whole_model:
        fit = [kind.name for kind in SCHEDULES.kinds.values() if kind.trains_whole_model]
        raise ValueError(f"schedule must be one that trains the whole model: {', '.join(fit)}; got {value!r}")
    return known.name


def _recompute(name: str, value: Any, model: TrainedModel) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text, got {value!r}")
    if value not in model.recomputed:
        raise ValueError(f"recompute must be {' or '.join(model.recomputed)}, got {value!r}")
    return value


def _order(name: str, value: Any, model: TrainedModel) -> str:
    axes = tuple(value.replace("-", " ").split()) if isinstance(value, str) else ()
    inner = next((axis for axis in axes if axis in ("cp", "tp")), None)
    if "ep" not in axes and inner is not None:  # experts lie outside of cp and tp unless it is said
        axes = (*axes[: axes.index(inner)], "ep", *axes[axes.index(inner) :])
    if axes not in permutations(AXES):
        raise ValueError(f"order must name {', '.join(AXES)}, outermost first, got {value!r}")
    return " ".join(axes)


# -- words -------------------------------------------------------------------------------------------------------------


def _axis_words(axis: str) -> Callable[[Settings], str]:
    def words(settings: Settings) -> str:
        return f"{axis}={settings[axis]}" if settings[axis] > 1 else ""

    return words


def _schedule_words(settings: Settings) -> str:
    if settings["pp"] == 1 or settings["schedule"] == "1f1b":
        return ""
    return f"{settings['schedule']}x{settings['chunks']}" if settings["chunks"] > 1 else settings["schedule"]


def _order_words(settings: Settings) -> str:
    axes = settings["order"].split()
    return "" if axes[0] == "pp" and axes[-1] == "tp" else f"order={'-'.join(axes)}"


# -- the settings of the package ---------------------------------------------------------------------------------------


def always(value: Any) -> bool:
    """True: every value may be put together from pieces."""
    return True


def _has_replicas(columns: Columns) -> Bools:
    found: Bools = columns["dp"] * columns["ep"] * columns["cp"] > 1
    return found


def _sp_as_usual(columns: Columns, model: TrainedModel) -> Ints:
    """Sequence parallelism wherever it can be: it moves no more bytes, and saves memory.  A program may have nothing
    that it can split."""
    if model.sequence is None:
        return np.zeros(len(columns["tp"]), np.int64)
    can_be: Bools = (columns["tp"] > 1) & (model.sequence % columns["tp"] == 0)
    return can_be.astype(np.int64)


def _lighter_with_head(columns: Columns, model: TrainedModel) -> Bools:
    """Where the stage with most work has less if the head counts as the layers that it costs."""
    stages, number = np.unique(columns["pp"] * columns["chunks"], return_inverse=True)
    lighter = []
    for each in stages.tolist():
        if not 1 < each <= model.blocks:
            lighter.append(False)
            continue
        even, balanced = (model.layers_of(each, balanced=way) for way in (False, True))
        works = [max(*counts[:-1], counts[-1] + model.head) for counts in (even, balanced)]
        lighter.append(works[1] < works[0])
    found: Bools = np.array(lighter, np.bool_)[number]
    return found


def _sp_does_not_divide(columns: Columns, model: TrainedModel) -> Bools:
    if model.sequence is None:
        return np.zeros(len(columns["tp"]), np.bool_)
    wrong: Bools = (columns["sp"] > 0) & (model.sequence % columns["tp"] != 0)
    return wrong


def _axis(name: str, place: int, transform: Any = no_transform, flag: str = "") -> Setting:
    return Setting(
        name,
        count_of("devices"),
        transform=transform,
        words=_axis_words(name),
        place_in_text=place,
        flag=flag,
        from_pieces=always,
    )


PIPELINE = ("schedule", "chunks", "microbatch")
"""The settings of the pipeline beside its stages."""

SETTINGS = SettingTable(
    _axis("pp", 10, flag="pipeline_model_parallel_size"),
    _axis("dp", 11, replicas),
    _axis(
        "cp",
        12,
        sequences,
        "context_parallel_size",
    ),
    _axis("ep", 12, experts),
    _axis(
        "tp",
        13,
        lambda model, given: TensorParallel("tp") if given["tp"] > 1 else None,
        "tensor_model_parallel_size",
    ),
    Setting("chunks", count_of("devices"), from_pieces=always),
    Setting(
        "schedule",
        _schedule,
        lambda model: TRIED_SCHEDULES,
        is_text=True,
        words=_schedule_words,
        place_in_text=50,
        from_pieces=always,
    ),
    Setting(
        "balanced",
        switch,
        lambda model: (0, 1) if model.head else (0,),
        is_switch=True,
        useful=lambda columns: columns["pp"] > 1,
        differs=_lighter_with_head,
        needs="the layers of several stages are balanced, pp above 1",
        words=lambda given: "balanced" if given["balanced"] else "",
        place_in_text=52,
        from_pieces=always,
    ),
    Setting(
        "microbatch",
        count_of("batch"),
        words=lambda given: f"mb={given['microbatch']}",
        place_in_text=99,
        flag="micro_batch_size",
        from_pieces=always,
    ),
    Setting(
        "recompute",
        _recompute,
        lambda model: tuple(model.recomputed),
        is_text=True,
        transform=lambda model, given: (
            None if given["recompute"] == "none" else Recompute(model.recomputed[given["recompute"]])
        ),
        words=lambda given: "" if given["recompute"] == "none" else f"recompute={given['recompute']}",
        place_in_text=60,
        flag="recompute_granularity",
        from_pieces=always,
        saves_memory=True,
    ),
    # Each plan of stage 3 is simulated by itself, which takes seconds for a large model: it is not tried unless named.
    Setting(
        "zero",
        _stage_of_zero,
        lambda model: (0, 1, 2),
        useful=_has_replicas,
        needs="ZeRO needs replicas, dp, ep or cp above 1",
        transform=zero,
        words=lambda given: f"zero={given['zero']}" if given["zero"] else "",
        place_in_text=30,
        from_pieces=lambda stage: stage < FULLY_SHARDED,
        same_program={2: 1},
        saves_memory=True,
        last_resort=FULLY_SHARDED,
    ),
    Setting(
        "exchange",
        checked_exchange,
        tried_exchanges,
        is_text=True,
        useful=lambda columns: columns["cp"] > 1,
        conflict=heads_do_not_fit,
        conflict_reason="cp does not divide the heads of keys and values that exchange=a2a deals out",
        words=lambda given: f"exchange={given['exchange']}" if deals_otherwise(given) else "",
        place_in_text=14,
        flag="cp_comm_type",
        from_pieces=always,
    ),
    Setting(
        "instances",
        count_of("devices"),
        lambda model: (1,),
        conflict=instances_do_not_fit,
        conflict_reason="instances need ZeRO, and dp in as many groups of several devices",
        words=lambda given: f"instances={given['instances']}" if given["instances"] > 1 else "",
        place_in_text=31,
        flag="num_distributed_optimizer_instances",
        from_pieces=always,
    ),
    Setting(
        "overlap",
        switch,
        lambda model: (0,),
        is_switch=True,
        useful=lambda columns: columns["dp"] > 1,
        needs="overlap needs replicas, dp above 1",
        transform=overlap,
        words=lambda given: "overlap" if given["overlap"] else "",
        place_in_text=40,
        flag="overlap_grad_reduce",
    ),
    Setting(
        "sp",
        switch,
        is_switch=True,
        useful=lambda columns: columns["tp"] > 1,
        needs="sequence parallelism needs tp above 1",
        derived=_sp_as_usual,
        conflict=_sp_does_not_divide,
        conflict_reason="tp does not divide the sequence",
        transform=lambda model, given: SequenceParallel("tp") if given["sp"] else None,
        words=lambda given: "sp" if given["sp"] else "",
        place_in_text=20,
        flag="sequence_parallel",
        from_pieces=always,
    ),
    Setting(
        "tp_overlap",
        switch,
        lambda model: (0,),
        is_switch=True,
        useful=lambda columns: columns["tp"] > 1,
        needs="tp_overlap needs tp above 1",
        conflict=lambda columns, model: (columns["tp_overlap"] > 0) & (columns["sp"] == 0),
        conflict_reason="tp_overlap needs sequence parallelism, sp",
        transform=lambda model, given: TensorOverlap("tp") if given["tp_overlap"] else None,
        words=lambda given: "tp_overlap" if given["tp_overlap"] else "",
        place_in_text=21,
        flag="tp_comm_overlap",
    ),
    Setting(
        "experts_over",
        checked_experts_over,
        lambda model: EXPERTS_OVER[:1],
        is_text=True,
        useful=lambda columns: columns["cp"] * columns["tp"] > 1,
        conflict=experts_do_not_fit,
        conflict_reason="the devices along experts_over do not divide the experts, or tp is among them without sp, or cp "
        "without tp",
        words=experts_over_words,
        place_in_text=13,
        from_pieces=always,
    ),
    Setting(
        "order",
        _order,
        lambda model: (" ".join(AXES),),
        is_text=True,
        words=_order_words,
        place_in_text=70,
        from_pieces=always,
    ),
)
"""The settings of a plan: extents of mesh axes, how attention sees sequences that are split, which axes split experts, stages
on a rank, the schedule of the pipeline, rows of a microbatch, what is computed again, the stage of ZeRO, how many groups of
devices hold each what it shares out, whether gradients are summed over dp during the last backward, sequence parallelism,
whether collectives over tp run beside their products, and the mesh axes, outermost first."""
