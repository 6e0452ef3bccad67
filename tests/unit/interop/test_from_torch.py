"""`from_torch`: the programs of modules compute what the modules compute, under the names of their parameters."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

if find_spec("torch") is None or find_spec("onnxscript") is None:
    pytest.skip("they need torch and onnxscript", allow_module_level=True)

from numpy.testing import assert_allclose

from parallelism import ir
from parallelism.interop import UnsupportedError, from_torch
from parallelism.transforms import SGD, Parts, first_state, train_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # importing torch alone takes seconds
MODELS = (
    "a tied GPT, some targets ignored", "label smoothing, some targets ignored", "a perceptron with a loss that is a module",
    "experts", "experts that are looped over", "experts with biases",
    "experts that look up their tokens", "an LSTM in both directions", "a diffusion U-Net", "speech with a decoder",
    "a vision transformer", "a Llama",
    "a residual network", "nn.TransformerEncoder", "a GRU", "chances of two classes", "chances as targets",
    "a negative log likelihood", "an encoder with biased scores", "a loss of places")


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def models(torch):
    return pytest.importorskip("torch_models")


def outputs_of(program, weights, examples):
    names = [value.name for value in program.inputs if value.name not in weights]
    given = {name: x.numpy() for name, x in zip(names, examples, strict=True)}
    return ir.interpret(program, {**weights, **given}).outputs


@pytest.mark.filterwarnings("ignore::parallelism.interop.EvaluationWarning")  # they are in training, to see that they stay so
@pytest.mark.parametrize("name", MODELS)
def test_a_module_and_its_loss(torch, models, name):
    torch.manual_seed(0)
    module, examples, loss = models.MODELS[name]()
    module.train()
    program, weights = from_torch(module, *examples, loss=loss)
    assert all(each.training for each in module.modules())
    module.eval()
    function = loss.forward if isinstance(loss, torch.nn.Module) else loss
    targets = 0 if name in ("nn.TransformerEncoder", "a GRU") else 1
    own = len(examples) - targets
    expected = function(module(*examples[:own]), *examples[own:])
    assert program.symbols == {"B"}
    found, = outputs_of(program, weights, examples)
    assert_allclose(found, expected.detach().numpy(), rtol=1e-4, atol=1e-6)
    trained = {f"p.{each}" for each, _ in module.named_parameters(remove_duplicate=False)}
    assert {each for each in weights if each.startswith("p.")} <= trained
    for each, parameter in module.named_parameters():
        assert f"p.{each}" not in weights or np.shares_memory(weights[f"p.{each}"], parameter.detach().numpy())


def test_shapes_with_symbols_names_lines_and_regions(torch):
    torch.manual_seed(0)
    rows, = ir.symbols("rows")
    module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU())
    program, weights = from_torch(module, ir.TensorType("f4", (rows, 3, 5)))
    assert program.name == "Sequential" and program.symbols == {"rows"}
    assert [(value.name, value.type.shape) for value in program.inputs] == [
        ("p.0.weight", (7, 5)), ("p.0.bias", (7,)), ("input", (rows, 3, 5))]
    assert program.regions == ("0", "1")
    x = torch.randn(2, 3, 5)
    assert_allclose(outputs_of(program, weights, [x])[0], module(x).detach().numpy(), rtol=1e-5, atol=1e-6)


def test_dims_that_are_said_to_be_dynamic(torch, models):
    torch.manual_seed(0)
    module = models.Experts()
    for dynamic in ({"x": {0: "n"}}, [{0: "n"}]):
        program, _ = from_torch(module, torch.randn(1, 12), dynamic=dynamic)
        assert program.symbols == {"n"}
    gpt, ids = models.GPT(23, 6, 8, 2, 1), models.some(23, 1, 4)
    program, weights = from_torch(gpt, ids, dynamic={"ids": {0: "B", 1: "time"}})
    assert program.symbols == {"B", "time"}
    assert_allclose(outputs_of(program, weights, [ids])[0], gpt(ids).detach().numpy(), rtol=1e-4, atol=1e-6)


def test_experts_that_are_looped_over_are_dealt_unless_their_model_says_another_way(torch, models):
    module, examples, loss = models.MODELS["experts that are looped over"]()
    program, _ = from_torch(module, *examples, loss=loss)
    assert [op.kind for op in program.ops if op.kind in ("dispatch", "combine")] == ["dispatch", "combine"] * 2
    assert {op.region for op in program.ops if op.kind == "dispatch"} == {"experts.0", "experts.1"}
    assert not any("forward" in vars(each) for each in module.modules())
    for experts in module.experts:
        experts.config = SimpleNamespace(_experts_implementation="batched_mm")
    with pytest.raises(UnsupportedError):               # its own loop, whose length depends on the numbers
        from_torch(module, *examples, loss=loss)


def test_parts_of_a_tensor_in_bfloat16(torch):
    class Parts(torch.nn.Module):
        def forward(self, x):
            first, second, last = x.split(3, dim=1)
            return (first * second)[:, :2] + last

    x = torch.randn(5, 8, 2).bfloat16()
    program, _ = from_torch(Parts(), x)
    found, = ir.interpret(program, {"x": x.view(torch.uint16).numpy().view(np.dtype("bfloat16"))}).outputs
    assert_allclose(found.astype("f4"), Parts()(x).float().numpy(), rtol=0.01)


def test_what_cannot_be_is_refused_with_its_reason(torch, models):
    linear = torch.nn.Linear(5, 7)
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, got function"):
        from_torch(models.of_tokens, torch.ones(2, 5))
    with pytest.raises(ValueError, match="needs the arguments of the module"):
        from_torch(linear)
    with pytest.raises(TypeError, match=r"input must be a tensor or an ir\.TensorType, got list"):
        from_torch(linear, [1, 2])
    with pytest.raises(ValueError, match="no argument 'x': they are input"):
        from_torch(linear, torch.ones(2, 5), dynamic={"x": {0: "B"}})
    with pytest.raises(ValueError, match=r"input of shape \[2, 5\] has no dim 2"):
        from_torch(linear, torch.ones(2, 5), dynamic=[{2: "B"}])
    with pytest.raises(ValueError, match="loss takes 1 values beside the result, and there are 1 examples"):
        from_torch(linear, torch.ones(2, 5), loss=models.of_tokens)


def test_a_refusal_names_the_line_of_the_module(torch):
    class Determinant(torch.nn.Module):
        def forward(self, x):
            return torch.linalg.det(x)  # this line

    with pytest.raises(UnsupportedError, match=r"Det.*test_from_torch\.py:\d+.*at most 64 rows"):
        from_torch(Determinant(), torch.eye(65).repeat(2, 1, 1))


def test_a_refusal_of_the_exporter_names_the_operator_and_the_line(torch):
    class Values(torch.nn.Module):
        def forward(self, x):
            return torch.linalg.svd(x)[1]       # the exporter makes another operator of it first

    class Branch(torch.nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x     # depends on numbers

    here = Path(__file__).read_text().splitlines()
    lines = [1 + next(number for number, line in enumerate(here) if text in line)
             for text in ("the exporter makes another operator", "# depends on numbers")]
    with pytest.raises(UnsupportedError, match=rf"^aten\._linalg_svd at .*torch\.py:{lines[0]}: PyTorch's exporter"):
        from_torch(Values(), torch.zeros(2, 3, 4))
    with pytest.raises(UnsupportedError, match=rf"^Branch at .*test_from_torch\.py:{lines[1]}: .*decides by the numbers"):
        from_torch(Branch(), torch.zeros(2, 3))


def test_a_shape_that_depends_on_numbers_is_refused_with_what_to_write(torch):
    class Chosen(torch.nn.Module):
        def forward(self, x):
            return x[x.sum(1) > 0]

    with pytest.raises(UnsupportedError, match=r"test_from_torch\.py:\d+: .*as of x\[mask\]: write torch\.where"):
        from_torch(Chosen(), torch.zeros(2, 3))


def test_parameters_without_gradients_are_frozen(torch):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 3))
    module[0].requires_grad_(False)
    x, y = torch.randn(4, 5), torch.randn(4, 3)
    program, weights = from_torch(module, x, y, loss=torch.nn.functional.mse_loss)
    assert dict(program.attributes) == {"frozen": ("p.0.weight", "p.0.bias")}
    step = train_step(program, SGD(0.1))
    given = {value.name: array.numpy() for value, array in zip(Parts.of(step).data, (x, y), strict=True)}
    loss, *after = ir.interpret(step.specialize(B=4), first_state(step, weights) | given).outputs
    found = torch.nn.functional.mse_loss(module(x), y)
    found.backward()
    assert_allclose(loss, found.detach().numpy(), rtol=1e-5)
    assert [value.name for value in step.outputs[1:]] == ["next.p.2.weight", "next.p.2.bias"]
    for array, parameter in zip(after, module[2].parameters(), strict=True):
        assert_allclose(array, (parameter - 0.1 * parameter.grad).detach().numpy(), rtol=1e-4, atol=1e-6)
    module.requires_grad_(False)
    assert not from_torch(module, x).program.attributes               # it is only evaluated


def in_the_document(way):
    """Two lines of docs/interop.md, with a smaller search."""
    text = Path(__file__).parents[3].joinpath("docs", "interop.md").read_text()
    blocks = [block.split("```")[0] for block in text.split("```text\n")[1:]]
    lines = next(block for block in blocks if block.startswith(f"program, weights = {way}("))
    assert len(lines.splitlines()) == 2
    return re.sub(r"devices=64, batch=512", "devices=2, batch=8, microbatch=4, recompute='none'", lines)


def test_the_two_lines_of_the_document(torch, models, capsys, monkeypatch):
    from parallelism.interop import from_onnx
    from parallelism.planning import find_plan

    gpt, ids = models.GPT(16, 8, 8, 2, 1), torch.zeros(2, 6, dtype=torch.int64)
    names = {"from_torch": from_torch, "from_onnx": from_onnx, "find_plan": find_plan, "gpt": gpt, "ids": ids,
             "targets": ids.clone(), "F": torch.nn.functional}
    exec(in_the_document("from_torch"), names)
    monkeypatch.chdir(Path(__file__).parents[2] / "data" / "onnx")
    exec(in_the_document("from_onnx"), names)
    assert capsys.readouterr().out.count("plans fit of") == 2
