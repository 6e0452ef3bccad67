"""`find_budget`: the best plan on each hardware of each size, searched side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from parallelism.budgets.budget import Budget
from parallelism.budgets.degraded import Degraded, best_of, search_degraded
from parallelism.budgets.imperfect import Imperfections
from parallelism.budgets.measures import Measures
from parallelism.budgets.sweep import Cell, Sweep
from parallelism.hardware import Hardware
from parallelism.ir import Function
from parallelism.models import TransformerSpec, transformer
from parallelism.planning import Plan, Plans, find_plan
from parallelism.planning.explanation import need_text
from parallelism.planning.search import machine_of
from parallelism.side_by_side import side_by_side

Describe = Callable[[Plan], dict[str, Any]]


class Place(NamedTuple):
    """The hardware and the devices of one cell of a sweep."""

    hardware: Hardware | str
    devices: int | None
    """None: all of the hardware."""
    batch: int

    @property
    def name(self) -> str:
        """The name of the hardware."""
        return self.hardware.name if isinstance(self.hardware, Hardware) else self.hardware


def find_budget(
    model: TransformerSpec | Function | str,
    budget: Budget,
    *,
    hardware: Sequence[Hardware | str],
    batch: int | Sequence[int],
    devices: Sequence[int | None] = (None,),
    row_tokens: int | None = None,
    imperfections: Imperfections | None = None,
    describe: Describe | None = None,
    check: Callable[[Hardware], object] = lambda hardware: None,
    on: Callable[[str], str] = str,
    told: Callable[[str, int, int], object] | None = None,
    took: Callable[[Cell], object] = lambda cell: None,
    **options: Any,
) -> Sweep:
    """The best plan of ``model`` on each ``hardware`` with each number of ``devices``, and what a run by it takes.

    Model, hardware and ``options`` are as for `find_plan`: each cell has the best plan of that search.  ``batch`` may be
    several numbers of rows: cells then differ in them, too, and so does what is trained, not only how fast.
    ``row_tokens`` are those of a row of the batch; a `TransformerSpec` knows them.  ``imperfections`` are what is wrong with
    every cluster; then each is searched without them, too.  ``describe`` makes the fields of a plan that a cell keeps,
    from `described` on; ``check`` raises ``ValueError`` for hardware that cannot be, and ``on`` gives the name with the
    stack that is searched on, of a name without one.  The cells
    are searched at the same time, on as many cores as there are, and ``took`` gets each as soon as it is known, also
    before an interrupt ends the search.  ``told(what, done, all)`` hears of the progress.

    A cell in which no plan is possible, or none fits, has the reason; so has one that is refused before any search.
    ``ValueError`` where all are refused: then the question is wrong.
    """
    tokens = _row_tokens(model, row_tokens)
    batches = [batch] if isinstance(batch, int) else list(batch)
    places = [Place(each, count, rows) for each in hardware for count in devices for rows in batches]
    told = told or (lambda what, done, count: None)
    show, done = describe or described, [0]

    def take(place: int, cell: Cell) -> None:
        done[0] += 1
        took(cell)

    def at(place: Place) -> Cell:
        searched = f"{done[0]} of {len(places)} searched; {place.devices or 'all'} of {place.name}"
        arguments = dict(options) | {
            "model": model,
            "imperfections": imperfections,
            "batch": place.batch,
            "progress": lambda what, done, count: told(f"{searched}: {what}", done, count),
        }
        cell = Cell(budget, place.name, place.devices, place.batch, tokens * place.batch, None)
        found = on(place.hardware) if isinstance(place.hardware, str) else place.hardware
        return _cell(cell, place._replace(hardware=found), arguments, check, show)

    cells = side_by_side([partial(at, place) for place in places], took=take)
    if all(cell.is_refused for cell in cells):
        raise ValueError(cells[0].reason)
    return Sweep(budget, tuple(cells))


def _row_tokens(model: TransformerSpec | Function | str, given: int | None) -> int:
    if isinstance(model, str):
        model = transformer(model)
    if isinstance(model, TransformerSpec):
        if given not in (None, model.sequence):
            raise ValueError(f"a row of the model has {model.sequence} tokens; row_tokens is for a program")
        return model.sequence
    if given is None:
        raise ValueError("row_tokens must say how many tokens a row of the program's batch has")
    return given


def _cell(
    cell: Cell, place: Place, arguments: dict[str, Any], check: Callable[[Hardware], object], show: Describe
) -> Cell:
    """The cell with its plan, or with the reason why there is none."""
    try:
        found, count = machine_of(place.hardware, place.devices)
        check(found)
        wrong = arguments.pop("imperfections")
        search = partial(_search, arguments)
        if wrong:
            told = search_degraded(search, place.hardware, place.devices, place.batch, wrong)
        else:
            told = search(found, count)
    except ValueError as error:
        return replace(cell, reason=str(error), is_refused=True)
    plans = told.plans if isinstance(told, Degraded) else told
    cell = replace(cell, devices=count)
    if not len(plans):
        return replace(cell, reason=reason_of(plans))
    best = best_of(plans)
    degraded = told.json() if isinstance(told, Degraded) else None
    return replace(cell, plan=show(best), measures=Measures.of(best), degraded=degraded)


def _search(arguments: dict[str, Any], hardware: Hardware, devices: int) -> Plans:
    found: Plans = find_plan(hardware=hardware, devices=devices, **arguments)
    return found


def reason_of(plans: Plans) -> str:
    """Why there is no plan: what the smallest needs, or why none is possible."""
    if plans.tightest is None:
        return plans.refusals
    return f"no plan fits: {need_text([plans.tightest.need], plans.memory, plans.reserve.text)}"


def described(plan: Plan) -> dict[str, Any]:
    """A plan in a document: its figures, its split, and its microbatch."""
    return {**plan.figures.json(), "microbatch": plan.microbatch, "split": plan.split}
