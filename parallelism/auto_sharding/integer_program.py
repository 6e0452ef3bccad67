"""The choice with the least seconds, by an integer program, solved by HiGHS.

A binary for each sharding of each op and for each layout of each value; and continuous variables for what flows between
them, which are integral where the binaries are:

    sum of the shardings of an op = 1
    flow(made -> layout), summed over layouts        = the shardings that make the value so
                          summed over what was made  = the layout of the value
    flow(layout -> needed) of each use, likewise     = that layout, and the shardings that need it so
    moved(layout -> needed) >= each flow that needs it, if several uses may share the copy
    kept(layout -> needed)  <= moved of the forward, and of the backward: what one copy for both saves
    held while an op runs   <= the bytes of a device, of the ops where a solution without the row holds more

The optimum mostly is integral without being asked to be, so the linear program is solved first.  The rows are as in
Zheng et al., *Alpa*, 2022, arXiv:2201.12023, section 4, with the layouts of values as variables of their own, so
that a copy is made once for all ops that need it.  This is the only module that imports SciPy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from parallelism.auto_sharding.memory import Memory
from parallelism.auto_sharding.problem import IMPOSSIBLE, Problem, ValueChoices
from parallelism.display.quantities import decimal_bytes


class NoLayoutFits(ValueError):
    """No choice of layouts satisfies all rows.

    ``least_bytes``: what a device must hold at least; None if memory is not what lacks.
    """

    def __init__(self, message: str, least_bytes: int | None = None) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


@dataclass(frozen=True)
class Choice:
    """A solution of a `Problem`."""

    sharding_of: tuple[int, ...]
    """For each class of ops the number of its sharding, among those of `OpChoices.shardings`."""
    layout_of: tuple[int, ...]
    """For each class of values the number of its layout, among those of `ValueChoices.layouts`."""
    seconds: float
    """The seconds of a run."""
    bound_seconds: float
    """No choice is faster than this."""
    variables: int
    """The size of the integer program: all its variables; of these, its binaries; and its rows."""
    binaries: int
    rows: int
    kept: frozenset[tuple[int, int]] | None = None
    """The copies, as class of values and number of the layout, that are kept from the forward to the backward; all
    others are made again there.  None: every copy is made once, because memory has no limit."""
    moments: tuple[int, ...] = ()
    """The ops during which memory was limited."""
    limit_bytes: int | None = None
    """What a device might hold, without the buffers inside of changes of layout."""

    @property
    def gap(self) -> float:
        """The optimality gap: the part of the seconds that is not proved to be needed; 0 if the choice is optimal."""
        return max(0.0, 1 - self.bound_seconds / self.seconds) if self.seconds else 0.0


def solve(
    problem: Problem,
    *,
    time_limit: float | None = None,
    memory: Memory | None = None,
    limit_bytes: int | None = None,
) -> Choice:
    """The best choice, or the best that was found within ``time_limit`` seconds.

    With ``memory``, a device holds at most ``limit_bytes`` at any time, and copies may be made again in the backward.
    ``ModuleNotFoundError`` without SciPy.  `NoLayoutFits` if there is none; ``TimeoutError`` if none was found in time.
    """
    model = _Model()
    shardings = [model.binaries(len(each.ops) * each.seconds * _SCALE) for each in problem.ops]
    for each in shardings:
        model.row([(at, 1.0) for at in each], 1.0)
    added = [
        _add_value(model, problem, number, shardings, phased=memory is not None)
        for number in range(len(problem.values))
    ]
    for a, b in problem.tied:
        _tie(model, problem.values[a], problem.values[b], added[a].layouts, added[b].layouts)
    end = None if time_limit is None else perf_counter() + time_limit
    moments: list[int] = []
    while True:
        result = _solved(model, end and max(0.0, end - perf_counter()))
        if result.x is None:
            if result.status == 1:
                raise TimeoutError(
                    f"no layouts of @{problem.function.name} were found within {time_limit:g} s"
                )
            raise _no_layout(problem, model, shardings, added, memory, moments, limit_bytes, result)
        chosen = _chosen(result.x, shardings)
        lying = _chosen(result.x, [each.layouts for each in added])
        kept = None if memory is None else _kept(problem, added, result.x, chosen, lying)
        if memory is None or limit_bytes is None or not problem.function.ops:
            break
        # A row for each op would make the program large: only the op with most bytes gets one, until the rest fits.
        held = memory.total(chosen, lying, kept or ())
        most = int(np.argmax(held))
        if held[most] <= limit_bytes:
            break
        _limit(model, memory, added, most, limit_bytes, slack=2e-6 * moments.count(most))
        moments.append(most)
    seconds = problem.seconds(chosen, lying, kept)
    bound = min(seconds, float(result.mip_dual_bound) / _SCALE) if result.status == 1 else seconds
    bound = min(bound, problem.bound_seconds)
    return Choice(
        chosen,
        lying,
        seconds,
        bound,
        len(model.costs),
        sum(model.integral),
        len(model.low),
        kept,
        tuple(moments),
        limit_bytes,
    )


def _chosen(x: Any, alternatives: Iterable[range]) -> tuple[int, ...]:
    """Which of each range of binaries is 1, as a number within the range."""
    return tuple(int(np.argmax(x[list(each)])) for each in alternatives)


def _solved(model: _Model, time_limit: float | None) -> Any:
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "an integer program is solved by SciPy: pip install 'vcluster[plan]'"
        ) from error
    matrix = csr_array(
        (np.array(model.factors), np.array(model.variables), np.array(model.ends)),
        shape=(len(model.low), len(model.costs)),
    )
    matrix.sum_duplicates()
    integral = np.array(model.integral)

    def found(integrality: Any, options: dict[str, Any]) -> Any:
        return milp(
            np.array(model.costs),
            constraints=LinearConstraint(matrix, np.array(model.low), np.array(model.high)),
            integrality=integrality,
            bounds=Bounds(0, np.array(model.most)),
            options=options,
        )

    # Without integrality the optimum mostly is integral all the same, and is found in less than half of the time.
    start = perf_counter()
    relaxed = found(integral * 0, {} if time_limit is None else {"time_limit": time_limit / 2})
    if relaxed.status == 0 and np.abs(relaxed.x - np.round(relaxed.x))[integral > 0].max(initial=0.0) < 1e-6:
        return relaxed
    left = {} if time_limit is None else {"time_limit": max(0.0, time_limit - (perf_counter() - start))}
    return found(integral, {"mip_rel_gap": 0.0} | left)


def _kept(
    problem: Problem, added: Sequence[_Added], x: Any, sharding_of: Sequence[int], layout_of: Sequence[int]
) -> frozenset[tuple[int, int]]:
    """The copies that a solution keeps from the forward to the backward, as `Choice.kept`."""
    found = set()
    for number, each in enumerate(added):
        copies = problem.copies(number, sharding_of, layout_of[number])
        for phase, layout in copies:
            if phase == 0 and (1, layout) in copies and x[each.kept[layout_of[number], layout]] > 0.5:
                found.add((number, layout))
    return frozenset(found)


def _limit(
    model: _Model, memory: Memory, added: Sequence[_Added], moment: int, limit_bytes: int, slack: float
) -> None:
    """The row: while op ``moment`` runs, a device holds at most ``limit_bytes``.

    The solver keeps it to a millionth, so ``slack`` is the part that is left free once it was missed by that.
    """
    model.row(_held(memory, added, moment, limit_bytes), -np.inf, 1 - slack)


def _held(memory: Memory, added: Sequence[_Added], moment: int, limit_bytes: int) -> list[tuple[int, float]]:
    """The terms of what is held while an op runs, as parts of ``limit_bytes``."""
    terms: dict[int, int] = {}

    def add(variable: int, count: int, nbytes: int) -> None:
        if count:
            terms[variable] = terms.get(variable, 0) + count * nbytes

    for value, lifetimes, each in zip(memory.problem.values, memory.lifetimes, added, strict=True):
        nbytes = partial(memory.bytes_of, value)
        for at, variable in enumerate(each.layouts):
            add(variable, int(lifetimes.owned[moment]), nbytes(value.layouts[at]))
        for (made, at), variable in each.first.items():
            if value.made[made] != value.layouts[at]:
                add(variable, int(lifetimes.viewed[moment]), nbytes(value.layouts[at]))
                add(variable, int(lifetimes.made[moment]), nbytes(value.made[made]))
        for (phase, _, needed), variable in each.copies.items():
            add(variable, int(lifetimes.spans[phase][moment]), nbytes(value.needed[needed]))
        for (_, needed), variable in each.kept.items():
            add(variable, int(lifetimes.between[moment]), nbytes(value.needed[needed]))
    return [(variable, held / max(limit_bytes, 1)) for variable, held in terms.items()]


def _no_layout(
    problem: Problem,
    model: _Model,
    shardings: Sequence[range],
    added: Sequence[_Added],
    memory: Memory | None,
    moments: Sequence[int],
    limit_bytes: int | None,
    result: Any,
) -> NoLayoutFits:
    """The error: with a limit of memory, how little a device can hold at least, and while which op."""
    name = f"no layouts of @{problem.function.name} on {problem.mesh!r} fit"
    if memory is None or limit_bytes is None or not moments:
        return NoLayoutFits(f"{name}: {result.message}")
    # The same program without the rows of memory; in place of seconds it minimizes the peak of these moments.
    free = model.first_rows(len(model.low) - len(moments))
    (peak,) = free.flows([1.0])
    free.most[peak] = np.inf
    for moment in moments:
        free.row([*_held(memory, added, moment, limit_bytes), (peak, -1.0)], -np.inf, 0.0)
    found = _solved(free, None)
    if found.x is None:
        return NoLayoutFits(f"{name}: {found.message}")
    chosen = _chosen(found.x, shardings)
    lying = _chosen(found.x, [each.layouts for each in added])
    held = list(memory.held(chosen, lying, _kept(problem, added, found.x, chosen, lying)))
    at = max(moments, key=lambda moment: sum(int(each.nbytes[moment]) for each in held))
    parts = dict.fromkeys(("inputs", "values", "copies"), 0)
    for each in held:
        parts[each.what] += int(each.nbytes[at])
    op = problem.function.ops[at]
    least = sum(parts.values())
    shown = ", ".join(f"{what} {decimal_bytes(nbytes)}" for what, nbytes in parts.items() if nbytes)
    return NoLayoutFits(
        f"{name} in {decimal_bytes(limit_bytes)} a device: at least {decimal_bytes(least)} are held while {op.kind} "
        f"makes %{op.outputs[0].name}: {shown}",
        least,
    )


_SCALE = 1e6
"""Costs are microseconds, because the tolerances of the solver are absolute."""


class _Model:
    """An integer program as lists: of its variables, of its rows, and of the terms of these."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.integral: list[int] = []
        self.most: list[float] = []
        self.variables: list[int] = []
        self.factors: list[float] = []
        """The factors of the terms, one row after the other; ``variables`` has the numbers of their variables."""
        self.ends = [0]
        """How many terms there are before the first row, and after each."""
        self.low: list[float] = []
        self.high: list[float] = []

    def binaries(self, costs: Iterable[float]) -> range:
        return self._variables(costs, 1)

    def flows(self, costs: Iterable[float]) -> range:
        return self._variables(costs, 0)

    def _variables(self, costs: Iterable[float], integral: int) -> range:
        first = len(self.costs)
        self.costs.extend(map(float, costs))
        self.integral += [integral] * (len(self.costs) - first)
        self.most += [1.0] * (len(self.costs) - first)
        return range(first, len(self.costs))

    def row(self, terms: Iterable[tuple[int, float]], low: float, high: float | None = None) -> None:
        for at, factor in terms:
            self.variables.append(at)
            self.factors.append(factor)
        self.ends.append(len(self.variables))
        self.low.append(low)
        self.high.append(low if high is None else high)

    def first_rows(self, count: int) -> _Model:
        """A copy with the first rows alone, in which nothing costs anything."""
        copy = _Model()
        copy.costs, copy.integral, copy.most = [0.0] * len(self.costs), list(self.integral), list(self.most)
        copy.ends, terms = self.ends[: count + 1], self.ends[count]
        copy.variables, copy.factors = self.variables[:terms], self.factors[:terms]
        copy.low, copy.high = self.low[:count], self.high[:count]
        return copy


