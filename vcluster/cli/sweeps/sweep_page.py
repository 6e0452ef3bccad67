"""The page of a sweep: its picture, days against cost, and its table."""

from pathlib import Path

from parallelism.budgets import Sweep
from parallelism.budgets.picture import picture
from parallelism.display.markup import figure
from vcluster.report.plain_page import as_shown, write_plain_page


def write_sweep(sweep: Sweep, title: str, path: Path) -> None:
    """Write the page.  It needs no other file."""
    drawn = picture(sweep)
    shown = figure(drawn, title="days against cost") if drawn else ""
    write_plain_page(title, shown + as_shown(str(sweep)), path)
