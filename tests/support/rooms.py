"""The rooms of the packages as the tables of docs/design.md; ``python tests/support/rooms.py`` writes them there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from paths import ROOT

PACKAGES = ("parallelism", "tensor_parallelism", "pipeline_parallelism", "vcluster")
DESIGN = ROOT / "docs" / "design.md"
_TABLES = re.compile(r"<!-- rooms -->\n.*<!-- end of rooms -->\n", re.DOTALL)


def tables() -> str:
    """A table for each package: its rooms, what each is about, and its modules."""
    lines = ["<!-- rooms -->"]
    for package in PACKAGES:
        lines += ["", f"| in `{package}/` | its one idea | modules |", "|---|---|---|"]
        lines += [_row(folder, ROOT / package) for folder in sorted(_rooms(ROOT / package), key=lambda f: f.parts)]
    return "\n".join([*lines, "", "<!-- end of rooms -->", ""])


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
    DESIGN.write_text(with_tables(DESIGN.read_text()))
