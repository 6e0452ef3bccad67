"""A sweep that is searched and told."""

import argparse
import json
import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from parallelism.budgets import Budget, Cell, Sweep, find_budget
from parallelism.budgets.picture import picture
from parallelism.budgets.search import described
from parallelism.budgets.table import described as in_words
from parallelism.display import progress
from parallelism.display.markup import figure
from parallelism.display.quantities import count
from parallelism.hardware import Hardware
from parallelism.models import TransformerSpec
from parallelism.planning import Plan
from vcluster.cli.command_line import WrongWords, accessing
from vcluster.cli.megatron_words import searched_hardware, tell_remarks, tell_unchanging
from vcluster.cli.plan_document import Asked, words_of
from vcluster.cli.program_files import weights_told_once
from vcluster.cli.sweeps.imperfect_words import imperfections_of
from vcluster.cli.sweeps.question import Search
from vcluster.cli.sweeps.words import budget_of
from vcluster.report.plain_page import as_shown, write_plain_page

STOPPED = 130
"""The exit status of a sweep that was interrupted."""


def swept(program: str, arguments: argparse.Namespace) -> int:
    """Search a sweep and tell it.  Returns 1 if nothing meets the days, or if no cell has a plan."""
    began = perf_counter()
    cells: list[Cell] = []
    try:
        for name in arguments.hardware:
            Hardware.of(name)
        search = Search.of(program, arguments)
        budget = budget_of(arguments)
        interrupted = _search(search, budget, arguments, cells)
    except (ValueError, TypeError, OSError) as error:
        raise WrongWords(str(error)) from None
    sweep = Sweep(budget, tuple(sorted(cells, key=partial(_place, arguments))))
    tell_remarks(search.asked.model)
    tell_unchanging(arguments, search.asked.flags)
    if arguments.html is not None:
        with accessing(arguments.html, option="html"):
            write_sweep(sweep, _heading(sweep, search), arguments.html)
    if arguments.json:
        print(json.dumps({**sweep.json(), "elapsed_seconds": perf_counter() - began}, indent=1))
    elif cells:
        elapsed = f"{len(sweep.cells)} searches in {perf_counter() - began:.1f} s"
        page = "" if arguments.html is None else f"\n\nThe page is {arguments.html}"
        print(f"{_heading(sweep, search)}\n\n{sweep}\n\n{elapsed}{page}")
    if interrupted:
        asked = len(arguments.hardware) * len(arguments.devices) * max(len(arguments.batches), 1)
        print(f"{program}: stopped after {len(cells)} of {asked} searches", file=sys.stderr)
        return STOPPED
    if not sweep.meets:
        print(_nearest(sweep), file=sys.stderr)
    return int(not sweep.meets)


def write_sweep(sweep: Sweep, title: str, path: Path) -> None:
    """Write the page of a sweep: its picture, days against cost, and its table.  It needs no other file."""
    drawn = picture(sweep)
    shown = figure(drawn, title="days against cost") if drawn else ""
    write_plain_page(title, shown + as_shown(str(sweep)), path)


def _search(search: Search, budget: Budget, arguments: argparse.Namespace, cells: list[Cell]) -> bool:
    """Searches the cells, and adds each to ``cells``.  True if an interrupt ended that."""
    try:
        with progress("listing the splits") as told, weights_told_once():
            find_budget(
                search.model,
                budget,
                hardware=arguments.hardware,
                batch=arguments.batches or search.batch,
                devices=arguments.devices,
                row_tokens=arguments.row_tokens,
                imperfections=imperfections_of(arguments),
                describe=partial(_described, search.asked),
                check=search.check_rate,
                on=partial(searched_hardware, model=search.model),
                told=told,
                took=cells.append,
                **search.options,
            )
    except KeyboardInterrupt:
        return True
    return False


def _place(arguments: argparse.Namespace, cell: Cell) -> tuple[int, int]:
    """Where a cell stands in the sweep."""
    devices = arguments.devices
    return arguments.hardware.index(cell.hardware), devices.index(
        cell.devices
    ) if cell.devices in devices else 0


def _described(asked: Asked, plan: Plan) -> dict[str, Any]:
    """The fields of a plan in a cell: those of ``plan --json``, and its split."""
    flags = words_of(plan.run, plan.task.hardware, asked.rows)
    on = replace(asked, hardware=plan.task.hardware.name, devices=plan.task.devices)
    return {**described(plan), "command": shlex.join([*on.prefix, *flags])}


def _heading(sweep: Sweep, search: Search) -> str:
    """What is searched for, in one line."""
    asked, budget = search.asked, sweep.budget
    days = "" if budget.days is None else f" in {budget.days:g} days"
    batches = sorted({cell.batch for cell in sweep.cells}) or [search.batch]
    batch = " to ".join(map(str, dict.fromkeys((batches[0], batches[-1]))))
    rows = "sequences" if isinstance(search.model, TransformerSpec) else "rows"
    return (
        f"{asked.name}, {count(asked.parameters)} parameters: {count(budget.tokens)} tokens{days}, "
        f"{batch} {rows} a step"
    )


def _nearest(sweep: Sweep) -> str:
    """One line: nothing meets the days, and what comes nearest."""
    if sweep.fastest is None:
        reasons = [*dict.fromkeys(cell.reason for cell in sweep.cells)]
        return f"no plan fits anywhere: {reasons[0]}" + (
            f"; and {len(reasons) - 1} more reasons" if len(reasons) > 1 else ""
        )
    return (
        f"nothing trains {count(sweep.budget.tokens)} tokens in {sweep.budget.days:g} days; the nearest: "
        f"{in_words(sweep.fastest)}"
    )
