"""What an operation costs, counted instead of timed: the same on every machine, however busy it is.

A device counts its own work between two moments: Python functions called (`sys.setprofile`), fences, pipes written and
read, sleeps and wake-ups, bytes copied from and to the others, blocks allocated, memory and page faults.  Waiting is
left out, since how long others take is up to the machine: devices spin, and do not sleep, and the functions in which
they spin do not count.
"""

from __future__ import annotations

import resource
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest

from parallelism.mesh import Mesh
from vcluster.collectives import INLINE_BYTES, thresholds
from vcluster.collectives.prepared import PreparedZeroCopy
from vcluster.collectives.thresholds import PIECE_BYTES, PRIVATE_PIECE_BYTES
from vcluster.collectives.zero_copy import Stretch

pytestmark = pytest.mark.not_on_mpi("counts what collectives in shared memory cost")

WAITING = {"_wait", "_wait_until_done", "turns"}
"""Called while a device waits, or not, as it happens. What these call is waiting, too."""
LONG = 1 << 22
"""Turns of spinning: some seconds."""
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
LARGE = 2 * INLINE_BYTES  # elements of 8 bytes: eight pieces of a reduction


@contextmanager
def no_sleep(device):
    """Whoever waits spins."""
    signals = device.endpoint.signals
    before = signals.spins, signals.spin_ns
    signals.spins, signals.spin_ns = LONG, 1 << 40
    try:
        yield
    finally:
        signals.spins, signals.spin_ns = before


def calls_of(operation: Callable[[], Any], times: int = 4) -> tuple[int, Counter[str]]:
    """Python functions called by ``operation``, and built-in ones by name, when it has been repeated."""
    for _ in range(times):
        functions: Counter[str] = Counter()
        builtins: Counter[str] = Counter()
        waiting = 0  # functions under way that wait, or that were called by one that waits

        def note(frame, event, arg, functions=functions, builtins=builtins):
            nonlocal waiting
            name = frame.f_code.co_name
            if event == "call" and (waiting or name in WAITING):
                waiting += 1
            elif event == "return" and waiting:
                waiting -= 1
            elif event == "call":
                functions[name] += 1
            elif event == "c_call":
                builtins[arg.__name__] += 1

        sys.setprofile(note)
        try:
            operation()
        finally:
            sys.setprofile(None)
    del functions["<lambda>"]  # the operation itself, and what is waited for
    return functions.total(), builtins


def arrays(device, kind, elements, memory):
    """Argument and ``out=`` of a collective whose whole buffer has so many elements."""
    make = device.empty if memory == "shared" else np.empty
    part = elements // device.size
    given, taken = {"all_gather": (part, elements), "reduce_scatter": (elements, part)}.get(kind, (elements, elements))
    x, out = make(given), make(taken)
    x[...] = device.rank
    return (None if kind == "broadcast" and device.rank else x), out


def count_calls(device, elements, memory):
    """By collective and whether the result is given: functions called, built-in ones."""
    thresholds.PRIVATE_BYTES = thresholds.OWNED_BYTES = 1
    found = {}
    for kind in COLLECTIVES:
        x, out = arrays(device, kind, elements, memory)
        call = getattr(device, kind)
        for _ in range(3):  # what was prepared for other sizes is forgotten
            _ = call(x)
        with no_sleep(device):
            found[kind, "new"] = calls_of(lambda call=call, x=x: call(x))
            found[kind, "out"] = calls_of(lambda call=call, x=x, out=out: call(x, out=out))
    with no_sleep(device):
        found["barrier", ""] = calls_of(lambda: device.barrier())
    return found


# -- functions called --------------------------------------------------------------------------------------------------

MOST_SMALL = 17
"""Functions that a small collective calls when it is repeated: 11 to 17 as this is written."""
MOST_LARGE = {("private", 2): 115, ("private", 4): 140, ("shared", 2): 95, ("shared", 4): 105}
"""The same for large ones of eight pieces: 110, 134, 90 and 100."""


@pytest.mark.slow
def test_a_small_repeated_collective_calls_few_functions_and_no_more_of_them_for_more_devices(cluster_of):
    counted = {}
    for devices in (2, 4):
        for ranks in cluster_of(Mesh(devices=devices)).run(count_calls, 8, "private"):
            for what, (functions, builtins) in ranks.items():
                assert functions <= MOST_SMALL, what
                assert builtins["acquire"] == 1, what  # one fence, before one looks who sleeps
                assert not builtins["may_share_memory"] and not builtins["copyto"], what  # a microsecond each
                assert builtins["write"] == builtins["read"] == builtins["sleep"] == 0, what  # no pipe, no nap
                counted.setdefault(what, set()).add(functions)
    for what, numbers in counted.items():
        assert max(numbers) - min(numbers) <= 4, what  # of more than two the last to come does what serves all


