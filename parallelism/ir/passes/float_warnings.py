"""Floating-point warnings of a program that is run here: they name the op, at the line that it was recorded from."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from parallelism.ir.core import Function, Op


class RunningOp:
    """The op whose kernel runs.  NumPy calls this with a kind of error, such as ``divide by zero``."""

    def __init__(self, function: Function) -> None:
        self._name = function.name
        self.op: Op | None = None

    def __call__(self, what: str, flag: int) -> None:
        op = self.op
        assert op is not None
        file, number = (op.line.file, op.line.number) if op.line is not None else ("", 0)
        warnings.warn_explicit(
            f"{what} encountered in {op.kind}",
            RuntimeWarning,
            file or f"@{self._name}",
            number,
            registry=globals().setdefault("__warningregistry__", {}),
        )


@contextmanager
def at_lines_of(function: Function) -> Iterator[RunningOp]:
    """A context in which NumPy warns at the lines of a program.  What it ignores and raises stays as it is, and so does
    all where the user has a function that NumPy calls.
    """
    running = RunningOp(function)
    usual = np.geterr()
    if {"call", "log"} & {*usual.values()}:
        yield running
        return
    warned = {kind: "call" for kind, how in usual.items() if how == "warn"}
    with np.errstate(call=running, **warned):  # type: ignore[arg-type]
        yield running
