"""Products for the gradients of weights run behind the sum of the gradient of their input, and beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallelism import Mesh, models
from parallelism.execution.overlapping import beside_products
from parallelism.ir.passes.delayed_products import with_delays
from parallelism.ir.passes.overlapping import overlapped
from parallelism.layouts import localize
from parallelism.transforms import SGD, Overlap, Strategy, train_step

SPEC = models.TransformerSpec(
    layers=1, width=16, heads=4, feed_forward=24, vocabulary=20, sequence=12, activation="swiglu", norm="rms",
    positions="rotary", biases=False, tied=False, dtype="float32")


def program(words, **figures):
    """The program of the first of two devices, whose ops have numbers."""
    spec = replace(SPEC, **figures)
    return localize(Strategy.parse(words)(train_step(spec.function(4), SGD(0.1))), Mesh(tp=2)).program()


def gated(function):
    """The numbers of the ops of the gradients of both weights of the gate, by kind, and of the sum of both."""
    own = [number for number, op in enumerate(function.ops) if op.region == "gradient.block.0.feed_forward.up"]
    products = [number for number in own if function.ops[number].kind == "einsum"]
    dims = {number: function.ops[number].outputs[0].type.ndim for number in products}
    inputs, weights = ([number for number in products if dims[number] == ndim] for ndim in (3, 2))
    terms = {function.ops[number].outputs[0] for number in inputs}
    both = next(number for number, op in enumerate(function.ops) if op.kind == "add" and {*op.inputs} == terms)
    total = next(number for number, op in enumerate(function.ops) if function.ops[both].outputs[0] in op.inputs)
    return inputs, weights, total


@pytest.mark.parametrize(("words", "kind"), [("tp sp", "reduce_scatter"), ("tp", "all_reduce")])
def test_the_gradients_of_both_weights_of_a_gate_are_behind_the_sum(words, kind):
    function = program(words)
    inputs, weights, total = gated(function)
    assert function.ops[total].kind == kind and len(inputs) == len(weights) == 2 and max(weights) < total
    ordered = with_delays(function)
    assert sorted(ordered) == list(range(len(function.ops)))
    places = {number: place for place, number in enumerate(ordered)}
    assert max(places[number] for number in inputs) < places[total] < min(places[number] for number in weights)
    for order in (beside_products(function), overlapped(function, Overlap())):
        places = {number: place for place, number in enumerate(order.ops)}
        assert sorted(order.ops) == sorted(places) == list(range(len(function.ops)))
        assert places[total] < min(places[number] for number in weights)
        assert (places[total],) in order.calls
        made = [value for number in order.ops for value in function.ops[number].outputs]
        for number in order.ops:
            assert all(made.index(value) < made.index(function.ops[number].outputs[0])
                       for value in function.ops[number].inputs if value in made and function.ops[number].outputs)


@pytest.mark.parametrize("words", ["tp sp", "tp"])
def test_one_product_has_nothing_to_delay(words):
    function = program(words, activation="gelu")
    assert with_delays(function) == tuple(range(len(function.ops)))
