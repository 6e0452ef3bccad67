"""Collectives and messages as operators in the program of one device: their types and bytes, not their algorithms.

``axes`` names axes of the mesh.  ``group`` is the number of devices that take part; it may be a symbol.  Shapes are
those of the local shards.  Bytes are what one device receives under the direct algorithms
(`parallelism.algorithms.closed_forms`).  One process can run them only for groups of one, where they return their
input.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from parallelism.arrays import with_extent
from parallelism.ir.core import (
    Extent,
    Operator,
    Rule,
    TensorType,
    ceil_div,
    checked_axis,
    elementwise,
    first_dtype,
    is_negative,
    letters,
    register,
    rule,
    terms_along,
)
from parallelism.ir.operators.shapes import created
from parallelism.ir.tracing import apply
from parallelism.sharding import check_op

_GROUP = {"axes": "a list of strings", "group": "an extent"}


def alone(name: str) -> Callable[..., Any]:
    """The kernel for a group of one: it copies its input.  ``ValueError`` for a larger group."""

    def kernel(x: Any, group: int, **_: Any) -> Any:
        if group != 1:
            raise ValueError(f"{name} needs {group} devices; one process can run it only for a group of one")
        return np.array(x)

    return kernel


def _same(x: TensorType, group: Extent) -> Rule:
    """The rule of a collective that keeps the shape."""
    check_group(group)
    return elementwise([x.shape])


def check_group(group: Extent) -> None:
    if is_negative(group - 1):
        raise ValueError(f"a group has at least one device, got {group}")


def _alone_the_same(group: Extent, before: Extent, after: Extent) -> None:
    if group == 1 and before != after:
        raise ValueError(f"a group of one keeps the extent of a dim: {before} cannot become {after}")


def changed(x: TensorType, dim: int, extent: Extent, group: Extent) -> Rule:
    """The rule of a collective that changes dim ``dim`` to ``extent``."""
    check_group(group)
    _alone_the_same(group, x.shape[checked_axis(dim, x.ndim)], extent)
    return rule("->".join(terms_along(x.ndim, dim, "y!", "Z!")), [x.shape], {"Z": extent})


def with_shape(x: TensorType, shape: Sequence[Extent], moved: Sequence[bool]) -> Rule:
    """The rule of a result with this shape.  The dims that are ``moved`` are needed whole."""
    names = letters(2 * x.ndim)
    before = after = ""
    for dim, (old, new) in enumerate(zip(names[: x.ndim], names[x.ndim :], strict=True)):
        before += f"{old}!" if moved[dim] else old
        after += f"{new}!" if moved[dim] else old
    return rule(f"{before}->{after}", [x.shape], dict(zip(names[x.ndim :], shape, strict=True)))


def _with(x: TensorType, dim: int, extent: Extent) -> TensorType:
    return TensorType(x.dtype, with_extent(x.shape, dim, extent))


def _reduced(x: TensorType, axes: Sequence[str], group: Extent, op: str) -> Rule:
    check_op(op)
    return _same(x, group)


def _reduce_scatter_rule(
    x: TensorType, axes: Sequence[str], group: Extent, dim: int, extent: Extent, op: str, **algorithm: str
) -> Rule:
    check_op(op)
    return changed(x, dim, extent, group)


def _derivative_of_sum(name: str, derivative: Callable[..., Any]) -> Callable[..., list[Any]]:
    """The derivative of a collective that reduces.  ``ValueError`` unless it reduces by sum."""

    def gradient(g: Any, y: Any, x: Any, *, op: str, **attributes: Any) -> list[Any]:
        if op != "sum":
            raise ValueError(f"{name} by {op} has no derivative")
        return [derivative(g, x, **attributes)]

    return gradient


def _all_to_all_rule(
    x: TensorType,
    axes: Any,
    group: Extent,
    split_dim: int,
    split_extent: Extent,
    concat_dim: int,
    concat_extent: Extent,
    **_: Any,
) -> Rule:
    """``split_extent`` is the new extent of ``split_dim``, ``concat_extent`` that of ``concat_dim``."""
    check_group(group)
    checked_axis(split_dim, x.ndim), checked_axis(concat_dim, x.ndim)
    if split_dim == concat_dim:
        raise ValueError(f"split_dim and concat_dim must be different dims, both are {split_dim}")
    _alone_the_same(group, x.shape[split_dim], split_extent)
    _alone_the_same(group, x.shape[concat_dim], concat_extent)
    before = [f"{name}!" if d in (split_dim, concat_dim) else name for d, name in enumerate(letters(x.ndim))]
    after = [{split_dim: "Y!", concat_dim: "Z!"}.get(d, name) for d, name in enumerate(before)]
    return rule(f"{''.join(before)}->{''.join(after)}", [x.shape], {"Y": split_extent, "Z": concat_extent})


register(
    Operator(
        "all_reduce",
        _reduced,
        first_dtype,
        alone("all_reduce"),
        # The loss is the sum over devices of what each computes from y, so the gradients are summed, too.
        _derivative_of_sum("all_reduce", lambda g, x, **group: apply("all_reduce", g, **group, op="sum")),
        attributes={**_GROUP, "op": "a string"},
        # 2(g-1)/g of the array's bytes: the other members' terms of one piece, then the other reduced pieces.  With unequal
        # pieces these are the bytes of the group's first member, which has one of the largest pieces.
        received=lambda x, axes, group, op: (
            x.nbytes + (group - 2) * ceil_div(x.size, group) * x.dtype.itemsize
        ),
    )
)
register(
    Operator(
        "all_gather",
        lambda x, axes, group, dim, extent, **algorithm: changed(x, dim, extent, group),
        first_dtype,
        alone("all_gather"),
        lambda g, y, x, axes, group, dim, extent, **algorithm: [
            apply(
                "reduce_scatter",
                g,
                axes=axes,
                group=group,
                dim=dim,
                extent=x.shape[dim],
                op="sum",
                **algorithm,
            )
        ],
        attributes={**_GROUP, "dim": "an integer", "extent": "an extent"},
        optional={"algorithm": "a string"},
        received=lambda x, axes, group, dim, extent, **algorithm: _with(x, dim, extent).nbytes - x.nbytes,
    )
)
register(
    Operator(
        "reduce_scatter",
        _reduce_scatter_rule,
        first_dtype,
        alone("reduce_scatter"),
        _derivative_of_sum(
            "reduce_scatter",
            lambda g, x, axes, group, dim, extent, **algorithm: apply(
                "all_gather", g, axes=axes, group=group, dim=dim, extent=x.shape[dim], **algorithm
            ),
        ),
        attributes={**_GROUP, "dim": "an integer", "extent": "an extent", "op": "a string"},
        optional={"algorithm": "a string"},
        received=lambda x, axes, group, dim, extent, op, **algorithm: (
            _with(x, dim, extent).nbytes * (group - 1)
        ),
    )
)
register(
    Operator(
        "all_to_all",
        _all_to_all_rule,
        first_dtype,
        alone("all_to_all"),
        lambda g, y, x, axes, group, split_dim, split_extent, concat_dim, concat_extent, **algorithm: [
            apply(
                "all_to_all",
                g,
                axes=axes,
                group=group,
                split_dim=concat_dim,
                split_extent=x.shape[concat_dim],
                concat_dim=split_dim,
                concat_extent=x.shape[split_dim],
                **algorithm,
            )
        ],
        attributes={
            **_GROUP,
            "split_dim": "an integer",
            "split_extent": "an extent",
            "concat_dim": "an integer",
            "concat_extent": "an extent",
        },
        optional={"algorithm": "a string"},
        received=lambda x, axes, group, split_dim, split_extent, concat_dim, concat_extent, **_: (
            _with(_with(x, split_dim, split_extent), concat_dim, concat_extent).nbytes
            - _with(x, split_dim, split_extent).nbytes
        ),
    )
)


def _pairs_rule(x: TensorType, axes: Any, group: Extent, pairs: Sequence[Sequence[int]]) -> Rule:
    for side in zip(*pairs, strict=True):
        if len(set(side)) != len(side):
            raise ValueError(
                f"pairs must name each source and each target once, got {list(map(list, pairs))}"
            )
    return _same(x, group)


register(
    Operator(
        "permute",
        _pairs_rule,
        first_dtype,
        alone("permute"),
        lambda g, y, x, axes, group, pairs: [
            apply(
                "permute",
                g,
                axes=axes,
                group=group,
                pairs=tuple((target, source) for source, target in pairs),
            )
        ],
        attributes={**_GROUP, "pairs": "a list of pairs"},
        received=lambda x, axes, group, pairs: x.nbytes if any(a != b for a, b in pairs) else 0,
    )
)


# -- over groups of ranks that lie along no axes -----------------------------------------------------------------------

GROUPED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


def _grouped_rule(
    x: TensorType,
    collective: str,
    groups: Any,
    group: Extent,
    shape: Sequence[Extent],
    dim: int,
    concat_dim: int,
    op: str,
) -> Rule:
    """Everything is needed whole: groups of ranks lie along no axes, so nothing can be split along one."""
    if collective not in GROUPED:
        raise ValueError(f"collective must be one of {', '.join(GROUPED)}, got {collective!r}")
    check_op(op)
    check_group(group)
    if any(len(each) != group for each in groups):
        raise ValueError(f"groups must have {group} ranks each, got {list(map(list, groups))}")
    for d in (dim, concat_dim) if x.ndim else ():
        checked_axis(d, x.ndim)
    if len(shape) != x.ndim:
        raise ValueError(f"a collective keeps the number of dims, {x.ndim}, got shape {list(shape)}")
    return with_shape(x, shape, [a != b for a, b in zip(x.shape, shape, strict=True)])


def _grouped_bytes(
    x: TensorType, collective: str, groups: Any, group: Extent, shape: Sequence[Extent], **_: Any
) -> Extent:
    whole = TensorType(x.dtype, shape).nbytes
    match collective:
        case "all_reduce":
            return x.nbytes + (group - 2) * ceil_div(x.size, group) * x.dtype.itemsize
        case "all_gather":
            return whole - x.nbytes
        case "reduce_scatter":
            return whole * (group - 1)
        case "all_to_all":
            return whole - ceil_div(whole, group)
    return x.nbytes


register(
    Operator(
        "group_collective",
        _grouped_rule,
        first_dtype,
        alone("group_collective"),
        attributes={
            "collective": "a string",
            "groups": "a list of groups",
            "group": "an extent",
            "shape": "a shape",
            "dim": "an integer",
            "concat_dim": "an integer",
            "op": "a string",
        },
        received=_grouped_bytes,
    )
)


# -- messages ----------------------------------------------------------------------------------------------------------


def _no_peer(name: str) -> Callable[..., Any]:
    def kernel(*_: Any, **__: Any) -> Any:
        raise ValueError(f"{name} needs another device; one process has none")

    return kernel


def _send_rule(x: TensorType, destination: int, tag: int) -> Rule:
    """A send has no output."""
    return replace(elementwise([x.shape]), outputs=())


register(
    Operator(
        "send",
        _send_rule,
        lambda x, **_: (),
        _no_peer("send"),
        attributes={"destination": "an integer", "tag": "an integer"},
    )
)
register(
    Operator(
        "recv",
        lambda source, tag, shape, dtype: created(shape),
        lambda source, tag, shape, dtype: dtype,
        _no_peer("recv"),
        attributes={"source": "an integer", "tag": "an integer", "shape": "a shape", "dtype": "a dtype"},
        received=lambda source, tag, shape, dtype: TensorType(dtype, shape).nbytes,
    )
)
