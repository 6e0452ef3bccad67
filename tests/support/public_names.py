"""The public surface: `python tests/support/public_names.py` records it, and with ``--check`` says what is not recorded.

A line of the record is a name of one of the four packages or of a documented room, or a public member of such a class.
docs/stability.md says what the record promises.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

RECORD = Path(__file__).parents[1] / "data" / "public_names.txt"
PACKAGES = ("parallelism", "pipeline_parallelism", "tensor_parallelism", "vcluster")
ROOMS = ("parallelism.algorithms", "parallelism.auto_sharding", "parallelism.budgets", "parallelism.interop",
         "parallelism.ir", "parallelism.layouts", "parallelism.mixing", "parallelism.models", "parallelism.planning",
         "parallelism.recorder", "parallelism.serving", "parallelism.simulation", "parallelism.slicing", "parallelism.trace",
         "parallelism.training", "parallelism.transforms", "vcluster.check", "vcluster.faults", "vcluster.hangs",
         "vcluster.report", "vcluster.testing")
"""Rooms whose names the documents import from them."""


def public() -> list[str]:
    """Every public name, sorted."""
    found: set[str] = set()
    for place in (*PACKAGES, *ROOMS):
        module = importlib.import_module(place)
        for name in module.__all__:
            found |= {f"{place}.{name}", *members(f"{place}.{name}", getattr(module, name))}
    passed_on = {f"vcluster.{name}" for name in importlib.import_module("parallelism").__all__}
    return sorted(name for name in found if ".".join(name.split(".")[:2]) not in passed_on or name in passed_on)


def members(path: str, value: object) -> Iterator[str]:
    """The public members that a class of ours gives its objects: methods, properties, fields."""
    if not inspect.isclass(value):
        return
    for kind in value.__mro__:
        if kind.__module__.partition(".")[0] in PACKAGES:
            for name in {*vars(kind), *vars(kind).get("__annotations__", {})}:
                if not name.startswith("_"):
                    yield f"{path}.{name}"


def removed(recorded: Iterable[str], now: Iterable[str]) -> list[str]:
    """What is recorded and is no more."""
    return sorted(set(recorded) - set(now))


def record() -> list[str]:
    """The recorded names."""
    return RECORD.read_text(encoding="utf-8").split()


def main() -> None:
    """Write the record, or compare with it."""
    now = public()
    if sys.argv[1:] != ["--check"]:
        RECORD.write_text("\n".join(now) + "\n", encoding="utf-8")
        print(f"{len(now)} public names are recorded")
        return
    gone, new = removed(record(), now), removed(now, record())
    for name in gone:
        print("removed:", name)
    for name in new:
        print("not recorded:", name)
    sys.exit(1 if gone or new else 0)


if __name__ == "__main__":
    main()
