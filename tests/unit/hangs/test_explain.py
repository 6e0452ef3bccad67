"""What dumps of jobs tell: who waits for whom, where, and which decision differed."""

import pytest
from hang_dumps import Job

from vcluster.hangs import explain

AT = "/home/me/train.py:"


def test_a_rank_that_skips_a_collective(tmp_path):
    job = Job(4)
    job.alike("all_reduce", 10)
    job.alike("barrier", 11, sizes=())
    job.alike("all_reduce", 12, ranks=(0, 1, 3), sizes=((5, 7),), dtype="BFloat16", done=False)
    found = explain(job.write(tmp_path))
    assert found.kind == "deadlock"
    assert found.cause == "deadlock: rank 2 did not come to calling all_reduce, for which rank 0 waits"
    assert found.ranks == (0, 1, 3)
    assert found.locations == (f"{AT}12",) * 3
    assert str(found) == "\n".join([
        found.cause,
        f"  ranks 0, 1 and 3 in all_reduce(bfloat16[5, 7]) at {AT}12, waiting for rank 2",
        f"    called from main at {AT}900",
        f"the last call that all of them made alike: barrier() at {AT}11, number 2 of group default_pg",
        "the first call in which they differ:",
        f"  ranks 0, 1 and 3 called all_reduce(bfloat16[5, 7]) at {AT}12",
        "  rank 2 called nothing more",
        "how far the ranks of group default_pg are:",
        "  rank 2 at its collective number 2, 1 behind",
        "  ranks 0, 1 and 3 at its collective number 3"])


def test_receives_in_a_circle(tmp_path):
    job = Job(3)
    job.alike("all_reduce", 10)
    for rank in range(3):
        job.call(rank, f"recv {rank}<-{(rank + 1) % 3}", 20, done=False)
    found = explain(job.write(tmp_path))
    assert found.cause == (
        "deadlock: rank 0 waits for rank 1; rank 1 waits for rank 2; rank 2 waits for rank 0")
    assert found.ranks == (0, 1, 2)
    assert f"  rank 0 in recv(from rank 1) at {AT}20, waiting for rank 1" in str(found)


def test_messages_are_matched_in_order_within_a_pair(tmp_path):
    """Rank 1 sends twice and receives once; the third receive of rank 0 has no send."""
    job = Job(2)
    for line in (1, 2):
        job.call(1, "send 1->0", line)
        job.call(0, "recv 0<-1", line)
    job.call(0, "recv 0<-1", 3, done=False)
    job.alike("all_reduce", 4, ranks=(1,), done=False)
    found = explain(job.write(tmp_path))
    assert found.cause == "deadlock: rank 0 waits for rank 1; rank 1 waits for rank 0"
    assert found.locations == (f"{AT}3", f"{AT}4")


def test_peers_of_messages_are_places_in_their_group(tmp_path):
    job = Job(4, {"pp1": [1, 3]})
    job.call(3, "recv 1<-0", 8, group="pp1", done=False)
    job.call(1, "all_reduce", 9, done=False)
    job.alike("all_reduce", 9, ranks=(0, 2), done=False)
    found = explain(job.write(tmp_path))
    assert f"  rank 3 in recv(from rank 1) at {AT}8, waiting for rank 1" in str(found)
    assert found.cause == "deadlock: rank 1 waits for rank 3; rank 3 waits for rank 1"


def test_groups_entered_in_different_orders(tmp_path):
    """Every rank has enqueued everything: what waits is what stands first."""
    job = Job(4, {"a0": [0, 1], "a1": [2, 3], "b0": [0, 2], "b1": [1, 3]})
    mine = {0: ("a0", "b0"), 1: ("b1", "a0"), 2: ("b0", "a1"), 3: ("a1", "b1")}
    for rank, groups in mine.items():
        for line, group in enumerate(groups, 30):
            job.call(rank, "all_reduce", line, group=group, done=False)
    found = explain(job.write(tmp_path))
    assert found.kind == "deadlock"
    assert found.ranks == (0, 1, 2, 3)
    assert found.cause == ("deadlock: rank 0 waits for rank 1; rank 1 waits for rank 3; rank 3 waits for rank 2; "
                           "rank 2 waits for rank 0")
    assert "all_reduce(float32[3]) of ranks 0 and 1" in str(found)


