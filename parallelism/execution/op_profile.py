"""What ops take on this machine: each distinct one is measured once, and remembered in a file.

    profile = Profile("laptop.json")
    executable = Executable(function, mesh, seconds=profile)        # in place of flops and bytes
    simulate(executable, "dgx-h100")                                # its compute takes what it takes here

Two ops are one where kind, types and attributes agree; where in a whole a part begins makes no difference.  An op is
run on numbers between 0 and 1, indices being 0, for as long as it takes to be sure; of these runs the fastest counts.
The file is JSON, checked when it is read; nothing in it is evaluated.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from parallelism.ir import Op, Value
from parallelism.ir.passes.interpreter import run

FORMAT, VERSION = "vcluster profile", 1
LEAST_SECONDS, LEAST_RUNS, MOST_RUNS = 2e-3, 3, 1000

Measure = Callable[[Op], float]


def measured(op: Op) -> float:
    """Seconds by the clock on the wall that an op takes here, the least of several runs after the first."""
    rng = np.random.default_rng(0)
    arrays = []
    for type in op.types:
        shape = tuple(int(extent) for extent in type.shape)
        drawn = rng.random(shape) if type.dtype.kind == "f" else np.zeros(shape)
        arrays.append(np.asarray(drawn, type.dtype))
    with np.errstate(all="ignore"):
        run(op, arrays)
        best, spent, runs = np.inf, 0.0, 0
        while runs < LEAST_RUNS or (spent < LEAST_SECONDS and runs < MOST_RUNS):
            start = time.perf_counter()
            run(op, arrays)
            taken = time.perf_counter() - start
            best, spent, runs = min(best, taken), spent + taken, runs + 1
    return float(best)


class Profile:
    """Seconds by op: ``profile(op)``.

    ``path`` is the file that it is kept in, made if there is none; None: in memory only.  ``measure`` is what measures
    an op that is not known yet.  ``ValueError``, naming the file, for one that is no such profile.
    """

    def __init__(self, path: str | PathLike[str] | None = None, measure: Measure = measured) -> None:
        self.path = None if path is None else Path(path)
        self.seconds: dict[str, float] = {}
        """By the text of an op."""
        self._measure = measure
        if self.path is not None and self.path.exists():
            self.seconds = _read(self.path)

    def __call__(self, op: Op) -> float:
        """What an op takes; measured, and written to the file, if that is not known.  ``ValueError`` for a symbol."""
        key = key_of(op)
        found = self.seconds.get(key)
        if found is None:
            found = self.seconds[key] = float(self._measure(op))
            if self.path is not None:
                self._write(self.path)
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Devices get what is known, and neither the file nor anything that measures."""
        return {"path": None, "seconds": self.seconds, "_measure": _unknown}

    def _write(self, path: Path) -> None:
        document = {"format": FORMAT, "version": VERSION, "seconds": dict(sorted(self.seconds.items()))}
        text = json.dumps(document, indent=1)
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)    # who reads meanwhile finds the one or the other


def key_of(op: Op) -> str:
    """An op as text, the same for all that take the same.  ``ValueError`` for one with symbols."""
    symbols = {name for value in (*op.inputs, *op.outputs) for name in value.type.symbols}
    if symbols:
        raise ValueError(f"{op.kind} has symbols, {', '.join(sorted(symbols))}, and cannot be measured")
    inputs = tuple(Value(f"x{i}", type) for i, type in enumerate(op.types))
    outputs = tuple(Value(f"y{i}", value.type) for i, value in enumerate(op.outputs))
    given = tuple((name, value) for name, value in op.attributes if name != "starts")
    return str(Op(op.kind, inputs, given, outputs))


def _unknown(op: Op) -> float:
    raise ValueError(f"a device does not measure: {op.kind} is not in the profile")


def _read(path: Path) -> dict[str, float]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected a vcluster profile, got what is no JSON: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"{path}: expected a vcluster profile, got {str(document)[:40]}")
    if document.get("version") != VERSION:
        raise ValueError(f"{path}: expected version {VERSION} of a profile, got {str(document.get('version'))[:40]}")
    seconds = document.get("seconds")
    if not isinstance(seconds, dict):
        raise ValueError(f"{path}: seconds should be a table by op, got {str(seconds)[:40]}")
    for key, value in seconds.items():
        number = not isinstance(value, bool) and isinstance(value, int | float)
        if not number or not 0 <= value < np.inf:
            raise ValueError(f"{path}: seconds of {key[:60]!r} should be a number from 0 on, got {str(value)[:40]}")
    return {key: float(value) for key, value in seconds.items()}
