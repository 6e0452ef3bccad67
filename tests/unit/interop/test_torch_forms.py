"""What PyTorch writes for one number of rows is a program for any: products of several arrays, places along a dim; complex
numbers are two real ones; and a module on the meta device is a program without numbers."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from numpy.testing import assert_allclose  # noqa: E402

from parallelism import ir  # noqa: E402
from parallelism.interop import UnsupportedError, from_torch  # noqa: E402
from parallelism.planning import find_plan  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROWS, TIME, WIDTH = 4, 3, 6
SECOND = torch.tensor([[2, 0, 1, 1], [0, 0, 2, 1], [1, 2, 0, 0], [2, 2, 1, 0]])


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Computed(torch.nn.Module):
    """What ``compute`` makes of weights and rows."""

    def __init__(self, compute, *shape):
        super().__init__()
        self.compute, self.weights = compute, torch.nn.Parameter(numbers(*shape, seed=1))

    def forward(self, x):
        return self.compute(x, self.weights)


def squares(y):
    return (y * y).sum()


def check(module, *, x=None):
    """The program has the symbol B, and the loss and the gradients are those of PyTorch."""
    x = numbers(ROWS, TIME, WIDTH) if x is None else x
    program, weights = from_torch(module, x, loss=squares)
    assert program.symbols == {"B"}
    loss = squares(module(x))
    loss.backward()
    (data,) = [value.name for value in program.inputs if value.name not in weights]
    names = [f"p.{name}" for name, _ in module.named_parameters()]
    gradients = ir.gradient(program.specialize(B=len(x)), names, keep_outputs=True)
    found, *slopes = ir.interpret(gradients, {**weights, data: x.numpy()}).outputs
    assert_allclose(found, loss.detach(), rtol=1e-5)
    for slope, parameter in zip(slopes, module.parameters(), strict=True):
        expected = torch.view_as_real(parameter.grad) if parameter.is_complex() else parameter.grad
        assert_allclose(slope, expected, rtol=1e-4, atol=1e-5)


def test_an_einsum_of_three_arrays_keeps_the_rows_a_symbol():
    check(Computed(lambda x, w: torch.einsum("btd,btn,btd->bdn", x, x @ w, x), WIDTH, 5))


@pytest.mark.parametrize("is_method", [False, True])
def test_elements_at_places_along_a_dim_keep_the_rows_a_symbol(is_method):
    places = SECOND[:1, :, None]                        # one for all rows and columns: they are broadcast

    def taken(x, w):
        y = x @ w
        return y.take_along_dim(places, -2) if is_method else torch.take_along_dim(y, places, dim=1)

    check(Computed(taken, WIDTH, 5))


def test_elements_at_places_of_all_elements():
    check(Computed(lambda x, w: x.sum((1, 2)).unsqueeze(1) * torch.take_along_dim(w, SECOND), WIDTH, 5))


@pytest.mark.parametrize("dim", [1, -1])
def test_cumulative_products_of_numbers_with_a_zero(dim):
    def products(x, w):
        y = x @ w
        return torch.cumprod(torch.cat([y[..., :2], 0 * y[..., 2:3], y[..., 3:]], -1), dim)

    check(Computed(products, WIDTH, 5))


def test_a_cumulative_product_of_one_element_and_in_another_dtype():
    check(Computed(lambda x, w: (x @ w).cumprod(1, dtype=torch.float64).float() + x.sum(1, keepdim=True).cumprod(1)[..., :5],
                   WIDTH, 5))


BOUNDS = torch.tensor([-0.5, 0.0, 0.0, 0.75])


@pytest.mark.parametrize("count", [
    lambda x: torch.bucketize(x.round(), BOUNDS, right=True),
    lambda x: torch.bucketize(x.round(), BOUNDS, out_int32=True),
    lambda x: torch.searchsorted(BOUNDS, x.round(), side="right"),
    lambda x: torch.searchsorted(BOUNDS.expand(*x.shape[:2], 4).contiguous(), x.round()),
], ids=["bucketize", "bucketize from the left", "searchsorted", "searchsorted in each row"])
def test_places_among_ordered_numbers(count):
    check(Computed(lambda x, w: (x @ w) * count(x)[..., :5], WIDTH, 5))


def packed_attention(x, w):
    """Attention inside of sequences that lie behind each other, as told by where each begins."""
    begins = torch.tensor([0, 1, TIME])
    number = torch.bucketize(torch.arange(x.shape[1]), begins[1:], right=True)
    scores = (x @ w @ x.mT).masked_fill(number[:, None] != number, float("-inf"))
    return scores.softmax(-1) @ x


def test_attention_inside_of_packed_sequences():
    check(Computed(packed_attention, WIDTH, WIDTH))


class Rotated(torch.nn.Module):
    """Rotary positions as products of complex numbers, of which the module keeps a table."""

    def __init__(self, *, is_trained):
        super().__init__()
        angles = torch.outer(torch.arange(8.0), 100.0 ** -torch.arange(WIDTH // 2))
        table = torch.polar(torch.ones_like(angles), angles)
        if is_trained:
            self.table = torch.nn.Parameter(table)
        else:
            self.register_buffer("table", table, persistent=False)
        self.dense = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = torch.view_as_complex(self.dense(x).reshape(*x.shape[:-1], -1, 2))
        turns = self.table[: x.shape[1]].view(1, x.shape[1], -1)
        return torch.view_as_real(y * turns).flatten(2)


@pytest.mark.parametrize("is_trained", [False, True])
def test_complex_numbers_that_a_module_keeps_are_pairs_of_real_ones(is_trained):
    check(Rotated(is_trained=is_trained))


def rotated_heads(x, w):
    """Rotary positions as Llama's and DeepSeek's code has them: queries are complex numbers, turned by a table."""
    queries = torch.view_as_complex((x @ w).reshape(*x.shape[:2], 2, 2, 2))
    angles = torch.outer(torch.arange(float(TIME)), torch.tensor([1.0, 0.3]))
    turns = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(queries * turns[None, :, None, :]).flatten(2)


def spectral_layer(x, w):
    """A layer of a Fourier neural operator: the lowest frequencies are mixed, the others are dropped."""
    found = torch.fft.rfft(x, n=8, dim=1)
    mixed = torch.zeros(x.shape[0], 5, w.shape[1], dtype=torch.cfloat)
    mixed[:, :3] = torch.einsum("bkd,de->bke", found[:, :3], torch.view_as_complex(w))
    return torch.fft.irfft(mixed, n=8, dim=1)[:, :TIME]


def moved_pairs(x, w):
    """Moves of complex numbers: a dim more, one place, parts, repeated ones, and a choice."""
    pairs = torch.view_as_complex((x @ w).reshape(*x.shape[:2], 2, 2, 2))
    a, b = pairs[:, :, 0].unsqueeze(-1), torch.stack(pairs.split(1, 2)[::-1], 0)[0]
    both = torch.where(x[..., :1, None] > 0, a.repeat(1, 1, 1, 2), b.transpose(2, 3).expand(-1, -1, -1, 2))
    return torch.view_as_real(both[:, [2, 0]]).flatten(1)


@pytest.mark.parametrize(("compute", "shape"), [
    (rotated_heads, (WIDTH, 8)), (moved_pairs, (WIDTH, 8)), (spectral_layer, (WIDTH, 5, 2))])
def test_complex_numbers_are_moved_and_transformed_as_pairs(compute, shape):
    check(Computed(compute, *shape))


ATTENTIONS = {
    "one head": ((2,), (2,), (2,), {"is_causal": True}),
    "keys for all heads": ((4, 2), (1, 2), (1, 2), {"is_causal": True}),
    "groups of one": ((4, 2), (4, 2), (4, 2), {"enable_gqa": True}),
    "other groups of values": ((4, 2), (2, 2), (1, 2), {"enable_gqa": True, "scale": 0.3}),
    "two dims of heads": ((2, 3, 2), (1, 3, 2), (2, 1, 2), {"attn_mask": torch.tensor([[[[1, 0, 0]]], [[[1, 1, 0]]]]) > 0}),
}


@pytest.mark.parametrize("case", ATTENTIONS)
def test_attention_takes_any_number_of_dims_and_broadcasts_them(case):
    *heads, options = ATTENTIONS[case]
    counts = [int(np.prod(each)) for each in heads]

    def attend(x, w):
        parts = (x @ w).split(counts, -1)
        arrays = [part.unflatten(-1, own).movedim(1, -2) for part, own in zip(parts, heads, strict=True)]
        return torch.nn.functional.scaled_dot_product_attention(*arrays, **options)

    check(Computed(attend, WIDTH, sum(counts)))


@pytest.mark.parametrize(("pool", "lay"), [
    (torch.nn.AdaptiveAvgPool1d(1), lambda x: x.transpose(1, 2)),
    (torch.nn.AdaptiveAvgPool2d(1), lambda x: x.unflatten(1, (TIME, 1)).permute(0, 3, 1, 2)),
    (torch.nn.AdaptiveAvgPool3d(1), lambda x: x.unflatten(1, (TIME, 1, 1)).permute(0, 4, 1, 2, 3)),
], ids=["1d", "2d", "3d"])
def test_the_mean_of_all_elements_that_lie_by_channels_is_planned(pool, lay):
    module = Computed(lambda x, w: pool(lay(x @ w)).flatten(1), WIDTH, 5)
    check(module)
    program, _ = from_torch(module, numbers(ROWS, TIME, WIDTH), loss=squares)
    assert find_plan(program, hardware="dgx-h100", devices=2, batch=4).best.seconds > 0


class Triplet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(WIDTH, 5)

    def forward(self, a, p, n):
        return torch.nn.functional.triplet_margin_loss(self.dense(a), self.dense(p), self.dense(n))


def test_an_argument_called_as_weights_begin_is_no_weight():
    program, weights = from_torch(Triplet(), *(numbers(ROWS, WIDTH, seed=seed) for seed in range(3)))
    data = [value.name for value in program.inputs if value.name not in weights]
    assert sorted(data) == ["a", "n", "p_"]
    gradient = ir.gradient(program, ["p.dense.bias"])
    assert gradient.outputs[0].type.shape == (5,)
    assert find_plan(program, hardware="dgx-h100", devices=2, batch=8, tp=1, simulations=1).best.is_simulated


# -- the meta device ---------------------------------------------------------------------------------------------------


class Tied(torch.nn.Module):
    """An embedding that is the head, too, with a mask among its buffers."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(9, WIDTH), torch.nn.Linear(WIDTH, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = torch.nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("places", torch.arange(4.0).view(4, 1))

    def forward(self, ids):
        return self.head(self.embedding(ids) * self.scale + self.places[: ids.shape[1]])


