"""Plans from one layout to another: what they arrive at, what they cost, what they hold on the way."""

import heapq
import itertools
import json
import os
import pickle
import random
from collections import Counter

import numpy as np
import pytest
from drawn import up_to
from hypothesis import given, settings, strategies as st
from layouts import blocks, largest, layouts, meshes, shapes, terms
from numpy.testing import assert_array_equal
from paths import DATA
from plan_runs import play

from parallelism import Mesh, ReshardingPlan, TensorSharding, plan_resharding
from parallelism.resharding.search import _of_form

T = TensorSharding
MANY = int(os.environ.get("VCLUSTER_RESHARDINGS", "1500"))
KNOWN = json.loads((DATA / "resharding.json").read_text())
"""Plans and counts from rtjoa/partir-redistribution-ocaml (lib/redistribute.ml) and from torch's DTensor tests."""

SUMS = ("sum", "prod")


@st.composite
def reshardings(draw, most_axes=3, partial=True):
    """A mesh, a shape, two layouts of it."""
    mesh, shape = draw(meshes(most_axes)), draw(shapes())
    make = layouts(mesh, len(shape), partial=partial, ops=SUMS)
    return mesh, shape, draw(make), draw(make)


def kinds(plan):
    return [step.kind for step in plan.steps]


def cost(plan):
    return plan.communications, sum(plan.bytes_received)


def check(mesh, shape, source, target, seed=0):
    """The plan does what it says, and says what it may."""
    plan = plan_resharding(source, target, shape, np.int64, mesh)
    x = np.random.default_rng(seed).integers(1, 9, shape)
    arrays, received, peaks = play(plan, source.shard(x, mesh))
    for found, expected in zip(arrays, target.shard(x, mesh), strict=True):
        assert_array_equal(found, expected)
    assert [step.bytes_received for step in plan.steps] == received
    assert plan.bytes_received == tuple(map(sum, zip((0,) * mesh.size, *received, strict=True)))
    assert plan.peak_bytes == tuple(peaks)
    assert max(plan.peak_bytes) <= 8 * max(largest(source, shape, mesh), largest(target, shape, mesh))
    if source.partial and source.op == "sum":
        arrays, _, _ = play(plan, terms(source, x, mesh, seed))
        assert_array_equal(target.unshard(arrays, mesh), x)
    return plan


# -- what holds for all ------------------------------------------------------------------------------------------------


@given(reshardings(), st.integers(0, 99))
@up_to(120)
def test_a_plan_arrives_within_the_bound_and_moves_the_bytes_it_says(drawn, seed):
    check(*drawn, seed)


@pytest.mark.slow
@given(reshardings(4), st.integers(0, 99))
@settings(max_examples=MANY)
def test_so_do_very_many_plans(drawn, seed):
    check(*drawn, seed)


@given(reshardings())
@up_to(40)
def test_there_and_back_is_the_identity(drawn):
    mesh, shape, source, target = drawn
    x = np.arange(np.prod(shape)).reshape(shape)
    start = source.shard(x, mesh)
    there, _, _ = play(plan_resharding(source, target, shape, np.int64, mesh), start)
    back, _, _ = play(plan_resharding(target, source, shape, np.int64, mesh), there)
    for found, expected in zip(back, start, strict=True):
        assert_array_equal(found, expected)


@given(reshardings(), st.data())
@up_to(60)
def test_the_plan_for_a_transposed_tensor_is_the_transposed_plan(drawn, data):
    mesh, shape, source, target = drawn
    order = data.draw(st.permutations(range(len(shape))))

    def transposed(layout):
        return TensorSharding(*(layout.dims[dim] for dim in order), partial=layout.partial, op=layout.op)

    plan = plan_resharding(source, target, shape, np.float32, mesh)
    other = plan_resharding(transposed(source), transposed(target), [shape[dim] for dim in order], np.float32, mesh)
    assert [(step.kind, set(step.axes)) for step in other.steps] == [(step.kind, set(step.axes)) for step in plan.steps]
    assert other.bytes_received == plan.bytes_received and other.peak_bytes == plan.peak_bytes


