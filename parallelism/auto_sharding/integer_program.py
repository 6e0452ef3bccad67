"""The choice with the least seconds, by an integer program, solved by HiGHS.

A binary for each sharding of each op and for each layout of each value; and continuous variables for what flows between
them, which are integral where the binaries are:

    sum of the shardings of an op = 1
    flow(made -> lies), summed over where it lies  = the shardings that leave it so
                        summed over what was made  = the layout in which it lies
    flow(lies -> needed) of each use, likewise     = that layout, and the shardings that need it so
    moved(lies -> needed) >= each flow that needs it, if several uses may share the copy

as in Zheng et al., *Alpa*, 2022, arXiv:2201.12023, section 4, with the layouts of values as variables of their own, so
that a copy is made once for all ops that need it.  This is the only module that imports SciPy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parallelism.auto_sharding.problem import IMPOSSIBLE, Problem, ValueChoices


class NoLayoutFits(ValueError):
    """No choice of layouts satisfies all rows."""


@dataclass(frozen=True)
class Choice:
    """A solution of a `Problem`."""

    ways: tuple[int, ...]
    """For each class of ops the number of its sharding."""
    lies: tuple[int, ...]
    """For each class of values the number of its layout."""
    seconds: float
    bound_seconds: float
    """No choice is faster than this."""
    variables: int
    binaries: int
    rows: int

    @property
    def gap(self) -> float:
        """The part of the seconds that is not proved to be needed; 0: the choice is optimal."""
        return max(0.0, 1 - self.bound_seconds / self.seconds) if self.seconds else 0.0


def solve(problem: Problem, *, time_limit: float | None = None) -> Choice:
    """The best choice, or the best that was found within ``time_limit`` seconds.

    ``ModuleNotFoundError`` without SciPy.  `NoLayoutFits` if there is none; ``TimeoutError`` if none was found in time.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("an integer program is solved by SciPy: pip install 'vcluster[plan]'") from error
    model = _Model()
    ways = [model.binaries(len(each.ops) * each.seconds * _SCALE) for each in problem.ops]
    for each in ways:
        model.row([(at, 1.0) for at in each], 1.0)
    lies = [_add_value(model, each, ways) for each in problem.values]
    for a, b in problem.tied:
        _tie(model, problem.values[a], problem.values[b], lies[a], lies[b])
    rows, columns, numbers = (np.array(each) for each in zip(*model.entries, strict=True))
    matrix = coo_array((numbers, (rows, columns)), shape=(len(model.low), len(model.costs))).tocsr()
    options: dict[str, Any] = {"mip_rel_gap": 0.0} | ({} if time_limit is None else {"time_limit": time_limit})
    result = milp(
        np.array(model.costs), constraints=LinearConstraint(matrix, np.array(model.low), np.array(model.high)),
        integrality=np.array(model.integral), bounds=Bounds(0, 1), options=options)
    if result.x is None:
        if result.status == 1:
            raise TimeoutError(f"no layouts of @{problem.function.name} were found within {time_limit:g} s")
        raise NoLayoutFits(f"no layouts of @{problem.function.name} on {problem.mesh!r} fit: {result.message}")
    chosen, lying = ([int(np.argmax(result.x[list(each)])) for each in side] for side in (ways, lies))
    seconds = problem.seconds(chosen, lying)
    bound = min(seconds, float(result.mip_dual_bound) / _SCALE) if result.status == 1 else seconds
    return Choice(tuple(chosen), tuple(lying), seconds, bound, len(model.costs), sum(model.integral), len(model.low))


_SCALE = 1e6
"""Costs are microseconds, because the tolerances of the solver are absolute."""


class _Model:
    def __init__(self) -> None:
        self.costs: list[float] = []
        self.integral: list[int] = []
        self.entries: list[tuple[int, int, float]] = []
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
        return range(first, len(self.costs))

    def row(self, terms: Iterable[tuple[int, float]], low: float, high: float | None = None) -> None:
        self.entries.extend((len(self.low), at, factor) for at, factor in terms)
        self.low.append(low)
        self.high.append(low if high is None else high)


def _add_value(model: _Model, value: ValueChoices, ways: Sequence[range]) -> range:
    """Adds the variables and rows of a class of values; the binaries of its layouts."""
    count = len(value.names)
    lies = model.binaries([0.0] * len(value.layouts))
    if value.made_by is None:
        model.row([(at, 1.0) for at in lies], 1.0)
    else:
        op, made = value.made_by
        pairs = np.argwhere(value.first < IMPOSSIBLE)
        flows = model.flows(count * value.first[a, b] * _SCALE for a, b in pairs)
        _balance(model, flows, pairs, [(ways[op], made)], lies)
    needing: dict[tuple[int, int], list[int]] = {}
    for use in value.uses:
        pairs = np.argwhere(value.second < IMPOSSIBLE)
        pairs = pairs[np.isin(pairs[:, 1], use.needed)]
        flows = model.flows([0.0] * len(pairs))
        _balance(model, flows, pairs[:, ::-1], [(ways[use.op], use.needed)], lies)
        for flow, (a, b) in zip(flows, pairs.tolist(), strict=True):
            needing.setdefault((a, b), []).append(flow)
    for (a, b), flowing in needing.items():
        cost = count * float(value.second[a, b]) * _SCALE
        if not cost:
            continue
        if len(flowing) == 1:
            model.costs[flowing[0]] = cost
            continue
        moved, = model.flows([cost])
        for flow in flowing:
            model.row([(moved, 1.0), (flow, -1.0)], 0.0, np.inf)
    return lies


def _balance(
    model: _Model, flows: range, pairs: Any, ends: Sequence[tuple[range, Any]], lies: range
) -> None:
    """Rows: the flows of pairs (layout at the op, layout where it lies) are what the op chooses, and where it lies."""
    for ways, layouts in ends:
        for layout in np.unique(layouts):
            model.row([*((flow, 1.0) for flow, pair in zip(flows, pairs, strict=True) if pair[0] == layout),
                       *((way, -1.0) for way, each in zip(ways, layouts, strict=True) if each == layout)], 0.0)
    for at, lying in enumerate(lies):
        model.row([*((flow, 1.0) for flow, pair in zip(flows, pairs, strict=True) if pair[1] == at), (lying, -1.0)],
                  0.0)


def _tie(model: _Model, a: ValueChoices, b: ValueChoices, lies: range, others: range) -> None:
    """Rows: both values lie in the same layout."""
    for layout in dict.fromkeys((*a.layouts, *b.layouts)):
        terms = [(lies[a.layouts.index(layout)], 1.0)] if layout in a.layouts else []
        terms += [(others[b.layouts.index(layout)], -1.0)] if layout in b.layouts else []
        model.row(terms, 0.0)
