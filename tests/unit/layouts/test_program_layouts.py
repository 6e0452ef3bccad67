"""The strategies of the literature, each as a few annotations: what is said, over which axes, how many bytes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from localized_runs import COLLECTIVES, run_everywhere
from numpy.testing import assert_allclose

from parallelism import Mesh, TensorSharding, ir, models
from parallelism.ir.core import rules, table
from parallelism.layouts import annotate, localize, microbatched, propagate, redistribute

T = ir.TensorType
VOCABULARY, WIDTH, HEADS, LAYERS, SEQUENCE, BATCH = 10, 12, 4, 2, 6, 8
GPT = models.gpt(VOCABULARY, WIDTH, HEADS, LAYERS, SEQUENCE, BATCH)
WEIGHTS = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
SPLIT = {"qkv": "[None, tp]", "out": "[tp, None]", "up": "[None, tp]", "down": "[tp, None]"}
MEGATRON = {f"p.{i}.{name}": layout for i in range(LAYERS) for name, layout in SPLIT.items()}
ROWS = BATCH * SEQUENCE * WIDTH * 8
"""Bytes of an activation between the layers."""
TABLES = (VOCABULARY + SEQUENCE) * WIDTH * 8
NORMS = (2 * LAYERS + 1) * 2 * WIDTH * 8
MATRICES = LAYERS * sum(a * b for a, b in WEIGHTS.values()) * 8


def said(localized, rank=0):
    """What a device takes part in: how often, and the bytes that it receives, by kind and axes."""
    counts, received = Counter(), Counter()
    for op, nbytes in zip(localized.program(rank).ops, localized.received(rank), strict=True):
        if op.kind in COLLECTIVES - {"all_slice"}:
            counts[op.kind, op["axes"]] += 1
            received[op.kind, op["axes"]] += nbytes
        else:
            assert nbytes == 0
    return counts, received


def laid_out(function, layouts, mesh, conflicts=None):
    """Its gradient on a mesh, checked against one process."""
    grad = ir.gradient(annotate(function, layouts), keep_outputs=True)
    localized = localize(propagate(grad, mesh, conflicts), mesh)
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=v.type.shape) if v.type.dtype.kind == "f" else rng.integers(0, 7, v.type.shape)
              for v in function.inputs]
    for found, expected in zip(run_everywhere(localized, arrays), ir.interpret(grad, arrays).outputs, strict=True):
        assert_allclose(found, expected, rtol=1e-9, atol=1e-10)
    return localized


def test_data_parallelism_sums_each_gradient_once():
    conflicts = []
    localized = laid_out(GPT, {"tokens": "[dp, None]"}, Mesh(dp=4), conflicts)
    counts, received = said(localized)
    # the gradient of the tied table is one sum of two, and the loss is the last
    assert counts == {("all_reduce", ("dp",)): len(GPT.inputs) - 2 + 1}
    loss = (4 - 2) * 8 + 8
    assert received == {("all_reduce", ("dp",)): 2 * 3 / 4 * (MATRICES + TABLES + NORMS) + loss}
    assert conflicts == []
    assert localized.inputs[-1] == TensorSharding("dp", None)          # targets, found


def test_a_megatron_block_has_two_all_reduces_forward_and_two_backward():
    conflicts = []
    localized = laid_out(GPT, MEGATRON, Mesh(tp=2), conflicts)
    counts, received = said(localized)
    assert counts == {("all_reduce", ("tp",)): 4 * LAYERS}
    assert received == {("all_reduce", ("tp",)): 4 * LAYERS * 2 * 1 / 2 * ROWS}
    assert conflicts == []
    before = [op.region for op in localized.program(0).ops if op.kind == "all_reduce"]
    assert before == [
        "block.0.attention", "block.0.feed_forward", "block.1.attention", "block.1.feed_forward",
        "gradient.block.1.feed_forward", "gradient.block.1.attention", "gradient.block.0.feed_forward",
        "gradient.block.0.attention",
    ]


def test_data_and_tensor_parallelism_together():
    localized = laid_out(GPT, {**MEGATRON, "tokens": "[dp, None]"}, Mesh(dp=4, tp=2))
    counts, received = said(localized)
    assert counts == {("all_reduce", ("tp",)): 4 * LAYERS, ("all_reduce", ("dp",)): len(GPT.inputs) - 2 + 1}
    assert received["all_reduce", ("tp",)] == 4 * LAYERS * 2 * 1 / 2 * ROWS / 4
    assert received["all_reduce", ("dp",)] == 2 * 3 / 4 * (MATRICES / 2 + TABLES + NORMS) + (4 - 2) * 8 + 8
    gradients = dict(zip([v.name for v in GPT.inputs], localized.outputs[1:], strict=False))
    assert gradients["p.0.qkv"] == TensorSharding(None, "tp")
    assert gradients["p.1.down"] == TensorSharding("tp", None)


def sequence_parallel():
    """Korthikanti et al., arXiv:2205.05198, section 4.2.2: rows by sequence between the blocks, by columns inside."""
    layouts = dict(MEGATRON)
    for op in GPT.ops:
        if op.kind == "matmul":
            inside = op.inputs[1].name.endswith(("out", "down"))
            layouts[op.inputs[0].name] = "[None, None, tp]" if inside else "[None, tp, None]"
            layouts[op.outputs[0].name] = "[None, tp, None]" if inside else "[None, None, tp]"
    head = next(op for op in GPT.ops if op.kind == "einsum" and op.region == "head")
    return {**layouts, head.inputs[0].name: "[None, None, None]"}


def test_sequence_parallelism_gathers_before_the_columns_and_scatters_after_the_rows():
    localized = laid_out(GPT, sequence_parallel(), Mesh(tp=2))
    counts, received = said(localized)
    # forward 2 gathers and 2 scatters a block; backward as many, and what was gathered is gathered again.  Summed are
    # the gradients of the norms and of the table of words; that of the positions is complete where it lies
    blocks = (2 + 2 + 2) * LAYERS
    assert counts["reduce_scatter", ("tp",)] == 4 * LAYERS
    assert received["reduce_scatter", ("tp",)] == 4 * LAYERS * ROWS / 2
    assert counts["all_gather", ("tp",)] == blocks + 1                 # one before the head
    assert received["all_gather", ("tp",)] == (blocks + 1) * ROWS / 2
    assert counts["all_reduce", ("tp",)] == 4 * LAYERS + 2 + 1
    assert set(counts) == {("all_gather", ("tp",)), ("reduce_scatter", ("tp",)), ("all_reduce", ("tp",))}
    assert localized.inputs[1] == TensorSharding("tp", None)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("last", [False, True])
def test_zero_3_gathers_each_weight_forward_and_backward_and_scatters_its_gradient(last):
    """Rajbhandari et al., arXiv:1910.02054, section 7.2.2: 3 (g-1)/g times the weights."""
    def sharded(value):
        rest = ["None"] * (value.type.ndim - 1)
        return f"[{', '.join([*rest, 'dp'] if last else ['dp', *rest])}]"

    layouts = {value.name: sharded(value) for value in GPT.inputs[:-2]}
    localized = laid_out(GPT, {**layouts, "tokens": "[dp, None]"}, Mesh(dp=2))
    counts, received = said(localized)
    assert counts["reduce_scatter", ("dp",)] == len(GPT.inputs) - 2
    assert received["reduce_scatter", ("dp",)] == (MATRICES + TABLES + NORMS) / 2
    assert counts["all_reduce", ("dp",)] == 1                          # the loss
    # the table of words is needed for the embedding, the head and its gradient; the positions forwards only, and of the
    # norms the weights backwards, too
    table, positions = VOCABULARY * WIDTH * 8, SEQUENCE * WIDTH * 8
    assert received["all_gather", ("dp",)] == (2 * MATRICES + 3 * table + positions + 3 * NORMS / 2) / 2
    assert counts["all_gather", ("dp",)] == 2 * 4 * LAYERS + 3 + 1 + 3 * (2 * LAYERS + 1)
    assert localized.inputs[:-2] == localized.outputs[1:]


def step(w, m, x, t):
    """A step of momentum on a linear model, by hand."""
    gradient = x.T @ (x @ w - t)
    m = 0.5 * m + gradient
    return w - 0.25 * m, m


@pytest.mark.parametrize(("optimizer", "weights", "expected"), [
    ("[None, None]", "[None, None]", {"all_reduce": 2}),
    ("[dp, None]", "[None, None]", {"reduce_scatter": 1, "all_gather": 1}),      # ZeRO-1, and 2
    ("[dp, None]", "[dp, None]", {"reduce_scatter": 1, "all_gather": 1}),        # ZeRO-3: before, not after
])
def test_a_step_whose_optimizer_state_is_sharded(optimizer, weights, expected):
    function = ir.record(step, T("f8", (6, 4)), T("f8", (6, 4)), T("f8", (8, 6)), T("f8", (8, 4)))
    mesh = Mesh(dp=2)
    localized = localize(annotate(function, {
        "x": "[dp, None]", "w": weights, "m": optimizer, function.outputs[0].name: weights,
        function.outputs[1].name: optimizer,
    }), mesh)
    _, received = said(localized)
    assert received == {(kind, ("dp",)): count * 6 * 4 * 8 // 2 for kind, count in expected.items()}
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-4, 5, value.type.shape).astype(float) for value in function.inputs]
    for found, expected in zip(run_everywhere(localized, arrays), step(*arrays), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_experts_get_their_rows_by_all_to_alls_two_forward_two_backward():
    mixture = models.mixture(width=6, hidden=10, experts=4, chosen=2, capacity=3, groups=2, tokens=5)
    layouts = {"p.up": "[ep, None, None]", "p.down": "[ep, None, None]", "x": "[ep, None, None]"}
    localized = laid_out(mixture, layouts, Mesh(ep=2))
    counts, received = said(localized)
    rows = 4 * 2 * 3 * 6 * 8                                           # experts, groups, capacity, width
    assert counts["all_to_all", ("ep",)] == 4
    assert received["all_to_all", ("ep",)] == 4 * rows / 2 / 2
    assert counts["all_reduce", ("ep",)] == 2                          # the loss, and the gradient of the router
    assert counts.total() == 6


def test_context_parallelism_gathers_keys_and_values_and_scatters_their_gradients():
    localized = laid_out(GPT, {"tokens": "[None, cp]"}, Mesh(cp=2))
    counts, received = said(localized)
    assert counts["all_gather", ("cp",)] == 4 * LAYERS                 # k and v, forward and again backward
    assert received["reduce_scatter", ("cp",)] == 2 * LAYERS * ROWS / 2


def test_a_loss_over_a_split_vocabulary_takes_sums_of_rows_and_no_logits():
    rows, width, words = 6, 4, 10

    def loss(x, w, targets):
        logits = x @ w
        shifted = logits - np.max(logits, axis=1, keepdims=True)
        places = ir.apply("iota", dim=1, shape=(rows, words), starts=(0, 0), dtype=np.dtype("i8"))
        chosen = np.where(places == targets[:, None], shifted, 0.0)
        return np.mean(np.log(np.sum(np.exp(shifted), axis=1)) - np.sum(chosen, axis=1))

    function = ir.record(loss, T("f8", (rows, width)), T("f8", (width, words)), T("i64", (rows,)))
    localized = localize(annotate(function, {"w": "[None, tp]"}), Mesh(tp=2))
    counts, received = said(localized)
    assert counts == {("all_reduce", ("tp",)): 3}                      # max, sum, what was chosen
    assert received == {("all_reduce", ("tp",)): 3 * rows * 8}
    uneven = localize(annotate(ir.gradient(function, keep_outputs=True), {"w": "[None, tp]"}), Mesh(tp=3))
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(rows, width)), rng.normal(size=(width, words)), rng.integers(0, words, rows)]
    expected = ir.interpret(ir.gradient(function, keep_outputs=True), arrays).outputs
    for a, b in zip(run_everywhere(uneven, arrays), expected, strict=True):
        assert_allclose(a, b, rtol=1e-10)
    assert set(said(uneven)[0]) == {("all_reduce", ("tp",))}


def test_a_region_is_laid_out_by_itself_inside_of_another_strategy():
    part = GPT.region("block.1.feed_forward")
    hidden = next(op for op in part.ops if op.kind == "matmul").outputs[0]
    whole = GPT.replaced("block.1.feed_forward", annotate(part, {hidden: "[None, None, axis]"}))
    localized = laid_out(whole, {"tokens": "[axis, None]"}, Mesh(axis=2))
    forward = [(op.region, op.kind) for op in localized.program(0).ops
               if op.kind in COLLECTIVES and not op.region.startswith("gradient")]
    # over one axis data parallel, and tensor parallel in there; its weights are split and their gradients not summed
    assert forward == [("block.1.feed_forward", "all_gather"), ("block.1.feed_forward", "reduce_scatter"),
                       ("loss", "all_reduce")]
    counts, _ = said(localized)
    assert counts["all_reduce", ("axis",)] == len(GPT.inputs) - 2 - 2 + 1
    layouts = {value.name: layout for value, layout in zip(GPT.inputs, localized.inputs, strict=True)}
    assert (layouts["p.1.up"], layouts["p.1.down"]) == (TensorSharding(None, "axis"), TensorSharding("axis", None))


def test_uneven_parts_of_everything():
    layouts = {**MEGATRON, "tokens": "[dp, None]"}
    odd = models.gpt(7, 10, 5, 1, 3, 5)
    localized = laid_out(odd, {name: layout for name, layout in layouts.items() if ".0." in name or name == "tokens"},
                         Mesh(dp=3, tp=2))
    assert [program.inputs[-2].type.shape for program in map(localized.program, (0, 2, 4))] == [(2, 3), (2, 3), (1, 3)]
    # 5 heads of 6 columns do not fall where 30 columns are cut
    assert ("all_gather", ("tp",)) in said(localized)[0]


# -- what is found, in which order -------------------------------------------------------------------------------------


def found(fn, types, layouts, mesh, **conflicts):
    function = ir.record(fn, *types)
    return propagate(annotate(function, layouts), mesh, **conflicts)


def layout_of(function, name):
    return next(value.layout.short() for value in function.values if value.name == name)


def test_layouts_go_forwards_and_backwards():
    function = found(lambda x, y: (x + y).T.reshape(3, 2, 4)[1:2] * 2, [T("f8", (4, 6))] * 2, {"y": "[x, None]"},
                     Mesh(x=2))
    assert layout_of(function, "x") == "[x, None]"
    assert function.outputs[0].layout.short() == "[None, None, x]"
    backwards = found(lambda x, w: np.exp(x) @ w, [T("f8", (4, 6)), T("f8", (6, 8))], {"1": "[x, y]"},
                      Mesh(x=2, y=2))
    assert [value.layout.short() for value in backwards.values] == ["[x, None]", "[None, y]", "[x, None]", "[x, y]"]
    inside = found(lambda x, w: x @ w, [T("f8", (4, 6)), T("f8", (6, 8))], {"w": "[x, None]"}, Mesh(x=2))
    assert layout_of(inside, "x") == "[None, x]"
    assert layout_of(inside, "0") == "[None, None]"


def test_what_was_annotated_stays_and_whole_dims_are_annotated_too():
    function = found(lambda x, y: x + y, [T("f8", (4, 6))] * 2, {"x": "[x, None]", "y": "[None, None]"}, Mesh(x=2))
    assert [value.layout.short() for value in function.values] == ["[x, None]", "[None, None]", "[x, None]"]
    assert [op.kind for op in localize(function, Mesh(x=2)).program(0).ops] == ["all_slice", "add"]


def test_the_outer_dim_gets_an_axis_that_two_could_have():
    function = found(lambda x, w: x @ w, [T("f8", (4, 6)), T("f8", (6, 8))], {"x": "[x, None]", "w": "[None, x]"},
                     Mesh(x=2))
    assert layout_of(function, "0") == "[x, None]"


def test_one_to_one_goes_before_products():
    def fn(x, w, y):
        return np.exp(x @ w) + y

    types = [T("f8", (4, 6)), T("f8", (6, 8)), T("f8", (4, 8))]
    function = found(fn, types, {"x": "[x, None]", "y": "[None, x]"}, Mesh(x=2))
    assert layout_of(function, "0") == layout_of(function, "1") == "[None, x]"


def test_a_conflict_tells_both_ways_that_led_to_it_and_is_no_error():
    conflicts = []
    function = found(lambda x, w: np.exp(x) @ np.negative(w), [T("f8", (4, 6)), T("f8", (6, 8))],
                     {"x": "[x, None]", "w": "[x, None]"}, Mesh(x=2), conflicts=conflicts)
    conflict, = conflicts
    assert (conflict.op.kind, conflict.value.name, conflict.dim) == ("matmul", "1", 0)
    assert (conflict.lies.short(), conflict.wanted.short()) == ("[x, None]", "[None, None]")
    assert [op.kind for op in conflict.lies_from.ops] == ["negative"]
    assert [op.kind for op in conflict.wanted_from.ops] == ["exp"]
    assert str(conflict) == ("%1 has layout [x, None], from %w, dim 0, through negative %1; matmul needs it as "
                             "[None, None], from %x, dim 0, through exp %0")
    assert [op.kind for op in localize(function, Mesh(x=2)).program(0).ops][-2:] == ["all_gather", "matmul"]


def test_a_dim_that_an_op_sees_whole_is_a_conflict_of_its_own():
    conflicts = []
    found(lambda x: ir.apply("softmax", x, axis=1), [T("f8", (4, 6))], {"x": "[None, x]"}, Mesh(x=2),
          conflicts=conflicts)
    assert list(map(str, conflicts)) == [
        "%x has layout [None, x], from %x, dim 1; softmax needs it as [None, None], because it needs dim 1 whole"
    ]


def test_what_an_op_makes_otherwise_than_annotated_is_a_conflict_too():
    conflicts = []
    function = found(lambda x: np.exp(x), [T("f8", (4, 6))], {"x": "[x, None]", "0": "[None, x]"}, Mesh(x=2),
                     conflicts=conflicts)
    assert list(map(str, conflicts)) == [
        "%0: exp computes it as [x, None]; it must have layout [None, x], from %0, dim 0"
    ]
    assert [op.kind for op in localize(function, Mesh(x=2)).program(0).ops] == ["exp", "all_to_all"]


# -- where a dim may be cut --------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("shape", "after", "axis", "expected"), [
    ((8, 3), (24,), 2, "[x]"),
    ((24,), (8, 3), 2, "[x, None]"),
    ((3, 2), (6,), 2, "[None]"),           # of 3 the first has 2, of 6 it has 3
    ((6,), (3, 2), 2, "[None, None]"),
    ((5, 1), (5,), 2, "[x]"),
    ((5,), (5, 1), 3, "[x, None]"),
    ((1, 5), (5,), 2, "[None]"),           # what is split is the 1
    ((4, 9), (6, 6), 2, "[x, None]"),      # 2 of 4 are 3 of 6
    ((4, 9), (6, 6), 4, "[None, None]"),
    ((6, 6), (4, 9), 3, "[None, None]"),
    ((4, 9), (9, 4), 2, "[None, None]"),   # nothing in common
])
def test_a_reshape_is_split_only_where_both_shapes_are_cut_in_the_same_places(shape, after, axis, expected):
    dims = ", ".join(["x", *["None"] * (len(shape) - 1)])
    function = found(lambda x: x.reshape(after), [T("f8", shape)], {"x": f"[{dims}]"}, Mesh(x=axis))
    assert function.outputs[0].layout.short() == expected
    localized = localize(function, Mesh(x=axis))
    x = np.arange(np.prod(shape), dtype=float).reshape(shape)
    np.testing.assert_array_equal(run_everywhere(localized, [x])[0], x.reshape(after))


def test_an_input_is_not_asked_for_in_parts_that_are_of_no_use():
    for shape, expected in (((3, 2), "[None, None]"), ((4, 2), "[x, None]")):
        size = shape[0] * shape[1]
        function = found(lambda x, n=size: x.reshape(n), [T("f8", shape)], {"0": "[x]"}, Mesh(x=2))
        assert layout_of(function, "x") == expected


def test_nobody_is_asked_for_the_largest_of_nothing():
    function = found(lambda x: np.max(x, axis=0), [T("f8", (2, 5))], {"x": "[x, None]"}, Mesh(x=3))
    assert function.outputs[0].layout.partial == ()
    assert [op.kind for op in localize(function, Mesh(x=3)).program(0).ops] == ["all_gather", "max"]
    enough = found(lambda x: np.max(x, axis=0), [T("f8", (4, 5))], {"x": "[x, None]"}, Mesh(x=3))
    assert [op.kind for op in localize(enough, Mesh(x=3)).program(0).ops] == ["max", "all_reduce"]


# -- what is pending ---------------------------------------------------------------------------------------------------


def kinds(fn, types, layouts, mesh):
    return [op.kind for op in localize(annotate(ir.record(fn, *types), layouts), mesh).program(0).ops]


X, W = T("f8", (4, 6)), T("f8", (6, 8))


@pytest.mark.parametrize(("fn", "expected"), [
    (lambda x, w: x @ w - (x @ w), ["matmul", "matmul", "subtract", "all_reduce"]),
    (lambda x, w: np.sum((-(x @ w)).T, axis=0), ["matmul", "negative", "transpose", "sum", "all_reduce"]),
    (lambda x, w: (x @ w) * 0.5, ["matmul", "constant", "multiply", "all_reduce"]),
    (lambda x, w: (x @ w) * 0.0, ["matmul", "all_reduce", "constant", "multiply"]),
    (lambda x, w: (x @ w) * np.inf, ["matmul", "all_reduce", "constant", "multiply"]),
    (lambda x, w: np.exp(x @ w), ["matmul", "all_reduce", "exp"]),
    (lambda x, w: (x @ w) + 1, ["matmul", "all_reduce", "constant", "add"]),
    (lambda x, w: np.broadcast_to((x @ w)[:, None], (4, 3, 8)), ["matmul", "reshape", "all_reduce", "broadcast_to"]),
    (lambda x, w: [y := x @ w, y.T][1] + y.T, ["matmul", "all_reduce", "transpose", "transpose", "add"]),
    (lambda x, w: (x @ w) > 0, ["matmul", "all_reduce", "constant", "greater"]),
])
def test_a_sum_waits_as_long_as_terms_will_do(fn, expected):
    assert kinds(fn, [X, W], {"x": "[None, x]", "w": "[x, None]"}, Mesh(x=2)) == expected


@pytest.mark.parametrize(("linear", "expected"), [
    ("moves", ["matmul", "roll", "all_reduce"]), ("together", ["matmul", "roll", "all_reduce"]),
    ((0,), ["matmul", "roll", "all_reduce"]), ((), ["matmul", "all_reduce", "roll"]),
])
def test_an_operator_registered_from_outside_carries_a_pending_sum_if_it_says_that_it_is_linear(
        monkeypatch, linear, expected):
    entry = table.Operator(
        "roll", lambda x: rules.rule("az!->az!", [x.shape]), lambda x: x.dtype, lambda x: np.roll(x, 1, axis=1),
        linear=linear,
    )
    monkeypatch.setitem(table.OPERATORS, "roll", entry)
    layouts = {"x": "[None, x]", "w": "[x, None]"}
    assert kinds(lambda x, w: ir.apply("roll", x @ w), [X, W], layouts, Mesh(x=2)) == expected
    function = ir.record(lambda x: ir.apply("roll", np.sum(x, axis=0, keepdims=True)), T("f8", (ir.symbol("B"), 6)))
    if linear:
        assert microbatched(function).ops[-1].kind == "roll"
    else:
        with pytest.raises(ValueError, match="it is not linear in a sum over all rows"):
            microbatched(function)


def test_several_sums_wait_to_be_joined():
    def fn(x, w):
        return np.concatenate([x @ w, -(x @ w)], axis=0)

    layouts = {"x": "[None, x]", "w": "[x, None]"}
    assert kinds(fn, [X, W], layouts, Mesh(x=2)) == ["matmul", "matmul", "negative", "concatenate", "all_reduce"]


def test_terms_are_not_moved_about():
    layouts = {"p": "[y, None] partial=x", "q": "[None, y] partial=x", "0": "[None, y]"}
    moved = ["all_to_all", "all_reduce", "all_reduce", "add"]
    assert kinds(lambda p, q: p + q, [X, X], layouts, Mesh(x=2, y=2)) == moved
    same = {"p": "[y, None] partial=x", "q": "[None, None] partial=x"}
    assert kinds(lambda p, q: p + q, [X, X], same, Mesh(x=2, y=2)) == ["all_slice", "add", "all_reduce"]


def test_an_output_may_stay_partial_and_an_input_may_be():
    function = annotate(ir.record(lambda x, w: x @ w, X, W), {"x": "[None, x]", "0": "[None, None] partial=x"})
    localized = localize(function, Mesh(x=2))
    assert [op.kind for op in localized.program(0).ops] == ["matmul"]
    assert localized.inputs == (TensorSharding(None, "x"), TensorSharding("x", None))
    assert localized.outputs == (TensorSharding(None, None, partial="x"),)
    assert kinds(np.exp, [X], {"x": "[None, None] partial=x"}, Mesh(x=2)) == ["all_reduce", "exp"]


# -- annotations in the program ----------------------------------------------------------------------------------------


def test_a_constraint_is_recorded_and_its_gradient_lies_so_too():
    def fn(x, w):
        return np.sum(np.sin(redistribute(x @ w, "[None, x]")))

    grad = ir.gradient(ir.record(fn, X, W), "w")
    layouts = [op["layout"] for op in grad.ops if op.kind == "reshard"]
    assert layouts == ["[None, x]", "[None, x]"]
    localized = localize(grad, Mesh(x=2))
    assert localized.outputs == (TensorSharding(None, "x"),)
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(4, 6)), rng.normal(size=(6, 8))
    assert_allclose(run_everywhere(localized, [x, w])[0], x.T @ np.cos(x @ w), rtol=1e-12)
    assert redistribute(x, TensorSharding("x", ...)) is not None
    np.testing.assert_array_equal(redistribute(x, "[x, None]"), x)


def test_the_gradient_of_what_is_annotated_lies_as_it_does():
    function = annotate(ir.record(lambda x, w: np.sum(np.sin(x @ w)), X, W), {"w": "[x, None]", "x": "[x, None]"})
    localized = localize(ir.gradient(function, "w"), Mesh(x=2))
    assert localized.outputs == (TensorSharding("x", None),)
    assert said(localized)[0]["reduce_scatter", ("x",)] == 1


@pytest.mark.parametrize(("layouts", "message"), [
    ({"y": "[x, None]"}, r"@fn has no value %y; its inputs are %x$"),
    ({"xx": "[x, None]"}, r"@fn has no value %xx; its inputs are %x; did you mean 'x'\?$"),
    ({"x": "[x]"}, r"TensorSharding\('x'\) has 1 dim, the tensor has 2"),
    ({"x": "[x, y]"}, r"@fn, %x: TensorSharding\('x', 'y'\) names axis 'y', but the axes of Mesh\(x=2\) are 'x'"),
])
def test_annotations_that_do_not_fit(layouts, message):
    def fn(x):
        return np.exp(x)

    with pytest.raises(ValueError, match=message):
        propagate(annotate(ir.record(fn, X), layouts), Mesh(x=2))


def test_the_program_of_a_device_is_not_laid_out_again():
    program = localize(annotate(ir.record(np.sum, X), {"a": "[x, None]"}), Mesh(x=2)).program(0)
    with pytest.raises(ValueError, match="@sum has collectives, so it is the program of one device: %0 = "
                                         "\"all_reduce\""):
        propagate(program, Mesh(x=2))
