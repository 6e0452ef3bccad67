"""Operations that do not wait, and messages: in order by group and by tag, whatever the capacity of the channels."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import assert_same
from runtimes import RUNTIMES, mainly

from parallelism.mesh import Mesh
from vcluster import HOST, VirtualCluster
from vcluster.code import (
    ChannelClosedError,
    ClusterError,
    CollectiveMismatchError,
    DeviceFailedError,
    PerDevice,
)

everywhere = pytest.mark.parametrize(("backend", "transport"), RUNTIMES)


# Collectives


def in_order(device, elements):
    """Several pending on one group, waited for backwards; then on groups that cross, in another order on every rank."""
    x = np.full(elements, device.rank + 1.0)
    pending = [
        device.all_reduce(x, async_op=True), device.all_gather(x, async_op=True), device.shift(x, async_op=True),
        device.all_reduce(x, op="max", algorithm="ring", async_op=True), device.barrier(async_op=True),
    ]
    found = [work.wait() for work in pending[::-1]][::-1]
    assert all(work.done() for work in pending)
    assert all(work.wait() is y for work, y in zip(pending, found, strict=True))  # again, the same
    names = ["dp", "tp"] if device.rank % 2 else ["tp", "dp"]
    crossing = {name: device.all_reduce(x, name, async_op=True) for name in names}
    whole = device.all_reduce(x)  # a blocking call meanwhile, on a third group
    return found, crossing["dp"].wait(), crossing["tp"].wait(), whole


@pytest.mark.sampled(9)
@everywhere
@pytest.mark.parametrize("elements", [3, 5000])
def test_pending_operations_take_effect_in_order(cluster_of, backend, transport, elements):
    run = cluster_of(Mesh(dp=2, tp=2), backend, transport).run(in_order, elements)
    full = lambda value: np.full(elements, float(value))
    for rank, (found, dp, tp, whole) in enumerate(run):
        assert_same(found, [full(10), np.repeat([1.0, 2, 3, 4], elements), full((rank - 1) % 4 + 1), full(4), None])
        assert_same([dp, tp, whole], [full(2 * (rank % 2) + 4), full(4 * (rank // 2) + 3), full(10)])


def moving_meanwhile(device, elements):
    """A message from rank 1 to rank 0 of a pair, while both do nothing but call small collectives."""
    coming = device.irecv(1) if device.rank == 0 else None
    sending = device.isend(np.arange(elements), 0) if device.rank == 1 else None
    calls = 0
    while not device.broadcast(coming.done() if coming else False):
        calls += 1
        assert calls < 100_000, "the message does not move"
    return coming.wait()[-1] if coming else sending.wait()


@mainly
def test_a_large_message_moves_while_its_ends_call_collectives(cluster_of, backend, transport):
    run = cluster_of(Mesh(dp=2), backend, transport).run(moving_meanwhile, 300_001)
    assert run.outputs == [300_000, None]


def blocking_after_pending(device):
    """A blocking call on a group comes after what is pending there."""
    x = np.full(2, device.rank + 1)
    out = np.zeros(2, int)
    first = device.all_reduce(x, async_op=True, out=out)
    total = device.all_gather(x[:1])
    assert first.done()
    assert first.wait() is out
    return out, total, repr(first)


@mainly
def test_a_blocking_call_comes_after_what_is_pending_on_its_group(cluster_of, backend, transport):
    run = cluster_of(Mesh(devices=3), backend, transport).run(blocking_after_pending)
    for out, gathered, text in run:
        assert_same([out, gathered, text], [np.full(2, 6), np.array([1, 2, 3]), "<all_reduce, done>"])


def forget_to_wait(device, out):
    device.all_reduce(np.ones(3), async_op=True, out=out)
    device.isend(np.full(2, device.rank), (device.rank + 1) % device.size)
    device.irecv((device.rank - 1) % device.size)
    device.state["work"] = device.all_gather(device.rank, async_op=True)
    return out


@mainly
def test_work_that_nobody_waits_for_is_finished_at_the_end(cluster_of, backend, transport):
    cluster = cluster_of(Mesh(devices=3), backend, transport)
    cluster.run(forget_to_wait, np.zeros(3))
    for found in cluster.run(lambda device: device.state.pop("work").wait()):
        assert_same(found, np.array([0, 1, 2]))


def advance_in_other_calls(device):
    """Rank 0 never waits for its collective; it only asks, and its peers go on."""
    if device.rank == 0:
        work = device.all_reduce(1, async_op=True)
        while not work.done():
            pass
        device.send(5, 1)
        return work.wait()
    total = device.all_reduce(1)
    if device.rank == 1:
        assert device.recv(0) == 5
    return total


@mainly
def test_asking_whether_it_is_done_lets_work_advance(cluster_of, backend, transport):
    assert cluster_of(Mesh(devices=3), backend, transport).run(advance_in_other_calls).outputs == [3, 3, 3]


def wrong_out_later(device):
    work = device.all_gather(np.ones(2), out=np.empty(3), async_op=True)
    after = device.all_reduce(1, async_op=True)
    try:
        work.wait()
    except ValueError as error:
        return str(error), after.wait()


@pytest.mark.sampled(2)
@mainly
def test_an_error_is_raised_by_wait_and_does_not_stop_what_comes_after(cluster_of, backend, transport):
    run = cluster_of(Mesh(devices=2), backend, transport).run(wrong_out_later)
    assert run.outputs == [("out= of all_gather must be float64[4], got float64[3]", 2)] * 2
    with pytest.raises(DeviceFailedError, match="out= of all_gather"):  # nobody waits: at the end of the kernel
        cluster_of(Mesh(devices=2), backend, transport).run(
            lambda device: device.all_gather(np.ones(2), out=np.empty(3), async_op=True) and None
        )
    with pytest.raises(DeviceFailedError, match="out= of all_reduce"):  # refused at once
        cluster_of(Mesh(devices=2), backend, transport).run(
            lambda device: device.all_reduce(np.ones(2), out=np.empty(3), async_op=True) and None
        )


# Messages


def messages(device):
    right, left = (device.rank + 1) % device.size, (device.rank - 1) % device.size
    values = [
        7, 2.5, True, np.float32(1.5), np.array(3), np.arange(6).reshape(2, 3).T, np.zeros((0, 4), np.int8),
        np.arange(3000.0)[::2], [np.ones(2), {"a": (np.int16(3), np.arange(2500.0))}], (), "text", None,
        np.arange(4, dtype=">f8"), np.asfortranarray(np.arange(6000.0).reshape(60, 100)),
    ]
    found = []
    for i, value in enumerate(values):
        device.send(value, right, tag=i % 3)
        found.append(device.recv(left, tag=i % 3))
    return values, found, device.sendrecv(device.rank, right, left, tag=-5)


@pytest.mark.sampled(6)
@everywhere
@pytest.mark.parametrize("size", [1, 2, 3])
def test_messages_arrive_as_they_were_sent(cluster_of, backend, transport, size):
    run = cluster_of(Mesh(devices=size), backend, transport).run(messages)
    for rank, (values, found, neighbour) in enumerate(run):
        assert_same(found, values)
        assert neighbour == (rank - 1) % size


def tags_out_of_order(device, count):
    """Rank 0 sends all before rank 1 takes the first; rank 1 takes the tags backwards, each tag in its order."""
    if device.rank == 0:
        for i in range(count):
            device.send(np.full(2, i), 1, tag=i)
            if i % 5 == 0:
                device.send(-i, 1, tag=i)
        device.send("all sent", 2)
        return None
    if device.rank == 2:
        device.send(device.recv(0), 1)
        return None
    told = device.recv(2)  # from somebody else: nothing of rank 0 was asked for so far
    found = []
    for i in reversed(range(count)):
        found.append(device.recv(0, tag=i)[1])
        if i % 5 == 0:
            assert device.recv(0, tag=i) == -i
    return told, found


@pytest.mark.sampled(3)
@everywhere
@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_messages_lie_there_before_the_first_is_received(cluster_of, backend, transport, count):
    run = cluster_of(Mesh(devices=3), backend, transport).run(tags_out_of_order, count)
    assert run[1] == ("all sent", list(reversed(range(count))))


def ring(device, rounds, elements):
    """Everybody sends before it receives, round after round: by sendrecv, and by isend and irecv in any order."""
    right, left = (device.rank + 1) % device.size, (device.rank - 1) % device.size
    x = np.full(elements, device.rank, np.int32)
    for _ in range(rounds):
        x = device.sendrecv(x, right, left)
    pending = []
    for i in range(rounds):
        pending.append(device.isend(x + i, right, tag=i % 2))
    for i in range(rounds):
        pending.append(device.irecv(left, tag=i % 2, shape=(elements,), dtype=np.int32))
    arrived = [work.wait() for work in pending[:rounds - 1:-1]][::-1]
    assert all(work.wait() is None for work in pending[:rounds])
    return x, arrived


@pytest.mark.sampled(16)
@everywhere
@pytest.mark.parametrize("capacity", [0, 1, 16])
def test_a_ring_does_not_lock_up(cluster_of, backend, transport, capacity):
    size, rounds = 3, 20
    cluster = cluster_of(Mesh(devices=size), backend, transport, channel_capacity=capacity)
    for elements in (3, 5000):
        run = cluster.run(ring, rounds, elements)
        for rank, (x, arrived) in enumerate(run):
            mine, left = (rank - rounds) % size, (rank - 1 - rounds) % size
            assert (x == mine).all()
            assert [y[0] for y in arrived] == [left + i for i in range(rounds)]


def to_myself(device):
    work = device.isend(np.arange(3), device.rank)
    got = device.recv(device.rank)
    work.wait()
    big = device.sendrecv(np.ones(9000), device.rank, device.rank, tag=2)
    return got, big.sum()


@pytest.mark.sampled(2)
@mainly
@pytest.mark.parametrize("capacity", [0, 1])
def test_messages_to_oneself(cluster_of, backend, transport, capacity):
    run = cluster_of(Mesh(devices=2), backend, transport, channel_capacity=capacity).run(to_myself)
    for got, total in run:
        assert_same([got, total], [np.arange(3), np.float64(9000.0)])


def fill_up(device, capacity):
    """``capacity`` messages of a tag lie there; one more waits, those of another tag do not."""
    if device.rank == 0:
        for i in range(capacity):
            device.send(i, 1)
        waiting = device.isend(capacity, 1)
        before = waiting.done()
        for i in range(3 * capacity):  # taken one by one: the memory of a message is soon used for the next
            device.send(i, 1, tag=1)
            device.recv(1, tag=1)
        still = waiting.done()
        device.send("go", 1, tag=2)
        waiting.wait()
        return before, still
    for i in range(3 * capacity):
        assert device.recv(0, tag=1) == i
        device.send(i, 0, tag=1)
    assert device.recv(0, tag=2) == "go"
    return [device.recv(0) for _ in range(capacity + 1)]


@pytest.mark.sampled(3)
@everywhere
@pytest.mark.parametrize("capacity", [1, 3])
def test_a_sender_waits_while_its_tag_is_full_and_only_then(cluster_of, backend, transport, capacity):
    run = cluster_of(Mesh(devices=2), backend, transport, channel_capacity=capacity).run(fill_up, capacity)
    assert run.outputs == [(False, False), list(range(capacity + 1))]


def reused_blocks(device):
    """Messages of tag 0 are taken at once, and their memory used for one of tag 1, which is not: that blocks nobody."""
    if device.rank == 0:
        for i in range(2):
            device.send(i, 1)
            device.recv(1)  # it was taken
        device.send("stays", 1, tag=1)
        for i in range(2):  # two may lie there
            device.send(i, 1)
        device.send("done", 1, tag=2)
        return None
    for _ in range(2):
        device.send(device.recv(0), 0)
    return [device.recv(0, tag=2), device.recv(0), device.recv(0), device.recv(0, tag=1)]


@mainly
def test_memory_that_is_used_again_does_not_count_as_a_message_of_before(cluster_of, backend, transport):
    run = cluster_of(Mesh(devices=2), backend, transport, channel_capacity=2).run(reused_blocks)
    assert run[1] == ["done", 0, 1, "stays"]


def adopted(device, count, elements):
    """Large messages are not copied; kept for long, they stay what they were, and are the receiver's own."""
    if device.rank == 0:
        x = np.zeros(elements)
        for i in range(count):
            x[:] = i
            device.send(x, 1)
            x[:] = -1  # what was sent is a copy
        return device.recv(1)
    kept = []
    for i in range(count):
        y = device.recv(0)
        part = y[1:]
        del y  # a view keeps the block
        part += 0.5
        kept.append(part)
        _ = device.all_reduce(np.full(elements, i), groups=[[1]])  # other work for the memory
    assert [(part[0], part[-1]) for part in kept] == [(i + 0.5, i + 0.5) for i in range(count)]
    device.send(kept[3], 0)  # from where it lies, on
    kept[3][:] = 99
    return [part[0] for part in kept]


