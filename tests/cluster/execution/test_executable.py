"""Programs run on devices, and simulated: interpreted, executed and simulated they agree, to the byte and the bit."""

from __future__ import annotations

import time
import warnings

import numpy as np
import pytest
from simulated_runs import ON, TENSOR, assert_simulated, run, told

from parallelism import Mesh, TensorSharding, ir, models
from parallelism.execution import Executable
from parallelism.layouts import annotate, localize, propagate
from parallelism.recorder import record
from parallelism.simulation import equal_devices, simulate
from parallelism.trace import UndeclaredComputeWarning
from vcluster import VirtualCluster


def test_a_program_that_declares_every_op_leaves_nothing_undeclared(monkeypatch):
    function = models.mlp((5, 7, 3), 6)
    executable, of_class = Executable(function, Mesh(dp=2)), Executable.of_class

    def slow_of_class(self, number):
        start = time.thread_time()
        while time.thread_time() - start < 0.02:
            pass
        return of_class(self, number)

    monkeypatch.setattr(Executable, "of_class", slow_of_class)
    with VirtualCluster(Mesh(dp=2), backend="thread", **ON) as cluster:
        done = cluster.run(executable, inputs_of(function))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UndeclaredComputeWarning)
        assert done.trace.undeclared_seconds == 0
        assert done.trace.on("pcie-v100", priced_dtype="float32").undeclared_seconds == 0
    assert {event.name for event in done.trace.filter(kind="compute")} >= {"@mlp", "matmul"}


def inputs_of(function):
    """Floats, and integers that every table has a place for."""
    rng = np.random.default_rng(0)
    return [
        rng.normal(size=v.type.shape) if v.type.dtype.kind == "f" else rng.integers(0, 5, v.type.shape)
        for v in function.inputs
    ]


LOSSES = {
    "mlp": lambda: models.mlp((5, 8, 6, 3), 6),
    "convolutional": lambda: models.convolutional((6, 6, 2), (3, 4), 5, 6),
    "gpt": lambda: models.gpt(vocabulary=12, width=8, heads=4, layers=2, sequence=4, batch=4),
    "mixture": lambda: models.mixture(6, 8, 4, 2, 5, 4, 6),
}
S = TensorSharding
DATA = {
    "mlp": {"x": S("dp", None), "targets": S("dp", None)},
    "convolutional": {"x": S("dp", ...), "targets": S("dp")},
    "gpt": {"tokens": S("dp", None), "targets": S("dp", None)},
}
VOCABULARY = TENSOR["gpt"] | {"p.tokens": S("tp", None)}
SEQUENCE = {"tokens": S(None, "sp"), "targets": S(None, "sp"), "p.positions": S("sp", None)}


def zero(model, stage, axis="dp"):
    """Gradients, and from stage 3 on weights, that lie apart over the replicas."""
    def layouts(function):
        found = {}
        weights = [v for v in function.inputs if v.name.startswith("p.")]
        for weight, gradient in zip(weights, function.outputs[1:], strict=True):
            apart = S(axis, ...).over(weight.type.ndim)
            found[gradient.name] = apart
            if stage == 3:
                found[weight.name] = apart
        return found | DATA[model]
    return layouts


CASES = [
    *(("mlp", Mesh(dp=n), DATA["mlp"]) for n in (1, 2, 3, 5, 8)),
    *(("mlp", Mesh(tp=n), TENSOR["mlp"]) for n in (2, 3, 4)),
    *(("mlp", Mesh(dp=n, tp=m), DATA["mlp"] | TENSOR["mlp"]) for n, m in ((2, 2), (4, 2), (2, 4), (3, 2))),
    *(("mlp", Mesh(dp=n), zero("mlp", stage)) for n in (2, 3) for stage in (1, 3)),
    ("mlp", Mesh(tp=2, dp=2), lambda f: zero("mlp", 1)(f) | {"x": S(("dp", "tp"), None), "targets": S("dp", None)}),
    ("convolutional", Mesh(dp=2), DATA["convolutional"]), ("convolutional", Mesh(dp=4), DATA["convolutional"]),
    ("convolutional", Mesh(tp=2), {"p.w0": S(None, None, None, "tp")}),
    ("convolutional", Mesh(dp=2), zero("convolutional", 3)),
    *(("gpt", Mesh(dp=n), DATA["gpt"]) for n in (2, 3, 4)),
    *(("gpt", Mesh(tp=n), TENSOR["gpt"]) for n in (2, 4)),
    *(("gpt", Mesh(dp=n, tp=m), DATA["gpt"] | TENSOR["gpt"]) for n, m in ((2, 2), (2, 4), (4, 2))),
    *(("gpt", Mesh(tp=n), VOCABULARY) for n in (2, 3)), ("gpt", Mesh(dp=2, tp=2), DATA["gpt"] | VOCABULARY),
    *(("gpt", Mesh(sp=n), SEQUENCE) for n in (2, 3, 4)),
    ("gpt", Mesh(dp=2, sp=2), {**SEQUENCE, "tokens": S("dp", "sp"), "targets": S("dp", "sp")}),
    ("gpt", Mesh(sp=2, tp=2), SEQUENCE | TENSOR["gpt"]),
    *(("gpt", Mesh(dp=2), zero("gpt", stage)) for stage in (1, 3)),
    ("gpt", Mesh(dp=2, tp=2), lambda f: zero("gpt", 3)(f) | TENSOR["gpt"]),
]
IDS = [f"{model}-{mesh!r}-{i}" for i, (model, mesh, _) in enumerate(CASES)]


