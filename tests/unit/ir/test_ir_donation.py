"""Donated inputs: their memory is taken by outputs, the numbers stay the same, and what is impossible is told."""

from __future__ import annotations

import re
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.testing import assert_array_equal

from parallelism import ir
from parallelism.ir.passes import donations, owners

T = ir.TensorType
X = T("f64", (4, 6))
SQUARE = T("f64", (5, 5))


def matched(function: ir.Function, *names: str) -> dict[str, str]:
    """The donated inputs, and the values that lie in their memory."""
    return {value.name: made.name for made, value in donations(function, names).items()}


def adam(p: Any, g: Any, m: Any, v: Any) -> Any:
    new = {"p": {}, "m": {}, "v": {}}
    for name in p:
        new["m"][name] = 0.9 * m[name] + 0.1 * g[name]
        new["v"][name] = 0.99 * v[name] + 0.01 * (g[name] * g[name])
        new["p"][name] = p[name] - 1e-3 * (new["m"][name] / (np.sqrt(new["v"][name]) + 1e-8))
    return new["v"], new["p"], new["m"]


STATE = {"w": T("f32", (7, 5)), "b": T("f32", (5,)), "u": T("f32", (7, 5))}
ADAM = ir.record(adam, STATE, STATE, STATE, STATE)


def arrays_of(function: ir.Function) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.random(v.type.shape).astype(v.type.dtype) for v in function.inputs]


def test_a_donated_step_of_adam_holds_its_state_once():
    arrays = arrays_of(ADAM)
    before = [array.copy() for array in arrays]
    plain, donated = ir.interpret(ADAM, arrays), ir.interpret(ADAM, arrays, donate=("p", "m", "v"))
    for array, was in zip(arrays, before, strict=True):
        assert_array_equal(array, was)
    for one, other in zip(plain.outputs, donated.outputs, strict=True):
        assert_array_equal(one, other)
    assert len({id(array) for array in donated.outputs}) == 9
    state = 4 * (35 + 5 + 35)
    # Weights, gradients, means and squares; three temporary tensors, and four numbers.
    assert donated.peak_bytes == ir.peak_bytes(ADAM, ("p", "m", "v")) == 4 * state + 4 * (3 * 35 + 4)
    assert plain.peak_bytes == ir.peak_bytes(ADAM) >= 7 * state


def test_each_output_lies_in_the_memory_of_its_own_input():
    pairs = matched(ADAM, "p", "m", "v")
    names = [value.name for value in ADAM.outputs]
    order = {"v": 0, "p": 3, "m": 6}
    for which, start in order.items():
        for place, name in enumerate(STATE):
            assert pairs[f"{which}.{name}"] == names[start + place]


@pytest.mark.parametrize(("function", "types", "names", "pairs"), [
    (lambda x: np.exp(x), [X], "x", {"x": "0"}),
    (lambda x: np.exp(x) + x, [X], "x", {"x": "1"}),
    (lambda x, y: (x + y, x * 2), [X, X], "xy", {"x": "2", "y": "0"}),              # %x is read last by the second
    (lambda x: np.exp(x).reshape(6, 4).reshape(4, 6), [X], "x", {"x": "0"}),        # the value behind the views
    (lambda x, y: ir.apply("accumulate", x, y), [X, X], "x", {}),                   # %x has the sum already
    (lambda x, y: (x, y * 2), [X, X], "xy", {"y": "1"}),                            # %x is returned as it is
    (lambda x: x + x.T, [SQUARE], "x", {"x": "1"}),                                 # the transposed is a copy
    (lambda x: np.sum(x @ x) * np.ones((5, 5)), [SQUARE], "x", {"x": "3"}),         # %x is read long before
])
def test_which_value_takes_the_memory(function: Any, types: Any, names: str, pairs: Any) -> None:
    assert matched(ir.record(function, *types), *names) == pairs


