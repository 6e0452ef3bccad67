"""Models of PyTorch and JAX are planned on 64 devices; plans of small ones run on processes with the framework's numbers."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
from numpy.testing import assert_allclose

from parallelism import ir
from parallelism.interop import from_jax, from_torch
from parallelism.planning import find_plan
from parallelism.transforms import SGD, first_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROWS = 8
with_torch = pytest.mark.skipif(
    find_spec("torch") is None or find_spec("onnxscript") is None, reason="it needs torch and onnxscript")
with_jax = pytest.mark.skipif(find_spec("jax") is None, reason="it needs jax")


def of_torch(make):
    """The program of a loss of PyTorch, its weights, and the data, loss and gradients of some rows."""
    models = pytest.importorskip("torch_models")
    models.torch.manual_seed(0)
    module, examples, loss = make(models)
    program, weights = from_torch(module, *examples, loss=loss)
    value, gradients = models.loss_and_gradients(module.eval(), loss, examples, 1)
    if "wte.weight" in gradients:
        gradients["head.weight"] = gradients.pop("wte.weight")        # it is tied
    data = [each.name for each in program.inputs if each.name not in weights]
    return program, weights, dict(zip(data, [x.numpy() for x in examples], strict=True)), value, gradients


def gpt(models, vocabulary=96, time=16, width=32, heads=4, layers=4):
    made = models.GPT(vocabulary, time, width, heads, layers)
    tokens = [models.some(vocabulary, ROWS, time, ignored=ignored) for ignored in (False, True)]
    return made, tuple(tokens), models.of_tokens


def mixture(models):
    made = models.Mixture(4, is_transposed=False, has_bias=False, has_gate=True)
    return made, tuple(models.torch.randn(2, ROWS, 6, 12)), models.F.mse_loss


def sorting(models):
    made = models.nn.Sequential(*[models.SortingExperts() for _ in range(4)])
    return made, tuple(models.torch.randn(2, ROWS, 6, 12)), models.F.mse_loss


def vit(models, **sizes):
    size, classes = sizes.get("size", 16), sizes.get("classes", 10)
    made = models.ViT(**{"width": 32, "layers": 4, "classes": 12, **sizes})
    return made, (models.torch.randn(ROWS, 3, size, size), models.some(classes, ROWS)), models.F.cross_entropy


def llama(width=32, inner=48, layers=4, vocabulary=64, heads=4, groups=2, time=16, *, numbers=True):
    """As `of_torch`; without ``numbers`` the program alone."""
    jax, made = pytest.importorskip("jax"), pytest.importorskip("jax_llama")
    shapes = made.shapes(width, inner, layers, vocabulary, heads, groups)
    is_shape = lambda x: isinstance(x, tuple)
    loss, tokens = made.loss_of(heads, groups), ir.TensorType("i32", (ir.symbol("B"), time))
    types = jax.tree.map(lambda shape: ir.TensorType("f32", shape), shapes, is_leaf=is_shape)
    program = from_jax(loss, types, tokens, tokens)
    if not numbers:
        return program
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda shape: rng.normal(size=shape).astype("f4") / 4, shapes, is_leaf=is_shape)
    ids, targets = rng.integers(0, vocabulary, (2, ROWS, time)).astype("i4")
    value, gradients = jax.jit(jax.value_and_grad(loss))(weights, ids, targets)
    names = [each.name for each in program.inputs[:-2]]
    named = lambda tree: dict(zip(names, map(np.asarray, jax.tree.leaves(tree)), strict=True))
    return program, named(weights), {"ids": ids, "targets": targets}, value, named(gradients)


SMALL = {
    "GPT in PyTorch": pytest.param(lambda: of_torch(gpt), marks=with_torch),
    "ViT of nn.TransformerEncoder": pytest.param(lambda: of_torch(vit), marks=with_torch),
    "Llama in JAX": pytest.param(llama, marks=with_jax)}
PLANS = [{}, {"tp": 2, "pp": 2}, {"tp": 4, "zero": 1}, {"pp": 4, "recompute": "full"}]
"""The best plan of all, and that of some kinds."""


@pytest.mark.parametrize("made", SMALL.values(), ids=SMALL)
def test_plans_of_small_models_run_on_processes_with_the_numbers_of_the_framework(cluster_of, made):
    check(cluster_of, made(), PLANS)


@with_torch
@pytest.mark.parametrize("made", [mixture, sorting])
def test_experts_of_pytorch_are_split_by_plans_that_run_with_its_numbers(cluster_of, made):
    check(cluster_of, of_torch(made), [{"ep": 4}, {"ep": 2, "pp": 2}, {"ep": 2, "tp": 2, "recompute": "full"}])


def check(cluster_of, made, fixed_settings):
    """Runs the best plan with each of the settings, and compares the loss and all gradients."""
    program, weights, data, value, gradients = made
    for fixed in fixed_settings:
        plans = find_plan(program, hardware="dgx-h100", devices=8, batch=ROWS, optimizer=SGD(1.0), simulations=1, **fixed)
        plan = plans.best
        assert plan.mesh.size == 8 and {name: plan.settings[name] for name in fixed} == fixed
        function = plan.step.function
        given = first_state(function.specialize(B=ROWS), weights) | data
        run = cluster_of(plan.mesh).run(plan.step, [given[each.name] for each in function.inputs])
        loss, *after = run.result
        assert_allclose(loss, value, rtol=1e-5, err_msg=plan.split)
        assert len(after) == len(gradients)
        for output, new in zip(function.outputs[1:], after, strict=True):
            name = output.name.removeprefix("next.")
            gradient = gradients[name if name in gradients else name.removeprefix("p.")]
            near = 1e-4 * np.abs(gradient).max() + 4e-7 * np.abs(weights[name]).max()
            assert_allclose(weights[name] - new, gradient, rtol=0, atol=near, err_msg=f"{plan.split} {name}")


LARGE = {
    "GPT-2 124M in PyTorch": pytest.param(
        lambda: of_torch_alone(lambda models: gpt(models, 50304, 1024, 768, 12, 12)), 512, marks=with_torch),
    "ViT-B of nn.TransformerEncoder": pytest.param(
        lambda: of_torch_alone(lambda models: vit(
            models, width=768, layers=12, size=224, patch=16, classes=1000, heads=12, inner=3072)), 4096, marks=with_torch),
    "Llama of 1.1 billion weights in JAX": pytest.param(
        lambda: llama(2048, 5632, 22, 32000, 32, 4, 1024, numbers=False), 512, marks=with_jax)}


def of_torch_alone(make):
    module, examples, loss = make(pytest.importorskip("torch_models"))
    return from_torch(module, *[x[:1] for x in examples], loss=loss).program


@pytest.mark.parametrize(("made", "batch"), LARGE.values(), ids=LARGE)
def test_models_of_full_size_are_planned_on_64_devices_from_pieces(made, batch):
    program = made()
    plans = find_plan(program, hardware="dgx-h100", devices=64, batch=batch)
    assert plans.best.is_simulated and plans.gap == 0
    assert plans.timed > 100 and sum(plans.one_by_one.values()) <= 4
