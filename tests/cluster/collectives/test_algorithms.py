"""Every algorithm gives NumPy's answer, and moves what its closed form and the literature say."""

from __future__ import annotations

import json

import numpy as np
import pytest
from oracle import assert_same, results
from paths import DATA
from runtimes import MAIN, RUNTIMES

from parallelism.algorithms import COLLECTIVES, closed_form
from parallelism.algorithms.algorithms import algorithms
from parallelism.algorithms.kinds import REDUCING, ROOTED
from parallelism.mesh import Mesh
from vcluster.code import PerDevice

LITERATURE = json.loads((DATA / "collective_bytes.json").read_text())["cases"]

# The literature's name, and ours.
NAMES = {
    "ring": "ring", "ring = RS+AG": "ring", "chain root 0": "ring",
    "unidirectional ring, bytes crossing each link incl. forwarding": "ring",
    "direct": "direct", "direct (each rank sends its shard to n-1 peers; mllabs)": "direct",
    "direct/pairwise": "direct",
    "flat from root 0": "direct", "flat to root 0": "direct", "flat from root 0 (S total at root)": "direct",
    "naive exchange: full buffer to every peer (mllabs)": "naive",
    "recursive doubling": "recursive_doubling", "recursive halving-doubling (Rabenseifner)": "halving_doubling",
    "binomial tree (distance doubling) root 0": "tree", "dissemination": "dissemination",
}