_Copy = tuple[int, int, int]
"""A copy of a value: the phase, the layout of the value, and the layout that is needed."""


@dataclass(frozen=True)
class _Added:
    """The variables of a class of values."""

    layouts: range
    first: dict[tuple[int, int], int]
    """The flows, by the layout in which the value is made and the layout that it gets."""
    copies: dict[_Copy, int]
    """The copies; a value that has the needed layout has none."""
    kept: dict[tuple[int, int], int]
    """The copies that are kept from the forward, by the layout of the value and the one that is needed."""


def _add_value(
    model: _Model, problem: Problem, number: int, shardings: Sequence[range], *, phased: bool
) -> _Added:
    """Adds the variables and rows of a class of values.  ``phased``: copies are made anew in each phase, or kept."""
    value = problem.values[number]
    layouts = model.binaries([0.0] * len(value.layouts))
    first: dict[tuple[int, int], int] = {}
    if value.made_by is None:
        model.row([(at, 1.0) for at in layouts], 1.0)
    else:
        op, made = value.made_by
        pairs = np.argwhere(value.first < IMPOSSIBLE)
        flows = model.flows(len(value.names) * value.first[a, b] * _SCALE for a, b in pairs)
        first = {(a, b): flow for flow, (a, b) in zip(flows, pairs.tolist(), strict=True)}
        _balance(model, flows, pairs, (shardings[op], made), layouts)
    needing: dict[_Copy, list[int]] = {}
    for use in value.uses:
        pairs = np.argwhere(value.second < IMPOSSIBLE)
        pairs = pairs[np.isin(pairs[:, 1], use.needed)]
        flows = model.flows([0.0] * len(pairs))
        _balance(model, flows, pairs[:, ::-1], (shardings[use.op], use.needed), layouts)
        phase = problem.phases[use.op] if phased else 0
        for flow, (a, b) in zip(flows, pairs.tolist(), strict=True):
            needing.setdefault((phase, a, b), []).append(flow)
    copies = _add_copies(model, value, needing, phased=phased)
    return _Added(layouts, first, copies, _add_kept(model, value, copies))


