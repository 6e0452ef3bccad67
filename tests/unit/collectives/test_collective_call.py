"""What a collective call says, and that its event carries it: to a price, to a file, and on to a bus bandwidth."""

import json

import numpy as np
import pytest

from parallelism import Costs, Event, Hardware, Mesh, Trace
from parallelism.algorithms import COLLECTIVES, kind_of
from parallelism.collectives import CollectiveCall, MemberCall
from parallelism.collectives.call import chunks_of, payload_bytes, traffic
from parallelism.collectives.results import reduction
from parallelism.recorder import record

MESH = Mesh(devices=4)
GROUP = (0, 1, 2, 3)
PAIRS = ((0, 2), (1, 1), (3, 0))
HARDWARE = Hardware.preset("dgx-h100")


def call_all(device):
    """Each kind once, with 4 x 4 numbers of 8 bytes at each rank, and the root last."""
    x = np.ones((4, 4))
    device.all_reduce(x)
    device.all_gather(x)
    device.reduce_scatter(x)
    device.all_to_all(x)
    device.broadcast(x, root=3)
    device.reduce(x, root=3)
    device.scatter(x, root=3)
    device.gather(x, root=3)
    device.all_scatter(x)
    device.permute(x, PAIRS)
    device.barrier()


def described():
    one, all_, moved = 128, 512, ((0, 2), (3, 0))
    whole = {"all_gather": all_, "gather": all_, "all_scatter": all_, "barrier": 0}
    return {
        name: CollectiveCall(name, GROUP, whole.get(name, one), "direct", 3 if kind_of(name).rooted else None,
                             moved if kind_of(name).paired else ())
        for name in COLLECTIVES
    }


def test_an_event_carries_the_whole_call_the_same_for_every_member():
    trace = record(call_all, MESH).trace
    for name, call in described().items():
        events = list(trace.filter(name=name))
        assert len(events) == 4 and {CollectiveCall.of_event(event) for event in events} == {call}


def test_what_is_not_one_collective_carries_no_call():
    assert CollectiveCall.of_event(Event(0, "collective", "reshard", group=GROUP, payload_bytes=8.0)) is None
    assert CollectiveCall.of_event(Event(0, "collective", "all_reduce", group=GROUP)) is None
    assert CollectiveCall.of_event(Event(0, "compute", "all_reduce", group=GROUP, payload_bytes=8.0)) is None


def test_a_price_is_that_of_the_call():
    trace = record(call_all, MESH).trace.on(HARDWARE, compute="modelled")
    costs = Costs(HARDWARE)
    for name, call in described().items():
        cost = costs.collective(name, call.nbytes, GROUP, root=call.root or 0, pairs=call.pairs)
        events = trace.filter(name=name)
        assert {event.priced_algorithm for event in events} == {cost.algorithm}
        assert max(event.duration_seconds for event in events) == pytest.approx(cost.seconds, rel=1e-9)


def test_a_file_has_the_call_and_one_from_before_loads_and_says_what_it_lacks_when_it_is_priced(tmp_path):
    trace, path = record(call_all, MESH).trace, tmp_path / "trace.json"
    trace.save(path)
    assert Trace.load(path) == trace
    document = json.loads(path.read_text())
    for name in ("payload_bytes", "root", "pairs"):
        del document["columns"][name]
    path.write_text(json.dumps(document))
    old = Trace.load(path)
    assert old.bytes_received() == trace.bytes_received() and len(str(old.summary())) > 0
    with pytest.raises(ValueError, match=r"a collective 'all_reduce' of group .* has no payload_bytes"):
        old.on(HARDWARE)


def test_of_uneven_blocks_those_count_that_leave_their_member():
    sizes = ((5, 1, 0), (2, 7, 2), (3, 4, 9))
    calls = [MemberCall("all_to_all", np.dtype(np.int16), (sum(cut),), sizes=cut) for cut in sizes]
    plan, chunks = calls[0].over(3), chunks_of(calls)
    assert payload_bytes(plan, chunks) == 2 * (1 + 0 + 2 + 2 + 3 + 4) / 2
    moved = traffic(calls, (4, 5, 6), 1)
    assert (moved.bytes_received, moved.bytes_sent, moved.sources) == (2 * 5, 2 * 4, ((4, 2), (6, 8)))
    assert moved.call == CollectiveCall("all_to_all", (4, 5, 6), 12, "direct")


def test_two_calls_that_count_as_one_add_up():
    calls = [MemberCall("all_reduce", np.dtype(np.int16), (n,)) for n in (6, 9)]
    first, second = (traffic([call] * 3, (0, 1, 2), 0) for call in calls)
    both = first.plus(second)
    assert both.call is not None and both.call.nbytes == 12 + 18
    assert both.bytes_received == first.bytes_received + second.bytes_received


def test_the_result_of_a_users_function_called_mean_is_not_divided():
    def mean(a, b):
        return (a + b) / 2

    mean.__qualname__ = "mean"
    out = np.empty(2)
    reduction(mean, out.dtype).reduce([np.array([2.0, 4.0]), np.array([4.0, 8.0])], out)
    assert out.tolist() == [3.0, 6.0]
