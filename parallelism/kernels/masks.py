"""`Mask`: to which columns the rows of attention attend, by their positions in the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parallelism.arrays import Array

_CAUSAL, _WHOLE = "causal", "whole"


@dataclass(frozen=True)
class Mask:
    """Every row attends to every column; or a ``causal`` row only to columns that are not after it, of these only to
    the last ``window``, its own among them.

    >>> Mask(causal=True, window=2).allowed(range(4), range(4)).astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    >>> str(Mask(causal=True, window=2)), Mask.parse("causal:2") == Mask(causal=True, window=2)
    ('causal:2', True)

    Windows are those of Beltagy et al., *Longformer*, 2020, arXiv:2004.05150, section 3.1, to one side.

    ``ValueError`` for a window of no column, and for one without ``causal``.
    """

    causal: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is None:
            return
        if isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 1:
            raise ValueError(f"window must be a number of columns, at least 1, or None, got {self.window!r}")
        if not self.causal:
            raise ValueError(
                f"a window is of the columns up to a row's own: it needs causal=True; got "
                f"window={self.window}"
            )

    def allowed(self, rows: Sequence[int] | Array, columns: Sequence[int] | Array) -> Array | None:
        """True where a row attends to a column, ``(rows, columns)``, given their positions; None: everywhere."""
        if not self.causal:
            return None
        own, other = np.asarray(rows)[:, None], np.asarray(columns)[None, :]
        allowed: Array = other <= own
        if self.window is not None:
            allowed &= other > own - self.window
        return allowed

    def hides_all(self, rows: range, columns: range) -> bool:
        """Whether none of these rows attends to any of these columns."""
        if not rows or not columns or (self.causal and columns[0] > rows[-1]):
            return True
        return self.window is not None and columns[-1] <= rows[0] - self.window

    def hides_some(self, rows: range, columns: range) -> bool:
        """Whether some row does not attend to some column."""
        if not rows or not columns:
            return False
        return (self.causal and columns[-1] > rows[0]) or (
            self.window is not None and columns[0] <= rows[-1] - self.window
        )

    def __str__(self) -> str:
        if not self.causal:
            return _WHOLE
        return _CAUSAL if self.window is None else f"{_CAUSAL}:{self.window}"

    @classmethod
    def parse(cls, text: str) -> Mask:
        """The mask that ``text`` says, as ``str`` writes it.  ``ValueError`` for another text."""
        word, _, window = text.partition(":")
        if text == _WHOLE:
            return cls()
        if word == _CAUSAL and (not window or (window.isdecimal() and len(window) < 10)) and text[-1:] != ":":
            return cls(causal=True, window=int(window) if window else None)
        raise ValueError(f'a mask is "whole", "causal" or "causal:WINDOW", got {text[:40]!r}')


WHOLE = Mask()
"""Every row attends to every column."""


def causal_mask(rows: Sequence[int] | Array, columns: Sequence[int] | Array) -> Array:
    """True where a column is not after a row, given the positions of rows and columns in the sequence.

    >>> causal_mask([2, 3], [1, 2, 3]).astype(int).tolist()
    [[1, 1, 0], [1, 1, 1]]
    """
    allowed = Mask(causal=True).allowed(rows, columns)
    assert allowed is not None
    return allowed
