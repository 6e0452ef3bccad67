"""What a mask writes is a choice of two numbers; checks of numbers are left out; what asks for numbers names its line."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from numpy.testing import assert_allclose, assert_array_equal  # noqa: E402

from parallelism import ir  # noqa: E402
from parallelism.interop import UnsupportedError, from_torch  # noqa: E402

F, nn = torch.nn.functional, torch.nn
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROWS, WIDTH = 4, 6


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Computed(nn.Module):
    """What ``compute`` makes of rows and of weights."""

    def __init__(self, compute):
        super().__init__()
        self.compute, self.weights = compute, nn.Parameter(numbers(WIDTH, WIDTH, seed=1))

    def forward(self, x):
        return self.compute(x, self.weights)


def check(module, *examples, loss=None):
    """The program has the symbol B, its numbers and gradients are those of PyTorch, and only one symbol has a bound."""
    squares = loss or (lambda y: (y.float() ** 2).sum())
    program, weights = from_torch(module, *examples, loss=squares)
    assert program.symbols == {"B"}
    own = len(examples) - (0 if loss is None else 1)
    told = squares(module(*examples[:own]), *examples[own:])
    told.backward()
    data = [value.name for value in program.inputs if value.name not in weights]
    names = [f"p.{name}" for name, each in module.named_parameters() if each.grad is not None]
    gradients = ir.gradient(program.specialize(B=len(examples[0])), names, keep_outputs=True)
    arrays = {name: x.numpy() for name, x in zip(data, examples, strict=True)}
    found, *slopes = ir.interpret(gradients, {**weights, **arrays}).outputs
    assert_allclose(found, told.detach(), rtol=1e-5)
    expected = {f"p.{name}": each.grad for name, each in module.named_parameters()}
    for name, slope in zip(names, slopes, strict=True):
        assert_allclose(slope, expected[name], rtol=1e-4, atol=1e-5)


def written(x, w):
    y = x @ w
    y[x > 0.5] = -3.0
    y[:, 1:][x[:, 1:] < -1] = 2.0
    return y


def test_a_mask_writes_a_number():
    check(Computed(written), numbers(ROWS, WIDTH))


def test_a_mask_of_tokens_writes_a_weight_to_each():
    def masked(x, w):
        y = x @ w
        y[x[..., 0] > 0] = w[0]
        return y

    check(Computed(masked), numbers(ROWS, 3, WIDTH))


def test_a_mask_adds_where_it_accumulates():
    check(Computed(lambda x, w: (x @ w).index_put((x > 0,), w[0, 0], accumulate=True)), numbers(ROWS, WIDTH))


def test_the_elements_of_a_source_fill_the_places_of_a_mask_in_order():
    check(Computed(lambda x, w: x.masked_scatter(x > 0, x @ w)), numbers(ROWS, WIDTH))


def test_a_mask_that_is_a_constant_takes_columns():
    mask = torch.tensor([True, False, True, True, False, True])
    check(Computed(lambda x, w: (x @ w)[:, mask]), numbers(ROWS, WIDTH))


@pytest.mark.parametrize("shift", [1, -2])
def test_rows_are_rolled(shift):
    check(Computed(lambda x, w: (x @ w) * x.roll(shift, 0) * x.roll(shift, 1)), numbers(ROWS, WIDTH))


def test_places_wrap_around_at_the_number_of_rows():
    check(Computed(lambda x, w: (x @ w) * x[(torch.arange(x.shape[0]) + 3) % x.shape[0]]), numbers(ROWS, WIDTH))


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_distances_hold_for_any_number_of_rows_without_a_warning(p, recwarn):
    check(Computed(lambda x, w: torch.cdist(x @ w, w, p=p)), numbers(ROWS, WIDTH))
    assert not [each for each in recwarn if "the program holds for" in str(each.message)]


def test_no_gradient_passes_between_equal_rows():
    check(Computed(lambda x, w: torch.cdist(w @ w, (w @ w)[1:4]).sum() * x), numbers(ROWS, WIDTH))


def test_a_deviation_over_the_rows_counts_them():
    check(Computed(lambda x, w: (x @ w).std(0) + (x @ w).var((0, 1))), numbers(ROWS, 3, WIDTH))


def test_the_length_of_rows_is_their_symbol():
    check(
        Computed(lambda x, w: x @ w @ x.T),
        numbers(ROWS, WIDTH),
        torch.zeros(ROWS),
        loss=lambda z, y: F.cross_entropy(z, torch.arange(len(z))) + len(y),
    )
    assert len([1, 2]) == 2
    assert "len" not in globals()


def test_layers_of_torch_take_a_causal_mask():
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(11, 8)
            layer = nn.TransformerDecoderLayer(8, 2, 12, batch_first=True)
            self.layers = nn.TransformerDecoder(layer, 1)
            self.before = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 1)

        def forward(self, ids):
            mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
            h = self.before(self.table(ids), mask=mask)
            return self.layers(h, h.flip(1), tgt_mask=mask)

    check(Language().eval(), torch.arange(20).reshape(4, 5) % 11)


def test_distributions_do_not_check_their_arguments():
    check(
        Computed(lambda x, w: torch.distributions.Normal(x @ w, w[0].exp())),
        numbers(ROWS, WIDTH),
        numbers(ROWS, WIDTH, seed=2),
        loss=lambda d, y: -d.log_prob(y).mean() + d.entropy().mean(),
    )
    with pytest.raises(ValueError, match="constraint"):
        torch.distributions.Normal(0.0, torch.tensor(-1.0))


def test_what_decides_by_numbers_is_told_by_its_line_and_nothing_is_printed(capfd):
    def decided(x, w):
        return x @ w if x.sum() > 0 else x

    line = decided.__code__.co_firstlineno + 1
    with pytest.raises(UnsupportedError, match=r"decides by the numbers of a tensor.*torch\.where") as caught:
        from_torch(Computed(decided), numbers(ROWS, WIDTH))
    assert f"test_torch_masks.py:{line}" in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_derivative_inside_of_a_module_is_told():
    def derived(x, w):
        x = x.detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(torch.tanh(x @ w).sum(), x, create_graph=True)
        return slope

    with pytest.raises(UnsupportedError, match=r"a derivative inside of a module, as by torch\.autograd\.grad"):
        from_torch(Computed(derived), numbers(ROWS, WIDTH))


def test_what_draws_is_told_what_to_do():
    with pytest.raises(UnsupportedError, match=r"draws random numbers.*draw them outside.*as an input"):
        from_torch(Computed(lambda x, w: x @ w + torch.randn_like(x)), numbers(ROWS, WIDTH))
    with pytest.raises(UnsupportedError, match=r"F\.dropout\(x, p, self\.training\) drops nothing"):
        from_torch(Computed(lambda x, w: F.dropout(x @ w)), numbers(ROWS, WIDTH))


def test_a_refusal_names_the_line_of_the_loss():
    def loss(z):
        return torch.matrix_exp(z).sum()

    with pytest.raises(UnsupportedError, match=f"test_torch_masks.py:{loss.__code__.co_firstlineno + 1}"):
        from_torch(Computed(lambda x, w: x @ w), numbers(ROWS, WIDTH, WIDTH), loss=loss)


def test_a_choice_keeps_the_dtype_of_what_is_written():
    def written(x, w):
        counts = (x * 4).to(torch.int32)
        counts[x > 0] = 7.0
        return counts

    x = numbers(ROWS, WIDTH)
    program, weights = from_torch(Computed(written), x)
    found = ir.interpret(program.specialize(B=ROWS), {**weights, "x": x.numpy()}).outputs[0]
    assert found.dtype == np.int32
    assert_array_equal(found, written(x, None))


def test_what_runs_only_without_an_export_is_told_what_to_do():
    def masked(x, w):
        mask = None if torch.compiler.is_compiling() else x > 0
        return x * mask[:, :1] @ w

    with pytest.raises(UnsupportedError, match=r"modules of transformers make no masks.*attention_mask"):
        from_torch(Computed(masked), numbers(ROWS, WIDTH))


def test_a_part_that_is_cast_while_the_module_runs_is_told():
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.linear.to(torch.float64)(x.double())

    with pytest.raises(UnsupportedError, match=r"casts or moves a part of it while it runs.*do so before"):
        from_torch(Cast(), numbers(ROWS, WIDTH))


class Packed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = torch.nn.GRU(WIDTH, 5, batch_first=True)

    def forward(self, x, lengths):
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return torch.nn.utils.rnn.pad_packed_sequence(self.recurrent(packed)[0], batch_first=True, total_length=4)[0]


def test_packed_sequences_are_refused_with_what_to_run():
    with pytest.raises(UnsupportedError, match=r"a size is a number in a tensor.*pack_padded_sequence"):
        from_torch(Packed(), numbers(ROWS, 4, WIDTH), torch.tensor([4, 2, 3, 1]))
