"""`Mask`: to which columns the rows of attention attend, by their positions in the sequence."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parallelism.arrays import Array

_CAUSAL, _WHOLE = "causal", "whole"
_NUMBER = "[0-9]{1,9}"
_TEXT = re.compile(
    rf"(?P<word>{_CAUSAL}|{_WHOLE})(:(?P<window>{_NUMBER}))?(/(?P<documents>{_NUMBER}(,{_NUMBER})*))?"
)


@dataclass(frozen=True)
class Mask:
    """Every row attends to every column; or a ``causal`` row only to columns that are not after it, of these only to
    the last ``window``, its own among them.  With ``documents``, the lengths of documents that stand one behind another,
    to columns of its own document alone; behind the last one they begin anew.

    >>> Mask(causal=True, window=2).allowed(range(4), range(4)).astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    >>> str(Mask(causal=True, window=2)), Mask.parse("causal:2") == Mask(causal=True, window=2)
    ('causal:2', True)
    >>> Mask(causal=True, documents=(2, 1)).allowed(range(4), range(4)).astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]

    Windows are those of Beltagy et al., *Longformer*, 2020, arXiv:2004.05150, section 3.1, to one side.

    ``ValueError`` for a window of no column, for one without ``causal``, and for a document of no column.
    """

    causal: bool = False
    window: int | None = None
    documents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if wrong := [each for each in self.documents if type(each) is not int or each < 1]:
            raise ValueError(f"documents must have lengths of at least 1, got {wrong[0]!r}")
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
        own = np.asarray(rows)[:, None]
        other = np.asarray(columns)[None, :]
        allowed: Array | None = other <= own if self.causal else None
        if allowed is not None and self.window is not None:
            allowed &= other > own - self.window
        if self.documents:
            together: Array = self._document(own) == self._document(other)
            return together if allowed is None else allowed & together
        return allowed

    def _document(self, positions: Array) -> Array:
        """The number of the document in which each position is."""
        ends = np.cumsum(self.documents)
        rounds, inside = np.divmod(positions, ends[-1])
        numbers: Array = rounds * len(ends) + np.searchsorted(ends, inside, side="right")
        return numbers

    def _ends(self, positions: range) -> tuple[int, int]:
        """The numbers of the first and of the last document of these positions."""
        first, last = self._document(np.array([positions[0], positions[-1]])).tolist()
        return first, last

    def hides_all(self, rows: range, columns: range) -> bool:
        """Whether none of these rows attends to any of these columns."""
        if not rows or not columns or (self.causal and columns[0] > rows[-1]):
            return True
        if self.documents:
            (first, last), (other_first, other_last) = self._ends(rows), self._ends(columns)
            if last < other_first or other_last < first:
                return True
        return self.window is not None and columns[-1] <= rows[0] - self.window

    def hides_some(self, rows: range, columns: range) -> bool:
        """Whether some row does not attend to some column."""
        if not rows or not columns:
            return False
        if self.documents and len({*self._ends(rows), *self._ends(columns)}) > 1:
            return True
        return (self.causal and columns[-1] > rows[0]) or (
            self.window is not None and columns[0] <= rows[-1] - self.window
        )

    def __str__(self) -> str:
        text = _CAUSAL if self.causal else _WHOLE
        text += "" if self.window is None else f":{self.window}"
        return f"{text}/{','.join(map(str, self.documents))}" if self.documents else text

    @classmethod
    def parse(cls, text: str) -> Mask:
        """The mask that ``text`` says, as ``str`` writes it.  ``ValueError`` for another text."""
        found = _TEXT.fullmatch(text)
        if found is None or (found["window"] and found["word"] == _WHOLE):
            raise ValueError(
                f'a mask is as "whole", "causal", "causal:128" or "causal/512,64"; got {text[:40]!r}'
            )
        documents = tuple(map(int, found["documents"].split(","))) if found["documents"] else ()
        window = int(found["window"]) if found["window"] else None
        return cls(found["word"] == _CAUSAL, window, documents)


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