def _add_copies(
    model: _Model, value: Any, needing: dict[_Copy, list[int]], *, phased: bool
) -> dict[_Copy, int]:
    """Adds a variable for each copy that costs something; those that need it flow through it."""
    copies: dict[_Copy, int] = {}
    for (phase, a, b), flowing in needing.items():
        cost = len(value.names) * float(value.second[a, b]) * _SCALE
        if value.layouts[a] == value.needed[b] or not (cost or phased):
            continue
        if len(flowing) == 1:
            copies[phase, a, b] = flowing[0]
            model.costs[flowing[0]] = cost
            continue
        (moved,) = model.flows([cost])
        copies[phase, a, b] = moved
        for flow in flowing:
            model.row([(moved, 1.0), (flow, -1.0)], 0.0, np.inf)
    return copies


def _add_kept(model: _Model, value: Any, copies: dict[_Copy, int]) -> dict[tuple[int, int], int]:
    """Adds a variable for each copy that may be kept from the first phase to the second."""
    kept: dict[tuple[int, int], int] = {}
    for phase, a, b in list(copies):
        if phase == 0 and (1, a, b) in copies:
            (kept[a, b],) = model.binaries([-len(value.names) * float(value.second[a, b]) * _SCALE])
            for each_phase in (0, 1):
                model.row([(copies[each_phase, a, b], 1.0), (kept[a, b], -1.0)], 0.0, np.inf)
    return kept


