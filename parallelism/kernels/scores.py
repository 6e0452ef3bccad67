"""`Scores`: what is done to the scores of attention before their softmax: a mask, a cap, and biases by distance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from parallelism.arrays import Array
from parallelism.kernels.masks import Mask

_MOST = 10_000
"""The most characters of a text."""


@dataclass(frozen=True)
class Scores:
    """A mask; a ``cap``, by which scores x become ``cap * tanh(x / cap)``; and ``alibi`` biases of so many heads.

    Alibi adds ``slope * (column - row)``, where the slopes of n heads are ``2 ** (-8 i / n)`` for i from 1 on, times
    ``alibi_scale`` (Press et al., 2021, arXiv:2108.12409, section 3).  Where n is no power of 2, they are every second
    one of twice as many, as in BLOOM.

    >>> str(Scores(Mask(causal=True), cap=50.0))
    'causal;cap=50.0'
    >>> Scores.parse("causal:4;alibi=8x1.0") == Scores(Mask(True, 4), alibi=8)
    True
    """

    mask: Mask = field(default_factory=Mask)
    cap: float | None = None
    alibi: int = 0
    """The number of all heads, which the slopes depend on; 0: there are no biases."""
    alibi_scale: float = 1.0

    def bias(self, heads: range, rows: Sequence[int] | Array, columns: Sequence[int] | Array) -> Array | None:
        """The biases of these heads, rows and columns, ``(heads, rows, columns)``; None: there are none."""
        if not self.alibi:
            return None
        slopes = self.slopes(heads)
        distances = np.asarray(columns)[None, :] - np.asarray(rows)[:, None]
        biases: Array = slopes[:, None, None] * distances
        return biases

    def slopes(self, heads: range) -> Array:
        """The slopes of these heads."""
        slopes: Array = self.alibi_scale * alibi_slopes(self.alibi)[heads.start : heads.stop]
        return slopes

    def __str__(self) -> str:
        cap = "" if self.cap is None else f";cap={self.cap!r}"
        return f"{self.mask}{cap}" + (f";alibi={self.alibi}x{self.alibi_scale!r}" if self.alibi else "")

    @classmethod
    def parse(cls, text: str) -> Scores:
        """What ``text`` says, as ``str`` writes it.  ``ValueError`` for another text."""
        found = cls._read(text[:_MOST])
        if found is None or str(found) != text or not found._is_finite:
            raise ValueError(
                f'scores have a mask, and maybe a cap and alibi, as "causal;cap=50.0;alibi=8x1.0"; got {text[:40]!r}'
            )
        return found

    @classmethod
    def _read(cls, text: str) -> Scores | None:
        """What ``text`` says; None where a part is not known, or is no number."""
        mask, *parts = text.split(";")
        found = cls(Mask.parse(mask))
        for part in parts:
            name, _, value = part.partition("=")
            try:
                if name == "alibi":
                    heads, _, scale = value.partition("x")
                    found = replace(found, alibi=int(heads), alibi_scale=float(scale))
                elif name == "cap":
                    found = replace(found, cap=float(value))
                else:
                    return None
            except ValueError:
                return None
        return found

    @property
    def _is_finite(self) -> bool:
        return (
            (self.cap is None or 0 < self.cap < math.inf)
            and self.alibi >= 0
            and math.isfinite(self.alibi_scale)
        )


def alibi_slopes(heads: int) -> Array:
    """The slopes of so many heads."""
    power = 1 << (heads - 1).bit_length()
    slopes: Array = 2.0 ** (-8 / power * np.arange(1, power + 1))
    if power == heads:
        return slopes
    return np.concatenate([slopes[1::2], slopes[::2]])[:heads]
