"""Planted failures happen where they were planted, once, and the cluster goes on after them."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import numpy as np
import pytest

from parallelism.mesh import Mesh
from parallelism.operation import Operation
from vcluster import DeadlockError, DeviceFailedError, UndeliveredMessageError, faults

BACKENDS = ["thread", "process"]


def summing(device, times=6):
    return [int(device.all_reduce(np.array([i]))[0]) for i in range(times)]


def passing_on(device, count=4):
    """Rank 0 sends 0, 1, 2, ... to rank 1, which gives what came."""
    if device.rank == 0:
        for i in range(count):
            device.send(np.array([i]), 1)
        return None
    return [int(device.recv(0)[0]) for _ in range(count)]


@pytest.fixture(params=BACKENDS)
def pair(request, cluster_of):
    return cluster_of(Mesh(x=2), request.param)


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize(("how", "fields"), [
    ({}, {"signal": "SIGKILL", "exitcode": None}),
    ({"signal": signal.SIGSEGV}, {"signal": "SIGSEGV", "exitcode": None}),
])
def test_rank_2_is_killed_at_its_5th_operation(cluster_of, how, fields):
    cluster = cluster_of(Mesh(x=3))
    seen = []

    with faults.plant(cluster, faults.Kill(rank=2, operation=5, **how)) as planted:
        with pytest.raises(DeviceFailedError, match="rank 2") as caught:
            cluster.run(summing)
        seen.append(cluster.run(summing).outputs)  # tried again it goes well
    assert caught.value.ranks == (2,)
    assert {name: getattr(caught.value, name) for name in fields} == fields
    assert planted.happened == set(planted.faults)
    assert seen == [[[0, 3, 6, 9, 12, 15]] * 3]


def test_an_exit_has_its_code(cluster_of):
    cluster = cluster_of(Mesh(x=3))
    with (
        faults.plant(cluster, faults.Exit(rank=1, operation=2, code=7)),
        pytest.raises(DeviceFailedError, match="rank 1") as caught,
    ):
        cluster.run(summing)
    assert caught.value.exitcode == 7


def test_an_exception_is_raised_by_the_call_that_is_named(pair):
    def kernel(device):
        device.barrier()
        try:
            return device.all_reduce(1)
        except KeyError:
            return device.all_reduce(2)

    with (
        faults.plant(pair, faults.Raise(rank=1, operation=2, exception=ValueError("planted here"))),
        pytest.raises(DeviceFailedError, match="planted here") as caught,
    ):
        pair.run(kernel)
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.locations[0].startswith(f"{__file__}:")
    with faults.plant(pair, *(faults.Raise(rank=r, operation=2, exception=KeyError) for r in range(2))):
        assert pair.run(kernel).outputs == [4, 4]


def test_only_operations_of_a_name_can_be_counted(pair):
    def kernel(device):
        other = 1 - device.rank
        device.barrier()
        device.sendrecv(device.rank, other, other)
        device.barrier()
        return device.sendrecv(device.rank, other, other)

    error = RuntimeError("second recv")
    with (
        faults.plant(pair, faults.Raise(rank=0, operation=2, among="recv", exception=error)),
        pytest.raises(DeviceFailedError, match="second recv"),
    ):
        pair.run(kernel)
    with faults.plant(pair, faults.Raise(rank=0, operation=6, exception=error)), pytest.raises(DeviceFailedError):
        pair.run(kernel)  # the same one: barrier, isend, recv, barrier, isend, recv


# -- messages ----------------------------------------------------------------------------------------------------------


def test_a_lost_message_is_missed_or_found_at_the_end(pair):
    with faults.plant(pair, faults.Drop(rank=0, operation=2)), pytest.raises(DeadlockError, match="recv"):
        pair.run(passing_on)

    def never_asks(device):
        if device.rank == 0:
            device.send(1, 1)

    with faults.plant(pair, faults.Drop(rank=0, operation=1)), pytest.raises(UndeliveredMessageError, match="rank 0"):
        pair.run(never_asks)


def test_a_doubled_message_arrives_twice_and_is_left_over(pair):
    with faults.plant(pair, faults.Duplicate(rank=0, operation=2)), pytest.raises(UndeliveredMessageError):
        pair.run(passing_on)

    def reads_one_more(device):
        if device.rank == 0:
            return passing_on(device)
        return [int(device.recv(0)[0]) for _ in range(5)]

    with faults.plant(pair, faults.Duplicate(rank=0, operation=2)):
        assert pair.run(reads_one_more)[1] == [0, 1, 1, 2, 3]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("operation", "came"), [(1, [1, 0, 2, 3]), (3, [0, 1, 3, 2]), (4, [0, 1, 2, 3])])
@pytest.mark.parametrize("method", ["send", "isend"])
@pytest.mark.parametrize("overwrites", [True, False])
def test_a_message_is_overtaken_by_the_next(pair, operation, came, method, overwrites):
    def kernel(device):
        if device.rank == 1:
            return passing_on(device)
        works = []
        x = np.array([0])
        for i in range(4):
            if overwrites and method == "send":
                x[0] = i
            else:
                x = np.array([i])
            works.append(getattr(device, method)(x, 1))
        return [work.wait() for work in works if work is not None]

    with faults.plant(pair, faults.Reorder(rank=0, operation=operation)):
        assert pair.run(kernel)[1] == came


def test_a_message_that_is_held_back_is_late_but_not_lost(pair):
    def kernel(device):
        other = 1 - device.rank
        if device.rank == 0:
            device.send(1, other, tag=5)
            device.send(2, other, tag=6)  # of another tag: does not overtake
            return int(device.recv(other))
        return device.send(int(device.recv(0, tag=6)) + int(device.recv(0, tag=5)), 0)

    with faults.plant(pair, faults.Reorder(rank=0, operation=1)):
        assert pair.run(kernel)[0] == 3


def test_a_collective_lets_go_what_is_held_back(pair):
    def kernel(device):
        if device.rank == 1:
            return passing_on(device, 2)
        device.send(np.array([0]), 1)
        device.barrier(groups=[[0], [1]])  # of one rank, so that nobody waits
        return device.send(np.array([1]), 1)

    with faults.plant(pair, faults.Reorder(rank=0, operation=1)):
        assert pair.run(kernel)[1] == [0, 1]


def test_a_full_channel_shows_who_counted_on_room(pair):
    def kernel(device):
        other = 1 - device.rank
        device.barrier()
        device.send(device.rank, other)
        return int(device.recv(other))

    assert pair.run(kernel).outputs == [1, 0]
    with faults.plant(pair, faults.Fill(rank=0, operation=1, peer=1)):
        assert pair.run(kernel).outputs == [1, 0]  # the other end still has room
    with (
        faults.plant(pair, *(faults.Fill(rank=r, operation=2, peer=1 - r) for r in range(2))),
        pytest.raises(DeadlockError, match="send"),
    ):
        pair.run(kernel)


# -- bits --------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["<i8", ">i4", "<f4", "bool", "u1"])
def test_a_bit_of_a_collectives_input_is_flipped_and_the_kernels_array_is_left(pair, dtype):
    def kernel(device):
        x = np.zeros((2, 3), dtype)
        return device.all_gather(x), x

    bit = 1 if dtype == "bool" else 8 * np.dtype(dtype).itemsize  # the lowest of element 1
    with faults.plant(pair, faults.FlipBit(rank=1, operation=1, bit=bit)):
        run = pair.run(kernel)
    tiny = np.frombuffer(np.uint32(1).tobytes(), np.float32)[0] if dtype == "<f4" else 1
    expected = np.zeros((4, 3), dtype)
    expected[2, 1] = tiny
    for whole, mine in run:
        np.testing.assert_array_equal(whole, expected)
        assert not mine.any()


def test_a_bit_of_a_message_is_flipped_wherever_it_lies_in_a_tree(pair):
    def kernel(device):
        if device.rank == 0:
            return device.send({"name": "w", "a": np.zeros(2, np.uint8), "b": [np.uint16(0)]}, 1)
        return device.recv(0)

    with faults.plant(pair, faults.FlipBit(rank=0, operation=1, bit=20)):
        came = pair.run(kernel)[1]
    assert came["name"] == "w"
    assert came["a"].tolist() == [0, 0]
    assert came["b"] == [1 << 4]


def test_the_seed_chooses_and_chooses_the_same_again(pair):
    def flipped(seed):
        fault = faults.FlipBit(rank=range(2), operation=range(1, 7))
        with faults.plant(pair, fault, seed=seed) as planted:
            run = pair.run(lambda device: [device.all_gather(np.zeros(9, np.int64)) for _ in range(6)])
        return planted.faults, str(run[0])

    results = {seed: flipped(seed) for seed in (1, 2, 3)}
    assert all(flipped(seed) == result for seed, result in results.items())
    assert len({text for _, text in results.values()}) == 3


# -- where they cannot be ----------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("fault", "called"), [
    (faults.Drop(rank=0, operation=1), "this operation is barrier"),
    (faults.FlipBit(rank=0, operation=1), "barrier has none"),
    (faults.FlipBit(rank=0, operation=2), "this operation is all_gather_object"),
    (faults.FlipBit(rank=0, operation=3, bit=64), "all_reduce has 64 here"),
])
def test_a_fault_that_does_not_fit_its_operation_says_so(pair, fault, called):
    def kernel(device):
        device.barrier()
        return device.all_gather_object("x"), device.all_reduce(1)

    with faults.plant(pair, fault, must_happen=False), pytest.raises(DeviceFailedError, match=called) as caught:
        pair.run(kernel)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_fault_that_did_not_happen_is_an_error(pair):
    fault = faults.Raise(rank=1, operation=7, exception=ValueError)
    with pytest.raises(faults.FaultNotReachedError, match="rank 1 made 6 operations in run 1"):  # noqa: SIM117
        with faults.plant(pair, fault):
            pair.run(summing)
    with faults.plant(pair, fault, must_happen=False) as planted:
        pair.run(summing)
    assert planted.happened == set()
    with pytest.raises(faults.FaultNotReachedError, match="there were 0 runs"), faults.plant(pair, fault):
        pass
    with pytest.raises(KeyError), faults.plant(pair, fault):  # what goes wrong in the block comes first
        raise KeyError


@pytest.mark.sampled(2)
def test_a_fault_lies_in_the_run_it_names(pair):
    fault = faults.Drop(rank=0, operation=1, run=2)
    with faults.plant(pair, fault):
        assert pair.run(passing_on)[1] == [0, 1, 2, 3]
        with pytest.raises(DeadlockError):
            pair.run(passing_on)
        assert pair.run(passing_on)[1] == [0, 1, 2, 3]
    with faults.plant(pair, faults.Drop(rank=0, operation=1, run=None)):
        for _ in range(2):
            with pytest.raises(DeadlockError):
                pair.run(passing_on)


def test_what_cannot_happen_on_a_cluster_is_refused(pair, cluster_of):
    for fault, error, text in [
        (faults.Drop(rank=2, operation=1), ValueError, "rank of Drop.* must be 0 to 1, got 2"),
        (faults.Drop(rank=0, operation=0), ValueError, "operation of Drop.* must be 1 or more, got 0"),
        (faults.Drop(rank=0, operation="1"), TypeError, "must be an integer"),
        (faults.Drop(rank=range(0), operation=1), TypeError, "must be an integer"),
        (faults.Fill(rank=0, operation=1, peer=2), ValueError, "peer of Fill.* must be -1 to 1, got 2"),
        (faults.FlipBit(rank=0, operation=1, bit=-1), ValueError, "bit of FlipBit.* must be 0 or more, got -1"),
        ("kill", TypeError, "plant\\(\\) takes faults"),
    ]:
        with pytest.raises(error, match=text), faults.plant(pair, fault):
            pass
    thread = cluster_of(Mesh(x=2), "thread")
    with pytest.raises(ValueError, match="ends a process"), faults.plant(thread, faults.Kill(rank=0, operation=1)):
        pass
    with pytest.raises(ValueError, match="already has faults"), faults.plant(pair), faults.plant(pair):
        pass
    assert pair.around_run is None


# -- around ------------------------------------------------------------------------------------------------------------


def test_operations_keep_their_arguments_and_results(pair):
    class Doubled(Operation):
        def inputs(self, mesh, x):
            return [(x * rank,) for rank in range(mesh.size)]

        def __call__(self, device, x):
            device.state["seen"] = True
            return device.all_reduce(x)

        def result(self, mesh, outputs):
            return outputs[0] * 2

    with faults.plant(pair, faults.FlipBit(rank=1, operation=1, bit=0)):
        run = pair.run(Doubled(), 10)
    assert run.result == 22
    assert run.trace.count("all_reduce") == 1
    assert pair.run(lambda device: device.state.pop("seen")).outputs == [True, True]


def test_marks_are_planted_together(pair):
    named = enumerate(("one", "two"), start=1)
    one, two = (faults.Raise(rank=0, operation=1, run=i, exception=KeyError(word)) for i, word in named)
    marks = [SimpleNamespace(args=(one,), kwargs={}), SimpleNamespace(args=(two,), kwargs={"seed": 3})]
    with faults.plant_marks(pair, marks):
        for word in ("one", "two"):
            with pytest.raises(DeviceFailedError, match=word):
                pair.run(summing)
    with faults.plant_marks(pair, []) as planted:
        assert planted is None
        assert pair.run(summing, 1).outputs == [[0], [0]]


@pytest.mark.slow
def test_messages_go_through_queues_too(cluster_of):
    cluster = cluster_of(Mesh(x=2), "process", "queue")
    with faults.plant(cluster, faults.Reorder(rank=0, operation=2), faults.FlipBit(rank=0, operation=4, bit=3)):
        assert cluster.run(passing_on)[1] == [0, 2, 1, 11]
    with faults.plant(cluster, faults.Kill(rank=1, operation=2)), pytest.raises(DeviceFailedError, match="rank 1"):
        cluster.run(passing_on)
    assert cluster.run(passing_on)[1] == [0, 1, 2, 3]
