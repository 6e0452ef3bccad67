"""The pytest plugin: tests on virtual devices.

    @pytest.mark.mesh(tp=4)
    def test_on_the_cluster(virtual_cluster): ...       # the test runs on the host; the devices are warm

    @pytest.mark.spmd(dp=2, tp=2)
    def test_in_every_device(device): ...               # the body runs on each device

The package registers the plugin, so every pytest session loads it. NumPy and the runtime are loaded only when the first
test asks for a cluster. `vcluster.testing` contains the implementation.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest

from parallelism.operation import PACKAGES, is_ours
from vcluster.processes import line_coverage

if TYPE_CHECKING:
    from vcluster.runs import VirtualCluster
    from vcluster.testing.body import DeviceToCome
    from vcluster.testing.meshes import Wanted
    from vcluster.testing.output import RankOutput
    from vcluster.testing.spmd import Ending  # noqa: F401  (named in a key)
    from vcluster.testing.warm import WarmClusters

PRELOAD = ("pytest", "_pytest.assertion", "vcluster.testing.body")
"""Modules that devices have loaded, in addition to those of the runtime."""
FIXTURES = ("virtual_cluster", "device", "virtual_device")
MARKS = ("mesh", "spmd")


class Session:
    """The plugin's state during a session."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._server_asked = False

    def start_server(self) -> None:
        """Start the fork server with pytest loaded, while tests are still being collected."""
        if not self._server_asked and not self._config.option.collectonly and self.backend == "process":
            self._server_asked = True
            from vcluster.processes import start_fork_server

            with suppress(OSError, RuntimeError):  # the first test will report it
                start_fork_server(preload=(*PRELOAD, *(["coverage"] if line_coverage.is_loaded() else [])))

    @property
    def backend(self) -> str:
        return str(self._config.getoption("--vcluster-backend"))

    @functools.cached_property
    def warm(self) -> WarmClusters:
        from vcluster.testing.explanations import Settings
        from vcluster.testing.warm import WarmClusters

        return WarmClusters(self.backend, Settings.of(self._config))

    @functools.cached_property
    def output(self) -> RankOutput:
        from vcluster.testing.output import RankOutput

        return RankOutput(captured=self._config.getoption("capture") in ("fd", "sys"))

    def close(self) -> None:
        if "warm" in vars(self):
            self.warm.close()


_SESSION = pytest.StashKey[Session]()
_CLUSTER = pytest.StashKey["VirtualCluster"]()
_ENDING = pytest.StashKey["Ending"]()


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.getgroup("vcluster").addoption(
        "--vcluster-backend",
        choices=("process", "thread", "mpi"),
        default="process",
        help="run the devices of tests as processes (default), or as threads, for a debugger, or on the ranks of "
        "mpiexec -n 5 python -m pytest",
    )
    # pytest rewrites the asserts of every package with a plugin. Here that is the whole runtime, without any benefit.
    marked = getattr(pluginmanager.rewrite_hook, "_must_rewrite", None)
    if isinstance(marked, set):
        marked.difference_update(PACKAGES)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_SESSION] = Session(config)
    for marker in (
        "mesh(tp=4): the devices of `virtual_cluster`: axes by name, a number, or a Mesh, and options of "
        "VirtualCluster; several marks make several tests",
        "spmd(dp=2, tp=2): run the body of the test on each device of that mesh, as the fixture `device`",
        "faults(Kill(rank=2, operation=5), seed=0): plant these failures of vcluster.faults in the runs of the test",
    ):
        config.addinivalue_line("markers", marker)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Under MPI, rank 0 runs the tests, and the others serve their devices until they are over."""
    if config.getoption("--vcluster-backend") != "mpi":
        return None
    from vcluster.mpi import as_rank

    capture = config.pluginmanager.getplugin("capturemanager")
    capture.suspend_global_capture(in_=True)
    job = ExitStack()
    if not job.enter_context(as_rank()):
        job.close()
        return 0
    config.add_cleanup(job.close)
    capture.resume_global_capture()
    return None


def pytest_unconfigure(config: pytest.Config) -> None:
    if _SESSION in config.stash:
        config.stash[_SESSION].close()


# -- collection --------------------------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Create one test for each mesh."""
    spmd = metafunc.definition.get_closest_marker("spmd") is not None
    if not spmd and not set(FIXTURES).intersection(metafunc.fixturenames):
        return
    metafunc.config.stash[_SESSION].start_server()
    if spmd:
        _use_our_fixtures(metafunc)
        if "virtual_cluster" not in metafunc.fixturenames:
            metafunc.fixturenames.insert(0, "virtual_cluster")
    elif "virtual_cluster" not in metafunc.fixturenames:
        return  # `device` without @pytest.mark.spmd: the fixture says so, or it is one of the user's own
    if not _parametrizes_mesh(metafunc.definition) and (clusters := _wanted_by_marks(metafunc.definition)):
        metafunc.parametrize(
            "virtual_cluster", clusters, indirect=True, ids=map(str, clusters), scope="function"
        )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Request the cluster for an `spmd` test, whose body needs it even without a fixture."""
    if isinstance(item, pytest.Function) and item.get_closest_marker("spmd"):
        if "virtual_cluster" not in item.fixturenames:
            item.fixturenames.insert(0, "virtual_cluster")
        if hasattr(item.obj, "hypothesis"):
            from vcluster.testing.spmd import allow_fixtures

            allow_fixtures(getattr(item.obj, "__func__", item.obj))


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Give a mesh as a parameter the same id as a mesh in a mark."""
    from parallelism.mesh import Mesh
    from vcluster.testing.meshes import Wanted

    return str(Wanted(val)) if isinstance(val, Mesh) else None


