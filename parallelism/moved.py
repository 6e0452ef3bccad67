"""Old names: an import of a module's old path gives the new module, and an old public name gives the new one, with a warning.

docs/stability.md says how long an old name works.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "parallelism.auto_sharding.alike": "parallelism.auto_sharding.repeated_blocks",
    "parallelism.auto_sharding.joined_axes": "parallelism.auto_sharding.merged_axes",
    "parallelism.auto_sharding.worth": "parallelism.auto_sharding.dual_prices",
    "parallelism.collective_prices": "parallelism.timeline.collective_pricing",
    "parallelism.columns": "parallelism.events.columns",
    "parallelism.communication": "parallelism.algorithms.algorithms",
    "parallelism.event": "parallelism.events.event",
    "parallelism.executable": "parallelism.execution.executable",
    "parallelism.execution.meshed_pipeline": "parallelism.execution.trained_pipeline",
    "parallelism.ir.models": "parallelism.models",
    "parallelism.link_sharing": "parallelism.timeline.fair_sharing",
    "parallelism.links": "parallelism.hardware.links",
    "parallelism.phases": "parallelism.algorithms.phases",
    "parallelism.pipeline_execution": "parallelism.pipelining.execution",
    "parallelism.resharding.usual_form": "parallelism.resharding.canonical_form",
    "parallelism.schedule": "parallelism.pipelining.schedule",
    "parallelism.schedules": "parallelism.pipelining.generators",
    "parallelism.simulator": "parallelism.simulation.simulator",
    "parallelism.trace_split": "parallelism.trace.breakdown",
    "parallelism.trees": "parallelism.operation.trees",
    "vcluster.channel": "vcluster.messages.channel",
    "vcluster.cluster": "vcluster.runs.cluster",
    "vcluster.errors": "vcluster.code.errors",
    "vcluster.payload": "vcluster.messages.encoding",
}
"""The new path by the old one."""

RENAMED: dict[str, tuple[str, str, str]] = {}
"""By an old public name, as ``vcluster.Cluster``: the new name, the version with it, the version without the old one."""


def renamed(package: str, name: str, stacklevel: int) -> str | None:
    """The new name of an old one, with a ``DeprecationWarning`` for the caller; None if there is none."""
    if f"{package}.{name}" not in RENAMED:
        return None
    import warnings

    new, since, gone = RENAMED[f"{package}.{name}"]
    warnings.warn(
        f"{package}.{name} is {package}.{new} since {since}; the old name goes in {gone}",
        DeprecationWarning,
        stacklevel=stacklevel + 1,
    )
    return new


class _Finder:
    """Finds a moved module under its old path, as the same module object.

    It is a finder and a loader by its methods.  The base classes in `importlib.abc` would take longer to import than
    all of this package's face.
    """

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(MOVED[spec.name])
        spec.loader_state = module.__spec__  # the import system is about to replace it
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: the module has run already, under its new path."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Make the old paths importable; a second call changes nothing."""
    if not any(
        type(finder).__qualname__ == _Finder.__qualname__ and type(finder).__module__ == __name__
        for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, _Finder())