@pytest.mark.sampled(4)
@pytest.mark.slow_for("4")
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("memory", ["private", "shared"])
def test_a_large_repeated_collective_calls_a_few_functions_a_member(cluster_of, devices, memory):
    for ranks in cluster_of(Mesh(devices=devices)).run(count_calls, LARGE, memory):
        for what, (functions, builtins) in ranks.items():
            assert functions <= MOST_LARGE[memory, devices], what
            assert builtins["acquire"] <= 2, what  # one fence as it comes, one when it has done
            assert builtins["write"] == builtins["read"] == builtins["sleep"] == 0, what


MOST_ABOVE_INLINE = {2: 56, 4: 62}
"""Functions that an all_reduce of one element more than a slot takes calls, between private arrays: 51 and 57."""


def just_above_inline(device):
    """Functions called by a repeated all_reduce, and how often a member waits until the others have read its array."""
    x, waits = np.ones(INLINE_BYTES // 4 + 1, np.float32), []
    out, until_done = np.empty_like(x), PreparedZeroCopy._wait_until_done
    for _ in range(3):
        device.all_reduce(x, out=out)
    with no_sleep(device), mock.patch.object(
        PreparedZeroCopy, "_wait_until_done", lambda *given: waits.append(1) or until_done(*given)
    ):
        functions = calls_of(lambda: device.all_reduce(x, out=out), 6)[0]
    assert (out == device.size).all()
    return functions, len(waits)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
def test_one_element_more_than_a_slot_takes_needs_one_rendezvous_too(cluster_of, devices):
    cluster = cluster_of(Mesh(devices=devices))
    cluster.restart()   # with the library's own thresholds
    for functions, waits in cluster.run(just_above_inline):
        assert functions <= MOST_ABOVE_INLINE[devices]
        assert waits == 0


def only_with_out(device):
    x, out = np.ones(8), np.empty(8)
    with no_sleep(device):
        return calls_of(lambda: device.all_reduce(x, out=out), 6)[0]


def test_a_collective_that_is_always_called_with_out_goes_the_short_way_too(cluster_of):
    cluster = cluster_of(Mesh(devices=2))
    cluster.restart()
    assert max(cluster.run(only_with_out)) <= MOST_SMALL


def broadcasts_of_two_sizes(device):
    xs, outs = [np.ones(3), np.ones(500)], [np.empty(3), np.empty(500)]

    def both():
        for x, out in zip(xs, outs, strict=True):
            device.broadcast(x if device.rank == 0 else None, out=out)

    with no_sleep(device):
        return calls_of(both, 6)[0]


def test_who_gives_nothing_is_known_by_its_out(cluster_of):
    cluster = cluster_of(Mesh(devices=2))
    cluster.restart()
    assert max(cluster.run(broadcasts_of_two_sizes)) <= 2 * MOST_SMALL


MOST_NEW = {2: 105, 4: 145}
"""Functions that the first small collective of a shape calls where members call the same: 72 to 95, and 81 to 138."""
UNROOTED = [kind for kind in COLLECTIVES if kind != "broadcast"]


def new_shapes(device):
    """Functions called by the first and the second collective of a shape, by kind."""
    counted = {}
    device.barrier()
    for rows, kind in enumerate(UNROOTED, start=1):
        x, call = np.ones((device.size * rows, 5)), getattr(device, kind)
        with no_sleep(device):
            counted[kind] = [calls_of(lambda call=call, x=x: call(x), 1)[0] for _ in range(2)]
    return counted


@pytest.mark.slow_for("4")
@pytest.mark.parametrize("devices", [2, 4])
def test_a_new_shape_costs_one_slow_call(cluster_of, devices):
    cluster = cluster_of(Mesh(devices=devices))
    cluster.restart()
    for ranks in cluster.run(new_shapes):
        for kind, (first, second) in ranks.items():
            assert first <= MOST_NEW[devices], kind
            assert second <= MOST_SMALL + 3, kind    # the description is written into the other buffer, too


# -- modules crossed ---------------------------------------------------------------------------------------------------

MOST_MODULES = {"first": 11, "repeated": 9}
PACKAGES = ("parallelism.", "vcluster.")


def modules_crossed(device):
    """The modules of ours in which functions run: in the first all_reduce of a shape, and when it is repeated."""
    crossed = {}

    def count(name, x):
        modules = set()

        def note(frame, event, arg):
            module = frame.f_globals["__name__"]
            if event == "call" and module.startswith(PACKAGES):
                modules.add(module)

        sys.setprofile(note)
        try:
            y = device.all_reduce(x)
        finally:
            sys.setprofile(None)
        assert y[0] == device.size
        crossed[name] = modules - {"vcluster.memory.core_affinity"}  # where a device waits for the first time in a run

    with no_sleep(device):
        count("group", np.ones(7))  # the group meets for the first time, called from this line
        for name in ("first", "second", "third", "repeated"):
            count(name, np.ones(8))
    return crossed


def test_an_all_reduce_crosses_few_modules(cluster_of):
    cluster = cluster_of(Mesh(devices=2))
    cluster.restart()
    for crossed in cluster.run(modules_crossed):
        for name, most in MOST_MODULES.items():
            assert len(crossed[name]) <= most, (name, crossed[name])


def modules_of_masks(device):
    _ = device.matmul(np.ones((2, 3)), np.ones((3, 4)))
    _ = device.all_reduce(np.ones(5))
    return "numpy.ma" in sys.modules


def test_a_kernel_without_masked_arrays_does_not_import_their_module(cluster_of):
    cluster = cluster_of(Mesh(devices=2))
    cluster.run(lambda device: sys.modules.pop("numpy.ma", None) and None)  # here the host has loaded it
    assert list(cluster.run(modules_of_masks)) == [False, False]  # it takes 10 ms, which would count as compute


# -- bytes moved -------------------------------------------------------------------------------------------------------


def count_bytes(device, elements, memory):
    """By collective: bytes read from and written to stretches of others' and one's own, and moved by the kernel."""
    thresholds.PRIVATE_BYTES = thresholds.OWNED_BYTES = 1
    found = {}
    read, write = Stretch.copy_to, Stretch.store
    piece = Stretch.piece
    move = type(device.endpoint.peers)._move
    moved: Counter[str] = Counter()

    def counting_copy(self, start, out):
        moved["copied"] += out.nbytes
        read(self, start, out)

    def counting_store(self, start, array):
        moved["stored"] += array.nbytes
        write(self, start, array)

    def counting_piece(self, start, end, scratch):
        moved["looked at"] += (end - start) * self.dtype.itemsize
        return piece(self, start, end, scratch)

    def counting_move(self, call, rank, address, array):
        moved["by the kernel"] += array.nbytes
        move(self, call, rank, address, array)

    patches = {"copy_to": counting_copy, "store": counting_store, "piece": counting_piece}
    with (
        mock.patch.multiple(Stretch, **patches),
        mock.patch.object(type(device.endpoint.peers), "_move", counting_move),
    ):
        for kind in COLLECTIVES:
            x, out = arrays(device, kind, elements, memory)
            for _ in range(3):
                moved.clear()
                getattr(device, kind)(x, out=out)
            found[kind] = dict(moved)
    return found, device.endpoint.peers.can_be_read(range(device.size))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
def test_large_collectives_look_at_each_byte_once_and_write_each_byte_once(cluster_of, devices):
    whole, part = 8 * LARGE, 8 * LARGE // devices
    for found, _ in cluster_of(Mesh(devices=devices)).run(count_bytes, LARGE, "shared"):
        assert found == {
            "all_reduce": {"looked at": whole, "stored": whole},  # its slice of everybody's, into everybody's
            "all_gather": {"copied": whole},
            "reduce_scatter": {"looked at": whole},  # written as they are added up
            "all_to_all": {"copied": whole},
            "broadcast": {"copied": whole},
        }
        assert part * devices == whole


@pytest.mark.sampled(2)
@pytest.mark.parametrize("devices", [2, 4])
def test_private_memory_is_moved_by_the_kernel_once_and_ones_own_not_at_all(cluster_of, devices):
    whole, part = 8 * LARGE, 8 * LARGE // devices
    for rank, (found, reachable) in enumerate(cluster_of(Mesh(devices=devices)).run(count_bytes, LARGE, "private")):
        if not reachable:
            pytest.skip("this system does not let processes read each other's memory")
        moved = {kind: counts.get("by the kernel", 0) for kind, counts in found.items()}
        assert moved["all_reduce"] <= 2 * whole  # to and fro, at most; its own slice may be a plain copy
        assert moved["all_reduce"] >= 2 * (whole - part)
        for kind in ("reduce_scatter", "all_to_all"):
            assert whole - part <= moved[kind] <= whole
        if devices == 2:
            assert whole - part <= moved["all_gather"] <= whole
            assert moved["broadcast"] == (whole if rank else 0)
        else:  # what many read is copied into shared memory once
            assert moved["all_gather"] == moved["broadcast"] == 0


# -- memory ------------------------------------------------------------------------------------------------------------


def count_memory(device, memory):
    """By collective: the most that was allocated at once, how far the heap grew, pages that were not there.

    And whether new results lie in shared memory.
    """
    found = {}
    for kind in COLLECTIVES:
        x, out = arrays(device, kind, LARGE, memory)
        call = getattr(device, kind)
        for _ in range(4):
            y = call(x)  # the last result lives while the next is made
            call(x, out=out)
        heap = device.endpoint.heap
        top = heap._next
        tracemalloc.start()
        call(x, out=out)
        y = call(x)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(8):
            y = call(x)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        assert y.size == out.size
        found[kind] = peak, heap._next - top, faults, device.endpoint.arena.offset_of(y) is not None
    return found


def count_faults(device):
    """Pages that were not there when some temporary arrays of 120 KiB are made for the second time and later."""
    make = lambda: [np.ones(15 << 10) for _ in range(16)]
    make()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        make()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_temporary_arrays_of_a_kernel_fault_no_page_in_again(cluster_of):
    cluster = cluster_of(Mesh(devices=1))
    cluster.restart()   # larger arrays of before would have changed what glibc keeps
    assert cluster.run(count_faults)[0] < 32


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["private", "shared"])
def test_repeated_large_collectives_allocate_two_pieces_at_most_and_use_their_results_again(cluster_of, memory):
    for found in cluster_of(Mesh(devices=4)).run(count_memory, memory):
        piece = PIECE_BYTES if memory == "shared" else PRIVATE_PIECE_BYTES
        for kind, (peak, grown, faults, shared) in found.items():
            assert shared or kind == "broadcast", kind  # the root of one may get its own array back
            assert peak < 2 * piece + 16_384, kind  # the accumulator and a place for a term
            assert grown == 0, kind
            assert faults < 8 * 8 * LARGE // 4 // 4096, kind  # new pages each time would be at least that many