def test_blocks_of_several_dims_travel_in_the_order_of_the_mesh():
    mesh = Mesh(x=2, y=3)
    for source, target in ((("y", "x"), (None, None)), (("x", "y"), (None, None))):
        step, = plan_resharding(TensorSharding(*source), TensorSharding(*target), (6, 6), np.float32, mesh).steps
        assert (step.kind, step.axes) == ("all_gather", ("x", "y"))
    step, = plan_resharding(TensorSharding(("y", "x"), None), TensorSharding(None, None), (6, 6), "f4", mesh).steps
    assert step.axes == ("y", "x")
    step, = plan_resharding(TensorSharding(None, None, partial=("x", "y")), TensorSharding("y", "x"), (6, 6), "f4",
                            mesh).steps
    assert (step.kind, step.axes) == ("reduce_scatter", ("x", "y"))


@given(reshardings())
@up_to(30)
def test_a_layout_is_already_itself(drawn):
    mesh, shape, source, _ = drawn
    plan = plan_resharding(source, source, shape, np.float32, mesh)
    assert plan.steps == ()
    assert plan.bytes_received == (0,) * mesh.size
    assert plan.axes == ()
    assert "nothing moves" in str(plan)


@given(reshardings(2))
@up_to(30)
def test_consecutive_gathers_and_reductions_are_one(drawn):
    plan = plan_resharding(drawn[2], drawn[3], drawn[1], np.int8, drawn[0])
    for one, other in itertools.pairwise(kinds(plan)):
        assert one != other or one == "all_to_all", str(plan)


# -- the cheapest ------------------------------------------------------------------------------------------------------


def every_layout(mesh, ndim):
    """All layouts of so many dims, none of them partial."""
    found = {}
    for order in itertools.permutations(mesh.axes):
        for places in itertools.product(range(ndim + 1), repeat=len(order)):
            dims = [tuple(axis for axis, place in zip(order, places, strict=True) if place == d) for d in range(ndim)]
            found[T(*dims)] = None
    return list(found)


def one_move(before, after, where, mesh):
    """The elements that one move but an exchange brings (0 for a local one); None if there is none."""
    old, new = (where[layout] for layout in (before, after))
    axes = [(a.axes, b.axes) for a, b in zip(before.dims, after.dims, strict=True)]
    received = sum(len(b - a) for a, b in zip(old, new, strict=True))
    if all(b <= a for a, b in zip(old, new, strict=True)):
        return 0
    if all(a[: len(b)] == b for a, b in axes):
        return received     # all_gather
    changed = [(a, b) for a, b in axes if a != b]
    if len(changed) == 2:
        (a, b), (c, d) = sorted(changed, key=lambda pair: len(pair[1]) - len(pair[0]))
        moved = a[len(b):]
        if a == b + moved and d == c + moved and moved:
            return received     # all_to_all
    if Counter(filter(None, old)) == Counter(filter(None, new)):
        return sum(len(b) for a, b in zip(old, new, strict=True) if a != b)     # permute
    return None


def by_search(mesh, shape):
    """For each pair of layouts the fewest (communications, elements) of any sequence of moves within the bound."""
    every = every_layout(mesh, len(shape))
    where = {layout: [frozenset(block.flat) for block in blocks(layout, shape, mesh)] for layout in every}
    size = {layout: max(map(len, where[layout])) for layout in every}
    moves = {
        layout: [(other, n) for other in every if other != layout
                 for n in [one_move(layout, other, where, mesh)] if n is not None]
        for layout in every
    }

    def fewest(source, target):
        bound = max(size[source], size[target])
        waiting, done = [(0, 0, 0, source)], set()
        tie = itertools.count(1)
        while waiting:
            communications, elements, _, layout = heapq.heappop(waiting)
            if layout == target:
                return communications, elements
            if layout in done:
                continue
            done.add(layout)
            for other, received in moves[layout]:
                if size[other] <= bound and other not in done:
                    told = communications + (received > 0), elements + received
                    heapq.heappush(waiting, (*told, next(tie), other))
        return None     # no sequence: it takes an exchange

    return every, fewest