@pytest.mark.sampled(8)
@mainly
@pytest.mark.parametrize("elements", [2047, 2050, 30_000])
def test_large_messages_stay_valid_and_private(cluster_of, backend, transport, elements):
    run = cluster_of(Mesh(devices=2), backend, transport).run(adopted, 40, elements)
    assert_same(run[0], np.full(elements - 1, 3.5))
    assert run[1] == [99 if i == 3 else i + 0.5 for i in range(40)]


def received_into(device):
    if device.rank == 0:
        for shape in [(2, 3), (50, 60), (2,), (2, 3), (2, 3)]:
            device.send(np.ones(shape), 1)
        return None
    told = []
    for out in (np.empty((2, 3)), np.empty((50, 120))[:, ::2]):
        assert device.recv(0, out=out) is out
        assert (out == 1).all()
    for call in (
        lambda: device.recv(0, out=np.empty(3)), lambda: device.irecv(0, shape=(3, 2)).wait(),
        lambda: device.irecv(0, dtype=np.float32).wait(),
    ):
        try:
            call()
        except (ValueError, CollectiveMismatchError) as error:
            told.append(str(error))
    return told


@mainly
def test_a_message_must_be_what_was_declared(cluster_of, backend, transport):
    told = cluster_of(Mesh(devices=2), backend, transport).run(received_into)[1]
    assert told[0] == "out= of recv from rank 0 must be float64[2], got float64[3]"
    assert "shape [3, 2] was declared, [2, 3] came" in told[1]
    assert "dtype float32 was declared, float64 came" in told[2]


