"""The pytest plugin: on tests of this session, and on sessions of its own."""

import inspect
import os
import re
import threading
import warnings

import numpy as np
import pytest

from parallelism import Mesh
from vcluster import DeviceFailedError, PerDevice, VirtualCluster, faults
from vcluster.testing import body, explanations, leaks, meshes, outcomes, output, tracebacks, warm  # noqa: F401
from vcluster.testing.body import DeviceToCome
from vcluster.testing.meshes import OPTIONS, Wanted

# (All of it is loaded here: what a session of pytester's loads first is forgotten after it.)

pytest_plugins = ["pytester"]


# -- in this session: the plugin as anybody uses it --------------------------------------------------------------------


@pytest.fixture
def table():
    return {"weights": np.arange(6.0).reshape(2, 3)}


@pytest.fixture
def by_rank():
    return PerDevice("abcd")


@pytest.fixture
def of_the_device(device):
    """Made on the host; what it refers to is there once it has arrived."""
    return {"device": device, "size": device.size}


@pytest.mark.sampled(2, 1)
@pytest.mark.spmd(dp=2, tp=2)
@pytest.mark.parametrize("factor", [1, 3])
def test_the_body_runs_on_every_device_with_its_fixtures_and_parameters(device, table, factor, by_rank, tmp_path):
    total = device.all_reduce(table["weights"] * factor, "tp")
    np.testing.assert_array_equal(total, 2.0 * factor * np.arange(6).reshape(2, 3))
    table["weights"][:] = 0  # its own
    assert by_rank == "abcd"[device.rank]
    (tmp_path / str(device.rank)).write_text("here")
    device.barrier()
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.spmd(4)
def test_the_second_name_and_fixtures_of_the_device_are_the_device(virtual_device, of_the_device):
    assert of_the_device["device"].rank == virtual_device.rank
    assert of_the_device["device"].all_reduce(1) == of_the_device["size"] == 4


@pytest.mark.spmd(tp=2)
@pytest.mark.parametrize("turn", [1, 2, 3])
def test_each_test_starts_with_nothing_from_the_last(device, turn):
    assert not device.state
    assert device.channel(1 - device.rank).statistics().messages_sent == 0
    assert device.rng.integers(1 << 30) == np.random.default_rng((0, device.rank, 1)).integers(1 << 30)
    device.state["left"] = turn
    device.sendrecv(turn, 1 - device.rank, 1 - device.rank)


class Careful(UserWarning):
    pass


def careless(device):
    warnings.warn(f"of {device.size} devices", Careful, stacklevel=1)


@pytest.mark.mesh(2, backend="process")
@pytest.mark.mesh(2, backend="thread")
def test_what_devices_warn_of_are_warnings_of_the_test(virtual_cluster, capfd):
    with pytest.warns(Careful, match="of 2 devices") as caught:
        virtual_cluster.run(careless)
    line = careless.__code__.co_firstlineno + 1
    assert [(each.category, each.filename, each.lineno) for each in caught] == 2 * [(Careful, __file__, line)]
    assert capfd.readouterr() == ("", "")


@pytest.mark.mesh(dp=1, tp=2)
@pytest.mark.mesh(3)
def test_each_mark_makes_a_test(virtual_cluster):
    assert virtual_cluster.mesh in (Mesh(dp=1, tp=2), Mesh(devices=3))
    run = virtual_cluster.run(lambda device: device.all_reduce(1))
    assert run.outputs == [virtual_cluster.size] * virtual_cluster.size


@pytest.mark.spmd(tp=2)
def test_monkeypatch_patches_each_process_and_takes_it_back(device, monkeypatch):
    monkeypatch.setenv("VCLUSTER_TEST", str(device.rank))
    assert os.environ["VCLUSTER_TEST"] == str(device.rank)


@pytest.mark.spmd(tp=2)
def test_nothing_is_left_of_it(device):
    assert "VCLUSTER_TEST" not in os.environ


class TestInAClass:
    number = 5

    @pytest.mark.spmd(tp=2)
    def test_methods_run_too(self, device):
        assert device.all_reduce(self.number) == 10


@pytest.mark.mesh(tp=2)
def test_what_devices_print_can_be_read_with_capsys(virtual_cluster, capsys):
    virtual_cluster.run(lambda device: print("hello"))
    assert sorted(capsys.readouterr().out.splitlines()) == ["[rank 0] hello", "[rank 1] hello"]


