"""Embeddings of PyTorch, for the export: rows of padding that learn nothing, and sums of rows in bags.

Exporters to ONNX read the rows of a table, and lose what PyTorch's backward does with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def embedding(torch: Any, table: Any, indices: Any, padding: int, by_frequency: bool) -> Any:
    """``F.embedding``: the row ``padding``, if it is not negative, has no gradient.

    ``NotImplementedError`` for gradients that are divided by how often their row is read (``scale_grad_by_freq``).
    """
    if by_frequency:
        raise NotImplementedError(
            "an embedding with scale_grad_by_freq has gradients that programs do not have"
        )
    if padding < 0:
        return NotImplemented
    rows = torch.ops.aten.embedding.default(table, indices)
    return torch.where((indices == padding).unsqueeze(-1), rows.detach(), rows)


@contextmanager
def bags_of_rows(torch: Any) -> Iterator[None]:
    """A context in which ``F.embedding_bag`` of bags of one size, as indices ``(bags, n)``, is written in plain operators."""
    functional = torch.nn.functional
    before = functional.embedding_bag

    def embedding_bag(indices: Any, table: Any, offsets: Any = None, *given: Any, **named: Any) -> Any:
        taken = _Arguments(*given, **named)
        if (
            indices.dim() != 2
            or offsets is not None
            or taken.max_norm is not None
            or taken.scale_grad_by_freq
        ):
            return before(indices, table, offsets, *given, **named)
        rows = functional.embedding(indices, table)
        if taken.per_sample_weights is not None:
            rows = rows * taken.per_sample_weights.unsqueeze(-1)
        if taken.padding_idx is None:
            return _mixed(torch, rows, taken.mode)
        padding = taken.padding_idx % table.shape[0]
        return _mixed_but_padding(torch, rows, (indices != padding).unsqueeze(-1), taken.mode)

    functional.embedding_bag = embedding_bag
    try:
        yield
    finally:
        functional.embedding_bag = before


class _Arguments:
    """The arguments of ``F.embedding_bag`` behind the offsets."""

    def __init__(
        self,
        max_norm: float | None = None,
        norm_type: float = 2,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        per_sample_weights: Any = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
    ) -> None:
        self.max_norm, self.scale_grad_by_freq, self.mode = max_norm, scale_grad_by_freq, mode
        self.per_sample_weights, self.padding_idx = per_sample_weights, padding_idx


def _mixed(torch: Any, rows: Any, mode: str) -> Any:
    """The sum, the mean or the largest of the rows ``(bags, n, h)`` of each bag."""
    return {"sum": torch.sum, "mean": torch.mean, "max": torch.amax}[mode](rows, 1)


def _mixed_but_padding(torch: Any, rows: Any, counts: Any, mode: str) -> Any:
    """`_mixed` of the rows that count, by ``counts`` of shape ``(bags, n, 1)``; zeros for a bag that has none."""
    if mode == "max":
        largest = torch.where(counts, rows, float("-inf")).amax(1)
        return torch.where(counts.any(1), largest, 0.0)
    total = torch.where(counts, rows, 0.0).sum(1)
    return total if mode == "sum" else total / counts.sum(1).clamp(min=1)
