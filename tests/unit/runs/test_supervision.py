"""Who can never go on, from what the devices publish."""

import pytest
from hypothesis import given, strategies as st

from parallelism.operation.deadlock import Stuck, describe
from vcluster.code import Frame
from vcluster.memory import (
    BLOCKED,
    FINISHED,
    PAGE,
    RUNNING,
    Arena,
    LastSeen,
    Layout,
    Need,
    Operation,
    State,
    Status,
)
from vcluster.runs.deadlock import find_deadlock, find_stuck

HERE = "kernel.py:7"


def running():
    return State(1, RUNNING)


def finished():
    return State(1, FINISHED)


def blocked(*operations):
    return State(1, BLOCKED, operations, HERE)


def receives(source, me, place=0):
    """A recv under way on rank ``me``, which needs a send of ``source``."""
    return Operation(("recv", source, 0), f"recv(from rank {source}, tag 0)", [Need(source, ("send", me, 0), place, 0)])


def sends(target, me, place=0):
    """A send under way on rank ``me`` into a full channel, which needs a recv of ``target``."""
    return Operation(("send", target, 0), f"send(to rank {target}, tag 0)", [Need(target, ("recv", me, 0), place, 0)])


def joins(key, *missing):
    """A collective under way that these ranks have not come to."""
    return Operation(("group", key), "all_reduce(...)", [Need(rank, ("group", key), 0, 0) for rank in missing])


def stuck_ranks(*states, changed=()):
    return [stick.rank for stick in find_stuck(states, lambda need: need.place in changed)]


@pytest.mark.slow
def test_two_that_receive_from_each_other_are_stuck_whatever_a_third_computes():
    states = blocked(receives(1, 0)), blocked(receives(0, 1)), running()
    assert stuck_ranks(*states) == [0, 1]


def test_who_waits_for_one_that_runs_is_free_and_so_is_who_waits_for_him():
    assert stuck_ranks(blocked(receives(1, 0)), blocked(receives(2, 1)), running()) == []


def test_who_waits_for_one_that_has_finished_is_stuck_and_so_is_who_waits_for_him():
    assert stuck_ranks(blocked(receives(1, 0)), blocked(receives(2, 1)), finished()) == [0, 1]


def test_a_message_that_has_come_meanwhile_frees_its_receiver():
    states = blocked(receives(1, 0, place=8)), blocked(receives(0, 1, place=16))
    assert stuck_ranks(*states, changed={8}) == []


def test_a_send_under_way_serves_the_one_that_receives():
    # 0 waits to receive from 1; 1 waits to receive from 2, but its send to 0 is under way, and 0 takes it
    states = blocked(receives(1, 0), sends(1, 0)), blocked(receives(0, 1), sends(0, 1))
    assert stuck_ranks(*states) == [0, 1]  # both sends wait for a recv that is no first of its lane to them
    served = blocked(receives(1, 0)), blocked(receives(2, 1), Operation(("send", 0, 0), "send", [])), finished()
    assert stuck_ranks(*served) == [1]


def test_a_collective_in_other_orders_on_two_groups_is_a_circle():
    assert stuck_ranks(blocked(joins(5, 1)), blocked(joins(6, 0))) == [0, 1]


def test_a_collective_under_way_elsewhere_serves_if_it_can_go_on_itself():
    waiting_with_pending = blocked(receives(2, 1), joins(5, 2))
    assert stuck_ranks(blocked(joins(5, 1)), waiting_with_pending, running()) == []
    assert stuck_ranks(blocked(joins(5, 1)), waiting_with_pending, finished()) == [0, 1]


def test_what_is_not_known_or_up_to_the_host_is_never_called_stuck():
    assert stuck_ranks(blocked(Operation(("group", 1), "?", None)), finished()) == []
    assert stuck_ranks(blocked(receives(-1, 0)), finished()) == []


def test_the_host_can_act_only_from_another_thread():
    states = [blocked(receives(-1, 0)), running()]
    assert [s.rank for s in find_stuck(states, lambda need: False, host_may_act=False)] == [0]
    full = [blocked(Operation(("send", -1, 0), "send", [Need(-1, None, 0, 0)])), finished()]
    assert find_stuck(full, lambda need: False, host_may_act=False) == []  # it takes messages in as it waits


def test_room_in_a_ring_is_made_by_any_call_of_the_peer_but_not_after_its_end():
    full = blocked(Operation(("send", 1, 0), "send", [Need(1, None, 0, 0)]))
    assert stuck_ranks(full, blocked(receives(0, 1))) == []
    assert stuck_ranks(full, finished()) == [0]


DEVICES = st.tuples(st.sampled_from("rfb"), st.lists(st.integers(0, 5), min_size=1, max_size=3))


@given(st.lists(DEVICES, min_size=2, max_size=6))
def test_with_receives_only_it_is_reachability_of_one_that_runs(devices):
    size = len(devices)
    states, edges = [], {}
    for rank, (kind, sources) in enumerate(devices):
        sources = [s % size for s in sources]
        if kind == "b":
            needs = [Need(s, ("send", rank, 0), 0, 0) for s in sources]
            states.append(blocked(Operation(("recv", 0, 0), "recv", needs)))
            edges[rank] = sources
        else:
            states.append(running() if kind == "r" else finished())
    # by removal, the other way round: who needs somebody hopeless is hopeless (greatest fixed point of its complement)
    hopeful = {rank for rank, (kind, _) in enumerate(devices) if kind == "r"}
    for _ in range(size):
        hopeful |= {rank for rank, sources in edges.items() if all(s in hopeful for s in sources)}
    assert stuck_ranks(*states) == [rank for rank in edges if rank not in hopeful]


