"""Which cluster a test asks for: the arguments of its mark, as a value with a readable name.

    @pytest.mark.mesh(dp=2, tp=2)               dp2_tp2
    @pytest.mark.mesh(tp=4, backend="thread")   tp4_thread
    @pytest.mark.spmd(4)                        devices4

A mark takes what `VirtualCluster` takes.  The names hold no sign that ``-k`` does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from parallelism.mesh import Mesh

OPTIONS = (
    "backend", "transport", "start_method", "hardware", "compute", "priced_dtype", "channel_capacity", "seed",
    "deadline_seconds",
)
"""The keywords of `VirtualCluster` that are no axes.  (A test sees to it that these are all: asking the class would
load NumPy while tests are collected.)"""


@dataclass(frozen=True)
class Wanted:
    """A cluster as a test asks for it."""

    mesh: Mesh
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        axes = [f"{axis}{extent}" for axis, extent in self.mesh.shape.items()]
        options = [value if isinstance(value, str) else f"{name}{value}" for name, value in self.options]
        return "_".join(axes + options)


def wanted(args: Iterable[Any], kwargs: Mapping[str, Any]) -> Wanted:
    """What the arguments of a mark ask for: a mesh, or a number of devices, or axes by name; and options.

    Raises ``TypeError`` or ``ValueError`` as `Mesh` does, and for more than one mesh.
    """
    options = tuple(sorted((name, value) for name, value in kwargs.items() if name in OPTIONS))
    axes = {name: value for name, value in kwargs.items() if name not in OPTIONS}
    meshes = list(args)
    if len(meshes) + bool(axes) != 1:
        given = ", ".join([*map(repr, meshes), *(f"{axis}={extent!r}" for axis, extent in axes.items())])
        raise TypeError(f"one mesh is expected, as in (tp=4), (4) or (Mesh(tp=4)); got ({given})")
    if axes:
        return Wanted(Mesh(**axes), options)
    return Wanted(as_mesh(meshes[0]), options)


def as_mesh(value: Any) -> Mesh:
    """A `Mesh`, a number of devices, or a dict of axes, as a `Mesh`."""
    if isinstance(value, Mesh):
        return value
    if isinstance(value, Mapping):
        return Mesh(**value)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"a mesh is a Mesh, a number of devices or a dict of axes, got {value!r}")
    return Mesh(devices=value)