def assert_cheapest(mesh, shape, sample):
    every, fewest = by_search(mesh, shape)
    pairs = list(itertools.product(every, repeat=2))
    for source, target in random.Random(len(every)).sample(pairs, min(sample, len(pairs))):
        plan = plan_resharding(source, target, shape, np.int8, mesh)
        expected = fewest(source, target)
        if expected is None:
            assert kinds(plan) == ["exchange"]
        else:
            assert "exchange" not in kinds(plan), str(plan)
            assert cost(plan) == expected, str(plan)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("mesh", "shape"), [
    (Mesh(x=2, y=3), (6, 5)), (Mesh(x=2, y=2), (4, 6)), (Mesh(x=4, y=2), (5, 3)), (Mesh(x=2, y=2), (3, 1, 2)),
    (Mesh(x=2, y=3), (7,)), (Mesh(x=2, y=3, z=2), (8,)), (Mesh(x=2, y=2, z=2), (5,)), (Mesh(x=3, y=4), (8, 2)),
], ids=str)
def test_no_other_sequence_of_moves_is_cheaper(mesh, shape):
    assert_cheapest(mesh, shape, 60)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "shape"), [
    (Mesh(x=2, y=3, z=2), (12, 5)), (Mesh(x=2, y=2, z=2), (4, 6)), (Mesh(x=4, y=2, z=3), (8, 3)),
    (Mesh(x=2, y=2, z=3), (3, 7)), (Mesh(x=4, y=2), (4, 5, 3)), (Mesh(x=3, y=3, z=2), (2, 9)),
], ids=str)
def test_nor_on_three_axes(mesh, shape):
    assert_cheapest(mesh, shape, 400)


def ranked(*plans):
    """By what plans are compared, added up: exchanges, communications, bytes."""
    counts = ((kinds(plan).count("exchange"), *cost(plan)) for plan in plans)
    return tuple(map(sum, zip(*counts, strict=True)))


def assert_triangle(mesh, shape, choose):
    """Going by way of a third layout within the same bound is never cheaper than the plan, exchanges counted first."""
    a, b, c = choose(), choose(), choose()
    size = {layout: largest(layout, shape, mesh) for layout in (a, b, c)}
    if size[b] <= max(size[a], size[c]):
        first, second, straight = (plan_resharding(*pair, shape, np.int8, mesh) for pair in ((a, b), (b, c), (a, c)))
        assert ranked(straight) <= ranked(first, second), f"{straight}\n{first}\n{second}"


@pytest.mark.parametrize(("mesh", "shape", "layouts"), [
    (Mesh(x=3, y=4), (8, 14), (T(None, "y"), T("x", "y"), T("y", "x"))),
    (Mesh(x=2, y=4), (13, 2), (T("x", None), T("x", "y"), T(("y", "x"), None))),
    (Mesh(x=4, y=3, z=2), (8, 11), (T("y", ("x", "z")), T("z", ("x", "y")), T(("z", "y"), None))),
], ids=str)
def test_only_an_exchange_that_the_plan_does_without_makes_another_way_shorter(mesh, shape, layouts):
    a, b, c = layouts
    first, second, straight = (plan_resharding(*pair, shape, np.int8, mesh) for pair in ((a, b), (b, c), (a, c)))
    assert tuple(map(sum, zip(cost(first), cost(second), strict=True))) < cost(straight)
    assert "exchange" in (*kinds(first), *kinds(second))
    assert "exchange" not in kinds(straight)
    assert_triangle(mesh, shape, iter(layouts).__next__)


@given(meshes(3), shapes(2), st.data())
@up_to(60)
def test_going_by_way_of_a_third_layout_is_never_cheaper(mesh, shape, data):
    assert_triangle(mesh, shape, lambda: data.draw(layouts(mesh, len(shape), ops=SUMS)))


@pytest.mark.slow
@given(meshes(3), shapes(3, 13), st.data())
@settings(max_examples=MANY)
def test_nor_is_it_for_very_many(mesh, shape, data):
    assert_triangle(mesh, shape, lambda: data.draw(layouts(mesh, len(shape), ops=SUMS)))


# -- known plans -------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", KNOWN["rink"]["cases"], ids=lambda case: case["name"])
def test_no_more_communications_than_memory_efficient_redistribution_needs(case):
    """Rink et al., *Memory-efficient array redistribution through portable collective communication*."""
    mesh = Mesh(**case["mesh"])
    source, target = (T(*(tuple(reversed(dim["axes"])) for dim in case[end])) for end in ("src", "dst"))
    shape = tuple(dim["glob"] for dim in case["src"])
    assert source.local_shape(shape, mesh, 0) == tuple(dim["local"] for dim in case["src"])
    plan = check(mesh, shape, source, target)
    assert plan.communications <= sum(move[0] != "dyn_slice" for move in case["plan"])
    assert "exchange" not in kinds(plan)


