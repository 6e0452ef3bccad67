"""A collective that is called again and again: the same answers, the same record, the same errors as the first time."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from oracle import results

from parallelism.mesh import Mesh
from vcluster.code import (
    ChannelClosedError,
    ClusterError,
    CollectiveMismatchError,
    DeadlockError,
    DeviceFailedError,
)
from vcluster.collectives import general, prepared, zero_copy
from vcluster.collectives.dispatch import Collectives
from vcluster.collectives.general import General

TIMES = 4
CALLS = {
    "all_reduce": {}, "reduce_scatter": {"dim": 1}, "all_gather": {"dim": 1}, "all_to_all": {"split_dim": 1},
    "broadcast": {"root": -1}, "reduce": {"root": -1}, "scatter": {"root": -1, "dim": 1}, "gather": {"root": -1},
    "shift": {"by": 1}, "barrier": {},
}


def values(rank, time, dtype=np.float64):
    return (np.arange(15).reshape(3, 5) * (rank + 1) + 7 * time).astype(dtype)


def again_and_again(device, kind, options, form):
    """The results of calls that differ in nothing but the values."""
    found = []
    out = None
    for time in range(TIMES):
        x = None if kind == "barrier" else values(device.rank, time)
        if form == "strided" and x is not None:
            x = np.repeat(x, 2, axis=1)[:, ::2]
        if kind in ("broadcast", "scatter") and device.rank != options["root"]:
            x = None
        given = options if form != "out" or out is None else {**options, "out": out}
        result = getattr(device, kind)(*(() if kind == "barrier" else (x,)), **given)
        if "out" in given:
            assert result is out
        out = result
        if x is not None and isinstance(result, np.ndarray):
            assert not np.may_share_memory(x, result)
        found.append(result if form != "out" or result is None else result.copy())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize(("backend", "transport"), [("process", "shared_memory"), ("thread", "shared_memory"),
                                                    ("process", "queue")])
def test_every_repetition_gives_what_numpy_gives(cluster_of, devices, backend, transport):
    cluster = cluster_of(Mesh(devices=devices), backend, transport)
    for kind, fixed in CALLS.items():
        options = {**fixed, "root": devices - 1} if "root" in fixed else fixed
        for form in ("plain", "strided", "out"):
            if kind == "barrier" and form != "plain":
                continue
            run = cluster.run(again_and_again, kind, options, form)
            for time in range(TIMES):
                xs = [values(rank, time) for rank in range(devices)]
                expected = [None] * devices if kind == "barrier" else results(kind, xs, [devices], **options)
                for rank in range(devices):
                    np.testing.assert_array_equal(run[rank][time], expected[rank])
                    if expected[rank] is not None:
                        assert run[rank][time].dtype == expected[rank].dtype
            name = "permute" if kind == "shift" else kind
            assert run.trace.count(name) == TIMES
            events = run.trace.filter(name=name, rank=0)
            assert [event.sequence for event in events] == list(range(TIMES))
            first = events[0]
            for event in events:
                assert (event.bytes_sent, event.bytes_received, event.messages, event.sources, event.group) == (
                    first.bytes_sent, first.bytes_received, first.messages, first.sources, first.group
                )
                assert event.location == first.location
                assert event.algorithm == "direct"


def changing(device):
    """Shards whose extents change, of others and of one's own, between repetitions."""
    found = []
    for extent in (1, 1, 1, 1, 4, 1, 4, 4, 4, 0, 0, 0, 0):
        x = np.full((extent if device.rank == 1 else 2, 3), 10 * device.rank + extent)
        found.append(device.all_gather(x))
        assert device.all_reduce(np.array([device.rank])) == 3
    return found


def test_a_member_may_come_with_another_shape_than_the_last_time(cluster_of):
    for gathered in cluster_of(Mesh(devices=3), "process", "shared_memory").run(changing):
        for extent, found in zip((1, 1, 1, 1, 4, 1, 4, 4, 4, 0, 0, 0, 0), gathered, strict=True):
            shards = [np.full((extent if rank == 1 else 2, 3), 10 * rank + extent) for rank in range(3)]
            np.testing.assert_array_equal(found, np.concatenate(shards))


def mixed(device):
    """Two groups in turn, asynchronous calls and calls by name in between, large arrays and small ones."""
    total = []
    for time in range(6):
        x = np.full(5, float(device.rank + time))
        work = device.all_reduce(x, "x", async_op=True) if time % 2 else None
        total.append(device.all_reduce(x, "x"))
        total.append(device.all_reduce(x, "y"))
        if work is not None:
            total.append(work.wait())
        total.append(device.all_reduce(x, "x", algorithm="ring"))
        total.append(device.all_reduce(np.full(40_000, float(device.rank)), "x")[:5])
        total.append(device.all_reduce(x, "x", op="max"))
    return total


