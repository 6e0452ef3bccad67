"""Kinds and algorithms of collectives that come from outside the package: run, explained, recorded, priced, traced."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from parallelism.algorithms import ALGORITHMS, KINDS, Listed
from parallelism.collectives.registration import unregister
from parallelism.recorder import record
from vcluster import (
    CollectiveAlgorithm,
    CollectiveKind,
    CollectiveMismatchError,
    Costs,
    Hardware,
    Mesh,
    RegistrationError,
    Trace,
    VirtualCluster,
    explain,
    register_algorithm,
    register_kind,
)

SCAN = CollectiveKind("scan", "rank j gets the {op} of ranks 0 to j", "reduced", lambda p, g: range(p + 1))
SORTED = CollectiveKind(
    "all_sort", "everybody gets all elements, sorted", lambda arrays: np.sort(np.concatenate(arrays)))
RUNTIMES = [{"start_method": "forkserver"}, {"start_method": "spawn"}, {"start_method": "fork"},
            {"backend": "thread"}, {"transport": "queue"}]
BY_DAY = [(RUNTIMES[0], False), (RUNTIMES[3], True)]


def hillis_steele():
    """Of Hillis and Steele (1986): each adds what comes from distance 1, 2, 4, ...; the sums stay in group order."""
    def distances(g):
        return [1 << k for k in range((g - 1).bit_length())]

    def cost(g, root, pairs):
        sent = tuple(sum(p + d < g for d in distances(g)) for p in range(g))
        return len(distances(g)), sent, tuple(sum(p >= d for d in distances(g)) for p in range(g)), sent

    return CollectiveAlgorithm(
        "doubling", ("scan",), "at most lg g S", cost,
        lambda g, root, pairs: [Listed(tuple((p, p + d, (0,)) for p in range(g - d)), True) for d in distances(g)],
        order="in group order, as blocks of 1, 2, 4, ... neighbours")


def star():
    """An all_reduce through position 0."""
    def cost(g, root, pairs):
        return 2, (g - 1, *[1] * (g - 1)), (g - 1, *[1] * (g - 1)), (g - 1, *[1] * (g - 1))

    return CollectiveAlgorithm(
        "star", ("all_reduce",), "(g-1) S at position 0, S at the others", cost,
        lambda g, root, pairs: [Listed(tuple((p, 0, (0,)) for p in range(1, g)), True),
                                Listed(tuple((0, p, (0,)) for p in range(1, g)))],
        order="in group order")


def bruck():
    """Bruck et al. (1997), of arrays that are not rotated: a block for a position at distance d goes by its bits."""
    def distances(g):
        return [1 << k for k in range((g - 1).bit_length())]

    def steps(g, root, pairs):
        for d in distances(g):
            # block s>t, which has gone the lower bits of its way, lies at s + (way mod d)
            moves = {}
            for s in range(g):
                for t in range(g):
                    way = (t - s) % g
                    if way & d:
                        here = (s + way % d) % g
                        moves.setdefault((here, (here + d) % g), []).append(s * g + t)
            yield Listed(tuple((s, t, tuple(chunks)) for (s, t), chunks in sorted(moves.items())))

    def cost(g, root, pairs):
        blocks = sum(way & d > 0 for way in range(g) for d in distances(g))
        return len(distances(g)), (blocks,) * g, (blocks,) * g, (len(distances(g)),) * g, g

    return CollectiveAlgorithm(
        "bruck_here", ("all_to_all",), "lg g S/2 (for powers of two)", cost, steps, lambda g: g * g)


@pytest.fixture(autouse=True)
def nothing_stays_registered():
    yield
    for kind in KINDS.outside:
        unregister(kind)
    for algorithm in ALGORITHMS.outside:
        unregister(algorithm)
    assert "scan" not in KINDS.records and ("all_reduce", "star") not in ALGORITHMS.records


def register_all():
    register_kind(SCAN)
    register_kind(SORTED)
    for algorithm in (hillis_steele(), star(), bruck()):
        register_algorithm(algorithm)


def large_and_small(device, elements):
    """Each toy, directly and by its algorithm, twice and more, so that prepared calls are run, too."""
    x = np.arange(elements, dtype=float) + device.rank
    found = {}
    for _ in range(4):
        found["scan"] = device.collective("scan", x)
        found["sort"] = device.collective("all_sort", x[::-1])
    found["doubling"] = device.collective("scan", x, algorithm="doubling")
    found["max"] = device.collective("scan", -x, op="max", out=np.empty_like(x))
    found["tree"] = device.collective("scan", {"a": x, "b": [device.rank]})
    found["later"] = device.collective("scan", x, async_op=True).wait()
    found["star"] = device.all_reduce(x, algorithm="star")
    found["named"] = device.collective("all_reduce", x)
    found["bruck"] = device.all_to_all(x, algorithm="bruck_here")
    return found


def check(outputs, elements):
    g = len(outputs)
    inputs = [np.arange(elements, dtype=float) + rank for rank in range(g)]
    for rank, found in enumerate(outputs):
        prefix = sum(inputs[1:rank + 1], inputs[0])
        for name in ("scan", "doubling", "later"):
            np.testing.assert_array_equal(found[name], prefix, name)
        np.testing.assert_array_equal(found["sort"], np.sort(np.concatenate(inputs)))
        np.testing.assert_array_equal(found["max"], -inputs[0])
        np.testing.assert_array_equal(found["tree"]["a"], prefix)
        assert found["tree"]["b"] == [rank * (rank + 1) // 2]
        np.testing.assert_array_equal(found["star"], sum(inputs))
        np.testing.assert_array_equal(found["named"], sum(inputs))
        blocks = [np.array_split(x, g)[rank] for x in inputs]
        np.testing.assert_array_equal(found["bruck"], np.concatenate(blocks))


@pytest.mark.slow
@pytest.mark.parametrize(("options", "before"), [
    pytest.param(options, before, id=f"{'before' if before else 'after'}-{'-'.join(options.values())}",
                 marks=[pytest.mark.slow] * ((options, before) not in BY_DAY))
    for options in RUNTIMES for before in (True, False)])
def test_what_is_registered_runs_on_every_device_whenever_it_was_registered(options, before):
    if before:
        register_all()
    with VirtualCluster(3, **options) as cluster:
        if not before:
            with pytest.raises(Exception, match="no collective 'scan'"):
                cluster.run(lambda device: device.collective("scan", 1.0))
            register_all()
        for elements in (7, 30_000):
            check(cluster.run(large_and_small, elements), elements)
        unregister(next(kind for kind in KINDS.outside if kind.name == "scan"))
        with pytest.raises(Exception, match="no collective 'scan'; there are all_reduce"):
            cluster.run(lambda device: device.collective("scan", 1.0))


def test_one_that_is_replaced_is_replaced_on_devices_that_have_run_it():
    register_kind(CollectiveKind("turn", "copies", "copied", lambda p, g: ((p + 1) % g,)))
    with VirtualCluster(3) as processes, VirtualCluster(3, backend="thread") as threads:
        for cluster in (processes, threads):
            assert list(cluster.run(turn_often)) == [1, 2, 0]
        register_kind(CollectiveKind("turn", "copies", "copied", lambda p, g: ((p - 1) % g,)), replace=True)
        for cluster in (processes, threads):
            assert list(cluster.run(turn_often)) == [2, 0, 1]


def turn_often(device):
    x = np.array([device.rank])
    return [int(device.collective("turn", x)[0]) for _ in range(4)][-1]


def kernel(device, elements):
    x = np.ones(elements)
    _ = device.collective("scan", x)
    _ = device.collective("scan", x, algorithm="doubling")
    _ = device.all_reduce(x, algorithm="star")
    _ = device.all_to_all(x, algorithm="bruck_here")


def test_it_is_explained_priced_recorded_and_traced_by_its_closed_form(tmp_path):
    register_all()
    g, elements = 4, 8
    nbytes = 8 * elements
    with VirtualCluster(g, backend="thread") as cluster:
        run = cluster.run(kernel, elements)
    recorded = record(lambda device: kernel(device, elements), Mesh(devices=g))
    hardware = Hardware.preset("dgx-a100")
    costs = Costs(hardware)
    toys = [("scan", "direct"), ("scan", "doubling"), ("all_reduce", "star"), ("all_to_all", "bruck_here")]
    inputs = [np.arange(elements) * 10 + rank for rank in range(g)]
    for kind, algorithm in toys:
        shown = explain(kind, algorithm=algorithm, inputs=inputs)
        assert shown.bytes_received == shown.closed_form.bytes_received(nbytes)
        assert kind in str(shown) and shown.closed_form.formula in str(shown)
        cost = costs.collective(kind, nbytes, range(g), algorithm=algorithm)
        assert cost.seconds > 0 and cost.algorithm == algorithm
        crossing = costs.channel_bytes(cost, range(g))
        assert sum(crossing.values()) == 2 * sum(shown.bytes_sent)       # out of a port, and into one
        for trace in (run.trace, recorded.trace):
            events = [event for event in trace.filter(kind="collective", name=kind) if event.algorithm == algorithm]
            assert [event.bytes_received for event in events] == list(shown.bytes_received)
            assert [event.bytes_sent for event in events] == list(shown.bytes_sent)
            assert {event.payload_bytes for event in events} == {nbytes}
            priced = trace.on(hardware, compute="modelled").filter(kind="collective", name=kind)
            found = [event for event in priced if event.algorithm == algorithm]
            chosen = cost if algorithm != "direct" else costs.collective(kind, nbytes, range(g))
            assert {event.priced_algorithm for event in found} == {chosen.algorithm}
            assert max(event.duration_seconds for event in found) == pytest.approx(chosen.seconds)
    np.testing.assert_array_equal(explain("scan", inputs=inputs).results[2], sum(inputs[:3]))
    assert run.trace.count(name="scan") == 2 and "scan" in str(run.trace.summary())
    run.trace.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == run.trace


@pytest.mark.not_on_mpi("outputs of other processes are sent")
def test_threads_need_no_record_that_can_be_sent():
    lock = threading.Lock()
    register_kind(CollectiveKind("guarded", "a sum", lambda arrays: sum(arrays) if lock is not None else None))
    with VirtualCluster(2, backend="thread") as cluster:
        assert list(cluster.run(lambda device: int(device.collective("guarded", 3)))) == [6, 6]
    with pytest.raises(TypeError, match="what was registered cannot be sent"), VirtualCluster(2) as cluster:
        cluster.run(lambda device: device.rank)


def test_members_that_call_different_things_are_told_so():
    register_kind(SCAN)
    with VirtualCluster(2, backend="thread") as cluster, pytest.raises(CollectiveMismatchError, match="shape"):
        cluster.run(lambda device: device.collective("scan", np.ones(2 + device.rank)))


# -- what is refused ---------------------------------------------------------------------------------------------------

def kind_like(**changed):
    fields = {"name": "toy", "title": "a toy", "result": "reduced"}
    return CollectiveKind(**{**fields, **changed})


@pytest.mark.parametrize(("changed", "why"), [
    ({"name": "no name"}, "name must be an identifier"),
    ({"title": ""}, "title must be a sentence"),
    ({"result": "added"}, "result must be one of reduced, joined, copied, listed, nothing or a function, got 'added'"),
    ({"sources": "some"}, "sources must be one of all, root, pairs or a function"),
    ({"gives": "none"}, "result='reduced' contradicts gives='none'"),
    ({"result": "nothing"}, "result='nothing' contradicts gives='all', gets='all'"),
    ({"gives": "root"}, "only the root gives an array, and sources='all' needs others"),
    ({"result": "listed", "cuts": True}, "cuts=True needs a result that is reduced, joined or copied"),
    ({"result": "copied"}, "takes one source, and sources='all' names several"),
    ({"sources": lambda p, g: [g]}, "positions from 0 to 0 in order"),
    ({"sources": lambda p, g: [0]}, "a reduction includes the member's own array"),
    ({"bus_factor": lambda g: -1}, "bus_factor"),
])
def test_a_kind_that_is_incomplete_or_contradicts_itself_is_refused(changed, why):
    with pytest.raises(RegistrationError, match=why):
        register_kind(kind_like(**changed))
    assert not KINDS.outside


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("changed", "why"), [
    ({"name": ""}, "name must be an identifier"),
    ({"name": "torus"}, "stands for prices that depend on the hardware"),
    ({"kinds": ()}, "kinds must name at least one kind"),
    ({"kinds": ("all_reduced",)}, "there is no kind 'all_reduced'"),
    ({"formula": ""}, "formula must say"),
    ({"order": ""}, "order must say in which order"),
    ({"closed_form": None}, "closed_form must be a function"),
    ({"steps": None}, "neither steps, to be run, nor phases"),
    ({"applies": lambda g: g > 2}, "needs must say in words"),
    ({"applies": lambda g: g > 99, "needs": "a crowd"}, "applies to none of the sizes"),
    ({"closed_form": lambda g, root, pairs: (2, (1,) * g, (1,) * g, (1,) * g)}, "says 1, 1, 1 S sent, the steps 2, 1"),
    ({"closed_form": lambda g, root, pairs: (1, (1,), (1,), (1,))}, "gives 1 numbers as sent, for 2 positions"),
    ({"steps": lambda g, root, pairs: [Listed(((0, g, (0,)),), True)]}, "closed_form says 1, 1 S sent, the steps 0, 0"),
    ({"steps": lambda g, root, pairs: [((0, 1, (0,)),)]}, r"a step must be Listed\(...\) or Pairwise"),
    ({"steps": lambda g, root, pairs: [Listed(((0, 1, (3,)),), True)]}, "carries chunks .3,. of 1"),
    ({"steps": lambda g, root, pairs: star().steps(g, root, pairs)[::-1]}, "position 0 does not get what all_reduce"),
    ({"phases": lambda g, root, pairs: []}, "the phases 0, 0"),
])
def test_an_algorithm_that_is_incomplete_or_contradicts_itself_is_refused(changed, why):
    fields = {name: getattr(star(), name) for name in ("name", "kinds", "formula", "closed_form", "steps", "order")}
    with pytest.raises(RegistrationError, match=why):
        register_algorithm(CollectiveAlgorithm(**{**fields, **changed}))
    assert not ALGORITHMS.outside


def test_a_name_that_is_taken_is_refused_but_the_same_record_may_come_again():
    register_all()
    register_all()
    assert len(KINDS.outside) == 2 and len(ALGORITHMS.outside) == 3
    with pytest.raises(RegistrationError, match="kind 'scan' is registered; replace=True takes its place"):
        register_kind(kind_like(name="scan"))
    with pytest.raises(RegistrationError, match="kind 'all_reduce' is part of the package"):
        register_kind(kind_like(name="all_reduce"), replace=True)
    with pytest.raises(RegistrationError, match=r"algorithm \('all_reduce', 'ring'\) is part of the package"):
        register_algorithm(CollectiveAlgorithm("ring", ("all_reduce",), "S", star().closed_form, star().steps))
