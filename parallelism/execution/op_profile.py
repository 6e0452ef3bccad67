"""Seconds of ops on this machine: each different op is measured once, and a file keeps the result.

    profile = Profile("laptop.json")
    executable = Executable(function, mesh, seconds=profile)        # in place of flops and bytes
    simulate(executable, "dgx-h100")                                # compute takes the seconds measured here

Two ops are equal if their kinds, types and attributes are equal, except the position of a part in a whole tensor.  An
op runs on numbers between 0 and 1, with indices 0, several times; the fastest run counts.  The file is JSON.  It is
checked when it is read, and nothing in it is evaluated.
"""

import json
import os
import time
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from parallelism.dtypes import is_floating
from parallelism.ir import Op, Value
from parallelism.ir.passes.interpreter import run

FORMAT, VERSION = "vcluster profile", 1
LEAST_SECONDS, LEAST_RUNS, MOST_RUNS = 2e-3, 3, 1000
"""An op is measured for at least these seconds and runs, and at most these runs."""

Measure = Callable[[Op], float]


def measured(op: Op) -> float:
    """Seconds of wall time that an op takes on this machine: the least of several runs after the first."""
    rng = np.random.default_rng(0)
    arrays = []
    for type in op.types:
        values = rng.random(type.shape) if is_floating(type.dtype) else np.zeros(type.shape)
        arrays.append(np.asarray(values, type.dtype))
    with np.errstate(all="ignore"):
        run(op, arrays)
        taken: list[float] = []
        while len(taken) < LEAST_RUNS or (sum(taken) < LEAST_SECONDS and len(taken) < MOST_RUNS):
            start = time.perf_counter()
            run(op, arrays)
            taken.append(time.perf_counter() - start)
    return min(taken)


class Profile:
    """The seconds of ops: ``profile(op)``.

    >>> from parallelism import Profile, models
    >>> profile = Profile(measure=lambda op: 1e-6 * len(op.inputs))
    >>> product = models.mlp((4, 3), 2).ops[0]
    >>> profile(product), profile.seconds
    (2e-06, {'%y0 = "matmul"(%x0, %x1) : (tensor<2x4xf64>, tensor<4x3xf64>) -> tensor<2x3xf64>': 2e-06})

    ``path`` is the file of the profile; it is created if it does not exist.  None: the profile is only in memory.
    ``measure(op)`` measures an op that is not in the profile yet.  ``ValueError`` with the path for a file that is not
    a profile.
    """

    def __init__(self, path: str | PathLike[str] | None = None, measure: Measure = measured) -> None:
        self.path = None if path is None else Path(path)
        self.seconds = _read(self.path) if self.path is not None and self.path.exists() else {}
        """The seconds of each op, by its `key_of`."""
        self._measure = measure

    def __call__(self, op: Op) -> float:
        """The seconds of an op; a new op is measured and written to the file.  ``ValueError`` for one with symbols."""
        key = key_of(op)
        if key not in self.seconds:
            self.seconds[key] = float(self._measure(op))
            if self.path is not None:
                document = {
                    "format": FORMAT,
                    "version": VERSION,
                    "seconds": dict(sorted(self.seconds.items())),
                }
                beside = self.path.with_name(f"{self.path.name}.{os.getpid()}")
                beside.write_text(json.dumps(document, indent=1), encoding="utf-8")
                beside.replace(self.path)  # a reader sees the old file or the new one
        return self.seconds[key]

    def __getstate__(self) -> dict[str, Any]:
        """Devices get the known seconds, without the file and without a way to measure."""
        return {"path": None, "seconds": self.seconds, "_measure": _unknown}


def key_of(op: Op) -> str:
    """The text of an op, which is equal for ops that take equal time.  ``ValueError`` for an op with symbols."""
    if symbols := {name for value in (*op.inputs, *op.outputs) for name in value.type.symbols}:
        raise ValueError(f"{op.kind} has symbols, {', '.join(sorted(symbols))}, and cannot be measured")
    inputs = tuple(Value(f"x{i}", type) for i, type in enumerate(op.types))
    outputs = tuple(Value(f"y{i}", value.type) for i, value in enumerate(op.outputs))
    given = tuple((name, value) for name, value in op.attributes if name not in ("first", "starts"))
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
        raise ValueError(
            f"{path}: expected version {VERSION} of a profile, got {str(document.get('version'))[:40]}"
        )
    seconds = document.get("seconds")
    if not isinstance(seconds, dict):
        raise ValueError(f"{path}: seconds should be a table by op, got {str(seconds)[:40]}")
    for key, value in seconds.items():
        if type(value) not in (int, float) or not 0 <= value < np.inf:
            raise ValueError(
                f"{path}: seconds of {key[:60]!r} should be a number from 0 on, got {str(value)[:40]}"
            )
    return {key: float(value) for key, value in seconds.items()}