@pytest.mark.mesh(tp=3)
@pytest.mark.faults(faults.Kill(rank=1, operation=2))
def test_faults_are_planted_by_a_mark(virtual_cluster):
    with pytest.raises(DeviceFailedError, match=r"the process of rank 1 .* SIGKILL"):
        virtual_cluster.run(lambda device: [device.barrier() for _ in range(3)])


# -- descriptions ------------------------------------------------------------------------------------------------------


def test_the_options_of_a_mark_are_those_of_a_cluster():
    parameters = inspect.signature(VirtualCluster).parameters.values()
    assert set(OPTIONS) == {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


@pytest.mark.parametrize(
    ("args", "kwargs", "name"),
    [
        ((), {"dp": 2, "tp": 4}, "dp2_tp4"),
        ((4,), {}, "devices4"),
        ((Mesh(pp=3),), {"transport": "queue", "seed": 7}, "pp3_seed7_queue"),
    ],
)
def test_a_mesh_has_a_readable_name(args, kwargs, name):
    assert str(meshes.wanted(args, kwargs)) == name


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((4,), {"tp": 2}), ((2, 2), {})])
def test_a_mark_names_one_mesh(args, kwargs):
    with pytest.raises(TypeError, match="one mesh is expected"):
        meshes.wanted(args, kwargs)


def test_the_device_on_the_host_says_where_it_is():
    device = DeviceToCome(Mesh(tp=2))
    assert device.size == 2
    with pytest.raises(AttributeError, match=r"device\.rank exists only in the body of the test"):
        _ = device.rank


def test_a_rebuilt_traceback_has_the_lines_and_names_of_the_first():
    def fails():
        raise KeyError("x")

    with pytest.raises(KeyError) as caught:
        fails()
    failure = body.describe_exception(caught.value)
    error = failure.exception()
    tracebacks.attach_tracebacks(error, failure)
    told = [(e.path, e.lineno, e.name) for e in pytest.ExceptionInfo.from_exception(error).traceback]
    assert told == [(e.path, e.lineno, e.name) for e in caught.traceback]


# -- sessions of their own ---------------------------------------------------------------------------------------------


ALONE = ("-p", "vcluster", "-p", "no:cacheprovider")
"""With no other plugin, if none is loaded by itself."""


def in_short(reporter, excinfo):
    """What ended a session early. pytest describes it with all frames of its own, and prints one line of that."""
    reporter._keyboardinterrupt_memo = excinfo.getrepr(style="native")


