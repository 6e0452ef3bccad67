"""Programs of bfloat16 and float8: interpreted, executed and simulated as what they are."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from parallelism import Mesh, Pipeline, TensorSharding as S, ir
from parallelism.execution import Executable, PipelinedProgram
from parallelism.layouts import annotate, partition
from parallelism.simulation import PipelinedStep, simulate

B, ROWS = ir.symbol("B"), 6
LAYOUTS = {"x": S("dp", None), "w": S(None, "tp"), "v": S("tp", None)}


def loss(x, w, v):
    return np.sum(np.maximum(x @ w, 0) @ v)


def recorded(dtype, rows=ROWS, layouts=LAYOUTS):
    shapes = (rows, 3), (3, 4), (4, 2)
    return annotate(ir.record(loss, *(ir.TensorType(dtype, shape) for shape in shapes)), layouts)


def whole_numbers(dtype):
    """So small that all sums of the program are exact in eight bits."""
    rng = np.random.default_rng(0)
    return [rng.integers(-1, 2, shape).astype(dtype) for shape in ((ROWS, 3), (3, 4), (4, 2))]


def measures(trace):
    """Of each device: what its events are, with bytes, memory and times."""
    return {
        rank: ([(e.kind, e.name, e.dtype, e.bytes_sent, e.bytes_received, e.nbytes, e.flops) for e in events],
               trace.peaks()[rank], [(e.start_seconds, e.duration_seconds) for e in events])
        for rank in trace.ranks
        for events in [[e for e in trace.by_rank()[rank] if e.kind not in ("h2d", "d2h") and e.parent is None]]
    }


def assert_same_measures(found, wanted):
    for rank, (events, peak, times) in measures(wanted).items():
        assert measures(found)[rank][:2] == (events, peak)
        np.testing.assert_allclose(measures(found)[rank][2], times, rtol=1e-9, atol=1e-15)


@pytest.mark.takes_seconds
@pytest.mark.sampled(4, 2)
@pytest.mark.parametrize(("dtype", "options"), [
    ("bf16", {"backend": "thread"}), ("bf16", {}), ("f8e4m3fn", {"backend": "thread"}),
    ("f8e4m3fn", {"transport": "queue"}),
])
def test_a_program_is_exact_on_whole_numbers_and_simulated_as_it_runs(cluster_of, dtype, options):
    program = ir.gradient(recorded(dtype), keep_outputs=True)
    wanted = ir.interpret(ir.gradient(recorded("f64"), keep_outputs=True), whole_numbers("f8")).outputs
    kind = program.inputs[0].type.dtype
    arrays = whole_numbers(kind)
    executable = Executable(program, Mesh(dp=2, tp=2))
    done = cluster_of(Mesh(dp=2, tp=2), hardware="dgx-h100", compute="modelled", **options).run(executable, arrays)
    for found, again, exact in zip(done.result, ir.interpret(program, arrays).outputs, wanted, strict=True):
        assert found.dtype == again.dtype == kind
        assert_array_equal(found.astype(float), exact)
        assert_array_equal(again, found)
    assert_same_measures(simulate(executable, "dgx-h100"), done.trace)
    assert {e.dtype for e in done.trace if e.kind == "collective"} == {kind.name}


@pytest.mark.slow
def test_a_pipeline_is_exact_on_whole_numbers_and_simulated_as_it_runs(cluster_of):
    function, mesh = recorded("bf16", B, {"w": S(None, "tp"), "v": S("tp", None)}), Mesh(pp=2, dp=1, tp=2)
    program = PipelinedProgram(partition(function, 2), Pipeline(2, 3, "1f1b"), Mesh(tp=2))
    kind = function.inputs[0].type.dtype
    arrays = dict(zip(("x", "w", "v"), whole_numbers(kind), strict=True))
    done = cluster_of(mesh, "thread", hardware="dgx-h100", compute="modelled").run(program, arrays)
    wanted = ir.interpret(ir.gradient(recorded("f64"), ["w", "v"], keep_outputs=True), whole_numbers("f8")).outputs
    for found, exact in zip([done.result.loss, *done.result.gradients.values()], wanted, strict=True):
        assert found.dtype == kind
        assert_array_equal(found.astype(float), exact)
    assert_same_measures(simulate(PipelinedStep(program, mesh, ROWS), "dgx-h100"), done.trace)


def gradient_of(dtype):
    """All of it is of one dtype: a mean would be taken in float32."""
    return Executable(ir.gradient(recorded(dtype), keep_outputs=True), Mesh(dp=2, tp=2))


@pytest.mark.takes_seconds
def test_a_program_of_bfloat16_is_priced_as_one_of_float16_that_is_priced_as_bfloat16():
    for hardware in ("dgx-h100", "dgx-a100"):
        plain, stood_for = simulate(gradient_of("bf16"), hardware), simulate(
            gradient_of("f16"), hardware, priced_dtype="bfloat16")
        assert plain.makespan_seconds == stood_for.makespan_seconds > 0
        assert plain.peaks() == stood_for.peaks()


@pytest.mark.takes_seconds
def test_float8_has_its_own_rate_and_bytes():
    def times(dtype):
        trace = simulate(Executable(ir.record(lambda x, y: x @ y, *[ir.TensorType(dtype, (8192, 8192))] * 2),
                                    Mesh(one=1)), "dgx-h100")
        product, = (e for e in trace if e.name == "matmul")
        return product.duration_seconds, product.nbytes, trace.peak_bytes(0)

    (two, two_bytes, two_held), (one, one_bytes, one_held) = times("bf16"), times("f8e5m2")
    assert (two_bytes, two_held) == (2 * one_bytes, 2 * one_held) == (6 * 8192**2, 6 * 8192**2)
    assert 1.6 < two / one <= 2.01      # of its higher peak float8 reaches a smaller share
    with pytest.raises(ValueError, match="dgx-a100 has no rate for float8; it has"):
        simulate(Executable(ir.record(lambda x: x @ x, ir.TensorType("f8e5m2", (8, 8))), Mesh(one=1)), "dgx-a100")


@pytest.mark.takes_seconds
def test_integers_and_bools_keep_their_size_under_a_priced_dtype():
    for dtype in ("i64", "i8", "i1"):
        type = ir.TensorType(dtype, (1 << 20,))
        executable = Executable(ir.record(lambda x, y: x | y, type, type), Mesh(one=1))
        plain, priced = (simulate(executable, "dgx-h100", priced_dtype=name) for name in (None, "bfloat16"))
        assert plain.makespan_seconds == priced.makespan_seconds > 0
        assert {e.dtype for e in priced if e.kind == "compute" and e.nbytes} == {type.dtype.name}
