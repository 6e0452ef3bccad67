"""Tensor parallelism of weights that products read through views: as of the weight that the product reads itself."""

from __future__ import annotations

from collections import Counter
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from localized_runs import COLLECTIVES, run_everywhere
from transformed import assert_trained, interpreted, trained

from parallelism import Mesh, ir
from parallelism.layouts import localize
from parallelism.transforms import SGD, Adam, Parts, Strategy, TensorParallel, train_step
from parallelism.transforms.products import product_of

ROWS, WIDTH, HIDDEN, OUT = 5, 6, 12, 7


def relu(x):
    return np.maximum(x, 0)


def types_of(shapes, dtype="f64"):
    return {name: ir.TensorType(dtype, shape) for name, shape in shapes.items()}


def recorded(loss, shapes, x=(ROWS, WIDTH)):
    return train_step(ir.record(loss, types_of(shapes), ir.TensorType("f64", x), name="views"), SGD(0.1))


def two_layers(up, down):
    """Two products whose weights are given by functions of the parameters."""
    return lambda p, x: np.mean((relu(x @ up(p)) @ down(p)) ** 2)


DIRECT = two_layers(lambda p: p["a"], lambda p: p["b"]), {"a": (WIDTH, HIDDEN), "b": (HIDDEN, OUT)}
FORMS = {
    "x @ w.T": (
        two_layers(lambda p: p["a"].T, lambda p: p["b"].T), {"a": (HIDDEN, WIDTH), "b": (OUT, HIDDEN)},
        {"p.a": "[tp, None]", "p.b": "[None, tp]"}),
    "np.dot": (
        lambda p, x: np.mean(np.dot(relu(np.dot(x, p["a"].T)), p["b"].T) ** 2), {"a": (HIDDEN, WIDTH), "b": (OUT, HIDDEN)},
        {"p.a": "[tp, None]", "p.b": "[None, tp]"}),
    "(w @ x.T).T": (
        lambda p, x: np.mean((p["b"] @ relu(p["a"] @ x.T)) ** 2), {"a": (HIDDEN, WIDTH), "b": (OUT, HIDDEN)},
        {"p.a": "[tp, None]", "p.b": "[None, tp]"}),
    "einsum of w.T": (
        lambda p, x: np.mean(np.einsum("bh,oh->bo", relu(np.einsum("bi,ih->bh", x, p["a"].T)), p["b"].T.T) ** 2),
        {"a": (HIDDEN, WIDTH), "b": (OUT, HIDDEN)}, {"p.a": "[tp, None]", "p.b": "[None, tp]"}),
    "w[1]": (
        two_layers(lambda p: p["a"][1], lambda p: p["b"][-2]), {"a": (3, WIDTH, HIDDEN), "b": (2, HIDDEN, OUT)},
        {"p.a": "[None, None, tp]", "p.b": "[None, tp, None]"}),
    "w[:, 2].T": (
        two_layers(lambda p: p["a"][:, 2].T, lambda p: p["b"][..., 0]), {"a": (HIDDEN, 3, WIDTH), "b": (HIDDEN, OUT, 1)},
        {"p.a": "[tp, None, None]", "p.b": "[tp, None, None]"}),
    "reshape": (
        two_layers(lambda p: p["a"].reshape(WIDTH, HIDDEN), lambda p: p["b"].reshape(HIDDEN, OUT)),
        {"a": (WIDTH, 12, 1), "b": (1, 12, OUT)}, {"p.a": "[None, tp, None]", "p.b": "[None, tp, None]"}),
    "half of the other dim": (
        two_layers(lambda p: p["a"][1:7], lambda p: p["b"][:, ::2]), {"a": (9, HIDDEN), "b": (HIDDEN, 2 * OUT)},
        {"p.a": "[None, tp]", "p.b": "[tp, None]"}),
    "astype": (
        two_layers(lambda p: p["a"].astype("f4").astype("f8").T, lambda p: p["b"].astype("f4").astype("f8")),
        {"a": (HIDDEN, WIDTH), "b": (HIDDEN, OUT)}, {"p.a": "[tp, None]", "p.b": "[tp, None]"}),
}


def communication(step, mesh):
    """The collectives of a device's program: kinds, axes, and bytes received."""
    ops = (op for op in localize(step, mesh).program(mesh.size - 1).ops if op.kind in COLLECTIVES)
    return Counter((op.kind, op["axes"], op["group"], op.bytes_received) for op in ops)


def layouts(step):
    return {value.name: value.layout.short() for value in step.inputs if value.layout}


