"""Output of devices during a test, collected by rank, for one section each in the report."""

import sys
import warnings
from typing import Any

from vcluster.processes import Warned
from vcluster.runs import print_with_rank


def warn_here(warned: Warned) -> None:
    """Warn on the host as a device has: pytest lists what the host warns of, and ``pytest.warns`` catches it."""
    module, name = warned.category
    category = getattr(sys.modules.get(module), name, UserWarning)
    warnings.warn_explicit(warned.message, category, warned.filename, warned.lineno)


class RankOutput:
    """Collects what devices print. If the host's own output is being read, it prints there instead, with ranks in
    front.

    The host's output is read under ``-s``, in ``capsys`` and ``capfd``, and in ``contextlib.redirect_stdout``: whenever
    ``sys.stdout`` is not the stream that it was at the start of the test.
    """

    def __init__(self, *, captured: bool) -> None:
        """``captured``: whether pytest collects output for the report."""
        self._captured = captured
        self._usual: dict[str, Any] = {}
        self._lines: dict[tuple[int, str], list[str]] = {}

    def begin(self) -> None:
        """Start a new test."""
        self._usual = {name: getattr(sys, name) for name in ("stdout", "stderr")}
        self._lines.clear()

    def receive(self, rank: int, stream: str, text: str) -> None:
        """Take lines that a device printed."""
        now = getattr(sys, stream)
        if self._captured and getattr(now, "usual", now) is self._usual.get(stream):
            self._lines.setdefault((rank, stream), []).append(text)
        else:
            print_with_rank(rank, stream, text)

    def take(self) -> list[tuple[str, str]]:
        """Return the titles and texts of the sections, by rank, and start again."""
        lines, self._lines = sorted(self._lines.items()), {}
        return [(f"{stream} of rank {rank}", "".join(texts)) for (rank, stream), texts in lines]
