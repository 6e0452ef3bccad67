"""Replicas of a shard that differ from rank to rank, of which `Run.unshard` takes the first."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from parallelism.display.quantities import plural
from parallelism.dtypes import is_floating, limits_of
from parallelism.mesh import Mesh
from parallelism.operation import ranks_in_words
from parallelism.sharding import TensorSharding
from vcluster.code import ReplicasDifferWarning


def warn_of_replicas(
    outputs: Sequence[Any], sharding: TensorSharding, mesh: Mesh, name: str, stacklevel: int
) -> None:
    """Warn of the ranks whose output is not that of the first rank which holds the same shard."""
    others: dict[int, list[int]] = {}
    for first, *copies in sharding.replica_groups(mesh):
        differing = [rank for rank in copies if not _alike(outputs[first], outputs[rank])]
        if differing:
            others[first] = differing
    if not others:
        return
    first, ranks = next(iter(others.items()))
    more = f" Replicas of {plural(len(others) - 1, 'other shard')} differ, too." if len(others) > 1 else ""
    warnings.warn(
        f"by the layout {sharding.short()} {ranks_in_words([first, *ranks])} hold the same, and {name} of "
        f"{ranks_in_words(ranks)} is not that of rank {first}, which is taken; is a reduction missing?{more}",
        ReplicasDifferWarning,
        stacklevel=stacklevel,
    )


def _alike(one: Any, other: Any) -> bool:
    one, other = np.asarray(one), np.asarray(other)
    if one is other or np.array_equal(one, other):
        return True
    if not (is_floating(one.dtype) or one.dtype.kind == "c"):
        return False
    # Devices that add in another order may differ in the last half of the digits.  A part that is missing is more.
    rounding = float(limits_of(one.dtype).eps) ** 0.5
    one, other = (each if each.dtype.kind in "fc" else each.astype(np.float32) for each in (one, other))
    largest = np.max(np.abs(one), where=np.isfinite(one), initial=0.0)
    return bool(np.isclose(one, other, rtol=0, atol=rounding * float(largest), equal_nan=True).all())
