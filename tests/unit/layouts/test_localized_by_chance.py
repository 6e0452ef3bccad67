"""Whatever is laid out however, the devices together make the numbers of the whole."""

from __future__ import annotations

import os
import warnings

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from ir_examples import EXAMPLES, EXCHANGING
from ir_random_examples import drawn
from localized_runs import COLLECTIVES, run_everywhere
from numpy.testing import assert_allclose, assert_array_equal

from parallelism import Mesh, TensorSharding, ir, models
from parallelism.execution import Executable
from parallelism.layouts import annotate, localize, propagate
from parallelism.recorder import record

MANY = int(os.environ.get("VCLUSTER_LAYOUTS", "300"))
MESHES = [Mesh(x=2), Mesh(x=3), Mesh(x=4), Mesh(x=2, y=2), Mesh(x=2, y=3), Mesh(x=1), Mesh(x=1, y=3)]
ON_A_NAMED_AXIS = {"permute", "reshard", "deal", "token_order"}
KINDS = sorted({example.kind for example in EXAMPLES} - COLLECTIVES - ON_A_NAMED_AXIS - EXCHANGING)
MODELS = {
    "mlp": models.mlp((6, 5, 7), 5),
    "convolutional": models.convolutional((6, 5, 3), (4, 5), 5, 3),
    "gpt": models.gpt(5, 6, 3, 2, 4, 3),
    "mixture": models.mixture(6, 10, 4, 2, 3, 4, 5),
}
MODELS |= {f"{name}, backwards": ir.gradient(model, keep_outputs=True) for name, model in MODELS.items()}


@st.composite
def layouts(draw, value, mesh, pending=("sum", "max")):
    """The axes dealt out to the dims, to what is pending, or to nothing."""
    dims, partial = [[] for _ in value.type.shape], []
    for axis in draw(st.permutations(mesh.axes)):
        place = draw(st.integers(-2, len(dims) - 1))
        if place >= 0:
            dims[place].append(axis)
        elif place == -2 and pending and value.type.dtype.kind in "fib":
            partial.append(axis)
    return TensorSharding(*dims, partial=partial, op=draw(st.sampled_from(pending)))


@st.composite
def laid_out(draw, function, share):
    """A mesh, and the layouts of some of the values."""
    mesh = draw(st.sampled_from(MESHES))
    return mesh, {
        value.name: draw(layouts(value, mesh)) for value in function.values if draw(st.integers(1, 100)) <= share
    }


def arrays_of(function, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=v.type.shape) if v.type.dtype.kind == "f" else rng.integers(0, 5, v.type.shape)
            for v in function.inputs]


def check(function, arrays, mesh, given, same=assert_allclose, **tolerance):
    conflicts = []
    laid = propagate(annotate(function, given), mesh, conflicts)
    assert all(value.layout is not None for value in laid.values)
    for value in laid.values:
        assert value.name not in given or value.layout == given[value.name].over(value.type.ndim)
    localized = localize(laid, mesh)
    for found, expected in zip(run_everywhere(localized, arrays), ir.interpret(function, arrays).outputs, strict=True):
        same(found, expected, **tolerance)
    assert all(str(conflict) for conflict in conflicts)
    return localized


def check_operator(data, kind):
    example = drawn(kind, data.draw(st.integers(0, 2**16)))
    function = example.function()
    mesh, given = data.draw(laid_out(function, 70))
    tolerance = 1e-6 if kind == "scaled_einsum" else 1e-10      # its sums are in float32
    check(function, example.arrays(), mesh, given, rtol=tolerance, atol=tolerance)


@given(st.data())
def test_every_operator(data):
    check_operator(data, data.draw(st.sampled_from(KINDS)))


@pytest.mark.slow
@pytest.mark.timeout(400)     # a crowded machine is slow, not wrong
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=MANY // 5)
@given(data=st.data())
def test_every_operator_often(kind, data):
    check_operator(data, kind)


def check_model(data, name):
    mesh, given = data.draw(laid_out(MODELS[name], data.draw(st.sampled_from([3, 10, 50]))))
    check(MODELS[name], arrays_of(MODELS[name]), mesh, given, rtol=1e-9, atol=1e-10)


@settings(max_examples=2)
@given(st.data())
def test_the_models(data):
    check_model(data, data.draw(st.sampled_from(sorted(MODELS))))


