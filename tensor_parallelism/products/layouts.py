"""Checks of the layouts of a sharding: their types, and whether they fit dims, shapes and mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parallelism.mesh import Mesh
from parallelism.sharding import TensorSharding


def check_layouts(
    sharding: Any, dims: Mapping[str, int], *, exactly: bool = False, waits: Sequence[str] | None = None
) -> None:
    """``TypeError`` or ``ValueError`` unless each field in ``dims`` is a layout of at least this number of dims.

    With ``exactly`` a layout must have exactly this number; then each field is replaced by the layout without ``...``.
    ``waits`` names the fields that may have a pending reduction, which must be a sum; None: every field may have any.
    """
    kind = type(sharding).__name__
    of = f"of a{'n' * (kind[0] in 'AEIOU')} {kind}"
    for name, ndim in dims.items():
        layout = getattr(sharding, name)
        if not isinstance(layout, TensorSharding):
            raise TypeError(f"{name} {of} is a TensorSharding, got {layout!r}")
        given, open_ended = len(layout.dims), layout.ellipsis is not None
        if (given > ndim if open_ended else given != ndim) if exactly else (given < ndim and not open_ended):
            least = "" if exactly else "at least "
            raise ValueError(f"{name} {of} is of {least}{ndim} dim{'s' * (ndim > 1)}, got {layout!r}")
        if exactly:
            object.__setattr__(sharding, name, layout.over(ndim))
        if waits is not None and layout.partial and name not in waits:
            raise ValueError(f"{name} {of} cannot be partial, got {layout!r}")
        if waits is not None and layout.op != "sum":
            raise ValueError(f"{name} {of} may wait for a sum, got {layout!r}")


def check_shape(tensor: str, shape: tuple[int, ...], field: str, layout: TensorSharding, mesh: Mesh) -> None:
    """``ValueError`` if a tensor's shape does not fit the layout in ``field``, or the layout does not fit the mesh."""
    try:
        layout.slices(shape, mesh, 0)
    except ValueError as error:
        raise ValueError(f"{tensor} of shape {shape} and {field}={layout!r}: {error}") from None
