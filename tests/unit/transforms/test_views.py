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


@pytest.mark.sampled(23, 22)
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("form", FORMS)
def test_a_weight_behind_views_is_split_and_communicates_as_the_weight_itself(form, devices):
    loss, shapes, expected = FORMS[form]
    mesh, step = Mesh(tp=devices), TensorParallel("tp")(recorded(loss, shapes))
    assert layouts(step) == expected
    assert communication(step, mesh) == communication(TensorParallel("tp")(recorded(*DIRECT)), mesh)
    assert_trains_as_numpy(loss, shapes, step, mesh)


@pytest.mark.sampled(2)
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


# -- views that do not pass the dim, and parts of one weight -----------------------------------------------------------


def attention_like(parts):
    """Queries, keys and values by a function of the parameters and x, and a product behind them."""
    def loss(p, x):
        queries, keys, values = parts(p, x)
        return np.mean((np.tanh(queries * keys) * values @ p["out"]) ** 2)
    return loss


SEPARATE = attention_like(lambda p, x: (x @ p["q"], x @ p["k"], x @ p["v"])), {
    "q": (WIDTH, HIDDEN), "k": (WIDTH, HIDDEN), "v": (WIDTH, HIDDEN), "out": (HIDDEN, OUT)}
WHOLE = {"w": (WIDTH, 3 * HIDDEN), "out": (HIDDEN, OUT)}
TURNED = {"w": (3 * HIDDEN, WIDTH), "out": (HIDDEN, OUT)}
THIRDS = [slice(0, HIDDEN), slice(HIDDEN, 2 * HIDDEN), slice(2 * HIDDEN, 3 * HIDDEN)]
FUSED = {
    "split": (attention_like(lambda p, x: np.split(x @ p["w"].T, 3, axis=1)), TURNED, "[None, tp]"),
    "slices of one": (
        attention_like(lambda p, x: [y[:, part] for y in [x @ p["w"]] for part in THIRDS]), WHOLE, "[tp, None]"),
    "scaled": (
        attention_like(lambda p, x: np.split(np.einsum("bi,oi->bo", x, p["w"]) * 0.5 + 1, 3, axis=1)), TURNED, "[None, tp]"),
    "parts of the weight": (
        attention_like(lambda p, x: [x @ p["w"][:, part] for part in THIRDS]), WHOLE, "[tp, None]"),
    "parts of w.T": (attention_like(lambda p, x: [x @ p["w"][part].T for part in THIRDS]), TURNED, "[None, tp]"),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize("form", FUSED)
def test_parts_of_one_weight_are_split_as_weights_of_their_own_and_moved_to_where_they_are_needed(form, devices):
    loss, shapes, expected = FUSED[form]
    mesh, step = Mesh(tp=devices), TensorParallel("tp")(recorded(loss, shapes))
    assert layouts(step) == {"p.w": expected, "p.out": "[tp, None]"}
    found = communication(step, mesh)
    moved = Counter({each: n for each, n in found.items() if each[0] in ("all_to_all", "relayout")})
    assert found - moved == communication(TensorParallel("tp")(recorded(*SEPARATE)), mesh)
    if devices in (2, 3):     # each part and each of its gradients, of which a device keeps its share
        part = WIDTH * HIDDEN * 8 * (devices - 1) // devices**2
        assert moved == Counter({("all_to_all", ("tp",), devices, part): 6})
    rows = [row for row in Strategy(TensorParallel("tp")).report(step).rows if row.weight == "p.w"]
    assert [row.how for row in rows] == ["by columns, moved from how it lies at rest"] * 3
    assert_trains_as_numpy(loss, shapes, step, mesh)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sizes", [(7, 4, 4), (9, 3, 3), (5, 5, 2, 3)])
def test_parts_may_have_different_sizes_and_some_may_be_unused(sizes):
    def loss(p, x):
        first, second, third, *_ = np.split(x @ p["w"] + p["b"], np.cumsum(sizes)[:-1], axis=1)
        return np.mean((np.tanh(first) @ p["one"] + np.tanh(second * third[:, :1]) @ p["two"]) ** 2)

    shapes = {"w": (WIDTH, sum(sizes)), "b": (sum(sizes),), "one": (sizes[0], 5), "two": (sizes[1], 5)}
    for devices in (2, 3):
        step = TensorParallel("tp")(recorded(loss, shapes))
        assert_trains_as_numpy(loss, shapes, step, Mesh(tp=devices))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("parts", "reason"), [
    (lambda y: (y[:, ::3], y[:, 1::3], y[:, 2::3]), "the slice behind it needs its result whole"),
    (lambda y: (y[:, :12], y[:, 12:24], y[:, 20:32] + y[:, 24:]), "the slice behind it needs its result whole"),
    (lambda y: np.split(np.tanh(y), 3, axis=1), "the split behind it needs its result whole"),
    (lambda y: np.split(y + y, 3, axis=1), "the split behind it needs its result whole"),
])
def test_parts_that_are_no_products_of_their_own_leave_the_weight_whole(parts, reason):
    loss = attention_like(lambda p, x: parts(x @ p["w"]))
    step = TensorParallel("tp")(recorded(loss, WHOLE))
    row, = [row for row in Strategy(TensorParallel("tp")).report(step).whole if row.weight == "p.w"]
    assert row.reason == f"{reason}; give each part a weight of its own, or a place in a stack"
    assert_trains_as_numpy(loss, WHOLE, step, Mesh(tp=2))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_a_view_that_does_not_pass_the_dim_is_moved_from_another_one(devices):
    loss, shapes = two_layers(lambda p: p["a"][:, ::-1], lambda p: p["b"][1:13]), {"a": (WIDTH, HIDDEN), "b": (14, OUT)}
    mesh, step = Mesh(tp=devices), TensorParallel("tp")(recorded(loss, shapes))
    assert layouts(step) == {"p.a": "[tp, None]", "p.b": "[None, tp]"}
    hows = [row.how for row in Strategy(TensorParallel("tp")).report(step).rows]
    assert hows == [f"by {way}, moved from how it lies at rest" for way in ("columns", "rows")]
    assert_trains_as_numpy(loss, shapes, step, mesh)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", ["tp=2 ep=2 dp=1", "tp=2 ep:dp=2", "tp=3 ep=2 dp=1 zero=1", "tp=2 sp ep=2 dp=1"])
