"""The line of the code that an op was recorded from: errors and reports name it, and nothing else depends on it."""

import linecache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from parallelism.ir.core.function import Function, Value

MOST_SHOWN = 200
"""The most characters of a line that are shown."""


class Line(NamedTuple):
    """A line of the user's code, or of the text that a program was read from."""

    file: str
    """Empty: the text of the program."""
    number: int

    @property
    def text(self) -> str:
        """What stands there now; empty if the file cannot be read."""
        return linecache.getline(self.file, self.number).strip() if self.file else ""

    @property
    def place(self) -> str:
        """The file and the number, as ``model.py:12``."""
        return f"{self.file}:{self.number}" if self.file else f"line {self.number} of its text"

    def __str__(self) -> str:
        text = self.text
        return f"{self.place}: {text[:MOST_SHOWN]}" if text else f"at {self.place}"


def line_of(function: "Function", value: "Value") -> Line | None:
    """The line of the op that computes a value; None for an input."""
    return next((op.line for op in function.ops if value in op.outputs), None)


def on_line(line: Line | None) -> str:
    """The end of an error about an op of this line, on a line of its own; empty for an op without one."""
    return "" if line is None else f"\n  {line}"
