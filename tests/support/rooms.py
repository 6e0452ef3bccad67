"""The rooms of the packages as the tables of docs/rooms.md; ``python tests/support/rooms.py`` writes them there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from paths import ROOT

PACKAGES = ("parallelism", "tensor_parallelism", "pipeline_parallelism", "vcluster")
WINGS = {
    "exchange": ("reads programs from elsewhere, and writes them", ("interop",)),
    "plan": ("finds the best split of a program, and says why",
             ("training", "simulation", "auto_sharding", "planning", "symbolic", "slicing", "mixing", "serving", "budgets")),
    "program": ("says what each device runs: a model as a program, its transforms, its layouts, its stages",
                ("kernels", "ir", "models", "layouts", "transforms", "pipelining", "execution")),
    "time": ("says when each event begins and how long it takes", ("timeline", "trace", "recorder")),
    "describe": ("says what there is: meshes, layouts of tensors, collectives, hardware and its costs",
                 ("mesh", "sharding", "operation", "algorithms", "collectives", "hardware", "cost", "events",
                  "resharding")),
    "ground": ("is what all others stand on; it knows nothing of parallelism",
               ("display", "arrays", "dtypes", "faces", "fast_unpickling", "memoized", "moved", "rarely_collected",
                "shared_results", "side_by_side", "spelling", "whole_files")),
}
"""The wings of `parallelism`, the highest first: what each does, and its rooms and modules.  A wing imports from those
below it; `exchange` and `plan` do not import each other.  `setup.cfg` holds this."""
PAGE = ROOT / "docs" / "rooms.md"
_TABLES = re.compile(r"<!-- rooms -->\n.*<!-- end of rooms -->\n", re.DOTALL)


def tables() -> str:
    """A table for each package: its rooms, what each is about, and its modules."""
    lines = ["<!-- rooms -->"]
    for package in PACKAGES:
        folders = sorted(_rooms(ROOT / package), key=lambda folder: folder.parts)
        if package == "parallelism":
            lines += _table_of_wings(folders)
            continue
        lines += ["", f"| in `{package}/` | its one idea | modules |", "|---|---|---|"]
        lines += [_row(folder, ROOT / package) for folder in folders]
    return "\n".join([*lines, "", "<!-- end of rooms -->", ""])


def _table_of_wings(folders: list[Path]) -> list[str]:
    """The rows of `parallelism`, wing by wing."""
    root = ROOT / "parallelism"
    lines = ["", "| in `parallelism/` | its one idea | modules |", "|---|---|---|"]
    lines += [_row(folder, root) for folder in folders if folder == root]
    for wing, (sentence, names) in WINGS.items():
        lines.append(f"| **{wing}** | **{sentence}** | |")
        for name in names:
            lines += [_row(folder, root) for folder in folders if folder.relative_to(root).parts[:1] == (name,)]
    return lines


def with_tables(document: str) -> str:
    """A document with the tables as they should be."""
    return _TABLES.sub(lambda _: tables(), document)


def _rooms(package: Path) -> list[Path]:
    return [file.parent for file in package.rglob("__init__.py")]


def _row(folder: Path, package: Path) -> str:
    sentence = (ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or "").split("\n")[0]
    names = [file.stem for file in sorted(folder.glob("*.py")) if file.stem != "__init__"]
    name = ".".join(folder.relative_to(package).parts)
    return f"| {f'`{name}`' if name else 'itself'} | {sentence} | {', '.join(f'`{name}`' for name in names)} |"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