@pytest.mark.slow
@pytest.mark.timeout(400)     # a crowded machine is slow, not wrong
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=MANY // 5)
@given(data=st.data())
def test_the_models_often(name, data):
    check_model(data, name)


# -- what is counted is what is said -----------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=3)
@given(st.data())
def test_devices_receive_what_is_told_beforehand(data):
    name = data.draw(st.sampled_from(["mlp", "gpt", "mixture"]))
    mesh, given = data.draw(laid_out(MODELS[name], data.draw(st.sampled_from([10, 50]))))
    localized = localize(annotate(MODELS[name], given), mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)         # of dividing what was not moved
        trace = record(Executable(localized), mesh, arrays_of(MODELS[name])).trace
    for rank in range(mesh.size):
        said = [event.bytes_received for event in trace if event.kind == "collective" and event.rank == rank]
        assert sum(said) == sum(localized.received(rank))


# -- chains of what pending sums may go through, and may not -----------------------------------------------------------


@st.composite
def chains(draw):
    """A few inputs of integers, then ops on what there is, so that every sum is exact."""
    builder = ir.Builder()
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 6]), min_size=2, max_size=3))
    values = [builder.input(name, ir.TensorType("f8", sizes)) for name in "ab"]
    for _ in range(draw(st.integers(1, 8))):
        x, y = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        kind = draw(st.sampled_from([
            "add", "subtract", "negative", "sum", "transpose", "reshape", "slice", "scale", "maximum", "multiply",
            "product", "max", "reshard", "concatenate",
        ]))
        ndim = x.type.ndim
        if kind in ("add", "subtract", "maximum", "multiply"):
            values += builder.emit(kind, (x, y if y.type == x.type else x), {})
        elif kind == "negative":
            values += builder.emit(kind, (x,), {})
        elif kind in ("sum", "max") and ndim:
            axes = sorted(draw(st.sets(st.integers(0, ndim - 1), min_size=1)))
            values += builder.emit(kind, (x,), {"axes": axes, "keepdims": draw(st.booleans())})
        elif kind == "transpose":
            values += builder.emit(kind, (x,), {"permutation": draw(st.permutations(range(ndim)))})
        elif kind == "reshape" and ndim > 1:
            values += builder.emit(kind, (x,), {"shape": (x.type.shape[0] * x.type.shape[1], *x.type.shape[2:])})
        elif kind == "reshape":
            n = x.type.size
            k = draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))
            values += builder.emit(kind, (x,), {"shape": (k, n // k)})
        elif kind == "slice" and ndim:
            begin = draw(st.integers(0, x.type.shape[0] - 1))
            values += builder.emit(kind, (x,), {"axis": 0, "begin": begin, "end": x.type.shape[0], "step": 1})
        elif kind == "scale":
            factor, = builder.emit("constant", (), {"value": draw(st.sampled_from([2.0, -1.0, 0.0])), "shape": (),
                                                    "dtype": np.dtype("f8")})
            values += builder.emit("multiply", draw(st.permutations([x, factor])), {})
        elif kind == "product" and ndim == 2:
            values += builder.emit("einsum", (x, x), {"equation": "ij,kj->ik"})
        elif kind == "concatenate" and ndim:
            values += builder.emit(kind, (x, x), {"axis": ndim - 1})
        elif kind == "reshard":
            layout = draw(layouts(x, draw(st.sampled_from(MESHES[3:5])), ("sum",)))
            values += builder.emit(kind, (x,), {"layout": layout.short()})
    return builder.function("chain", draw(st.lists(st.sampled_from(values), min_size=1, max_size=3)))


def check_chain(data):
    function = data.draw(chains())
    mesh, given = data.draw(laid_out(function, 40))
    resharded = {value.name for op in function.ops for value in op.outputs if op.kind == "reshard"}
    if resharded:
        mesh = MESHES[4]
        given = {name: layout for name, layout in given.items() if set(layout.axes) | set(layout.partial) <= {"x", "y"}}
    given = {name: layout for name, layout in given.items() if name not in resharded}
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-4, 5, value.type.shape).astype(float) for value in function.inputs]
    check(function, arrays, mesh, given, assert_array_equal)


@given(st.data())
def test_sums_that_wait(data):
    check_chain(data)


@pytest.mark.slow
@pytest.mark.timeout(400)     # a crowded machine is slow, not wrong
@settings(max_examples=MANY * 10)
@given(st.data())
def test_sums_that_wait_often(data):
    check_chain(data)
