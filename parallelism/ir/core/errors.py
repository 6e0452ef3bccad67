"""What is wrong with a program: one tree of errors, each a ``ValueError`` that says where."""

from __future__ import annotations


class IRError(ValueError):
    """Of the programs of this package."""


class VerifyError(IRError):
    """A function that is none: the message names the op, by its number and as it is written."""


class ParseError(IRError):
    """A text that is no program; ``line`` and ``column`` count from 1."""

    def __init__(self, message: str, line: int, column: int) -> None:
        super().__init__(f"line {line}, column {column}: {message}")
        self.message, self.line, self.column = message, line, column

    def __reduce__(self) -> tuple[type, tuple[str, int, int]]:
        return ParseError, (self.message, self.line, self.column)


class RecordError(IRError):
    """What cannot be recorded: the message names the call and its line."""
