"""Donated state on devices: held once, in run, simulation and recording alike, and the caller's arrays stay."""

from __future__ import annotations

import re

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from simulated_runs import assert_simulated, run, told

from parallelism import Mesh, TensorSharding as S, ir, models
from parallelism.execution import Executable
from parallelism.execution.device_program import DeviceProgram
from parallelism.ir.passes import donations
from parallelism.kernels.optimizers import Adam, AdamState
from parallelism.layouts import annotate
from parallelism.recorder import record
from parallelism.simulation import simulate
from parallelism.transforms import categories, first_state, train_step

WIDTHS = {"w": (6, 5), "b": (5,), "u": (7, 3)}
CATEGORIES = {"p": "weights", "g": "gradients", "mean": "optimizer", "square": "optimizer"}


def update(p, g, mean, square):
    made, state = Adam(1e-3).update([*p.values()], [*g.values()], AdamState(3, [*mean.values()], [*square.values()]))
    return [dict(zip(p, arrays, strict=True)) for arrays in (made, state.means, state.squares)]


STATE = {name: ir.TensorType("f32", shape) for name, shape in WIDTHS.items()}
UPDATE = ir.record(update, STATE, STATE, STATE, STATE)


def laid(layouts, of):
    """The update with these layouts of the tensors of each kind, and of the outputs that follow them."""
    given = {f"{kind}.{name}": layout for kind in of for name, layout in layouts.items()}
    kinds = dict(zip(("p", "mean", "square"), (UPDATE.outputs[i:i + 3] for i in (0, 3, 6)), strict=True))
    for kind in kinds.keys() & {*of}:
        given |= {value.name: layouts[name] for value, name in zip(kinds[kind], WIDTHS, strict=True) if name in layouts}
    return annotate(UPDATE, given)


def arrays_of(function):
    rng = np.random.default_rng(0)
    return [rng.random(v.type.shape).astype(v.type.dtype) if v.type.dtype.kind == "f"
            else np.zeros(v.type.shape, v.type.dtype) for v in function.inputs]


SPLIT = {"w": S("dp", None), "b": S("dp"), "u": S("dp", None)}
CASES = {
    "whole": (Mesh(dp=1), {}, ()), "replicated": (Mesh(dp=2), {}, ()),
    "uneven": (Mesh(dp=4), SPLIT, ("p", "g", "mean", "square")),
    "ZeRO-1": (Mesh(dp=3), SPLIT, ("mean", "square")),
    "tensor": (Mesh(dp=2, tp=2), {"w": S(None, "tp"), "b": S("tp"), "u": S("tp", "dp")}, ("p", "g", "mean", "square")),
}


@pytest.mark.slow_for("uneven")
@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize(("mesh", "layouts", "of"), CASES.values(), ids=CASES)
def test_a_donated_step_of_adam_holds_sixteen_bytes_a_parameter(mesh, layouts, of):
    function = laid(layouts, of)
    donate = ("p", "mean", "square")
    executable = Executable(function, mesh, categories=CATEGORIES, donate=donate)
    arrays = arrays_of(function)
    before = [array.copy() for array in arrays]
    result, trace = run(executable, mesh, arrays)
    plain, held_twice = run(Executable(function, mesh, categories=CATEGORIES), mesh, arrays)
    recorded = record(executable, mesh, arrays).trace.on("dgx-h100", priced_dtype="bfloat16")
    simulated = simulate(executable, "dgx-h100", priced_dtype="bfloat16")
    for array, was in zip(arrays, before, strict=True):
        assert_array_equal(array, was)
    for one, other in zip(result, plain, strict=True):
        assert_array_equal(one, other)
    assert_simulated(simulated, trace)
    assert told(recorded) == told(simulated) and recorded.peaks() == trace.peaks()
    for rank in range(mesh.size):
        local = executable.programs.program(rank)
        sizes = {kind: sum(v.type.nbytes for v in local.inputs if v.name.startswith(f"{kind}."))
                 for kind in ("p", "g", "mean", "square")}
        found = {category: trace.peak_bytes(rank, category) for category in {*CATEGORIES.values(), "outputs"}}
        assert found == {
            "weights": sizes["p"], "gradients": sizes["g"], "optimizer": sizes["mean"] + sizes["square"], "outputs": 0}
        assert trace.peak_bytes(rank) == ir.peak_bytes(local, donate)
        assert held_twice.peak_bytes(rank, "outputs") == sum(sizes.values()) - sizes["g"]
    if not of:
        assert trace.peaks("weights")[0] * 4 == 16 * (30 + 5 + 21)


