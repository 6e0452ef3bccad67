"""Modules of PyTorch in training and in evaluation: the program is that of evaluation, and says where that differs."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from numpy.testing import assert_allclose  # noqa: E402

from parallelism import ir  # noqa: E402
from parallelism.interop import EvaluationWarning, from_torch  # noqa: E402


class Normalized(torch.nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        if norm.running_mean is not None:
            norm.running_mean += torch.arange(3.0)

    def forward(self, x):
        return self.norm(x) * 2


def of_running_statistics(model, x):
    program, weights = from_torch(model, x)
    found = ir.interpret(program.specialize(B=len(x)), {**weights, "x": x.numpy()}).outputs[0]
    mode = model.norm.training
    with torch.no_grad():
        assert_allclose(found, model.eval()(x).numpy(), rtol=1e-5, atol=1e-6)
    model.train(mode)


@pytest.mark.takes_seconds
def test_a_batch_norm_in_training_is_told_and_stays_in_training():
    model = Normalized(torch.nn.BatchNorm1d(3))
    with pytest.warns(EvaluationWarning, match=r"^norm: the program normalizes by running statistics.*module\.eval\(\) says"):
        of_running_statistics(model, torch.randn(5, 3))
    assert model.norm.training


@pytest.mark.takes_seconds
@pytest.mark.parametrize("norm", [torch.nn.BatchNorm1d(3).eval(), torch.nn.LayerNorm(3), torch.nn.Dropout(0.5)], ids=str)
def test_what_does_not_normalize_by_the_batch_now_is_not_told(norm):
    model = torch.nn.Sequential(norm)
    with warnings.catch_warnings(action="error"):
        from_torch(model, torch.randn(5, 3))


@pytest.mark.takes_seconds
def test_three_norms_are_named_and_the_others_counted():
    model = torch.nn.Sequential(*(torch.nn.BatchNorm2d(2) for _ in range(5)))
    with pytest.warns(EvaluationWarning, match=r"^0, 1, 2 and 2 more: "):
        from_torch(model, torch.randn(3, 2, 4, 4))