@pytest.fixture
def session(pytester, monkeypatch):
    """Runs a test file with the plugin in this process: returns what pytest printed, as a list of lines, and counts."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(pytest.TerminalReporter, "pytest_keyboard_interrupt", in_short)

    def run(text, *options, conftest=None):
        if conftest is not None:
            pytester.makeconftest(conftest)
        pytester.makepyfile("import numpy as np\nimport pytest\n" + inspect.cleandoc(text))
        # Without --rootdir a setup.py in a folder above would be the root, and names of tests would have its path.
        return pytester.runpytest_inprocess(*ALONE, f"--rootdir={pytester.path}", *options)

    return run


@pytest.fixture(params=["process", "thread"])
def backend(request):
    return f"--vcluster-backend={request.param}"


def test_ids_name_the_mesh_and_can_be_selected(session):
    result = session(
        """
        @pytest.mark.mesh(dp=2, tp=2)
        @pytest.mark.mesh(tp=4, backend="thread")
        def test_marks(virtual_cluster): ...

        @pytest.mark.spmd(pp=2)
        @pytest.mark.parametrize("x", ["a", "b"])
        def test_spmd(x): ...

        @pytest.mark.parametrize("virtual_cluster", [dict(tp=3)], indirect=True, ids=["three"])
        def test_indirect(virtual_cluster): ...

        @pytest.mark.parametrize("mesh", [pytest.Mark] and [__import__("parallelism").Mesh(ep=2)])
        def test_parameter(virtual_cluster, mesh): ...
        """,
        "--collect-only", "-q",
    )
    assert result.outlines[:6] == [
        f"test_ids_name_the_mesh_and_can_be_selected.py::{name}"
        for name in (
            "test_marks[dp2_tp2]", "test_marks[tp4_thread]", "test_spmd[pp2-a]", "test_spmd[pp2-b]",
            "test_indirect[three]", "test_parameter[ep2]",
        )
    ]


def test_the_nearest_marks_say_which_mesh_and_parameters_may_bring_one(session):
    session(
        """
        from parallelism import Mesh
        pytestmark = pytest.mark.mesh(tp=3)

        def test_module(virtual_cluster): assert virtual_cluster.mesh == Mesh(tp=3)

        @pytest.mark.mesh(dp=2)
        class TestClass:
            def test_class(self, virtual_cluster): assert virtual_cluster.mesh == Mesh(dp=2)

            @pytest.mark.spmd(ep=2)
            def test_function(self, device): assert device.mesh == Mesh(ep=2)

            @pytest.mark.spmd
            def test_spmd_takes_the_mesh_of_mesh(self, device): assert device.mesh == Mesh(dp=2)

        @pytest.mark.parametrize("mesh", [Mesh(ep=2), Mesh(dp=1)], ids=str)
        def test_parameter(virtual_cluster, mesh): assert virtual_cluster.mesh == mesh

        def test_without(): ...
        """,
        "--vcluster-backend=thread",
    ).assert_outcomes(passed=7)


def test_device_is_ours_whatever_a_conftest_defines(session):
    session(
        """
        @pytest.mark.spmd(tp=2)
        def test_ours(device): assert device.all_reduce(1) == 2

        def test_theirs(device): assert device in ("cpu", "gpu")
        """,
        "--vcluster-backend=thread",
        conftest="""
            import pytest
            @pytest.fixture(params=["cpu", "gpu"])
            def device(request): return request.param
        """,
    ).assert_outcomes(passed=3)


FAILING = """
@pytest.mark.spmd(tp=3)
def test_it(device):
    print("from", device.rank)
    got = {"rank": device.rank // 2, "same": 1}
    device.barrier()
    assert got == {"rank": 7, "same": 1}
"""


@pytest.mark.slow
def test_a_failing_assert_tells_the_values_the_rank_and_the_others_and_leaves_no_process_or_thread(session, backend):
    before = set(leaks.running_processes()), threading.active_count()
    result = session(FAILING, backend)
    assert (set(leaks.running_processes()), threading.active_count()) == before
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            '>       assert got == {"rank": 7, "same": 1}',
            "E       AssertionError: assert {'rank': 0, 'same': 1} == {'rank': 7, 'same': 1}",
            "E         Differing items:",
            "E         {'rank': 0} != {'rank': 7}",
            "E       on rank 0 of Mesh(tp=3)",
            "*test_a_failing_assert*.py:8: AssertionError",
            "*Captured stdout of rank 0 call*", "from 0",
            "*Captured stdout of rank 1 call*", "from 1",
            "*Captured stdout of rank 2 call*", "from 2",
            "FAILED *test_it?tp3?*",
        ]
    )
    assert "pytest_plugin.py" not in result.stdout.str() and "cluster.py:" not in result.stdout.str()


def test_a_failing_run_is_told_at_the_line_of_the_test(session):
    result = session(
        """
        @pytest.mark.mesh(tp=2)
        def test_it(virtual_cluster):
            virtual_cluster.run(lambda device: 1 // device.rank)
        """,
        "--tb=short",
    )
    result.stdout.fnmatch_lines(
        [
            "The above exception was the direct cause of the following exception:",
            "test_a_failing_run*.py:5: in test_it",
            "    virtual_cluster.run(lambda device: 1 // device.rank)",
            "E   vcluster.code.errors.DeviceFailedError: rank 0 raised ZeroDivisionError",
            "E   ZeroDivisionError: integer division or modulo by zero",
        ]
    )
    assert "cluster.py:" not in result.stdout.str()


def printed_at_once(result):
    """Each device's line came with its rank, and not once more at the end."""
    assert sorted(re.findall(r"\[rank \d\] from \d", result.stdout.str())) == [
        f"[rank {rank}] from {rank}" for rank in range(3)
    ]
    assert "Captured" not in result.stdout.str()


@pytest.mark.parametrize("options", [["-s"], pytest.param([], marks=pytest.mark.slow)], ids=str)
def test_under_s_lines_come_at_once_with_their_rank_and_pdb_on_a_process_says_where_there_is_one(session, options):
    result = session(FAILING, "--pdb", *options)
    if options:
        printed_at_once(result)
    result.stdout.fnmatch_lines(
        ["vcluster: this failed in a device's process*run again with --vcluster-backend=thread*"]
    )


@pytest.mark.sampled(2, 1)
def test_skips_xfails_and_raises_come_from_the_devices(session, backend):
    result = session(
        """
        import unittest

        class OwnError(Exception):
            pass

        @pytest.mark.spmd(2)
        def test_skip(device): pytest.skip("no reason")

        @pytest.mark.spmd(2)
        def test_unittest_skip(device): raise unittest.SkipTest("the old way")

        @pytest.mark.spmd(2)
        def test_xfail(device): pytest.xfail("not yet")

        @pytest.mark.xfail(raises=OwnError, strict=True)
        @pytest.mark.spmd(2)
        def test_marked(device): raise OwnError("as expected")

        @pytest.mark.spmd(2)
        def test_fail(device): pytest.fail("in words", pytrace=False)

        @pytest.mark.spmd(2)
        def test_raises(device):
            with pytest.raises(ValueError, match="root is a position"):
                device.broadcast(1, root=5)

        @pytest.mark.mesh(2)
        def test_host_raises(virtual_cluster):
            with pytest.raises(RuntimeError) as caught:
                virtual_cluster.run(lambda device: 1 // device.rank)
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
            assert virtual_cluster.run(lambda device: device.rank).outputs == [0, 1]
        """,
        backend, "-ra",
    )
    result.assert_outcomes(skipped=2, xfailed=2, failed=1, passed=2)
    result.stdout.fnmatch_lines(
        ["in words", "on rank 0 of Mesh(devices=2)*", "SKIPPED ?1? test_skips*.py:9: no reason"]
    )


@pytest.mark.sampled(2, 1)
def test_ranks_that_disagree_are_an_error(session, backend):
    result = session(
        """
        @pytest.mark.spmd(3)
        def test_skip(device):
            if device.rank == 1:
                pytest.skip("odd")

        @pytest.mark.spmd(3)
        def test_wait(device):
            if device.rank == 1:
                pytest.skip("odd")
            device.barrier()
        """,
        backend,
    )
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            '>           pytest.skip("odd")',
            "E*RanksDisagree: the ranks disagree on the outcome of the test: "
            "ranks 0 and 2 passed, rank 1 skipped (odd)",
            ">       device.barrier()",
            "E*DeadlockError: *rank 1 returned without calling barrier*",
            "E*while rank 1 skipped (odd)",
        ]
    )