def placed(case):
    """The mesh and the layouts of a case of DTensor's, which says for each axis the dim that it splits."""
    mesh = Mesh(**dict(zip("xyz", case["mesh"], strict=False)))
    placements = (f"[{', '.join('R' if p == 'R' else f'S({p})' for p in case[end])}]" for end in ("src", "dst"))
    return mesh, *(T.parse(text, mesh).over(case["tensor_rank"]) for text in placements)


WITH_PERMUTE = {
    "S0S1->S1S0": 1, "S0S1S0->S1S0S0": 1, "S0S1S2->S2S1S0": 1, "S0S0->S1S1": 3, "S0S0S0->S1S1S1": 4,
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", KNOWN["dtensor_greedy"], ids=lambda case: f"{case['src']}{case['dst']}")
@pytest.mark.parametrize("shape", [(8, 8, 8), (7, 9, 5)])
def test_no_more_communications_than_dtensor_makes(case, shape):
    mesh, source, target = placed(case)
    plan = check(mesh, shape[: case["tensor_rank"]], source, target)
    short = "->".join("".join(f"S{dim}" for dim in case[end]) for end in ("src", "dst"))
    assert plan.communications <= min(case["comm_count"], WITH_PERMUTE.get(short, 9))
    assert "exchange" not in kinds(plan)


def test_the_counts_with_permute_are_those_recorded():
    recorded = KNOWN["with_permute"]
    assert {name: recorded[name] for name in WITH_PERMUTE} == WITH_PERMUTE
    assert recorded.keys() - WITH_PERMUTE == {"S0[0,1,2]->S0[1,2]", "S0[1,0,2]->S0[1,2]", "S0[1,0,2]->S0[0,1]"}


@pytest.mark.parametrize(("source", "target"), [
    (("x", "y", "z"), ("y", "z")), (("y", "x", "z"), ("y", "z")), (("y", "x", "z"), ("x", "y")),
])
def test_an_axis_inside_is_brought_out_by_one_permutation_and_gathered(source, target):
    plan = check(Mesh(x=2, y=2, z=2), (8, 8, 8), T(source, None, None), T(target, None, None))
    assert kinds(plan) == ["permute", "all_gather"]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("source", "target", "expected"), [
    (T("x", None), T(None, None), ["all_gather"]),
    (T(None, None), T("x", None), ["slice"]),
    (T(None, None, partial="x"), T(None, None), ["all_reduce"]),
    (T(None, None, partial="x"), T("x", None), ["reduce_scatter"]),
    (T("x", None), T(None, "x"), ["all_to_all"]),
    (T(None, None), T(None, None, partial="x"), ["slice"]),
    (T("x", None), T(None, None, partial="x"), ["all_gather", "slice"]),
    (T(None, None, partial="x"), T(None, None, partial="x"), []),
    (T(None, None, partial="x"), T(None, None, partial="x", op="max"), ["all_reduce", "slice"]),
    (T(("x", "y"), None), T(None, None), ["all_gather"]),
    (T("x", "y"), T(None, None), ["all_gather"]),
    (T(None, None, partial=("x", "y")), T(None, None), ["all_reduce"]),
    (T(None, None, partial=("x", "y")), T(("y", "x"), None), ["reduce_scatter"]),
    (T(None, None, partial=("x", "y")), T("x", "y"), ["reduce_scatter"]),
    (T(None, None, partial=("x", "y")), T("x", None, partial="y"), ["reduce_scatter"]),
    (T(None, None, partial="x"), T(None, None, partial=("x", "y")), ["slice"]),
    (T(("x", "y"), None), T(None, ("x", "y")), ["all_to_all"]),
    (T("x", None), T(("x", "y"), None), ["slice"]),
])
@pytest.mark.parametrize("shape", [(6, 12), (7, 5), (1, 3)])
def test_what_one_move_does_is_done_by_it(source, target, expected, shape):
    mesh = Mesh(x=2, y=3)
    plan = check(mesh, shape, source, target) if "max" not in (source.op, target.op) else plan_resharding(
        source, target, shape, np.int64, mesh)
    assert kinds(plan) == expected