@pytest.mark.parametrize(("odd", "what", "text"), [
    ({"name": "broadcast"}, "what they call", "broadcast(float32[3])"),
    ({"dtype": "Half"}, "dtype", "all_reduce(float16[3])"),
    ({"sizes": ((4,),)}, "shape", "all_reduce(float32[4])"),
])
def test_members_that_call_different_things(tmp_path, odd, what, text):
    job = Job(4)
    job.alike("all_reduce", 10)
    for rank in range(4):
        usual = {"name": "all_reduce", "line": 11, "done": False}
        job.call(rank, **(usual | odd | {"line": 12} if rank == 2 else usual))
    found = explain(job.write(tmp_path))
    assert found.kind == "mismatch"
    assert found.cause == f"the members of group [0, 1, 2, 3] differ in {what}"
    assert found.ranks == (2,)
    assert f"  ranks 0, 1 and 3 called all_reduce(float32[3]) at {AT}11\n  rank 2 called {text} at {AT}12" in str(found)
    assert f"alike: all_reduce(float32[3]) at {AT}10, number 1 of group default_pg" in str(found)


def completed_differently(odd):
    """Rank 1 called another thing in a collective that all of them completed; then all call the same."""
    job = Job(4)
    for rank in range(4):
        job.call(rank, **({"name": "all_gather", "line": 5} | (odd if rank == 1 else {})))
    job.alike("all_reduce", 10)
    return job


@pytest.mark.parametrize("odd", [{"name": "_all_gather_base"}, {"dtype": "Half"}])
def test_a_difference_in_a_call_that_all_completed_is_not_why_a_later_one_hangs(tmp_path, odd):
    job = completed_differently(odd)
    job.alike("all_reduce", 11, ranks=(0, 1, 3), done=False)
    assert explain(job.write(tmp_path)).cause == "deadlock: rank 2 did not come to calling all_reduce, for which rank 0 waits"


def test_a_difference_in_a_completed_call_is_told_where_nobody_is_missing(tmp_path):
    job = completed_differently({"dtype": "Half"})
    job.alike("all_reduce", 11, done=False)
    assert explain(job.write(tmp_path)).cause == "the members of group [0, 1, 2, 3] differ in dtype"


def test_lists_of_different_lengths(tmp_path):
    job = Job(2)
    for rank in range(2):
        job.call(rank, "allreduce_coalesced", 9, sizes=((3,),) * (299 + rank), done=False)
    assert explain(job.write(tmp_path)).cause == "the members of group [0, 1] differ in the number of arrays"


def test_a_batch_of_messages_that_lacks_a_receive(tmp_path):
    job = Job(2)
    for rank in range(2):
        job.call(rank, f"send {rank}->{1 - rank}", 5, done=False)
    job.call(0, "recv 0<-1", 6, done=False)
    for rank in range(2):
        for entry in job.entries[rank]:
            entry["p2p_seq_id"] = 1
        job.call(rank, "coalesced", 7, done=rank == 1)
        job.entries[rank][-1] |= {"is_p2p": True, "p2p_seq_id": 1, "collective_seq_id": 0}
    found = explain(job.write(tmp_path))
    assert found.cause == "deadlock: rank 1 did not come to receiving what rank 0 sends (tag 0)"
    assert found.locations == (f"{AT}5",)


def test_the_wait_for_a_rank_without_a_dump_is_told_before_the_waits_behind_it(tmp_path):
    job = Job(4, {"t0": [0, 1], "t1": [2, 3], "d0": [0, 2], "d1": [1, 3]})
    job.alike("all_reduce", 1)
    job.call(2, "all_reduce", 5, group="t1", done=False)
    for rank in (0, 1):
        job.call(rank, "all_reduce", 5, group="t0")
        job.call(rank, "all_reduce", 6, group=f"d{rank}", done=False)
    found = explain(job.write(tmp_path, without=[3]))
    assert found.cause.startswith("rank 3 left no dump, and rank 1 waits for it in all_reduce(float32[3]) of ranks 1 and 3")
    assert found.records.groups[found.group].name == "d1"


