"""The text that the small GPT learns: the docstrings of `parallelism`, read from the installed sources."""

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
"""The first character after the Latin alphabets. All characters before it are one column wide."""

_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef


def docstrings(package: str = "parallelism") -> str:
    """The docstrings of a package's modules, module by module, separated by empty lines.

    The sources are read and never run. Raises `DataError` if they are not installed.
    """
    root = Path(str(resources.files(package)))
    files = sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).parts)
    docs = [
        ast.get_docstring(node) for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, _DOCUMENTED)
    ]
    text = "\n\n".join(filter(None, docs))
    if not text:
        raise DataError(f"the sources of {package} are not installed; the demo learns from their docstrings")
    return text


def tokens_of(text: str) -> npt.NDArray[np.int64]:
    """The bytes of the text as integers."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int64)


def pieces(tokens: npt.NDArray[np.int64], rows: int, length: int, seed: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """A batch of ``rows`` pieces of ``length`` tokens each, from positions drawn with the seed."""
    starts = np.random.default_rng(seed).integers(0, len(tokens) - length + 1, rows)
    batch: npt.NDArray[np.int64] = tokens[starts[:, None] + np.arange(length)]
    return batch


def in_one_line(tokens: list[int]) -> str:
    """Tokens as one line of text: a line break becomes a space, and a character that cannot be shown becomes ``?``."""
    text = bytes(tokens).decode("utf-8", "replace")
    return "".join(" " if c.isspace() else c if c.isprintable() and c < LAST else "?" for c in text)
