"""Every entry of the table of operators: its kernel, its types, its dim rule and its derivative say the same."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from ir_checks import JOINED, check_gradient, check_tiles, is_differentiable, splittable
from ir_examples import EXAMPLES, EXCHANGING, Bools, Example, Ints
from ir_random_examples import MAKERS, drawn
from numpy.testing import assert_allclose, assert_array_equal

from parallelism import Mesh, ir
from parallelism.dtypes import integer_limits, is_narrow_integer
from parallelism.ir.core import DTYPES, OPERATORS
from parallelism.ir.core.table import meaning
from parallelism.ir.passes.interpreter import run
from parallelism.ir.tracing import apply
from parallelism.recorder import record

MESSAGES = {"send", "recv"}
KINDS = list(dict.fromkeys(example.kind for example in EXAMPLES))
by_kind = pytest.mark.parametrize("kind", KINDS)


def examples(kind):
    return [example for example in EXAMPLES if example.kind == kind]


def test_every_operator_has_examples():
    assert set(KINDS) == MAKERS.keys() == OPERATORS.keys() - MESSAGES


@pytest.mark.sampled(24)
@by_kind
def test_the_kernel_makes_what_the_types_say(kind):
    for example in (*examples(kind), drawn(kind, 0)):
        check_types(example.op(), example.arrays())


def check_types(op, arrays):
    outputs = run(op, arrays)
    assert [(y.dtype, y.shape) for y in outputs] == [(v.type.dtype, v.type.shape) for v in op.outputs]
    if op.kind == "chunk":      # the only view whose elements may lie apart
        assert outputs[0].size == 0 or np.shares_memory(outputs[0], arrays[0])
    else:
        assert all(y.flags.c_contiguous for y in outputs)


def fitted(x, dtype):
    """Numbers from 0 on in a dtype; of narrow integers no number wraps around."""
    return np.minimum(x, integer_limits(dtype)[1]).astype(dtype) if is_narrow_integer(dtype) else x.astype(dtype)


@pytest.mark.sampled(30)
@pytest.mark.parametrize("most", [1, pytest.param(None, marks=pytest.mark.slow)])
@by_kind
def test_other_dtypes_are_taken_by_types_and_kernel_or_by_neither(kind, most):
    taken, dtypes = 0, [*DTYPES.values()]
    for example, dtype in product(examples(kind)[:most], dtypes[KINDS.index(kind) % 2::2] if most else dtypes):
        same = Ints if all(isinstance(given, Bools) for given in example.inputs) else (Ints, Bools)
        arrays = [x if isinstance(given, same) else fitted(abs(x * 1), dtype)
                  for x, given in zip(example.arrays(1, whole=True), example.inputs, strict=True)]
        inputs = tuple(ir.Value(f"x{i}", ir.TensorType(x.dtype, x.shape)) for i, x in enumerate(arrays))
        op = ir.Op(kind, inputs, example.attributes, ())
        try:
            outputs = meaning(kind, op.types, op.attributes).outputs
        except (TypeError, ValueError):
            continue
        taken += 1
        check_types(replace(op, outputs=tuple(ir.Value(f"y{i}", type) for i, type in enumerate(outputs))), arrays)
    assert taken


# -- the dim rule, by tiles --------------------------------------------------------------------------------------------

INEXACT = {
    "softmax_cross_entropy", "layer_norm_gradient", "rms_norm_gradient", "attention", "attention_gradient",
    "context_attention", "context_attention_gradient", "attention_block", "attention_block_gradient",
    "attention_weights", "cross_entropy", "cross_entropy_gradient", "exponential_sums", "cached_attention",
    "cached_latent_attention", "cached_linear_attention", "cached_short_convolution", "linear_attention",
    "linear_attention_gradient", "short_convolution",
    "short_convolution_gradient", "gated_rms_norm", "gated_rms_norm_gradient",
    *(f"weighted_{name}_gradient" for name in ("swiglu", "geglu", "clamped_swiglu")),
}
"""What adds up numbers that are not whole."""


@pytest.mark.sampled(28)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in EXCHANGING])
def test_the_dim_rule_holds_for_tiles(kind):
    check_tiles(examples(kind)[0], inexact=INEXACT)     # the others are slow, below
    check_tiles(drawn(kind, 0), 0, INEXACT)


def test_every_operator_can_be_split_somewhere():
    whole = {example.kind for example in EXAMPLES} - {e.kind for e in EXAMPLES if splittable(e.op().rule)}
    # The state of one runs through all the bits; a loss is one number, and histories of numbers are a few.
    assert whole == {"random_bits", "local_loss", "recorded", "scale_of"}


@pytest.mark.parametrize(("kind", "types", "attributes", "expected"), [
    ("matmul", ["8x16xf32", "16x32xf32"], {}, "mk,kn->mn"),
    ("matmul", ["5x1x8x16xf32", "3x16x32xf32"], {}, "a1mk,bkn->abmn"),
    ("einsum", ["4x5xf64", "5xf64"], {"equation": "ij,j->i"}, "ij,j->i"),
    ("add", ["4x5xf64", "4x1xf64"], {}, "ab,a1->ab"),
    ("sum", ["4x5xf64"], {"axes": (1,), "keepdims": True}, "ab->a1"),
    ("softmax", ["4x5xf64"], {"axis": 1}, "az!->az!"),
    ("reshape", ["6x4xf64"], {"shape": (2, 3, 4)}, "(ab)c->abc"),
    ("reshape", ["6x4xf64"], {"shape": (8, 3)}, "(ab!)c!->(ad!)e!"),
    ("reshape", ["4x9xf64"], {"shape": (9, 4)}, "a!b!->c!d!"),
    ("take", ["9x4xf32", "2x3xi64"], {"axis": 0}, "za,bc->bca"),
    ("take_gradient", ["2x3x4xf32", "2x3xi64"], {"axis": 0, "extent": 9}, "bca,bc->za"),
    ("arranged", ["2x9x4xf32", "3xi64"], {"axis": 1}, "az!b,k->akb"),
    ("arranged_gradient", ["2x3x4xf32", "3xi64"], {"axis": 1, "extent": 9}, "akb,k->az!b"),
    ("softmax_cross_entropy", ["6x9xf32", "6xi64"], {"rows": 12}, "nz!,n->"),
])
def test_rules_as_they_are_written(kind, types, attributes, expected):
    function = ir.record(lambda *x: ir.apply(kind, *x, **attributes), *map(tensor, types))
    rule = function.ops[-1].rule
    assert str(rule) == expected


def tensor(text):
    *extents, dtype = text.split("x")
    return ir.TensorType(dtype, [int(n) for n in extents])


# -- derivatives, by central differences -------------------------------------------------------------------------------


UNDIFFERENTIATED = {
    "makes bools": {"equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "logical_and", "logical_or",
                    "logical_xor", "logical_not", "isfinite", "isnan", "any", "all", "dropout_mask"},
    "makes integers": {"argmax", "argmin", "argsort", "bitwise_and", "bitwise_or", "bitwise_xor", "invert",
                       "left_shift", "right_shift", "random_bits", "saturate"},
    "takes no floating-point numbers": {"constant", "iota", "one_hot", "uniform", "recv", "token_order"},
    "makes nothing": {"send"},
    "lies along no axes": {"group_collective"},
    "lets no gradient through": {"stop_gradient"},
    "reads bits, not numbers": {"bitcast", "unpacked"},
    "is of inference": {"write_cache", "cached_attention", "cached_latent_attention", "cached_linear_attention",
                        "cached_short_convolution", "rotary_at", "scaled_rotary_at"},
    "is of backwards alone": {"requantize", "copied"},
    "is of updates alone": {"recorded", "scale_of"},
    "is put in after gradients are taken": {"all_slice", "relayout", "ring_shift", "attention_block", "chunk",
                                             "joined_chunks"},
    "is itself a gradient": {
        "attention_gradient", "cross_entropy_gradient", "clamped_swiglu_gradient",
        "weighted_clamped_swiglu_gradient", "context_attention_gradient",
        "attention_block_gradient", "linear_attention_gradient", "short_convolution_gradient", "gated_rms_norm_gradient",
    },
}
"""Why operators have no derivative."""

SMOOTH = [example for example in EXAMPLES if is_differentiable(example)]


def test_every_operator_has_a_derivative_or_a_reason_not_to_have_one():
    without = [kind for kinds in UNDIFFERENTIATED.values() for kind in kinds]
    assert sorted(without) == sorted(kind for kind, entry in OPERATORS.items() if entry.derivative is None)
    rounding = {kind for kind, entry in OPERATORS.items() if entry.passes_rounding}     # test_scaled_products has theirs
    assert OPERATORS.keys() - without - JOINED - rounding == {example.kind for example in SMOOTH}


@pytest.mark.sampled(24)
@pytest.mark.parametrize("kind", list(dict.fromkeys(example.kind for example in SMOOTH)))
def test_the_derivative_is_that_of_central_differences(kind):
    there = [example for example in SMOOTH if example.kind == kind]
    extents = {n for example in there for x in example.inputs for n in getattr(x, "shape", x)}
    assert len(there) >= 2 and 1 in extents and not extents.isdisjoint({3, 5, 7})
    check_gradient(there[0])                            # the others are slow, below
    if is_differentiable(drawn(kind, 0)):
        check_gradient(drawn(kind, 0), 0)


def test_a_row_that_attends_to_no_column_has_weights_of_zero():
    weights = ir.record(lambda x: ir.apply("attention_weights", x, scale=2.0, mask="causal:2", starts=(1, 0)),
                        tensor("4x3xf64"))
    scores = np.log(np.arange(1.0, 13).reshape(4, 3)) / 2
    expected = [[1 / 3, 2 / 3, 0], [0, 5 / 11, 6 / 11], [0, 0, 1], [0, 0, 0]]
    np.testing.assert_allclose(ir.interpret(weights, [scores]).outputs[0], expected, rtol=1e-15)


@pytest.mark.slow
@by_kind
def test_types_tiles_and_derivatives_on_many_inputs(kind):
    for seed in range(100):
        for example in (drawn(kind, seed), examples(kind)[seed % len(examples(kind))]):
            check_types(example.op(), example.arrays(seed))
            if kind not in EXCHANGING and "tensor_grains" not in example.attributes:   # a part has a scale of its own
                check_tiles(example, seed, INEXACT)
            if is_differentiable(example):
                check_gradient(example, seed)


# -- linearity ---------------------------------------------------------------------------------------------------------


def is_additive(example, numbers, seed):
    """Whether f(a + b) = f(a) + f(b) in these inputs at once, the others being the same."""
    a, b = example.arrays(seed), example.arrays(seed + 1000)
    kept = [x if i in numbers else same for i, (x, same) in enumerate(zip(b, a, strict=True))]
    together = [x + y if i in numbers else x for i, (x, y) in enumerate(zip(a, kept, strict=True))]
    op = example.op()
    with np.errstate(all="ignore"):
        return all(
            np.allclose(whole, x + y, rtol=1e-5, atol=1e-5)
            for whole, x, y in zip(*(run(op, arrays) for arrays in (together, a, kept)), strict=True)
        )


def cases(kind):
    """Examples of floats, where there are any elements and so something may differ."""
    every = [*examples(kind), *(drawn(kind, seed) for seed in range(3))]
    return [case for case in every if all(type.dtype.kind == "f" and type.size for type in case.types)
            and all(value.type.dtype.kind == "f" for value in case.op().outputs)]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", [kind for kind, entry in OPERATORS.items() if entry.linear])
def test_an_operator_is_linear_in_the_inputs_that_it_claims(kind):
    entry = OPERATORS[kind]
    every = [*examples(kind), *(drawn(kind, seed) for seed in range(3))]
    count = 0
    for seed, example in enumerate(every):
        floats = [i for i, type in enumerate(example.types) if type.dtype.kind == "f"]
        one_by_one = [[i] for i in floats]
        for numbers in [floats] if entry.linear in ("together", "moves") else one_by_one:
            of_floats = all(value.type.dtype.kind == "f" for value in example.op().outputs)
            if of_floats and numbers and entry.is_linear_in(numbers, len(example.types)):
                assert is_additive(example, numbers, seed), example
                count += 1
    assert count


def test_no_operator_keeps_its_linearity_to_itself():
    """Whatever is linear in all its inputs on every example says so; collectives of a group of one are not asked."""
    alone = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "all_slice", "relayout",
             "group_collective"}
    linear = {kind for kind in {*KINDS} - alone if len(cases(kind)) > 3 and all(
        is_additive(example, range(len(example.types)), seed) for seed, example in enumerate(cases(kind)))}
    assert len(linear) > 8
    assert linear <= {kind for kind in KINDS if OPERATORS[kind].linear in ("together", "moves")}


@pytest.mark.parametrize("kind", [kind for kind, entry in OPERATORS.items() if entry.linear == "moves"])
def test_what_moves_elements_can_be_exchanged_with_a_maximum(kind):
    for seed, example in enumerate(cases(kind)):
        a, b = example.arrays(seed), example.arrays(seed + 1000)
        op = example.op()
        largest = [np.maximum(x, y) for x, y in zip(a, b, strict=True)]
        found = run(op, largest), run(op, a), run(op, b)
        # A zero that is put in is the largest of zeros in both.
        for whole, x, y in zip(*found, strict=True):
            assert_array_equal(whole, np.maximum(x, y))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", [kind for kind, entry in OPERATORS.items() if entry.linear and not entry.grows])
def test_what_does_not_grow_makes_no_more_elements_than_it_takes(kind):
    for example in cases(kind):
        shapes = [type.shape for type in example.types]
        if isinstance(OPERATORS[kind].kernel, np.ufunc):
            shapes = [np.broadcast_shapes(*shapes)]
        taken = sum(int(np.prod(shape)) for shape in shapes)
        assert sum(value.type.size for value in example.op().outputs) <= taken


def test_linearity_of_another_sort_is_refused():
    with pytest.raises(ValueError, match="linear is 'together', 'each', 'moves' or a tuple of numbers of inputs, got"):
        replace(OPERATORS["negative"], name="other", linear="always")


def test_the_gradient_of_a_product_with_zeros_in_it():
    function = Example("prod", ((3, 4),), {"axes": (1,), "keepdims": False}).function()
    x = np.array([[2.0, 3, 5, 7], [2, 0, 5, 7], [0, 3, 0, 7]])
    found, = ir.interpret(ir.gradient(function), [x, np.ones(3)]).outputs
    assert_array_equal(found, [[105, 70, 42, 30], [0, 70, 0, 0], [0, 0, 0, 0]])


def test_a_gradient_goes_to_what_a_negative_index_means():
    function = Example("take", ((4, 2), Ints((3,), 4)), {"axis": 0}).function()
    found, = ir.interpret(ir.gradient(function), [np.zeros((4, 2)), np.array([-1, 1, 3]), np.ones((3, 2))]).outputs
    assert_array_equal(found, [[0, 0], [1, 1], [0, 0], [2, 2]])


def test_equal_ones_share_the_gradient_of_the_largest():
    function = Example("max", ((2, 3),), {"axes": (1,), "keepdims": False}).function()
    found, = ir.interpret(ir.gradient(function), [np.array([[1.0, 4, 4], [2, 1, 0]]), np.array([6.0, 5])]).outputs
    assert_array_equal(found, [[0, 3, 3], [5, 0, 0]])
    function = Example("maximum", ((2,), (2,))).function()
    a, b = ir.interpret(ir.gradient(function), [np.array([1.0, 2]), np.array([1.0, 3]), np.array([4.0, 6])]).outputs
    assert_array_equal(a, [2, 0])
    assert_array_equal(b, [2, 6])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "types", "attributes", "message"), [
    ("mean_squared_error", ["3x2xf64", "3x2xf64"], {"rows": 0}, "the whole batch must have at least one row, got "
                                                                "rows=0"),
    ("max", ["3x0xf64"], {"axes": (1,), "keepdims": False}, "an empty array has no largest or smallest element"),
    ("min", ["3x0xi1"], {"axes": (1,), "keepdims": False}, "an empty array has no largest or smallest element"),
    ("argmin", ["0xf64"], {"axis": 0}, "an empty array has no largest or smallest element"),
    ("all_gather", ["3xf64"], {"axes": ("a",), "group": 1, "dim": 0, "extent": 4}, "a group of one keeps the extent "
                                                                                   "of a dim"),
    ("all_reduce", ["3xf64"], {"axes": ("a",), "group": 0, "op": "sum"}, "a group has at least one device, got 0"),
    ("all_reduce", ["3xf64"], {"axes": ("a",), "group": 2, "op": "mean"}, "got op='mean'"),
    ("permute", ["3xf64"], {"axes": ("a",), "group": 2, "pairs": ((0, 1), (0, 0))}, "each source and each target once"),
    ("dropout_mask", ["i64"], {"seed": -1, "rate": 0.5, "whole": (3,), "starts": (0,), "shape": (3,)},
     "the seed must be in"),
    ("uniform", ["i64"], {"seed": 0, "whole": (3,), "starts": (1,), "shape": (3,), "dtype": np.dtype("f8")},
     r"a part of shape \(3\) that starts at \(1\) is not inside \(3\)"),
    ("windows", ["5xf64"], {"axis": 0, "size": 6, "step": 1}, "windows of 6, one every 1, do not fit into a dim of 5"),
    ("concatenate", ["5xf64", "5x1xf64"], {"axis": 0}, "the inputs must have equally many dims"),
    ("split", ["5xf64"], {"axis": 0, "sizes": (2, 2)}, r"the sizes must add up to dim 0 of tensor<5xf64>, got \(2, "
                                                       r"2\)"),
    ("take", ["5xf64", "2xf64"], {"axis": 0}, "indices must be integers, got float64"),
    ("where", ["5xf64", "5xf64", "5xf64"], {}, r"the condition must be of bools \(i1\), got float64"),
    ("softmax", ["5xi64"], {"axis": 0}, "the inputs must be floating-point"),
    ("gelu", ["5xi64"], {}, "the inputs must be floating-point, got int64"),
    ("softmax", ["5xf64"], {}, "softmax: its attributes are axis; got none"),
    ("invert", ["5xf64"], {}, "invert: ufunc 'invert' did not contain a loop|not supported|No loop"),
])
def test_what_an_operator_does_not_take_is_refused(kind, types, attributes, message):
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        meaning(kind, tuple(map(tensor, types)), tuple(attributes.items()))
    assert str(caught.value).startswith(f"{kind}: ")


# -- costs and messages ------------------------------------------------------------------------------------------------


def op_of(kind, *types, **attributes):
    inputs = tuple(ir.Value(f"x{i}", tensor(type)) for i, type in enumerate(types))
    return ir.Op(kind, inputs, attributes, ())


def test_flops_follow_from_the_rule():
    assert op_of("matmul", "8x16xf32", "16x32xf32").flops == 2 * 8 * 16 * 32
    assert op_of("einsum", "4x5xf64", "4x5xf64", equation="ij,ij->ij").flops == 20
    assert op_of("einsum", "4x5xf64", "5x6xf64", "6xf64", equation="ij,jk,k->i").flops == 3 * 4 * 5 * 6
    assert op_of("add", "4x5xf64", "5xf64").flops == 20
    assert op_of("sum", "4x5xf64", axes=(0,), keepdims=False).flops == 20
    assert op_of("transpose", "4x5xf64", permutation=(1, 0)).flops == 0


@pytest.mark.parametrize(("kind", "attributes", "shape", "received"), [
    ("all_reduce", {"op": "sum"}, (8, 6), 2 * 3 * 8 * 6 * 8 // 4),
    ("all_gather", {"dim": 1, "extent": 23}, (8, 23), 8 * (23 - 6) * 8),
    ("reduce_scatter", {"dim": 0, "extent": 2, "op": "sum"}, (2, 6), 3 * 2 * 6 * 8),
    ("all_to_all", {"split_dim": 0, "split_extent": 2, "concat_dim": 1, "concat_extent": 24}, (2, 24), 2 * 18 * 8),
    ("permute", {"pairs": ((0, 1), (1, 0))}, (8, 6), 8 * 6 * 8),
])
def test_collectives_have_types_and_bytes_and_run_alone_only(kind, attributes, shape, received):
    x = ir.TensorType("f64", (8, 6))
    function = ir.record(lambda x: ir.apply(kind, x, axes=["tp"], group=4, **attributes), x)
    op, = function.ops
    assert op.outputs[0].type.shape == shape
    assert op.bytes_received == received
    assert ir.parse(str(function)) == function
    with pytest.raises(ValueError, match=f"{kind} needs 4 devices"):
        ir.interpret(function, [np.zeros((8, 6))])


AT_WORK = {
    "all_reduce": (lambda d, x: d.all_reduce(x), lambda s: {"op": "sum"}),
    "all_gather": (lambda d, x: d.all_gather(x, dim=1), lambda s: {"dim": 1, "extent": s[1]}),
    "reduce_scatter": (lambda d, x: d.reduce_scatter(x, dim=0), lambda s: {"dim": 0, "extent": s[0], "op": "sum"}),
    "all_to_all": (lambda d, x: d.all_to_all(x, split_dim=0, concat_dim=1),
                   lambda s: {"split_dim": 0, "split_extent": s[0], "concat_dim": 1, "concat_extent": s[1]}),
    "permute": (lambda d, x: d.shift(x), lambda s: {"pairs": tuple((i, (i + 1) % 3) for i in range(3))}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", AT_WORK)
@pytest.mark.parametrize("shape", [(6, 4), (5, 1), (1, 2), (0, 3)])
def test_a_device_receives_as_many_bytes_as_the_program_says(kind, shape):
    call, attributes = AT_WORK[kind]
    recording = record(call, Mesh(tp=3), np.zeros(shape))
    made = recording.outputs[0].shape
    given = {"axes": ("tp",), "group": 3, **attributes(made)}
    function = ir.record(lambda x: ir.apply(kind, x, **given), ir.TensorType("f64", shape))
    assert function.outputs[0].type.shape == made
    assert function.ops[0].bytes_received == recording.trace.bytes_received(rank=0)


def test_how_many_devices_may_stay_a_symbol():
    B, tp = ir.symbols("B tp")
    function = ir.record(lambda x: ir.apply("all_gather", x, axes=["tp"], group=tp, dim=0, extent=B),
                         ir.TensorType("f64", (B // tp, 3)))
    assert str(function.inputs[0].type) == "tensor<(B/tp)x3xf64>"
    assert str(function.ops[0].bytes_received) == "24*B-24*B/tp"
    assert function.specialize(B=12, tp=4).ops[0].bytes_received == 9 * 3 * 8
    assert ir.parse(str(function)) == function


def test_messages_have_types_and_bytes_and_need_another_device():
    def talk(x):
        ir.apply("send", x, destination=1, tag=7)
        return ir.apply("recv", source=1, tag=7, shape=(3,), dtype=np.dtype(np.float32)) + x

    function = ir.record(talk, ir.TensorType("f32", (3,)))
    assert [op.kind for op in function.ops] == ["send", "recv", "add"]
    assert [op.bytes_received for op in function.ops] == [0, 12, 0]
    assert [op.kind for op in ir.gradient(function).ops] == ["send"]        # its peer still waits for it
    assert ir.parse(str(function)) == function
    with pytest.raises(ValueError, match="send needs another device"):
        ir.interpret(function, [np.zeros(3, np.float32)])


def test_an_operator_in_ten_lines(monkeypatch):
    """The whole of what it takes."""
    from parallelism.ir.core import Operator, rules

    monkeypatch.setitem(OPERATORS, "softplus", Operator(
        "softplus", lambda x: rules.elementwise([x.shape]), lambda x: x.dtype, lambda x: np.logaddexp(0, x),
        lambda g, y, x: [g * ir.apply("sigmoid", x)], flops=4,
    ))
    example = Example("softplus", ((3, 2),))
    check_tiles(example)
    check_gradient(example)
    assert ir.parse(str(example.function())) == example.function()
    assert example.op().flops == 24


def test_of_updates_that_are_set_at_one_place_only_the_last_has_a_gradient():
    types = [ir.TensorType("f64", (3,)), ir.TensorType("i64", (4,)), ir.TensorType("f64", (4,))]
    function = ir.record(lambda x, i, u: apply("scatter", x, i, u, axis=0, op="set"), *types)
    arrays = [np.zeros(3), np.array([1, 5, 1, 0]), np.arange(4.0)]
    assert ir.interpret(function, arrays).outputs[0].tolist() == [3, 2, 0]
    seed = np.array([10.0, 20, 30])
    of_x, of_updates = ir.interpret(ir.gradient(function), [*arrays, seed]).outputs
    assert of_x.tolist() == [0, 0, 30] and of_updates.tolist() == [0, 0, 20, 10]


@pytest.mark.parametrize(("op", "updates", "of_x", "of_updates"), [
    ("max", [3, 1, 2, 4, 7], [5, 10, 30], [5, 0, 0, 10, 0]),
    ("max", [1, 2, 4, 4, 7], [10, 20 / 3, 30], [0, 0, 20 / 3, 20 / 3, 0]),
    ("min", [3, 3, 2, 1, 7], [10 / 3, 0, 30], [10 / 3, 10 / 3, 0, 20, 0]),
    ("prod", [3, 2, 0, 6, 7], [60, 0, 30], [60, 90, 480, 0, 0]), ("prod", [3, 2, 0, 0, 7], [60, 0, 30], [60, 90, 0, 0, 0]),
])
def test_updates_that_are_combined_at_one_place_share_its_gradient(op, updates, of_x, of_updates):
    """Those that are as large as the extreme have equal shares; that of a factor is the product of the others, zeros too."""
    types = [ir.TensorType("f64", (3,)), ir.TensorType("i64", (5,)), ir.TensorType("f64", (5,))]
    function = ir.record(lambda x, i, u: apply("scatter", x, i, u, axis=0, op=op), *types)
    arrays = [np.array([3.0, 4, 5]), np.array([0, 0, 1, 1, 3]), np.array(updates, float)]
    found = ir.interpret(ir.gradient(function), [*arrays, np.array([10.0, 20, 30])]).outputs
    assert_allclose(found[0], of_x)
    assert_allclose(found[1], of_updates)


@pytest.mark.parametrize("count", [52, 130])
def test_as_many_arrays_as_a_recurrent_layer_has_steps_are_joined_and_made(count):
    sizes = [1 + i % 2 for i in range(count)]
    whole = np.arange(3.0 * sum(sizes)).reshape(3, -1)

    def turned(x):
        pieces = np.split(x, np.cumsum(sizes)[:-1], axis=1)
        return np.concatenate(pieces[::-1], axis=1)

    program = ir.record(turned, tensor(f"3x{whole.shape[1]}xf64"))
    assert [op.kind for op in program.ops].count("concatenate") == 1
    (found,) = ir.interpret(program, [whole]).outputs
    assert_array_equal(found, turned(whole))
    joined = program.ops[-1].rule
    assert len(joined.whole) == count + 1 and len({*joined.letters} - joined.whole) == 1      # the rows can be split
    squares = ir.record(lambda x: np.sum(turned(x) * turned(x)), program.inputs[0].type)
    (slope,) = ir.interpret(ir.gradient(squares), [whole]).outputs
    assert_array_equal(slope, 2 * whole)


def test_more_arrays_than_there_are_names_are_refused():
    with pytest.raises(ValueError, match="5400 arrays of 1 dims are more than it can join"):
        meaning("concatenate", (tensor("1xf32"),) * 5400, (("axis", 0),))