def _use_our_fixtures(metafunc: pytest.Metafunc) -> None:
    """Use the plugin's devices, even if a conftest has fixtures of these names (for example a torch device)."""
    defined = getattr(
        metafunc, "_arg2fixturedefs", {}
    )  # if pytest stores them elsewhere, the body still gets ours
    for name in ("device", "virtual_device"):
        if ours := [fixture for fixture in defined.get(name, ()) if fixture.func.__module__ == __name__]:
            defined[name] = ours


def _parametrizes_mesh(node: pytest.Item) -> bool:
    for mark in node.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs.get("argnames", ())
        names = names.replace(" ", "").split(",") if isinstance(names, str) else names
        if not {"virtual_cluster", "mesh"}.isdisjoint(names):
            return True
    return False


def _wanted_by_marks(node: pytest.Item) -> list[Wanted]:
    """The clusters of the marks nearest to the test: its own marks, or else its class's, or else its module's."""
    from vcluster.testing.meshes import wanted

    by_node: dict[Any, list[pytest.Mark]] = {}
    for at, mark in node.iter_markers_with_node():
        if mark.name in MARKS and (mark.args or mark.kwargs):
            by_node.setdefault(at, []).append(mark)
    clusters = []
    for mark in reversed(next(iter(by_node.values()), [])):  # in the order of the source, top to bottom
        try:
            clusters.append(wanted(mark.args, mark.kwargs))
        except (TypeError, ValueError) as error:
            message = f"@pytest.mark.{mark.name} of {node.nodeid}: {error}"
            raise pytest.fail.Exception(message, pytrace=False) from None
    return clusters


# -- fixtures ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def virtual_cluster(request: pytest.FixtureRequest) -> Generator[VirtualCluster]:
    """A warm `VirtualCluster` of the mesh that ``@pytest.mark.mesh`` names, with empty state and channels."""
    from vcluster.code import ClusterError
    from vcluster.testing.output import warn_here

    session, item = request.config.stash[_SESSION], request.node
    wanted = _wanted(request, item)
    try:
        item.stash[_CLUSTER] = cluster = session.warm.get(wanted)
    except (TypeError, ValueError, ClusterError) as error:
        raise pytest.fail.Exception(f"the cluster of {item.nodeid}: {error}", pytrace=False) from None
    session.output.begin()
    cluster.show_output, cluster.show_warning = session.output.receive, warn_here
    yield cluster
    del item.stash[_CLUSTER]


@pytest.fixture
def device(request: pytest.FixtureRequest) -> DeviceToCome:
    """In the body of an ``spmd`` test: the `VirtualDevice` it runs on."""
    return _device(request)


@pytest.fixture
def virtual_device(request: pytest.FixtureRequest) -> DeviceToCome:
    """The fixture ``device`` under another name."""
    return _device(request)


def _device(request: pytest.FixtureRequest) -> DeviceToCome:
    from vcluster.testing.body import DeviceToCome

    if request.node.get_closest_marker("spmd") is None:
        pytest.fail(
            f"the fixture {request.fixturename!r} is for tests whose body runs on each device: add "
            f"@pytest.mark.spmd(tp=2).  A test that runs on the host uses virtual_cluster and calls run()",
            pytrace=False,
        )
    return DeviceToCome(request.getfixturevalue("virtual_cluster").mesh)


