"""Models of PyTorch, by both of its exporters, on four processes: the loss and the gradients are those of PyTorch."""

from __future__ import annotations

import io
import warnings
from importlib.util import find_spec

import numpy as np
import pytest

if find_spec("torch") is None or find_spec("onnxscript") is None:
    pytest.skip("they need torch and onnxscript", allow_module_level=True)

from numpy.testing import assert_allclose

from parallelism.interop import from_onnx, from_torch
from parallelism.transforms import SGD, Strategy, first_state, train_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
MODELS = {
    "a tied GPT, some targets ignored": "dp=2 tp=2", "label smoothing, some targets ignored": "dp=2 tp=2",
    "a perceptron with a loss that is a module": "dp=2 tp=2", "experts": "dp=2 tp=2",
    "experts that are looped over": "dp=2 ep=2", "experts with biases": "ep=4",
    "experts that look up their tokens": "dp=2 tp=2", "experts that sort their tokens": "dp=2 ep=2",
    "an LSTM in both directions": "dp=4 zero=1", "a diffusion U-Net": "dp=2 tp=2", "speech with a decoder": "dp=2 tp=2",
    "a vision transformer": "dp=2 tp=2", "a Llama": "dp=2 tp=2", "a residual network": "dp=2 tp=2",
    "nn.TransformerEncoder": "dp=2 tp=2", "a GRU": "dp=4 zero=1", "chances of two classes": "dp=2 tp=2",
    "an encoder with biased scores": "dp=2 tp=2", "chances as targets": "dp=4 zero=1",
    "a negative log likelihood": "dp=2 tp=2", "a loss of places": "dp=4 zero=1"}
"""The models, and how they are split: of some, no product with a weight can be split."""
ONLY_NEW = {"label smoothing, some targets ignored", "a Llama", "chances as targets", "experts that are looped over",
            "experts with biases", "experts that look up their tokens", "experts that sort their tokens"}
"""What the older exporter refuses, or writes as no valid model: label smoothing, nn.RMSNorm, chances as targets, loops."""
WITHOUT_TARGETS = {"nn.TransformerEncoder", "a GRU"}


def by_script(models, module, examples, loss, own):
    """The program that the older exporter of PyTorch gives."""
    torch = models.torch
    names, file = [f"x{i}" for i in range(len(examples))], io.BytesIO()
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(
            models.Loss(module, loss, own).eval(), examples, file, dynamo=False, input_names=names, opset_version=17,
            dynamic_axes={name: {0: "B"} for name in names}, do_constant_folding=False)
    return from_onnx(file.getvalue())


def check(cluster_of, program, weights, examples, expected, text):
    value, gradients = expected
    step = train_step(program, SGD(1.0)).specialize(B=len(examples[0]))
    data = [each.name for each in program.inputs if each.name not in weights]
    given = first_state(step, weights) | {name: x.numpy() for name, x in zip(data, examples, strict=True)}
    strategy, mesh = Strategy.parse_on_mesh(text)
    split = strategy(step)
    run = cluster_of(mesh).run(split, [given[each.name] for each in split.inputs])
    loss, *after = run.result
    assert_allclose(loss, value, rtol=1e-5)
    assert list(run.trace.filter(kind="collective"))
    compared = 0
    for output, new in zip(step.outputs[1:], after, strict=True):
        name = output.name.removeprefix("next.")
        own = name.removeprefix("p.").removeprefix("model.")
        gradient = gradients.get("wte.weight" if own == "head.weight" and "wte.weight" in gradients else own)
        if gradient is None:
            continue        # a buffer: to a file it is as good a tensor as a weight
        # a weight less its gradient is rounded as the weight is
        near = 1e-4 * np.abs(gradient).max() + 4e-7 * np.abs(weights[name]).max()
        assert_allclose(weights[name] - new, gradient, rtol=0, atol=near, err_msg=name)
        compared += 1
    return compared


@pytest.mark.parametrize("exporter", ["torch.export", "TorchScript"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_on_four_processes(cluster_of, name, exporter):
    models = pytest.importorskip("torch_models")
    assert set(MODELS) == set(models.MODELS)
    if exporter == "TorchScript" and name in ONLY_NEW:
        pytest.skip("this exporter cannot write it")
    models.torch.manual_seed(0)
    module, examples, loss = models.MODELS[name]()
    models.with_different_weights(module)
    own = len(examples) - (name not in WITHOUT_TARGETS)
    expected = models.loss_and_gradients(module, loss, examples, own)
    if exporter == "TorchScript":
        program, weights = by_script(models, module, examples, loss, own)
    else:
        program, weights = from_torch(module, *examples, loss=loss)
    count = check(cluster_of, program, weights, examples, expected, MODELS[name])
    constants = name == "chances of two classes" and exporter == "TorchScript"    # a weight of one number, in a file
    assert count == len(expected[1]) - constants
