"""Gradients where a function has a corner: programs of PyTorch have those that PyTorch has."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import torch.nn.functional as F  # noqa: E402, N812
from numpy.testing import assert_allclose  # noqa: E402

from parallelism import ir  # noqa: E402
from parallelism.interop import from_torch  # noqa: E402

CORNERS = torch.tensor([[0.0, 1, -1, 6, 2, -2], [0, 0, 0, 0, 0, 0], [3, -3, 6, -2, 0.5, -0.5]])
WEIGHTS = torch.linspace(0.5, 2, 18).reshape(3, 6)


class Corners(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.x = function, torch.nn.Parameter(CORNERS.clone())

    def forward(self, weights):
        made = self.function(self.x)
        return (made * weights[:, : made.shape[1]] if made.ndim == 2 else made * weights[:, 0]).sum()


FUNCTIONS = {
    "clamp": lambda x: x.clamp(-1, 2),
    "clamp from below": lambda x: x.clamp(min=1),
    "clamp from above": lambda x: x.clamp(max=0),
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, -2, 3),
    "clamp of tensors": lambda x: x.clamp(torch.zeros(6), torch.full((6,), 2.0)),
    "clamp of integers": lambda x: x * x.to(torch.int64).clamp(-1, 1),
    "leaky_relu": F.leaky_relu,
    "prelu": lambda x: F.prelu(x, torch.tensor(0.25)),
    "elu": F.elu,
    "celu": lambda x: F.celu(x, 2),
    "selu": F.selu,
    "norm": lambda x: x.norm(dim=1),
    "normalize": lambda x: F.normalize(x, eps=0.5),
    "std": lambda x: x.std(1),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.flip(1)),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_at_corners_are_those_of_pytorch(name):
    module = Corners(FUNCTIONS[name])
    program, weights = from_torch(module, WEIGHTS, dynamic=[{}])
    module(WEIGHTS).backward()
    (given,) = [value.name for value in program.inputs if value.name not in weights]
    (slope,) = ir.interpret(ir.gradient(program, ["p.x"]), {**weights, given: WEIGHTS.numpy()}).outputs
    assert_allclose(slope, module.x.grad, rtol=1e-5, atol=1e-6)
