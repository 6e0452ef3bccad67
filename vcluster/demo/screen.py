"""The output of the demos: 80 columns of plain text, with colour and a progress bar only on a terminal."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from parallelism.display import WIDTH
from parallelism.hardware import Hardware
from parallelism.trace import Trace
from vcluster.report import coloured_timeline, timeline

MOST_ROWS = 16
"""Maximal number of rows of a table that is shown completely."""


class _Console(Console):
    """As `Console`, but whose reader has gone ends a demo as it ends any other command."""

    def on_broken_pipe(self) -> NoReturn:
        raise  # the error that is being handled; that of rich exits with status 1


class Screen:
    """Writes headings, lines and tables. The text is the same in a file and on a terminal."""

    def __init__(self, file: IO[str] | None = None) -> None:
        stream = sys.stdout if file is None else file
        self.live = bool(stream.isatty()) and os.environ.get("TERM") != "dumb"
        self._console = _Console(
            file=stream,
            force_terminal=self.live,
            force_interactive=self.live,
            highlight=False,
            markup=False,
            emoji=False,
            soft_wrap=True,
            no_color=True if os.environ.get("NO_COLOR") else None,
            width=None if self.live else WIDTH,
        )
        self.good = True
        """Whether all verdicts so far are good."""
        self.record: tuple[Trace, Hardware | None] | None = None
        """What `--html` writes: the trace of the last step, and the hardware of its roofline."""

    def line(self, text: str = "", style: str = "") -> None:
        """Write one or more lines unchanged."""
        self._console.print(Text(text, style=style))

    def heading(self, text: str) -> None:
        """Write a title after an empty line."""
        self.line()
        self.line(text, style="bold")

    def verdict(self, good: bool, text: str) -> None:
        """Write a result. A word and a colour tell whether it is good."""
        self.good = self.good and good
        self._console.print(
            Text.assemble((" ok  " if good else " NO  ", "bold green" if good else "bold red"), text)
        )

    def timeline(self, trace: Trace) -> None:
        """Draw a trace, one row for each device. On a terminal it has colours."""
        self._console.print(coloured_timeline(trace, WIDTH) if self.live else Text(timeline(trace, WIDTH)))

    def table(self, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Write a table. Columns of numbers are flush right, all others flush left.

        A table of more than 16 rows shows the first 8 and the last 4.
        """
        if len(rows) > MOST_ROWS:
            rows = [*rows[: MOST_ROWS // 2], ("...", *[""] * (len(header) - 1)), *rows[-MOST_ROWS // 4 :]]
        columns = []
        for column in zip(header, *rows, strict=True):
            cells = list(map(str, column))
            right = all(cell.replace(",", "").isdigit() for cell in cells[1:] if cell)
            width = max(map(len, cells))
            columns.append([f"{cell:>{width}}" if right else f"{cell:<{width}}" for cell in cells])
        for number, row in enumerate(zip(*columns, strict=True)):
            self.line("  " + "  ".join(row).rstrip(), style="dim" if number == 0 else "")

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[int, str], None]]:
        """Yield ``update(done, text)``, which draws a bar on a terminal and writes about five lines elsewhere."""
        if not self.live:
            shown = {1, total, *(round(total * part / 4) for part in range(1, 4))}

            def write(done: int, text: str) -> None:
                if done in shown:
                    self.line(f"  {title} {done:>{len(str(total))}}/{total}  {text}")

            yield write
            return
        with Progress(
            TextColumn("  {task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}"),
            console=self._console,
        ) as bar:
            task = bar.add_task(title, total=total, text="")
            yield lambda done, text: bar.update(task, completed=done, text=text)


def fold(words: Sequence[str], indent: str = "  ", separator: str = "  ", width: int = WIDTH) -> str:
    """``words`` in lines of at most ``width`` columns. Each line begins with ``indent``."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(separator) + len(word) <= width:
            lines[-1] += separator + word
        else:
            lines.append(indent + word)
    return "\n".join(lines)
