"""Modules of PyTorch that ask for sizes: a program holds for the sizes with the answer that the example gives."""

from __future__ import annotations

import re
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from numpy.testing import assert_allclose  # noqa: E402

from parallelism import ir  # noqa: E402
from parallelism.interop import SizesWarning, UnsupportedError, from_torch  # noqa: E402
from parallelism.interop.torch_sizes import Bounds  # noqa: E402

X = torch.arange(20.0).reshape(5, 4)


class Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.scale = function, torch.nn.Parameter(torch.tensor([1.0, 2, 3, 4]))

    def forward(self, *given):
        return self.function(*given) * self.scale


def computed(module, *given, **how):
    """What the program of a module computes of 5 rows."""
    program, weights = from_torch(module, *given, **how)
    program = program.specialize(B=5) if program.symbols else program
    names = [each.name for each in program.inputs if each.name not in weights]
    arrays = {name: each.numpy() for name, each in zip(names, given, strict=True)}
    return ir.interpret(program, {**weights, **arrays}).outputs[0]


@pytest.mark.takes_seconds
@pytest.mark.parametrize(("function", "told"), [
    (lambda x: x + 1 if x.shape[0] < 64 else x.flip(0), "B of at most 63"),
    (lambda x: x + 1 if x.shape[0] > 3 else x.flip(0), "B of at least 4"),
    (lambda x: x + 1 if 3 < x.shape[0] < 64 else x.flip(0), "B of 4 to 63"),
])
def test_a_module_that_asks_for_a_size_has_the_program_of_its_example_within_bounds(function, told):
    with pytest.warns(SizesWarning, match=f"^Module: the program holds for {told}: the module asks for this size"):
        found = computed(Module(function), X)
    assert_allclose(found, (X + 1).numpy() * np.array([1, 2, 3, 4]))


@pytest.mark.takes_seconds
def test_a_question_for_which_no_bound_is_suggested_holds_for_larger_numbers():
    def in_chunks(x):
        chunks = (x.shape[0] * 16 + 31) // 32
        return x + 1 if chunks > 1 else x.flip(0)

    with pytest.warns(SizesWarning, match="^Module: the program holds for B of at least 3: "):
        found = computed(Module(in_chunks), X)
    assert_allclose(found, (X + 1).numpy() * np.array([1, 2, 3, 4]))


@pytest.mark.takes_seconds
def test_a_module_that_asks_for_nothing_has_no_bounds():
    with warnings.catch_warnings(action="error", category=SizesWarning):
        assert_allclose(computed(Module(lambda x: x), X), X.numpy() * np.array([1, 2, 3, 4]))


@pytest.mark.takes_seconds
def test_a_loop_over_rows_is_refused_with_what_to_write_and_unrolled_where_the_dim_has_no_symbol():
    module = Module(lambda x: torch.stack([row + k for k, row in enumerate(x)]))
    line = module.function.__code__.co_firstlineno
    with pytest.raises(UnsupportedError) as caught:
        from_torch(module, X)
    told = r"the module is a program of its own for each size B: .*int\(x\.shape\[0\]\) is a number, x\.shape\[0\] a symbol"
    assert re.match(rf"Module at {re.escape(__file__)}:{line}: {told}$", str(caught.value))
    expected = (X.numpy() + np.arange(5)[:, None]) * np.array([1, 2, 3, 4])
    assert_allclose(computed(module, X, dynamic=[{}]), expected)


@pytest.mark.takes_seconds
@pytest.mark.parametrize("shape", [(5, 1, 4), (5, 4)])
def test_a_dim_that_is_squeezed_and_has_several_elements_stays(shape):
    x = torch.arange(20.0).reshape(shape)
    assert_allclose(computed(Module(lambda x: x.squeeze(1)), x), X.numpy() * np.array([1, 2, 3, 4]))


@pytest.mark.parametrize(("bounds", "told"), [
    (Bounds(None, 63), "at most 63"), (Bounds(3, None), "at least 3"), (Bounds(3, 63), "3 to 63"),
])
def test_bounds_in_words(bounds, told):
    assert str(bounds) == told


@pytest.mark.takes_seconds
def test_threads_export_in_turns():
    def rows(x):
        return x + len(x)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: computed(Module(rows), X), range(3)))
    for each in found:
        assert_allclose(each, (X + 5).numpy() * np.array([1, 2, 3, 4]))
    assert "len" not in globals()