def assert_trains_as_numpy(loss, shapes, step, mesh, x=(ROWS, WIDTH)):
    """The first loss is that of NumPy on whole arrays, and two steps on all devices are those of one device."""
    alone, localized = recorded(loss, shapes, x), localize(step, mesh)
    given = []

    def run(inputs):
        given.append(dict(zip((value.name for value in step.inputs), inputs, strict=True)))
        return run_everywhere(localized, inputs)

    found = trained(step, run, like=alone)
    parameters = {name: given[0][f"p.{name}"] for name in shapes}
    np.testing.assert_allclose(found[0][0], loss(parameters, given[0]["x"]), rtol=1e-12, atol=1e-12)
    assert_trained(found, interpreted(alone), 1e-12)


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("form", FORMS)
def test_a_weight_behind_views_is_split_and_communicates_as_the_weight_itself(form, devices):
    loss, shapes, expected = FORMS[form]
    mesh, step = Mesh(tp=devices), TensorParallel("tp")(recorded(loss, shapes))
    assert layouts(step) == expected
    assert communication(step, mesh) == communication(TensorParallel("tp")(recorded(*DIRECT)), mesh)
    assert_trains_as_numpy(loss, shapes, step, mesh)


@pytest.mark.parametrize(("devices", "gathered"), [(1, False), (2, False), (4, False), (3, True), (5, True)])
def test_of_a_reshape_the_outer_dim_is_split_and_gathered_where_devices_do_not_divide_it(devices, gathered):
    loss, shapes = two_layers(lambda p: p["a"].reshape(WIDTH, HIDDEN), lambda p: p["b"].reshape(HIDDEN, OUT)), {
        "a": (WIDTH, 4, 3), "b": (4, 3, OUT)}
    mesh, step = Mesh(tp=devices), TensorParallel("tp")(recorded(loss, shapes))
    assert layouts(step) == {"p.a": "[None, tp, None]", "p.b": "[tp, None, None]"}
    found = communication(step, mesh)
    if gathered:
        kinds = {kind for kind, _, _, nbytes in found if nbytes}
        assert kinds == {"all_gather"}
    else:
        assert found == communication(TensorParallel("tp")(recorded(*DIRECT)), mesh)
    assert_trains_as_numpy(loss, shapes, step, mesh)


@pytest.mark.parametrize("devices", [2, 3])
def test_a_stack_of_which_products_need_different_dims_is_split_as_the_first_needs_it(devices):
    loss, shapes = two_layers(lambda p: p["s"][0], lambda p: p["s"][1]), {"s": (2, WIDTH, WIDTH)}
    mesh, step = Mesh(tp=devices), TensorParallel("tp")(recorded(loss, shapes))
    assert layouts(step) == {"p.s": "[None, None, tp]"}
    activation = ROWS * WIDTH * 8 * (devices - 1) // devices
    moved = {each for each in communication(step, mesh) if each[3] > 16}
    assert moved == {(kind, ("tp",), devices, activation) for kind in ("all_gather", "reduce_scatter")}
    assert_trains_as_numpy(loss, shapes, step, mesh)


def test_what_is_added_to_a_split_result_is_split_through_views_too():
    loss = lambda p, x: np.mean((relu(x @ p["a"].T + p["c"][1][None, :]) @ p["b"].T) ** 2)
    shapes = {"a": (HIDDEN, WIDTH), "c": (3, HIDDEN), "b": (OUT, HIDDEN)}
    step = TensorParallel("tp")(recorded(loss, shapes))
    assert layouts(step) == {"p.a": "[tp, None]", "p.c": "[None, tp]", "p.b": "[None, tp]"}
    assert_trains_as_numpy(loss, shapes, step, Mesh(tp=2))


def test_weights_behind_views_are_no_dims_of_the_batch():
    for loss, shapes, _ in FORMS.values():
        parts = Parts.of(recorded(loss, shapes))
        assert parts.rows == parts.classes.of(parts.data[0], 0) and parts.sequence is None


# -- other transforms around it ----------------------------------------------------------------------------------------