def _balance(model: _Model, flows: range, pairs: Any, op: tuple[range, Any], layouts: range) -> None:
    """Rows: the flows of pairs (layout at the op, layout of the value) sum to what the op and the value choose.

    ``op`` has the binaries of its shardings, and for each of these the number of its layout of the value.
    """
    at_op: dict[int, list[tuple[int, float]]] = {}
    at_value: dict[int, list[tuple[int, float]]] = {}
    for flow, (outer, inner) in zip(flows, pairs.tolist(), strict=True):
        at_op.setdefault(outer, []).append((flow, 1.0))
        at_value.setdefault(inner, []).append((flow, 1.0))
    choosing: dict[int, list[tuple[int, float]]] = {}
    shardings, numbers = op
    for sharding, layout in zip(shardings, numbers.tolist(), strict=True):
        choosing.setdefault(layout, []).append((sharding, -1.0))
    for layout, terms in sorted(choosing.items()):
        model.row([*at_op.get(layout, ()), *terms], 0.0)
    for number, variable in enumerate(layouts):
        model.row([*at_value.get(number, ()), (variable, -1.0)], 0.0)


def _tie(model: _Model, a: ValueChoices, b: ValueChoices, layouts_of_a: range, layouts_of_b: range) -> None:
    """Rows: both values have the same layout."""
    for layout in dict.fromkeys((*a.layouts, *b.layouts)):
        terms = []
        if layout in a.layouts:
            terms.append((layouts_of_a[a.layouts.index(layout)], 1.0))
        if layout in b.layouts:
            terms.append((layouts_of_b[b.layouts.index(layout)], -1.0))
        model.row(terms, 0.0)
