"""`Plans`: all plans that fit, the best first, and how they were found."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from math import prod
from textwrap import wrap
from typing import Any, overload

import numpy as np

from parallelism.arrays import Floats, Ints
from parallelism.display import WIDTH, quantities
from parallelism.hardware import Reserve
from parallelism.planning.assembled_steps import figures_of
from parallelism.planning.dealing import spelled_out
from parallelism.planning.explanation import (
    SAME_PROGRAM,
    Need,
    longer_text,
    need_text,
    plans_html,
    refusals_text,
    settings_text,
    why,
    why_not,
)
from parallelism.planning.plan import Plan, Task
from parallelism.planning.promising import leaves_some_out
from parallelism.planning.settings import SETTINGS, checked_settings
from parallelism.planning.space import Choices, Refused, choices
from parallelism.training import Figures
from parallelism.training.training_run import precision_remark


class NoPlanFits(ValueError):
    """No plan fits the memory of a device; ``plans`` has what was looked at."""

    def __init__(self, message: str, plans: Plans) -> None:
        super().__init__(message)
        self.plans = plans


def _span(settings: Mapping[str, Any], order: str, axis: str) -> Any:
    """The devices from the first to the last of a group along an axis, given the axes from the outermost on."""
    return prod(settings[name] for name in order.split()[order.split().index(axis) :])


@dataclass(frozen=True, eq=False)
class Plans(Sequence[Plan]):
    """The plans that fit, the best first: those that were simulated fully, then the others, each by its seconds."""

    task: Task
    choices: Choices
    """The settings of the plans, in order."""
    bounds: Floats
    """By plan, the seconds of a step in which nothing shares links; or fewer, where equal devices communicate over
    different links and all of them count as the fastest.  Faults of hardware are not in it."""
    peaks: Ints
    """By plan, the memory of the fullest device."""
    full: Mapping[int, float]
    """The seconds of the full simulation, by the row of the plan, where it was simulated."""
    memory: float
    """The bytes of a device that may be used, for tensors and for what is reserved."""
    reserve: Reserve
    """What tensors cannot use of it."""
    considered: int
    """The combinations of settings that were looked at."""
    refused: Mapping[str, Refused]
    """Those that cannot be, by reason, and those that need too much memory, under ``memory``."""
    timed: int
    elapsed_seconds: float
    setup_seconds: float
    """Seconds before the first plan was timed: pieces are measured and priced, and memory is compared."""
    timing_seconds: float
    """Seconds in which plans were timed from their pieces."""
    gap: float
    """By which part of its time the first plan may be slower than the best at most; 0 if it is proved to be best."""
    fixed: Mapping[str, Any]
    """The settings that restricted the search."""
    again: Callable[..., Plans] = field(repr=False)
    """Searches the same task with other settings: ``again(tp=8)``."""
    known: dict[Hashable, Figures] = field(default_factory=dict, repr=False)
    """Figures of plans, by `step_key`."""
    one_by_one: Mapping[str, int] = field(default_factory=dict, repr=False)
    """How many plans are not put together from pieces, so that each was simulated by itself, by the reason."""
    tightest: Plan | None = field(default=None, repr=False)
    """If no plan fits, the one that needs least memory."""

    @property
    def simulated(self) -> int:
        """The number of plans that were simulated fully."""
        return len(self.full)

    @property
    def best(self) -> Plan:
        """The first plan.  `NoPlanFits` if there is none."""
        if not len(self):
            needs = self.needs()
            raise NoPlanFits(
                f"no plan fits: {need_text(needs, self.memory, self.reserve.text)}"
                if needs
                else self.refusals,
                self,
            )
        return self[0]

    @property
    def refusals(self) -> str:
        """Why no plan is possible: the reasons, the most frequent first, with their counts."""
        return refusals_text({reason: each.count for reason, each in self.refused.items()})

    @cached_property
    def front(self) -> tuple[Plan, ...]:
        """The plans than which no other is both faster and smaller, the fastest first."""
        least, found = np.inf, list[Plan]()
        for row in np.lexsort((self.peaks, self.seconds)).tolist():
            if self.peaks[row] < least:
                least = self.peaks[row]
                found.append(self._at(row))
        return tuple(found)

    @cached_property
    def seconds(self) -> Floats:
        """By plan, the seconds of a step: of the full simulation where there is one."""
        seconds = self.bounds.copy()
        for row, full in self.full.items():
            seconds[row] = full
        return seconds

    def __len__(self) -> int:
        return len(self.bounds)

    @overload
    def __getitem__(self, row: int) -> Plan: ...
    @overload
    def __getitem__(self, row: slice) -> tuple[Plan, ...]: ...
    def __getitem__(self, row: int | slice) -> Plan | tuple[Plan, ...]:
        if isinstance(row, slice):
            return tuple(map(self._at, range(len(self))[row]))
        if not -len(self) <= row < len(self):
            raise IndexError(
                f"there are {quantities.plural(len(self), 'plan')}, numbered from 0, the best first; got {row}"
            )
        return self._at(range(len(self))[row])

    def __iter__(self) -> Iterator[Plan]:
        return map(self._at, range(len(self)))

    def programs(self) -> Iterator[Plan]:
        """The plans, the best first; of those that are the same program, such as ZeRO-1 and ZeRO-2, the first only."""
        met = set[Hashable]()
        for plan in self:
            if plan.program not in met:
                met.add(plan.program)
                yield plan

    def where(self, **fixed: Any) -> Iterator[Plan]:
        """The plans with these settings, the best first.  ``ValueError`` for a setting that cannot be."""
        wanted = np.ones(len(self), np.bool_)
        for name, values in checked_settings(fixed, self.task.model).items():
            words = self.choices.words.get(name)
            numbers = [words.index(value) for value in values if value in words] if words else values
            wanted &= np.isin(self.choices[name], numbers)
        return map(self._at, np.flatnonzero(wanted).tolist())

    def with_settings(self, **fixed: Any) -> tuple[Plan | None, str]:
        """The best plan with these settings; or None, and the reason in words.

        Where no plan that was found has them, they are searched anew, beside the settings that were fixed before.
        """
        other = next(self.where(**fixed), None)
        if other is not None:
            return other, ""
        asked = settings_text(fixed)
        both = {**self.fixed, **spelled_out(fixed)}
        task, shared = self.task, self.task.hardware.fully_sharded
        possible = choices(task.model, task.devices, task.batch, both, fully_sharded=shared)
        refused = possible.refused
        if len(possible):
            found = self.again(simulations=1, **both)
            if len(found):
                return found[0], ""
            if found.tightest is not None:
                return (
                    None,
                    f"no plan with {asked} fits: {need_text(found.needs(), self.memory, self.reserve.text)}",
                )
            refused = found.refused  # also what the program does not allow
        reasons = ", ".join(f"{reason} ({each.count})" for reason, each in refused.items())
        return None, f"no plan has {asked}: {reasons}"

    def why(self, plan: Plan) -> str:
        """Why the first plan is before the second, or why ``plan`` is after the first, in a sentence.

        The second is the first of `programs` that is another program than the first plan.
        """
        first = self[0]
        if plan.program != first.program:
            return f"the first ({first.split}) takes {longer_text(first.account, plan.account)}"
        if plan.settings != first.settings:
            return f"the first ({first.split}) is the same program"
        second = next(islice(self.programs(), 1, None), None)
        return "no other plan fits" if second is None else why(plan.account, second.account)

    def why_not(self, plan: Plan, **fixed: Any) -> str:
        """Why the best plan with these settings comes after ``plan``, in a sentence."""
        if not fixed:
            raise TypeError("why_not takes the settings that are asked about, such as why_not(tp=8)")
        other, reason = self.with_settings(**fixed)
        if other is None:
            return reason
        asked = settings_text(fixed)
        if other.settings == plan.settings:
            return f"this plan has {asked}"
        if other.program == plan.program:
            return f"with {asked} the program is the same"
        return why_not(asked, other.account, plan.account)

    def why_between_nodes(self, plan: Plan, axis: str) -> str:
        """A sentence that says why the groups along an axis of ``plan`` cross links between nodes: how long the best
        plan takes whose groups stay inside a node.  Empty if those of ``plan`` stay inside one."""
        node = prod(self.task.hardware.links[0].extents)
        if plan.settings[axis] == 1 or _span(plan.settings, plan.settings["order"], axis) <= node:
            return ""
        asked = f"{axis} inside of a node of {node} devices"
        spans = np.zeros(len(self), np.int64)
        for number, order in enumerate(self.choices.words["order"]):
            spans = np.where(self.choices["order"] == number, _span(self.choices.columns, order, axis), spans)
        rows = np.flatnonzero(spans <= node)
        if not len(rows):
            return f"no plan that fits has {asked}"
        other = self[int(rows[0])]
        return f"the best plan with {asked} ({other.split}) takes {longer_text(other.account, plan.account)}"

    def needs(self) -> list[Need]:
        """If no plan fits: how much memory the smallest plan needs, and how much with settings that may need less.

        Such settings are those that were fixed, which are then free, and those with values that are tried only if they
        are named, as ZeRO-3.  A new search is made for each.  Empty if every combination is refused.
        """
        if self.tightest is None:
            return []
        found = [self.tightest.need]
        for name in (name for name in SETTINGS if SETTINGS[name].saves_memory and name in self.fixed):
            freed = self.again(
                simulations=0, **{key: value for key, value in self.fixed.items() if key != name}
            ).least
            if freed is not None:
                found.append(freed.need._replace(setting={name: freed.settings[name]}))
        for name in (
            name for name in SETTINGS if SETTINGS[name].last_resort is not None and name not in self.fixed
        ):
            found += self._need_with({name: SETTINGS[name].last_resort})
        return found

    def _need_with(self, setting: Mapping[str, Any]) -> list[Need]:
        """The memory that the smallest plan needs with a setting more; empty if it changes nothing."""
        assert self.tightest is not None
        (name,) = setting
        useful = SETTINGS[name].useful
        columns = {name: np.array([value]) for name, value in self.tightest.settings.items()}
        if useful is not None and not useful(columns).all():
            return []
        freed = self.again(simulations=0, **{**self.tightest.settings, **setting}).least
        return [] if freed is None else [freed.need._replace(setting=setting)]

    @property
    def least(self) -> Plan | None:
        """The plan that needs least memory, whether it fits or not; None if every combination is refused."""
        return self._at(int(self.peaks.argmin())) if len(self) else self.tightest

    def _at(self, row: int) -> Plan:
        return Plan(
            self.choices.settings(row),
            self.full.get(row, float(self.bounds[row])),
            float(self.bounds[row]),
            int(self.peaks[row]),
            row in self.full,
            self,
        )

    def figures_of(self, plan: Plan) -> Figures:
        """The figures of a plan, once for those that are the same program."""
        if plan.program not in self.known:
            self.known[plan.program] = figures_of(self.task, plan.settings)
        return replace(self.known[plan.program], run=plan.run)

    @property
    def _remark(self) -> str:
        return precision_remark(self.task.model.dtype, self.task.hardware)

    @property
    def _proved(self) -> str:
        """What is known of the first plan, in words."""
        if not len(self):
            return "none fits"
        timed = " of those that were timed" if leaves_some_out(self.refused) else ""
        return f"the first is {f'within {self.gap:.1%} of ' if self.gap else ''}the best{timed}"

    def _heading(self) -> str:
        load = self.task.model.load
        several = {1, 2} <= {*self.choices["zero"].tolist()}
        fit = f"{quantities.plural(len(self), 'plan')} fit{'s' * (len(self) == 1)}"
        return (
            f"training in {self.task.model.dtypes}{load and f', {load}'}: {fit} of {self.considered} "
            f"combinations; {self.timed} timed, {self.simulated} simulated in "
            f"{self.elapsed_seconds:.1f} s; {self._proved}{several * f'. {SAME_PROGRAM}'}"
        )

    def _repr_html_(self) -> str:
        front = {plan.split for plan in self.front} if len(self) else set()
        return plans_html(
            self._heading() + (f". {self._remark}" if self._remark else ""),
            [
                (plan.seconds, plan.peak_bytes, plan.is_simulated, plan.split, plan.split in front)
                for plan in islice(self.programs(), 16)
            ],
            self.memory,
            {reason: each.count for reason, each in self.refused.items()},
        )

    def __str__(self) -> str:
        lines = [*wrap(self._heading(), WIDTH), *wrap(self._remark, WIDTH)]
        for plan in islice(self.programs(), 10):
            lines.append(
                f"{quantities.seconds(plan.seconds):>9} {quantities.decimal_bytes(plan.peak_bytes):>8}  "
                f"{plan.split}"
            )
        lines += [f"refused {each.count}: {reason}" for reason, each in self.refused.items()]
        lines += [f"simulated one by one {count}: {reason}" for reason, count in self.one_by_one.items()]
        return "\n".join(lines)
