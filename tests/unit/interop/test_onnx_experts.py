"""Experts as `from_torch` writes them into a file: their numbers are those of a loop, and their rows keep their sequences."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from numpy.testing import assert_allclose  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from parallelism import ir  # noqa: E402
from parallelism.interop import UnsupportedError, from_onnx  # noqa: E402

WIDTH, HIDDEN = 4, 6


def own(kind, inputs, outputs, **attributes):
    return helper.make_node(kind, inputs, outputs, name=kind.lower(), domain="vcluster", **attributes)


def model_of(count, chosen, *, length=5, transposed=False, flat=False):
    """A layer of experts behind its router, of ``x`` of shape ``(B, length, WIDTH)``, or if ``flat`` of ``(7, WIDTH)``."""
    rng = np.random.default_rng(3)
    up, down = (rng.normal(size=(count, *shape)).astype("f4") for shape in ((WIDTH, HIDDEN), (HIDDEN, WIDTH)))
    stored = {"up": up, "down": down} if transposed else {"up": up.swapaxes(1, 2), "down": down.swapaxes(1, 2)}
    rows = {"x": WIDTH, "choices": chosen, "chances": chosen}
    names = rows if flat else {"x": "tokens", "choices": "experts", "chances": "gates"}
    x, experts, gates = names if flat else names.values()
    how = {"transposed": 1} if transposed else {}
    nodes = [
        own("Deal", [x, experts, gates], ["rows", "of_rows"], count=count),
        own("Product", ["rows", "up"], ["hidden"], **how),
        helper.make_node("Relu", ["hidden"], ["active"]),
        own("Product", ["active", "down"], ["made"], **how),
        own("Combine", ["made", "of_rows", experts], ["sums"])]
    if not flat:
        stored |= {f"{name}_shape": np.array([-1, last]) for name, last in rows.items()}
        nodes[:0] = [helper.make_node("Reshape", [name, f"{name}_shape"], [names[name]]) for name in rows]
    dims = [7] if flat else ["B", length]
    types = {"x": TensorProto.FLOAT, "choices": TensorProto.INT64, "chances": TensorProto.FLOAT}
    inputs = [helper.make_tensor_value_info(name, types[name], [*dims, last]) for name, last in rows.items()]
    outputs = [helper.make_tensor_value_info("sums", TensorProto.FLOAT, ["n", WIDTH])]
    tensors = [numpy_helper.from_array(array, name) for name, array in stored.items()]
    graph = helper.make_graph(nodes, "experts", inputs, outputs, tensors)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("vcluster", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10), up, down


def looped(x, experts, gates, up, down):
    """What a loop over the tokens makes of ``(n, WIDTH)``."""
    sums = np.zeros_like(x)
    for token, choice in np.ndindex(*experts.shape):
        expert = experts[token, choice]
        sums[token] += gates[token, choice] * (np.maximum(x[token] @ up[expert], 0) @ down[expert])
    return sums


def drawn(batch, length, count, chosen):
    """Tokens, and the choices of each: different experts, most of them the first ones."""
    rng = np.random.default_rng(batch)
    x = rng.normal(size=(batch, length, WIDTH)).astype("f4")
    likes = rng.random((batch, length, count)) + np.linspace(1, 0, count)
    experts = np.argsort(-likes, axis=2)[:, :, :chosen]
    return x, experts, rng.random((batch, length, chosen)).astype("f4")


@pytest.mark.parametrize(("count", "chosen", "length"), [(3, 2, 5), (4, 1, 6), (1, 1, 3), (5, 5, 1)])
@pytest.mark.parametrize("transposed", [False, True])
def test_experts_make_of_each_sequence_what_a_loop_makes(count, chosen, length, transposed):
    model, up, down = model_of(count, chosen, length=length, transposed=transposed)
    program, weights = from_onnx(model)
    for batch in (1, 3):
        x, experts, gates = drawn(batch, length, count, chosen)
        given = {"x": x, "choices": experts, "chances": gates, **weights}
        sums, = ir.interpret(program, given).outputs
        tokens = (batch * length, -1)
        expected = looped(x.reshape(tokens), experts.reshape(tokens), gates.reshape(tokens), up, down)
        assert_allclose(sums, expected, rtol=1e-5, atol=1e-6)


def test_rows_keep_the_batch_of_their_sequences_and_none_is_dropped():
    program, _ = from_onnx(model_of(3, 2)[0])
    op, = [op for op in program.ops if op.kind == "dispatch"]
    batch = ir.symbol("B")
    assert op.inputs[0].type.shape == (batch, 5, WIDTH)
    assert op.outputs[0].type.shape == (3, batch, 4, WIDTH)           # 2 * 5 / 3, rounded up
    assert op["drops"] is False


def test_tokens_that_were_never_in_sequences_are_one():
    model, up, down = model_of(3, 2, flat=True)
    program, weights = from_onnx(model)
    x, experts, gates = (each[0] for each in drawn(1, 7, 3, 2))
    sums, = ir.interpret(program, {"x": x, "choices": experts, "chances": gates, **weights}).outputs
    assert_allclose(sums, looped(x, experts, gates, up, down), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [0, -2])
def test_a_layer_without_experts_is_refused_with_its_node(count):
    model = model_of(3, 2)[0]
    deal = next(node for node in model.graph.node if node.op_type == "Deal")
    deal.attribute[0].i = count
    with pytest.raises(UnsupportedError, match=r"deal.*count of experts must be an integer of at least 1"):
        from_onnx(model)
