"""Rows that a mask chooses, in files of ONNX: experts that look up their tokens, against NumPy; what else is refused."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from hypothesis import given, settings, strategies as st  # noqa: E402
from numpy.testing import assert_array_equal  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from parallelism import Mesh, ir, simulate  # noqa: E402
from parallelism.interop import UnsupportedError, from_onnx  # noqa: E402
from parallelism.layouts import annotate  # noqa: E402

LENGTH, WIDTH = 6, 4


def node(kind, inputs, outputs, **attributes):
    return helper.make_node(kind, inputs, outputs, name=outputs[0], **attributes)


class Layer:
    """Nodes that are written one after the other, of tokens ``flat`` of shape ``(B * LENGTH, WIDTH)``, which choose
    ``chosen`` of ``count`` experts by their first features."""

    def __init__(self, count, chosen):
        self.nodes, self.tensors, self.made = [], {}, 0
        self.count = count
        self.flat = self.add("Reshape", "x", self.number([-1, WIDTH]))
        self.scores = self.add("Slice", self.flat, *map(self.number, ([0], [count], [1])))
        self.gates, self.experts = self.add("TopK", self.scores, self.number([chosen]), outputs=2)

    def number(self, value, dtype="i8"):
        name = f"c{len(self.tensors)}"
        self.tensors[name] = numpy_helper.from_array(np.asarray(value, dtype), name)
        return name

    def add(self, kind, *inputs, outputs=1, **attributes):
        names = [f"v{self.made + i}" for i in range(outputs)]
        self.made += outputs
        self.nodes.append(node(kind, inputs, names, **attributes))
        return names[0] if outputs == 1 else names

    def mask_of(self, expert):
        """``(tokens, chosen)``."""
        return self.add("Equal", self.experts, self.number(expert))

    def places(self, mask):
        """The columns of the places of a mask, and the places as PyTorch writes them, ``(rows, dims)``."""
        places = self.add("Transpose", self.add("NonZero", mask), perm=[1, 0])
        column = self.add("Slice", places, *map(self.number, ([0], [1], [1])))
        return self.add("Squeeze", column, self.number([1])), places

    def program(self, result):
        """Of a result for each token; of any other with `program_of`."""
        return self.program_of(self.add("Reshape", result, self.add("Shape", "x")))

    def program_of(self, output):
        types = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", LENGTH, WIDTH])]
        outputs = [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)]
        graph = helper.make_graph(self.nodes, "experts", types, outputs, [*self.tensors.values()])
        return from_onnx(
            helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        ).program


def experts_program(count, chosen, *, summed=False):
    """Expert e multiplies its rows by e + 2; the rows are times their gates, and are added at their tokens.

    The places of all rows are looked for before the first of them is used.
    """
    layer = Layer(count, chosen)
    out = layer.add("Mul", layer.flat, layer.number(0, "f4"))
    for expert, (tokens, places) in enumerate([layer.places(layer.mask_of(e)) for e in range(count)]):
        rows = layer.add("Gather", layer.flat, tokens, axis=0)
        gates = layer.add("Unsqueeze", layer.add("GatherND", layer.gates, places), layer.number([1]))
        made = layer.add("Mul", layer.add("Mul", rows, layer.number(expert + 2, "f4")), gates)
        index = layer.add("Unsqueeze", tokens, layer.number([1]))
        out = layer.add("ScatterND", out, index, made, reduction="add")
    return layer.program_of(layer.add("ReduceSum", out, keepdims=0)) if summed else layer.program(out)


def experts_of(x, count, chosen):
    """What these experts make of tokens ``(n, WIDTH)``, token by token."""
    found = np.zeros_like(x)
    for token, row in enumerate(x):
        scores = row[:count]
        for expert in np.argsort(-scores, kind="stable")[:chosen]:
            found[token] += row * (expert + 2) * scores[expert]
    return found


def drawn(batch, seed):
    """Small whole numbers, different in each token, so that all sums are exact."""
    rng = np.random.default_rng(seed)
    return rng.permuted(np.tile(np.arange(1, WIDTH + 1), (batch, LENGTH, 1)), axis=2).astype("f4")


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.sampled_from([(3, 1), (4, 2), (4, 3), (2, 1)]), batch=st.integers(1, 4), seed=st.integers(0, 99)
)
def test_experts_that_look_up_their_tokens_are_those_of_a_loop(sizes, batch, seed):
    program = experts_program(*sizes).specialize(B=batch)
    x = drawn(batch, seed)
    (found,) = ir.interpret(program, {"x": x}).outputs
    assert_array_equal(found, experts_of(x.reshape(-1, WIDTH), *sizes).reshape(x.shape))


def test_all_tokens_may_choose_one_expert():
    program = experts_program(4, 1).specialize(B=2)
    x = np.broadcast_to(np.array([1, 2, 9, 3], "f4"), (2, LENGTH, WIDTH)).copy()
    (found,) = ir.interpret(program, {"x": x}).outputs
    assert_array_equal(found, x * 4 * 9)


def test_an_expert_has_its_even_share_of_each_sequence():
    program = experts_program(4, 2)
    shapes = {str(op.outputs[0].type) for op in program.ops if op.kind == "dispatch"}
    assert shapes == {f"tensor<1x1x({LENGTH // 2}*B)x{WIDTH}xf32>"} and program.symbols == {"B"}
    assert {op.kind for op in program.ops}.isdisjoint({"take", "scatter", "where"})


def test_what_is_simulated_has_the_even_share_and_splits_along_the_batch():
    laid = annotate(experts_program(4, 2).specialize(B=8), {"x": "[dp, None, None]"})
    trace = simulate(laid, "dgx-h100", mesh=Mesh(dp=4))
    assert not list(trace.filter(kind="collective"))
    whole = simulate(experts_program(4, 2).specialize(B=2), "dgx-h100", mesh=Mesh(dp=1))
    own = {rank: sum(event.flops for event in trace if event.rank == rank) for rank in range(4)}
    assert set(own.values()) == {sum(event.flops for event in whole)}


def test_gradients_pass_chosen_rows():
    program = experts_program(4, 2, summed=True).specialize(B=3)
    x = drawn(3, seed=5)
    (slope,) = ir.interpret(ir.gradient(program, ["x"]), {"x": x}).outputs
    flat = x.reshape(-1, WIDTH)
    expected = np.zeros_like(flat)
    for token, row in enumerate(flat):
        for expert in np.argsort(-row)[:2]:
            expected[token] += (expert + 2) * row[expert]
            expected[token, expert] += (expert + 2) * row.sum()
    assert_array_equal(slope, expected.reshape(x.shape))


def test_rows_are_put_in_place_of_others():
    layer = Layer(3, 1)
    tokens, _ = layer.places(
        layer.add(
            "ReduceMax",
            layer.add("Cast", layer.mask_of(1), to=TensorProto.INT32),
            layer.number([1]),
            keepdims=0,
        )
    )
    made = layer.add("Neg", layer.add("Gather", layer.flat, tokens, axis=0))
    index = layer.add("Unsqueeze", tokens, layer.number([1]))
    program = layer.program(layer.add("ScatterND", layer.flat, index, made)).specialize(B=2)
    x = drawn(2, seed=1)
    (found,) = ir.interpret(program, {"x": x}).outputs
    is_chosen = x[..., :3].argmax(-1) == 1
    assert is_chosen.any() and not is_chosen.all()
    assert_array_equal(found, np.where(is_chosen[..., None], -x, x))


def test_a_mask_that_is_no_choice_has_a_slot_for_each_row():
    layer = Layer(3, 1)
    first = layer.add(
        "Squeeze", layer.add("Slice", layer.flat, *map(layer.number, ([0], [1], [1]))), layer.number([1])
    )
    tokens, _ = layer.places(layer.add("Greater", first, layer.number(2, "f4")))
    made = layer.add("Mul", layer.add("Gather", layer.flat, tokens, axis=0), layer.number(5, "f4"))
    index = layer.add("Unsqueeze", tokens, layer.number([1]))
    zeros = layer.add("Mul", layer.flat, layer.number(0, "f4"))
    program = layer.program(layer.add("ScatterND", zeros, index, made, reduction="add"))
    (dealt,) = (op for op in program.ops if op.kind == "dispatch")
    assert str(dealt.outputs[0].type) == f"tensor<1x1x({LENGTH}*B)x{WIDTH}xf32>"
    x = drawn(2, seed=1)
    (found,) = ir.interpret(program.specialize(B=2), {"x": x}).outputs
    assert_array_equal(found, np.where(x[..., :1] > 2, 5 * x, 0))


def used(layer, how):
    """A program of the rows of expert 0, used otherwise than one by one, or of the numbers of their places."""
    tokens, places = layer.places(layer.mask_of(0))
    rows = layer.add("Gather", layer.flat, tokens, axis=0)
    index = layer.add("Unsqueeze", tokens, layer.number([1]))
    if how == "their mean":
        rows = layer.add("Sub", rows, layer.add("ReduceMean", rows, layer.number([0])))
    elif how == "a softmax over them":
        rows = layer.add("Softmax", rows, axis=0)
    elif how == "their sums so far":
        rows = layer.add("CumSum", rows, layer.number(0))
    elif how == "the first of them":
        rows = layer.add("Mul", rows, layer.add("Slice", rows, *map(layer.number, ([0], [1], [0]))))
    elif how == "products of two":
        rows = layer.add("MatMul", layer.add("MatMul", rows, layer.add("Transpose", rows, perm=[1, 0])), rows)
    elif how == "their number in a row":
        count = layer.add("Squeeze", layer.add("Shape", rows, start=0, end=1), layer.number([0]))
        numbers = layer.add(
            "Cast", layer.add("Range", layer.number(0), count, layer.number(1)), to=TensorProto.FLOAT
        )
        rows = layer.add("Mul", rows, layer.add("Unsqueeze", numbers, layer.number([1])))
    elif how == "those of another expert":
        others, _ = layer.places(layer.mask_of(1))
        rows = layer.add("Add", rows, layer.add("Gather", layer.flat, others, axis=0))
    elif how == "at the places of another expert":
        others, _ = layer.places(layer.mask_of(1))
        index = layer.add("Unsqueeze", others, layer.number([1]))
    elif how == "the sum of their elements":
        flat = layer.add("Reshape", rows, layer.number([-1]))
        return layer.program(layer.add("Add", layer.flat, layer.add("ReduceSum", flat)))
    elif how == "their places":
        total = layer.add("ReduceSum", layer.add("Cast", places, to=TensorProto.FLOAT))
        return layer.program(layer.add("Add", layer.flat, total))
    elif how == "as they are":
        return layer.program_of(rows)
    return layer.program(layer.add("ScatterND", layer.flat, index, rows, reduction="add"))


@pytest.mark.parametrize(
    "how",
    [
        "their mean",
        "a softmax over them",
        "their sums so far",
        "the first of them",
        "products of two",
        "their number in a row",
        "those of another expert",
        "at the places of another expert",
        "their places",
        "the sum of their elements",
        "as they are",
    ],
)
def test_chosen_rows_that_are_not_used_one_by_one_are_refused(how):
    layer = Layer(3, 1)
    with pytest.raises(UnsupportedError, match="how many elements are not zero depends on the numbers"):
        used(layer, how)


def test_the_same_mask_written_twice_chooses_the_same_rows():
    layer = Layer(3, 1)
    one, two = (layer.places(layer.mask_of(2))[0] for _ in range(2))
    rows = layer.add("Mul", *(layer.add("Gather", layer.flat, tokens, axis=0) for tokens in (one, two)))
    index = layer.add("Unsqueeze", two, layer.number([1]))
    program = layer.program(layer.add("ScatterND", layer.flat, index, rows)).specialize(B=2)
    x = drawn(2, seed=3)
    (found,) = ir.interpret(program, {"x": x}).outputs
    assert_array_equal(found, np.where((x[..., :3].argmax(-1) == 2)[..., None], x * x, x))


def test_the_number_of_rows_may_still_be_given():
    layer = Layer(3, 1)
    tokens, _ = layer.places(layer.mask_of(0))
    name = next(each.output[0] for each in layer.nodes if each.op_type == "NonZero")
    rows = layer.add(
        "ReduceSum", layer.add("Gather", layer.flat, tokens, axis=0), layer.number([0]), keepdims=0
    )
    types = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, LENGTH, WIDTH])]
    outputs = [helper.make_tensor_value_info(rows, TensorProto.FLOAT, [WIDTH])]
    graph = helper.make_graph(layer.nodes, "rows", types, outputs, [*layer.tensors.values()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    x = drawn(2, seed=4)
    mine = x[..., :3].argmax(-1) == 0
    program = from_onnx(model, sizes={name: int(mine.sum())}).program
    assert_array_equal(ir.interpret(program, {"x": x}).outputs[0], x[mine].sum(0))
