"""The space of plans: every combination of settings, as columns with a row for each plan, and what was refused.

Settings that change nothing are not varied: sequence parallelism without tensor parallelism, stages of ZeRO without
replicas, a schedule without a pipeline, orders of axes that are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from parallelism.arrays import Bools, Ints
from parallelism.events.columns import combined
from parallelism.models import TransformerSpec
from parallelism.pipelining.generators import SCHEDULES, ScheduleKind
from parallelism.planning.dealing import EXPERTS_OVER
from parallelism.planning.settings import AXES, MOST, SETTINGS, Setting, checked_settings
from parallelism.planning.trained import TrainedModel
from parallelism.training.state_sharding import FULLY_SHARDED

MOST_CHUNKS = 16
"""The most stages on a rank that are tried where nothing divides the blocks."""
MOST_COPIED = 8
"""The most devices that are tried with copies of heads of keys and values: those of a usual node."""
SHARED_BY = ("zero", "overlap", "instances")
"""The settings that say what replicas share out, and when they communicate."""
MOST_WHOLE = 32
"""The most microbatches of a pipeline that is simulated whole, if their rows are not given."""


@dataclass(frozen=True)
class Refused:
    """Combinations that cannot be: how many there were, and the first."""

    count: int
    example: Mapping[str, Any]


@dataclass(frozen=True)
class Choices:
    """Plans as columns: a row is a plan.  Words (schedule, recompute, order) are numbers of their `words`."""

    columns: Mapping[str, Ints]
    words: Mapping[str, tuple[str, ...]]
    refused: Mapping[str, Refused] = field(default_factory=dict)
    """By reason."""
    fully_sharded: bool = False
    """Whether plans with FSDP are among them that nobody asked for by name; those that promise most are simulated."""

    def __len__(self) -> int:
        return len(self.columns["pp"])

    def __getitem__(self, name: str) -> Ints:
        return self.columns[name]

    def settings(self, row: int) -> dict[str, Any]:
        """The settings of a plan, by name."""
        return {name: values[row] for name, values in self._values.items()}

    @cached_property
    def _values(self) -> dict[str, list[Any]]:
        """By setting, its value in each plan."""
        found: dict[str, list[Any]] = {}
        for name in SETTINGS:
            column = self.columns[name]
            if name in self.words:
                found[name] = [self.words[name][number] for number in column.tolist()]
            else:
                found[name] = (column.astype(np.bool_) if SETTINGS[name].is_switch else column).tolist()
        return found

    def take(self, rows: Ints | Bools) -> Choices:
        """Some of the plans."""
        return replace(self, columns={name: column[rows] for name, column in self.columns.items()})


class _Table:
    """Columns that are crossed with further settings, one after the other; what does not fit is refused."""

    def __init__(self, words: Mapping[str, tuple[str, ...]]) -> None:
        self.columns: dict[str, Ints] = {}
        self.words = words
        self.refused: dict[str, Refused] = {}

    def cross(self, **settings: Sequence[int]) -> None:
        """Every row with every one of these settings, whose columns belong together."""
        for name, values in settings.items():
            _check_whole(name, values)
        count = len(next(iter(settings.values())))
        rows = len(next(iter(self.columns.values()))) if self.columns else 1
        self.columns = {name: np.repeat(column, count) for name, column in self.columns.items()}
        self.columns |= {name: np.tile(np.array(values, np.int64), rows) for name, values in settings.items()}

    def refuse(self, reason: str, wrong: Bools) -> None:
        """Removes the rows that are ``wrong``, and counts them."""
        at = np.flatnonzero(wrong)
        if len(at):
            example = {name: self._said(name, int(column[at[0]])) for name, column in self.columns.items()}
            before = self.refused.get(reason)
            self.refused[reason] = Refused(
                len(at) + (before.count if before else 0), before.example if before else example
            )
            self.keep(~wrong)

    def keep(self, rows: Bools) -> None:
        self.columns = {name: column[rows] for name, column in self.columns.items()}

    def __getitem__(self, name: str) -> Ints:
        return self.columns[name]

    def _said(self, name: str, value: int) -> Any:
        return self.words[name][value] if name in self.words else value


def _check_whole(name: str, values: Sequence[Any]) -> None:
    """``TypeError`` for a setting with other values than a column can have."""
    for value in values:
        if not isinstance(value, int | np.integer | np.bool_):
            raise TypeError(
                f"the values of the setting {name} must be integers, or texts with is_text=True, got {value!r}"
            )


def choices(
    model: TrainedModel,
    devices: int,
    batch: int,
    fixed: Mapping[str, Any],
    *,
    copied: bool = True,
    fully_sharded: bool = False,
) -> Choices:
    """The plans of a model on so many devices.  ``fixed`` gives one value, or several, of some `SETTINGS`.

    A combination is refused where the extents do not divide what is split, where a microbatch does not divide the rows
    of a replica, and where a schedule does not fit.  It is counted under the first reason that it meets, once, before
    the settings that come after it are varied.  Tensor parallelism over more devices than the model has heads of keys and
    values is tried if these may be ``copied``, over at most `MOST_COPIED` devices unless ``tp`` is fixed: each number of
    copies has pieces of its own.  If the software is ``fully_sharded``, plans of one stage are tried with FSDP, too, unless
    `SHARED_BY` says what is shared out.

    ``ValueError`` for a setting that does not exist, and for a value that it cannot have; and for more than `MOST`.
    """
    for what, number in (("devices", devices), ("batch", batch), ("blocks", model.blocks)):
        if number > MOST[what]:
            raise ValueError(f"{what} must be at most {MOST[what]:,} in a search for plans, got {number}")
    given = checked_settings(fixed, model)
    words = {
        setting.name: tuple(given.get(setting.name) or _tried(setting, model))
        for setting in SETTINGS.records.values()
        if setting.is_text
    }
    table = _Table(words)
    _split(table, model, devices, given, copied=copied)
    _pipelined(table, model, given)
    table.cross(microbatch=given.get("microbatch") or _divisors(batch))
    rows = table["dp"] * table["ep"] * table["microbatch"]
    table.refuse("replicas and microbatches do not divide the batch", batch % rows != 0)
    table.columns["count"] = batch // (table["dp"] * table["ep"] * table["microbatch"])
    if model.is_whole and "microbatch" not in given:
        table.refuse(
            "stages of a program without blocks that are alike are simulated, with at most "
            f"{MOST_WHOLE} microbatches: microbatch= gives their rows",
            (table["pp"] > 1) & (table["count"] > MOST_WHOLE),
        )
    for setting in SETTINGS.options:
        _with_option(table, setting, model, given)
    if isinstance(model.model, TransformerSpec) and "ep" not in given:
        # ZeRO over ep alone splits the rows of the table of tokens, which tp would split by itself.
        shared = (table["zero"] > 0) & (table["ep"] > 1) & (table["dp"] * table["tp"] == 1)
        table.refuse(
            "ep does not divide the vocabulary that ZeRO shares out, and such plans are searched where ep is fixed",
            shared & (model.model.vocabulary % table["ep"] != 0),
        )
    interleaved = [i for i, name in enumerate(words["schedule"]) if SCHEDULES[name].is_interleaved]
    grouped = np.isin(table["schedule"], interleaved)
    table.refuse(
        "pp does not divide the microbatches of an interleaved schedule",
        grouped & (table["pp"] > 1) & (table["count"] % table["pp"] != 0),
    )
    shared = fully_sharded and not any(given.get(name) for name in SHARED_BY)
    if shared:
        _share_out(table, model)
    _ordered(table)
    return Choices(table.columns, words, table.refused, shared)


def _share_out(table: _Table, model: TrainedModel) -> None:
    """Adds to each plan of one stage with ZeRO-1 that with FSDP.

    Such a plan is simulated by itself, which takes long where layers are not alike: there none is added, and this is told.
    """
    once = (table["pp"] == 1) & (table["dp"] > 1) & (table["zero"] == 1)
    more = {name: column[once] for name, column in table.columns.items()}
    before, count = len(once), np.count_nonzero(once)
    more |= {"zero": np.full(count, FULLY_SHARDED), "overlap": np.ones(count, np.int64)}
    table.columns = {name: np.concatenate([column, more[name]]) for name, column in table.columns.items()}
    if not model.layers_are_alike:
        table.refuse(
            "FSDP of layers that are not alike, or of adapters, is searched where fsdp or zero=3 is fixed",
            np.arange(before + count) >= before,
        )


def _split(
    table: _Table, model: TrainedModel, devices: int, given: Mapping[str, Sequence[int]], *, copied: bool
) -> None:
    """The extents of the axes."""
    sizes = _divisors(devices)
    table.cross(tp=given.get("tp") or sizes)
    table.refuse("tp does not divide the devices", devices % table["tp"] != 0)
    for what, size in model.split_by_tp:
        table.refuse(f"tp does not divide {what}", size % table["tp"] != 0)
    if model.key_value_heads is not None:
        _deal_heads(table, model.key_value_heads, copied=copied, fixed="tp" in given)
    if model.rows_of_expert and model.sequence and "tp" not in given and any(given.get("sp") or [1]):
        splits = model.sequence % table["tp"] == 0  # so that there is sequence parallelism
        table.refuse(
            "tp does not divide the rows of an expert, and such plans are searched where tp is fixed",
            splits & (model.rows_of_expert % table["tp"] != 0),
        )
    table.cross(cp=given.get("cp") or [1])
    if model.sequence is not None:
        table.refuse("cp does not divide the sequence", model.sequence % table["cp"] != 0)
    if model.has_states:
        table.refuse("cp does not split the sequences of linear attention", table["cp"] > 1)
    table.cross(ep=given.get("ep") or _divisors(model.experts or 1))
    table.refuse("ep does not divide the experts", (model.experts or 1) % table["ep"] != 0)
    table.cross(pp=given.get("pp") or sizes)
    inside = table["tp"] * table["cp"] * table["ep"] * table["pp"]
    axes = "tp, cp, ep and pp" if model.experts else "tp, cp and pp"
    table.refuse(f"{axes} do not divide the devices", devices % inside != 0)
    table.columns["dp"] = devices // (table["tp"] * table["cp"] * table["ep"] * table["pp"])
    if "dp" in given:
        table.refuse("dp is not the one that was asked for", ~np.isin(table["dp"], given["dp"]))


def _deal_heads(table: _Table, heads: int, *, copied: bool, fixed: bool) -> None:
    """Refuses tensor parallelism that so many heads of keys and values cannot be dealt to, or not copied for."""
    tp = table["tp"]
    if not copied:
        table.refuse("tp does not divide heads of keys and values", heads % tp != 0)
        return
    table.refuse(
        "tp does not divide heads of keys and values, and is no multiple of them",
        (heads % tp != 0) & (tp % heads != 0),
    )
    if not fixed:
        tp = table["tp"]
        table.refuse(
            f"copies of heads of keys and values for more than {MOST_COPIED} devices are searched where tp is fixed",
            (tp > heads) & (tp > MOST_COPIED),
        )


def _pipelined(table: _Table, model: TrainedModel, given: Mapping[str, Sequence[int]]) -> None:
    """Schedules, with their numbers of stages on a rank."""
    chunks = given.get("chunks")
    found: list[tuple[int, int]] = []
    for number, name in enumerate(table.words["schedule"]):
        own = _chunks_of(SCHEDULES[name], model, chunks)
        found += [(number, each) for each in own if chunks is None or each in chunks]
    if not found:
        raise ValueError(f"chunks={chunks} does not fit the schedule {' or '.join(table.words['schedule'])}")
    table.cross(schedule=[number for number, _ in found], chunks=[each for _, each in found])
    alone = table["pp"] == 1
    plain = found[0] if "schedule" in given or chunks else (0, 1)
    table.keep(~alone | ((table["schedule"] == plain[0]) & (table["chunks"] == plain[1])))
    if model.blocks:
        _blocks_in_stages(table, model, given)


def _blocks_in_stages(table: _Table, model: TrainedModel, given: Mapping[str, Sequence[int]]) -> None:
    """Refuses stages that do not fit the blocks, and those that would be simulated one by one."""
    stages = table["pp"] * table["chunks"]
    table.refuse("there are more stages than blocks", stages > model.blocks)
    if model.first_alike and not model.takes_turns and "pp" not in given:
        stages = table["pp"] * table["chunks"]
        others = (stages > 1) & (model.blocks // stages <= model.first_alike)
        table.refuse("the first stage has no block that is like those of others", others)
    stages = table["pp"] * table["chunks"]
    uneven = (stages > 1) & (model.blocks % stages != 0)
    slow = model.is_whole and "pp" not in given  # each plan of several stages of such a program takes seconds
    dealt = [i for i, name in enumerate(table.words["schedule"]) if _deals_unevenly(SCHEDULES[name])]
    fixed = (table["chunks"] > 1) & ~np.isin(table["schedule"], dealt)
    # Where pp divides the blocks there are even stages, and of others the fewest stages suffice.
    if given.get("chunks") is None:
        most = -(-model.blocks // stages)
        enough = -(-model.blocks // (table["pp"] * most)) == table["chunks"]
        fixed |= (table["chunks"] > 1) & ((model.blocks % table["pp"] == 0) | ~enough)
    table.refuse("stages do not divide the blocks", uneven & (fixed | slow))


def _chunks_of(kind: ScheduleKind, model: TrainedModel, given: Sequence[int] | None) -> Sequence[int]:
    """The numbers of stages on a rank that are tried under a schedule."""
    if not kind.is_interleaved:
        return [kind.fewest_chunks]
    if given:
        return given
    if not model.blocks:
        return [2, 4]
    found = {2, *_divisors(model.blocks)[1:]}
    if _deals_unevenly(kind):
        found |= {each for each in range(2, MOST_CHUNKS + 1) if 2 * each <= model.blocks}
    return sorted(found)


def _deals_unevenly(kind: ScheduleKind) -> bool:
    """Whether the stages of a rank may have different numbers of blocks."""
    return kind.is_interleaved and not kind.is_v_shaped


def _with_option(
    table: _Table, setting: Setting, model: TrainedModel, given: Mapping[str, Sequence[Any]]
) -> None:
    """Crosses the rows with the values of a setting, which is 0 where it is not useful."""
    name = setting.name
    if name not in given and setting.derived is not None:
        table.columns[name] = setting.derived(table.columns, model)
        return
    values = given.get(name) or _tried(setting, model)
    numbers = range(len(values)) if setting.is_text else values
    useful = None if setting.useful is None else np.repeat(setting.useful(table.columns), len(values))
    table.cross(**{name: numbers})
    if useful is not None:
        if 0 in numbers:
            table.keep(useful | (table[name] == 0))
        else:
            table.refuse(setting.needs, ~useful)
    if setting.differs is not None and 0 in numbers:
        table.keep((table[name] == 0) | setting.differs(table.columns, model))
    if setting.conflict is not None:
        words = {name: np.array(values)[table[name]]} if setting.is_text else {}
        table.refuse(setting.conflict_reason, setting.conflict({**table.columns, **words}, model))


def _tried(setting: Setting, model: TrainedModel) -> Sequence[Any]:
    """The values of a setting that are tried if none is named."""
    return setting.tried(model) if setting.tried is not None else (0,)


def _ordered(table: _Table) -> None:
    """The orders of the axes that have more than one device; of equal orders the first."""
    orders = table.words["order"]
    table.cross(order=range(len(orders)))
    many = np.stack([table[axis] > 1 for axis in AXES])
    pattern, number = np.unique(many, axis=1, return_inverse=True)
    first = np.zeros((pattern.shape[1], len(orders)), np.bool_)
    for i, extents in enumerate(pattern.T):
        split = [axis for axis, more in zip(AXES, extents, strict=True) if more]
        seen = set()
        for j, order in enumerate(orders):
            own = tuple(axis for axis in order.split() if axis in split)
            first[i, j] = own not in seen
            seen.add(own)
    table.keep(first[number.ravel(), table["order"]])


def _divisors(number: int) -> list[int]:
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return sorted({*small, *(number // i for i in small)})


def different_programs(possible: Choices) -> tuple[Ints, Ints]:
    """One row of each program, and for every row the number of its program.

    Rows of one program differ only in settings that change nothing: `step_key` tells programs apart.
    """
    columns = [
        SETTINGS[name].column_of(column) if name in SETTINGS else column
        for name, column in possible.columns.items()
    ]
    key = combined(*columns)
    _, first, number = np.unique(key, return_index=True, return_inverse=True)
    return first, number


def refusing(possible: Choices, rows_of: Mapping[str, Ints]) -> tuple[Choices, Ints]:
    """The plans without those that are refused, by the reason; and the rows of those that stay."""
    refused = {
        reason: Refused(len(rows), possible.settings(int(rows[0]))) for reason, rows in rows_of.items()
    }
    kept = np.setdiff1d(np.arange(len(possible)), np.concatenate([*rows_of.values()]))
    return replace(possible.take(kept), refused={**possible.refused, **refused}), kept


def as_for(model: TrainedModel, possible: Choices) -> Choices:
    """The plans as a model with other layers has them: devices that split experts are replicas where it has none, and
    attention that is not there does not run again."""
    columns, words = dict(possible.columns), dict(possible.words)
    if not model.experts:
        columns |= {"dp": columns["dp"] * columns["ep"], "ep": np.ones_like(columns["ep"])}
        words["experts_over"] = (EXPERTS_OVER[0],) * len(words["experts_over"])
    again = model.recomputed
    words["recompute"] = tuple(kind if kind in again else "none" for kind in words["recompute"])
    return Choices(columns, words, possible.refused)