# -- messages ----------------------------------------------------------------------------------------------------------

MOST_MESSAGE = 36
"""Functions that a small send and a small recv call together, when they are repeated: 34 as this is written."""


def exchange(device, elements):
    """Functions called for a round trip; the most that was allocated; whether what came lies in shared memory."""
    x = np.full(elements, 7.0)
    peer = 1 - device.rank
    received = []

    def there_and_back():
        if device.rank == 0:
            device.send(x, peer)
        received.append(device.recv(peer))
        if device.rank == 1:
            device.send(x, peer)

    with no_sleep(device):
        calls = calls_of(there_and_back, 6)
        tracemalloc.start()
        there_and_back()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert all(np.array_equal(y, x) for y in received)
    return calls, peak, [device.endpoint.arena.offset_of(y) is not None for y in received]


def test_a_small_message_that_is_repeated_calls_few_functions_and_no_pipe(cluster_of):
    for (functions, builtins), _, in_place in cluster_of(Mesh(devices=2)).run(exchange, 8):
        assert functions <= MOST_MESSAGE
        assert builtins["acquire"] == 2  # one fence when it has sent, one when it has read
        assert builtins["write"] == builtins["read"] == builtins["sleep"] == 0
        assert not any(in_place)  # so that a small array that is kept does not hold a block


