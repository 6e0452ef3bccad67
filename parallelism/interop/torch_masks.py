"""What PyTorch writes where a mask says so, as a choice between two numbers: the exporter looks up the places, and how many
there are depends on the numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from parallelism.interop.torch_experts import DOMAIN


def masked_writes(torch: Any) -> dict[Any, Callable[..., Any]]:
    """``x[mask] = value`` and ``x.masked_scatter(mask, source)``, by their operators."""
    aten = torch.ops.aten

    def index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
        given = [dim for dim, index in enumerate(indices) if index is not None]
        if len(given) != 1 or indices[given[0]].dtype != torch.bool:
            return NotImplemented
        mask = indices[given[0]]
        behind = x.dim() - given[0] - mask.dim()
        value = _for_each_place(values, behind)
        if value is None:
            return _put_in_rows(torch, x, given[0], mask, values, accumulate)
        chosen = mask.reshape(*mask.shape, *[1] * behind)
        return torch.where(chosen, x + value if accumulate else value.to(x.dtype), x)

    def masked_scatter(x: Any, mask: Any, source: Any) -> Any:
        """The k-th place of the mask gets the k-th element of the source."""
        chosen = mask.expand(x.shape)
        number = chosen.reshape(-1).to(torch.int64).cumsum(0) - 1
        taken = source.reshape(-1)[number.clamp(min=0)]
        return torch.where(chosen, taken.reshape(x.shape), x)

    return {aten.index_put.default: index_put, aten.masked_scatter.default: masked_scatter}


def _put_in_rows(torch: Any, x: Any, dim: int, mask: Any, values: Any, accumulate: bool) -> Any:
    """A value of its own for each place, by an operator of our own: how many places there are is not known.

    `parallelism.interop.onnx_models.experts` says what it means.
    """
    if dim != 0 or values.dim() != x.dim() - mask.dim() + 1:
        return NotImplemented
    how = {"added": int(accumulate)}
    inputs = x, mask, values.to(x.dtype)
    return torch.onnx.ops.symbolic(f"{DOMAIN}::Put", inputs, how, dtype=x.dtype, shape=x.shape, version=1)


def _for_each_place(values: Any, behind: int) -> Any:
    """``values`` without the dim of the places, if all places get the same ones; else None.

    ``behind`` is the number of dims that a place has.
    """
    more = values.dim() - behind
    if more <= 0:
        return values
    if any(not isinstance(n, int) or n != 1 for n in values.shape[:more]):
        return None
    return values.reshape(values.shape[more:])
