"""Checked calls are kept for when they are repeated: by all their arguments, and the prepared ones by the common ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from parallelism.mesh import Axes
from parallelism.operation import ReduceOp
from vcluster.collectives.group import CheckedCall

MOST_CALLS = 4096
"""The number of checked calls that a device keeps, each in about 6 KB."""


class KeptCalls(dict[Any, CheckedCall]):
    """Keeps at most `MOST_CALLS` calls by their keys.  Any one is dropped for a new one: if it were the oldest, a loop
    over a few more calls than are kept would find none of them."""

    def __init__(self) -> None:
        self._keys: list[Any] = []
        self._places: Any = None

    def keep(self, key: Any, checked: CheckedCall) -> None:
        if len(self) < MOST_CALLS:
            self._keys.append(key)
        else:
            from random import Random  # few programs make so many calls that they load it

            self._places = self._places or Random(0)
            place = self._places.randrange(MOST_CALLS)
            del self[self._keys[place]]
            self._keys[place] = key
        self[key] = checked

    def clear(self) -> None:
        super().clear()
        self._keys.clear()


class RepeatedCalls(dict[Any, CheckedCall]):
    """Prepared calls without rare arguments, so that such a call is found without a look at these."""

    def keep(
        self,
        checked: CheckedCall,
        kind: str,
        x: Any,
        axes: Axes,
        out: Any,
        dim: int,
        root: int,
        op: ReduceOp | None,
    ) -> None:
        if len(self) >= MOST_CALLS:
            self.clear()
        if type(x) is np.ndarray:
            self[kind, x.dtype, x.shape, axes, dim, root, op] = checked
        elif x is None and type(out) is np.ndarray:
            self[kind, None, (out.dtype, out.shape), axes, dim, root, op] = checked
        elif x is None and out is None:
            self[kind, None, None, axes, dim, root, op] = checked
