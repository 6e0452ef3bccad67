"""What devices print during a test, kept by rank, for a section each in the report."""

from __future__ import annotations

import sys
from typing import Any

from vcluster.conduct import print_with_rank


class RankOutput:
    """Takes what devices print, unless somebody reads the host's own output: then it goes there, ranks in front.

    Somebody does under ``-s``, in ``capsys`` and ``capfd``, and in ``contextlib.redirect_stdout``: whenever
    ``sys.stdout`` is not what it was when the test began.
    """

    def __init__(self, *, captured: bool) -> None:
        """``captured``: whether pytest keeps output for the report."""
        self._captured = captured
        self._usual: dict[str, Any] = {}
        self._lines: dict[tuple[int, str], list[str]] = {}

    def begin(self) -> None:
        """A test begins."""
        self._usual = {name: getattr(sys, name) for name in ("stdout", "stderr")}
        self._lines.clear()

    def show(self, rank: int, stream: str, text: str) -> None:
        """Lines that a device printed."""
        now = getattr(sys, stream)
        if self._captured and getattr(now, "usual", now) is self._usual.get(stream):
            self._lines.setdefault((rank, stream), []).append(text)
        else:
            print_with_rank(rank, stream, text)

    def take(self) -> list[tuple[str, str]]:
        """The titles and texts of the sections, by rank; and begin anew."""
        printed = sorted(self._lines.items())
        sections = [(f"{stream} of rank {rank}", "".join(texts)) for (rank, stream), texts in printed]
        self._lines.clear()
        return sections