def test_axes_of_equal_extent_are_exchanged_by_one_permutation():
    plan = check(Mesh(x=2, y=2), (5, 7), T("x", "y"), T("y", "x"))
    assert kinds(plan) == ["permute"]
    assert plan.steps[0].donors == (0, 2, 1, 3)
    assert plan.bytes_received == (0, 8 * 2 * 4, 8 * 3 * 3, 0)
    assert kinds(check(Mesh(x=4, y=2, z=2), (8,), T("x"), T(("y", "z")))) == ["permute"]
    assert kinds(check(Mesh(x=2, y=2), (5,), T("x"), T("y"))) == ["permute"]


def test_terms_change_hands_like_blocks():
    plan = check(Mesh(x=2, y=2), (5, 3), T("y", None, partial="x"), T("x", None, partial="y"))
    assert kinds(plan) == ["permute"]


def test_slices_come_first():
    plan = check(Mesh(x=2, y=3), (6,), T("x"), T("y"))
    assert kinds(plan) == ["slice", "permute", "all_gather"]
    assert plan.peak_bytes == (24,) * 6


def test_an_exchange_is_taken_only_where_nothing_else_fits():
    apart = check(Mesh(x=2, y=3), (8,), T("x"), T("y"))
    assert kinds(apart) == ["exchange"], "the pieces over x, y and over y, x differ, and all is more than 4"
    assert kinds(check(Mesh(x=2, y=3), (8, 5), T("x", None), T("y", None))) == ["slice", "all_gather", "all_to_all"]


def test_what_is_pending_is_reduced_before_an_exchange_unless_it_may_stay():
    mesh = Mesh(x=2, y=3, z=2)
    assert kinds(check(mesh, (14,), T("x", partial="z"), T("y"))) == ["slice", "reduce_scatter", "exchange"]
    assert kinds(check(mesh, (14,), T("x", partial="z"), T("y", partial="z"))) == ["exchange"]


# -- what counts for nothing -------------------------------------------------------------------------------------------


def test_axes_of_extent_1_change_nothing():
    mesh = Mesh(x=2, one=1, y=3, other=1)
    assert check(mesh, (7, 5), T("x", None), T(("one", "x"), "other")).steps == ()
    assert check(mesh, (7, 5), T("x", None, partial="one"), T("x", None)).steps == ()
    plan = check(mesh, (7, 5), T(("one", "x"), None), T(None, ("x", "other")))
    assert kinds(plan) == ["all_to_all"]
    assert plan.steps[0].axes == ("x",)
    assert (plan.steps[0].before, plan.steps[0].after) == (T(("one", "x"), None), T(None, ("x", "other")))


def test_tensors_without_elements_and_scalars():
    mesh = Mesh(x=2, y=3)
    assert check(mesh, (0, 4), T("x", None), T(None, "y")).bytes_received == (0,) * 6
    assert kinds(check(mesh, (), T(partial="x"), T())) == ["all_reduce"]
    assert check(mesh, (), T(), T()).steps == ()


def test_a_block_by_another_name_moves_nothing():
    """One element over x, then y: rank 0 has it; over y, then x: rank 0 has it."""
    assert check(Mesh(x=2, y=3), (1,), T(("x", "y")), T(("y", "x"))).communications == 0


def test_nothing_moves_along_axes_that_are_left_out():
    """The eight elements need z to be brought from x to y without an exchange; stages on z have no part in it."""
    mesh, shape = Mesh(z=2, x=2, y=3), (8,)
    assert plan_resharding(T("x"), T("y"), shape, np.int8, mesh).axes == ("z", "x", "y")
    plan = plan_resharding(T("x"), T("y"), shape, np.int8, mesh, axes=("y", "x"))
    assert kinds(plan) == ["exchange"]
    assert plan.axes == ("x",)
    x = np.arange(8)
    arrays, received, _ = play(plan, T("x").shard(x, mesh)[:6] + T("x").shard(x + 50, mesh)[6:])
    assert received == [plan.bytes_received]
    for rank, expected in enumerate(T("y").shard(x, mesh)):
        assert_array_equal(arrays[rank], expected + 50 * (rank >= 6))
    with pytest.raises(ValueError, match=r"target of a resharding along \('x',\): .* names axis 'y'"):
        plan_resharding(T("x"), T("y"), shape, np.int8, mesh, axes="x")
    with pytest.raises(ValueError, match="has no axis 'q'"):
        plan_resharding(T("x"), T("y"), shape, np.int8, mesh, axes="q")


