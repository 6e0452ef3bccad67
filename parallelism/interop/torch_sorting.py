"""Sorted numbers, their counts, and products of sorted rows of PyTorch, for the export: layers of experts have them.

PyTorch's exporter to ONNX has no operator for some of them, and needs to know how many numbers it sorts.  So they are
written with operators of our own, which stand in the file only; `parallelism.interop.onnx_models.experts` says what they
mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from parallelism.interop.torch_experts import DOMAIN


@contextmanager
def sizes_of_groups(torch: Any) -> Iterator[None]:
    """A context in which functions of groups need no numbers.

    ``torch.bincount(x, minlength=n)`` has n numbers; how many more there are depends on ``x``.  Without numbers PyTorch
    knows the product of groups in bfloat16 alone; here it is our operator.
    """
    function, method = torch.bincount, torch.Tensor.bincount
    products = [(module, name) for module, name in _products(torch) if hasattr(module, name)]
    own = [getattr(module, name) for module, name in products]

    def bincount(x: Any, weights: Any = None, minlength: int = 0) -> Any:
        if not minlength or not isinstance(minlength, int):
            return function(x, weights, minlength)
        is_own = x.reshape(-1, 1) == torch.arange(minlength, device=x.device)
        if weights is None:
            return is_own.to(torch.int64).sum(0)
        return torch.where(is_own, weights.reshape(-1, 1), 0).sum(0)

    torch.bincount = torch.Tensor.bincount = bincount
    for (module, name), original in zip(products, own, strict=True):
        setattr(module, name, partial(_grouped, torch, original))
    try:
        yield
    finally:
        torch.bincount, torch.Tensor.bincount = function, method
        for (module, name), original in zip(products, own, strict=True):
            setattr(module, name, original)


def _products(torch: Any) -> list[tuple[Any, str]]:
    """The functions that multiply groups of rows, if this PyTorch has them."""
    return [(torch, "_grouped_mm"), (torch.nn.functional, "grouped_mm")]


def _grouped(
    torch: Any,
    original: Callable[..., Any],
    rows: Any,
    weights: Any,
    offs: Any = None,
    bias: Any = None,
    out_dtype: Any = None,
) -> Any:
    """The rows of each group times its weight, by an operator of our own; other products as they are."""
    if rows.dim() != 2 or weights.dim() != 3 or offs is None or bias is not None:
        return original(rows, weights, offs=offs, bias=bias, out_dtype=out_dtype)
    shape = rows.shape[0], weights.shape[2]
    inputs = rows, weights, offs
    made = torch.onnx.ops.symbolic(
        f"{DOMAIN}::GroupedProduct", inputs, dtype=rows.dtype, shape=shape, version=1
    )
    return made if out_dtype is None else made.to(out_dtype)


def sorted_rows(torch: Any) -> dict[Any, Callable[..., Any]]:
    """``torch.sort``, ``torch.argsort`` and ``torch.histc``, by their operators."""
    aten = torch.ops.aten

    def sort(x: Any, dim: int = -1, descending: bool = False) -> Any:
        return torch.onnx.ops.symbolic_multi_out(
            f"{DOMAIN}::Sort",
            (x,),
            {"axis": dim % max(x.dim(), 1), "descending": int(descending)},
            dtypes=(x.dtype, torch.int64),
            shapes=(x.shape, x.shape),
            version=1,
        )

    def stable_sort(x: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
        return sort(x, dim, descending)

    def argsort(x: Any, dim: int = -1, descending: bool = False) -> Any:
        return sort(x, dim, descending)[1]

    def stable_argsort(x: Any, *, stable: bool, dim: int = -1, descending: bool = False) -> Any:
        return sort(x, dim, descending)[1]

    def histc(x: Any, bins: int = 100, min: float = 0, max: float = 0) -> Any:
        if min >= max:  # the range is that of the numbers
            return NotImplemented
        place = ((x - min) * (bins / (max - min))).floor()
        place = torch.where(x == max, bins - 1, place)  # the last bin has its end, too
        is_own = place.reshape(-1, 1) == torch.arange(bins, device=x.device)
        return is_own.to(x.dtype).sum(0, dtype=x.dtype)

    return {
        aten.sort.default: sort,
        aten.sort.stable: stable_sort,
        aten.msort.default: lambda x: sort(x, 0)[0],
        aten.argsort.default: argsort,
        aten.argsort.stable: stable_argsort,
        aten.histc.default: histc,
    }