def test_parts_of_weights_of_experts_stay_with_their_experts(text):
    def loss(p, x, targets):
        gates = ir.apply("softmax", x @ p["router"], axis=2)
        gate, up = np.split(np.einsum("btd,edf->btef", x, p["both"]), 2, axis=3)
        return np.mean((np.einsum("bte,btef,efd->btd", gates, np.tanh(gate) * up, p["down"]) - targets) ** 2)

    shapes = {"router": (6, 4), "both": (4, 6, 10), "down": (4, 5, 6)}
    data = ir.TensorType("f64", (4, 3, 6))
    alone = train_step(ir.record(loss, types_of(shapes), data, data, name="experts"), Adam(0.01))
    text = text.replace("ep:dp=2", "dp=2 ep:dp=2")
    strategy, mesh = Strategy.parse_on_mesh(text)
    step = strategy(alone)
    axis = "dp" if "ep:dp" in text else "ep"
    parts = Parts.of(step)
    assert layouts(step)["p.both"] == f"[{axis}, tp, None]" and layouts(step)["p.down"] == f"[{axis}, tp, None]"
    assert [value.layout.short() for value in parts.views if value.name.isdecimal() and value.layout] == [
        f"[{axis}, None, tp]"] * 2
    localized = localize(step, mesh)
    assert_trained(trained(step, lambda inputs: run_everywhere(localized, inputs)), interpreted(alone), 1e-12)


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


@pytest.mark.sampled(8, 7)
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


@pytest.mark.slow
@settings(max_examples=25)
@given(views((WIDTH, HIDDEN)), views((HIDDEN, OUT)), st.integers(1, 4))
def test_any_views_of_weights_train_as_the_weights_themselves(up, down, devices):
    check(up, down, devices)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=400)
@given(views((WIDTH, HIDDEN)), views((HIDDEN, OUT)), st.integers(1, 5))
def test_hundreds_of_views_of_weights_train_as_the_weights_themselves(up, down, devices):
    check(up, down, devices)


def check(up, down, devices):
    shapes, mesh = {"a": up[0], "b": down[0]}, Mesh(tp=devices)
    loss = two_layers(lambda p: seen(p["a"], up[1]), lambda p: seen(p["b"], down[1]))
    alone = recorded(loss, shapes)
    step, refused = None, ""
    try:
        step = TensorParallel("tp")(alone)
    except ValueError as error:
        refused = f"{error}"
    if step is None:
        assert "is between it and its product" in refused      # no dim of either weight passes its views
        return
    rows = {row.weight: row for row in Strategy(TensorParallel("tp")).report(step).rows}
    first, second = rows["p.a"], rows["p.b"]
    assert first.split in ("columns", None) and second.split in ("rows" if first.split else "columns", None)
    laid = layouts(step)
    assert {*laid} == {row.weight for row in rows.values() if row.split}
    moved = any(row.is_moved for row in rows.values())
    even = all(shape_allows(shape, laid.get(f"p.{name}", ""), devices) for name, shape in shapes.items())
    even = even and not any(extent % devices for row in rows.values() for extent in row.divides)
    if len(laid) == 2 and even and not moved:
        assert communication(step, mesh) == communication(TensorParallel("tp")(recorded(*DIRECT)), mesh)
    assert_trains_as_numpy(loss, shapes, step, mesh)


def shape_allows(shape, layout, devices):
    """Whether each device has equally much of the dim that is split."""
    return prod(n for n, axis in zip(shape, layout.strip("[]").split(", "), strict=False) if axis == "tp") % devices == 0
