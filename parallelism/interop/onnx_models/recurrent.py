"""What recurrent layers mean: one step after another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from parallelism.interop.folding import emit, known, spread, whole
from parallelism.interop.moving_elements import number, part, reshaped, transposed
from parallelism.interop.onnx_models.elementwise import ew
from parallelism.interop.onnx_models.graph import GraphNode
from parallelism.interop.onnx_models.reading import Reader, meaning, with_optional

_ACTIVATIONS = {"Sigmoid": "sigmoid", "Tanh": "tanh", "Relu": "relu", "Softplus": "softplus"}


class Products(NamedTuple):
    """The products of a recurrent layer whose weights are not plain arrays, such as quantized ones."""

    of: Callable[[int, int], Callable[[Any], Any]]
    """Takes the direction, and 0 for the weights of the inputs or 1 for those of the state.  Returns a function that
    multiplies rows by these weights."""
    hidden: int


Activation = Callable[[Any], Any]
_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
_USUAL_ACTIVATIONS = {"RNN": ("Tanh",), "GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh")}


@meaning("RNN", "GRU", "LSTM")
def _recurrent(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    return recurrent(node, x)


def recurrent(node: GraphNode, x: list[Any], products: Products | None = None) -> Any:
    """One step after another, as many as the longest sequence may have."""
    x = with_optional(x, 8)
    lengths = None if x[4] is None else known(x[4])
    if lengths is not None and (lengths == x[0].shape[0]).all():
        x[4] = None
    if node.get("clip"):
        raise node.unsupported("clip is not supported")
    rows_first = bool(node.get("layout", 0))
    if rows_first:
        x = [_swapped(each) if place in (0, 5, 6) else each for place, each in enumerate(x)]
    directions = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[
        node.get("direction", "forward")
    ]
    given = _activations(node, len(directions))
    every, ends, cells = [], [], []
    for d, backwards in enumerate(directions):
        acts = given[d * len(given) // len(directions) :]
        ys, h, c = _direction(node, x, d, _GATES[node.kind], acts, products, backwards=backwards)
        every.append(ys)
        ends.append(h)
        cells.append(c)
    length, batch = x[0].shape[:2]
    hidden = products.hidden if products else x[2].shape[2]
    joined = [reshaped(each, (length, 1, batch, hidden)) for each in every]
    outputs = [emit("concatenate", *map(whole, joined), axis=1) if len(joined) > 1 else joined[0]]
    for states in (ends, cells):
        parts = [reshaped(s, (1, batch, hidden)) for s in states if s is not None]
        if parts:
            outputs.append(emit("concatenate", *map(whole, parts), axis=0) if len(parts) > 1 else parts[0])
    if not rows_first:
        return outputs
    return [transposed(outputs[0], (2, 0, 1, 3)), *map(_swapped, outputs[1:])]


def _swapped(x: Any) -> Any:
    """An array with its first two dims in the other order; None for one that is left out."""
    return None if x is None else transposed(x, (1, 0, 2))


def _activations(node: GraphNode, directions: int) -> list[Activation]:
    """The activations of all directions; of those that have numbers, each takes the next ones that the node gives."""
    names = node.get("activations") or _USUAL_ACTIVATIONS[node.kind] * directions
    slopes, offsets = iter(node.get("activation_alpha", ())), iter(node.get("activation_beta", ()))
    found: list[Activation] = []
    for name in names:
        if name in _ACTIVATIONS:
            found.append(partial(ew, _ACTIVATIONS[name]))
        elif name == "HardSigmoid":
            found.append(partial(_hard_sigmoid, next(slopes, 0.2), next(offsets, 0.5)))
        else:
            known_ones = ", ".join([*_ACTIVATIONS, "HardSigmoid"])
            raise node.unsupported(f"activations must be among {known_ones}, got {', '.join(names)}")
    return found


def _hard_sigmoid(slope: float, offset: float, x: Any) -> Any:
    line = ew("add", ew("multiply", x, number(slope, x)), number(offset, x))
    return ew("minimum", ew("maximum", line, number(0, x)), number(1, x))


def _direction(
    node: GraphNode,
    x: list[Any],
    d: int,
    gates: int,
    acts: list[Activation],
    products: Products | None,
    *,
    backwards: bool,
) -> Any:
    a, batch = x[0], x[0].shape[1]
    recurrence: Any = None if products else _picked(x[2], d)
    hidden = products.hidden if products else recurrence.shape[1]
    zero = spread(np.zeros((1, 1), a.dtype), (batch, hidden))
    bias = None if x[3] is None else _picked(x[3], d)
    h = zero if x[5] is None else _picked(x[5], d)
    c = None
    if node.kind == "LSTM":
        c = zero if x[6] is None else _picked(x[6], d)
    of_inputs = None if bias is None else part(bias, 0, 0, gates * hidden)
    after = None if bias is None else part(bias, 0, gates * hidden, 2 * gates * hidden)
    of_step = _of_step(x, d, of_inputs, products)
    of_state = products.of(d, 1) if products else lambda state: _affine(state, recurrence, None)
    ys: list[Any] = []
    for t in range(a.shape[0])[:: -1 if backwards else 1]:
        left = of_step(t)
        before = h, c
        if node.kind == "GRU":
            h = _gru(node, left, h, recurrence, after, hidden, acts)
        else:
            total = ew("add", left, _plus(of_state(h), after))
            cells = None if x[7] is None else _picked(x[7], d)
            h, c = (
                (acts[0](total), None) if node.kind == "RNN" else _lstm(node, total, c, hidden, acts, cells)
            )
        y = h
        if x[4] is not None:
            # Where a sequence is over, its state stays (also of an empty one) and its output is 0.
            goes_on = reshaped(ew("less", number(t, x[4]), x[4]), (batch, 1))
            y = ew("where", goes_on, h, zero)
            h = ew("where", goes_on, h, before[0])
            c = None if c is None else ew("where", goes_on, c, before[1])
        ys.append(reshaped(y, (1, batch, hidden)))
    ys = ys[::-1] if backwards else ys
    return emit("concatenate", *map(whole, ys), axis=0) if len(ys) > 1 else ys[0], h, c


def _lstm(
    node: GraphNode, total: Any, c: Any, hidden: int, acts: list[Activation], cells: Any
) -> tuple[Any, Any]:
    """The next state and cell, from the sums of the four gates.  ``cells`` are the weights by which gates see the cell."""

    def seen(k: int, cell: Any) -> Any:
        own = part(total, 1, k * hidden, (k + 1) * hidden)
        if cells is None or k == 3:
            return own
        return ew(
            "add",
            own,
            ew("multiply", cell, reshaped(part(cells, 0, k * hidden, (k + 1) * hidden), (1, hidden))),
        )

    of_gate, of_new, of_cell = acts[:3]
    opens, keeps = of_gate(seen(0, c)), of_gate(seen(2, c))
    new = of_new(seen(3, c))
    if node.get("input_forget", 0):
        keeps = ew("subtract", number(1, opens), opens)
    cell = ew("add", ew("multiply", keeps, c), ew("multiply", opens, new))
    return ew("multiply", of_gate(seen(1, cell)), of_cell(cell)), cell


def _gru(
    node: GraphNode, left: Any, h: Any, recurrence: Any, after: Any, hidden: int, acts: list[Activation]
) -> Any:
    def gate(x: Any, k: int, axis: int) -> Any:
        return None if x is None else part(x, axis, k * hidden, (k + 1) * hidden)

    def of_state(state: Any, k: int) -> Any:
        return _affine(state, gate(recurrence, k, 0), gate(after, k, 0))

    of_gate, of_new = acts[:2]
    update, reset = (of_gate(ew("add", gate(left, k, 1), of_state(h, k))) for k in (0, 1))
    if node.get("linear_before_reset", 0):
        from_state = ew("multiply", reset, of_state(h, 2))
    else:
        from_state = of_state(ew("multiply", reset, h), 2)
    new = of_new(ew("add", gate(left, 2, 1), from_state))
    taken = ew("multiply", ew("subtract", number(1, update), update), new)
    return ew("add", taken, ew("multiply", update, h))


def _of_step(x: list[Any], d: int, bias: Any, products: Products | None) -> Callable[[int], Any]:
    """What the inputs of a step give to its gates."""
    a = x[0]
    if products is None:
        weights = _picked(x[1], d)
        return lambda t: _affine(reshaped(part(a, 0, t, t + 1), a.shape[1:]), weights, bias)
    length, batch, width = a.shape
    every = products.of(d, 0)(reshaped(a, (length * batch, width)))
    return lambda t: _plus(part(every, 0, t * batch, (t + 1) * batch), bias)


def _affine(x: Any, weights: Any, bias: Any) -> Any:
    return _plus(emit("einsum", whole(x), whole(weights), equation="bi,oi->bo"), bias)


def _plus(result: Any, bias: Any) -> Any:
    return result if bias is None else ew("add", result, reshaped(bias, (1, bias.shape[0])))


def _picked(x: Any, d: int) -> Any:
    return reshaped(part(x, 0, d, d + 1), x.shape[1:])
