"""Where a program from elsewhere lets no gradient pass, ours lets none; and derivatives of its own are told of."""

from __future__ import annotations

import warnings
from importlib.util import find_spec

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from numpy.testing import assert_allclose  # noqa: E402

from parallelism import ir  # noqa: E402
from parallelism.interop import OwnDerivativeWarning, from_jax, from_torch  # noqa: E402

T = ir.TensorType
RNG = np.random.default_rng(0)
W, X = RNG.normal(size=(3, 4)).astype(np.float32), RNG.normal(size=(2, 3)).astype(np.float32)


def stopped(w, x):
    h = x @ w
    target = jax.lax.stop_gradient({"to": jnp.tanh(h), "count": jnp.sum(h > 0)})
    return jnp.mean((h - target["to"]) ** 2) + target["count"]


@pytest.mark.takes_seconds
@pytest.mark.parametrize("rows", [2, ir.symbol("B")])
def test_no_gradient_passes_where_jax_stops_it(rows):
    program = from_jax(stopped, T("f32", W.shape), T("f32", (rows, 3)))
    assert [op.kind for op in program.ops].count("stop_gradient") == 1
    program = program.specialize(**dict.fromkeys(program.symbols, 2))
    assert_allclose(ir.interpret(program, [W, X]).outputs[0], stopped(W, X), rtol=1e-6)
    assert_allclose(ir.interpret(ir.gradient(program, "w"), [W, X]).outputs[0], jax.grad(stopped)(W, X), rtol=1e-5, atol=1e-7)


def test_jax_runs_its_function_afterwards_as_before():
    jitted = jax.jit(stopped)
    from_jax(jitted, T("f32", W.shape), T("f32", X.shape))
    assert "vcluster" not in jitted.lower(W, X).as_text()
    assert_allclose(jitted(W, X), stopped(W, X), rtol=1e-6)


@jax.custom_vjp
def held_back(x):
    return jnp.tanh(x)


