"""`RotaryScaling`: how the frequencies of rotary positions are stretched for sequences longer than those of training."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from parallelism.arrays import Array

KINDS = {"linear": 1, "llama3": 4, "yarn": 5, "factors": None}
"""How many numbers each kind has; ``factors`` has one for each pair of features."""


@dataclass(frozen=True)
class RotaryScaling:
    """A kind of scaling and its numbers, after the functions of ``modeling_rope_utils.py`` in transformers 5.24.0.

    ``linear``: factor.  Positions are divided by it (Chen et al., 2023, arXiv:2306.15595).
    ``llama3``: factor, low and high frequency factor, original length.  Waves longer than the original length by the
    low factor are divided, those shorter than by the high one stay, and between they are mixed.
    ``yarn``: factor, fast and slow rotations, original length, and 1 if the range of mixing ends on whole pairs
    (Peng et al., 2023, arXiv:2309.00071, section 3.2).
    ``factors``: what each frequency is divided by (Ding et al., *LongRoPE*, 2024, arXiv:2402.13753).

    >>> RotaryScaling.parse("linear:8") == RotaryScaling("linear", (8.0,))
    True
    >>> RotaryScaling.parse("linear:2").frequencies(100.0, 4).tolist()
    [0.5, 0.05]
    """

    kind: str
    numbers: tuple[float, ...]

    def frequencies(self, base: float, features: int) -> Array:
        """Radians for each position, of the pairs of so many features."""
        plain: Array = base ** (-np.arange(0, features, 2) / features)
        if self.kind == "linear":
            return plain / self.numbers[0]
        if self.kind == "llama3":
            return self._llama3(plain)
        if self.kind == "yarn":
            return self._yarn(plain, base, features)
        if len(self.numbers) != len(plain):
            raise ValueError(
                f"there must be a factor for each of {len(plain)} pairs, got {len(self.numbers)}"
            )
        divided: Array = plain / np.array(self.numbers)
        return divided

    def _llama3(self, plain: Array) -> Array:
        factor, low, high, length = self.numbers
        turns = length * plain / (2 * math.pi)
        kept = np.clip((turns - low) / (high - low), 0, 1)
        mixed: Array = plain * (kept + (1 - kept) / factor)
        return mixed

    def _yarn(self, plain: Array, base: float, features: int) -> Array:
        factor, fast, slow, length, whole = self.numbers
        ends = [
            features * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (fast, slow)
        ]
        if whole:
            ends = [math.floor(ends[0]), math.ceil(ends[1])]
        first, last = max(ends[0], 0), min(ends[1], features - 1)
        last = last if last != first else last + 0.001
        divided = np.clip((np.arange(len(plain)) - first) / (last - first), 0, 1)
        mixed: Array = plain * (1 - divided + divided / factor)
        return mixed

    def __str__(self) -> str:
        return f"{self.kind}:{','.join(f'{number!r}' for number in self.numbers)}"

    @classmethod
    def parse(cls, text: str) -> RotaryScaling:
        """The scaling that ``text`` says, as ``str`` writes it.  ``ValueError`` for another text."""
        kind, _, rest = text.partition(":")
        try:
            numbers = tuple(float(number) for number in rest.split(","))
        except ValueError:
            numbers = ()
        wanted = KINDS.get(kind, 0)
        positive = numbers and all(0 <= number < math.inf for number in numbers) and numbers[0] > 0
        if not positive or wanted not in (None, len(numbers)):
            told = ", ".join(f"{name} with {count or 'some'}" for name, count in KINDS.items())
            raise ValueError(
                f"a scaling of rotary positions is a kind and its numbers ({told}), got {text[:60]!r}"
            )
        return cls(kind, numbers)
