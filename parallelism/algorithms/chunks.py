"""`ChunkOf`: a part of an all_gather or reduce_scatter whose parts go one after the other, each beside a product.

Software that cuts a collective so makes no call of a library for each part.  The *userbuffers* of Transformer Engine
(``transformer_engine/common/comm_gemm_overlap``) write into memory of the other devices that was mapped once: a ring
goes round once while the parts are multiplied, and each part is one of its steps.  So all parts together take what the
whole takes on the links, and no part has the base of a call (`parallelism.hardware.rates.Reached`).

A call names it as its algorithm, in words.  It is run as a direct one; only its price is that of such a part.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

_WORDS = re.compile(r"chunk of ([1-9]\d*)")
KINDS_IN_CHUNKS = ("all_gather", "reduce_scatter")


class ChunkOf(NamedTuple):
    """One of so many equal ``parts``.

    >>> str(ChunkOf(8)), ChunkOf.of("all_gather", "chunk of 8"), ChunkOf.of("all_reduce", "chunk of 8")
    ('chunk of 8', ChunkOf(parts=8), None)
    """

    parts: int

    @classmethod
    def of(cls, collective: str, algorithm: str | None) -> ChunkOf | None:
        """What the name of an algorithm says; None for another algorithm, and for collectives that have no such parts."""
        return None if algorithm is None or collective not in KINDS_IN_CHUNKS else _read(algorithm)

    def __str__(self) -> str:
        return f"chunk of {self.parts}"


@lru_cache(maxsize=1024)
def _read(algorithm: str) -> ChunkOf | None:
    found = _WORDS.fullmatch(algorithm)
    return None if found is None else ChunkOf(int(found[1]))
