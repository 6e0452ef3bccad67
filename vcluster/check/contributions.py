"""What a result is made of: whose elements are in it, and how often.

The elements have such values (`cases`) that every sum of them can be read back, digit by digit: which ranks
contributed to it, and with which elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vcluster.check.cases import BASE, Array


def made_of(value: Any, expected: Any, size: int) -> str:
    """A value in words: ``x0[2] + 2 x1[2]``, where x1[2] is element 2 of the array of rank 1.

    A multiple of what the rank contributes to ``expected`` counts as contributed so many times.
    """
    digits, wanted = digits_of(np.asarray(value), size), digits_of(np.asarray(expected), size)
    if digits is None or wanted is None:
        return str(value)
    terms = []
    for rank, (digit, number) in enumerate(zip(digits.tolist(), wanted.tolist(), strict=True)):
        times = digit // number if number and digit % number == 0 else 1
        if digit:
            terms.append(f"{f'{times} ' if times > 1 else ''}x{rank}[{digit // times - 1}]")
    return " + ".join(terms) or "0"


def digits_of(output: Array, size: int) -> Array | None:
    """By element and rank, the sum of the numbers of the elements that the rank contributed; None: not such a sum.

    The number of element e is e + 1.
    """
    if output.dtype.kind not in "iuf":
        return None
    values = output.astype(np.float64)
    if (
        not np.all(np.isfinite(values))
        or np.any(values < 0)
        or np.any(values != np.round(values))
        or np.any(values >= float(BASE) ** size)
    ):
        return None
    whole = values.astype(np.int64)
    return np.stack([whole // BASE**rank % BASE for rank in range(size)], axis=-1)