def test_a_large_message_is_copied_once_by_its_sender_and_not_by_its_receiver(cluster_of):
    for (_, builtins), peak, in_place in cluster_of(Mesh(devices=2)).run(exchange, LARGE):
        assert builtins["write"] == builtins["read"] == 0
        assert all(in_place)
        assert peak < 8 * LARGE // 16  # what was copied went straight into shared memory


# -- sleeping and waking -----------------------------------------------------------------------------------------------


def sleep_and_wake(device):
    """Futex calls of each device as rank 0 sends: to rank 1, which sleeps, and to rank 1, which is awake."""
    signals, peer = device.endpoint.signals, 1 - device.rank
    rouse, sleep = signals._rouse, signals._sleep
    asleep = signals._sleeping[peer]
    log = []

    def counting_rouse(address):
        log.append("wake")
        rouse(address)

    def counting_sleep(address, seen, longest_ns):
        log.append("sleep")
        sleep(address, seen, longest_ns)

    def message():
        if device.rank == 0:
            device.send(np.zeros(4), peer)
        else:
            device.recv(peer)
        found = log.copy()
        log.clear()
        return found

    with no_sleep(device):
        device.barrier()
    with mock.patch.object(signals, "_rouse", counting_rouse), mock.patch.object(signals, "_sleep", counting_sleep):
        while device.rank == 0 and not asleep[0]:
            pass
        to_a_sleeper = message()
        with no_sleep(device):
            device.barrier()
            log.clear()
            device.barrier()
            to_one_awake = message()
            device.barrier()
    return to_a_sleeper, to_one_awake, log