held_back.defvjp(lambda x: (jnp.tanh(x), None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


def with_own_derivative(w, x):
    return jnp.mean(jax.checkpoint(held_back)(x @ w) ** 2)


@pytest.mark.parametrize("rows", [2, ir.symbol("B")])
def test_a_derivative_of_its_own_is_told_of_unless_jax_has_differentiated(rows):
    types = T("f32", W.shape), T("f32", (rows, 3))
    with pytest.warns(OwnDerivativeWarning, match=r"^held_back: the derivative that jax\.custom_vjp gives is not in"):
        from_jax(with_own_derivative, *types)
    with warnings.catch_warnings(action="error"):
        program = from_jax(jax.value_and_grad(with_own_derivative), *types)
        from_jax(lambda w, x: jnp.mean(jax.nn.relu(jax.nn.log_softmax(x @ w))), *types)     # of JAX, and the usual ones
    program = program.specialize(**dict.fromkeys(program.symbols, 2))
    loss, slope = ir.interpret(program, [W, X]).outputs
    expected = jax.value_and_grad(with_own_derivative)(W, X)
    assert_allclose(loss, expected[0], rtol=1e-6)
    assert_allclose(slope, expected[1], rtol=1e-5, atol=1e-7)


@jax.custom_jvp
def steeper(x):
    return jnp.tanh(x)


steeper.defjvps(lambda g, result, x: 3 * g)


def test_a_derivative_by_custom_jvp_is_told_of_but_not_those_of_jax_itself():
    types = T("f32", W.shape), T("f32", X.shape)
    with pytest.warns(OwnDerivativeWarning, match=r"^steeper: the derivative that jax\.custom_jvp gives is not in") as told:
        from_jax(lambda w, x: jnp.mean(jax.nn.relu(jax.vmap(steeper)(x @ w))), *types)
    assert len(told) == 1 and told[0].filename == __file__
    with warnings.catch_warnings(action="error"):
        program = from_jax(jax.grad(lambda w, x: jnp.sum(steeper(x @ w))), *types)
        from_jax(lambda w, x: jnp.logaddexp(jnp.sinc(x @ w), jax.nn.relu6(x @ w)), *types)
    assert_allclose(ir.interpret(program, [W, X]).outputs[0], 3 * X.sum(0)[:, None] * np.ones((3, 4)), rtol=1e-5)


@jax.jit
def relu(x):
    return jnp.maximum(x, 0)                # a user's own: of equal numbers each has half of the gradient


CORNERS = {
    "relu": jax.nn.relu, "relu6": jax.nn.relu6, "relu of a user": relu, "clip": lambda x: jnp.clip(x, 0, 6),
    "hard_sigmoid": jax.nn.hard_sigmoid, "clamp": lambda x: jax.lax.clamp(-3.0, x, 6.0), "vmap": jax.vmap(jax.nn.relu)}


@pytest.mark.parametrize("rows", [7, ir.symbol("B")])
@pytest.mark.parametrize("name", CORNERS)
def test_at_corners_the_gradient_is_that_of_jax(name, rows):
    x = np.array([-4, -3, 0, 1, 3, 6, 7], np.float32)
    loss = lambda x: jnp.sum(CORNERS[name](x) * (1 + jnp.arange(x.shape[0])))
    program = from_jax(loss, T("f32", (rows,))).specialize(**{"B": 7} if rows != 7 else {})
    assert_allclose(ir.interpret(program, [x]).outputs[0], loss(x), rtol=1e-6)
    assert_allclose(ir.interpret(ir.gradient(program, "x"), [x]).outputs[0], jax.grad(loss)(x), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_gradient_passes_where_pytorch_detaches():
    if find_spec("torch") is None or find_spec("onnxscript") is None:
        pytest.skip("it needs torch and onnxscript")
    import torch

    class Rounded(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)

        def forward(self, x):
            h = self.up(x)
            straight = h + (torch.round(h) - h).detach()
            with torch.no_grad():
                teacher, scale = self.down(h), h.mean()
            return self.down(straight) * scale - teacher

    module, x, y = Rounded(), torch.randn(5, 3), torch.randn(5, 2)
    program, weights = from_torch(module, x, y, loss=torch.nn.functional.mse_loss)
    loss = torch.nn.functional.mse_loss(module(x), y)
    loss.backward()
    names = [f"p.{name}" for name, _ in module.named_parameters()]
    first, second = (value.name for value in program.inputs if value.name not in weights)
    gradients = ir.gradient(program.specialize(B=5), names, keep_outputs=True)
    found = ir.interpret(gradients, {**weights, first: x.numpy(), second: y.numpy()}).outputs
    expected = [loss.detach(), *(parameter.grad for _, parameter in module.named_parameters())]
    for ours, theirs in zip(found, expected, strict=True):
        assert_allclose(ours, theirs.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_pass_a_checkpoint_of_pytorch_and_a_backward_of_its_own_is_told_of(reentrant):
    if find_spec("torch") is None or find_spec("onnxscript") is None:
        pytest.skip("it needs torch and onnxscript")
    import torch
    from torch.utils.checkpoint import checkpoint

    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.round(x)

        @staticmethod
        def backward(ctx, g):
            return g

    class Net(torch.nn.Module):
        def __init__(self, last):
            super().__init__()
            self.up, self.down, self.last = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2), last

        def forward(self, x):
            return self.last(checkpoint(lambda h: torch.tanh(self.down(h)), self.up(x), use_reentrant=reentrant))

    x, y = torch.randn(5, 3), torch.randn(5, 2)
    mean_square = torch.nn.functional.mse_loss
    with pytest.warns(OwnDerivativeWarning, match=r"^Straight: the derivative that torch\.autograd\.Function gives is not"):
        from_torch(Net(Straight.apply), x, y, loss=mean_square)
    assert "apply" not in vars(torch.autograd.Function.__mro__[1])
    module = Net(torch.nn.Identity())
    with warnings.catch_warnings(action="error", category=OwnDerivativeWarning):
        program, weights = from_torch(module, x, y, loss=mean_square)
    mean_square(module(x), y).backward()
    names = [f"p.{name}" for name, _ in module.named_parameters()]
    first, second = (value.name for value in program.inputs if value.name not in weights)
    inputs = {**weights, first: x.numpy(), second: y.numpy()}
    found = ir.interpret(ir.gradient(program.specialize(B=5), names), inputs).outputs
    for ours, theirs in zip(found, module.parameters(), strict=True):
        assert_allclose(ours, theirs.grad.numpy(), rtol=1e-4, atol=1e-6)