def even_shape(collective, size, nbytes):
    """The shape of float64 values whose whole buffer is ``nbytes``."""
    shards = collective in ("all_gather", "gather", "all_scatter")
    return (nbytes // 8 // (size if shards else 1),)


def plans(size, roots):
    """Every algorithm of every collective, with the options that it needs."""
    for collective in COLLECTIVES:
        for name in algorithms(collective, size):
            if collective == "permute":
                yield collective, name, {"pairs": [(p, (p + 2) % size) for p in range(0, size, 2)]}
            elif collective in ROOTED:
                for root in roots:
                    yield collective, name, {"root": root}
            else:
                yield collective, name, {}


def x_of(rank, shape):
    return np.asarray((np.arange(np.prod(shape), dtype=float).reshape(shape) * 3 + rank * 7) % 11)


def perform(device, calls):
    """The results of calls (collective, algorithm, options, shape), one after the other."""
    found = []
    for collective, name, options, shape in calls:
        if collective == "barrier":
            found.append(device.barrier(algorithm=name))
        else:
            found.append(getattr(device, collective)(x_of(device.rank, shape), algorithm=name, **options))
    return found


def events_of(trace, rank):
    return [*trace.filter(rank=rank, kind="collective")]


def over(*sizes):
    """Groups of every size by the main runtimes; by every one if that may take its time."""
    default = [pytest.param(size, MAIN, id=str(size)) for size in sizes]
    slow = [pytest.param(size, RUNTIMES, id=f"{size}, all", marks=pytest.mark.slow) for size in sizes]
    return pytest.mark.parametrize(("size", "runtimes"), default + slow)


@pytest.mark.slow
@over(1, 2, 3, 4, 6, 8)
def test_every_algorithm_gives_numpys_answer_and_moves_what_its_closed_form_says(cluster_of, size, runtimes):
    nbytes = 8 * size * 12
    calls = [
        (collective, name, options, even_shape(collective, size, nbytes))
        for collective, name, options in plans(size, sorted({1 % size, size - 1}))      # the literature has root 0
    ]
    for backend, transport in runtimes:
        run = cluster_of(Mesh(devices=size), backend, transport).run(perform, calls)
        events = [events_of(run.trace, rank) for rank in range(size)]
        for i, (collective, name, options, shape) in enumerate(calls):
            where = f"{collective} {name} {options} over {size}, {backend} {transport}"
            if collective != "barrier":
                xs = [x_of(rank, shape) for rank in range(size)]
                for rank, expected in enumerate(results(collective, xs, [size], **options)):
                    assert_same(run[rank][i], expected, f"{where}, rank {rank}")
            mine = [events[rank][i] for rank in range(size)]
            form = closed_form(collective, name, size, root=options.get("root", 0),
                               pairs=tuple(options["pairs"]) if "pairs" in options else None)
            payload = nbytes if collective != "barrier" else 0
            assert tuple(event.bytes_sent for event in mine) == form.bytes_sent(payload), where
            assert tuple(event.bytes_received for event in mine) == form.bytes_received(payload), where
            assert tuple(event.messages for event in mine) == form.messages, where
            told = {(event.name, event.algorithm, event.group) for event in mine}
            assert told == {(collective, name, tuple(range(size)))}


UNEVEN = [
    ("all_reduce", (7, 3)), ("all_reduce", ()), ("all_reduce", (0, 2)), ("all_reduce", (1,)), ("reduce", (5,)),
    ("reduce", ()), ("reduce_scatter", (2, 3)), ("reduce_scatter", (7, 2)), ("all_gather", (0, 3)), ("all_gather", ()),
    ("all_gather", (3, 2)), ("gather", ()), ("gather", (5, 1)), ("scatter", (2,)), ("scatter", (7, 3)),
    ("broadcast", ()),
    ("broadcast", (5, 0)), ("broadcast", (3, 5)), ("all_to_all", (2, 3)), ("all_to_all", (11, 2)), ("all_scatter", ()),
    ("all_scatter", (3,)), ("all_reduce", (4000,)), ("all_gather", (3000,)), ("reduce_scatter", (5003,)),
    ("broadcast", (4100,)), ("all_to_all", (4003,)), ("scatter", (8001,)), ("gather", (2500,)), ("reduce", (2049,)),
]


@pytest.mark.slow
@over(3, 5)
@pytest.mark.parametrize("half", [0, 1])
def test_uneven_sizes_are_counted_as_the_messages_that_moved(cluster_of, size, runtimes, half):
    calls = [
        (collective, name, {"root": size - 1} if collective in ROOTED else {}, shape)
        for collective, shape in UNEVEN[half::2] for name in algorithms(collective, size)
    ]
    wanted = [
        results(collective, [x_of(rank, shape) for rank in range(size)], [size], **options)
        for collective, _, options, shape in calls]
    traces = []
    for backend, transport in runtimes:
        run = cluster_of(Mesh(devices=size), backend, transport).run(perform, calls)
        events = [events_of(run.trace, rank) for rank in range(size)]
        children = {}
        for event in run.trace:
            if event.parent is not None:
                children.setdefault((event.rank, event.parent), []).append(event)
        for i, (collective, name, _, shape) in enumerate(calls):
            where = f"{collective} {name} of {shape} over {size}, {backend} {transport}"
            for rank, expected in enumerate(wanted[i]):
                assert_same(run[rank][i], expected, f"{where}, rank {rank}")
                event = events[rank][i]
                inside = children.get((rank, event.serial), [])
                assert dict(event.sources).get(rank, 0) == 0, where
                assert sum(nbytes for _, nbytes in event.sources) == event.bytes_received, where
                if name == "direct" and transport == "shared_memory":
                    assert not inside, where
                    continue
                assert sum(e.messages for e in inside) == event.messages, where
                assert sum(e.bytes_sent for e in inside) == event.bytes_sent, where
                assert sum(e.bytes_received for e in inside) == event.bytes_received, where
                received = {}
                for e in inside:
                    if e.bytes_received:
                        received[e.peer] = received.get(e.peer, 0) + e.bytes_received
                assert received == dict(event.sources), where
            mine = [events[rank][i] for rank in range(size)]
            assert sum(e.bytes_sent for e in mine) == sum(e.bytes_received for e in mine), where
        traces.append([[(e.bytes_sent, e.bytes_received, e.messages, e.sources) for e in lane] for lane in events])
    assert all(trace == traces[0] for trace in traces)


def sizes_of_the_literature():
    """Every size on the usual runtime, eight on threads; the queue for three; all else if it may take its time."""
    for size in sorted({case["n"] for case in LITERATURE}):
        for backend, transport in RUNTIMES[:3]:
            usual = transport == ("queue" if size == 3 else "shared_memory") and (backend == "thread") == (size == 8)
            every = usual or (size == 3 and backend == "process")
            yield pytest.param(size, backend, transport, id=f"{size}-{backend}-{transport}",
                               marks=[pytest.mark.slow] * (not every))


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("size", "backend", "transport"), [*sizes_of_the_literature()])
def test_a_run_sends_the_bytes_of_the_literature(cluster_of, size, backend, transport):
    cases = [case for case in LITERATURE if case["n"] == size]
    calls, owners = [], []
    for i, case in enumerate(cases):
        collective = case["op"].removeprefix("p").partition("/")[0]
        shape = even_shape(collective, size, case["S"])
        if case["algorithm"] == "flat reduce to root + flat broadcast":  # two collectives, one after the other
            mine = [("reduce", "direct", {"root": 0}, shape), ("broadcast", "direct", {"root": 0}, shape)]
        else:
            options = {"pairs": [(p, (p + 1) % size) for p in range(size)]} if collective == "permute" else {}
            mine = [(collective, NAMES[case["algorithm"]], options, shape)]
        calls += mine
        owners += [i] * len(mine)
    trace = cluster_of(Mesh(devices=size), backend, transport).run(perform, calls).trace
    sent = np.zeros((len(cases), size), int)
    messages = np.zeros((len(cases), size), int)
    for rank in range(size):
        for owner, event in zip(owners, events_of(trace, rank), strict=True):
            sent[owner, rank] += event.bytes_sent
            messages[owner, rank] += event.messages
    for i, case in enumerate(cases):
        assert sent[i].tolist() == case["sent_per_rank"], case
        assert sent[i].sum() == case["total_bytes"], case
        if case["messages_per_rank"] is not None:
            assert messages[i].tolist() == [case["messages_per_rank"]] * size, case


