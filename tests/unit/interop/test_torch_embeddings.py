"""Embeddings of PyTorch: rows of padding learn nothing, bags are mixed; and what hooks do with gradients is told."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from numpy.testing import assert_allclose  # noqa: E402

from parallelism import ir  # noqa: E402
from parallelism.interop import OwnDerivativeWarning, UnsupportedError, from_torch  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROWS, WIDTH = 6, 4
IDS = torch.tensor([[1, 2, 3, 2], [2, 2, 2, 2], [5, 0, 5, 5]])


class Read(torch.nn.Module):
    """Rows of a table, as ``read`` takes them."""

    def __init__(self, read):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.read, self.table = read, torch.nn.Parameter(torch.randn(ROWS, WIDTH, generator=generator))

    def forward(self, ids):
        return torch.tanh(self.read(ids, self.table))


def squares(y):
    return (y * y).sum()


def check(module):
    program, weights = from_torch(module, IDS, loss=squares)
    loss = squares(module(IDS))
    loss.backward()
    (ids,) = [value.name for value in program.inputs if value.name not in weights]
    names = [f"p.{name}" for name, _ in module.named_parameters()]
    gradients = ir.gradient(program.specialize(B=len(IDS)), names, keep_outputs=True)
    found, *slopes = ir.interpret(gradients, {**weights, ids: IDS.numpy()}).outputs
    assert_allclose(found, loss.detach(), rtol=1e-6)
    for slope, (_, parameter) in zip(slopes, module.named_parameters(), strict=True):
        assert_allclose(slope, parameter.grad, rtol=1e-5, atol=1e-7)
    return slopes


@pytest.mark.parametrize("padding", [2, -4, None])
def test_a_row_of_padding_has_no_gradient(padding):
    rows = torch.nn.functional.embedding
    (slope,) = check(Read(lambda ids, table: rows(ids, table, padding_idx=padding)))
    assert np.any(slope[2]) == (padding is None)


def test_a_module_knows_its_row_of_padding():
    module = torch.nn.Sequential(torch.nn.Embedding(ROWS, WIDTH, padding_idx=2), torch.nn.Linear(WIDTH, 3))
    slopes = check(module)
    assert not np.any(slopes[0][2]) and np.any(slopes[0][1])


@pytest.mark.parametrize("padding", [2, -4, None])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_rows_of_a_bag_are_mixed(mode, padding):
    """The second bag has nothing but row 2."""
    bag = torch.nn.functional.embedding_bag
    (slope,) = check(
        Read(lambda ids, table: torch.nn.functional.embedding_bag(ids, table, mode=mode, padding_idx=padding))
    )
    assert np.any(slope[2]) == (padding is None)
    assert torch.nn.functional.embedding_bag is bag


def test_rows_of_a_bag_have_weights():
    weights = torch.linspace(-1, 1, IDS.shape[1])

    def read(ids, table):
        each = weights.expand(ids.shape[0], ids.shape[1])
        return torch.nn.functional.embedding_bag(ids, table, mode="sum", per_sample_weights=each)

    check(Read(read))


def test_gradients_by_frequency_are_refused():
    with pytest.raises(UnsupportedError, match=r"scale_grad_by_freq has gradients that programs do not have"):
        from_torch(torch.nn.Embedding(ROWS, WIDTH, scale_grad_by_freq=True), IDS)


def of_tensor(module, y):
    if y.requires_grad:
        y.register_hook(doubled)
    return y


def doubled(gradient):
    return 2 * gradient


@pytest.mark.parametrize("where", ["doubled", "0", "0.weight"])
def test_hooks_on_gradients_are_told_of(where):
    class Hooked(torch.nn.Sequential):
        def forward(self, x):
            return of_tensor(self, super().forward(x)) if where == "doubled" else super().forward(x)

    module = Hooked(torch.nn.Linear(WIDTH, 3))
    if where == "0":
        module[0].register_full_backward_hook(lambda layer, inputs, outputs: None)
    elif where == "0.weight":
        module[0].weight.register_hook(doubled)
    with pytest.warns(
        OwnDerivativeWarning, match=rf"^{where}: the derivative that a hook on gradients gives is not in"
    ):
        from_torch(module, torch.ones(5, WIDTH), loss=squares)
