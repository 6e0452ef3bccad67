"""Products as values: which policy layouts are, what is planned, and what is refused.  No device is started."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest

from parallelism import Mesh, TensorSharding
from tensor_parallelism import (
    Contraction,
    FeedForward,
    FeedForwardSharding,
    FeedForwardShardingPolicy,
    MatMul,
    MatMulSharding,
    MatMulShardingPolicy,
    Seconds,
)
from tensor_parallelism.products import Task, choice, product_plan

T, P, F = TensorSharding, MatMulShardingPolicy, FeedForwardShardingPolicy
WHOLE = T(None, None)


def some_layout(rng, mesh):
    """Each axis over a dim, partial, or over nothing."""
    places = [[], [], [], []]
    for axis in rng.sample(mesh.axes, len(mesh.axes)):
        rng.choice(places).append(axis)
    return T(*map(tuple, places[:2]), partial=tuple(places[2]), op=rng.choice(["sum", "sum", "max"]))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("lhs", "rhs", "policy"),
    [
        (WHOLE, WHOLE, P.UNSHARDED),
        (T(...), T(...), P.UNSHARDED),
        (T(None, "x"), T("x", None), P.MATCHED_INNER),
        (T(None, ("x", "y")), T(("x", "y"), None), P.MATCHED_INNER),
        (T(None, None, "x"), T("x", None), P.MATCHED_INNER),
        (T(None, "x"), T("y", None), P.UNMATCHED_INNER),
        (T("x", "y"), T("x", None), P.OUTER),
        (T("x", "y"), T("x", "y"), P.FULL),
        (T("x", ("y", "z")), T("x", ("y", "z")), P.FULL),
        (T(None, ("x", "y")), T(("y", "x"), None), P.GENERAL),      # the same axes in another order
        (T(None, "x"), T(("x", "y"), None), P.GENERAL),
        (T("x", "y"), T("y", "x"), P.GENERAL),
        (T("x", None), WHOLE, P.GENERAL),
        (WHOLE, T(None, "y"), P.GENERAL),
        (T("x", None, None), WHOLE, P.GENERAL),                     # a batch dim
        (T(None, None, partial="x"), WHOLE, P.GENERAL),
    ],
)
def test_a_pair_of_layouts_has_one_policy(lhs, rhs, policy):
    sharding = MatMulSharding(lhs, rhs, WHOLE)
    assert sharding.policy is policy
    assert copy.deepcopy(sharding) == sharding
    assert hash(sharding) == hash(MatMulSharding(lhs, rhs, WHOLE))


@pytest.mark.parametrize(
    ("made", "kind", "text"),
    [
        (lambda: MatMulSharding("x", WHOLE, WHOLE), TypeError, "lhs of a MatMulSharding is a TensorSharding, got 'x'"),
        (lambda: MatMulSharding(WHOLE, T("x"), WHOLE), ValueError, "rhs of a MatMulSharding is of at least 2 dims"),
        (lambda: MatMul(WHOLE), TypeError, "MatMul takes a MatMulSharding"),
        (lambda: MatMul(MatMulSharding(WHOLE, T("x", None), WHOLE), policy=P.OUTER), ValueError,
         r"policy=OUTER needs layouts of that policy, .*rhs=TensorSharding\('x', None\) are GENERAL"),
        (lambda: FeedForward(FeedForwardSharding.megatron("x"), F.SEQUENCE), ValueError,
         "policy=SEQUENCE needs layouts of that policy, .* is MEGATRON"),
        (lambda: FeedForward(FeedForwardSharding.megatron("x"), activation="gleu"), ValueError,
         "activation is one of .*gelu.*, got 'gleu'"),
        (lambda: FeedForwardSharding(T(None, None, partial="x"), WHOLE, T(None), WHOLE, T(None),
                                     T(None, None, partial="x", op="max")), ValueError, "may have a pending sum, but"),
        (lambda: FeedForwardSharding(WHOLE, T("x"), T(None), WHOLE, T(None), WHOLE), ValueError,
         "w1 of a FeedForwardSharding is of at least 2 dims"),
    ],
)
def test_a_description_that_cannot_be_is_refused_when_it_is_made(made, kind, text):
    with pytest.raises(kind, match=text):
        made()


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        ((6, 8), (7, 10), r"A of shape \(6, 8\) and B of shape \(7, 10\) cannot be multiplied: .*dim k is 8 .* and 7"),
        ((6,), (6, 2), r"A of a MatMul is of at least 2 dims, got shape \(6,\)"),
        ((2, 6, 8), (3, 8, 4), r"A of shape \(2, 6, 8\) and B of shape \(3, 8, 4\)"),
        ((3, 6, 8), (8, 4), r"A of shape \(3, 6, 8\) and lhs=TensorSharding\('x', None\)"),
        ((6, 8), (8, 4), r"B of shape \(8, 4\) and rhs=TensorSharding\('z', None\): .*'z'.*'x', 'y'"),
    ],
)
def test_operands_that_do_not_fit_are_refused_on_the_host(a, b, text):
    operation = MatMul(MatMulSharding(T("x", None), T("z", None), WHOLE))
    with pytest.raises(ValueError, match=text):
        operation.inputs(Mesh(x=2, y=3), np.zeros(a), np.zeros(b))


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        (((2, 3, 5), (6, 7), (7,), (7, 5), (5,)), r"x of shape \(2, 3, 5\) and w1 of \(6, 7\)"),
        (((2, 3, 6), (6, 7), (7,), (8, 5), (5,)), r"w1 of shape \(6, 7\) and w2 of \(8, 5\)"),
        (((2, 3, 6), (6, 7), (6,), (7, 5), (5,)), r"b1 is of shape \(7,\) .*, got \(6,\)"),
        (((2, 3, 6), (6, 7), (7,), (7, 5), (5, 1)), r"b2 is of shape \(5,\) .*, got \(5, 1\)"),
        (((3, 6), (6, 7), (7,), (7, 5), (5,)), r"x of shape \(3, 6\) and x=TensorSharding"),
    ],
)
def test_arrays_that_do_not_fit_a_feed_forward_are_refused_on_the_host(shapes, text):
    operation = FeedForward(FeedForwardSharding.sequence("x"))
    with pytest.raises(ValueError, match=text):
        operation.inputs(Mesh(x=2), *map(np.zeros, shapes))


@pytest.mark.parametrize("layout", [T("x", None), T(None, "x")], ids=["rows", "inner"])
@pytest.mark.parametrize("dtype", ["O", "U1", "M8[s]", "i4,i4"])
def test_arrays_that_hold_no_numbers_are_refused_on_the_host(dtype, layout):
    operation, numbers, others = MatMul(MatMulSharding(layout, WHOLE, WHOLE)), np.ones((4, 4)), np.empty((4, 4), dtype)
    for name, operands in (("lhs", (others, numbers)), ("rhs", (numbers, others))):
        with pytest.raises(TypeError) as caught:
            operation.inputs(Mesh(x=2), *operands)
        assert str(caught.value) == (
            f"{name} of a MatMul takes numbers or bools, got an array of dtype {others.dtype}; convert it first, as by "
            f"{name}.astype(np.float64)")


def test_the_plan_of_a_feed_forward_is_shown_in_a_notebook_with_its_names_escaped():
    operation = FeedForward(FeedForwardSharding.megatron("<b>"))
    page = operation.plan(((2, 3, 6), (6, 8), (8, 6)), Mesh(**{"<b>": 2}))._repr_html_()
    assert "<b>" not in page
    assert ">y = act(x W1 + b1) W2 + b2 on Mesh(&lt;b&gt;=2)" in page


def test_the_named_layouts_of_a_feed_forward_have_their_policies():
    made = {
        F.UNSHARDED: [FeedForwardSharding.unsharded()],
        F.MEGATRON: [FeedForwardSharding.megatron("x"), FeedForwardSharding.megatron(("x", "y"), "z")],
        F.SEQUENCE: [FeedForwardSharding.sequence("x"), FeedForwardSharding.sequence("x", ("y", "z"))],
        F.ROWS: [FeedForwardSharding.rows("x"), FeedForwardSharding.rows("x", ("y", "z")),
                 FeedForwardSharding.rows((), batch="x"), FeedForwardSharding.rows("x", "y", "z")],
        F.GSPMD_2D: [FeedForwardSharding.gspmd_2d("x", "y"), FeedForwardSharding.gspmd_2d(("x", "z"), "y")],
    }
    for policy, shardings in made.items():
        assert [sharding.policy for sharding in shardings] == [policy] * len(shardings)
    rows = FeedForwardSharding(WHOLE, T(None, "x"), T("x"), T("x", None), T(None), WHOLE)
    assert rows.policy is F.MEGATRON                    # without a sequence
    assert FeedForwardSharding(T("y", None), *(T(...),) * 4, T("y", None)).policy is F.ROWS
    for shared in (FeedForwardSharding.rows(("x", "y"), "x"), FeedForwardSharding.rows("x", "y", "y")):
        assert shared.policy is F.GENERAL
    mixed = FeedForwardSharding(WHOLE, T(None, "x"), T("y"), T("x", None), T(None), WHOLE)
    assert mixed.policy is F.GENERAL


def test_a_plan_tells_what_runs_and_why():
    sharding = MatMulSharding(T(None, "x"), T("x", None), T("x", None))
    asked = MatMul(sharding, policy=P.MATCHED_INNER).plan(((6, 8), (8, 10)), Mesh(x=2, y=3))
    assert str(asked).splitlines() == [
        "C[m, n] = A[m, k] B[k, n] on Mesh(x=2, y=3): matched_inner, as asked for",
        "  A [None, x] as it is",
        "  B [x, None] as it is",
        "  multiply with k over x: 2880 flops; a sum over x is pending",
        "  C [None, None] partial=x -> [x, None]: 1440 bytes",
        "    reduce_scatter  over x  dim 0  6x10 -> 3x10  1440 bytes",
        "  in all 1440 bytes, 2880 flops",
    ]
    page = asked._repr_html_()
    assert "<pre>" in page
    assert "[x, None] -&gt;" not in page
    assert "-&gt; [x, None]: 1440 bytes" in page
    chosen = MatMul(sharding).plan(((6, 8), (8, 10)), Mesh(x=2, y=3))
    assert "the cheapest of" in str(chosen)
    assert chosen.cost <= asked.cost


@pytest.mark.sampled(9, 4)
@pytest.mark.parametrize("mesh", [Mesh(x=2, y=3), Mesh(x=3, y=2), Mesh(x=1, y=2)], ids=repr)
@pytest.mark.parametrize("shapes", [((6, 12), (12, 18)), ((1, 7), (7, 5)), ((40, 2), (2, 3))])
def test_the_choice_never_receives_more_than_a_named_policy(mesh, shapes):
    for lhs, rhs in (
        (WHOLE, WHOLE), (T(None, "x"), T("x", None)), (T(None, "x"), T("y", None)), (T("x", "y"), T("x", None)),
        (T("x", "y"), T("x", "y")),
    ):
        for out in (WHOLE, T("x", "y"), T("y", "x"), T(None, ("x", "y"))):
            sharding = MatMulSharding(lhs, rhs, out)
            named = MatMul(sharding, policy=sharding.policy).plan(shapes, mesh)
            assert MatMul(sharding).plan(shapes, mesh).cost[:2] <= named.cost[:2]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_no_way_receives_less_than_the_bound_by_which_ways_are_left_out(seed):
    rng = random.Random(seed)
    mesh = Mesh(x=2, y=rng.choice([1, 2, 3]), z=rng.choice([1, 2]))
    m, k, n = (rng.choice([0, 1, 2, 3, 5, 8]) for _ in range(3))
    task = Task(Contraction.matmul(2, 2), *(some_layout(rng, mesh) for _ in range(3)), (m, k), (k, n), np.dtype("f8"),
                mesh)
    costs = []
    for way in choice._candidates(task):
        plan = product_plan(task, *way)
        for least, move in zip(choice._least_received(task, way), plan.moves, strict=True):
            assert 0 <= least <= sum(move.bytes_received), str(plan)
        assert plan.cost[1] == sum(plan.flops)
        costs.append(plan.cost)
    assert choice.cheapest_product(task).cost == min(costs)
    priced = choice.cheapest_product(task, Seconds(1.0, 3.0)).cost
    assert priced[1] + priced[0] / 3 == min(flops + nbytes / 3 for nbytes, flops, _ in costs)


def test_by_the_seconds_of_a_machine_flops_that_are_repeated_are_not_free():
    """Fewest bytes: both operands gathered, everything multiplied by all.  Fewest seconds: a share each."""
    sharding = MatMulSharding(T(None, "x"), T("y", None), WHOLE)
    mesh, shapes, rates = Mesh(x=2, y=4), ((4096, 2048), (2048, 4096)), Seconds(2e11, 2e10)
    fewest = MatMul(sharding).plan(shapes, mesh, np.float32)
    assert fewest.kinds == ("all_gather", "all_gather")
    quickest = MatMul(sharding, cost=rates).plan(shapes, mesh, np.float32)
    assert sum(fewest.flops) == 8 * sum(quickest.flops)
    assert rates(*quickest.cost[:2]) < rates(*fewest.cost[:2]) / 4
    named = MatMul(sharding, policy=P.UNMATCHED_INNER, cost=rates)
    assert named.plan(shapes, mesh, np.float32).kinds == fewest.kinds
    assert repr(named).endswith("cost=Seconds(flops_per_second=200000000000.0, bytes_per_second=20000000000.0))")
    for plan in MatMul(sharding, cost=rates).gradient_plans(shapes, mesh, np.float32):
        assert sum(plan.flops) == sum(quickest.flops)


@pytest.mark.parametrize(("rates", "text"), [
    ((0, 1), "flops_per_second is a rate above 0, got 0"), ((1, -2.5), "bytes_per_second is a rate above 0, got -2.5"),
])
def test_a_rate_that_is_none_is_refused(rates, text):
    with pytest.raises(ValueError, match=text):
        Seconds(*rates)


def test_a_sum_that_is_pending_goes_through_a_product():
    sharding = MatMulSharding(T(None, None, partial="x"), WHOLE, T(None, None, partial="x"))
    plan = MatMul(sharding).plan(((6, 8), (8, 10)), Mesh(x=4))
    assert plan.kinds == ()


def test_the_gradients_of_a_contraction_are_contractions():
    matmul = Contraction.matmul(3, 2)
    assert [str(c) for c in (matmul, matmul.lhs_gradient, matmul.rhs_gradient)] == [
        "amk,kn->amn", "amn,kn->amk", "amk,amn->kn",
    ]
    assert matmul.letters == "amnk"
    assert matmul.flops({"a": 2, "m": 3, "k": 5, "n": 7}) == 2 * 2 * 3 * 5 * 7