@pytest.mark.sampled(2)
@pytest.mark.slow_for("8")
@pytest.mark.parametrize(("size", "backend", "transport"), [
    (3, "process", "shared_memory"), (4, "thread", "queue"), (8, "process", "shared_memory"),
    pytest.param(3, "thread", "queue", marks=pytest.mark.slow),
    pytest.param(4, "process", "shared_memory", marks=pytest.mark.slow),
])
def test_reductions_by_every_algorithm_take_every_op(cluster_of, size, backend, transport):
    shape = (5, 3)
    ops = ["sum", "mean", "prod", "max", "min", lambda a, b: np.maximum(a, b)]
    calls = [
        (collective, name, {"op": op}, shape)
        for collective in REDUCING for name in algorithms(collective, size) for op in ops
    ]
    run = cluster_of(Mesh(devices=size), backend, transport).run(perform, calls)
    xs = [x_of(rank, shape) for rank in range(size)]
    for i, (collective, name, options, _) in enumerate(calls):
        for rank, expected in enumerate(results(collective, xs, [size], **options)):
            assert_same(run[rank][i], expected, f"{collective} {name} {options}, rank {rank}")


def concatenate(device, names):
    """Concatenation is associative and does not commute: the digits of a number, appended."""
    return [device.all_reduce(np.array([(device.rank + 1) * 100 + 1]), op=append, algorithm=name)[0] for name in names]