def test_it_is_told_with_the_circle_first_and_everybodys_line():
    states = blocked(receives(1, 0)), blocked(receives(2, 1)), blocked(receives(1, 2))
    text = describe(find_stuck(states, lambda need: False), ())
    assert text.splitlines()[0] == "deadlock: rank 1 waits for rank 2; rank 2 waits for rank 1"
    assert text.splitlines()[1:] == [
        f"  ranks 0 and 2 in recv(from rank 1, tag 0) at {HERE}, waiting for rank 1",  # what is the same is told once
        f"  rank 1 in recv(from rank 2, tag 0) at {HERE}, waiting for rank 2",
    ]


def test_it_is_told_from_where_the_line_that_waits_was_called():
    states = blocked(receives(1, 0)), finished()
    lines = [("main.py", 3, "kernel"), ("step.py", 5, "step"), ("kernel.py", 7, "exchange")]
    stack = [Frame(filename, line, None, None, None, function) for filename, line, function in lines]
    text = describe(find_stuck(states, lambda need: False), (1,), {0: stack})
    assert text.splitlines()[2] == "    called from step at step.py:5, kernel at main.py:3"
    deep = stack[:1] * 20 + stack[2:]
    text = describe(find_stuck(states, lambda need: False), (1,), {0: deep})
    assert text.splitlines()[2] == "    called from " + "kernel at main.py:3, " * 6 + "14 more"
    assert len(describe(find_stuck(states, lambda need: False), (1,), {0: stack[2:]}).splitlines()) == 2


def test_of_a_circle_of_many_not_every_step_is_told():
    states = [blocked(receives((rank + 1) % 100, rank)) for rank in range(100)]
    head = describe(find_stuck(states, lambda need: False), ()).splitlines()[0]
    assert head.startswith("deadlock: rank 0 waits for rank 1; rank 1 waits for rank 2; ")
    assert head.endswith("; rank 14 waits for rank 15; ...; rank 99 waits for rank 0")


def test_it_is_told_who_returned_without_calling():
    states = blocked(joins(5, 1, 2)), finished(), finished()
    text = describe(find_stuck(states, lambda need: False), (1, 2))
    assert text.splitlines()[0] == "deadlock: ranks 1 and 2 returned without calling all_reduce, for which rank 0 waits"


def test_the_group_is_told_in_which_a_rank_did_not_call():
    stuck = Stuck(2, "all_reduce(float64[], op='sum') of group [0, 2]", "a.py:3", ("group", 5), (0,))
    head = describe([stuck], (0, 1)).splitlines()[0]
    assert head == "deadlock: rank 0 returned without calling all_reduce of group [0, 2], for which rank 2 waits"


def test_what_a_device_called_last_is_there_when_it_has_died():
    layout = Layout(3, PAGE)
    status = Status(Arena(layout.nbytes), layout)
    assert status.last_seen(1) == LastSeen()
    assert str(LastSeen()) == ""
    status.note(1, "all_reduce", "/a/long/path/kernel.py:123")
    status.note(1, "recv", HERE)  # shorter than what was there
    assert status.last_seen(1) == LastSeen("recv", HERE)
    assert str(status.last_seen(1)) == f"; its last call was recv at {HERE}"
    status.set_blocked(1, [receives(2, 1)], HERE)
    assert str(status.last_seen(1)) == f" while it waited in recv(from rank 2, tag 0) at {HERE}"
    assert status.last_seen(1).operation == "recv"
    status.set(1, RUNNING)
    assert status.last_seen(1) == LastSeen("recv", HERE)
    status.begin(1)
    assert status.last_seen(1) == status.last_seen(0) == status.last_seen(2) == LastSeen()
    status.note(1, "x" * 3 * PAGE, HERE)
    assert status.last_seen(1) == LastSeen("x" * (PAGE - 1), "")
    assert status.last_seen(2) == LastSeen()  # it has kept to its own place


def test_what_is_written_is_read_and_a_change_while_reading_counts_as_running():
    layout = Layout(2, PAGE)
    arena = Arena(layout.nbytes)
    status = Status(arena, layout)
    assert find_deadlock(status, 2) == []
    operation = receives(1, 0, place=layout.status(1))
    status.set_blocked(0, [operation], HERE)
    assert status.read(0) == State(status.version(0), BLOCKED, (operation,), HERE)
    assert find_deadlock(status, 2) == []  # rank 1 runs
    status.set(1, FINISHED)
    assert find_deadlock(status, 2) == []  # the word it needs has changed: it may only not have noticed
    operation = receives(1, 0, place=layout.status(0) + 4096)
    status.set_blocked(0, [operation], HERE)
    assert [stick.rank for stick in find_deadlock(status, 2)] == [0]
    version = status.version(0)
    status.set_blocked(0, [operation], HERE)
    assert status.version(0) == version  # saying the same again is no move
    woken = []
    assert find_deadlock(status, 2, wake=woken.extend) and woken == []
    missing = [Need(1, ("group", 5), layout.status(0) + 4096, 0), Need(1, ("group", 5), layout.status(1), 0)]
    status.set_blocked(0, [Operation(("group", 5), "barrier()", missing)], HERE)
    assert find_deadlock(status, 2, wake=woken.extend) == [] and woken == [0]  # one has come: it may publish less now