# -- meshes of many axes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "source", "target", "most"), [
    ((256, 128), T(("a", "c"), "d"), T("d", ("c", "a")), 2),
    ((256, 128), T(("a", "b", "c"), ("d", "e")), T(("e", "a"), ("b", "c", "d")), 3),
    ((63, 100), T(("a", "c"), "d"), T("d", ("c", "a")), 4),
    ((256, 128, 64), T("a", "b", ("c", "d")), T(("d", "c"), None, "e"), 3),
])
def test_512_devices_on_five_axes(shape, source, target, most):
    mesh = Mesh(a=2, b=4, c=4, d=4, e=4)
    plan = plan_resharding(source, target, shape, np.float32, mesh)
    bound = max(np.prod(layout.local_shape(shape, mesh, 0)) for layout in (source, target)) * 4
    assert max(plan.peak_bytes) <= bound
    assert 1 <= plan.communications <= most
    assert "exchange" not in kinds(plan)


NINE = Mesh(**dict.fromkeys("abcdefghi", 2))


@pytest.mark.parametrize(("source", "target", "expected"), [
    (T(tuple("abcd"), tuple("ghi")), T(tuple("abcd"), tuple("ghi")), []),
    (T("a", None), T(("a", "i"), "b"), ["slice"]),
    (T(tuple("abcde"), tuple("fghi")), T(None, None), ["all_gather"]),
    (T(tuple("abcdefghi"), None), T(None, tuple("abcdefghi")), ["all_to_all"]),
    (T(tuple("abcd"), tuple("efgh")), T(tuple("efgh"), tuple("abcd")), ["permute"]),
    (T(tuple("de"), None, partial=tuple("cba")), T(tuple("dea"), None, partial=("b", "c")), ["reduce_scatter"]),
    (T(None, None, partial=tuple("abc")), T(tuple("de"), None), ["slice", "all_reduce"]),
    (T(tuple("dcba"), tuple("hgfei")), T(tuple("efagh"), tuple("bdci")), ["exchange"]),
    (T(("a", "c"), "h", partial="i"), T(("c", "f"), ("d", "e", "b"), partial="g"), None),
])
def test_axes_that_stay_together_count_as_one_where_there_are_many(source, target, expected):
    plan = plan_resharding(source, target, (64, 48), np.int8, NINE)
    assert expected in (None, kinds(plan))
    bound = max(np.prod(layout.local_shape((64, 48), NINE, 0)) for layout in (source, target))
    assert max(plan.peak_bytes) <= bound


@pytest.mark.slow
@given(st.data())
@settings(max_examples=2)
def test_plans_on_many_axes_do_what_they_say(data):
    mesh = Mesh(a=2, b=1, c=2, d=2, e=1, f=2, g=2, h=2)
    check(mesh, (5, 6), *(data.draw(layouts(mesh, 2, ops=SUMS)) for _ in range(2)))


# -- by price ----------------------------------------------------------------------------------------------------------


def test_a_cost_of_ones_own_decides():
    mesh, shape = Mesh(x=2, y=2, z=2), (8, 6)
    source, target = T(None, None, partial="x"), T("y", None)
    by_bytes = plan_resharding(source, target, shape, "f8", mesh, cost=lambda step: sum(step.bytes_received))
    assert sum(by_bytes.bytes_received) <= sum(plan_resharding(source, target, shape, "f8", mesh).bytes_received)
    dear = plan_resharding(
        T(("x", "y"), None), T(("y", "x"), None), shape, "f8", mesh,
        cost=lambda step: 100.0 if step.kind == "permute" else 1.0,
    )
    assert "permute" not in kinds(dear)
    assert max(dear.peak_bytes) <= 12 * 8


@given(reshardings(2))
@up_to(25)
def test_by_the_default_cost_it_is_the_default_plan(drawn):
    mesh, shape, source, target = drawn
    plan = plan_resharding(source, target, shape, np.int8, mesh)
    priced = plan_resharding(
        source, target, shape, np.int8, mesh, cost=lambda step: 1e9 + sum(step.bytes_received)
    )
    assert cost(priced) == cost(plan)


