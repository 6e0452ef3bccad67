"""Experts as people write them in PyTorch: rows are sorted by expert, multiplied in groups, and brought back.

Losses and gradients are PyTorch's.
"""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import numpy as np  # noqa: E402
from numpy.testing import assert_allclose, assert_array_equal  # noqa: E402

from parallelism import ir  # noqa: E402
from parallelism.interop import ExpertsWarning, from_torch  # noqa: E402

F, nn = torch.nn.functional, torch.nn
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
WIDTH, HIDDEN, COUNT, CHOSEN, BATCH, LENGTH = 8, 16, 4, 2, 3, 5


class Layer(nn.Module):
    """A router, the weights of experts, and a way to write the layer."""

    def __init__(self, written):
        super().__init__()
        self.router, self.written = nn.Linear(WIDTH, COUNT, bias=False), written
        self.up = nn.Parameter(torch.randn(COUNT, WIDTH, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(COUNT, HIDDEN, WIDTH) / 3)

    def forward(self, x):
        return self.written(self, x.reshape(-1, WIDTH)).reshape(x.shape)

    def chosen(self, x):
        gates, experts = F.softmax(self.router(x), -1).topk(CHOSEN, -1)
        return gates / gates.sum(-1, keepdim=True), experts

    def made(self, rows, ends):
        return torch._grouped_mm(F.silu(torch._grouped_mm(rows, self.up, offs=ends)), self.down, offs=ends)


def as_torchtitan(layer, x):
    gates, experts = layer.chosen(x)
    sizes = torch.histc(experts.view(-1).float(), bins=COUNT, min=0, max=COUNT)
    order = torch.argsort(experts.view(-1), stable=True)
    places = (order // CHOSEN).reshape(-1, 1).expand(-1, WIDTH)
    rows = torch.gather(x, 0, places) * gates.view(-1)[order].reshape(-1, 1)
    return torch.zeros_like(x).scatter_add(0, places, layer.made(rows, torch.cumsum(sizes, 0, dtype=torch.int32)))


def added_to_others(layer, x):
    gates, experts = layer.chosen(x)
    order, sizes = experts.flatten().argsort(), torch.bincount(experts.flatten(), minlength=COUNT)
    made = layer.made(x[order // CHOSEN], sizes.cumsum(0).int())
    return (2 * x).index_add(0, order // CHOSEN, made * gates.flatten()[order, None])


def brought_back(layer, x):
    gates, experts = layer.chosen(x)
    _, order = experts.flatten().sort()
    ends = F.one_hot(experts.flatten(), COUNT).sum(0).cumsum(0).to(torch.int32)
    made = layer.made(x[order // CHOSEN], ends)[order.argsort()]
    return (made.view(-1, CHOSEN, WIDTH) * gates[..., None]).sum(1)


def put_back(layer, x):
    gates, experts = layer.chosen(x)
    flat = experts.flatten()
    sizes = torch.zeros(COUNT, dtype=torch.int64).scatter_add(0, flat, torch.ones_like(flat))
    order = flat.argsort()
    made = layer.made(x.repeat_interleave(CHOSEN, 0)[order], sizes.cumsum(0).to(torch.int32))
    rows = torch.empty_like(made)
    rows[order] = made
    return torch.einsum("tk,tkh->th", gates, rows.view(-1, CHOSEN, WIDTH))


def ends_by_a_search(layer, x):
    gates, experts = layer.chosen(x)
    numbers, order = experts.flatten().sort(stable=True)
    ends = torch.searchsorted(numbers, torch.arange(COUNT), right=True).int()
    made = layer.made(x[order // CHOSEN], ends)[order.argsort()]
    return (made.view(-1, CHOSEN, WIDTH) * gates[..., None]).sum(1)


def the_best_alone(layer, x):
    gate, best = F.softmax(layer.router(x), -1).max(-1)
    order = best.argsort()
    made = layer.made(x[order], torch.bincount(best, minlength=COUNT).cumsum(0).int())
    rows = torch.zeros_like(made)
    rows[order] = made
    return rows * gate[:, None]


def squares(y):
    return (y**2).sum()


@pytest.mark.parametrize("written", [
    as_torchtitan, added_to_others, brought_back, put_back, ends_by_a_search, the_best_alone])
def test_rows_are_dealt_with_the_loss_and_the_gradients_of_pytorch(written):
    torch.manual_seed(0)
    module, x = Layer(written), torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(2))
    with warnings.catch_warnings(action="error", category=ExpertsWarning):
        program, weights = from_torch(module, x, loss=squares)
    share = -(-LENGTH * (1 if written is the_best_alone else CHOSEN) // COUNT)
    dealt = {op["shape"][:3] for op in program.ops if op.kind == "dispatch"}
    assert dealt == {(COUNT, ir.symbol("B"), share)}
    loss = squares(module(x))
    loss.backward()
    names = [f"p.{name}" for name, _ in module.named_parameters()]
    found, *slopes = ir.interpret(
        ir.gradient(program.specialize(B=BATCH), names, keep_outputs=True), {**weights, "x": x.numpy()}).outputs
    assert_allclose(found, loss.detach(), rtol=1e-5)
    for name, slope in zip(names, slopes, strict=True):
        assert_allclose(slope, module.get_parameter(name.removeprefix("p.")).grad, rtol=1e-4, atol=1e-5, err_msg=name)


class Sorting(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("function", [
    lambda x: torch.sort(x, dim=1).values, lambda x: torch.sort(x, 0, descending=True).indices, lambda x: x.argsort(-1, True),
    lambda x: torch.histc(x, bins=5, min=-3, max=4), lambda x: torch.searchsorted(x.sort().values, x[:, :2] + 1, right=True),
    lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 2.0])),
    lambda x: torch.bincount(x.long().abs().flatten(), minlength=9),
    lambda x: torch.bincount(x.long().abs().flatten(), x.flatten(), minlength=9), lambda x: x[:, 0].msort()])
def test_numbers_are_sorted_and_counted_as_pytorch_does(function):
    x = torch.randint(-4, 5, (3, 7), generator=torch.Generator().manual_seed(1)).float()
    program, weights = from_torch(Sorting(function), x)
    (found,) = ir.interpret(program.specialize(B=3) if program.symbols else program, {**weights, "x": x.numpy()}).outputs
    expected = function(x).numpy()
    assert found.dtype == expected.dtype
    assert_array_equal(found, expected)
    assert isinstance(found, np.ndarray)