def test_short_and_long_ways_mix(cluster_of):
    mesh = Mesh(x=2, y=2)
    run = cluster_of(mesh, "process", "shared_memory").run(mixed)
    for rank in range(4):
        along = {axis: np.array(next(g for g in mesh.groups(axis) if rank in g)) for axis in ("x", "y")}
        expected = []
        for time in range(6):
            x = float((along["x"] + time).sum())
            expected += [x, float((along["y"] + time).sum())] + [x] * (time % 2)
            expected += [x, float(along["x"].sum()), float((along["x"] + time).max())]
        np.testing.assert_array_equal(np.array(run[rank]), np.repeat(np.array(expected)[:, None], 5, 1))


def differs_at_last(device, odd):
    x = np.ones(4)
    for _ in range(5):
        x = device.all_reduce(x)
    if device.rank == 1:
        return odd(device)
    return device.all_reduce(x)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("odd", "told"), [
    (lambda device: device.all_reduce(np.ones(5)), "shape"),
    (lambda device: device.all_reduce(np.ones(4, np.float32)), "dtype"),
    (lambda device: device.all_reduce(np.ones(4), op="max"), "op"),
    (lambda device: device.all_gather(np.ones(4)), "what they call"),
], ids=["shape", "dtype", "op", "kind"])
def test_a_mismatch_after_many_repetitions_is_told(cluster_of, odd, told):
    cluster = cluster_of(Mesh(devices=3), "process", "shared_memory")
    with pytest.raises(CollectiveMismatchError, match=f"differ in {told}") as caught:
        cluster.run(differs_at_last, odd)
    assert caught.value.ranks == (1,)
    assert len(caught.value.locations) == 3
    run = cluster.run(again_and_again, "all_reduce", {}, "plain")  # the cluster goes on
    np.testing.assert_array_equal(run[0][3], sum(values(rank, 3) for rank in range(3)))


def test_who_stops_repeating_is_named(cluster_of):
    cluster = cluster_of(Mesh(devices=3), "process", "shared_memory")
    with pytest.raises(DeadlockError, match="rank 1 returned") as caught:
        cluster.run(differs_at_last, lambda device: None)
    assert set(caught.value.ranks) == {0, 2}
    with pytest.raises(DeviceFailedError, match="rank 1 raised ZeroDivisionError"):
        cluster.run(differs_at_last, lambda device: 1 / 0)


def wrong_out(device):
    x = np.ones(4)
    for _ in range(4):
        device.all_reduce(x, out=np.empty(4))
    told = []
    longer = np.ones(5)
    frozen = np.ones(4)
    frozen.flags.writeable = False
    for given, out in [(x, np.empty(5)), (x, np.empty(4, int)), (x, frozen), (x, [0] * 4), (longer[:4], longer[1:])]:
        with pytest.raises((ValueError, TypeError)) as caught:
            device.all_reduce(given, out=out)
        told.append(str(caught.value))
    inplace = np.full(4, 2.0)
    device.all_reduce(inplace, out=inplace)
    return told, inplace


def test_a_wrong_out_is_refused_however_often_the_call_was_right(cluster_of):
    run = cluster_of(Mesh(devices=2), "process", "shared_memory").run(wrong_out)
    for told, inplace in run:
        assert [text.split(" ")[0] for text in told] == ["out="] * 5
        assert "float64[4]" in told[0]
        assert "float64[5]" in told[0]
        np.testing.assert_array_equal(inplace, np.full(4, 4.0))


def dropping(device):
    x = np.ones(4)
    for _ in range(4):
        device.all_reduce(x)


def test_a_result_thrown_away_is_told_once(cluster_of):
    with pytest.warns(UserWarning, match="all_reduce is not used") as caught:
        cluster_of(Mesh(devices=2), "process", "shared_memory").run(dropping)
    assert len(caught) == 1


def ended(device):
    for time in range(50):
        if device.rank == 1 and time == 40:
            import os

            os._exit(7)
        device.all_reduce(np.ones(4), out=np.empty(4))


