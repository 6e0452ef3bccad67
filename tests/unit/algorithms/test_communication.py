"""Step lists against the closed forms, and both against figures collected from the literature."""

from __future__ import annotations

import itertools
import json
import pickle

import pytest
from paths import DATA

from parallelism.algorithms import COLLECTIVES, Algorithm, Transfer, closed_form
from parallelism.algorithms.algorithms import algorithm, algorithms
from parallelism.algorithms.kinds import ROOTED

LITERATURE = json.loads((DATA / "collective_bytes.json").read_text())

# The literature's name, and ours.
NAMES = {
    "ring": "ring",
    "direct (each rank sends its shard to n-1 peers; mllabs)": "direct",
    "direct/pairwise": "direct",
    "direct": "direct",
    "recursive doubling": "recursive_doubling",
    "ring = RS+AG": "ring",
    "naive exchange: full buffer to every peer (mllabs)": "naive",
    "recursive halving-doubling (Rabenseifner)": "halving_doubling",
    "flat from root 0": "direct",
    "flat to root 0": "direct",
    "flat from root 0 (S total at root)": "direct",
    "binomial tree (distance doubling) root 0": "tree",
    "chain root 0": "ring",
    "unidirectional ring, bytes crossing each link incl. forwarding": "ring",
    "dissemination": "dissemination",
}
STEPS_DIFFER = {("all_to_all", "direct"), ("reduce_scatter", "direct")}     # pairwise takes turns, direct does not


def every_algorithm(sizes=range(1, 10), roots=True):
    for size in sizes:
        for collective in COLLECTIVES:
            for name in algorithms(collective, size):
                for root in range(size) if roots and collective in ROOTED else [0]:
                    pairs = [(p, (p + 2) % size) for p in range(0, size, 2)] if collective == "permute" else None
                    yield algorithm(collective, name, size, root=root, pairs=pairs)


def even_chunks(plan: Algorithm, nbytes: int) -> list[int]:
    """The chunks of a buffer of ``nbytes`` that divides."""
    if plan.collective == "permute":
        return [nbytes] * plan.size
    buffers = plan.size if plan.collective == "all_to_all" else 1      # its chunks are those of everybody's buffer
    return [buffers * nbytes // max(plan.chunks, 1)] * plan.chunks


def ident(plan: Algorithm) -> str:
    return f"{plan.collective}-{plan.name}-{plan.size}-{plan.root}"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [*range(1, 10), 12, 16])
def test_steps_cost_what_the_closed_form_says(size):
    for plan in every_algorithm([size]):
        nbytes = 7 * size**2
        pairs = plan.pairs if plan.collective == "permute" else None
        form = closed_form(plan.collective, plan.name, size, root=plan.root, pairs=pairs)
        sizes = even_chunks(plan, nbytes)
        assert plan.bytes_sent(sizes) == form.bytes_sent(nbytes), ident(plan)
        assert plan.bytes_received(sizes) == form.bytes_received(nbytes), ident(plan)
        assert plan.messages_sent() == form.messages, ident(plan)
        assert len(plan.steps) == form.steps, ident(plan)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", range(1, 10))
def test_views_of_a_position_are_the_steps(size):
    for plan in every_algorithm([size]):
        sizes = [3 * chunk + 1 for chunk in range(plan.chunks)]
        sent, received = plan.bytes_sent(sizes), plan.bytes_received(sizes)
        assert sum(sent) == sum(received), ident(plan)
        for position in range(size):
            where = f"{ident(plan)}, position {position}"
            sends, receives, sources = plan.sends(position), plan.receives(position), plan.sources(position, sizes)
            assert sends == tuple(tuple(t for t in step if t.source == position) for step in plan.steps), where
            arriving = tuple(tuple(t for t in step if t.target == position) for step in plan.steps)
            assert tuple(map(set, receives)) == tuple(map(set, arriving)), where
            assert all([t.source for t in step] == sorted(t.source for t in step) for step in receives), where
            assert sum(nbytes for _, nbytes in sources) == received[position], where
            assert sum(nbytes for _, nbytes in plan.targets(position, sizes)) == sent[position], where
            assert len(sources) == len({t.source for step in arriving for t in step}), where
            assert sum(map(len, sends)) == plan.messages_sent()[position], where


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", LITERATURE["cases"], ids=lambda c: f"{c['op']}-{c['algorithm']}-{c['n']}")
def test_bytes_are_those_of_the_literature(case):
    collective, size, nbytes = case["op"].removeprefix("p").partition("/")[0], case["n"], case["S"]
    if case["algorithm"] == "flat reduce to root + flat broadcast":        # two collectives, one after the other
        plans = [algorithm("reduce", "direct", size), algorithm("broadcast", "direct", size)]
    else:
        pairs = [(p, (p + 1) % size) for p in range(size)] if collective == "permute" else None
        plans = [algorithm(collective, NAMES[case["algorithm"]], size, pairs=pairs)]
    sent = [plan.bytes_sent(even_chunks(plan, nbytes)) for plan in plans]
    assert list(map(sum, zip(*sent, strict=True))) == case["sent_per_rank"]
    assert sum(map(sum, sent)) == case["total_bytes"]
    if (collective, plans[0].name) not in STEPS_DIFFER:
        assert sum(len(plan.steps) for plan in plans) == case["steps"]
    if case["messages_per_rank"] is not None and plans[0].name != "direct":
        assert plans[0].messages_sent() == (case["messages_per_rank"],) * size


