"""What a device takes from its host's process: where modules and files lie, what is warned of, how arrays are printed,
and which of the user's modules have changed since the device imported them."""

import functools
import importlib
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any, NamedTuple

import numpy as np

from parallelism.algorithms import registry
from parallelism.operation import is_installed
from vcluster.code.pickling import dump, load


class Environment(NamedTuple):
    """The places where imports and relative file names are looked up, and what is warned of. Devices use the host's."""

    path: tuple[str, ...]
    directory: str | None
    """None if the host's current directory was removed."""
    registered: bytes = b""
    """The kinds and algorithms of collectives that were registered on the host; empty if there are none."""
    filters: tuple[tuple[Any, ...], ...] = ()
    """The host's filters of warnings, each with the module and the name of its class; empty for devices that are threads."""
    floating: tuple[tuple[str, Any], ...] = ()
    """What NumPy does at a division by zero, an overflow, an underflow and an invalid operation."""
    printing: tuple[tuple[str, Any], ...] = ()
    """How NumPy prints arrays, as ``np.set_printoptions`` takes it, without functions of the host's."""


def environment(*, processes: bool = True) -> Environment:
    """What the host has at this moment, for `apply_environment` and `apply_settings`.

    Devices that are no ``processes`` have the host's tables of collectives and its filters of warnings.
    """
    try:
        directory = os.getcwd()
    except FileNotFoundError:
        directory = None
    return Environment(
        tuple(entry or directory or entry for entry in sys.path),
        directory,
        _registered(registry.version()) if processes else b"",
        _by_name(tuple(warnings.filters)) if processes else (),
        tuple(np.geterr().items()),
        tuple(item for item in np.get_printoptions().items() if not (item[0] in _OF_FUNCTIONS and item[1])),
    )


_OF_FUNCTIONS = ("formatter", "override_repr")
"""Options of printing that are functions, or have some."""


@functools.lru_cache(maxsize=1)
def _registered(version: int) -> bytes:
    """What was registered, as bytes; made again when that has changed."""
    records = registry.registered()
    return dump(records, "what was registered") if any(records) else b""


@functools.lru_cache(maxsize=16)
def _by_name(filters: tuple[Any, ...]) -> tuple[tuple[Any, ...], ...]:
    """Filters of warnings, with the module and the name of a class in place of the class."""
    return tuple(
        (action, message, (category.__module__, category.__qualname__), module, line)
        for action, message, category, module, line in filters
    )


def apply_environment(value: Environment) -> None:
    """In a device: use the host's places for imports and files."""
    if tuple(sys.path) != value.path:
        sys.path[:] = value.path
        importlib.invalidate_caches()
    if value.directory is not None:
        with suppress(OSError):  # it was removed, or this process may not enter it
            os.chdir(value.directory)
    if value.registered or any(registry.registered()):
        importlib.import_module("parallelism.algorithms.algorithms")  # has the table of algorithms
        registry.install(load(value.registered) if value.registered else ((), ()))


def apply_settings(value: Environment) -> None:
    """In the thread of a device: warn, raise and print arrays as the host does, by ``warnings`` and by NumPy's settings.

    A filter is left out if this process has not imported the class of its warnings: nothing warns by that class yet, and
    to import it, such as those of pytest, may take longer than the run.
    """
    np.seterr(**dict(value.floating))
    np.set_printoptions(**dict(value.printing))
    if not value.filters:
        return
    filters = []
    for action, message, (home, name), module, line in value.filters:
        category = getattr(sys.modules.get(home), name, None)
        if isinstance(category, type):
            filters.append((action, message, category, module, line))
    warnings.resetwarnings()  # tells the module, too, that there are others now
    warnings.filters[:] = filters  # type: ignore[index]


class ModuleWatcher:
    """Notices that the file of a user's module has changed since this process imported it.

    It stands in ``sys.meta_path`` before the usual finder and notes a file's size and time before the module is loaded,
    so that no change goes unnoticed. When one file has changed, all watched modules are removed from ``sys.modules``,
    because modules that imported the changed one hold parts of it. The next program imports them again.
    """

    def __init__(self) -> None:
        self._versions: dict[str, tuple[str, tuple[int, int] | None]] = {}
        self._known: set[str] = set()
        self._seen: tuple[int, str | None] = 0, None
        """The number of modules at the last check and the name of the newest. A new module changes them."""

    def install(self) -> None:
        """Begin to watch. Modules that are already imported are watched from their present state."""
        place = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
        sys.meta_path.insert(place, self)
        self._note_others()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Answer the import system as the usual finder does, and note the file's version."""
        spec = PathFinder.find_spec(name, path, target)
        if (
            spec is not None
            and spec.has_location
            and spec.origin is not None
            and not is_installed(spec.origin)
        ):
            self._versions[name] = spec.origin, _version(spec.origin)
        return spec

    def refresh(self) -> tuple[str, ...]:
        """Remove the user's modules if one of their files has changed. Returns the names of the changed modules."""
        if self._seen != (len(sys.modules), next(reversed(sys.modules), None)):
            self._note_others()
        changed = tuple(
            name
            for name, (file, version) in self._versions.items()
            if name in sys.modules and _version(file) != version
        )
        if changed:
            for name, (file, _) in self._versions.items():
                module = sys.modules.pop(name, None)
                package, _, attribute = name.rpartition(".")
                if module is not None and getattr(sys.modules.get(package), attribute, None) is module:
                    delattr(sys.modules[package], attribute)
                if (
                    name in changed
                ):  # a .pyc stores whole seconds and the size, so it misses a quick edit of equal size
                    with suppress(OSError, NotImplementedError):
                        os.unlink(importlib.util.cache_from_source(file))
            self._known.difference_update(self._versions)
            self._versions.clear()
            importlib.invalidate_caches()
        return changed

    def _note_others(self) -> None:
        for name in sys.modules.keys() - self._known:
            self._known.add(name)
            file = getattr(sys.modules.get(name), "__file__", None)
            if (
                name not in self._versions
                and name != "__main__"
                and isinstance(file, str)
                and not is_installed(file)
                and (version := _version(file)) is not None  # `torch.ops` has a file that does not exist
            ):
                self._versions[name] = file, version
        self._seen = len(sys.modules), next(reversed(sys.modules), None)


def _version(file: str) -> tuple[int, int] | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


@functools.cache
def _watcher() -> ModuleWatcher:
    watcher = ModuleWatcher()
    watcher.install()
    return watcher


def refresh_modules() -> tuple[str, ...]:
    """In a device, before a program is loaded: import the user's modules again whose files have changed.

    The first call begins to watch and must precede the first program. Returns the names of the changed modules.
    """
    return _watcher().refresh()