def test_after_a_failure_or_a_death_the_devices_are_new(session):
    session(
        """
        import os, signal

        @pytest.mark.spmd(tp=2)
        def test_1(device):
            np.left_behind = True
            assert device.rank == 7

        @pytest.mark.spmd(tp=2)
        def test_2(device): assert not hasattr(np, "left_behind")

        @pytest.mark.spmd(tp=2)
        def test_3(device):
            if device.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            device.barrier()

        pids = []

        @pytest.mark.mesh(tp=2)
        @pytest.mark.parametrize("turn", [1, 2])
        def test_4(virtual_cluster, turn):
            pids.append(virtual_cluster.pids())
            assert pids[0] == pids[-1]
        """
    ).stdout.fnmatch_lines(
        [
            ">*def test_3(device):*",
            "E*DeviceFailedError: the process of rank 1 (pid *) was ended by SIGKILL*",
            "FAILED *test_1?tp2?*",
            "FAILED *test_3?tp2?*",
            "*2 failed, 3 passed*",
        ]
    )


@pytest.mark.slow
def test_what_cannot_travel_or_stop_in_a_process_is_named(session):
    session(
        """
        import threading, unittest

        @pytest.fixture
        def lock(): return {"the": threading.Lock()}

        @pytest.mark.spmd(2)
        def test_fixture(device, lock): ...

        @pytest.mark.spmd(2)
        def test_capsys(device, capsys): ...

        @pytest.mark.spmd(2)
        def test_property(device, record_property): ...

        @pytest.mark.spmd(2)
        def test_config(device, pytestconfig): ...

        @pytest.mark.spmd(2)
        async def test_async(device): ...

        @pytest.mark.spmd(2)
        class TestOld(unittest.TestCase):
            def test_case(self): ...

        def test_no_mark(device): ...

        def test_no_mesh(virtual_cluster): ...

        @pytest.mark.spmd(2)
        def test_breakpoint(device): breakpoint()
        """
    ).stdout.fnmatch_lines(
        [
            "the fixture 'device' is for tests whose body runs on each device: add @pytest.mark.spmd(tp=2)*",
            "the test has no mesh: add @pytest.mark.mesh(tp=4) to the test*",
            "*of the fixture or parameter 'lock' cannot be sent to another process: _thread.lock*",
            "the fixture 'capsys' belongs to the process that runs pytest*: the report has a section for what each rank *",
            "the fixture 'record_property' belongs to the process that runs pytest*: let a test with virtual_cluster*",
            "the fixture 'pytestconfig' belongs to the process that runs pytest*: pass what you need of it by a fixture *",
            "the body of an spmd test must be a plain function; this one is async",
            "the body of an spmd test must be a function or a method of a plain class, not of a TestCase",
            "E*breakpoint() in a device's process has no terminal; run again with*",
        ]
    )


