"""The cluster that a mark asks for, as a value with a readable name for the test's id.

    @pytest.mark.mesh(dp=2, tp=2)               dp2_tp2
    @pytest.mark.mesh(tp=4, backend="thread")   tp4_thread
    @pytest.mark.spmd(4)                        devices4

A mark takes the arguments of `VirtualCluster`. The names contain only characters that ``-k`` accepts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parallelism.mesh import Mesh
from parallelism.spelling import closest

OPTIONS = (
    "backend",
    "transport",
    "start_method",
    "hardware",
    "compute",
    "priced_dtype",
    "channel_capacity",
    "seed",
    "deadline_seconds",
)
"""The keywords of `VirtualCluster` that are not axes. They are listed here, because importing the class would load
NumPy while tests are collected. A test checks that the list is complete."""


@dataclass(frozen=True)
class Wanted:
    """A cluster that a test asks for."""

    mesh: Mesh
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        options = (value if isinstance(value, str) else f"{name}{value}" for name, value in self.options)
        return "_".join([*(f"{axis}{extent}" for axis, extent in self.mesh.shape.items()), *options])


def wanted(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Wanted:
    """The cluster for the arguments of a mark: a mesh, a number of devices, or axes by name, and options.

    Raises ``TypeError`` or ``ValueError`` as `Mesh` does, and for more than one mesh.
    """
    options = tuple(sorted((name, value) for name, value in kwargs.items() if name in OPTIONS))
    axes = {name: value for name, value in kwargs.items() if name not in OPTIONS}
    for name, value in axes.items():
        if not hasattr(value, "__index__") and (meant := closest(name, OPTIONS, cutoff=0.75)):
            raise TypeError(f"a mesh has no option {name!r}; did you mean {meant}?")
    meshes = [*args, *([axes] if axes else [])]
    if len(meshes) != 1:
        given = ", ".join([*map(repr, args), *(f"{axis}={extent!r}" for axis, extent in axes.items())])
        raise TypeError(f"one mesh is expected, as in (tp=4), (4) or (Mesh(tp=4)); got ({given})")
    return Wanted(as_mesh(meshes[0]), options)


def as_mesh(value: Any) -> Mesh:
    """A `Mesh`, a number of devices, or a dict of axes, as a `Mesh`."""
    if isinstance(value, Mesh):
        return value
    if isinstance(value, Mapping):
        return Mesh(**value)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"a mesh must be a Mesh, a number of devices or a dict of axes, got {value!r}")
    return Mesh(devices=value)
