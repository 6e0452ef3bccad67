"""The life of a cluster, and what travels between host and devices: programs, arguments, results, printed lines."""

from __future__ import annotations

import collections
import functools
import gc
import importlib
import json
import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import psutil
import pytest
from eventually import eventually
from numpy.testing import assert_array_equal
from paths import ROOT
from runtimes import KINDS

from parallelism.mesh import Mesh
from parallelism.operation import Operation
from vcluster import HOST, ChannelClosedError, ClusterError, DeviceFailedError, PerDevice, VirtualCluster

LARGE = 1 << 18  # float64: 2 MiB, far above what is copied in passing
TABLE = np.arange(12.0).reshape(3, 4)


class Shard:
    """Stands for a TensorSharding: whoever has unshard(shards, mesh) joins outputs."""

    @staticmethod
    def unshard(shards, mesh):
        assert mesh.size == len(shards)
        return np.concatenate(shards)


@pytest.fixture(params=KINDS)
def cluster(request, cluster_of):
    found = cluster_of(Mesh(devices=3), *request.param)
    found.run(lambda device: device.state.clear())
    return found


def gone(pids):
    return eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def python(*arguments, **options):
    """Run an interpreter that finds our packages; its output, when it ends well."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    options = {"capture_output": True, "text": True, "timeout": 40, "check": False, **options}
    done = subprocess.run([sys.executable, *arguments], env=environment, **options)
    assert done.returncode == 0, done.stderr
    return done


# -- from start to close -----------------------------------------------------------------------------------------------


def test_the_devices_are_processes_and_end_with_the_with_block():
    with VirtualCluster(3) as cluster:
        pids = cluster.pids()
        assert cluster.run(lambda device: os.getpid()).outputs == pids
        assert len({*pids, os.getpid()}) == 4
        assert not cluster.closed
    assert cluster.closed
    assert gone(pids)


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_a_closed_cluster_says_so_and_can_be_closed_again(backend):
    cluster = VirtualCluster(dp=2, backend=backend)
    assert "closed" not in repr(cluster)
    cluster.close()
    cluster.close()
    assert "closed" in repr(cluster)
    for use in (lambda: cluster.run(lambda device: 1), lambda: cluster.channel(0), cluster.pids):
        with pytest.raises(ClusterError, match=r"cluster of Mesh\(dp=2\) is closed; cluster\.restart\(\)"):
            use()


@pytest.mark.parametrize("kind", KINDS)
def test_a_channel_of_a_closed_cluster_is_closed(kind):
    with VirtualCluster(2, backend=kind[0], transport=kind[1]) as cluster:
        channel = cluster.channel(1)
    with pytest.raises(ChannelClosedError, match="the host"):
        channel.recv()
    with pytest.raises(ChannelClosedError, match="the host"):
        channel.send(1)


def test_an_error_inside_the_with_block_closes_too():
    cluster = VirtualCluster(2)
    pids = cluster.pids()
    with pytest.raises(ZeroDivisionError), cluster:
        cluster.run(lambda device: 1)[1 // 0]
    assert cluster.closed
    assert gone(pids)


def test_a_cluster_nobody_refers_to_ends():
    cluster = VirtualCluster(2)
    pids = cluster.pids()
    cluster.run(lambda device: device.barrier())
    del cluster
    gc.collect()
    assert gone(pids)


def test_a_cluster_whose_failed_run_left_a_traceback_behind_ends_too():
    cluster = VirtualCluster(2)
    pids = cluster.pids()
    with pytest.raises(DeviceFailedError) as kept:
        cluster.run(lambda device: 1 / 0)
    del cluster
    gc.collect()
    assert gone(pids)
    assert kept.value.__traceback__ is not None


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("kind", KINDS)
def test_restart_gives_fresh_devices_and_opens_a_closed_cluster(kind):
    backend, transport = kind
    with VirtualCluster(2, backend=backend, transport=transport) as cluster:
        cluster.run(lambda device: device.state.update(kept=device.rank))
        before = cluster.pids()
        cluster.restart()
        assert not cluster.closed
        assert cluster.run(lambda device: (dict(device.state), device.all_reduce(1))).outputs == [({}, 2), ({}, 2)]
        if backend == "process":
            assert not set(before) & set(cluster.pids())
            assert gone(before)
        cluster.close()
        cluster.restart()
        assert cluster.run(lambda device: device.all_reduce(device.rank)).outputs == [1, 1]


@pytest.mark.slow
def test_closing_from_another_thread_ends_the_run():
    with VirtualCluster(2) as cluster:
        pids = cluster.pids()

        def endless(device):
            if device.rank == 0:
                print("running")
            while True:
                pass

        class Closer:
            def write(self, text):
                if "running" in text:
                    threading.Thread(target=cluster.close).start()

            def flush(self):
                pass

        before, sys.stdout = sys.stdout, Closer()
        try:
            with pytest.raises(ClusterError, match="closed while a run was in progress"):
                cluster.run(endless)
        finally:
            sys.stdout = before
        assert gone(pids)
        assert eventually(lambda: cluster.closed)


def test_a_second_run_at_the_same_time_is_refused():
    with VirtualCluster(2) as cluster:
        host = cluster.channel(0)
        first = threading.Thread(target=cluster.run, args=(lambda device: device.rank or device.channel(-1).recv(),))
        first.start()
        refused = []
        assert eventually(lambda: _refusal(cluster, refused))
        assert "a run is in progress" in refused[0]
        host.send(1.0)
        first.join()
        assert cluster.run(lambda device: 1).outputs == [1, 1]


def _refusal(cluster, refused):
    try:
        cluster.run(lambda device: None)
    except ClusterError as error:
        refused.append(str(error))
    return refused


WAITS = """
import threading, time, warnings
from vcluster import HOST, DeadlockError, HostWaitWarning, VirtualCluster