def test_a_fault_that_was_not_reached_fails_the_test(session):
    result = session(
        """
        from vcluster import faults

        @pytest.mark.spmd(2)
        @pytest.mark.faults(faults.Raise(rank=1, operation=3, exception=OSError()))
        def test_it(device): device.barrier()
        """,
        "--vcluster-backend=thread",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["the test passed, but Raise(*) was not reached: rank 1 made 1 operations*"])


def test_a_wrong_mark_is_an_error_of_collection(session):
    session(
        """
        @pytest.mark.mesh(tp=0)
        def test_it(virtual_cluster): ...
        """
    ).stdout.fnmatch_lines(["*@pytest.mark.mesh of *test_it*: the size of axis 'tp' must be at least 1, got 0"])


def test_a_device_without_spmd_is_told_so_whatever_mesh_is_marked_and_the_other_tests_run(session):
    result = session(
        """
        @pytest.mark.mesh(tp=2)
        def test_on_the_host(device): ...

        @pytest.mark.mesh(tp=2)
        def test_right(virtual_cluster): ...
        """,
        "--vcluster-backend=thread",
    )
    result.assert_outcomes(errors=1, passed=1)
    result.stdout.fnmatch_lines(["*'device' is for tests whose body runs on each device: add @pytest.mark.spmd(tp=2)*"])


def test_a_cluster_that_cannot_start_is_told_without_the_lines_of_pytest(session):
    told = session(
        """
        from vcluster import ClusterError
        from vcluster.testing.warm import WarmClusters

        @pytest.fixture(autouse=True)
        def refused(monkeypatch):
            def get(self, wanted):
                raise ClusterError("a cluster of 4 devices needs 5 ranks")
            monkeypatch.setattr(WarmClusters, "get", get)

        @pytest.mark.mesh(tp=4)
        def test_it(virtual_cluster): ...
        """,
        "--vcluster-backend=thread",
    ).stdout
    told.fnmatch_lines(["the cluster of *test_it?tp4?: a cluster of 4 devices needs 5 ranks"])
    told.no_fnmatch_line("*from_call*")


LEAKING = """
import subprocess, sys, threading
from vcluster import HOST, VirtualCluster
from vcluster.testing import leaks

kept = []

@pytest.mark.spmd(2)
def test_thread(device):
    leaks.PATIENCE_SECONDS = 0.05
    threading.Thread(target=threading.Event().wait, name=f"lost-{device.rank}", daemon=True).start()

@pytest.mark.spmd(2)
def test_process(device):
    leaks.PATIENCE_SECONDS = 0.05
    if device.rank == 1:
        device.state["p"] = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

@pytest.mark.mesh(2)
def test_messages(virtual_cluster):
    virtual_cluster.run(lambda device: device.channel(HOST).send(device.rank))
    virtual_cluster.channel(1).send("never taken")
    virtual_cluster.channel(0).recv()

@pytest.mark.mesh(2)
def test_cluster(virtual_cluster):
    kept.append(VirtualCluster(1))

@pytest.mark.mesh(2)
def test_nothing(virtual_cluster):
    virtual_cluster.run(lambda device: device.channel(HOST).send(device.rank))
    with VirtualCluster(1):
        assert [virtual_cluster.channel(rank).recv() for rank in (0, 1)] == [0, 1]
    thread = threading.Thread(target=lambda: None)
    thread.start()
"""