# -- a value -----------------------------------------------------------------------------------------------------------


def test_it_prints_a_line_for_each_step():
    plan = plan_resharding(T("x"), T("y"), (6,), "f4", Mesh(x=2, y=3))
    assert str(plan) == """\
[x] -> [y] of float32 6 on Mesh(x=2, y=3): 40 bytes in 2 communications
  slice       over y     dim 0                 3 -> 1  local
  permute     over x, y  [(x, y)] -> [(y, x)]  1 -> 1  16 bytes
  all_gather  over x     dim 0                 1 -> 2  24 bytes"""
    assert plan._repr_html_().count("<tr>") == 1 + 3
    assert "nothing moves" in plan_resharding(T("x"), T("x"), (6,), "f4", Mesh(x=2, y=3))._repr_html_()
    hostile = plan_resharding(T("<b>"), T(None), (6,), "f4", Mesh(**{"<b>": 2}))._repr_html_()
    assert "<b>" not in hostile
    assert "over &lt;b&gt;" in hostile
    scalar = plan_resharding(T(partial="x"), T(), (), bool, Mesh(x=2))
    assert str(scalar).endswith("all_reduce  over x  sum  scalar -> scalar  2 bytes")


def test_it_is_a_value():
    arguments = T("x", None), T(None, "x"), (4, 6), np.float64, Mesh(x=2)
    plan = plan_resharding(*arguments)
    assert plan is plan_resharding(*arguments)
    assert isinstance(plan, ReshardingPlan)
    assert pickle.loads(pickle.dumps(plan)) == plan  # noqa: S301
    assert hash(plan) == hash(plan_resharding(T("x", ...), T(None, "x"), [4, 6], "f8", Mesh(x=2)))
    with pytest.raises(AttributeError):
        plan.steps = ()


@pytest.mark.parametrize(("arguments", "words"), [
    ((T("z"), T("x"), (4,)), "^the source of a resharding: .* names axis 'z', but the axes of .* are 'x'$"),
    ((T("x"), T("x", None), (4,)), r"^the target of a resharding: .* has 2 dims, the tensor has 1: shape \(4,\)$"),
    ((T("x"), T("x"), (-4,)), r"an extent cannot be negative, got shape \(-4,\)"),
    ((T("x"), T(None, partial="x", op="max"), (4,), complex), "target of a resharding: a max of complex128 cannot be"),
])
def test_what_does_not_fit_is_refused(arguments, words):
    source, target, shape, dtype = (*arguments, np.float64)[:4]
    with pytest.raises(ValueError, match=words):
        plan_resharding(source, target, shape, dtype, Mesh(x=2))
    with pytest.raises(TypeError, match=r"the target of a resharding must be a TensorSharding or its text.*, got \(0,\)"):
        plan_resharding(T("x"), (0,), (4,), np.float64, Mesh(x=2))


def test_a_layout_may_be_given_as_its_text():
    mesh = Mesh(x=2, y=3)
    plan = plan_resharding("[x, None]", "[None, (y, x)]", (5, 7), "f4", mesh)
    assert plan == plan_resharding(T("x", None), T(None, ("y", "x")), (5, 7), "f4", mesh)
    with pytest.raises(ValueError, match=r"'x' is not a layout: expected axes in brackets, as \[x\], or a dim with an axis"):
        plan_resharding("x", "[None]", (4,), "f4", mesh)                # not the name of a dim that is whole
    assert T.of("A[x, y]", mesh) == T(None, None)                       # of an array by name, x and y are dims


def test_tensors_whose_extents_all_devices_divide_share_one_search():
    mesh, source, target = Mesh(x=2, y=3), TensorSharding("x", "y", None), TensorSharding(None, "x", "y")
    _of_form.cache_clear()
    shapes = (6, 6, 6), (12, 30, 6), (12, 30, 7)
    small, large, uneven = (plan_resharding(source, target, shape, "f8", mesh) for shape in shapes)
    assert _of_form.cache_info().misses == 2      # that of 7 is another
    assert [(step.kind, step.before, step.after) for step in small.steps] == [
        (step.kind, step.before, step.after) for step in large.steps]
    assert [10 * nbytes for nbytes in small.bytes_received] == list(large.bytes_received)
    assert sum(uneven.bytes_received) > sum(large.bytes_received)
