"""Experts as people write them in PyTorch: each looks up the tokens that chose it.  Losses and gradients are PyTorch's."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from numpy.testing import assert_allclose  # noqa: E402

from parallelism import ir  # noqa: E402
from parallelism.interop import SizesWarning, UnsupportedError, from_torch  # noqa: E402

F, nn = torch.nn.functional, torch.nn
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
WIDTH, COUNT, CHOSEN, BATCH, LENGTH = 6, 4, 2, 3, 5


class Layer(nn.Module):
    """A router, experts, and a way to write the layer."""

    def __init__(self, written):
        super().__init__()
        self.router, self.written = nn.Linear(WIDTH, COUNT, bias=False), written
        self.experts = nn.ModuleList([
            nn.Sequential(nn.Linear(WIDTH, 8), nn.SiLU(), nn.Linear(8, WIDTH)) for _ in range(COUNT)])

    def forward(self, x):
        return self.written(self, x)

    def chosen(self, x):
        gates, experts = F.softmax(self.router(x), -1).topk(CHOSEN, -1)
        return gates / gates.sum(-1, keepdim=True), experts


def masks_of_one_hot(layer, x):
    flat = x.reshape(-1, WIDTH)
    gates, experts = layer.chosen(flat)
    sums, masks = torch.zeros_like(flat), F.one_hot(experts, COUNT).permute(2, 1, 0)
    for i, expert in enumerate(layer.experts):
        choices, rows = torch.where(masks[i])
        made = expert(flat[None, rows].reshape(-1, WIDTH)) * gates[rows, choices, None]
        sums.index_add_(0, rows, made)
    return sums.reshape(x.shape)


def experts_that_were_hit(layer, x):
    flat = x.reshape(-1, WIDTH)
    gates, experts = layer.chosen(flat)
    sums, masks = torch.zeros_like(flat), F.one_hot(experts, COUNT).permute(2, 1, 0)
    for i in torch.greater(masks.sum(dim=(-1, -2)), 0).nonzero():
        choices, rows = torch.where(masks[i].squeeze(0))
        made = layer.experts[i](flat[rows]) * gates[rows, choices, None]
        sums.index_add_(0, rows, made.to(x.dtype))
    return sums.reshape(x.shape)


def masks_of_tokens(layer, x):
    gates, experts = layer.chosen(x)
    sums = torch.zeros_like(x)
    of_all = torch.zeros(*x.shape[:-1], COUNT).scatter(-1, experts, gates).view(-1, COUNT)
    for i, expert in enumerate(layer.experts):
        mask = (experts == i).any(-1)
        flat = mask.view(-1)
        if flat.any():
            sums[mask] += expert(x.view(-1, WIDTH)[flat]) * of_all[flat, i].unsqueeze(1)
    return sums


def passed_over_if_empty(layer, x):
    flat = x.reshape(-1, WIDTH)
    gates, experts = layer.chosen(flat)
    sums = torch.zeros_like(flat)
    for i, expert in enumerate(layer.experts):
        rows, choices = torch.where(experts == i)
        if rows.numel() == 0:
            continue
        sums.scatter_add_(0, rows[:, None].expand(-1, WIDTH), expert(flat[rows]) * gates[rows, choices, None])
    return sums.view(x.shape)


def counted(layer, x):
    flat = x.reshape(-1, WIDTH)
    gates, experts = layer.chosen(flat)
    sums = torch.zeros_like(flat)
    for i, expert in enumerate(layer.experts):
        mask = experts == i
        if mask.sum() == 0:
            continue
        rows = mask.any(1).nonzero().squeeze(-1)
        sums[rows] = sums[rows] + expert(flat[rows]) * (gates * mask).sum(1)[rows, None]
    return sums.view(x.shape)


def all_three_places(layer, x):
    gates, experts = layer.chosen(x)
    sums = torch.zeros_like(x)
    for i, expert in enumerate(layer.experts):
        b, t, k = torch.where(experts == i)
        sums[b, t] += expert(x[b, t]) * gates[b, t, k, None]
    return sums


def the_best_alone(layer, x):
    gate, best = F.softmax(layer.router(x), -1).max(-1)
    made = torch.zeros_like(x)
    for i, expert in enumerate(layer.experts):
        made[best == i] = expert(x[best == i])
    return made * gate[..., None]


def a_row_for_each_choice(layer, x):
    gates, experts = layer.chosen(x)
    flat, experts = x.view(-1, WIDTH).repeat_interleave(CHOSEN, dim=0), experts.view(-1)
    made = torch.empty_like(flat)
    for i, expert in enumerate(layer.experts):
        made[experts == i] = expert(flat[experts == i])
    return (made.view(-1, CHOSEN, WIDTH) * gates.view(-1, CHOSEN, 1)).sum(1).view(x.shape)


def gates_of_all(layer, x):
    flat = x.reshape(-1, WIDTH)
    gates, experts = layer.chosen(flat)
    of_all, sums = torch.zeros(flat.shape[0], COUNT).scatter(1, experts, gates), torch.zeros_like(flat)
    for i, expert in enumerate(layer.experts):
        (rows,) = (of_all[:, i] > 0).nonzero(as_tuple=True)
        sums = sums.index_add(0, rows, expert(flat.index_select(0, rows)) * of_all[rows, i].unsqueeze(-1))
    return sums.view(x.shape)


ASKING = masks_of_tokens, counted, experts_that_were_hit


def squares(y):
    return (y**2).sum()


def numbers():
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("written", [
    masks_of_one_hot, experts_that_were_hit, masks_of_tokens, passed_over_if_empty, counted, all_three_places, the_best_alone,
    a_row_for_each_choice, gates_of_all])
def test_experts_have_slots_for_their_even_share_and_run_with_those_that_come(written):
    torch.manual_seed(0)
    module, x = Layer(written), numbers()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        program, weights = from_torch(module, x, loss=squares)
    asks = [each for each in told if issubclass(each.category, SizesWarning)]
    assert len(asks) == (written in ASKING)
    assert all("test_torch_chosen_rows.py:" in str(each.message) for each in asks)
    loss = squares(module(x))
    loss.backward()
    names = [f"p.{name}" for name, _ in module.named_parameters()]
    found, *slopes = ir.interpret(
        ir.gradient(program.specialize(B=BATCH), names, keep_outputs=True), {**weights, "x": x.numpy()}).outputs
    assert_allclose(found, loss.detach(), rtol=1e-5)
    for name, slope in zip(names, slopes, strict=True):
        assert_allclose(slope, module.get_parameter(name.removeprefix("p.")).grad, rtol=1e-4, atol=1e-5, err_msg=name)
    dealt = [op for op in program.ops if op.kind == "dispatch"]
    chosen = 1 if written is the_best_alone else CHOSEN
    share = -(-chosen * LENGTH // COUNT)
    assert {op["shape"][2] for op in dealt} == {max(share, 2) * ir.symbol("B")}
    assert not any(op.kind == "argsort" and "layer" in (op.region or "") for op in program.ops)


def test_a_check_that_raises_is_left_out_with_a_warning():
    def checked(layer, x):
        if torch.isnan(x).any():
            raise ValueError("not a number")
        return layer.router(x)

    with pytest.warns(SizesWarning, match=r"test_torch_chosen_rows.py:\d+ asks whether .* masks that have none"):
        program, weights = from_torch(Layer(checked), numbers())
    assert [op.kind for op in program.ops if op.kind == "matmul"] and weights


def test_functions_that_are_given_a_tensor_by_its_name_are_computed():
    def named(layer, x):
        return layer.router(x) * torch.sum(input=x) + torch.count_nonzero(input=x > 0)

    module, x = Layer(named), numbers()
    program, weights = from_torch(module, x)
    (found,) = ir.interpret(program.specialize(B=BATCH), {**weights, "x": x.numpy()}).outputs
    assert_allclose(found, module(x).detach(), rtol=1e-5)


def test_rows_that_are_mixed_are_refused_with_their_line():
    def centred(layer, x):
        _, experts = layer.chosen(x)
        sums, mask = torch.zeros_like(x), (experts == 0).any(-1)
        rows = x[mask]
        sums[mask] += rows - rows.mean(0)
        return sums

    with pytest.raises(UnsupportedError, match="chosen rows may only be changed one by one, and put back") as caught:
        from_torch(Layer(centred), numbers())
    assert "test_torch_chosen_rows.py:" in str(caught.value)