@pytest.mark.not_on_mpi("a rank that dies ends the job")
def test_a_death_among_repetitions_is_told(cluster_of):
    with pytest.raises(ClusterError) as caught:
        cluster_of(Mesh(devices=3), "process", "shared_memory").run(ended)
    assert caught.value.ranks == (1,)
    assert isinstance(caught.value, DeviceFailedError)
    assert caught.value.exitcode == 7


def messages_to_sleepers(device, times):
    """Who receives never spins; messages of another look or tag come in between."""
    device.endpoint.signals.spins = 0
    found = []
    for number in range(times):
        x = np.arange(3 + number % 5 // 4) + number
        tag = number % 7 // 6
        if device.rank == 0:
            device.send(x, 1, tag=tag)
            found.append(device.recv(1, tag=tag))
        else:
            found.append(device.recv(0, tag=tag))
            device.send(2 * x, 0, tag=tag)
    return found


def test_a_message_that_wakes_a_sleeper_is_the_next_one(cluster_of):
    cluster = cluster_of(Mesh(devices=2))
    cluster.restart()
    for rank, found in enumerate(cluster.run(messages_to_sleepers, 40)):
        for number, x in enumerate(found):
            np.testing.assert_array_equal(x, (2 - rank) * (np.arange(3 + number % 5 // 4) + number))
    cluster.restart()  # with the usual turns


def waits_for_the_close(device):
    for _ in range(4):
        if device.rank == 0:
            device.send(np.ones(3), 1)
        else:
            device.recv(0)
    device.barrier()
    if device.rank == 0:
        device.channel(1).close()
        return None
    with pytest.raises(ChannelClosedError):
        device.recv(0)
    return "told"


def test_who_waits_the_short_way_hears_of_a_close(cluster_of):
    assert cluster_of(Mesh(devices=2)).run(waits_for_the_close).outputs == [None, "told"]


@pytest.fixture
def general_runs(monkeypatch):
    """The kinds and shapes of the calls of all members that take the general way."""
    runs, run = [], General.run
    monkeypatch.setattr(General, "run", lambda way: runs.append((way.call.kind, way.call.shape)) or run(way))
    return runs


def met(cluster, general_runs):
    """The cluster after all its devices have met."""
    cluster.run(lambda device: device.barrier())
    general_runs.clear()
    return cluster


def test_a_group_that_has_met_takes_no_general_way(cluster_of, general_runs):
    def program(device, shapes):
        return [
            device.all_reduce(np.full(shape, 1.0 * device.rank + time)).sum() for time in range(3) for shape in shapes]

    shapes = [(5,), (2, 3), (40_000,)]
    run = met(cluster_of(Mesh(devices=3), "thread"), general_runs).run(program, shapes)
    assert run.outputs[0] == [(3 + 3 * time) * np.prod(shape) for time in range(3) for shape in shapes]
    assert general_runs == []
    by_time = [event.bytes_received for event in run.trace.filter(rank=1, name="all_reduce")]
    assert by_time[:3] == by_time[3:6] == by_time[6:]


SCALARS = [2.5, 3, True, 1j, np.float64(2.5), np.float32(1.5), np.int16(4), np.bool_(True), np.complex64(2)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_scalars_take_the_fast_path_and_keep_the_types_of_their_results(cluster_of, general_runs, devices):
    def program(device, x):
        given = x if device.rank == devices - 1 else None
        taken = np.zeros((), np.float32)
        for _ in range(TIMES):
            yield [
                device.all_reduce(x, op="prod"), device.reduce(x, op="prod", root=0), device.all_gather(x),
                device.gather(x, root=0), device.broadcast(given, root=devices - 1), device.shift(x), device.barrier(),
                device.broadcast(np.float32(7), out=taken) is taken and float(taken),
            ]

    cluster = met(cluster_of(Mesh(devices=devices), "thread"), general_runs)
    for x in SCALARS:
        general_runs.clear()
        outputs = cluster.run(lambda device, x: list(program(device, x)), x).outputs
        types = [[(type(value), getattr(value, "dtype", None), np.shape(value)) for value in row] for row in outputs[0]]
        assert all(row == types[0] for row in types)
        kept = type(x) if isinstance(x, np.generic) else type(np.asarray(x)[()])
        assert [kind for kind, _, _ in types[0][4:6]] == [kept, kept]
        assert types[0][0][2] == () and types[0][2][2] == (devices,)
        assert len({repr(row) for row in outputs[0]}) == 1
        for kind in ("all_reduce", "reduce", "all_gather", "gather"):
            assert general_runs.count((kind, ())) == 0
        assert len(general_runs) <= 8 * devices


def test_an_integer_that_needs_another_dtype_is_another_call(cluster_of):
    def program(device):
        return [device.all_reduce(x, op="max") for x in (1, 2, 2**63, 3, 2**63 + 5)]

    got = cluster_of(Mesh(devices=2), "thread").run(program).outputs[0]
    assert [int(value) for value in got] == [1, 2, 2**63, 3, 2**63 + 5]
    assert [str(value.dtype) for value in got] == ["int64", "int64", "uint64", "int64", "uint64"]


@pytest.mark.not_on_mpi("what the host replaces is not replaced in another process")
def test_a_transposed_array_is_copied_once_into_shared_memory(cluster_of, general_runs, monkeypatch):
    copies, show = [], zero_copy.show

    def counted(endpoint, call, payload, *given):
        shown = show(endpoint, call, payload, *given)
        copies.append((payload.flags.c_contiguous, shown.copied is not None))
        return shown

    monkeypatch.setattr(general, "show", counted)
    monkeypatch.setattr(prepared, "show", counted)
    monkeypatch.setattr(np, "ascontiguousarray", None)

    def program(device):
        x = np.arange(200 * 101.0).reshape(200, 101) * (device.rank + 1)
        out = np.empty((101, 200))
        for _ in range(TIMES):
            result = device.all_reduce(x.T, out=out)
        return result is out, out

    run = met(cluster_of(Mesh(devices=2), "thread"), general_runs).run(program)
    whole = np.arange(200 * 101.0).reshape(200, 101).T * 3
    for is_out, reduced in run.outputs:
        assert is_out
        np.testing.assert_array_equal(reduced, whole)
    assert copies[: 2 * TIMES] == [(False, True)] * 2 * TIMES
    assert general_runs == []


@pytest.mark.not_on_mpi("what the host replaces is not replaced in another process")
@pytest.mark.parametrize("devices", [2, 3])
def test_a_wrong_guess_of_what_the_others_call_is_made_once(cluster_of, general_runs, devices, monkeypatch):
    guesses, guess = [], Collectives._guesses
    monkeypatch.setattr(
        Collectives, "_guesses", lambda self, checked: guess(self, checked) and not guesses.append(checked.call.kind))

    def program(device):
        found = []
        for columns in (1, 4, 2):
            for time in range(3):
                x = np.full((device.rank + 1, columns), 10.0 * device.rank + time)
                found.append(device.all_gather(x)[:, -1].tolist())
        return found

    cluster = cluster_of(Mesh(devices=devices), "thread")
    cluster.restart()
    met(cluster, general_runs)
    for rank, found in enumerate(cluster.run(program)):
        assert found == [
            [10.0 * each + time for each in range(devices) for _ in range(each + 1)] for _ in range(3)
            for time in range(3)], rank
    assert len(general_runs) == 3 * devices     # once for each shape: each is prepared when it is repeated
    assert guesses == ["all_gather"] * devices


def test_out_may_overlap_an_array_that_is_copied_anyway(cluster_of):
    def program(device):
        found = []
        for extent in (3, 200):
            a = np.arange(extent * extent * 1.0).reshape(extent, extent)
            for _ in range(TIMES):
                a[...] = np.arange(a.size).reshape(a.shape)
                device.all_reduce(a.T, out=a)
            found.append(a)
        return found

    for a, b in cluster_of(Mesh(devices=2), "thread").run(program).outputs:
        np.testing.assert_array_equal(a, 2 * np.arange(9).reshape(3, 3).T)
        np.testing.assert_array_equal(b, 2 * np.arange(40_000).reshape(200, 200).T)


def sends_in_turn(device):
    told = []
    for length in (4, 4, 4, 30_000):
        for out in (np.empty(length), np.empty(2 * length)[::2], as_strided(np.empty(length), (length,), (0,))):
            device.send(np.arange(length) + 1.0 * device.rank, 1 - device.rank)
            try:
                same = device.recv(1 - device.rank, out=out)[-1] == length - device.rank
            except ValueError as error:
                same = str(error)
            told.append(same)
    return told


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_a_message_is_not_received_into_an_array_that_overlaps_itself(cluster_of, backend):
    cluster = cluster_of(Mesh(devices=2), backend)
    cluster.forget()    # another test closes a channel
    for rank, told in enumerate(cluster.run(sends_in_turn)):
        for i in range(0, 12, 3):
            assert told[i:i + 2] == [True, True]
            assert told[i + 2].startswith(f"out= of recv from rank {1 - rank} has elements that lie in the same memory")