def test_who_sleeps_is_woken_once_and_who_does_not_sleep_not_at_all(cluster_of):
    if sys.platform != "linux":
        pytest.skip("nobody is woken where there is no futex")
    sender, receiver = cluster_of(Mesh(devices=2)).run(sleep_and_wake)
    assert sender == (["wake"], [], [])
    assert set(receiver[0]) <= {"sleep"}  # it may have looked once more in time
    assert receiver[1:] == ([], [])


# -- many members ------------------------------------------------------------------------------------------------------

MANY = 6


def count_wake_ups(device, elements, times):
    """How often this device wakes another one, if every waiting device sleeps at once."""
    signals, roused = device.endpoint.signals, []
    before = signals.spins, signals.spin_ns, signals._rouse
    x = np.ones(elements, np.float32)
    out = np.empty_like(x)
    for _ in range(3):
        device.all_reduce(x, out=out)
    signals.spins, signals.spin_ns, signals._rouse = 0, 0, lambda address: roused.append(1) or before[2](address)
    try:
        for _ in range(times):
            device.all_reduce(x, out=out)
    finally:
        signals.spins, signals.spin_ns, signals._rouse = before
    assert (out == device.size).all()
    return len(roused)


@pytest.mark.sampled(2)
@pytest.mark.skipif(sys.platform != "linux", reason="devices sleep on futexes only on Linux")
@pytest.mark.parametrize(("elements", "rendezvous"), [(2, 1), (3 * INLINE_BYTES, 2)])
def test_each_member_is_woken_once_for_each_rendezvous(cluster_of, elements, rendezvous):
    times = 10
    roused = sum(cluster_of(Mesh(devices=MANY)).run(count_wake_ups, elements, times))
    # If two come last at the same moment, both may wake the others.  If each woke the others, it would be MANY^2 / 2.
    assert roused <= 1.5 * MANY * rendezvous * times


# -- bytecodes ---------------------------------------------------------------------------------------------------------

MOST_BYTECODES = {"all_reduce": 580, "broadcast": 561, "barrier": 476}
"""Instructions that a small call executes where nobody waits: 573, 554 and 469 in Python 3.11."""


def count_bytecodes(device):
    """The instructions of each kind of call when it is repeated, alone: without those of events of compute."""
    x, counted = np.ones(2, np.float32), {}
    out = np.empty_like(x)
    calls = {
        "all_reduce": lambda: device.all_reduce(x, out=out), "broadcast": lambda: device.broadcast(x, out=out),
        "barrier": lambda: device.barrier(),
    }
    for kind, call in calls.items():
        instructions: Counter[str] = Counter()

        def note(frame, event, arg, instructions=instructions):
            frame.f_trace_opcodes = True
            if event == "opcode":
                instructions[frame.f_code.co_name] += 1
            return note

        for _ in range(3):
            call()
        before = sys.gettrace()     # of coverage
        sys.settrace(note)
        try:
            call()
        finally:
            sys.settrace(before)
        counted[kind] = instructions.total() - instructions["_flush_compute"]   # tracing is slow, so it counts as work
    return counted


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions have other instructions")
def test_a_small_call_executes_few_instructions(cluster_of):
    cluster = cluster_of(Mesh(devices=1))
    cluster.restart()
    for counted in cluster.run(count_bytecodes):
        for kind, instructions in counted.items():
            assert instructions <= MOST_BYTECODES[kind], counted
