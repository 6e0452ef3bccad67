"""`Deduplicated`: an all_to_all that takes the rows of tokens to their experts, and a token once to each node or device.

A token with k experts is in k of the rows that an all_to_all moves.  Software for it sends the token once to each node
that has some of its experts, and there once to each device: DeepEP's kernels with RDMA and NVLink forwarding
(https://github.com/deepseek-ai/DeepEP), the ``flex`` dispatcher of Megatron-Core.  So fewer bytes are on the links than
there are rows.  How many depends on the data; the mean is known where every choice of experts is as likely.

A call names it as its algorithm, in words.  It is run as a direct one, with every row; only its price is that of the
bytes that such software sends.
"""

from __future__ import annotations

import re
from functools import lru_cache
from math import comb
from typing import NamedTuple

from parallelism.algorithms.chunks import ChunkOf

_WORDS = re.compile(r"deduplicated\((\d+) of (\d+)(?:, in (\d+) of (\d+) groups)?\)")


class Deduplicated(NamedTuple):
    """Tokens with ``chosen`` of ``experts``, which are in ``groups`` of neighbours; all of them in ``groups_chosen``.

    >>> tokens = Deduplicated(8, 128)
    >>> str(tokens), Deduplicated.of(str(tokens)) == tokens
    ('deduplicated(8 of 128)', True)
    >>> round(tokens.share(2), 3), round(tokens.share(16), 3), tokens.share(128)
    (0.249, 0.825, 1.0)
    """

    chosen: int
    experts: int
    groups: int = 1
    groups_chosen: int = 1

    @classmethod
    def of(cls, algorithm: str | None) -> Deduplicated | None:
        """What the name of an algorithm says; None for another algorithm."""
        return None if algorithm is None else _read(algorithm)

    def share(self, units: int) -> float:
        """The rows that leave for ``units`` with equally many experts each, if a token goes once to each, by all rows.

        It is the expected number of units that have experts of a token, over ``chosen``.  With one group that is
        ``units (1 - C(experts - e, chosen) / C(experts, chosen)) / chosen``, where a unit has e experts.  Groups count
        where units have whole groups, or groups whole units.
        """
        return min(1.0, units * self._is_met(max(1, self.experts // units)) / self.chosen)

    def _is_met(self, own: int) -> float:
        """The probability that a token has some of the ``own`` experts of a unit."""
        size = self.experts // self.groups
        if own % size and size % own:
            return 1 - self._missed(self.experts, own)
        open_to_it = size * self.groups_chosen
        if own < size:
            return self.groups_chosen / self.groups * (1 - self._missed(open_to_it, own))
        inside = own // size
        missed = 0.0
        for number in range(min(inside, self.groups_chosen) + 1):
            ways = comb(inside, number) * comb(self.groups - inside, self.groups_chosen - number)
            missed += ways / comb(self.groups, self.groups_chosen) * self._missed(open_to_it, number * size)
        return 1 - missed

    def _missed(self, experts: int, own: int) -> float:
        """The probability that none of the chosen ones is among ``own`` of so many ``experts``."""
        return comb(experts - own, self.chosen) / comb(experts, self.chosen)

    def __str__(self) -> str:
        limit = f", in {self.groups_chosen} of {self.groups} groups" if self.groups > 1 else ""
        return f"deduplicated({self.chosen} of {self.experts}{limit})"


@lru_cache(maxsize=1024)
def _read(algorithm: str) -> Deduplicated | None:
    found = _WORDS.fullmatch(algorithm)
    if found is None:
        return None
    chosen, experts, groups_chosen, groups = (int(number or 1) for number in found.groups())
    inside = experts // groups if groups else 0
    fits = 1 <= groups_chosen <= groups and inside * groups == experts
    return (
        Deduplicated(chosen, experts, groups, groups_chosen)
        if fits and 1 <= chosen <= inside * groups_chosen
        else None
    )


def runs_directly(collective: str, algorithm: str | None) -> bool:
    """Whether a call that names this algorithm is run by the direct one."""
    is_deduplicated = collective == "all_to_all" and Deduplicated.of(algorithm) is not None
    return algorithm in (None, "direct") or is_deduplicated or ChunkOf.of(collective, algorithm) is not None
