"""Figures as text of at most 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from parallelism.display import WIDTH, in_columns


def seconds_text(seconds: float) -> str:
    """Three significant digits and a unit: ``12.3 us``, ``1.50 ms``, ``2.10 s``."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if abs(seconds) * factor < 999.5:
            return f"{_three(seconds * factor)} {unit}"
    return f"{_three(seconds)} s"


def nbytes_text(nbytes: int) -> str:
    """``8 B``, ``64 KiB``, ``1.5 MiB``; the largest unit that leaves at least 1."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"


def ratio_text(ratio: float) -> str:
    """``0.53``, ``12.4``, ``310``."""
    return _three(ratio) if ratio >= 10 else f"{ratio:.2f}"


def rate_text(bytes_per_second: float) -> str:
    """In units of 1e9 bytes a second, as memory is sold."""
    return f"{_three(bytes_per_second / 1e9)} GB/s"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], labels: int = 1) -> str:
    """Columns as wide as their longest cell: the first ``labels`` flush left, the others flush right.

    Raises ``ValueError`` if rows differ in length from the header.
    """
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"each row has the header's {len(header)} cells, got {len(row)}: {list(row)}")
    return "\n".join(f"  {line}" for line in in_columns([header, *rows], labels))


def paragraph(text: str, indent: str = "  ") -> str:
    """Text broken into lines."""
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False)


def _three(value: float) -> str:
    size = abs(value)
    return f"{value:.2f}" if size < 9.995 else f"{value:.1f}" if size < 99.95 else f"{value:.0f}"
