"""What counts as the results of one process: rounding is no mistake, and a mistake is no rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from parallelism import ir
from parallelism.ir import Function, TensorType
from parallelism.transforms import SGD, Adam, Parts, first_state, train_step
from vcluster.runs.drawn import drawn
from vcluster.runs.judged import judged


def shifted(p: Any, x: Any, y: Any) -> Any:
    """A loss that a shift of all logits does not change: its gradient is zero but for rounding."""
    z = np.tanh(x @ p["w"]) + p["shift"]
    return ((ir.apply("softmax", z, axis=1) - y) ** 2).mean()


def biased_keys(p: Any, x: Any) -> Any:
    """Attention, which a bias of the keys does not change."""
    keys = x @ p["k"] + p["k_bias"]
    weights = ir.apply("softmax", (x @ p["q"]) @ keys.T, axis=1)
    return ((weights @ x) ** 2).mean()


def centred(p: Any, x: Any) -> Any:
    """A bias before a norm is subtracted again."""
    h = x @ p["w"] + p["bias"]
    h = h - h.mean(axis=0, keepdims=True)
    return ((h / np.sqrt((h * h).mean(axis=0, keepdims=True) + 1e-5)) ** 4).mean()


def programs(dtype: str) -> dict[str, Function]:
    def array(*shape: int) -> TensorType:
        return TensorType(dtype, shape)

    return {
        "shift": ir.record(shifted, {"w": array(5, 4), "shift": array(1)}, array(9, 5), array(9, 4)),
        "keys": ir.record(biased_keys, {"k": array(5, 3), "k_bias": array(3), "q": array(5, 3)}, array(6, 5)),
        "norm": ir.record(centred, {"w": array(5, 4), "bias": array(4)}, array(9, 5)),
    }


def in_another_order(step: Function, inputs: dict[str, Any]) -> Any:
    """The same step with the rows of the batch in another order: all sums over them are rounded differently."""
    turned = {name: array[::-1] if name in ("x", "y") else array for name, array in inputs.items()}
    return ir.interpret(step, turned).outputs


@pytest.mark.sampled(9)
@pytest.mark.parametrize("dtype", ["f64", "f32"])
@pytest.mark.parametrize("optimizer", [SGD(0.1), SGD(0.1, 0.9), Adam(0.01)], ids=["sgd", "momentum", "adam"])
@pytest.mark.parametrize("name", ["shift", "keys", "norm"])
def test_a_gradient_that_is_zero_but_for_rounding_is_right(name: str, optimizer: SGD | Adam, dtype: str) -> None:
    step = train_step(programs(dtype)[name], optimizer)
    trained = [value.name for value in Parts.of(step).parameters]
    for seed in range(5):
        inputs = drawn(step, seed, trained)
        inputs |= first_state(step, {each: inputs[each] for each in trained})
        expected = ir.interpret(step, inputs).outputs
        assert judged(step, inputs, in_another_order(step, inputs), expected).right


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["shift", "keys", "norm"])
def test_its_gradient_alone_is_right_too(name: str) -> None:
    program = programs("f64")[name]
    trained = [value.name for value in program.inputs if value.name.startswith("p")]
    both = ir.gradient(program, trained, keep_outputs=True)
    for seed in range(5):
        inputs = drawn(both, seed)
        assert judged(both, inputs, in_another_order(both, inputs), ir.interpret(both, inputs).outputs).right


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["f64", "f32"])
@pytest.mark.parametrize("name", ["shift", "keys", "norm"])
def test_a_mistake_in_any_other_array_is_found(name: str, dtype: str) -> None:
    step = train_step(programs(dtype)[name], SGD(0.1, 0.9))
    trained = [value.name for value in Parts.of(step).parameters]
    zero = {"shift": "shift", "keys": "k_bias", "norm": "bias"}[name]
    inputs = drawn(step, 0, trained)
    inputs |= first_state(step, {each: inputs[each] for each in trained})
    expected = ir.interpret(step, inputs).outputs
    for place, value in enumerate(step.outputs):
        if zero in value.name.split("."):
            continue
        wrong = [*expected]
        wrong[place] = np.asarray(expected[place] * 1.02, expected[place].dtype)
        assert not judged(step, inputs, wrong, expected).right, value.name


SUM = ir.record(lambda x: x.sum(axis=1), TensorType("f64", (3, 2)))


def test_nan_is_a_failure_and_infinities_are_compared() -> None:
    inf, nan = np.inf, np.nan
    x = {"x": np.array([[inf, inf], [2.0, 3.0], [0.5, 0.5]])}
    assert judged(SUM, x, [np.array([inf, 4.0, 1.0])], [np.array([inf, 5.0, 1.0])]).apart == 0.2
    assert judged(SUM, x, [np.array([inf, 4.0, 1.0])], [np.array([inf, 4.0, 1.0])]).right
    assert judged(SUM, x, [np.array([inf, 4.0, 1.0])], [np.array([-inf, 4.0, 1.0])]).apart == inf
    assert judged(SUM, x, [np.array([1.0, 4.0, 1.0])], [np.array([inf, 4.0, 1.0])]).apart == inf
    for run, one in ((nan, nan), (nan, 1.0), (1.0, nan)):
        found = judged(SUM, x, [np.array([run, 4.0, 1.0])], [np.array([one, 4.0, 1.0])])
        assert not found.right and found.nan == (SUM.outputs[0].name,)


def test_empty_arrays_and_bools_are_compared() -> None:
    function = ir.record(lambda x: x > 0, TensorType("f64", (2,)))
    x = {"x": np.ones(2)}
    assert judged(function, x, [np.array([True, False])], [np.array([True, False])]).right
    assert not judged(function, x, [np.array([True, False])], [np.array([True, True])]).right
    assert judged(SUM, {"x": np.ones((0, 2))}, [np.ones(0)], [np.ones(0)]).right