@pytest.mark.slow
def test_what_a_test_leaves_behind_is_its_failure(session, monkeypatch):
    monkeypatch.setattr(leaks, "PATIENCE_SECONDS", 0.05)
    result = session(LEAKING + "\n\ndef test_close(): kept.pop().close()")
    result.assert_outcomes(failed=4, passed=2)
    result.stdout.fnmatch_lines(
        [
            "the test passed, and left behind:",
            "  the thread 'lost-0' on rank 0",
            "  the thread 'lost-1' on rank 1",
            "  the process * (pid *) on rank 1",
            "  1 message from rank 1 to the host, never received",
            "  1 message from the host to rank 1, never received",
            "  the devices of a cluster that was not closed: vcluster-0 (pid *)",
        ]
    )


@pytest.mark.slow
def test_hypothesis_draws_on_the_host_and_every_device_gets_the_same(pytester):
    pytester.makepyfile(
        """
        import pytest
        from hypothesis import given, settings, strategies as st

        @pytest.mark.spmd(tp=2)
        @settings(max_examples=4, deadline=None, derandomize=True, database=None)
        @given(n=st.integers(0, 1000))
        def test_sum(device, n):
            assert not device.state
            device.state["n"] = n
            assert device.all_reduce(n) == 2 * n

        @pytest.mark.spmd(tp=2)
        @settings(max_examples=10, deadline=None, derandomize=True, database=None)
        @given(n=st.integers(0, 1000))
        def test_fails(device, n):
            assert device.all_reduce(n) < 20
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--vcluster-backend=thread")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["E*assert*20* < 20*", "E*on rank 0 of Mesh(tp=2)*", "E*n=10*"])


@pytest.mark.slow
def test_under_xdist_reports_are_the_same(session):
    pytest.importorskip("xdist")
    leaking, _, _ = LEAKING.partition("@pytest.mark.spmd(2)\ndef test_process")
    options = "-p", "xdist", "-n", "1", "--vcluster-backend=thread"
    result = session(FAILING + leaking, *options)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines_random(
        [
            "E       on rank 0 of Mesh(tp=3)", "E       the same on rank 1*", "*Captured stdout of rank 2 call*",
            "  the thread 'lost-1' on the host",
        ]
    )


def test_pdb_on_threads_sees_the_variables_of_the_rank(session):
    typed = 'import io, sys\n\ndef pytest_configure():\n    sys.stdin = io.StringIO("p got\\nq\\n")'
    result = session(FAILING, "--pdb", "-s", "--vcluster-backend=thread", conftest=typed)
    result.stdout.fnmatch_lines(["*{'rank': 0, 'same': 1}"])
    printed_at_once(result)


@pytest.mark.slow
def test_the_plugin_is_registered_and_loads_no_numpy(pytester):
    pytester.makepyfile(
        """
        import sys
        def test_it(pytestconfig):
            assert pytestconfig.pluginmanager.hasplugin("vcluster")
            assert "numpy" not in sys.modules and "vcluster.runs.cluster" not in sys.modules
        """
    )
    others = ("cacheprovider", "hypothesispytest", "xdist", "xdist.looponfail", "pytest_cov", "timeout", "platformdirs")
    pytester.runpytest_subprocess(*(f"-pno:{name}" for name in others)).assert_outcomes(passed=1)


def test_wanted_clusters_are_values():
    assert Wanted(Mesh(tp=2)) == Wanted(Mesh(tp=2)) != Wanted(Mesh(tp=2), (("seed", 1),))


def test_a_mark_with_a_wrong_word_is_told_in_a_line(session):
    result = session(
        """
        @pytest.mark.mesh(tp=2, backend="gpu")
        def test_it(virtual_cluster): ...
        """
    )
    result.stdout.fnmatch_lines(["the cluster of *test_it*: backend must be 'process' or 'thread' or 'mpi', got 'gpu'"])
    assert "def _one_of" not in result.stdout.str() and "During handling" not in result.stdout.str()
    session(
        """
        @pytest.mark.spmd(tp=2, transprt="queue")
        def test_it(device): ...
        """
    ).stdout.fnmatch_lines(["*of *test_it*: a mesh has no option 'transprt'; did you mean transport?"])
