"""Convolutions and reductions over windows, which several formats have, in terms of operators of the IR."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from parallelism.interop.folding import convert, emit, whole
from parallelism.interop.moving_elements import flipped, padded, reshaped, transposed


def windows_of(
    x: Any,
    axes: Sequence[int],
    sizes: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> Any:
    """Windows along several dims: each dim becomes that of the windows' places; new last dims are those inside them."""
    x = whole(x)
    for axis, size, stride, dilation in zip(axes, sizes, strides, dilations, strict=True):
        reach = (size - 1) * dilation + 1
        x = emit("windows", x, axis=axis, size=reach, step=stride)
        if dilation > 1:
            x = emit("slice", x, axis=x.ndim - 1, begin=0, end=reach, step=dilation)
    return x


def convolution(
    x: Any,
    kernel: Any,
    *,
    strides: Sequence[int],
    low: Sequence[int],
    high: Sequence[int],
    dilations: Sequence[int],
    x_dilations: Sequence[int] | None = None,
    groups: int = 1,
    batch_groups: int = 1,
    reverse: Sequence[bool] | None = None,
    dtype: np.dtype[Any] | None = None,
) -> Any:
    """A convolution of ``x`` (batch, features, ...) by ``kernel`` (out features, in features, ...).

    The result is (batch, out features, ...).  ``low`` and ``high`` are the zeros on both sides of a dim; negative ones
    cut off.  ``groups`` divides features into as many parts that do not mix; ``batch_groups`` divides the batch.
    """
    count = len(strides)
    for i, turned in enumerate(reverse or ()):
        kernel = flipped(kernel, 2 + i) if turned else kernel
    interior = [n - 1 for n in x_dilations or [1] * count]
    x = padded(x, np.zeros((), x.dtype), [0, 0, *low], [0, 0, *high], [0, 0, *interior])
    if dtype is not None:
        x, kernel = convert(x, dtype), convert(kernel, dtype)
    if batch_groups > 1:  # a group of the batch goes with a group of the features that come out
        n, *rest = x.shape
        x = reshaped(
            transposed(reshaped(x, (batch_groups, n // batch_groups, *rest)), [1, 0, *range(2, x.ndim + 1)]),
            (n // batch_groups, batch_groups * rest[0], *rest[1:]),
        )
        groups = batch_groups
    sizes = kernel.shape[2:]
    spatial, inner = "hwdefgij"[:count], "HWDEFGIJ"[:count]
    if all(n == 1 for n in sizes) and all(s == 1 for s in strides):
        patches = whole(x)
        kernel = reshaped(kernel, kernel.shape[:2])
        inner = ""
    else:
        patches = windows_of(x, range(2, 2 + count), sizes, strides, dilations)
    if groups == 1:
        return emit("einsum", patches, whole(kernel), equation=f"nc{spatial}{inner},oc{inner}->no{spatial}")
    n, features, *rest = patches.shape
    out = kernel.shape[0]
    patches = reshaped(patches, (n, groups, features // groups, *rest))
    kernel = reshaped(kernel, (groups, out // groups, *kernel.shape[1:]))
    result = emit(
        "einsum", whole(patches), whole(kernel), equation=f"nkc{spatial}{inner},koc{inner}->nko{spatial}"
    )
    return reshaped(result, (n, out, *result.shape[3:]))


def grid(
    x: Any, axes: Sequence[int], sizes: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> Any:
    """`windows_of`, with the elements of each window in one last dim."""
    found = windows_of(x, axes, sizes, strides, dilations)
    shape = found.shape[: len(found.shape) - len(axes)]
    return reshaped(found, (*shape, int(np.prod(sizes, dtype=np.int64))))