def refused(error, wait):
    try:
        wait()
    except error as found:
        return str(found)

with VirtualCluster(2, backend={backend!r}) as cluster:
    for wait in (lambda: cluster.channel(1).recv(tag=3),
                 lambda: cluster.channel(1).irecv(tag=4).wait()):        # it is still the first to receive
        print(refused(DeadlockError, wait))
    cluster.run(lambda device: device.channel(HOST).send(device.rank, tag=3))
    print([cluster.channel(rank).recv(tag=3) for rank in (1, 0)])
    warnings.simplefilter("error", HostWaitWarning)
    ends = threading.Event()
    other = threading.Thread(target=lambda: [time.sleep(0) for _ in iter(ends.is_set, True)])
    other.start()
    print(refused(HostWaitWarning, lambda: cluster.channel(0).recv()))
    ends.set()
"""


@pytest.mark.takes_seconds
@pytest.mark.parametrize("backend", ["process", "thread"])
def test_a_host_that_waits_for_a_device_outside_of_a_run_is_told(tmp_path, backend):
    script = tmp_path / "waits.py"
    script.write_text(WAITS.format(backend=backend))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, env=os.environ | {
        "PYTHONPATH": str(ROOT)})
    text = ("the host waits for rank {0}, and devices send only while a run is in progress; call run() first, or in another "
            "thread\n  the host in recv(from rank {0}, tag {1}) at {3}:{2}, waiting for rank {0}\n")
    told = "".join("deadlock: " + text.format(1, tag, line, script) for tag, line in ((3, 12), (4, 13)))
    assert (done.stderr, done.stdout) == ("", told + "[1, 0]\n" + text.format(0, 0, 21, script))


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_a_host_may_wait_for_a_run_that_another_thread_starts(cluster_of, backend):
    cluster = cluster_of(2, backend)
    waits = threading.Event()

    def start():
        waits.wait()
        cluster.run(lambda device: device.channel(HOST).send(device.rank))

    thread = threading.Thread(target=start)
    thread.start()
    waits.set()
    assert [cluster.channel(rank).recv() for rank in (1, 0)] == [1, 0]
    thread.join()


def test_two_clusters_live_side_by_side():
    with VirtualCluster(2) as one, VirtualCluster(3, backend="thread") as other:
        assert one.run(lambda device: device.all_reduce(1)).outputs == [2] * 2
        assert other.run(lambda device: device.all_reduce(1)).outputs == [3] * 3
        assert one.run(lambda device: device.all_reduce(1)).outputs == [2] * 2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "darwin", reason="a fork of a host that has loaded Accelerate is not safe")
def test_the_devices_start_by_fork():
    _starts_with("fork")


@pytest.mark.slow
@pytest.mark.parametrize("dies", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_devices_start_by_spawn(dies):
    _starts_with("spawn", dies=dies)


def _starts_with(start_method, *, dies=True):
    with VirtualCluster(2, start_method=start_method) as cluster:
        pids = cluster.pids()
        assert cluster.run(lambda device, x: device.all_reduce(x), TABLE)[1].tolist() == (2 * TABLE).tolist()
        if dies:
            _one_dies(cluster)
        pids += cluster.pids()
    assert gone(pids)


def _one_dies(cluster):
    with pytest.raises(DeviceFailedError):
        cluster.run(lambda device: os._exit(3) if device.rank else device.barrier())
    assert cluster.run(lambda device: device.all_reduce(1)).outputs == [2, 2]


def test_blas_has_one_thread_in_each_device():
    pytest.importorskip("threadpoolctl")

    def threads(device):
        import threadpoolctl

        np.ones((4, 4)) @ np.ones((4, 4))
        return [pool["num_threads"] for pool in threadpoolctl.threadpool_info()]

    with VirtualCluster(2) as cluster:
        for found in cluster.run(threads):
            assert set(found) <= {1}


# -- how it is made ----------------------------------------------------------------------------------------------------


def test_the_mesh_is_given_as_a_number_by_axes_or_outright():
    made = {
        VirtualCluster: (lambda: VirtualCluster(4, backend="thread"), Mesh(devices=4)),
        Mesh: (lambda: VirtualCluster(Mesh(tp=2, dp=1), backend="thread"), Mesh(tp=2, dp=1)),
        np: (lambda: VirtualCluster(np.int64(1), backend="thread"), Mesh(devices=1)),
        int: (lambda: VirtualCluster(dp=3, tp=1, backend="thread"), Mesh(dp=3, tp=1)),
    }
    for make, mesh in made.values():
        with make() as cluster:
            assert cluster.mesh == mesh
            assert cluster.mesh.axes == mesh.axes
            assert cluster.size == mesh.size


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("timeout", "deadline_seconds"),
        ("world_size", r"VirtualCluster\(4\)"),
        ("nprocs", r"VirtualCluster\(4\)"),
        ("deadline_second", "deadline_seconds"),
        ("start_methods", "start_method"),
        ("back_end", "backend"),
        ("transports", "transport"),
    ],
)
def test_a_keyword_close_to_an_option_is_a_type_error_with_the_right_one(option, meant):
    with pytest.raises(TypeError, match=rf"no option '{option}'; did you mean .*{meant}"):
        VirtualCluster(2, **{option: 2})
    with pytest.raises(TypeError, match=rf"no option '{option}'; did you mean .*{meant}"):
        VirtualCluster(dp=2, **{option: 2})


def test_axes_do_not_mix_with_a_mesh():
    with pytest.raises(TypeError, match=r"a mesh or axes by name, not both: got Mesh\(dp=2\) and 'tp'"):
        VirtualCluster(Mesh(dp=2), tp=2)
    with pytest.raises(TypeError, match="needs a mesh"):
        VirtualCluster()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("error", "options", "words"),
    [
        (ValueError, {"backend": "threads"}, "backend must be 'process' or 'thread' or 'mpi', got 'threads'"),
        (ValueError, {"transport": "pipe"}, "transport must be 'shared_memory' or 'queue', got 'pipe'"),
        (ValueError, {"start_method": "clone"}, "start_method must be one of .*'fork', got 'clone'"),
        (ValueError, {"channel_capacity": -1}, "channel_capacity .* 0 or more, got -1"),
        (ValueError, {"channel_capacity": 1.5}, "channel_capacity .* got 1.5"),
        (ValueError, {"seed": -3}, "seed .* 0 or more, got -3"),
        (ValueError, {"deadline_seconds": 0}, "deadline_seconds .* more than 0, or None for no limit, got 0"),
        (ValueError, {"mesh": 17, "transport": "queue"}, "at most 16 devices, got 17"),
        (TypeError, {"mesh": "4"}, "a Mesh or a number of devices, got '4'"),
        (TypeError, {"mesh": (2, 2)}, r"got \(2, 2\); axes have names, as in Mesh\(dp=2, tp=4\)"),
        (TypeError, {"mesh": True}, "a Mesh or a number of devices, got True"),
        (TypeError, {"mesh": 2.0}, "a Mesh or a number of devices, got 2.0"),
        (ValueError, {"mesh": 0}, "0"),
    ],
)
def test_a_wrong_option_is_refused_with_what_was_expected_and_what_came(error, options, words):
    children = len(psutil.Process().children(recursive=True))
    with pytest.raises(error, match=words):
        VirtualCluster(**{"mesh": 2, **options})
    assert len(psutil.Process().children(recursive=True)) <= children + 1  # the fork server may have started


def test_a_run_takes_a_function_or_an_operation(cluster):
    with pytest.raises(TypeError, match="a function of a device or an Operation, got int"):
        cluster.run(3)


# -- arguments and results ---------------------------------------------------------------------------------------------


def test_arguments_reach_every_device_and_per_device_ones_their_own(cluster):
    def kernel(device, whole, mine, *, factor, name):
        return whole.sum() * factor + mine, name, device.rank

    run = cluster.run(kernel, TABLE, PerDevice([10, 20, 30]), factor=2, name=PerDevice("abc"))
    assert run.outputs == [(66 * 2 + 10 * (rank + 1), "abc"[rank], rank) for rank in range(3)]


def test_a_keyword_named_like_anything_goes_to_the_function(cluster):
    def kernel(device, **given):
        return given

    given = {"program": 1, "self": 2, "timeout": 3, "args": 4, "rank": 5}
    assert cluster.run(kernel, **given).outputs == [given] * 3


@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_per_device_argument_has_one_value_for_each_device(cluster, count):
    with pytest.raises(ValueError, match=f"argument 2 is a PerDevice .* 3 devices, got {count} values"):
        cluster.run(lambda device, a, b: None, 1, PerDevice(range(count)))
    with pytest.raises(ValueError, match=f"argument 'b' is a PerDevice .* 3 devices, got {count} values"):
        cluster.run(lambda device, a, b: None, 1, b=PerDevice(range(count)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [0, 1, 5, LARGE])
def test_each_device_may_write_into_arguments_and_results_of_its_own(cluster, size):
    common, own = np.arange(float(size)), np.zeros(size)

    def kernel(device, common, own, nested):
        common += device.rank
        own -= device.rank
        nested["deep"][0] *= 10 * device.rank
        device.barrier()
        return common, own, nested["deep"][0]

    run = cluster.run(kernel, common, PerDevice([own] * 3), {"deep": [common]})
    assert_array_equal(common, np.arange(float(size)))
    assert_array_equal(own, np.zeros(size))
    for rank, (a, b, c) in enumerate(run):
        # `common` and the nested one are the same object on the host, and so on the device
        assert_array_equal(a, (np.arange(float(size)) + rank) * 10 * rank)
        assert_array_equal(b, np.full(size, -float(rank)))
        assert_array_equal(c, a)
        a[...] = b[...] = 99.0
    flat = [array for output in run for array in output[:2]]
    assert not any(np.shares_memory(a, b) for i, a in enumerate(flat) for b in flat[:i])


def test_results_of_a_collective_share_no_memory(cluster):
    x = np.ones(LARGE)
    run = cluster.run(lambda device, x: device.all_gather(x[:1000]), x)
    for rank, output in enumerate(run):
        assert_array_equal(output, np.ones(3000))
        output[:] = rank + 5.0
    assert [output[0] for output in run] == [5.0, 6.0, 7.0]


def test_a_result_is_not_changed_by_later_runs(cluster):
    def kernel(device, value):
        device.state.setdefault("array", np.zeros(LARGE))[:] = value
        return device.state["array"]

    first = cluster.run(kernel, 1.0)
    second = cluster.run(kernel, 2.0)
    assert all((output == 1.0).all() for output in first)
    assert all((output == 2.0).all() for output in second)
    first[0][:] = 7.0
    assert (cluster.run(lambda device: device.state["array"])[0] == 2.0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_stay_valid_after_close(kind):
    with VirtualCluster(2, backend=kind[0], transport=kind[1]) as cluster:
        run = cluster.run(lambda device, n: (np.full(n, device.rank + 1.0), "text", np.arange(3)), LARGE)
    del cluster
    gc.collect()
    for rank, (large, text, small) in enumerate(run):
        assert (large == rank + 1.0).all()
        large += 1.0
        assert (large == rank + 2.0).all()
        assert text == "text"
        assert small.tolist() == [0, 1, 2]
    assert run.trace.count("barrier") == 0


def test_any_value_may_travel(cluster):
    value = {
        "none": None, "set": {1, 2}, "bytes": b"\x00" * 70_000, "text": "ä" * 50_000, "scalar": np.float32(1.5),
        "zero_d": np.array(3), "empty": np.zeros((0, 4)), "object": np.array([1, "a", None], dtype=object),
        "fortran": np.asfortranarray(TABLE), "strided": np.arange(40.0)[::2], "when": np.datetime64("2024-01-02"),
        "records": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]), "strings": np.array(["ab", "c"]),
    }
    for found in cluster.run(lambda device, value: value, value):
        assert found.keys() == value.keys()
        for key, expected in value.items():
            assert type(found[key]) is type(expected)
            if isinstance(expected, np.ndarray):
                assert found[key].dtype == expected.dtype
                assert_array_equal(found[key], expected)
            else:
                assert found[key] == expected


def test_state_persists_between_runs(cluster):
    def count(device):
        device.state["runs"] = device.state.get("runs", 10 * device.rank) + 1
        return device.state["runs"]

    assert cluster.run(count).outputs == [1, 11, 21]
    assert cluster.run(count).outputs == [2, 12, 22]
    assert cluster.run(lambda device: device.state).outputs == [{"runs": 2}, {"runs": 12}, {"runs": 22}]


@pytest.mark.slow_for("process")
@pytest.mark.parametrize("backend", ["process", "thread"])
def test_random_numbers_are_seeded_by_seed_rank_and_run(backend):
    def draw(device):
        return device.rng.integers(1 << 60)

    def two_runs(seed):
        with VirtualCluster(2, seed=seed, backend=backend) as cluster:
            return [*cluster.run(draw), *cluster.run(draw)]

    first = two_runs(5)
    assert two_runs(5) == first
    assert len({*first, *two_runs(6)}) == 8


# -- programs ----------------------------------------------------------------------------------------------------------


def module_function(device, x):
    return helper(x) + TABLE[device.rank, 1]


def helper(x):
    return x * 2


def logged(function):
    @functools.wraps(function)
    def wrapper(device, *args):
        return "logged", function(device, *args)

    return wrapper


@logged
def decorated(device, x):
    return x + device.rank


class Base:
    offset = 100

    def __init__(self, scale):
        self.scale = scale

    def kernel(self, device):
        return self.scale * device.rank + self.offset

    def __call__(self, device):
        return -self.kernel(device)


def test_functions_of_test_modules_lambdas_methods_and_objects_travel(cluster):
    assert cluster.run(module_function, 10).outputs == [21.0, 25.0, 29.0]
    assert cluster.run(decorated, 10).outputs == [("logged", 10), ("logged", 11), ("logged", 12)]
    assert cluster.run(lambda device, x=3: x * device.rank).outputs == [0, 3, 6]
    assert cluster.run(functools.partial(module_function, x=1)).outputs == [3.0, 7.0, 11.0]
    assert cluster.run(Base(2).kernel).outputs == [100, 102, 104]
    assert cluster.run(Base(2)).outputs == [-100, -102, -104]


def test_closures_and_local_classes_travel_and_come_back(cluster):
    class Local(Base):
        def kernel(self, device):
            return super().kernel(device) + 1

    def recursive(n):
        return 1 if n == 0 else n * recursive(n - 1)

    Point = collections.namedtuple("Point", "x y")
    run = cluster.run(lambda device: (Local(3), Local(3).kernel(device), recursive(4), Point(device.rank, 2)))
    for rank, (instance, value, factorial, point) in enumerate(run):
        assert isinstance(instance, Local)
        assert value == 3 * rank + 101
        assert factorial == 24
        assert point.y == 2


def test_arrays_in_closures_and_globals_travel_and_are_private(cluster):
    large = np.arange(float(LARGE))

    def kernel(device):
        large[:2] += device.rank
        device.barrier()
        return large[:2].tolist(), large[-1], TABLE.sum()

    assert cluster.run(kernel).outputs == [([float(rank), rank + 1.0], LARGE - 1.0, 66.0) for rank in range(3)]
    assert large[:2].tolist() == [0.0, 1.0]


def test_a_changed_user_module_is_imported_anew(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "steps_of_a_user", raising=False)
    file = tmp_path / "steps_of_a_user.py"
    with VirtualCluster(2) as cluster:
        cluster.run(lambda device: None)
        for value in ("one", "two", "three"):
            file.write_text(f"WORD = {value!r}\ndef kernel(device):\n    return WORD\n")
            importlib.invalidate_caches()
            module = importlib.import_module("steps_of_a_user")
            importlib.reload(module)
            assert cluster.run(module.kernel).outputs == [value, value]
    del sys.modules["steps_of_a_user"]


def test_what_cannot_be_pickled_is_named_and_nothing_is_sent(cluster):
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"'guard'.*lock cannot be pickled"):
        cluster.run(lambda device, **options: None, options={"guard": lock})
    with pytest.raises(TypeError, match=r"closure variable 'lock' of .*lock cannot be pickled"):
        cluster.run(lambda device: lock)
    with pytest.raises(TypeError, match=r"argument 'x' of rank 1 .*lock cannot be pickled"):
        cluster.run(lambda device, x: None, PerDevice([1, lock, 3]))
    assert cluster.run(lambda device: device.all_reduce(1)).outputs == [3, 3, 3]


def test_a_result_that_cannot_be_pickled_is_named(cluster):
    def kernel(device):
        return {"good": 1, "bad": [threading.Lock()]} if device.rank == 1 else None

    with pytest.raises(DeviceFailedError, match=r"'bad' of the result.*lock cannot be pickled") as caught:
        cluster.run(kernel)
    assert caught.value.ranks == (1,)
    assert isinstance(caught.value.__cause__, TypeError)
    assert cluster.run(lambda device: device.all_reduce(1)).outputs == [3, 3, 3]


def test_a_run_inside_a_kernel_is_refused(cluster):
    with pytest.raises(TypeError, match=r"closure variable 'cluster' of .*a cluster cannot be sent to another process"):
        cluster.run(lambda device: cluster.run(lambda device: 1))

    def nested(device):
        from vcluster import VirtualCluster

        with VirtualCluster(2) as inner:
            return inner.run(lambda device: device.rank).outputs

    if cluster.pids()[0] != os.getpid():
        with pytest.raises(DeviceFailedError, match='cannot start processes of its own; use backend="thread"'):
            cluster.run(nested)


def test_a_cluster_of_threads_may_live_in_a_device():
    def nested(device):
        from vcluster import VirtualCluster

        with VirtualCluster(2, backend="thread") as inner:
            return inner.run(lambda device: device.all_reduce(device.rank)).outputs

    with VirtualCluster(2) as cluster:
        assert cluster.run(nested).outputs == [[1, 1], [1, 1]]


# -- the run -----------------------------------------------------------------------------------------------------------


def test_a_run_is_a_sequence_of_the_outputs(cluster):
    run = cluster.run(lambda device: 10 * device.rank)
    assert len(run) == 3
    assert run[2] == 20
    assert run[-1] == 20
    assert run[1:] == [10, 20]
    with pytest.raises(IndexError, match="the run has ranks 0 to 2, got 3"):
        _ = run[3]
    assert list(run) == run.outputs == [0, 10, 20]
    assert 10 in run
    assert "lambda" in repr(run)


def test_a_plain_function_has_no_result_and_is_told_how_to_join_outputs(cluster):
    run = cluster.run(helper_kernel)
    with pytest.raises(TypeError, match=r"helper_kernel is a function.*run\.unshard\(sharding\)"):
        run.result  # noqa: B018
    assert_array_equal(run.unshard(Shard), [0.0, 1.0, 2.0])


def helper_kernel(device):
    return np.array([float(device.rank)])


class Doubling(Operation):
    def inputs(self, mesh, x, y):
        return [(part, y) for part in np.array_split(x, mesh.size)]

    def __call__(self, device, part, y):
        return 2 * part + y

    def result(self, mesh, outputs):
        return np.concatenate(outputs)


def test_an_operation_deals_its_inputs_and_makes_a_result(cluster):
    run = cluster.run(Doubling(), np.arange(7.0), 1.0)
    assert_array_equal(run.result, 2 * np.arange(7.0) + 1)
    assert [len(output) for output in run] == [3, 2, 2]


def test_a_run_shows_itself_in_a_notebook(cluster):
    shown = cluster.run(lambda device: f"<b>{device.rank}&")._repr_html_()
    assert "&lt;b&gt;2&amp;" in shown
    assert "<b>" not in shown
    assert shown.split("run.trace: what happened")[0].count("<tr>") == 4


# -- what is printed ---------------------------------------------------------------------------------------------------


def lines_of(text, rank):
    return [line for line in text.splitlines() if line.startswith(f"[rank {rank}] ")]


def test_lines_show_up_in_order_with_the_rank_in_front(cluster, capsys):
    def talk(device):
        for i in range(20):
            print("line", i)
        print("to stderr", file=sys.stderr)
        print("two\nlines")
        print()

    cluster.run(talk)
    out, err = capsys.readouterr()
    for rank in range(3):
        expected = [*(f"line {i}" for i in range(20)), "two", "lines", ""]
        assert lines_of(out, rank) == [f"[rank {rank}] {text}" for text in expected]
    assert len(out.splitlines()) == 3 * 23
    assert sorted(err.splitlines()) == [f"[rank {rank}] to stderr" for rank in range(3)]


def test_bytes_that_a_kernel_writes_are_shown_as_text(cluster, capsys):
    def talk(device):
        encoded = "café\n".encode()
        sys.stdout.buffer.write(encoded[:4])        # half a character
        sys.stdout.buffer.write(memoryview(encoded)[4:])
        print("text", b"\xff".decode(errors="replace"))
        sys.stdout.buffer.write(b"\xff\n")

    cluster.run(talk)
    out, _ = capsys.readouterr()
    for rank in range(3):
        assert lines_of(out, rank) == [f"[rank {rank}] {text}" for text in ("café", "text \ufffd", "\\xff")]


def test_pieces_of_a_line_are_joined_and_an_unfinished_line_ends_with_the_run(cluster, capsys):
    def talk(device):
        print("a", end="")
        print("b", end="", flush=True)
        device.barrier()
        print("c")
        print("50%\r100% \u2028 done")
        sys.stdout.write("unfinished")

    cluster.run(talk)
    lines = capsys.readouterr().out.split("\n")
    expected = [f"[rank {rank}] {text}" for rank in range(3) for text in ("abc", "50%\r100% \u2028 done", "unfinished")]
    assert sorted(lines) == sorted([*expected, ""])


def test_ranks_that_take_turns_are_seen_in_that_order(cluster, capsys):
    def talk(device):
        for turn in range(2 * device.size):
            if turn % device.size == device.rank:
                print("turn", turn)
            device.barrier()

    cluster.run(talk)
    shown = capsys.readouterr().out
    for rank in range(3):
        assert lines_of(shown, rank) == [f"[rank {rank}] turn {turn}" for turn in (rank, rank + 3)]


def test_what_a_kernel_printed_before_it_failed_is_seen(cluster, capsys):
    def talk(device):
        print("about to fail")
        print("half a line", end="")
        raise ValueError("failed")

    with pytest.raises(DeviceFailedError):
        cluster.run(talk)
    out = capsys.readouterr().out
    ranks = [rank for rank in range(3) if lines_of(out, rank)]
    assert ranks
    for rank in ranks:
        assert lines_of(out, rank) == [f"[rank {rank}] about to fail", f"[rank {rank}] half a line"]


def test_an_output_that_cannot_be_written_ends_the_run_and_not_the_cluster(cluster, monkeypatch):
    class Broken:
        def write(self, text):
            raise BrokenPipeError("nobody reads")

        def flush(self):
            pass

    def talk(device):
        print("hello")
        device.barrier()
        print("again")
        return "stale"

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Broken())
        with pytest.raises(BrokenPipeError, match="nobody reads"):
            cluster.run(talk)
    assert cluster.run(lambda device: device.all_reduce(1)).outputs == [3, 3, 3]


# -- programs of every kind --------------------------------------------------------------------------------------------

SCRIPT = """
import numpy as np
from vcluster import VirtualCluster

