"""Deadlocks are found in what devices say and in counts of messages, and a guard names who died."""

import subprocess
import sys
import types

import pytest

from vcluster import ClusterError, VirtualCluster
from vcluster.memory import BLOCKED, LINE, Need, Operation, State
from vcluster.mpi import requirement
from vcluster.mpi.guard import _how, _name
from vcluster.mpi.statuses import RECEIVED, SENT, SHUT, TAKEN_IN, HostStatus, place_of_act, place_of_word
from vcluster.mpi.transport import nap_seconds
from vcluster.runs.deadlock import find_deadlock


def waiting(rank, peer, received):
    """A device that waits for a message of ``peer``, of whose messages it has received so many."""
    need = Need(peer, ("send", rank, 0), rank, received)
    return State(1, BLOCKED, (Operation(("recv", peer, 0), f"recv(from {peer})", [need]),), "kernel.py:1", 1)


def statuses(states, sent, shown=()):
    status = HostStatus.__new__(HostStatus)
    status._states, status._sent, status._shown = list(states), sent, shown
    status._endpoint = types.SimpleNamespace(sent=[0] * (len(states) + 1))
    return status


def test_two_devices_that_wait_for_each_other_are_stuck_unless_a_message_is_under_way():
    states = [waiting(0, 1, received=2), waiting(1, 0, received=5)]
    both = statuses(states, [[0, 5, 0], [2, 0, 0]])
    assert [stuck.rank for stuck in find_deadlock(both, 2, host_may_act=False)] == [0, 1]
    under_way = statuses(states, [[0, 6, 0], [2, 0, 0]])        # rank 0 has sent one more than rank 1 has received
    assert find_deadlock(under_way, 2, host_may_act=False) == []


def test_a_device_that_spoke_before_its_last_message_counts_as_running():
    # Rank 1 has received more than rank 0 had sent when it spoke: what rank 0 said is old, and says nothing of rank 1.
    old = statuses([waiting(0, 1, 1), waiting(1, 2, 0), State(1, 0)], [[0, 3, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    assert find_deadlock(old, 3, host_may_act=False) == []


def meeting(peer, key, word, seen):
    """A device that waits in a group on its node until a peer has posted, or finished, an operation."""
    need = Need(peer, ("group", key), place_of_word(key, word), seen)
    return State(1, BLOCKED, (Operation(("group", key), "barrier()", [need]),), "kernel.py:1", 1)


@pytest.mark.parametrize("word", [0, LINE])
def test_two_devices_in_different_groups_on_a_node_are_stuck_unless_a_word_has_changed(word):
    one, other = (1 << 62) - 1, (1 << 62) - 2       # keys beside each other: their words do not meet
    states, sent = [meeting(1, one, word, seen=4), meeting(0, other, word, seen=0)], [[0] * 3] * 2
    shown = [{place_of_word(one, word): 5}, {place_of_word(one, word): 4, place_of_word(one, LINE - word): 9,
                                             place_of_word(other, word): 1}]
    assert [stuck.rank for stuck in find_deadlock(statuses(states, sent, shown), 2, host_may_act=False)] == [0, 1]
    shown[1][place_of_word(one, word)] = 5          # rank 1 had posted before it spoke, and rank 0 has not seen it
    assert find_deadlock(statuses(states, sent, shown), 2, host_may_act=False) == []


def test_places_of_words_are_no_endpoints_and_differ():
    keys = 1, 2, 3, (1 << 62) - 1
    places = [place_of_word(key, word) for key in keys for word in (0, LINE)]
    places += [place_of_act(act, peer) for act in (SENT, TAKEN_IN, SHUT, RECEIVED) for peer in range(5)]
    assert len(set(places)) == len(places) and max(places) < 0


def test_a_message_of_the_host_that_is_under_way_wakes_a_device():
    status = statuses([waiting(0, -1, received=0)], [[0, 0]])
    assert [stuck.rank for stuck in find_deadlock(status, 1, host_may_act=False)] == [0]
    status._endpoint.sent[0] = 1
    assert find_deadlock(status, 1, host_may_act=False) == []


@pytest.mark.parametrize(("said", "expected"), [
    ("rank 3\ndevice 2\n", "the process of rank 2 (rank 3 of the job, "),
    ("rank 3\ndevice 2\ndevice \n", "an idle process (rank 3 of the job, "),
    ("rank 0\n", "the host (rank 0 of the job, "),
    ("", "a process that had just started ("),
])
def test_a_guard_names_its_rank_by_what_it_served_last(said, expected):
    assert _name(said) == expected


def test_a_guard_tells_a_signal_from_an_exit_code():
    assert _how(-9) == "was ended by SIGKILL"
    assert _how(3).startswith("ended with exit code 3")


def test_without_mpi4py_the_backend_says_what_to_install(monkeypatch):
    monkeypatch.setattr(requirement, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install mpi4py mpich"):
        VirtualCluster(2, backend="mpi")


def test_outside_a_job_the_backend_says_how_to_start_one(monkeypatch):
    monkeypatch.setattr(requirement, "find_spec", lambda name: object())
    with pytest.raises(ClusterError, match=r"mpiexec -n 4 python -m vcluster\.mpi script\.py"):
        VirtualCluster(3, backend="mpi")


def test_the_queue_transport_is_refused():
    with pytest.raises(ValueError, match="backend='mpi' has a transport of its own"):
        VirtualCluster(2, backend="mpi", transport="queue")


def test_no_import_of_the_package_loads_mpi4py():
    code = ("import sys, vcluster, vcluster.mpi, vcluster.runs.cluster; vcluster.VirtualCluster; "
            "sys.exit('mpi4py' in sys.modules or 'vcluster.mpi.transport' in sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_rank_that_waits_is_late_by_a_small_part_of_its_wait():
    naps = [nap_seconds(waited) for waited in (0.0, 1e-4, 1e-3, 8e-3, 1.0, 100.0)]
    assert naps == pytest.approx([5e-5, 5e-5, 1.25e-4, 1e-3, 4e-3, 4e-3])
