"""The list of NumPy's calls: what is recorded gives NumPy's numbers and slopes, the rest is refused with what works."""

from __future__ import annotations

import numpy as np
import numpy_call_list
import pytest
from numpy.testing import assert_allclose
from numpy_call_list import ARRAYS, CALLS

from parallelism import ir
from parallelism.ir import RecordError

RECORDED = [text for text, message in CALLS.items() if not message]
WITHOUT_SLOPES = ("np.maximum.at", "np.multiply.at")


def recorded(text, finish=lambda result: result):
    names = numpy_call_list.names_in(text)
    types = [ir.TensorType(ARRAYS[name].dtype, ARRAYS[name].shape) for name in names]
    program = ir.record(lambda *given: finish(numpy_call_list.returned(text, dict(zip(names, given, strict=True)))), *types)
    return program, names


def test_most_calls_are_recorded():
    assert len(CALLS) >= 420 and len(RECORDED) >= 0.88 * len(CALLS)


@pytest.mark.sampled(16)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", RECORDED)
def test_a_call_gives_the_numbers_of_numpy(text):
    program, names = recorded(text)
    found, = ir.interpret(program, [ARRAYS[name] for name in names]).outputs
    expected = np.asarray(numpy_call_list.returned(text, {name: ARRAYS[name].copy() for name in names}))
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("text", [text for text, message in CALLS.items() if message])
def test_other_calls_are_refused_with_what_works(text):
    with pytest.raises(RecordError) as caught:
        recorded(text)
    assert CALLS[text] in str(caught.value) and "at <string>:1" in str(caught.value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(8))
def test_the_slopes_are_those_of_the_numbers(part):
    checked = sum(has_the_slopes_of_the_numbers(text) for text in RECORDED[part::8] if not text.startswith(WITHOUT_SLOPES))
    assert checked > 30


def has_the_slopes_of_the_numbers(text):
    """Asserts it, and returns whether the call has slopes."""
    names = numpy_call_list.names_in(text)
    floats = [name for name in names if ARRAYS[name].dtype == float and name != "e"]
    value = np.asarray(numpy_call_list.returned(text, {name: ARRAYS[name].copy() for name in names}))
    if value.dtype != float or not floats:
        return False
    rng = np.random.default_rng(5)
    factors, ways = rng.normal(size=value.shape), {name: rng.normal(size=ARRAYS[name].shape) for name in floats}
    program, _ = recorded(text, lambda result: np.sum(np.nan_to_num(result) * factors))
    gradient = ir.gradient(program, [names.index(name) for name in floats])
    slopes = ir.interpret(gradient, [ARRAYS[name] for name in names]).outputs
    found = sum(np.sum(slope[~np.isnan(ARRAYS[name])] * ways[name][~np.isnan(ARRAYS[name])])
                for slope, name in zip(slopes, floats, strict=True))

    def along(step):
        moved = {name: ARRAYS[name] + step * ways[name] if name in ways else ARRAYS[name].copy() for name in names}
        return np.sum(np.nan_to_num(numpy_call_list.returned(text, moved)) * factors)

    expected = (along(1e-6) - along(-1e-6)) / 2e-6
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6), text
    return True