SCALE = np.arange(3.0)

class Model:
    def __init__(self, n):
        self.n = n

def kernel(device, model):
    return float(device.all_reduce(SCALE * model.n).sum())

cluster = VirtualCluster(2)
print("pids", *cluster.pids())
print(cluster.run(kernel, Model(2)).outputs, cluster.run(lambda device: device.rank).outputs)
"""


def check_script(done):
    lines = done.stdout.splitlines()
    pids = next(line for line in lines if "pids" in line).split("pids")[1].split()
    assert any("[12.0, 12.0] [0, 1]" in line for line in lines), lines
    assert gone([int(pid) for pid in pids])
    return done


@pytest.mark.slow
def test_a_script_needs_no_main_guard_and_no_close_of_processes_or_threads(tmp_path):
    (tmp_path / "script.py").write_text(
        SCRIPT + "threads = VirtualCluster(2, backend='thread')\nprint(threads.run(lambda device: 1)[0])")
    done = check_script(python("script.py", cwd=tmp_path))
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 3  # the script ran once
    assert done.stdout.endswith("\n1\n")


@pytest.mark.slow
def test_a_program_comes_from_stdin(tmp_path):
    assert check_script(python("-", input=SCRIPT, cwd=tmp_path)).stderr == ""


@pytest.mark.slow
def test_a_program_comes_from_the_command_line(tmp_path):
    assert check_script(python("-c", SCRIPT, cwd=tmp_path)).stderr == ""


@pytest.mark.slow
def test_a_program_is_typed_into_an_interpreter(tmp_path):
    typed = SCRIPT.replace("\n\nkernel", "\n\n\nkernel").replace("\n\n", "\n\n\n")
    check_script(python("-i", "-q", input=typed, cwd=tmp_path))


@pytest.mark.slow
def test_threads_of_a_cluster_that_was_not_closed_do_not_hold_up_the_end(tmp_path):
    script = "from vcluster import VirtualCluster as C\nc = C(2, backend='thread')\nprint(c.run(lambda d: 1)[0])"
    assert python("-c", script, cwd=tmp_path).stdout == "1\n"


# -- a notebook --------------------------------------------------------------------------------------------------------

CELLS = [
    """
    from vcluster import VirtualCluster
    import psutil
    cluster = VirtualCluster(2)
    first = cluster.pids()
    """,
    """
    scale = 3
    def kernel(device):
        print("hello")
        return int(scale * device.all_reduce(device.rank))
    print(cluster.run(kernel).outputs)
    """,
    """
    def wrong(device):
        ratio = 1 / device.rank  # the culprit
        return ratio
    cluster.run(wrong)
    """,
    """
    cluster = VirtualCluster(2)
    print("first gone:", not any(psutil.pid_exists(pid) for pid in first))
    cluster.restart()
    print(cluster.run(kernel).outputs)
    cluster.close()
    print(cluster.closed)
    """,
    "cluster.run(kernel)",
]
EXECUTE = """
import json, sys
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel(kernel_name="python3")
shown = []
for source in json.load(sys.stdin):
    shown.append([])
    client.execute_interactive(source, timeout=30, output_hook=lambda message: shown[-1].append(message["content"]))
