"""The part of the plugin that runs in a device: it calls the body of a test.

A failure is raised, which cancels the other devices at once. A skip or an xfail is returned as this rank's outcome; the
host checks whether all ranks agree.
"""

import importlib
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import SkipTest

from parallelism.mesh import Mesh
from vcluster.code import Failure, describe_exception

_this_thread = threading.local()
"""``device`` is the device whose test runs in this thread."""


@dataclass(frozen=True)
class Outcome:
    """How the body of a test ended on one rank, if it did not fail."""

    kind: str
    """``passed``, ``skipped`` or ``xfailed``."""
    failure: Failure | None = None
    """The exception that skipped or xfailed the test."""
    returned: str | None = None
    """The type of the return value, if it was not None."""

    def __str__(self) -> str:
        return self.kind if self.failure is None else f"{self.kind} ({self.failure.text})"


class DeviceToCome:
    """The fixture ``device`` on the host: a placeholder for the device on which the test's body will run.

    It may be part of another value. When it arrives on a device, it is replaced by that device.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.size = mesh, mesh.size

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        device = getattr(_this_thread, "device", None)
        if device is None:
            raise AttributeError(
                f"device.{name} exists only in the body of the test, which runs on each device; fixtures run once, "
                f"on the host, and only have device.mesh and device.size"
            )
        return getattr(device, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return DeviceToCome, (self.mesh,)

    def __repr__(self) -> str:
        return f"<the device of {self.mesh!r} on which the test will run>"


class HostSide:
    """The host's objects that a device can use if it is a thread. In another process there is none."""

    def __init__(self, monkeypatch: Any = None) -> None:
        self.raised: dict[int, BaseException] = {}
        """The exceptions themselves by rank, with their frames."""
        self.monkeypatch = monkeypatch
        """The fixture, which cannot be copied."""
        _host_sides[id(self)] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return _host_side, (os.getpid(), id(self))


_host_sides: weakref.WeakValueDictionary[int, HostSide] = weakref.WeakValueDictionary()


def _host_side(pid: int, number: int) -> HostSide | None:
    return _host_sides.get(number) if pid == os.getpid() else None


class OwnMonkeyPatch:
    """A placeholder for the fixture ``monkeypatch``: each device patches its own process and undoes it at the end."""


def run_body(device: Any, test: Callable[..., Any], host: HostSide | None, /, **arguments: Any) -> Outcome:
    """Call a test with its fixtures and parameters. A `DeviceToCome` among them is replaced by this device."""
    _this_thread.device = device
    patch = None if host is None else host.monkeypatch
    if host is None and any(isinstance(value, OwnMonkeyPatch) for value in arguments.values()):
        patch = importlib.import_module("_pytest.monkeypatch").MonkeyPatch()
    own = {DeviceToCome: device, OwnMonkeyPatch: patch}
    given = {name: own.get(type(value), value) for name, value in arguments.items()}
    try:
        value = test(**given)
        return Outcome("passed", returned=None if value is None else type(value).__name__)
    except BaseException as error:
        if (kind := _kind(error)) is not None:
            return Outcome(kind, describe_exception(error))
        if host is not None:
            host.raised[device.rank] = error
        raise
    finally:
        if host is None and patch is not None:
            patch.undo()
        del _this_thread.device, given


def _kind(error: BaseException) -> str | None:
    outcomes = importlib.import_module("_pytest.outcomes")
    if isinstance(error, (SkipTest, outcomes.Skipped)):
        return "skipped"
    return "xfailed" if isinstance(error, outcomes.XFailed) else None
