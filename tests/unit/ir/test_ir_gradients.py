"""Gradients of whole programs: functions again, equal to central differences; the example models."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from parallelism import Mesh, TensorSharding, ir, models, plan_resharding
from parallelism.kernels import attend, causal_mask, choose_experts, layer_norm

T = ir.TensorType
B, D, S, V = ir.symbols("B D S V")
E, C, G, H = ir.symbols("E C G H")
NUMBERS = {"B": 3, "D": 4, "S": 5, "V": 7, "E": 3, "C": 2, "G": 2, "H": 6}
MODELS = {
    "mlp": models.mlp((D, 8, 2), B),
    "convolutional": models.convolutional((7, 6, 2), (3, 4), 5, B),
    "gpt": models.gpt(V, D, 2, 2, S, B),
    "mixture": models.mixture(D, H, E, 2, C, G, S),
}


def numbered(function):
    return function.specialize(**{name: NUMBERS[name] for name in function.symbols})


def arrays_for(function, seed=0):
    rng = np.random.default_rng(seed)
    return [
        rng.normal(size=v.type.shape) if v.type.dtype.kind == "f" else rng.integers(0, 5, v.type.shape)
        for v in function.inputs
    ]


def slopes(function, arrays, directions, step=1e-5):
    """How each output changes along a direction of all floating-point inputs: central differences of fourth order."""
    sides = [
        ir.interpret(function, [
            x + by * step * d if x.dtype.kind == "f" else x for x, d in zip(arrays, directions, strict=True)
        ]).outputs for by in (1, -1, 2, -2)
    ]
    return [(8 * (a - b) - (c - d)) / (12 * step) for a, b, c, d in zip(*sides, strict=True)]


def check_slopes(function, seed=0):
    grad = ir.gradient(function)
    arrays = arrays_for(function, seed)
    found = iter(ir.interpret(grad, arrays).outputs)
    directions = [d if d.dtype.kind == "f" else np.zeros(d.shape) for d in arrays_for(function, seed + 1)]
    expected, = slopes(function, arrays, directions)
    total = sum((next(found) * d).sum() for x, d in zip(arrays, directions, strict=True) if x.dtype.kind == "f")
    assert_allclose(total, expected, rtol=1e-7, atol=1e-8)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_of_a_model_is_that_of_central_differences(name):
    check_slopes(numbered(MODELS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_models_on_many_inputs(name):
    for seed in range(30):
        check_slopes(numbered(MODELS[name]), seed)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
def test_a_gradient_is_a_function_again(name):
    function = MODELS[name]
    grad = ir.gradient(function, keep_outputs=True)
    floats = [v for v in function.inputs if v.type.dtype.kind == "f"]
    assert [v.type for v in grad.outputs] == [v.type for v in (*function.outputs, *floats)]
    assert grad.inputs == function.inputs and grad.name == f"{name}.gradient"
    assert ir.parse(str(grad)) == grad
    assert numbered(grad) == ir.gradient(numbered(function), keep_outputs=True)
    value, peak = ir.interpret(numbered(grad), arrays_for(numbered(function)))
    assert_array_equal(value[0], ir.interpret(numbered(function), arrays_for(numbered(function))).outputs[0])
    assert peak == ir.peak_bytes(grad).specialize(**{s: NUMBERS[s] for s in grad.symbols})


def test_the_gradient_of_a_gradient():
    function = ir.record(lambda x: np.sum(x ** 3 * np.sin(x)), T("f64", (4,)))
    twice = ir.gradient(ir.gradient(function))
    x, seed = np.array([0.5, 1.0, 1.5, 2.0]), np.array([1.0, 2, 3, 4])
    found, = ir.interpret(twice, [x, seed]).outputs
    assert_allclose(found, seed * (6 * x * np.sin(x) + 6 * x**2 * np.cos(x) - x**3 * np.sin(x)))


# -- what is asked for -------------------------------------------------------------------------------------------------

PRODUCT = ir.record(lambda a, b, n: np.sum(a @ b) * 2, T("f64", (2, 3)), T("f64", (3, 4)), T("i64", (2,)))


@pytest.mark.parametrize(("names", "expected"), [
    ("b", ["b"]), (1, ["b"]), (["b", "a"], ["b", "a"]), ([1, 0], ["b", "a"]), (None, ["a", "b"]), ([], []),
])
def test_inputs_are_asked_for_by_name_or_number(names, expected):
    a, b = np.ones((2, 3)), np.arange(12.0).reshape(3, 4)
    found = ir.interpret(ir.gradient(PRODUCT, names), [a, b, np.zeros(2, int)]).outputs
    right = {"a": 2 * np.ones((2, 4)) @ b.T, "b": 2 * a.T @ np.ones((2, 4))}
    assert len(found) == len(expected)
    for gradient, name in zip(found, expected, strict=True):
        assert_array_equal(gradient, right[name])


def test_what_no_gradient_needs_is_left_out():
    grad = ir.gradient(PRODUCT, "b")
    assert "matmul" not in {op.kind for op in grad.ops}
    assert grad.flops < ir.gradient(PRODUCT).flops


def test_several_outputs_take_a_gradient_each():
    function = ir.record(lambda x: (x * 2, x.sum(), x > 0), T("f64", (3,)))
    grad = ir.gradient(function)
    assert [str(v) for v in grad.inputs[1:]] == ["%grad.0: tensor<3xf64>", "%grad.1: tensor<f64>"]
    found, = ir.interpret(grad, [np.zeros(3), np.array([1.0, 2, 3]), np.array(10.0)]).outputs
    assert_array_equal(found, [12, 14, 16])


def test_an_input_that_changes_nothing_has_gradient_zero():
    function = ir.record(lambda x, y: np.sum(x) + np.sum(np.floor(y)), T("f64", (2,)), T("f64", (3,)))
    assert_array_equal(ir.interpret(ir.gradient(function, "y"), [np.ones(2), np.ones(3)]).outputs[0], np.zeros(3))


def test_dtypes_of_gradients_are_those_of_the_inputs():
    function = ir.record(lambda x, y: np.sum(x * y), T("f32", (2,)), T("f64", (2,)))
    found = ir.interpret(ir.gradient(function), [np.ones(2, "f4"), np.full(2, 3.0)]).outputs
    assert [x.dtype for x in found] == [np.float32, np.float64]


@pytest.mark.parametrize(("function", "names", "message"), [
    (PRODUCT, "c", "@_lambda_|has no input 'c': its inputs are a, b, n"),
    (PRODUCT, "n", "input %n: tensor<2xi64> has no gradient, it is not floating-point"),
    (PRODUCT, 3, "has no input 3"),
    (ir.record(lambda x: x > 0, T("f64", ())), None, "returns no floating-point number to differentiate"),
    (ir.record(lambda x: ir.apply("all_reduce", x, axes=["a"], group=1, op="max"), T("f64", ())), None,
     "all_reduce by max has no derivative"),
])
def test_what_has_no_gradient_is_refused(function, names, message):
    with pytest.raises(ValueError, match=message):
        ir.gradient(function, names)


def test_an_operator_without_derivative_is_named(monkeypatch):
    from dataclasses import replace

    from parallelism.ir.core import OPERATORS

    function = ir.record(lambda x: np.exp(x), T("f64", ()))
    monkeypatch.setitem(OPERATORS, "exp", replace(OPERATORS["exp"], derivative=None))
    with pytest.raises(ValueError, match=r'the operator exp has no derivative: %0 = "exp"'):
        ir.gradient(function)


def test_a_second_derivative_of_an_operator_with_its_own_gradient_is_refused_by_name():
    def loss(gate, x):
        return np.sum(ir.apply("clamped_swiglu", gate, x))

    first = ir.gradient(ir.record(loss, T("f64", (3, 4)), T("f64", (3, 4))), 0)
    with pytest.raises(ValueError, match="the operator clamped_swiglu_gradient has no derivative: "):
        ir.gradient(first)


steps = st.sampled_from(["add", "multiply", "tanh", "matmul", "transpose", "sum", "softmax", "slice", "concatenate"])


@given(st.lists(steps, min_size=1, max_size=5), st.integers(0, 99))
def test_gradients_of_chains_of_operators(kinds, seed):
    def chain(x, w):
        for kind in kinds:
            if kind in ("add", "multiply"):
                x = getattr(np, kind)(x, w[0])
            elif kind == "matmul":
                x = x @ w
            elif kind == "transpose":
                x = (x.T @ x)[:2] / 2 + x[0]
            elif kind == "sum":
                x = x - x.sum(axis=0)
            elif kind == "softmax":
                x = ir.apply("softmax", x, axis=1)
            elif kind == "slice":
                x = x * x[:, :1]
            elif kind == "concatenate":
                x = np.concatenate([x, x[:1] * 2])
            else:
                x = np.tanh(x)
        return np.sum(x * x)

    check_slopes(ir.record(chain, T("f64", (2, 3)), T("f64", (3, 3))), seed)


# -- the models are what they say --------------------------------------------------------------------------------------


def test_the_perceptron_in_numpy():
    function = numbered(MODELS["mlp"])
    arrays = arrays_for(function)
    p = dict(zip([v.name for v in function.inputs], arrays, strict=True))
    hidden = np.maximum(p["x"] @ p["p.w0"] + p["p.b0"], 0)
    expected = ((hidden @ p["p.w1"] + p["p.b1"] - p["targets"]) ** 2).mean()
    assert_array_equal(ir.interpret(function, arrays).outputs[0], expected)


def test_a_convolution_in_loops():
    rng = np.random.default_rng(0)
    x, w = rng.integers(-3, 4, (2, 6, 5, 3)).astype(float), rng.integers(-3, 4, (3, 2, 3, 4)).astype(float)
    function = ir.record(models.convolution, T("f64", (B, 6, 5, 3)), T("f64", w.shape))
    expected = np.zeros((2, 4, 4, 4))
    for i in range(3):
        for j in range(2):
            expected += x[:, i:i + 4, j:j + 4] @ w[i, j]
    assert_array_equal(ir.interpret(function, [x, w]).outputs[0], expected)


def test_the_gpt_by_the_kernels_of_attention():
    function = numbered(models.gpt(V, D, 2, 1, S, B))
    arrays = arrays_for(function)
    p = dict(zip([v.name.removeprefix("p.") for v in function.inputs[:-2]], arrays[:-2], strict=True))
    x = p["tokens"][arrays[-2]] + p["positions"]
    projected = layer_norm(x, p["0.norm1"], p["0.norm1_bias"]) @ p["0.qkv"]
    q, k, v = np.split(projected.reshape(3, 5, 2, 3 * 2), 3, axis=-1)
    x = x + attend(q, k, v, causal_mask(range(5), range(5))).out.reshape(3, 5, 4) @ p["0.out"]
    x = x + ir.apply("gelu", layer_norm(x, p["0.norm2"], p["0.norm2_bias"]) @ p["0.up"]) @ p["0.down"]
    logits = (layer_norm(x, p["norm"], p["norm_bias"]) @ p["tokens"].T).reshape(15, 7)
    powers = np.exp(logits)
    expected = -np.log(powers[np.arange(15), arrays[-1].ravel()] / powers.sum(axis=1)).mean()
    assert_allclose(ir.interpret(function, arrays).outputs[0], expected, rtol=1e-12)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("chosen", "capacity"), [(1, 5), (1, 2), (2, 2), (2, 3), (3, 9), (3, 1)])
def test_a_mixture_token_by_token(chosen, capacity):
    function = models.mixture(4, 6, 3, chosen, capacity, 2, 5, balance=0.5)
    x, targets = arrays_for(function, chosen)[-2:]
    p = dict(zip(("router", "up", "down"), arrays_for(function, chosen), strict=False))
    out, shares = x.copy(), []
    for group in range(2):
        choice = choose_experts(x[group] @ p["router"], chosen)
        room = [capacity] * 3
        for rank in range(chosen):
            for token, expert in enumerate(choice.experts[:, rank]):
                if room[expert]:
                    room[expert] -= 1
                    hidden = np.maximum(x[group, token] @ p["up"][expert], 0)
                    out[group, token] += choice.gates[token, rank] * (hidden @ p["down"][expert])
        first = np.bincount(choice.experts[:, 0], minlength=3) / 5
        shares.append((first * choice.probabilities.mean(axis=0)).sum())
    expected = ((out - targets) ** 2).mean() + 0.5 * 3 * np.mean(shares)
    assert_allclose(ir.interpret(function, [*p.values(), x, targets]).outputs[0], expected, rtol=1e-12)
    check_slopes(function, chosen)


def test_rows_of_a_mixture_go_to_their_experts_and_back_by_all_to_all():
    """Split by groups before and after, by experts between."""
    function = models.mixture(4, 6, 8, 2, 2, 8, 5)
    dispatch, combine = (function.region(path).ops[0] for path in ("dispatch", "combine"))
    experts = [str(op.rule) for op in function.region("experts").ops if op.kind == "einsum"]
    assert experts == ["egcd,edh->egch", "egch,ehd->egcd"]
    assert [str(dispatch.rule), str(combine.rule)] == ["gtec,gtd->egcd", "gtec,egcd->gtd"]
    by_group, by_expert = TensorSharding(None, "ep", None, None), TensorSharding("ep", None, None, None)
    rows = dispatch.outputs[0].type.shape
    for before, after in ((by_group, by_expert), (by_expert, by_group)):
        plan = plan_resharding(before, after, rows, "f8", Mesh(ep=4))
        assert [step.kind for step in plan.steps] == ["all_to_all"]
