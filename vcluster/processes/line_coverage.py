"""Line coverage of code that runs in devices, if coverage.py measures their host or is configured for subprocesses.

coverage.py's own support for multiprocessing does not reach a device, which is forked from our own server and ends
without the interpreter's exit hooks. vcluster does not depend on coverage.py and imports it only on request.
"""

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from typing import Any

ASKED_FOR = "VCLUSTER_COVERAGE"
"""The variable by which a host requests coverage of its devices: the options of a ``coverage.Coverage`` as JSON."""

OF_SUBPROCESSES = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")
"""The variables by which coverage.py itself requests it. The files must then be combined by the user."""

SAME_OPTIONS = ("branch", "source", "source_pkgs", "include", "omit", "timid")
"""The options that the host and its devices must share, so that their data can be combined."""


def is_loaded() -> bool:
    """Whether this process has loaded coverage.py and so may be using it."""
    return "coverage" in sys.modules


def measure() -> Callable[[], None]:
    """In a device's process: start measuring if that was requested. Returns a function that stops and saves."""
    if not any(name in os.environ for name in (ASKED_FOR, *OF_SUBPROCESSES)):
        return _nothing
    import json

    try:
        coverage: Any = importlib.import_module("coverage")
    except ImportError:
        return _nothing
    with warnings.catch_warnings(action="ignore"):
        if ASKED_FOR in os.environ:
            measured = coverage.Coverage(
                data_suffix=True, messages=False, **json.loads(os.environ[ASKED_FOR])
            )
            measured.start()
        else:
            coverage.process_startup()  # has no effect if the fork server is measured already, which then continues
            measured = coverage.Coverage.current()

    def save() -> None:
        with warnings.catch_warnings(action="ignore"):
            measured.stop()
            measured.save()

    return _nothing if measured is None else save


@contextmanager
def devices_measured() -> Iterator[None]:
    """In the host: code that devices run inside the ``with`` block, from their start to their end, counts as covered.

    Has no effect if coverage.py does not measure this process. A device that is killed reports nothing.
    """
    current = sys.modules["coverage"].Coverage.current() if is_loaded() else None
    if current is None:
        yield
        return
    import json
    import tempfile

    with tempfile.TemporaryDirectory(prefix="vcluster-coverage-") as directory:
        before = os.environ.get(ASKED_FOR)
        os.environ[ASKED_FOR] = json.dumps(
            {"data_file": os.path.join(directory, "data"), **_options(current)}
        )
        try:
            yield
        finally:
            if before is None:
                del os.environ[ASKED_FOR]
            else:
                os.environ[ASKED_FOR] = before
            _add_up(current, directory)


def _options(current: Any) -> dict[str, Any]:
    options = {name: copy(current.get_option(f"run:{name}")) for name in SAME_OPTIONS}
    if options["source"]:  # a device may start while the host is in another directory
        for i, source in enumerate(options["source"]):
            if os.path.isdir(source):
                options["source"][i] = os.path.abspath(source)
    config = getattr(current.config, "config_file", None)
    return {**options, "config_file": os.path.abspath(config) if config else False}


def _add_up(current: Any, directory: str) -> None:
    coverage = sys.modules["coverage"]
    total = current.get_data()
    for name in sorted(os.listdir(directory)):
        with suppress(coverage.exceptions.CoverageException):  # the device was killed while it wrote the file
            part = coverage.CoverageData(os.path.join(directory, name))
            part.read()
            total.update(part)


def _nothing() -> None:
    pass