@pytest.mark.parametrize(("function", "types", "names", "told"), [
    (np.exp, [X], ("y",), "donate names 'y', which no input of @exp is called, or begins with: x"),
    (np.exp, [X], "p.x", "donate names 'p.x', which no input of @exp is called"),
    (lambda x: np.sum(x), [X], ("x",), "the donated %x: it has no output of type tensor<4x6xf64>"),
    (lambda x: x.astype("f4"), [X], ("x",), "the donated %x: it has no output of type tensor<4x6xf64>"),
    (lambda x, y: x + y, [X, X], ("x", "y"), "its outputs of this type take the memory of other inputs"),
    (lambda x: x @ x, [SQUARE], ("x",), 'it is read by %0 = "matmul"(%x, %x)'),
    (lambda x: (np.exp(x), np.sum(x)), [X], ("x",), '= "sum"(%x)'),
    (lambda x: [y := x.reshape(6, 4), np.exp(x), np.sum(y)][1:], [X], ("x",), '= "sum"(%'),
    (lambda x: (x.reshape(24), np.exp(x)), [X], ("x",), "it is returned, and no output of this type that"),
    (lambda x: ir.apply("softmax", x, axis=1), [X], ("x",), "is read by"),
])
def test_what_cannot_be_donated_is_told(function: Any, types: Any, names: Any, told: str) -> None:
    recorded = ir.record(function, *types)
    with pytest.raises(ValueError, match=re.escape(told)):
        ir.interpret(recorded, arrays_of(recorded), donate=names)
    with pytest.raises(ValueError, match=re.escape(told)):
        ir.peak_bytes(recorded, names)


# -- by chance ---------------------------------------------------------------------------------------------------------


@st.composite
def programs(draw: st.DrawFn) -> ir.Function:
    """Ops on square matrices, of which any number are returned."""
    builder = ir.Builder()
    values = [builder.input(name, T("f64", (3, 3))) for name in "xyz"[:draw(st.integers(1, 3))]]
    for _ in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(["add", "subtract", "matmul", "negative", "transpose", "reshape"]))
        picked = [draw(st.sampled_from(values)) for _ in range(2 if kind in ("add", "subtract", "matmul") else 1)]
        attributes: Any = {"transpose": {"permutation": (1, 0)}, "reshape": {"shape": (3, 3)}}.get(kind, {})
        values += builder.emit(kind, picked, attributes)
    return builder.function("chance", draw(st.lists(st.sampled_from(values), min_size=1, max_size=4)))


def is_right(function: ir.Function, donated: dict[ir.Value, ir.Value]) -> bool:
    """Whether no value is read after another was written to its memory.  Only an op by elements may write at once."""
    owner, content = owners(function), {value: value for value in function.inputs}

    def memory(value: ir.Value) -> ir.Value:
        return donated.get(owner[value], owner[value])

    def reads(value: ir.Value) -> bool:
        return content[memory(value)] == owner[value]

    for op in function.ops:
        if not all(map(reads, op.inputs)):
            return False
        output, = op.outputs
        if op.kind != "reshape":
            content[memory(output)] = output
            if op.kind in ("matmul", "transpose") and not all(map(reads, op.inputs)):
                return False
    return all(map(reads, function.outputs))


@given(programs(), st.data())
def test_inputs_are_donated_if_there_is_any_way(function: ir.Function, data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from([v.name for v in function.inputs]), unique=True, min_size=1))
    owner = owners(function)
    returned = list(dict.fromkeys(owner[value] for value in function.outputs))
    wanted = [v for v in function.inputs if v.name in names and v not in returned]
    computed = [value for value in returned if value not in function.inputs]
    ways = [dict(zip(chosen, wanted, strict=True)) for chosen in permutations(computed, len(wanted))]
    arrays = arrays_of(function)
    if not any(is_right(function, way) for way in ways):
        with pytest.raises(ValueError, match="cannot take the memory of the donated %"):
            donations(function, names)
        return
    donated = dict(donations(function, names))
    assert sorted(v.name for v in donated.values()) == sorted(v.name for v in wanted) and is_right(function, donated)
    plain, found = ir.interpret(function, arrays), ir.interpret(function, arrays, donate=names)
    for one, other in zip(plain.outputs, found.outputs, strict=True):
        assert_array_equal(one, other)
    assert found.peak_bytes == ir.peak_bytes(function, names) <= plain.peak_bytes
