"""What the small GPT learns from: the docstrings of `parallelism`, read from the sources that are installed."""

from __future__ import annotations

import ast
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vcluster.demo.data import DataError

VOCABULARY = 256
"""Tokens are bytes."""

LAST = "\u0250"
"""The first character after the Latin ones, all of which are a column wide."""

_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef


def docstrings(package: str = "parallelism") -> str:
    """Those of the modules of a package, module by module, an empty line between them.

    Read and never run.  `DataError` where the sources are not there.
    """
    root = Path(str(resources.files(package)))
    files = sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).parts)
    found = [
        ast.get_docstring(node) for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, _DOCUMENTED)
    ]
    text = "\n\n".join(filter(None, found))
    if not text:
        raise DataError(f"the sources of {package}, whose docstrings are the text, are not installed")
    return text


def tokens_of(text: str) -> npt.NDArray[np.int64]:
    """Its bytes."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int64)


def pieces(tokens: npt.NDArray[np.int64], rows: int, length: int, seed: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """A batch: ``rows`` pieces of so many tokens, from places that the seed draws."""
    starts = np.random.default_rng(seed).integers(0, len(tokens) - length + 1, rows)
    found: npt.NDArray[np.int64] = tokens[starts[:, None] + np.arange(length)]
    return found


def in_one_line(tokens: list[int]) -> str:
    """As text a column a character: a space for what ends a line, ? for what is no text, or not of these alphabets."""
    text = bytes(tokens).decode("utf-8", "replace")
    return "".join(" " if c.isspace() else c if c.isprintable() and c < LAST else "?" for c in text)