@pytest.mark.parametrize(("name", "factor"), [
    (None, 1.5), ("direct", 1.5), ("ring", 1.5), ("halving_doubling", 1.5), ("naive", 3), ("recursive_doubling", 2),
])
def test_all_reduce_over_4(name, factor):
    plan = algorithm("all_reduce", name, 4)
    sizes = [512 // plan.chunks] * plan.chunks
    assert plan.bytes_received(sizes) == plan.bytes_sent(sizes) == (factor * 512,) * 4
    assert closed_form("all_reduce", name, 4).bytes_received(512) == (factor * 512,) * 4


def test_ring_step_by_step():
    plan = algorithm("all_reduce", "ring", 3)
    assert [[(t.source, t.target, t.chunks, t.reduce) for t in step] for step in plan.steps] == [
        [(0, 1, (2,), True), (1, 2, (0,), True), (2, 0, (1,), True)],
        [(0, 1, (1,), True), (1, 2, (2,), True), (2, 0, (0,), True)],
        [(0, 1, (0,), False), (1, 2, (1,), False), (2, 0, (2,), False)],
        [(0, 1, (2,), False), (1, 2, (0,), False), (2, 0, (1,), False)],
    ]


def test_tree_reduces_neighbours_whoever_the_root_is():
    plan = algorithm("reduce", "tree", 5, root=2)
    assert [[(t.source, t.target) for t in step] for step in plan.steps] == [[(1, 0), (3, 2)], [(0, 2)], [(4, 2)]]


def test_uneven_chunks_count_as_they_are():
    plan = algorithm("all_gather", "direct", 3)
    assert plan.bytes_received([10, 0, 1]) == (1, 11, 10) and plan.bytes_sent([10, 0, 1]) == (20, 0, 2)
    assert plan.sources(0, [10, 0, 1]) == ((1, 0), (2, 1))


def test_an_algorithm_is_a_value():
    for plan in every_algorithm([4], roots=False):
        copy = pickle.loads(pickle.dumps(plan))  # noqa: S301  (our own)
        assert copy == plan and hash(copy) == hash(plan) and copy.steps == plan.steps
    ring = algorithm("all_reduce", "ring", 4)
    assert ring is algorithm("all_reduce", "ring", 4) != algorithm("all_reduce", "ring", 5)
    with pytest.raises(AttributeError):
        ring.size = 5
    with pytest.raises(AttributeError):
        Transfer(0, 1, (0,)).source = 2


def test_nobody_sends_to_itself_and_one_position_sends_nothing():
    for plan in every_algorithm():
        assert all(t.source != t.target for step in plan.steps for t in step)
        if plan.size == 1:
            assert not any(plan.messages_sent())


def test_large_direct_algorithms_stay_rules():
    plan = algorithm("all_reduce", None, 256)
    assert len(plan.sources(17, [8] * 256)) == 255 and "steps" not in vars(plan)
    assert plan.bytes_received([8] * 256) == (2 * 255 * 8,) * 256


@pytest.mark.parametrize(("arguments", "options", "words"), [
    (("all_reduce", "rings", 4), {}, "'rings' for all_reduce over 4; these apply: direct, naive, ring, recursive"),
    (("all_reduce", "recursive_doubling", 6), {}, "power of two.*these apply: direct, naive, ring, tree"),
    (("all_reduced", None, 4), {}, "no collective 'all_reduced'; there are all_reduce, "),
    (("all_reduce", None, 0), {}, "at least 1 position, got 0"),
    (("broadcast", None, 3), {"root": 3}, "from 0 to 2, got 3"),
    (("all_gather", None, 3), {"root": 1}, "all_gather has no root, got root=1"),
    (("permute", None, 3), {}, "pairs belong to permute"),
    (("all_gather", None, 3), {"pairs": []}, "pairs belong to permute"),
    (("permute", None, 3), {"pairs": [(0, 3)]}, r"from 0 to 2; got \(0, 3\)"),
    (("permute", None, 3), {"pairs": [(0, 1), (2, 1)]}, "position 1 as target of more than one pair"),
    (("permute", None, 3), {"pairs": [(0, 1), (0, 2)]}, "position 0 as source of more than one pair"),
])
def test_what_does_not_apply_is_named(arguments, options, words):
    with pytest.raises(ValueError, match=words):
        algorithm(*arguments, **options)


def test_names_that_apply():
    assert algorithms("all_reduce", 8)[0] == "direct" and "halving_doubling" in algorithms("all_reduce", 8)
    assert "halving_doubling" not in algorithms("reduce_scatter", 6)
    for collective, size in itertools.product(COLLECTIVES, (1, 3, 4)):
        assert algorithms(collective, size)[0] == "direct"