def by_position(device):
    """With ``axes``, places are positions in the group."""
    below = (device.position("tp") + 1) % 3
    device.send(device.rank, below, axes="tp")
    device.send(device.rank, 1 - device.position("dp"), axes="dp", tag=1)
    return device.recv((below - 2) % 3, axes="tp"), device.recv(1 - device.position("dp"), axes="dp", tag=1)


@mainly
def test_places_are_positions_along_axes(cluster_of, backend, transport):
    run = cluster_of(Mesh(dp=2, tp=3), backend, transport).run(by_position)
    assert run.outputs == [(2, 3), (0, 4), (1, 5), (5, 0), (3, 1), (4, 2)]


def wrong_places(device):
    told = []
    for call in (
        lambda: device.send(1, 2), lambda: device.recv(-2), lambda: device.send(1, 2, axes="devices"),
        lambda: device.send(1, 1, tag="a"), lambda: device.send(1, 1, tag=1 << 63), lambda: device.isend(1, 1, tag=0.5),
        lambda: device.send(np.array(["a"]), 1),
    ):
        try:
            call()
        except (ValueError, TypeError) as error:
            told.append(str(error))
    return told


@mainly
def test_wrong_places_and_tags_are_refused(cluster_of, backend, transport):
    for told in cluster_of(Mesh(devices=2), backend, transport).run(wrong_places):
        assert told == [
            "dst must be one of 0 to 1 in Mesh(devices=2), or HOST (-1); got 2; the device after the last is "
            "(device.rank + 1) % 2",
            "src must be one of 0 to 1 in Mesh(devices=2), or HOST (-1); got -2",
            "the group along 'devices' has positions 0 to 1, got 2", "a tag must be an integer, got 'a'",
            "a tag must be a 64-bit integer, got 9223372036854775808", "a tag must be an integer, got 0.5",
            "a message takes numbers or bools, got an array of dtype <U1; x.view(np.uint8) is an array of its bytes",
        ]


