"""How dense the code is: tokens by package and room; ``python tests/support/density.py`` prints them.

A token is what `tokenize` yields, without comments, docstrings and white space; a code line is a line that has one.
"""

from __future__ import annotations

import ast
import io
import sys
import token
import tokenize
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from paths import ROOT

PACKAGES = ("parallelism", "tensor_parallelism", "pipeline_parallelism", "vcluster")
_WHITE = {token.NEWLINE, token.INDENT, token.DEDENT, token.ENDMARKER, tokenize.NL, tokenize.COMMENT, tokenize.ENCODING}


class Density(NamedTuple):
    """Tokens, and the lines that have one."""

    tokens: int
    lines: int

    @property
    def by_line(self) -> float:
        """Tokens of a line, in the mean."""
        return self.tokens / max(self.lines, 1)

    def __add__(self, other: Density) -> Density:  # type: ignore[override]
        return Density(self.tokens + other.tokens, self.lines + other.lines)


def density_of(file: Path) -> Density:
    """That of a module."""
    count, lines = _tokens(file.read_text())
    return Density(count, len(lines))


def long_functions(file: Path, most: int) -> list[str]:
    """The functions of a module with more than so many lines of code, as "name: lines"."""
    text = file.read_text()
    starts = [number for number, line in enumerate(text.splitlines()) if line.lstrip().startswith(("def ", "async def "))]
    if all(end - start <= most for start, end in pairwise([*starts, text.count("\n")])):     # most are: parsing takes long
        return []
    spans = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    spans = [node for node in spans if (node.end_lineno or 0) - node.lineno >= most]
    rows = text.splitlines()
    spans = [node for node in spans if sum(map(_may_be_code, rows[node.lineno - 1:node.end_lineno])) > most]
    if not spans:
        return []
    _, lines = _tokens(text)
    counted = {node.name: len(lines.intersection(range(node.lineno, (node.end_lineno or 0) + 1))) for node in spans}
    return [f"{name}: {count}" for name, count in counted.items() if count > most]


def nested_expressions(file: Path) -> list[str]:
    """What a module packs into one expression, as "line: what":

    - a condition inside a condition: branches say it, or a function with a name;
    - a comprehension inside another one, unless both have one ``for`` and the inner one makes the whole elements, as in
      ``[[f(i, j) for j in columns] for i in rows]``;
    - a condition inside a comprehension, unless it is the whole element, as in
      ``[1 if dim in axes else n for dim, n in enumerate(shape)]``.
    """
    found: list[str] = []
    _find_nested(ast.parse(file.read_text()), None, False, found)
    return found


_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _find_nested(node: ast.AST, around: ast.AST | None, in_condition: bool, found: list[str]) -> None:
    """Adds what is wrong in a node, inside the comprehension ``around`` it."""
    if isinstance(node, ast.stmt):      # such as the body of a function inside a function
        around, in_condition = None, False
    elif isinstance(node, _COMPREHENSIONS):
        if around is not None and not (_is_plain(node) and _is_plain(around) and node in _elements(around)):
            found.append(f"{node.lineno}: a comprehension inside a comprehension")
        around = node
    elif isinstance(node, ast.IfExp):
        if in_condition:
            found.append(f"{node.lineno}: a condition inside a condition")
        if around is not None and node not in _elements(around):
            found.append(f"{node.lineno}: a condition inside a comprehension")
        in_condition = True
    for child in ast.iter_child_nodes(node):
        _find_nested(child, around, in_condition, found)


def _is_plain(comprehension: ast.AST) -> bool:
    """Whether a comprehension has one ``for`` and no ``if``."""
    first, *others = comprehension.generators           # type: ignore[attr-defined]
    return not others and not first.ifs


def _elements(comprehension: ast.AST) -> list[ast.AST]:
    """The expressions that make the elements; of ``tuple(x for ...)`` that inside."""
    if isinstance(comprehension, ast.DictComp):
        elements: list[ast.AST] = [comprehension.key, comprehension.value]
    else:
        elements = [comprehension.elt]                  # type: ignore[attr-defined]
    for element in [*elements]:
        if isinstance(element, ast.Call) and isinstance(element.func, ast.Name) and element.func.id in _BUILDERS:
            elements += element.args
    return elements


_BUILDERS = ("tuple", "list", "set", "frozenset")


def _may_be_code(row: str) -> bool:
    """Whether a row has more than white space and a comment."""
    return row.lstrip()[:1] not in ("", "#")


def _tokens(text: str) -> tuple[int, set[int]]:
    """The number of tokens, and the lines that have one."""
    strings = _lone_strings(ast.parse(text))
    lines: set[int] = set()
    count = 0
    for each in tokenize.generate_tokens(io.StringIO(text).readline):
        if each.type in _WHITE or each.start in strings:
            continue
        count += 1
        lines.update(range(each.start[0], each.end[0] + 1))
    return count, lines


def _lone_strings(tree: ast.AST) -> set[tuple[int, int]]:
    """Where docstrings begin: of modules, classes and functions, and those behind a field."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found.add((node.value.lineno, node.value.col_offset))
    return found


def of_folder(folder: Path) -> Density:
    """That of all modules of a folder."""
    return sum((density_of(file) for file in sorted(folder.rglob("*.py"))), Density(0, 0))


if __name__ == "__main__":
    for package in sys.argv[1:] or PACKAGES:
        found = of_folder(ROOT / package)
        print(f"{found.by_line:5.1f} tokens a line, {found.tokens:7,} tokens, {found.lines:6,} lines  {package}")
        for room in sorted(path for path in (ROOT / package).iterdir() if path.is_dir() and path.name != "__pycache__"):
            inside = of_folder(room)
            if inside.tokens:
                print(f"  {inside.by_line:5.1f} {inside.tokens:9,} {inside.lines:7,}  {room.name}")
