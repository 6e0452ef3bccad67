"""`Plans`: all plans that fit, the best first, and how they were found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from parallelism.display import quantities
from parallelism.planning.plan import Plan, Task
from parallelism.planning.space import SETTINGS, Choices, Refused, checked_settings, choices

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class NoPlanFits(ValueError):
    """No plan fits the memory of a device; ``plans`` has what was looked at."""

    def __init__(self, message: str, plans: Plans) -> None:
        super().__init__(message)
        self.plans = plans


@dataclass(frozen=True, eq=False)
class Plans(Sequence[Plan]):
    """The plans that fit, the best first: those that were simulated fully, then the others, each by its seconds."""

    task: Task
    choices: Choices
    """The settings of the plans, in order."""
    bounds: Floats
    """By plan, the seconds of a step in which nothing shares links."""
    peaks: Ints
    """By plan, the memory of the fullest device."""
    full: Mapping[int, float]
    """The seconds of the full simulation, by the place of the plan, where it was simulated."""
    memory: float
    """The bytes of a device that may be used."""
    considered: int
    """The combinations of settings that were looked at."""
    refused: Mapping[str, Refused]
    """Those that cannot be, by reason, and those that need too much memory, under ``memory``."""
    timed: int
    elapsed_seconds: float
    setup_seconds: float
    """CPU seconds before the first plan was timed: pieces are measured and priced, and memory is compared."""
    timing_seconds: float
    """CPU seconds in which plans were timed from their pieces."""
    gap: float
    """By which part of its time the first plan may be slower than the best at most; 0 if it is proved to be best."""
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
            least = self.tightest
            why = "every combination of settings is refused" if least is None else (
                f"the smallest plan, {least}, needs {quantities.nbytes(least.peak_bytes)} on its fullest device, which "
                f"has {quantities.nbytes(self.memory)}")
            raise NoPlanFits(f"no plan fits: {why}", self)
        return self[0]

    @cached_property
    def front(self) -> tuple[Plan, ...]:
        """The plans than which no other is both faster and smaller, the fastest first."""
        least, found = np.inf, list[Plan]()
        for place in np.lexsort((self.peaks, self.seconds)).tolist():
            if self.peaks[place] < least:
                least = self.peaks[place]
                found.append(self._at(place))
        return tuple(found)

    @cached_property
    def seconds(self) -> Floats:
        """By plan, the seconds of a step: of the full simulation where there is one."""
        seconds = self.bounds.copy()
        for place, full in self.full.items():
            seconds[place] = full
        return seconds

    def __len__(self) -> int:
        return len(self.bounds)

    @overload
    def __getitem__(self, place: int) -> Plan: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Plan, ...]: ...
    def __getitem__(self, place: int | slice) -> Plan | tuple[Plan, ...]:
        if isinstance(place, slice):
            return tuple(map(self._at, range(len(self))[place]))
        return self._at(range(len(self))[place])

    def __iter__(self) -> Iterator[Plan]:
        return map(self._at, range(len(self)))

    def where(self, **fixed: Any) -> Iterator[Plan]:
        """The plans with these settings, the best first.  ``ValueError`` for a setting that cannot be."""
        wanted = np.ones(len(self), np.bool_)
        for name, values in checked_settings(fixed).items():
            words = self.choices.words.get(name)
            wanted &= np.isin(self.choices[name], [
                words.index(value) if value in words else -1 for value in values] if words else values)
        return map(self._at, np.flatnonzero(wanted).tolist())

    def why_not(self, plan: Plan, **fixed: Any) -> str:
        """Why the best plan with these settings comes after ``plan``, in a sentence."""
        wanted = " ".join(f"{name}={value}" for name, value in fixed.items())
        other = next(self.where(**fixed), None)
        if other is not None:
            if other.settings == plan.settings:
                return f"this plan has {wanted}"
            more = other.seconds / plan.seconds - 1
            different = ", ".join(f"{name}={other.settings[name]}" for name in SETTINGS
                                  if other.settings[name] != plan.settings[name])
            return (f"the best plan with {wanted} takes {quantities.seconds(other.seconds)} instead of "
                    f"{quantities.seconds(plan.seconds)}, {more:+.1%}; it has {different}")
        task = self.task
        possible = choices(task.model, task.devices, task.batch, fixed)
        if len(possible):
            return f"no plan with {wanted} fits in {quantities.nbytes(self.memory)}"
        reasons = ", ".join(f"{reason} ({each.count})" for reason, each in possible.refused.items())
        return f"no plan has {wanted}: {reasons}"

    def _at(self, place: int) -> Plan:
        return Plan(self.choices.settings(place), self.full.get(place, float(self.bounds[place])),
                    float(self.bounds[place]), int(self.peaks[place]), place in self.full, self)

    def __str__(self) -> str:
        proved = "the first is the best" if not self.gap else f"the first is within {self.gap:.1%} of the best"
        lines = [f"{len(self)} plans fit of {self.considered} combinations; {self.timed} timed, {self.simulated} "
                 f"simulated in {self.elapsed_seconds:.1f} s; {proved}"]
        for plan in islice(self, 10):
            lines.append(f"{quantities.seconds(plan.seconds):>9} {quantities.nbytes(plan.peak_bytes):>10}  "
                         f"mb={plan.microbatch} {_short(plan)}")
        lines += [f"refused {each.count}: {reason}" for reason, each in self.refused.items()]
        return "\n".join(lines)


def _short(plan: Plan) -> str:
    s = plan.settings
    words = [f"{axis}={s[axis]}" for axis in ("pp", "dp", "cp", "tp") if s[axis] > 1] or ["one device"]
    words += ["sp"] * s["sp"] + [f"zero={s['zero']}"] * (s["zero"] > 0)
    words += [s["schedule"] + (f"x{s['chunks']}" if s["chunks"] > 1 else "")] * (s["pp"] > 1)
    words += [f"recompute={s['recompute']}"] * (s["recompute"] != "none")
    return " ".join(words)