def test_a_rank_between_others_is_missing_where_the_dumps_name_no_ranks(tmp_path):
    job = Job(4, backend="gloo")
    job.alike("all_reduce", 10)
    job.alike("all_reduce", 11, ranks=(0, 2, 3), done=False)
    job.groups["0"] = []
    assert explain(job.write(tmp_path, without=[1])).cause.startswith("rank 1 left no dump, and rank 0 waits for it")


def test_a_last_rank_without_a_dump_may_be_missing_where_the_dumps_name_no_ranks(tmp_path):
    job = Job(4, backend="gloo")
    job.alike("all_reduce", 11, done=False)
    job.groups["0"] = []
    assert explain(job.write(tmp_path, without=[3])).cause.endswith(
        "or a rank is missing that left no dump, as these do not say which ranks there are")


def test_blocks_of_different_sizes_are_right_where_they_may_differ(tmp_path):
    job = Job(2)
    for rank in range(2):
        job.call(rank, "all_to_all", 5, sizes=((3 + rank, 2),))
        job.call(rank, "all_reduce", 6)
    assert explain(job.write(tmp_path)).kind == "nothing"


def test_the_first_decision_is_looked_for_in_the_calls_before_the_wait(tmp_path):
    """Ranks 0 and 1 wait in the group of all; rank 2 has gone another way three calls before, in its own group."""
    job = Job(3, {"a0": [0, 1], "a1": [2]})
    job.alike("barrier", 1, sizes=())
    for rank in (0, 1):
        job.call(rank, "all_reduce", 2, group="a0")
        job.call(rank, "all_gather", 3, group="a0")
    job.call(2, "all_reduce", 2, group="a1")
    job.call(2, "all_reduce", 7, group="a1")
    job.alike("all_reduce", 4, ranks=(0, 1), done=False)
    found = explain(job.write(tmp_path))
    assert found.decision.last_alike.startswith(f"all_reduce(float32[3]) at {AT}2")
    usual = f"called all_gather(float32[3]) at {AT}3"
    assert found.decision.calls == {0: usual, 1: usual, 2: f"called all_reduce(float32[3]) at {AT}7"}


def test_a_rank_without_a_dump_is_named(tmp_path):
    job = Job(4)
    job.alike("all_reduce", 10)
    job.alike("all_reduce", 11, ranks=(0, 1, 2), done=False)
    found = explain(job.write(tmp_path, without=[3]))
    assert found.cause == ("rank 3 left no dump, and rank 0 waits for it in all_reduce(float32[3]): it has died, or its dump "
                           "is not among these")
    assert "no dump of rank 3 is among these" in str(found)


def test_a_cut_ring_buffer(tmp_path):
    """What the last calls tell is told; what they do not tell is said."""
    job = Job(3)
    job.alike("all_reduce", 10)
    for line in range(20, 29):
        job.call(2, "recv 2<-0", line)
        job.call(0, "send 0->2", line)
    job.alike("all_reduce", 40, ranks=(0, 1), done=False)
    job.call(2, "recv 2<-0", 50, done=False)
    paths = job.write(tmp_path, last=4)
    found = explain(paths)
    assert found.kind == "unknown"
    assert found.cause == ("why rank 0 waits in all_reduce(float32[3]) cannot be told, because the ring buffer of rank 2 was "
                           "too short: it holds no call of that group")
    whole = explain(job.write(tmp_path))
    assert whole.cause == "deadlock: rank 0 waits for rank 2; rank 2 waits for rank 0"


def test_a_cut_ring_buffer_that_holds_enough(tmp_path):
    job = Job(3)
    for _ in range(30):
        job.alike("all_reduce", 10)
    job.alike("all_reduce", 11, ranks=(0, 2), done=False)
    found = explain(job.write(tmp_path, last=5))
    assert found.cause == "deadlock: rank 1 did not come to calling all_reduce, for which rank 0 waits"
    assert "number 30 of group default_pg" in found.decision.last_alike


