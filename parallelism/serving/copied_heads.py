"""Heads that are fewer than the devices of tensor parallelism are copied: the parameters of the model with copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from parallelism.arrays import Array
from parallelism.models import TransformerSpec

IN, CONVOLUTION = ("state_in", "state_in_bias"), ("convolution", "convolution_bias")


def with_copies(model: TransformerSpec, devices: int) -> TransformerSpec:
    """The model as so many devices of tensor parallelism serve it: with copies of heads of keys and values, and of the groups
    of linear attention.  ``ValueError`` for heads of linear attention that cannot be dealt to them."""
    linear, copies = model.linear_attention, model.copies_over(devices)
    changes: dict[str, Any] = {} if copies == 1 else {"key_value_heads": model.groups * copies}
    if linear is not None and linear.groups % devices:
        changes["linear_attention"] = linear.over(devices)
    return replace(model, **changes) if changes else model


def copied(model: TransformerSpec, spec: TransformerSpec, name: str, array: Array) -> Array:
    """A parameter of ``spec``, the model with copies, given that of the model."""
    short = name.rpartition(".")[2]
    if short in (*IN, *CONVOLUTION):
        return _of_groups(model, spec, short, array)
    copies, width = spec.groups // model.groups, int(model.head_width)
    if short in ("key_norm", "key_norm_bias") and model.query_key_norm == "all_heads":
        return np.repeat(array.reshape(model.groups, width), copies, axis=0).reshape(-1)
    if short not in ("qkv", "qkv_bias"):
        return array
    served = model.heads // model.groups * width
    sizes = [served, 2 * width, *[served] * model.attention_gate]
    return _copied_parts(array, model.groups, copies, sizes, repeated=(1,))


def _of_groups(model: TransformerSpec, spec: TransformerSpec, short: str, array: Array) -> Array:
    """A parameter of linear attention: queries and keys are repeated, and the others dealt to the copies of a group."""
    linear, copied = model.linear_attention, spec.linear_attention
    assert linear is not None and copied is not None
    copies, served = copied.groups // linear.groups, linear.heads // linear.groups
    if short in CONVOLUTION:
        channels_last = np.moveaxis(array, 0, -1)
        found = _copied_parts(channels_last, linear.groups, copies, linear.convolved, repeated=(1, 2))
        return np.ascontiguousarray(np.moveaxis(found, -1, 0))
    *others, numbers = linear.parts
    sizes = [*others, *[served] * (numbers // served)]
    return _copied_parts(array, linear.groups, copies, sizes, repeated=(2, 3))


def _copied_parts(
    array: Array, groups: int, copies: int, sizes: Sequence[int], *, repeated: Sequence[int]
) -> Array:
    """An array whose last dim has, of each group, parts of these sizes: some are ``repeated``, the others dealt."""
    rows = array.shape[:-1]
    parts = np.split(array.reshape(*rows, groups, sum(sizes)), np.cumsum(sizes)[:-1], axis=-1)
    found = [
        np.repeat(part, copies, axis=-2)
        if number in repeated
        else part.reshape(*rows, groups * copies, part.shape[-1] // copies)
        for number, part in enumerate(parts)
    ]
    return np.concatenate(found, axis=-1).reshape(*rows, -1)
