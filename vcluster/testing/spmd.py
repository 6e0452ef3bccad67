"""A test whose body runs on each device: its arguments travel there, and its outcomes return."""

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from vcluster.code import ClusterError
from vcluster.code.pickling import dump
from vcluster.runs import VirtualCluster
from vcluster.testing.body import DeviceToCome, HostSide, OwnMonkeyPatch, run_body
from vcluster.testing.outcomes import agreed, exception_of, failure_of

_IN_SECTIONS = "the report has a section for what each rank prints"
_BY_A_FIXTURE = "pass what you need of it by a fixture of your own"
OF_THE_HOST = {
    **dict.fromkeys(("capsys", "capsysbinary", "capteesys", "capfd", "capfdbinary"), _IN_SECTIONS),
    "caplog": "log records of a device stay there",
    "recwarn": "use `with pytest.warns(...)` in the body",
    **dict.fromkeys(("request", "pytestconfig", "cache", "pytester", "subtests"), _BY_A_FIXTURE),
    **dict.fromkeys(
        ("record_property", "record_testsuite_property", "record_xml_attribute"),
        "let a test with virtual_cluster record it",
    ),
}
"""Fixtures that are bound to the process that runs pytest, and their replacements."""


@dataclass(frozen=True)
class Ending:
    """How a test ended on its devices."""

    error: BaseException | None = None
    """The exception for pytest. None if the test passed."""
    sections: Sequence[tuple[str, str]] = ()
    """Further sections of the report: titles and texts."""
    in_process: bool = False
    """Whether the test failed in another process, which the host's debugger cannot inspect."""
    returned: str | None = None
    """The type of the return value, which should have been None."""


def run_on_devices(cluster: VirtualCluster, test: Callable[..., Any], given: Mapping[str, Any]) -> Ending:
    """Run a test's body on every device of a cluster, with copies of the ``given`` arguments."""
    host = HostSide(next((value for value in given.values() if isinstance(value, pytest.MonkeyPatch)), None))
    arguments = _arguments(cluster, given)
    try:
        outcome = agreed(cluster.run(run_body, test, host, **arguments).outputs)
    except ClusterError as error:
        code = inspect.unwrap(test.func if isinstance(test, functools.partial) else test).__code__
        return Ending(*failure_of(error, cluster.mesh, code, host), in_process=not host.raised)
    except TypeError:
        if (reason := _what_cannot_be_sent(test, arguments)) is None:
            raise
        raise pytest.fail.Exception(reason, pytrace=False) from None
    return Ending(None if outcome.kind == "passed" else exception_of(outcome), returned=outcome.returned)


def run_examples(
    cluster: VirtualCluster, test: Any, given: Mapping[str, Any], run: Callable[..., None]
) -> None:
    """Let hypothesis draw on the host, and call ``run(body, arguments)`` for each example, on devices with empty state.

    ``test`` is the function that ``@given`` returned for the body.
    """
    body = test.hypothesis.inner_test

    @functools.wraps(body)
    def run_example(*args: Any, **drawn: Any) -> None:
        __tracebackhide__ = True
        cluster.forget()
        run(functools.partial(body, *args) if args else body, drawn)

    test.hypothesis.inner_test = run_example
    try:
        test(**given)
    finally:
        test.hypothesis.inner_test = body


def allow_fixtures(test: Any) -> None:
    """Silence hypothesis' warning that examples share fixtures: on devices, each example has copies of its own."""
    from hypothesis import HealthCheck, settings

    chosen: settings = getattr(test, "_hypothesis_internal_use_settings", settings.default) or settings()
    test._hypothesis_internal_use_settings = settings(
        chosen, suppress_health_check=[*chosen.suppress_health_check, HealthCheck.function_scoped_fixture]
    )


def _arguments(cluster: VirtualCluster, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fixtures and parameters in the form in which they go to the devices."""
    for name, value in given.items():
        if value is cluster:
            pytest.fail(
                "virtual_cluster belongs to the host; the body of an spmd test uses device", pytrace=False
            )
        if name in OF_THE_HOST and _is_of_pytest(value):
            pytest.fail(
                f"the fixture {name!r} belongs to the process that runs pytest, and the body of an spmd test runs in "
                f"other processes: {OF_THE_HOST[name]}",
                pytrace=False,
            )
    arguments = dict(given)
    for name, value in given.items():
        if name in ("device", "virtual_device"):
            arguments[name] = DeviceToCome(cluster.mesh)
        elif isinstance(value, pytest.MonkeyPatch):
            arguments[name] = OwnMonkeyPatch()
    return arguments


def _is_of_pytest(value: Any) -> bool:
    """Whether pytest has made this object or function, and not a fixture of the user's of the same name."""
    home = value.__module__ if isinstance(value, types.FunctionType) else type(value).__module__
    return home.startswith("_pytest.")


def _what_cannot_be_sent(test: Callable[..., Any], arguments: Mapping[str, Any]) -> str | None:
    """The message for the first part of the test that cannot be pickled; None if all parts can."""
    parts = ((f"the fixture or parameter {name!r}", value) for name, value in arguments.items())
    for subject, value in (("the test", test), *parts):
        try:
            dump(value, subject, lambda buffer: None)
        except TypeError as error:
            return str(error)
    return None