def executable_of(model, mesh, layouts):
    loss = LOSSES[model]()
    weights = [v.name for v in loss.inputs if v.name.startswith("p.")]
    function = ir.gradient(loss, weights, keep_outputs=True)
    given = layouts(function) if callable(layouts) else layouts
    return Executable(localize(propagate(annotate(function, given), mesh), mesh))


@pytest.mark.takes_seconds
@pytest.mark.sampled(64, 32)
@pytest.mark.parametrize(("model", "mesh", "layouts"), CASES, ids=IDS)
def test_a_model_under_layouts_runs_as_interpreted_and_as_simulated(model, mesh, layouts):
    executable = executable_of(model, mesh, layouts)
    function = executable.programs.function
    inputs = inputs_of(function)
    wanted = ir.interpret(function, inputs).outputs
    found, trace = run(executable, mesh, inputs)
    for one, other in zip(wanted, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)
    simulated = simulate(executable, "dgx-h100", priced_dtype="bfloat16")
    assert_simulated(simulated, trace)
    folded = simulate(executable, "dgx-h100", priced_dtype="bfloat16", fold=True)
    equal = equal_devices(executable, "dgx-h100")
    assert told(folded) == [event for rank in folded.ranks for event in told(simulated, rank)]
    for rank in range(mesh.size):
        stands = equal.first[equal.set_of[rank]]
        assert [e[1:5] for e in told(simulated, rank)] == [e[1:5] for e in told(folded, stands)]


@pytest.mark.takes_seconds
def test_on_processes_and_under_the_recorder_it_is_the_same():
    mesh = Mesh(tp=2)
    executable = executable_of("mlp", mesh, TENSOR["mlp"])
    inputs = inputs_of(executable.programs.function)
    result, trace = run(executable, mesh, inputs, "process")
    simulated = simulate(executable, "dgx-h100", priced_dtype="bfloat16")
    assert_simulated(simulated, trace)
    for one, other in zip(result, run(executable, mesh, inputs)[0], strict=True):
        np.testing.assert_array_equal(one, other)
    with np.errstate(all="ignore"):
        recorded = record(executable, mesh, inputs).trace
    assert told(recorded.on("dgx-h100", priced_dtype="bfloat16")) == told(simulated)


@pytest.mark.takes_seconds
def test_parts_that_are_cut_unevenly_are_moved_block_by_block():
    mesh = Mesh(x=2, y=3)
    function = ir.record(lambda a: np.transpose(np.transpose(a) * 2), ir.TensorType("f64", (7, 5)))
    turned, = function.ops[0].outputs
    given = {"a": S("x", "y"), turned.name: S("x", "y"), function.outputs[0].name: S(("y", "x"), None)}
    executable = Executable(localize(propagate(annotate(function, given), mesh), mesh))
    kinds = {op.kind for rank in range(6) for op in executable.programs.program(rank).ops}
    assert "relayout" in kinds
    a = np.arange(35.0).reshape(7, 5)
    (found,), trace = run(executable, mesh, [a])
    np.testing.assert_array_equal(found, 2 * a)
    assert_simulated(simulate(executable, "dgx-h100", priced_dtype="bfloat16"), trace)


@pytest.mark.takes_seconds
def test_random_numbers_are_those_of_the_whole():
    mesh = Mesh(dp=3)
    function = ir.record(
        lambda x, step: x * ir.apply("dropout_mask", step, rate=0.5, seed=3, whole=(7, 4), starts=(0, 0), shape=(7, 4)),
        ir.TensorType("f64", (7, 4)), ir.TensorType("i64", ()))
    executable = Executable(localize(propagate(annotate(function, {"x": S("dp", None)}), mesh), mesh))
    inputs = [np.ones((7, 4)), np.asarray(2)]
    (found,), trace = run(executable, mesh, inputs)
    np.testing.assert_array_equal(found, ir.interpret(function, inputs).outputs[0])
    assert_simulated(simulate(executable, "dgx-h100", priced_dtype="bfloat16"), trace)


def test_an_operator_of_ones_own_goes_along_to_the_processes():
    from parallelism.ir.core import rules, table

    if "twice_and_one" not in table.OPERATORS:
        table.register(table.Operator(
            "twice_and_one", rule=lambda x: rules.elementwise([x.shape]), dtypes=lambda x: x.dtype,
            kernel=lambda x: 2 * x + 1, flops=2))
    try:
        function = ir.record(lambda x: ir.apply("twice_and_one", x), ir.TensorType("f64", (4, 3)))
        executable = Executable(annotate(function, {"x": S("dp", None)}), Mesh(dp=2))
        (found,), _ = run(executable, Mesh(dp=2), [np.ones((4, 3))], "process")
        np.testing.assert_array_equal(found, np.full((4, 3), 3.0))
    finally:
        del table.OPERATORS["twice_and_one"]