def in_narrow_integers(device):
    peer = 1 - device.rank
    got = []
    for kind in (np.uint8, np.int16, np.bool_, bool):   # of the first call, which makes the channel
        device.send(np.arange(3.0) + device.rank, kind(peer), tag=np.int8(3) if kind is np.uint8 else 0)
        got.append(device.recv(kind(peer), tag=3 if kind is np.uint8 else 0).tolist())
    for wrong in (peer + 0.5, str(peer)):
        try:
            device.irecv(wrong)
        except TypeError as error:
            got.append(str(error))
    return got


@mainly
def test_a_rank_may_be_any_integer_of_numpy_and_nothing_else(cluster_of, backend, transport):
    options = {"channel_capacity": np.uint8(3), "seed": np.int64(4)}
    with VirtualCluster(np.uint8(2), backend=backend, transport=transport, **options) as cluster:
        run = cluster.run(in_narrow_integers)
        for rank, got in enumerate(run):
            peer = 1 - rank
            texts = [f"src is an integer, got {peer + 0.5}", f"src is an integer, got '{peer}'"]
            assert got == [[peer, peer + 1, peer + 2]] * 4 + texts
        assert {type(event.peer) for event in run.trace.filter(kind="send")} == {int}
        cluster.channel(np.uint8(1)).send(7.0)
        assert cluster.run(lambda device: device.recv(HOST) if device.rank else None).outputs == [None, 7.0]


# Channels


