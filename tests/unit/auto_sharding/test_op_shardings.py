"""Every sharding of every operator computes on its tiles what the kernel computes on the whole."""

from __future__ import annotations

import numpy as np
import pytest
from ir_examples import EXAMPLES, EXCHANGING
from layouts import terms
from localized_runs import COLLECTIVES, run_everywhere

from parallelism import Mesh, ir
from parallelism.auto_sharding import WAITS, op_shardings
from parallelism.ir import Op, TensorType, Value
from parallelism.ir.passes.interpreter import run
from parallelism.layouts import Devices, Localized, localize
from parallelism.sharding import TensorSharding

MESH = Mesh(x=2, y=3)
SPLIT = [each for each in EXAMPLES
         if each.kind not in COLLECTIVES | EXCHANGING | {"permute", "reshard", "group_collective", "send", "recv"}
         and "tensor_grains" not in each.attributes]     # a tensor that is cut has a scale of its own for each part


def check(example, sharding):
    """The program of the sharded op equals the op; a sum that is pending in an input has terms in earnest."""
    arrays = example.arrays(whole=WAITS in sharding.letters)
    localized = Localized(sharding.function(), Devices.of(MESH))
    wanted = ir.interpret(example.function(), arrays).outputs
    if WAITS in sharding.letters:
        found = on_terms(localized, arrays)
    else:
        found = run_everywhere(localized, arrays)
    rtol, atol = (1e-6, 1e-6) if example.kind == "scaled_einsum" else (1e-10, 1e-12)      # its sums are in float32
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=f"{example.kind} {sharding.letters}")


def on_terms(localized, arrays):
    """The outputs from inputs whose terms are at random: the op has no collective."""
    held = [terms(layout, x, MESH) if layout.partial else layout.shard(x, MESH)
            for x, layout in zip(arrays, localized.inputs, strict=True)]
    made = [run(localized.program(rank).ops[0], [np.array(part[rank], order="C") for part in held])
            for rank in range(MESH.size)]
    return [layout.unshard([each[i] for each in made], MESH) for i, layout in enumerate(localized.outputs)]


def shardings_of(example):
    op = example.op()
    if len({value.name for value in op.inputs}) < len(op.inputs):
        return ()
    return op_shardings(op, MESH)


@pytest.mark.slow
def test_a_few_shardings_of_every_operator():
    rng = np.random.default_rng(5)
    seen = set()
    for example in SPLIT:
        if example.kind in seen:
            continue
        seen.add(example.kind)
        found = shardings_of(example)
        for i in rng.permutation(len(found))[:1]:
            check(example, found[i])
    assert seen == {each.kind for each in SPLIT}


@pytest.mark.slow
@pytest.mark.timeout(400)     # a crowded machine is slow, not wrong
def test_every_sharding_of_every_operator():
    for example in SPLIT:
        for sharding in shardings_of(example):
            check(example, sharding)


def op(kind, *shapes, attributes=(), dtype="f8"):
    inputs = tuple(Value(f"x{i}", TensorType(dtype, shape)) for i, shape in enumerate(shapes))
    outputs = ir.core.table.meaning(kind, tuple(v.type for v in inputs), tuple(attributes)).outputs
    return Op(kind, inputs, tuple(attributes), tuple(Value(f"y{i}", type) for i, type in enumerate(outputs)))


def test_a_product_has_a_sharding_for_each_choice_of_letters():
    found = {each.letters: each for each in op_shardings(op("matmul", (4, 8), (8, 16)), Mesh(x=2, y=4))}
    i, j, k = "abc" if ("a", "b") in found else sorted({x for pair in found for x in pair if x})
    assert len(found) == 16
    rows = found[next(pair for pair in found if found[pair].outputs[0] == TensorSharding(("x", "y"), None))]
    assert rows.inputs == (TensorSharding(("x", "y"), None), TensorSharding(None, None))
    assert not rows.is_even                                # 4 rows over 8 devices
    sums = [each for each in found.values() if each.pending == (("x", "y"),)]
    assert [each.inputs for each in sums] == [(TensorSharding(None, ("x", "y")), TensorSharding(("x", "y"), None))]
    assert sums[0].flops == 2 * 4 * 1 * 16 and sums[0].nbytes == 8 * (4 * 1 + 1 * 16 + 4 * 16)
    assert len({i, j, k}) == 3


def test_only_even_ones():
    product = op("matmul", (4, 6), (6, 16))
    even = op_shardings(product, Mesh(x=2, y=4), even=True)
    assert {*even} == {each for each in op_shardings(product, Mesh(x=2, y=4)) if each.is_even}
    assert not any(dim.axes == ("x", "y") for each in even for dim in each.inputs[0].dims)


def test_dims_of_extent_1_and_axes_of_one_device_split_nothing():
    found = op_shardings(op("negative", (1, 6)), Mesh(x=2, y=1))
    assert {each.inputs[0] for each in found} == {
        TensorSharding(None, None), TensorSharding(None, "x"), TensorSharding(None, None, partial="x")}


def test_pending_sums_go_through_what_is_linear_alone():
    assert any(WAITS in each.letters for each in op_shardings(op("add", (4, 4), (4, 4)), MESH))
    assert not any(WAITS in each.letters for each in op_shardings(op("exp", (4, 4)), MESH))
    scaled = op("multiply", (4, 4), ())
    assert not any(WAITS in each.letters for each in op_shardings(scaled, MESH))
    by_constant = [each for each in op_shardings(scaled, MESH, constants={"x1"}) if each.letters == (WAITS, WAITS)]
    assert [each.inputs for each in by_constant] == [
        (TensorSharding(None, None, partial=("x", "y")), TensorSharding())]


@pytest.mark.parametrize("kind", ["add", "matmul", "exp"])
def test_the_layouts_are_those_that_localize_keeps(kind):
    example = next(each for each in SPLIT if each.kind == kind)
    for sharding in op_shardings(example.op(), MESH):
        if WAITS not in sharding.letters:
            function = sharding.function()
            assert localize(function, MESH).function == function


def test_collectives_cannot_be_split():
    reduced = op("all_reduce", (4,), attributes=(("axes", ("x",)), ("group", 2), ("op", "sum")))
    with pytest.raises(ValueError, match="all_reduce moves data of given layouts"):
        op_shardings(reduced, MESH)
