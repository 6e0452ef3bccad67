"""The usual mistakes of a kernel, looked for where all shards have one size, so that no empty shard blurs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vcluster.testing.ring_causes import ring_cause, shard_of
from vcluster.testing.sharded import VAGUE, Near, likely_cause

if TYPE_CHECKING:
    from vcluster.testing.kernels import KernelCase

Array = npt.NDArray[Any]
Reference = Callable[..., npt.ArrayLike]


def even_cause(
    kernel: Callable[..., Any], reference: Reference, case: KernelCase, axis: str, near: Near
) -> str | None:
    """The mistake that explains the outputs of a case with equal shards along ``axis``.

    "" if none of those known does, and None if the outputs are right.
    """
    mesh = case.cluster.mesh
    outputs = [np.asarray(output) for output in case.run(kernel).outputs]
    if all(near(output, shard_of(case.expected, case, rank)) for rank, output in enumerate(outputs)):
        return None
    with np.errstate(all="ignore"):
        likely = likely_cause(outputs, case.layout, case.expected, mesh, near)
        if likely and not likely.startswith(VAGUE):
            return likely
        return (
            _local(outputs, reference, case, axis, near)
            or _repeated_term(outputs, reference, case, axis, near)
            or ring_cause(kernel, reference, case, axis, near)
        )


def _local(outputs: Sequence[Array], reference: Reference, case: KernelCase, axis: str, near: Near) -> str:
    """Whether each rank returns what the reference makes of its shards alone."""
    mesh = case.cluster.mesh
    shards = [layout.shard(array, mesh) for array, layout in case.arguments]
    try:
        alone = [np.asarray(reference(*each)) for each in zip(*shards, strict=True)]
    except (ValueError, IndexError, TypeError):  # the reference does not take such shapes
        return ""
    if not all(map(near, outputs, alone)):
        return ""
    return (
        f"each rank returns the reference of its own shards: what the reference computes along a dim that is split over "
        f"{axis!r}, such as a sum or a maximum, needs the other ranks of {axis!r}"
    )


def _repeated_term(
    outputs: Sequence[Array], reference: Reference, case: KernelCase, axis: str, near: Near
) -> str:
    """Whether an argument that all ranks have is added on each of them, before a sum."""
    size = case.cluster.mesh.shape[axis]
    arrays = [array for array, _ in case.arguments]
    for place, (array, layout) in enumerate(case.arguments):
        if axis in layout.axes:
            continue
        without = np.asarray(reference(*arrays[:place], np.zeros_like(array), *arrays[place + 1 :]))
        repeated = case.expected + (size - 1) * (case.expected - without)
        if all(near(output, shard_of(repeated, case, rank)) for rank, output in enumerate(outputs)):
            return (
                f"argument {place + 1}, which all ranks of {axis!r} hold, is added on each of them before the sum over "
                f"{axis!r}: add it after the sum"
            )
    return ""