def _wanted(request: pytest.FixtureRequest, item: pytest.Item) -> Wanted:
    from vcluster.testing.meshes import Wanted, as_mesh

    asked = getattr(request, "param", None)
    if asked is None and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
        asked = item.callspec.params.get("mesh")
    if isinstance(asked, Wanted):
        return asked
    try:
        if asked is not None:
            return Wanted(as_mesh(asked))
    except (TypeError, ValueError) as error:
        pytest.fail(f"the mesh of {item.nodeid}: {error}", pytrace=False)
    if clusters := _wanted_by_marks(item):
        return clusters[0]
    name = "spmd" if item.get_closest_marker("spmd") else "mesh"
    pytest.fail(
        f"the test has no mesh: add @pytest.mark.{name}(tp=4) to the test, its class or its module",
        pytrace=False,
    )


# -- running -----------------------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Close the devices after the last test, before plugins report coverage."""
    with line_coverage.devices_measured():
        try:
            return (yield)
        finally:
            session.config.stash[_SESSION].close()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body of an `spmd` test on the devices."""
    if pyfuncitem.get_closest_marker("spmd") is None:
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    test: Callable[..., Any] = pyfuncitem.obj
    if inspect.iscoroutinefunction(test) or inspect.isasyncgenfunction(test):
        pytest.fail("the body of an spmd test must be a plain function; this one is async", pytrace=False)
    if hasattr(test, "hypothesis"):
        from vcluster.testing.spmd import run_examples

        run_examples(pyfuncitem.stash[_CLUSTER], test, given, functools.partial(_run_on_devices, pyfuncitem))
    else:
        _run_on_devices(pyfuncitem, test, given)
    return True


def _run_on_devices(item: pytest.Function, test: Callable[..., Any], given: Mapping[str, Any]) -> None:
    __tracebackhide__ = True
    from vcluster.testing.spmd import run_on_devices

    item.stash[_ENDING] = ending = run_on_devices(item.stash[_CLUSTER], test, given)
    if ending.returned is not None:
        warnings.warn(
            pytest.PytestReturnNotNoneWarning(
                f"Test functions should return None, but {item.nodeid} returned {ending.returned}"
            ),
            stacklevel=2,
        )
    if ending.error is not None:
        raise ending.error


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Plant the faults of the marks. Fail a test that leaves something behind."""
    cluster = item.stash.get(_CLUSTER, None)
    if cluster is None:
        return (yield)
    case = getattr(sys.modules.get("unittest"), "TestCase", ())
    if item.get_closest_marker("spmd") and isinstance(getattr(item, "instance", None), case):
        pytest.fail(
            "the body of an spmd test must be a function or a method of a plain class, not of a TestCase",
            pytrace=False,
        )
    from vcluster.faults import FaultNotReachedError, plant_marks
    from vcluster.testing.leaks import Snapshot

    before = Snapshot()
    try:
        with plant_marks(cluster, item.iter_markers("faults")):
            result = yield
    except FaultNotReachedError as error:
        raise pytest.fail.Exception(f"the test passed, but {error}", pytrace=False) from None
    if leftovers := before.leftovers(cluster, item.config.stash[_SESSION].warm.pids()):
        pytest.fail("\n  ".join(["the test passed, and left behind:", *leftovers]), pytrace=False)
    return result


# -- reporting ---------------------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    session = item.config.stash.get(_SESSION, None)
    if session is None or "output" not in vars(session):
        return (yield)
    for title, text in session.output.take():
        item.add_report_section(call.when, title, text)
    _leave_out_our_lines(item, call)
    report = yield
    if report.failed and _CLUSTER in item.stash:
        session.warm.spoil(item.stash[_CLUSTER])
    if call.when == "call" and _ENDING in item.stash:
        report.sections += item.stash[_ENDING].sections
    return report


def _leave_out_our_lines(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Remove the library's frames from a traceback, on the host as in a device."""
    if call.excinfo is None or item.config.getoption("fulltrace"):
        return
    entry = call.excinfo.tb
    while entry.tb_next is not None:
        if is_ours(entry.tb_next.tb_frame.f_code.co_filename):
            entry.tb_next = entry.tb_next.tb_next
        else:
            entry = entry.tb_next


@pytest.hookimpl(tryfirst=True)
def pytest_exception_interact(
    node: pytest.Item | pytest.Collector,
    call: pytest.CallInfo[Any],
    report: pytest.CollectReport | pytest.TestReport,
) -> None:
    """Explain that ``--pdb`` cannot inspect another process, and how to use it."""
    reporter = node.config.pluginmanager.get_plugin("terminalreporter")
    if (
        node.config.getoption("usepdb")
        and reporter
        and _ENDING in node.stash
        and node.stash[_ENDING].in_process
    ):
        reporter.write_line(
            "\nvcluster: this failed in a device's process, whose variables pdb cannot see; run again with "
            "--vcluster-backend=thread, where it can",
            yellow=True,
        )
