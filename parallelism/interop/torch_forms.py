"""Functions of PyTorch in other forms, for the export: of their own the exporter makes a program for one number of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def for_any_rows(torch: Any) -> Iterator[None]:
    """A context in which functions that read sizes as numbers keep them as symbols.

    ``torch.einsum`` of three arrays and more asks the package opt_einsum for an order, which takes numbers; without it
    the arrays are contracted from left to right.
    """
    function, method = torch.take_along_dim, torch.Tensor.take_along_dim

    def take_along_dim(x: Any, indices: Any, dim: int | None = None) -> Any:
        if dim is None:
            return x.flatten().gather(0, indices.flatten())
        return _taken_along(torch, x, indices, dim)

    torch.take_along_dim = torch.Tensor.take_along_dim = take_along_dim
    try:
        with torch.backends.opt_einsum.flags(enabled=False):
            yield
    finally:
        torch.take_along_dim, torch.Tensor.take_along_dim = function, method


def _taken_along(torch: Any, x: Any, indices: Any, dim: int) -> Any:
    """``torch.take_along_dim``: the other dims of both are broadcast, that of ``dim`` has as many as there are indices."""
    along = dim % x.dim()
    others = torch.broadcast_shapes(
        [1 if d == along else n for d, n in enumerate(x.shape)],
        [1 if d == along else n for d, n in enumerate(indices.shape)],
    )
    extents = [*others[:along], -1, *others[along + 1 :]]
    return x.expand(extents).gather(along, indices.expand(extents))


def cumulative_products(torch: Any) -> dict[Any, Callable[..., Any]]:
    """``torch.cumprod``, by its operator, in products of twice as many elements each: ONNX has none in this opset."""

    def cumprod(x: Any, dim: int, *, dtype: Any = None) -> Any:
        if dtype is None:
            dtype = x.dtype if x.is_floating_point() else torch.int64
        found = x.to(dtype)
        if not x.dim():
            return found.clone()
        step, extent = 1, x.shape[dim]
        while step < extent:
            before, later = found.narrow(dim, 0, extent - step), found.narrow(dim, step, extent - step)
            found = torch.cat([found.narrow(dim, 0, step), before * later], dim)
            step *= 2
        return found

    return {torch.ops.aten.cumprod.default: cumprod}
