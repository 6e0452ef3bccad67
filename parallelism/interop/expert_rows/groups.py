"""Products of groups of rows, as ``jax.lax.ragged_dot`` and ``torch._grouped_mm``: each row times the matrix of its group.

The groups lie one behind the other, and where each ends is a number of the program.  So rows are dealt to their groups, as
tokens are to experts (`parallelism.ir.operators.dispatch`), each with slots for an even share.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from parallelism.interop.expert_rows.choices import even_slots
from parallelism.interop.folding import convert, emit, whole
from parallelism.interop.moving_elements import iota, reshaped
from parallelism.ir.core import Extent


class Groups:
    """So many groups of ``length`` rows; ``ends`` has where each ends.  Rows behind the last are in none."""

    def __init__(self, ends: Any, length: Extent) -> None:
        count = ends.shape[0]
        assert isinstance(count, int)
        is_behind = emit("less_equal", reshaped(ends, (1, count)), whole(iota(length, ends.dtype, 2, 0)))
        number = emit("sum", convert(is_behind, np.dtype(np.int32)), axes=(1,), keepdims=False)
        self.length = length
        self.of_rows = whole(reshaped(number, (1, length, 1)))
        slots = even_slots(1, count, length)
        self.shape = count, 1, slots.rows
        self.how: dict[str, Any] = {"each": slots.each, "first": 0, "drops": False}

    def dealt(self, rows: Any) -> Any:
        """Rows ``(n, k)`` in the slots of their groups, ``(e, 1, c, k)``."""
        width = rows.shape[1]
        of_one = whole(reshaped(rows, (1, self.length, width)))
        return emit("dispatch", of_one, self.of_rows, shape=(*self.shape, width), **self.how)

    def multiplied(self, rows: Any, matrices: Any) -> Any:
        """Each row ``(n, k)`` times the matrix of its group, of ``(e, k, f)``; zeros for rows that are in none."""
        made = emit("einsum", self.dealt(rows), matrices, equation="ebck,ekf->ebcf")
        back = emit("combine", made, self.of_rows, **self.how)
        return reshaped(back, (self.length, matrices.shape[2]))

    def products(self, rows: Any, others: Any) -> Any:
        """For each group the product of its rows ``(n, k)`` with the same rows of another array ``(n, f)``."""
        return emit("einsum", self.dealt(rows), self.dealt(others), equation="ebck,ebcf->ekf")