@pytest.mark.slow
def test_a_donated_training_step_on_processes():
    """What follows is as without donation, and the state that is given stays what it was."""
    step = train_step(models.mlp((6, 8, 4), 6, dtype="float32"), Adam(1e-2))
    split = {f"{kind}{name}": S("dp", None) for name in ("p.w0", "p.w1") for kind in ("mean.", "square.", "next.mean.",
             "next.square.")}
    step = annotate(step, {"x": S("dp", None), "targets": S("dp", None), **split})
    mesh = Mesh(dp=2)
    inputs = dict(zip((v.name for v in step.inputs), arrays_of(step), strict=True))
    inputs |= first_state(step, {name: array for name, array in inputs.items() if name.startswith("p.")})
    kept = {name: array.copy() for name, array in inputs.items()}
    executable = Executable(step, mesh, categories=categories(step), donate=("p", "mean", "square", "updates"))
    result, trace = run(executable, mesh, inputs, "process")
    assert_simulated(simulate(executable, "dgx-h100", priced_dtype="bfloat16"), trace)
    for one, other in zip(result, run(Executable(step, mesh), mesh, inputs)[0], strict=True):
        assert_array_equal(one, other)
    for name, array in inputs.items():
        assert_array_equal(array, kept[name])
    nbytes = sum(v.type.nbytes for v in executable.programs.program(0).inputs if v.name.startswith("p."))
    assert trace.peaks("weights") == dict.fromkeys(range(2), nbytes)
    assert trace.peaks("optimizer") == dict.fromkeys(range(2), 2 * nbytes + 8)
    assert trace.peaks("outputs") == dict.fromkeys(range(2), 4)       # the loss
    with np.errstate(all="ignore"):
        assert record(executable, mesh, inputs).trace.peaks() == trace.peaks()


def whose_memory(device, function, *arrays):
    """For each output, the numbers of the inputs whose memory it shares."""
    program = DeviceProgram(function, {}, donated=donations(function, ("p", "mean", "square")))
    given = program.own(arrays)
    assert all(own is array for own, array in zip(given, arrays, strict=True))
    return [[i for i, x in enumerate(given) if np.shares_memory(x, made)] for made in program.run(device, given)]


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_on_a_device_an_output_is_written_into_the_array_of_its_input(cluster_of, backend):
    names = [value.name for value in UPDATE.inputs]
    own = [[names.index(f"{kind}.{name}")] for kind in ("p", "mean", "square") for name in WIDTHS]
    assert cluster_of(Mesh(dp=1), backend).run(whose_memory, UPDATE, *arrays_of(UPDATE)).outputs == [own]


def test_arrays_that_may_not_be_written_are_donated_as_copies():
    arrays = arrays_of(UPDATE)
    for array in arrays:
        array.flags.writeable = False
    plain, _ = run(Executable(UPDATE, Mesh(dp=1)), Mesh(dp=1), arrays)
    for backend in ("thread", "process"):
        result, _ = run(Executable(UPDATE, Mesh(dp=1), donate=("p", "mean", "square")), Mesh(dp=1), arrays, backend)
        for one, other in zip(result, plain, strict=True):
            assert_array_equal(one, other)


def test_one_array_for_two_donated_inputs_is_two_on_a_device():
    function = ir.record(lambda x, y: (x + y, y * 2), *[ir.TensorType("f64", (4, 3))] * 2)
    x = np.arange(12.0).reshape(4, 3)
    executable = Executable(annotate(function, {"x": S("dp", None), "y": S("dp", None)}), Mesh(dp=2),
                            donate=("x", "y"))
    for backend in ("thread", "process"):
        (summed, doubled), _ = run(executable, Mesh(dp=2), [x, x], backend)
        assert_array_equal(doubled, 2 * x)
        assert_array_equal(summed, 2 * x)
    assert_array_equal(x, np.arange(12.0).reshape(4, 3))


def test_a_recorded_program_that_writes_into_its_inputs_gets_copies():
    function = ir.record(lambda b, x: ir.apply("accumulate", b, x), *[ir.TensorType("f64", (4,))] * 2)
    buffer = np.arange(4.0)
    record(Executable(function, Mesh(dp=2)), Mesh(dp=2), [buffer, np.ones(4)])
    assert_array_equal(buffer, np.arange(4.0))


@pytest.mark.parametrize(("layouts", "donate", "told"), [
    ({}, ("q",), "donate names 'q', which no input of @lambda is called, or begins with: x, y"),
    ({}, ("x", "y"), "cannot take the memory of the donated %y: its outputs of this type take the memory of other"),
    ({"x": S("dp", None), "1": S(None, "dp")}, "x", "it has no output of type tensor<4x4xf64> in layout [dp, None]"),
])
def test_what_cannot_be_donated_is_told_before_anything_runs(layouts, donate, told):
    function = ir.record(lambda x, y: x + y * 2, *[ir.TensorType("f64", (4, 4))] * 2)
    layouts = {function.outputs[0].name if name == "1" else name: layout for name, layout in layouts.items()}
    with pytest.raises(ValueError, match=re.escape(told)):
        Executable(annotate(function, layouts), Mesh(dp=2), donate=donate)