B, = ir.symbols("B")
READ = {
    "itself": (lambda p, name, i: p[f"{name}{i}"], lambda m, n: (m, n)),
    "T": (lambda p, name, i: p[f"{name}{i}"].T, lambda m, n: (n, m)),
    "stack": (lambda p, name, i: p[f"{name}{i}"][1], lambda m, n: (2, m, n)),
    "reshape": (lambda p, name, i: p[f"{name}{i}"].reshape(*(HIDDEN, WIDTH)[:: -1 if name == "up" else 1]),
                lambda m, n: (m, n // 3, 3) if n == HIDDEN else (m // 3, 3, n)),
}


def blocks(form):
    """Two residual blocks behind norms whose weights are read in one of the ways."""
    read, shape = READ[form]

    def loss(p, x, targets):
        for i in range(2):
            with ir.region(f"block.{i}"):
                y = ir.apply("rms_norm", x, p[f"norm{i}"], epsilon=1e-5)
                x = x + relu(y @ read(p, "up", i) + p[f"bias{i}"]) @ read(p, "down", i)
        return np.mean((x - targets) ** 2)

    shapes = {}
    for i in range(2):
        shapes |= {f"norm{i}": (WIDTH,), f"bias{i}": (HIDDEN,), f"up{i}": shape(WIDTH, HIDDEN)}
        shapes |= {f"down{i}": shape(HIDDEN, WIDTH)}
    data = ir.TensorType("f64", (B, 8, WIDTH))
    return train_step(ir.record(loss, types_of(shapes), data, data, name="blocks"), Adam(0.01))


@pytest.mark.parametrize(
    "text", ["tp=2 sp", "dp=2 tp=2 sp zero=1", "cp=2 tp=2", "dp=2 tp=4 zero=3", "tp=2 sp recompute=block.*"])
@pytest.mark.parametrize("form", [form for form in READ if form != "itself"])
def test_other_transforms_around_it_communicate_as_around_the_weight_itself(form, text):
    strategy, mesh = Strategy.parse_on_mesh(text)
    alone = blocks(form).specialize(B=4)
    step = strategy(alone)
    found, expected = (communication(each, mesh) for each in (step, strategy(blocks("itself").specialize(B=4))))
    if form == "stack":      # the state of a whole stack is gathered and kept
        found, expected = (Counter({each: n for each, n in of.items() if "tp" in each[1]}) for of in (found, expected))
    assert found == expected and found
    localized = localize(step, mesh)
    assert_trained(trained(step, lambda inputs: run_everywhere(localized, inputs)), interpreted(alone), 1e-12)


# -- any views ---------------------------------------------------------------------------------------------------------


@st.composite
def views(draw, shape):
    """The shape of a parameter, and views that make an array of the given shape of it, the last one first."""
    made = []
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["transpose", "index", "cut", "reshape", "double"]))
        axis = draw(st.integers(0, len(shape) - 1))
        if kind == "transpose":
            order = draw(st.permutations(range(len(shape))))
            made.append(lambda w, order=order: w.transpose(order))
            shape = tuple(shape[order.index(d)] for d in range(len(shape)))
        elif kind == "index" and len(shape) < 4:
            extent = draw(st.integers(1, 3))
            at = draw(st.integers(0, extent - 1))
            made.append(lambda w, at=at, axis=axis: w[(slice(None),) * axis + (at,)])
            shape = (*shape[:axis], extent, *shape[axis:])
        elif kind == "cut":
            more, end = draw(st.integers(0, 2)), shape[axis]
            made.append(lambda w, end=end, axis=axis, more=more: w[(slice(None),) * axis + (slice(more, more + end),)])
            shape = (*shape[:axis], end + 2 * more, *shape[axis + 1:])
        elif kind == "reshape":
            made.append(lambda w, shape=shape: w.reshape(shape))
            shape = draw(st.sampled_from(reshaped(shape)))
        elif kind == "double":
            made.append(lambda w: w.astype("f8"))
    return shape, made


def reshaped(shape):
    """Shapes of as many elements: one dim cut into two, or two neighbours merged."""
    merged = [(*shape[:d], shape[d] * shape[d + 1], *shape[d + 2:]) for d in range(len(shape) - 1)]
    cut = [(*shape[:d], m, n // m, *shape[d + 1:]) for d, n in enumerate(shape) for m in (1, 2, 3) if n % m == 0]
    return [*merged, *cut]


def seen(w, made):
    for view in reversed(made):
        w = view(w)
    return w


@settings(max_examples=25)
@given(views((WIDTH, HIDDEN)), views((HIDDEN, OUT)), st.integers(1, 4))
def test_any_views_of_weights_train_as_the_weights_themselves(up, down, devices):
    check(up, down, devices)


@pytest.mark.slow
@settings(max_examples=400)
@given(views((WIDTH, HIDDEN)), views((HIDDEN, OUT)), st.integers(1, 5))
def test_hundreds_of_views_of_weights_train_as_the_weights_themselves(up, down, devices):
    check(up, down, devices)


def check(up, down, devices):
    shapes, mesh = {"a": up[0], "b": down[0]}, Mesh(tp=devices)
    loss = two_layers(lambda p: seen(p["a"], up[1]), lambda p: seen(p["b"], down[1]))
    alone = recorded(loss, shapes)
    parts = Parts.of(alone)
    products = [each for op in parts.forward.ops if (each := product_of(op, parts.views))]
    wanted = [product.letters[d] for product in products for d in range(len(product.letters))]
    assert [product.weight.name for product in products] == ["p.a", "p.b"]
    try:
        step = TensorParallel("tp")(alone)
    except ValueError:
        assert "n" not in wanted      # the columns of neither weight are a dim of it
        return
    laid = layouts(step)
    for product, letters in zip(products, ("n", "kn"), strict=True):
        if product.weight.name in laid:
            dim = laid[product.weight.name].strip("[]").split(", ").index("tp")
            assert product.letters[dim] in letters
    if len(laid) == 2 and all(shape_allows(shape, laid[f"p.{name}"], devices) for name, shape in shapes.items()):
        assert communication(step, mesh) == communication(TensorParallel("tp")(recorded(*DIRECT)), mesh)
    assert_trains_as_numpy(loss, shapes, step, mesh)


def shape_allows(shape, layout, devices):
    """Whether each device has equally much of the dim that is split."""
    return prod(n for n, axis in zip(shape, layout.strip("[]").split(", "), strict=True) if axis == "tp") % devices == 0