def close_after_sending(device, count):
    peer = device.channel(1 - device.rank)
    if device.rank == 0:
        for i in range(count):
            peer.send(np.full(3, i), tag=i % 2)
        peer.close()
        device.barrier()
        try:
            peer.send(1)
        except ChannelClosedError as error:
            return str(error), peer.closed
    told = [peer.recv(tag=i % 2)[0] for i in range(count)]  # what was sent before can still be received
    try:
        peer.recv()
    except ChannelClosedError as error:
        told.append(str(error))
    device.barrier()
    return told


@mainly
def test_what_was_sent_before_a_channel_was_closed_is_received(cluster_of, backend, transport):
    cluster = cluster_of(Mesh(devices=2), backend, transport)
    text = "the channel between rank {} and rank {} was closed by rank 0"
    for count in (0, 1, 16):
        run = cluster.run(close_after_sending, count)
        assert run[0] == (text.format(0, 1), True)
        assert run[1] == [*range(count), text.format(1, 0)]
        cluster.forget()


def statistics(device):
    """Collectives that go by messages are not in them."""
    peer = device.channel(1 - device.rank)
    _ = device.all_reduce(np.ones(100), algorithm="ring")
    before = peer.statistics()
    device.barrier()
    if device.rank == 0:
        peer.send(np.ones(5))
        peer.send(np.ones((2, 3), np.int8), tag=1)
    else:
        peer.recv()
    device.barrier()
    if device.rank == 1:
        device.send(0, 0)
        while not peer.statistics().messages_waiting:
            pass
    else:
        device.recv(1)
    during = peer.statistics()
    if device.rank == 1:
        peer.recv(tag=1)
    _ = device.all_reduce(np.ones(100))
    return before, during, peer.statistics(), repr(peer)


@mainly
def test_statistics_count_this_ends_messages(cluster_of, backend, transport):
    cluster = cluster_of(Mesh(devices=2), backend, transport, channel_capacity=5)
    cluster.forget()
    run = cluster.run(statistics)
    names = ("messages_sent", "bytes_sent", "messages_received", "bytes_received", "messages_waiting", "capacity")
    zero, one = ([tuple(getattr(s, name) for name in names) for s in run[rank][:3]] for rank in (0, 1))
    assert zero[0] == one[0] == (0, 0, 0, 0, 0, 5)
    assert zero[1:] == [(2, 46, 1, 0, 0, 5)] * 2
    assert one[1:] == [(1, 0, 1, 40, 1, 5), (1, 0, 2, 46, 0, 5)]
    assert run[0][3] == "<VirtualChannel between rank 0 and rank 1>"


def with_the_host(device, count):
    host = device.channel(HOST)
    for i in range(count):
        x = host.recv(tag=i)
        host.send({"twice": 2 * x, "rank": device.rank})
    return device.rank


@mainly
def test_host_and_devices_exchange_messages(cluster_of, backend, transport):
    cluster = cluster_of(Mesh(devices=3), backend, transport)
    values = [np.arange(3), np.ones((60, 70)), 5]
    for rank in range(3):
        for i, value in enumerate(values):
            cluster.channel(rank).send(value, tag=i)
    assert cluster.run(with_the_host, len(values)).outputs == [0, 1, 2]
    for rank in range(3):
        for value in values:
            found = cluster.channel(rank).recv()
            assert found["rank"] == rank
            np.testing.assert_array_equal(found["twice"], 2 * value)
    with pytest.raises(ValueError, match="has ranks 0 to 2, got 3"):
        cluster.channel(3)


def stray(device, fails):
    if fails:
        if device.rank == 0:
            device.send("of the run that failed", 1)
            device.send(np.ones(5000), 1, tag=1)
        device.barrier()
        raise KeyError(device.rank)
    if device.rank == 0:
        device.send("of the run after", 1)
        device.send(2, 1, tag=1)
        return None
    return device.recv(0), device.recv(0, tag=1), device.all_reduce(1, groups=[[1]])


@mainly
def test_messages_of_a_failed_run_are_forgotten(cluster_of, backend, transport):
    cluster = cluster_of(Mesh(devices=2), backend, transport)
    for _ in range(3):
        with pytest.raises(ClusterError):
            cluster.run(stray, True)
        assert cluster.run(stray, False)[1] == ("of the run after", 2, 1)


def different(device, x):
    first = device.irecv(1 - device.rank)
    second = device.irecv(1 - device.rank)
    device.send(x, 1 - device.rank)
    device.send(-x, 1 - device.rank)
    return second.wait(), first.wait()


@mainly
def test_receives_of_a_tag_are_served_in_the_order_in_which_they_were_asked_for(cluster_of, backend, transport):
    run = cluster_of(Mesh(devices=2), backend, transport).run(different, PerDevice([10, 20]))
    assert run.outputs == [(-20, 20), (-10, 10)]