client.stop_channels()
# (to wait for a kernel with child processes to end takes ipykernel seconds, whatever they are)
manager.shutdown_kernel(now=True)
print(json.dumps([[each for each in cell if {"text", "ename"} & {*each}] for cell in shown]))
"""


@pytest.mark.slow
def test_a_cluster_lives_across_the_cells_of_a_notebook(tmp_path):
    for name in ("jupyter_client", "ipykernel"):
        pytest.importorskip(name)
    cells = json.dumps([textwrap.dedent(source).strip() for source in CELLS])
    done = python("-W", "ignore", "-c", EXECUTE, input=cells, cwd=tmp_path)
    made, used, failed, again, closed = json.loads(done.stdout.splitlines()[-1])
    assert made == []
    shown = "".join(output["text"] for output in used)
    assert sorted(shown.splitlines()) == ["[3, 3]", "[rank 0] hello", "[rank 1] hello"]
    assert failed[-1]["ename"] == "DeviceFailedError"
    told = "\n".join(failed[-1]["traceback"])
    assert "ratio = 1 / device.rank  # the culprit" in failed[-1]["evalue"]
    assert "ZeroDivisionError" in told
    shown = "".join(output["text"] for output in again)
    assert "first gone: True" in shown
    assert shown.splitlines()[-2:] == ["[3, 3]", "True"]
    assert closed[-1]["ename"] == "ClusterError"
    assert "restart" in closed[-1]["evalue"]