def test_where_paths_part_before_a_cut_buffer_begins(tmp_path):
    job = Job(2)
    job.alike("all_reduce", 10)
    for rank in range(2):
        for line in range(20, 29):
            job.call(rank, f"send {rank}->{1 - rank}", line)
            job.call(rank, f"recv {rank}<-{1 - rank}", line)
        job.call(rank, f"recv {rank}<-{1 - rank}", 60, done=False)
    found = explain(job.write(tmp_path, last=3))
    assert found.cause == "deadlock: rank 0 waits for rank 1; rank 1 waits for rank 0"
    assert ("where they went different ways cannot be told, because the ring buffer of ranks 0 and 1 begins after the last "
            "collective that they share") in str(found)


def test_clocks_that_differ_by_seconds_change_nothing(tmp_path):
    texts = []
    for skew in (0, 7_000_000_000):
        job = Job(3)
        job.skew[1] = skew
        for _ in range(12):
            for rank in range(3):
                job.call(rank, "all_reduce", 10, late_ns=400_000 * (rank == 2))
        job.alike("all_reduce", 11, ranks=(0, 1), done=False)
        found = explain(job.write(tmp_path))
        assert found.straggler.rank == 2
        assert found.straggler.times == found.straggler.of == 12
        assert found.straggler.late_seconds == pytest.approx(4e-4)
        texts.append(str(found))
    assert texts[1] == texts[0] + " (the clocks differ, and were set equal by the ends of calls: rank 1 7 s ahead)"


def test_a_collective_that_everybody_is_in(tmp_path):
    job = Job(2)
    job.alike("all_reduce", 10, done=False)
    found = explain(job.write(tmp_path))
    assert found.kind == "under way"
    assert found.cause == ("no call is missing: all that all_reduce(float32[3]) needs have called it, and it has not ended. "
                           "It is still under way, or a link or a device has failed")
    assert found.ranks == (0, 1)


def test_nothing_hangs(tmp_path):
    job = Job(2)
    job.alike("all_reduce", 10)
    found = explain(job.write(tmp_path))
    assert found.kind == "nothing"
    assert found.ranks == ()


def test_coalesced_messages_end_with_their_batch(tmp_path):
    """PyTorch leaves the messages of a batch as they were enqueued, and ends the batch."""
    job = Job(2)
    for rank in range(2):
        job.call(rank, f"send {rank}->{1 - rank}", 5, done=False)
        job.call(rank, f"recv {rank}<-{1 - rank}", 5, done=False)
        for entry in job.entries[rank]:
            entry["p2p_seq_id"] = 1
        job.call(rank, "coalesced", 5)
        job.entries[rank][-1] |= {"is_p2p": True, "p2p_seq_id": 1, "collective_seq_id": 0}
        job.numbers.pop((rank, "0", False))
        job.call(rank, "all_reduce", 6)
    assert explain(job.write(tmp_path)).kind == "nothing"


def test_gloo_says_no_ranks_of_groups_and_only_what_is_retired(tmp_path):
    job = Job(3, backend="gloo")
    job.alike("all_reduce", 10)
    job.alike("all_reduce", 11, ranks=(0, 2), done=False)
    for rank in range(3):
        for entry in job.entries[rank]:
            entry["state"] = "scheduled"
    job.groups["0"] = []
    found = explain(job.write(tmp_path))
    assert found.cause == "deadlock: rank 1 did not come to calling all_reduce, for which rank 0 waits"


@pytest.mark.slow
def test_a_thousand_ranks_are_told_in_a_few_lines(tmp_path):
    job = Job(1000)
    job.alike("all_reduce", 10)
    job.alike("all_reduce", 11, ranks=[rank for rank in range(1000) if rank != 421], done=False)
    found = explain(job.write(tmp_path))
    assert found.cause == "deadlock: rank 421 did not come to calling all_reduce, for which rank 0 waits"
    assert f"  ranks 0-420 and 422-999 in all_reduce(float32[3]) at {AT}11, waiting for rank 421" in str(found)
    assert len(str(found)) < 2000