def append(a, b):
    """Numbers ``digits * 100 + count``: the digits of b after those of a."""
    return (a // 100 * 10 ** (b % 100) + b // 100) * 100 + a % 100 + b % 100


@pytest.mark.parametrize(("size", "backend"), [
    (3, "process"), (4, "process"), (8, "thread"), pytest.param(8, "process", marks=pytest.mark.slow)])
def test_an_op_that_does_not_commute_is_applied_in_group_order(cluster_of, size, backend):
    names = [name for name in algorithms("all_reduce", size) if name != "ring"]  # a ring starts elsewhere
    run = cluster_of(Mesh(devices=size), backend).run(concatenate, names)
    assert run.outputs == [[int("12345678"[:size]) * 100 + size] * len(names)] * size


def mixed(device, x):
    """Collectives over several groups, messages, and traffic with the host, in one run."""
    _ = device.all_reduce(x, "tp")
    _ = device.all_gather(x, "dp", algorithm="ring")
    _ = device.broadcast(x, groups=[[5, 0]], root=1)
    _ = device.reduce_scatter(x, async_op=True).wait()
    _ = device.all_reduce([x, np.int32(1)])
    _ = device.sendrecv(x[: device.rank], (device.rank + 1) % 6, (device.rank - 1) % 6)
    device.send(x, device.rank)
    device.recv(device.rank)


@pytest.mark.slow_for("queue")
@pytest.mark.parametrize("transport", ["shared_memory", "queue"])
def test_the_communication_matrix_adds_up_to_the_totals(cluster_of, transport):
    x = np.arange(60.0)
    trace = cluster_of(Mesh(dp=2, tp=3), "process", transport).run(mixed, x).trace
    matrix = trace.communication_matrix()
    assert matrix.shape == (6, 6)
    assert matrix.sum() == trace.bytes_received() == trace.bytes_sent()
    for rank in range(6):
        assert matrix[:, rank].sum() == trace.bytes_received(rank)
    S = x.nbytes
    expected = np.zeros((6, 6), int)
    for source in range(6):
        for target in range(6):
            if source != target:
                expected[source, target] += S // 6 + 2 * S // 6  # the reduce_scatter, the all_reduce of a tree
                expected[source, target] += 2 * S // 3 * (source // 3 == target // 3)  # the all_reduce along tp
                expected[source, target] += S * (source % 3 == target % 3)  # the all_gather along dp
        expected[source, source] += S  # a message to oneself
        expected[source, (source + 1) % 6] += 8 * source
    expected[0, 5] += S
    # the tree's int32, cut into six pieces of which one is not empty: reduced by rank 0, and told to all
    expected[1:, 0] += 4
    expected[0, 1:] += 4
    assert_same(matrix, expected)
    assert trace.count("all_reduce") == 3  # two groups along tp, and the whole mesh once
    assert trace.count("all_gather") == 3
    assert trace.filter(kind="collective", name="all_reduce", axes="tp").bytes_received(rank=4) == 2 * 2 * S // 3


def many_sizes(device, xs):
    for x in xs:
        _ = device.all_reduce(x)


@pytest.mark.slow_for("queue")
@pytest.mark.parametrize("transport", ["shared_memory", "queue"])
def test_a_direct_all_reduce_counts_the_same_whatever_its_size(cluster_of, transport):
    xs = [np.ones(12 * n) for n in (1, 50, 100, 1000, 9000)]
    trace = cluster_of(Mesh(devices=4), "process", transport).run(many_sizes, xs).trace
    for rank in range(4):
        assert [event.bytes_received for event in events_of(trace, rank)] == [3 * x.nbytes // 2 for x in xs]
    dtypes = cluster_of(Mesh(devices=4), "process", transport).run(
        many_sizes, PerDevice([[np.ones(8, d) for d in ("?", "i2", "f4", "F")]] * 4)
    ).trace
    expected = [3 * 64 // 2, 3 * 16 // 2, 3 * 32 // 2, 3 * 64 // 2]  # bools are summed as int64
    assert [event.bytes_received for event in events_of(dtypes, 2)] == expected


@pytest.mark.not_on_mpi("the ranks of a job have what is refused here")
@pytest.mark.parametrize("collective", ["all_reduce", "barrier", "permute"])
def test_the_algorithm_of_mpi_is_for_the_ranks_of_a_job(cluster_of, collective):
    def kernel(device):
        pairs = [(0, 1)] if collective == "permute" else None
        with pytest.raises(ValueError, match=f"^{collective}: algorithm='mpi' asks for .* type: mpiexec"):
            device.collective(collective, np.ones(3), pairs=pairs, algorithm="mpi")
        return device.all_reduce(1)

    assert cluster_of(2, "thread").run(kernel).outputs == [2, 2]
