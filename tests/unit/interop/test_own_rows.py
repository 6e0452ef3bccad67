"""Lookups in each row, which frameworks write with the numbers of the rows: no row depends on another one."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx")

from numpy.testing import assert_array_equal
from onnx import parser
from onnx.reference import ReferenceEvaluator

from parallelism import ir
from parallelism.interop import from_onnx
from parallelism.layouts.stages.beginnings import by_rows

NUMBERS = """
    zero = Constant<value_int = 0>() one = Constant<value_int = 1>() last = Constant<value_ints = [-1]>()
    extents = Shape(x) rows = Gather(extents, zero) row = Range(zero, rows, one) column = Unsqueeze(row, last)"""
"""``row`` is 0, 1, ... for each row of ``x``, and ``column`` the same as (B, 1)."""
BESIDE = "beside = Unsqueeze(chosen, last) indices = Concat<axis = -1>(column, beside)"
FOUR = """ones = Constant<value_ints = [-1, 1, 1, 1, 1]>() rows5 = Reshape(row, ones)
    five = Constant<value_ints = [0, 1, 2, 3, 4]>() along = Constant<value_ints = [1, 1, 1, 5, 1]>()
    five5 = Reshape(five, along)
    length = Constant<value_ints = [1, 1, 5, 1]>() batch = Unsqueeze(rows, zero) wide = Concat<axis = 0>(batch, length)
    a = Expand(rows5, wide) b = Expand(five5, wide) indices = Concat<axis = -1>(a, b)"""
"""As transformers looks a mask of attention up: each place of each row."""
GATHERED = {
    "an element": ("float[B,5] x, int64[B] chosen", "float[B] y", f"{BESIDE} y = GatherND(x, indices)"),
    "a part": ("float[B,5,3] x, int64[B] chosen", "float[B,3] y", f"{BESIDE} y = GatherND(x, indices)"),
    "several parts": ("float[B,5,3] x, int64[B,2] chosen", "float[B,2,3] y", """
        two = Constant<value_ints = [1, 2]>() wide = Expand(column, two) wider = Unsqueeze(wide, last)
        beside = Unsqueeze(chosen, last) indices = Concat<axis = -1>(wider, beside) y = GatherND(x, indices)"""),
    "the last dim": ("float[B,5,3] x, int64[B,5] chosen", "float[B,5] y", """
        shape = Constant<value_ints = [1, 5]>() wide = Expand(column, shape) wider = Unsqueeze(wide, last)
        five = Constant<value_ints = [0, 1, 2, 3, 4]>() like = Shape(wide) fives = Expand(five, like)
        second = Unsqueeze(fives, last)
        third = Unsqueeze(chosen, last) indices = Concat<axis = -1>(wider, second, third) y = GatherND(x, indices)"""),
    "each place": ("float[B,5] x, int64[B] chosen", "float[B,1,1,5] y", f"{FOUR} y = GatherND(x, indices)"),
    "from the end": ("float[B,5] x, int64[B] chosen", "float[B] y", """
        under = Less(row, zero) after = Add(row, rows) counted = Where(under, after, row) own = Unsqueeze(counted, last)
        beside = Unsqueeze(chosen, last) indices = Concat<axis = -1>(own, beside) y = GatherND(x, indices)"""),
    "a whole row": ("float[B,5] x, int64[B] chosen", "float[B,5] y", "y = GatherND(x, column)"),
}
SCATTERED = {
    "whole rows": ("float[B,5] x, int64[B] chosen, float[B,5] new", "float[B,5] y", "y = ScatterND(x, column, new)"),
    "sums of rows": ("float[B,5] x, int64[B] chosen, float[B,5] new", "float[B,5] y",
                     'y = ScatterND<reduction = "add">(x, column, new)'),
    "an element": ("float[B,5] x, int64[B] chosen, float[B] new", "float[B,5] y", f"{BESIDE} y = ScatterND(x, indices, new)"),
    "a part": ("float[B,5,3] x, int64[B] chosen, float[B,3] new", "float[B,5,3] y",
               f'{BESIDE} y = ScatterND<reduction = "max">(x, indices, new)'),
    **{f"{n} by {op}": (f"float[B,5] x, int64[B,{n}] chosen, float[B,{n}] new", "float[B,5] y",
                        f'y = ScatterElements<axis = 1, reduction = "{op}">(x, chosen, new)')
       for n, op in ((1, "none"), (3, "none"), (4, "add"), (2, "mul"), (1, "min"))},
    "many along a dim by add": ("float[B,5,3] x, int64[B,20,3] chosen, float[B,20,3] new", "float[B,5,3] y",
                                'y = ScatterElements<axis = 1, reduction = "add">(x, chosen, new)'),
}
OTHERS = {
    "the next row": ("float[B,5] x, int64[B] chosen", "float[B] y", """
        next = Add(row, one) turned = Mod(next, rows) own = Unsqueeze(turned, last)
        beside = Unsqueeze(chosen, last) indices = Concat<axis = -1>(own, beside) y = GatherND(x, indices)"""),
    "rows in another order": ("float[B,5] x, int64[B] chosen", "float[B,5] y", """
        turned = Sub(rows, row) before = Sub(turned, one) own = Unsqueeze(before, last) y = GatherND(x, own)"""),
    "as many rows of more": ("float[B,5] x, int64[B] chosen", "float[B] y", f"""
        more = Concat<axis = 0>(x, x) {BESIDE} y = GatherND(more, indices)"""),
    "the columns exchanged": ("float[B,5] x, int64[B] chosen", "float[B] y", """
        xt = Transpose<perm = [1, 0]>(x) beside = Unsqueeze(chosen, last) indices = Concat<axis = -1>(beside, column)
        y = GatherND(xt, indices)"""),
    "the diagonal": ("float[B,5] x, int64[B] chosen", "float[B] y", """
        xt = Transpose<perm = [1, 0]>(x) square = MatMul(x, xt) indices = Concat<axis = -1>(column, column)
        y = GatherND(square, indices)"""),
    "two in a row": ("float[B,5] x, int64[B,2] chosen, float[B,2] new", "float[B,5] y", """
        two = Constant<value_ints = [1, 2]>() wide = Expand(column, two) wider = Unsqueeze(wide, last)
        beside = Unsqueeze(chosen, last) indices = Concat<axis = -1>(wider, beside) y = ScatterND(x, indices, new)"""),
    "a part of the rows": ("float[B,5] x, int64[1,2] chosen, float[1,2] new", "float[B,5] y",
                           "y = ScatterElements<axis = 1>(x, chosen, new)"),
}
"""What is no lookup in the own row, or not known to be one."""


def built(inputs, output, body):
    text = f'<ir_version: 10, opset_import: ["": 18]> g ({inputs}) => ({output}) {{ {NUMBERS} {body} }}'
    return parser.parse_model(text)


def arguments_of(model, batch, dtype=np.float32):
    rng = np.random.default_rng(7)
    given = {}
    for value in model.graph.input:
        shape = [dim.dim_value or batch for dim in value.type.tensor_type.shape.dim]
        if value.name == "chosen" and shape[1:2] == [20]:
            given["chosen"] = rng.integers(-5, 5, shape)
        elif value.name == "chosen":  # each at most once in a row, and some from the end
            each = rng.permuted(np.tile(np.arange(5), (shape[0], 1)), axis=1)
            taken = each[:, : shape[1] if len(shape) > 1 else 1].reshape(shape)
            given["chosen"] = np.where(rng.random(shape) < 0.3, taken - 5, taken)
        else:
            given[value.name] = rng.integers(-9, 10, shape).astype(dtype)
    return given


def checked(case, batch):
    model = built(*case)
    given = arguments_of(model, batch)
    if case is GATHERED["the last dim"]:
        given["chosen"] = given["chosen"] % 3
    expected, = ReferenceEvaluator(model).run(None, given)
    program, weights = from_onnx(model)
    found, = ir.interpret(program, {**weights, **given}).outputs
    assert_array_equal(found, expected)
    assert found.dtype == expected.dtype


def cut_by_rows(case):
    """A sum over what a case gives, in a form that can be cut into microbatches; ``ValueError`` if it cannot."""
    inputs, _, body = case
    program, weights = from_onnx(built(inputs, "float total", f"{body} total = ReduceSum<keepdims = 0>(y)"))
    by_rows(program, "B", list(weights))


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("case", [*GATHERED.values(), *SCATTERED.values()], ids=[*GATHERED, *SCATTERED])
def test_a_lookup_in_the_own_row_stays_in_it(case, batch):
    checked(case, batch)
    cut_by_rows(case)


@pytest.mark.parametrize("batch", [2, 4])
@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS)
def test_another_lookup_is_what_it_was(case, batch):
    checked(case, batch)


@pytest.mark.parametrize("name", ["the next row", "rows in another order"])
def test_a_lookup_in_other_rows_is_refused(name):
    with pytest.raises(ValueError, match="does not compute each row alone"):
        cut_by_rows(OTHERS[name])


def test_equal_largest_updates_of_a_row_share_its_gradient_evenly():
    body = 'y = ScatterElements<axis = 1, reduction = "max">(x, chosen, new) total = ReduceSum<keepdims = 0>(y)'
    program, weights = from_onnx(built("float[B,5] x, int64[B,2] chosen, float[B,2] new", "float total", body))
    gradient = ir.gradient(program.specialize(B=1), ["x", "new"])
    given = {"x": np.full((1, 5), 3, np.float32), "chosen": np.array([[1, 1]]), "new": np.full((1, 2), 3, np.float32)}
    of_x, of_new = ir.interpret(gradient, {**weights, **given}).outputs
    assert_array_equal(of_new[0, 0], of_new[0, 1])
    assert_array_equal(of_x[0, 1] + of_new.sum(), 1)


def chosen_log_probability(jax, x, chosen):
    return -jax.nn.log_softmax(x)[jax.numpy.arange(x.shape[0]), chosen].sum()


def last_part(jax, x, chosen):
    return (x[jax.numpy.arange(x.shape[0]), chosen] ** 2).sum()


def several_parts(jax, x, chosen):
    return (x[jax.numpy.arange(x.shape[0])[:, None], chosen] ** 2).sum()


def last_dim(jax, x, chosen):
    rows, columns = jax.numpy.arange(x.shape[0]), jax.numpy.arange(x.shape[1])
    return (x[rows[:, None], columns, chosen] ** 2).sum()


def set_elements(jax, x, chosen):
    return (x.at[jax.numpy.arange(x.shape[0]), chosen].set(2.0) ** 2).sum()


def added_to_elements(jax, x, chosen):
    return (x.at[jax.numpy.arange(x.shape[0])[:, None], chosen].add(2.0) ** 2).sum()


def clipped_to_the_last(jax, x, chosen):
    rows = jax.numpy.arange(x.shape[0])[:, None]
    return (x.at[rows, jax.numpy.arange(7)].get(mode="clip") ** 2).sum() + chosen.sum()


def dropped_outside(jax, x, chosen):
    return (x.at[jax.numpy.arange(x.shape[0]), chosen + 3].set(2.0, mode="drop") ** 2).sum()


@pytest.mark.takes_seconds
@pytest.mark.parametrize(("function", "of_x", "of_chosen"), [
    (chosen_log_probability, (5,), ()), (last_part, (5, 3), ()), (several_parts, (5, 3), (2,)), (last_dim, (4, 5), (4,)),
    (set_elements, (5,), ()), (added_to_elements, (5,), (2,)), (dropped_outside, (5,), ()),
    (clipped_to_the_last, (5,), ())])
def test_a_function_of_jax_looks_up_in_own_rows(function, of_x, of_chosen):
    jax = pytest.importorskip("jax")
    from functools import partial

    from parallelism.interop import from_jax

    rows, = ir.symbols("B")
    loss = partial(function, jax)
    program = from_jax(loss, ir.TensorType("f32", (rows, *of_x)), ir.TensorType("i32", (rows, *of_chosen)))
    by_rows(program, "B", [])
    rng = np.random.default_rng(3)
    given = rng.normal(size=(4, *of_x)).astype(np.float32), rng.integers(-5, 5, (4, *of_chosen)).astype(np.int32)
    names = [value.name for value in program.inputs]
    gradient = ir.gradient(program.specialize(B=4), names[:1], keep_outputs=True)
    found = ir.interpret(gradient, dict(zip(names, given, strict=True))).outputs
    for ours, theirs in zip(found, jax.value_and_grad(loss)(*given), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def of_own_rows(torch):
    """A loss of PyTorch with a mask by positions, shifted labels, chosen groups and the last token of each row."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(9, 6))

        def forward(self, tokens, last):
            own = torch.arange(tokens.shape[0])
            shifted = tokens.new_zeros(tokens.shape)
            shifted[:, 1:] = tokens[:, :-1].clone()
            shifted[:, 0] = 3
            mask = (tokens > 2)[own[:, None, None, None], torch.arange(5)]
            x = self.table[shifted]
            scores = (x @ x.transpose(1, 2))[:, None].masked_fill(~mask, -1e4).softmax(-1)
            mixed = (scores[:, 0] @ x)[own, last]
            groups = torch.zeros_like(mixed).scatter(1, mixed.topk(2).indices, 1.0)
            return (mixed * groups).square().mean()

    return Model()


@pytest.mark.takes_seconds
def test_a_module_of_pytorch_looks_up_in_own_rows():
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    from parallelism.interop import from_torch

    torch.manual_seed(0)
    model, given = of_own_rows(torch), (torch.randint(1, 9, (4, 5)), torch.tensor([0, 4, 2, 2]))
    program, weights = from_torch(model, *given)
    by_rows(program, "B", list(weights))
    gradient = ir.gradient(program.specialize(B=4), ["p.table"], keep_outputs=True)
    loss, of_table = ir.interpret(gradient, {**weights, "tokens": given[0].numpy(), "last": given[1].numpy()}).outputs
    expected = model(*given)
    expected.backward()
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(of_table, model.table.grad.numpy(), rtol=1e-4, atol=1e-6)