def of_ids(z, targets):
    return torch.nn.functional.cross_entropy(z.flatten(0, 1), targets.flatten())


def test_a_module_on_meta_is_a_program_without_numbers():
    with torch.device("meta"):
        module = Tied()
    tokens = ir.TensorType("i64", (ir.symbol("B"), TIME))
    program, weights = from_torch(module, tokens, tokens, loss=of_ids)
    assert weights == {}
    assert all(each.is_meta for each in (*module.parameters(), *module.buffers()))   # it is as it was
    assert module.head.weight is module.embedding.weight
    expected, known = from_torch(Tied(), tokens, tokens, loss=of_ids)
    types = {value.name: value.type for value in program.inputs}
    assert types == {value.name: value.type for value in expected.inputs} | {"places": ir.TensorType("f32", (4, 1))}
    assert known.keys() == {name for name in types if name.startswith("p.")}
    assert find_plan(program, hardware="dgx-h100", devices=2, batch=8, simulations=1).best.is_simulated


def test_a_model_on_meta_takes_no_memory():
    with torch.device("meta"):
        module = torch.nn.Sequential(*(torch.nn.Linear(2**15, 2**15, bias=False) for _ in range(16)))   # 64 GiB
    x = torch.empty(2, 2**15, device="meta")
    program, weights = from_torch(module, x, loss=squares)
    assert len(program.inputs) == 17 and not weights


def test_a_tensor_on_meta_that_is_no_buffer_is_refused():
    module = torch.nn.Sequential(Tied())
    module[0].table = torch.empty(3, device="meta")
    with pytest.raises(UnsupportedError) as caught:
        from_torch(module, ir.TensorType("i64", (ir.symbol("B"), TIME)))
    assert str(caught.value) == (
        "the tensor 0.table: Tied keeps a tensor on the meta device as an attribute, whose numbers are not known; "
        "register_buffer('table', ...) makes it an input of the program")


def test_what_the_host_has_is_in_the_weights_beside_what_is_on_meta():
    module = torch.nn.Sequential(torch.nn.Linear(WIDTH, 5), torch.nn.Linear(5, 3, bias=False, device="meta"))
    program, weights = from_torch(module, numbers(ROWS, WIDTH), loss=squares)
    assert sorted(value.name for value in program.inputs) == ["input", "p.0.bias", "p.0.weight", "p.1.weight"]
    assert weights.keys() == {"p.0.bias", "p.0.weight"}
    assert np.shares_memory(weights["p.0.weight"], module[0].weight.detach().numpy())
