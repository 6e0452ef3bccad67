"""Functions of PyTorch in other forms, for the export: of their own the exporter makes a program for one number of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

MOST_SUBTRACTED = 25
"""Of so many rows PyTorch subtracts each pair for their distances."""


@contextmanager
def for_any_rows(torch: Any) -> Iterator[None]:
    """A context in which functions that read sizes as numbers keep them as symbols.

    ``torch.einsum`` of three arrays and more asks the package opt_einsum for an order, which takes numbers; without it
    the arrays are contracted from left to right.  ``torch.cdist`` asks whether there are more than 25 rows.
    """
    function, method, cdist = torch.take_along_dim, torch.Tensor.take_along_dim, torch.cdist

    def take_along_dim(x: Any, indices: Any, dim: int | None = None) -> Any:
        if dim is None:
            return x.flatten().gather(0, indices.flatten())
        return _taken_along(torch, x, indices, dim)

    def distances(
        x1: Any, x2: Any, p: float = 2.0, compute_mode: str = "use_mm_for_euclid_dist_if_necessary"
    ) -> Any:
        return (
            _distances(torch, x1, x2, p, compute_mode) if p in (1.0, 2.0) else cdist(x1, x2, p, compute_mode)
        )

    torch.take_along_dim = torch.Tensor.take_along_dim = take_along_dim
    torch.cdist = distances
    try:
        with torch.backends.opt_einsum.flags(enabled=False):
            yield
    finally:
        torch.take_along_dim, torch.Tensor.take_along_dim, torch.cdist = function, method, cdist


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


def of_any_sizes(torch: Any) -> dict[Any, Callable[..., Any]]:
    """``torch.roll`` and a remainder by a size, by their operators: the exporter takes numbers alone."""
    aten = torch.ops.aten

    def roll(x: Any, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
        if all(isinstance(n, int) for n in x.shape):
            return NotImplemented
        if not dims:
            return torch.roll(x.reshape(-1), shifts, 0).reshape(x.shape)
        for shift, dim in zip(shifts, dims, strict=True):
            places = (torch.arange(x.shape[dim]) - shift) % x.shape[dim]
            x = x.index_select(dim, places)
        return x

    def remainder(x: Any, size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return NotImplemented
        return torch.remainder(x, torch.full((), size, dtype=x.dtype))

    return {aten.roll.default: roll, aten.remainder.Scalar: remainder}


def places_in_order(torch: Any) -> dict[Any, Callable[..., Any]]:
    """``torch.searchsorted`` and ``torch.bucketize``, by their operators, as counts of smaller numbers: the exporter knows
    neither.

    Code with packed sequences asks so in which sequence a token lies: ``bucketize(arange(n), cu_seqlens[1:], right=True)``.
    """

    def searchsorted(
        ordered: Any,
        x: Any,
        *,
        out_int32: bool = False,
        right: bool = False,
        side: str | None = None,
        sorter: Any = None,
    ) -> Any:
        if sorter is not None:
            return NotImplemented
        beside = ordered if ordered.dim() == 1 else ordered.unsqueeze(-2)
        larger = torch.gt if right or side == "right" else torch.ge
        is_before = torch.logical_not(larger(beside, x.unsqueeze(-1)))  # NaN comes behind all
        return is_before.sum(-1, dtype=torch.int32 if out_int32 else torch.int64)

    def bucketize(x: Any, bounds: Any, *, out_int32: bool = False, right: bool = False) -> Any:
        return searchsorted(bounds, x, out_int32=out_int32, right=right)

    aten = torch.ops.aten
    return {aten.searchsorted.Tensor: searchsorted, aten.bucketize.Tensor: bucketize}


def _distances(torch: Any, x: Any, y: Any, p: float, mode: str) -> Any:
    """``torch.cdist`` of squares and of sizes: as there many distances are those of a product.

    No gradient passes where two rows are equal.
    """
    if p == 1.0:
        return (x.unsqueeze(-2) - y.unsqueeze(-3)).abs().sum(-1)
    has_many = any(not isinstance(n, int) or n > MOST_SUBTRACTED for n in (x.shape[-2], y.shape[-2]))
    if mode == "use_mm_for_euclid_dist" or (has_many and mode == "use_mm_for_euclid_dist_if_necessary"):
        squares = (x * x).sum(-1, True) + (y * y).sum(-1).unsqueeze(-2) - 2 * x @ y.transpose(-1, -2)
    else:
        squares = (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1)
    differ = squares > 0
    return torch.where(differ, torch.where(differ, squares, 1).sqrt(), 0)


def attention(torch: Any) -> dict[Any, Callable[..., Any]]:
    """``F.scaled_dot_product_attention`` of any number of dims, of which some are broadcast, by its operator.

    The exporter to ONNX takes four dims alone, with equally many heads in all, or with fewer in keys and values that
    ``enable_gqa`` allows.
    """

    def scaled_dot_product_attention(
        q: Any, k: Any, v: Any, mask: Any = None, *options: Any, enable_gqa: bool = False, **scale: Any
    ) -> Any:
        if _is_plain_attention(q, k, v, enable_gqa):
            return NotImplemented  # the exporter knows this one
        q, k, v = _with_equal_heads(torch, q, k, v, enable_gqa)
        before = q.shape[:-2]
        if mask is not None and mask.dim() > 2:
            mask = _four_dims(mask.expand(*before, *mask.shape[-2:]))
        attended = torch.nn.functional.scaled_dot_product_attention(
            *map(_four_dims, (q, k, v)), mask, *options, **scale
        )
        return attended.reshape(*before, *attended.shape[-2:])

    return {torch.ops.aten.scaled_dot_product_attention.default: scaled_dot_product_attention}


def _is_plain_attention(q: Any, k: Any, v: Any, enable_gqa: bool) -> bool:
    """Whether all have four dims, with equally many heads, or with fewer in keys and values if ``enable_gqa`` says so."""
    if {x.dim() for x in (q, k, v)} != {4} or k.shape[1] != v.shape[1]:
        return False
    return bool(enable_gqa == (q.shape[1] != k.shape[1]))


def _with_equal_heads(torch: Any, q: Any, k: Any, v: Any, enable_gqa: bool) -> list[Any]:
    """Queries, keys and values with the same dims in front of the last two; with ``enable_gqa`` heads are repeated."""
    if enable_gqa:
        k, v = [x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v)]
    before = torch.broadcast_shapes(*[x.shape[:-2] for x in (q, k, v)])
    return [x.expand(*before, *x.shape[-2:]) for x in (q, k, v)]


def _four_dims(x: Any) -> Any:
    """``x`` with one dim more or with fewer: those in front of the heads are one."""
    while x.dim() < 4:
        x = x.unsqueeze(0 if x.dim() == 2 else -3)
    return x.flatten(0, -4)


def means_of_all(torch: Any) -> dict[Any, Callable[..., Any]]:
    """Adaptive averages with one element, by their operators, as means: PyTorch writes the mean of an array that lies by
    channels as places in memory, in which no row is found again."""

    def pool(x: Any, extents: Sequence[int]) -> Any:
        dims = tuple(range(-len(extents), 0))
        return x.mean(dims, keepdim=True) if set(extents) == {1} else NotImplemented

    aten = torch.ops.aten
    pools = aten.adaptive_avg_pool1d, aten.adaptive_avg_pool2d, aten.adaptive_avg_pool3d
    return {each.default: pool for each in pools}


def complex_numbers(torch: Any) -> dict[Any, Callable[..., Any]]:
    """What is done to complex numbers as what is done to pairs of real ones, by operators that the exporter has for real
    numbers alone."""
    aten = torch.ops.aten
    moves: dict[Any, Callable[..., Any]] = {
        aten.expand.default: lambda pairs, extents: pairs.expand(*extents, 2),
        aten.index.Tensor: lambda pairs, indices: aten.index(pairs, indices),
        aten.repeat.default: lambda pairs, times: pairs.repeat(*times, 1),
        aten.select.int: lambda pairs, dim, place: pairs.select(_of_pairs(dim), place),
        aten.unsqueeze.default: lambda pairs, dim: pairs.unsqueeze(_of_pairs(dim)),
        aten.zeros_like.default: lambda pairs: torch.zeros_like(pairs),
    }

    def einsum(equation: str, arrays: Sequence[Any], **path: Any) -> Any:
        if len(arrays) != 2 or not all(x.is_complex() for x in arrays):
            return NotImplemented
        (a, b), (c, d) = [(x.real, x.imag) for x in arrays]
        real = torch.einsum(equation, a, c) - torch.einsum(equation, b, d)
        return torch.complex(real, torch.einsum(equation, a, d) + torch.einsum(equation, b, c))

    def where(chosen: Any, x: Any, y: Any) -> Any:
        if not (x.is_complex() and y.is_complex()):
            return NotImplemented
        return torch.view_as_complex(
            torch.where(chosen[..., None], torch.view_as_real(x), torch.view_as_real(y))
        )

    def copied(x: Any, y: Any, non_blocking: bool = False) -> Any:
        return y.to(x.dtype).expand(x.shape) if x.is_complex() else NotImplemented

    def slice_scatter(x: Any, y: Any, dim: int = 0, *places: Any) -> Any:
        if not x.is_complex():
            return NotImplemented
        pairs = torch.view_as_real(x), torch.view_as_real(y)
        return torch.view_as_complex(torch.slice_scatter(*pairs, _of_pairs(dim), *places))

    def zeros(extents: Any, *, dtype: Any = None, **how: Any) -> Any:
        if dtype is None or not dtype.is_complex:
            return NotImplemented
        return torch.view_as_complex(torch.zeros([*extents, 2], dtype=dtype.to_real()))

    return {
        **{operator: _moved_pairs(torch, move) for operator, move in moves.items()},
        aten.copy.default: copied,
        aten.einsum.default: einsum,
        aten.slice_scatter.default: slice_scatter,
        aten.where.self: where,
        aten.zeros.default: zeros,
    }


def _moved_pairs(torch: Any, move: Callable[..., Any]) -> Callable[..., Any]:
    def moved(x: Any, *how: Any, **options: Any) -> Any:
        if not x.is_complex():
            return NotImplemented
        return torch.view_as_complex(move(torch.view_as_real(x), *how))

    return moved


def _of_pairs(dim: int) -> int:
    """The dim of pairs for one of complex numbers: they have one more, the last."""
    return dim if dim >= 0 else dim - 1
