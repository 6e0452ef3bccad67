"""The recorder runs programs without moving anything: what it counts, what shapes it gives, and how it ends."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from parallelism import Device, Mesh, TensorSharding
from parallelism.operation import CollectiveMismatchError, DeadlockError, UndeliveredMessageError
from parallelism.recorder import device as recording, record, rendezvous
from parallelism.recorder.rendezvous import Lockstep
from tensor_parallelism import MatMul, MatMulSharding

MESH = Mesh(x=2, y=3)


def test_a_recording_device_is_a_device():
    assert record(lambda device: isinstance(device, Device), Mesh(x=1)).outputs == [True]


def test_an_operation_is_counted_and_gives_zeros_of_the_right_shapes():
    sharding = MatMulSharding(TensorSharding(None, "x"), TensorSharding("x", None), TensorSharding("x", None))
    operation, a, b = MatMul(sharding), np.ones((5, 8)), np.ones((8, 7))
    outputs, trace = record(operation, MESH, a, b)
    plan = operation.plan((a.shape, b.shape), MESH)
    assert [trace.bytes_received(rank) for rank in range(6)] == list(plan.bytes_received)
    assert [trace.flops(rank) for rank in range(6)] == list(plan.flops)
    assert [out.shape for out in outputs] == [sharding.out.local_shape((5, 7), MESH, rank) for rank in range(6)]
    assert not any(out.any() for out in outputs)


def test_one_rank_can_be_asked_for():
    program = lambda device: device.all_gather(np.ones(device.rank), "y")
    one = record(program, MESH, ranks=4).trace
    assert one.ranks == (4,)
    assert one.bytes_received() == 8 * (3 + 5)
    assert one.bytes_received() == record(program, MESH).trace.bytes_received(4)


def test_what_others_hold_decides_the_shapes_of_results():
    def program(device):
        x = np.ones((2, device.rank))
        parts = device.all_to_all(np.ones(6), "y", split_sizes=[1, 2, 3])
        return (
            device.all_gather(x, "y", dim=1), device.permute(x, [(2, 0)], "y"), device.all_scatter(x, "x"),
            device.reduce_scatter(np.ones((4, 5)), ("x", "y"), dim=1), parts, device.gather(1.0, root=1),
        )

    gathered, permuted, scattered, reduced, parts, at_root = record(program, MESH).outputs[1]
    assert gathered.shape == (2, 0 + 1 + 2)
    assert permuted.shape == (2, 1)
    assert [x.shape for x in scattered] == [(2, 1), (2, 4)]
    assert reduced.shape == (4, 1)
    assert parts.shape == (6,)
    assert at_root.shape == (6,)


def test_a_reshard_is_one_event_with_what_its_collectives_move():
    source, target = TensorSharding("x", None), TensorSharding(None, ("y", "x"))

    def program(device):
        shard = np.ones(source.local_shape((5, 7), device.mesh, device.rank))
        return device.reshard(shard, source, target)

    outputs, trace = record(program, MESH)
    assert [out.shape for out in outputs] == [target.local_shape((5, 7), MESH, rank) for rank in range(6)]
    assert trace.count("reshard") >= 1
    inside = [event for event in trace if event.parent is not None]
    assert inside
    assert trace.bytes_received() == sum(event.bytes_received for event in inside)


def test_a_tree_is_one_event_with_what_its_buffers_move_and_events_are_numbered_by_rank():
    def program(device):
        device.all_reduce({"a": np.ones(5), "b": [np.ones(3, np.float32)], "c": np.ones(2)}, "y")
        device.barrier("y")

    alone = record(lambda device: [device.all_reduce(np.ones(7), "y"), device.all_reduce(np.ones(3, np.float32), "y")],
                   MESH).trace
    trace = record(program, MESH).trace
    for rank in range(MESH.size):
        events = [event for event in trace.events if event.rank == rank]
        assert [(event.name, event.serial) for event in events] == [("all_reduce", 0), ("barrier", 1)]
        assert events[0].payload_bytes == 8 * 7 + 4 * 3 and events[0].bytes_received == alone.bytes_received(rank)


def test_messages_are_counted_and_asynchronous_operations_are_waited_for():
    def program(device):
        work = device.all_reduce(np.ones(6), "x", async_op=True)
        ring = device.irecv((device.rank - 1) % 6)
        device.send(np.ones(4), (device.rank + 1) % 6)
        return ring.wait().shape, work.wait().shape

    outputs, trace = record(program, MESH)
    assert outputs == [((4,), (6,))] * 6
    assert trace.bytes_received(0) == 32 + 48
    assert trace.count("all_reduce") == 3


@pytest.mark.parametrize(
    ("program", "kind", "text"),
    [
        (lambda device: device.barrier() if device.rank else None, DeadlockError,
         r"^deadlock: rank 0 returned without calling barrier, for which rank 1 waits\n  ranks 1-5 in barrier\(\) at "),
        (lambda device: device.recv((device.rank + 1) % 6), DeadlockError,
         r"rank 5 waits for rank 0\n  rank 0 in recv\(from rank 1, tag 0\)"),
        (lambda device: device.all_reduce(1) if device.rank else device.barrier(), CollectiveMismatchError,
         r"members of group \[0, 1, 2, 3, 4, 5\] differ in what they call\n  ranks 1-5 called all_reduce\(int64\[\], "),
        (lambda device: device.send(1, 5, tag=2) if device.rank == 4 else None, UndeliveredMessageError,
         r"nobody received: rank 4 sent a message to rank 5 \(tag 2\) at .*test_recorder.py:\d+$"),
        (lambda device: device.barrier() if device.rank != 3 else 1 // 0, ZeroDivisionError, "division"),
    ],
)
def test_a_program_that_cannot_end_is_an_error_and_leaves_no_thread(program, kind, text):
    before = threading.active_count()
    with pytest.raises(kind, match=text):
        record(program, MESH)
    assert threading.active_count() == before


def test_products_of_any_dims_are_counted_as_on_a_device():
    def program(device):
        return [device.matmul(np.ones(a), np.ones(b)).shape for a, b in shapes]

    shapes = [((2, 3), (3, 4)), ((5, 2, 3), (3, 4)), ((3,), (3, 4)), ((2, 3), (3,)), ((3,), (3,)), ((0, 3), (3, 2))]
    outputs, trace = record(program, Mesh(x=1))
    assert outputs[0] == [np.matmul(np.ones(a), np.ones(b)).shape for a, b in shapes]
    assert trace.flops() == 2 * (24 + 120 + 12 + 6 + 3)
    out = np.ones((2, 4))
    assert record(lambda device: device.matmul(np.ones((2, 3)), np.ones((3, 4)), out=out) is out, Mesh(x=1)).outputs[0]
    with pytest.raises(ValueError, match="size 4 is different from 3"):
        record(lambda device: device.matmul(np.ones((2, 3)), np.ones((4, 5))), Mesh(x=1))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("algorithm", [None, "ring"])
def test_hundreds_of_ranks_get_two_turns_each_and_count_once_what_they_share(monkeypatch, algorithm):
    size, counted, turns = 300, [], []
    count, run = recording.traffics, Lockstep.run
    monkeypatch.setattr(recording, "traffics", lambda *args: counted.append(1) or count(*args))
    monkeypatch.setattr(rendezvous, "LONG_TURN_SECONDS", 60)
    monkeypatch.setattr(Lockstep, "run", lambda self, body: (run(self, body), turns.append(self.turns))[0])
    trace = record(lambda device: device.all_reduce(np.ones(size), algorithm=algorithm), Mesh(x=size)).trace
    assert counted == [1]
    assert turns == [size + size - 1]       # the last one to come never waits
    assert trace.bytes_received() == size * 2 * (size - 1) * 8


def test_a_chain_of_messages_wakes_only_the_rank_that_each_is_for(monkeypatch):
    size, turns = 50, []
    run = Lockstep.run
    monkeypatch.setattr(rendezvous, "LONG_TURN_SECONDS", 60)
    monkeypatch.setattr(Lockstep, "run", lambda self, body: (run(self, body), turns.append(self.turns))[0])

    def program(device):                    # from the last rank to the first, so that all others wait
        x = device.recv(device.rank + 1) if device.rank + 1 < size else np.ones(3)
        if device.rank:
            device.send(x, device.rank - 1)

    record(program, Mesh(x=size))
    assert turns == [size + size - 1]


def test_a_rank_that_waits_for_another_in_its_own_way_does_not_stop_it():
    came = threading.Event()

    def program(device):
        return came.wait(60) if device.rank == 0 else came.set()

    assert record(program, Mesh(x=3)).outputs == [True, None, None]


def test_an_interrupt_leaves_no_thread(monkeypatch):
    before, wait = set(threading.enumerate()), threading.Condition.wait
    entered = threading.Event()

    def interrupted(self, timeout=None):
        if threading.current_thread() is threading.main_thread() and timeout == rendezvous.LONG_TURN_SECONDS:
            self.release()
            entered.wait(60)
            self.acquire()
            raise KeyboardInterrupt
        return wait(self, timeout)

    def program(device):
        if device.rank == 1:
            entered.set()
        device.recv(device.rank)

    monkeypatch.setattr(threading.Condition, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        record(program, Mesh(x=3))
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("number", [-1, float("inf"), float("nan")])
def test_work_without_a_price_is_refused(number):
    def kernel(device):
        with device.compute("x", seconds=number):
            pass

    with pytest.raises(ValueError, match=rf"compute\(.x.\) takes seconds that are finite and at least 0, got {number}"):
        record(kernel, Mesh(devices=1))
