"""The seconds and the memory of all plans of a space: those from pieces at once, the others by simulation."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Floats, Ints, distinct
from parallelism.events.columns import combined
from parallelism.planning.plan import Task
from parallelism.planning.plan_costs import PlanCosts
from parallelism.planning.promising import EXPECTED, PROMISING, Told, simulated_alone
from parallelism.planning.settings import SETTINGS
from parallelism.planning.space import Choices, Refused, as_for, different_programs, refusing
from parallelism.planning.two_block_steps import ConditionalEvents, Known
from parallelism.rarely_collected import ALMOST_ALL_LAST, rarely_collected
from parallelism.shared_results import shared_results
from parallelism.side_by_side import BothEnds, copies, side_by_side
from parallelism.symbolic.events import Unpriceable
from parallelism.symbolic.orders import Asked, Shape, make_orders
from parallelism.transforms import UnusedParameters

MOST_PROMISING = 12
"""So many programs of plans of a model whose kinds of layers take turns are simulated by themselves."""
LAID_OUT = 700
"""To lay out the pieces of plans takes about as long as to price and time so many plans; where nothing is split inside of
a stage, half as many."""
NOT_HELD = "microbatch", "recompute", "order"
"""Settings that change nothing of what a device holds during the whole step."""


class PricedPlans(NamedTuple):
    """The plans of a space, by row."""

    possible: Choices
    """The space without the plans that the program does not allow, which is known only when they are simulated."""
    seconds: Floats
    """Of a step in which nothing shares links, or fewer (`PlanCosts.is_exact`); infinite for plans that need too much
    memory."""
    peaks: Ints
    """The bytes of the fullest device; of a plan that needs too much memory at least those that it holds all the time,
    unless no plan fits."""
    timed: int
    setup_seconds: float
    """Before the first plan was timed."""
    timing_seconds: float
    """In which plans were timed from their pieces."""
    one_by_one: Mapping[str, int]
    """How many plans were simulated by themselves, by the reason why they are not put together from pieces."""


class _Share(NamedTuple):
    """Some rows, as far as they are put together from pieces."""

    rows: Ints
    seconds: Floats
    peaks: Ints
    fits: bool
    """Whether a plan fits the memory."""
    left: dict[int, str]
    """The rows that are not put together from pieces, with the reasons."""
    timing_seconds: float
    known: Mapping[Known, ConditionalEvents]
    """What was laid out for them."""


@contextmanager
def unused_told_before() -> Iterator[None]:
    """`UnusedParameters` are told once of a search, not by each plan."""
    with warnings.catch_warnings(action="ignore", category=UnusedParameters):
        yield


@unused_told_before()
def price_plans(
    task: Task, possible: Choices, limits: Floats, told: Told, *, alone: bool = True
) -> PricedPlans:
    """The costs of all plans; those that need more memory than their limit, by row, are not timed.  Unless plans are
    simulated ``alone``, those that are not put together from pieces have no finite seconds.

    Plans whose models differ (`TrainedModel.at`) have pieces of their own.
    """
    if task.model.takes_turns:
        rows, refused = _promising(task, possible, limits, told)
        possible, limits = replace(possible.take(rows), refused={**possible.refused, **refused}), limits[rows]
    sizes, number = np.unique(possible["tp"], return_inverse=True)
    models = [task.model.at(tp) for tp in sizes.tolist()]
    different = [*dict.fromkeys(models)] or [task.model]
    if len(different) == 1:
        return _price(replace(task, model=different[0]), possible, limits, told, alone=alone)
    model_of = np.array([different.index(model) for model in models])[number]
    seconds, peaks = np.zeros(len(possible)), np.zeros(len(possible), np.int64)
    found = list[PricedPlans]()
    one_by_one = Counter[str]()
    for place, model in enumerate(different):
        rows = np.flatnonzero(model_of == place)
        own = _price(replace(task, model=model), possible.take(rows), limits[rows], told, alone=alone)
        seconds[rows], peaks[rows] = own.seconds, own.peaks
        one_by_one.update(own.one_by_one)
        found.append(own)
    timed = sum(own.timed for own in found)
    setup = sum(own.setup_seconds for own in found)
    timing = sum(own.timing_seconds for own in found)
    return PricedPlans(possible, seconds, peaks, timed, setup, timing, one_by_one)


def _price(task: Task, possible: Choices, limits: Floats, told: Told, *, alone: bool) -> PricedPlans:
    """`price_plans` of plans with one model."""
    start = perf_counter()
    seconds, peaks = np.full(len(possible), np.inf), np.zeros(len(possible), np.int64)
    one_of, number = different_programs(possible)
    left: Mapping[int, str] = {}
    timing = 0.0
    try:
        table = PlanCosts(task, possible)
    except Unpriceable as error:
        table, left = None, dict.fromkeys(one_of.tolist(), str(error))
    if table is not None:
        make_orders(_pipelines(table, one_of))
        shares = _shares(table, possible, one_of, limits, told)
        for share in shares:
            table.steps.learn(share.known)
        if not any(share.fits for share in shares):
            shares = [_share(table, possible, [one_of], limits, told, all_peaks=True)]
        for share in shares:
            seconds[share.rows], peaks[share.rows] = share.seconds, share.peaks
        left = dict(sorted(each for share in shares for each in share.left.items()))
        timing = max(share.timing_seconds for share in shares)
    setup = perf_counter() - start - timing
    left = left if alone else {}
    simulated, left, impossible = simulated_alone(task, possible, table, left, seconds, limits, told)
    plans_of = dict(zip(one_of.tolist(), np.bincount(number).tolist(), strict=True))
    one_by_one = dict[str, int]()
    for row, why in left.items():
        found = simulated[row]
        if isinstance(found, str):
            impossible.setdefault(found, []).append(row)
        else:
            seconds[row], peaks[row] = found
            one_by_one[why] = one_by_one.get(why, 0) + plans_of[row]
    seconds, peaks = seconds[one_of][number], peaks[one_of][number]
    if impossible:
        programs = one_of[number]
        possible, kept = refusing(
            possible, {reason: np.flatnonzero(np.isin(programs, rows)) for reason, rows in impossible.items()}
        )
        seconds, peaks = seconds[kept], peaks[kept]
    timed = int(np.count_nonzero(np.isfinite(seconds)))
    return PricedPlans(possible, seconds, peaks, timed, setup, timing, one_by_one)


def _promising(task: Task, possible: Choices, limits: Floats, told: Told) -> tuple[Ints, dict[str, Refused]]:
    """The rows that may be the best of a model whose kinds of layers take turns, and the reason why others are refused.

    A plan is taken to need what models with layers of one kind need in the mean, which are put together from pieces.  So
    the most promising programs are known; what is told of them is simulated.
    """
    one_of, number = different_programs(possible)
    if len(one_of) <= MOST_PROMISING:
        return np.arange(len(possible)), {}
    of_programs = possible.take(one_of)
    seconds, peaks = np.zeros(len(one_of)), np.zeros(len(one_of))
    for model, share in task.model.of_each_kind:
        own, unlimited = as_for(model, of_programs), np.full(len(one_of), np.inf)
        priced = price_plans(replace(task, model=model), own, unlimited, told, alone=False)
        seconds, peaks = seconds + share * priced.seconds, peaks + share * priced.peaks
    # What is expected to fit differs in its seconds alone.
    beyond = np.maximum(peaks / limits[one_of], EXPECTED)
    best = np.lexsort((seconds, beyond))[:MOST_PROMISING]
    is_promising = np.isin(number, best)
    others = np.flatnonzero(~is_promising)
    reason = f"{MOST_PROMISING} {PROMISING}, by models with layers of one kind; fix settings for others"
    refused = {reason: Refused(len(others), possible.settings(int(others[0])))}
    return np.flatnonzero(is_promising), refused


@rarely_collected(ALMOST_ALL_LAST)
@shared_results()
def _shares(
    table: PlanCosts,
    possible: Choices,
    rows: Ints,
    limits: Floats,
    told: Told,
) -> list[_Share]:
    """The costs of the rows, as far as this process and its copies have found them: two at a time take groups of rows
    from both ends of a part."""
    count = 1 + copies()
    processes = [2] * (count // 2) + [1] * (count % 2)
    works, turns = list[Callable[[], _Share]](), list[BothEnds[Ints]]()
    for groups, several in zip(_dealt(rows, possible, count), processes, strict=False):
        turns.append(BothEnds(groups))
        ends = min(several, max(len(groups), 1))
        of_all = partial(_told_of_all, told, sum(map(len, groups)), ends)
        for end in range(ends):
            own = turns[-1].taken(from_front=end == 0)
            works.append(partial(_share, table, possible, own, limits, _silent if works else of_all))
    try:
        found = side_by_side(works)
    finally:
        for both in turns:
            both.close()
    left = np.setdiff1d(rows, np.concatenate([share.rows for share in found]))
    if len(left):  # what a copy had taken that failed
        found.append(_share(table, possible, [left], limits, told))
    return found


def _pipelines(table: PlanCosts, rows: Ints) -> set[Asked]:
    """The different pipelines of plans."""
    columns = table.possible.columns
    settings = (columns[name][rows] for name in ("schedule", "pp", "chunks", "balanced"))
    keys = combined(_microbatches(table)[rows], *settings)
    return {table.shape(row)[:5] for row in rows[np.unique(keys, return_index=True)[1]].tolist()}


def _microbatches(table: PlanCosts) -> Ints:
    """By row, the microbatches of a replica."""
    columns = table.possible.columns
    found: Ints = table.task.batch // (columns["dp"] * columns["ep"] * columns["microbatch"])
    return found


def _dealt(rows: Ints, possible: Choices, count: int) -> list[list[Ints]]:
    """The rows in parts for two of ``count`` processes each, or fewer: groups in an order in which those that stand beside
    each other have most in common.  Rows whose pieces are laid out together stand in one group."""
    columns = {name: column[rows] for name, column in possible.columns.items()}
    has_mesh = columns["tp"] * columns["cp"] * columns["ep"] > 1
    together = [columns["ep"] > 1, columns["cp"], columns["tp"] > 1, has_mesh & (columns["zero"] > 0)]
    keys = combined(*(np.asarray(each, np.int64) for each in together), columns["recompute"])
    _, first, plans = np.unique(keys, return_index=True, return_counts=True)
    by_key = np.argsort(keys, kind="stable")
    groups = np.split(rows[by_key], np.cumsum(plans)[:-1])
    # A group takes the time of its plans, and that of laying out its pieces, counted in plans; parts take equal time.
    work = np.cumsum(plans + np.where(has_mesh[first], LAID_OUT, LAID_OUT // 2))
    part_of = (work - 1) * count // max(int(work[-1]), 1) // 2 if len(work) else work
    bounds = [0, *(1 + np.flatnonzero(np.diff(part_of))).tolist(), len(groups)]
    return [groups[begin:end] for begin, end in pairwise(bounds)]


def _told_of_all(told: Told, count: int, processes: int, what: str, done: int, _: int) -> None:
    """Tells what so many processes have done, of which this one did its part."""
    told(what, min(done * processes, count), count)


def _told_behind(told: Told, before: int, what: str, done: int, count: int) -> None:
    """Tells what is done behind what was done ``before``."""
    told(what, before + done, count)


def _silent(what: str, done: int, count: int) -> None:
    """The progress of a share that another process does: that of the own share stands for both."""


def _share(
    table: PlanCosts,
    possible: Choices,
    alike: Iterable[Ints],
    limits: Floats,
    told: Told,
    *,
    all_peaks: bool = False,
) -> _Share:
    """The costs of some rows, of which groups are ``alike``.  The peaks of those that do not fit are those of their actions
    only if ``all_peaks``."""
    seconds, peaks = np.full(len(possible), np.inf), np.zeros(len(possible), np.int64)
    before = set(table.steps.known)
    met, timed, fits = [np.zeros(0, np.int64)], list[int](), False
    left = dict[int, str]()
    largest = np.full(len(possible), np.inf) if all_peaks else limits
    for own in alike:
        behind = partial(_told_behind, told, sum(map(len, met)))
        prepared, why = _prepared(table, own, largest, peaks, behind)
        fitting = [row for row in prepared if peaks[row] <= limits[row]]
        fits = fits or bool(fitting)
        odd = table.price(fitting)
        timed += [row for row in fitting if row not in odd]
        left |= why | odd
        met.append(own)
    rows = np.concatenate(met)
    start = perf_counter()
    seconds[timed] = table.seconds(timed)
    known = {key: found for key, found in table.steps.known.items() if key not in before}
    return _Share(rows, seconds[rows], peaks[rows], fits, left, perf_counter() - start, known)


def _prepared(
    table: PlanCosts,
    rows: Ints,
    limits: Floats,
    peaks: Ints,
    told: Told,
) -> tuple[list[int], dict[int, str]]:
    """Those of the rows whose pieces are known, and the others with the reasons; and their ``peaks``.

    A row that holds more than its limit during the whole step is in neither, since it cannot fit: then its peak is what
    it holds, and its actions are not laid out.
    """
    found, left = list[int](), dict[int, str]()
    for alike in _held_alike(table, rows):
        try:
            peaks[alike] = table.held(int(alike[0]))
        except Unpriceable as error:
            left |= dict.fromkeys(alike.tolist(), str(error))
    known = rows[(peaks[rows] <= limits[rows]) & ~np.isin(rows, list(left))]
    larger, done = _Larger(table, known), 0
    for of_size in _by_microbatch(table, known):
        of_shape: dict[Shape, list[int]] = defaultdict(list)
        for row in larger.that_may_fit(of_size, peaks).tolist():
            told("prepared", done, len(known))
            done += 1
            try:
                table.prepare_held(row)
                of_shape[table.shape(row)].append(row)
            except Unpriceable as error:
                left[row] = str(error)
        for shape, own in _in_one_order(table, of_shape):
            peaks[own] = table.peaks(shape, own)
        for shape, own in of_shape.items():
            found += own
            larger.learn(shape, [row for row in own if peaks[row] > limits[row]], peaks)
    return found, dict(sorted(left.items()))


def _in_one_order(table: PlanCosts, of_shape: Mapping[Shape, list[int]]) -> Iterable[tuple[Shape, list[int]]]:
    """The rows together whose devices do the same actions in the same order, with the shape of one of them."""
    found: dict[Any, tuple[Shape, list[int]]] = {}
    for shape, rows in of_shape.items():
        key = id(table.orders(shape)[0]), table.number_of(shape).tobytes(), table.adds_up(shape)
        found.setdefault(key, (shape, []))[1].extend(rows)
    return found.values()


class _Larger:
    """Plans that need as much memory as others with smaller microbatches, which do not fit.

    Every array of an action is as large or larger where a microbatch has more rows.  So is what is held at any moment,
    if as many microbatches are under way: where the order of the pipeline is that of another number of microbatches,
    with more or fewer repetitions.
    """

    def __init__(self, table: PlanCosts, rows: Ints) -> None:
        self.table, columns = table, table.possible.columns
        self.count = _microbatches(table)
        names = [name for name in SETTINGS if name != "microbatch"]
        self.others = np.zeros(len(self.count), np.int64)
        """By row, a number for all other settings."""
        keys = combined(*(columns[name][rows] for name in names))
        different, self.others[rows] = np.unique(keys, return_inverse=True)
        self.least = np.full(len(different), np.iinfo(np.int64).max)
        """By number, how many microbatches there must be at least; more than any where nothing is known."""
        self.period, self.rest = np.ones((2, len(different)), np.int64)
        """Of the number of microbatches."""
        self.peaks = np.zeros(len(different), np.int64)

    def learn(self, shape: Shape, rows: list[int], peaks: Ints) -> None:
        """Takes plans of one shape that do not fit."""
        order, repeats = self.table.orders(shape)
        if not repeats:
            return
        few = 1 + int(order.microbatch_of.max())
        period = (shape.microbatches - few) // repeats
        numbers = self.others[rows]
        self.least[numbers], self.period[numbers] = few + period, period
        self.rest[numbers], self.peaks[numbers] = shape.microbatches % period, peaks[rows]

    def that_may_fit(self, rows: Ints, peaks: Ints) -> Ints:
        """Those of some rows of which nothing is known; the ``peaks`` of the others become those of smaller ones."""
        numbers, count = self.others[rows], self.count[rows]
        known = (count >= self.least[numbers]) & (count % self.period[numbers] == self.rest[numbers])
        peaks[rows[known]] = self.peaks[numbers[known]]
        found: Ints = rows[~known]
        return found


def _by_microbatch(table: PlanCosts, rows: Ints) -> Iterator[Ints]:
    """The rows, by the rows of their microbatches, the fewest first."""
    sizes = table.possible.columns["microbatch"][rows]
    for size in distinct(sizes).tolist():
        yield rows[sizes == size]


def _held_alike(table: PlanCosts, rows: Ints) -> list[Ints]:
    """The rows, those of plans together that are equal in what they hold during the whole step."""
    if not len(rows):
        return []
    columns, limited = table.possible.columns, {setting.name for setting in table.limited}
    names = [name for name in SETTINGS if name not in NOT_HELD or name in limited]
    together = (columns["dp"] * columns["ep"] * columns["microbatch"])[rows]
    one_microbatch = np.equal(together, table.task.batch).astype(np.int64)
    keys = combined(one_microbatch, *(columns[name][rows] for name in names))
    order = np.argsort(keys, kind="stable")
    return np.split(rows[order], 1 + np.flatnonzero(np.diff(keys[order])))
