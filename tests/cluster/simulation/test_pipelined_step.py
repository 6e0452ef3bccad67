"""A step of a pipelined program, simulated: as it runs, op by op; and with what a stage does priced once."""

from __future__ import annotations

import re

import numpy as np
import pytest
from simulated_runs import TENSOR, assert_simulated, run, told

from parallelism import Mesh, Pipeline, ir, models
from parallelism.execution import PipelinedProgram
from parallelism.layouts import annotate, partition
from parallelism.simulation import PipelinedStep, equal_devices, simulate
from parallelism.trace.breakdown import split

B = ir.symbol("B")
ON = {"hardware": "dgx-h100", "priced_dtype": "bfloat16"}


def program_of(stages, microbatches, schedule="1f1b", chunks=1, inside=None, layers=2, **options):
    """A small GPT in stages, and the inputs of so many rows."""
    function = models.gpt(vocabulary=12, width=8, heads=4, layers=layers, sequence=4, batch=B)
    if inside is not None:
        function = annotate(function, TENSOR["gpt"])
    cut = partition(function, stages, batch="B", **options)
    return PipelinedProgram(cut, Pipeline(stages, microbatches, schedule, chunks), inside)


def inputs_of(program, rows):
    rng, function = np.random.default_rng(0), program.stages.function
    numbers = {name: {"B_first": 0}.get(name, rows) for name in function.symbols}
    return {
        v.name: rng.normal(size=v.type.shape) if v.type.dtype.kind == "f" else rng.integers(0, 12, v.type.shape)
        for v in function.specialize(**numbers).inputs
    }


CASES = [
    (Mesh(pp=2), 6, {"microbatches": 3}),
    (Mesh(pp=2), 7, {"microbatches": 3, "schedule": "gpipe"}),
    (Mesh(pp=2, dp=2), 9, {"microbatches": 3, "recompute": True}),
    (Mesh(pp=2), 7, {"microbatches": 3, "schedule": "zero_bubble_h1"}),
    (Mesh(pp=2), 8, {"microbatches": 4, "schedule": "interleaved_1f1b", "stages": 4, "chunks": 2}),
    (Mesh(pp=2), 8, {"microbatches": 4, "schedule": "zero_bubble_v", "stages": 4, "chunks": 2}),
    (Mesh(pp=2, dp=2, tp=2), 12, {"microbatches": 3, "inside": Mesh(tp=2)}),
    (Mesh(pp=2, tp=4), 4, {"microbatches": 2, "inside": Mesh(tp=4), "schedule": "zero_bubble_h1"}),
    (Mesh(pp=2, tp=3), 4, {"microbatches": 2, "inside": Mesh(tp=3)}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "rows", "options"), CASES, ids=[f"{m!r}-{o}" for m, _, o in CASES])
def test_a_step_is_simulated_as_it_runs_and_the_same_when_it_is_folded(mesh, rows, options):
    program = program_of(**{"stages": 2, **options})
    step = PipelinedStep(program, mesh, rows)
    _, trace = run(program, mesh, inputs_of(program, rows))
    simulated = simulate(step, **ON)
    assert_simulated(simulated, trace)
    folded, equal = simulate(step, fold=True, **ON), equal_devices(step, "dgx-h100")
    assert folded.ranks == tuple(equal.first.tolist()) and len(folded) <= len(simulated)
    assert folded.makespan_seconds == pytest.approx(simulated.makespan_seconds, rel=1e-9)
    for rank in range(mesh.size):
        stands = int(equal.first[equal.set_of[rank]])
        assert folded.peak_bytes(stands) == simulated.peak_bytes(rank)
        assert folded.flops(stands) == simulated.flops(rank)
        assert folded.filter(kind=("send", "recv")).bytes_received(stands) == simulated.filter(
            kind=("send", "recv")).bytes_received(rank)


@pytest.mark.slow
def test_collectives_in_a_stage_are_told_apart_where_messages_use_the_same_links():
    mesh = Mesh(pp=2, tp=2)
    step = PipelinedStep(program_of(2, 3, inside=Mesh(tp=2)), mesh, 6)
    apart, alone = (simulate(step, fold=True, link_sharing=sharing, **ON) for sharing in (True, False))
    assert apart.count("all_reduce") > alone.count("all_reduce")


@pytest.mark.slow
def test_what_a_stage_does_is_priced_once_however_many_microbatches_there_are():
    asked = []

    class Counting(PipelinedStep):
        def templates(self, price=None):
            def counted(ranks, events):
                asked.append(len(events.rows))
                return price(ranks, events)

            return super().templates(price and counted)

    counts = {}
    for microbatches in (8, 64):
        asked.clear()
        step = Counting(program_of(2, microbatches, inside=Mesh(tp=2)), Mesh(pp=2, dp=4, tp=2), 4 * microbatches)
        trace = simulate(step, fold=True, **ON)
        assert trace.ranks == (0, 8) and len(asked) == 4        # F and B of two stages
        counts[microbatches] = len(trace)
    assert counts[64] < 8 * counts[8]


@pytest.mark.takes_seconds
def test_equal_devices_are_told_op_by_op_if_that_is_asked_for():
    step = PipelinedStep(program_of(2, 3, inside=Mesh(tp=2)), Mesh(pp=2, dp=2, tp=2), 12)
    alone = {**ON, "link_sharing": False}       # a piece cannot share its links with messages
    whole, pieces = simulate(step, **alone), simulate(step, fold=True, **alone)
    folded = simulate(step, fold=True, op_by_op=True, **alone)
    assert folded.ranks == pieces.ranks == (0, 4)
    assert folded.makespan_seconds == pytest.approx(whole.makespan_seconds, rel=1e-9)
    for rank in folded.ranks:
        assert folded.count("all_reduce", rank) == whole.count("all_reduce", rank) > pieces.count("all_reduce", rank)
        assert split(folded)[rank] == pytest.approx(split(whole)[rank], rel=1e-9, abs=1e-15)
        assert split(folded)[rank].communication > split(pieces)[rank].communication


@pytest.mark.slow
def test_a_pipelined_program_is_simulated_on_a_mesh_with_a_batch():
    program, mesh = program_of(2, 3, inside=Mesh(tp=2)), Mesh(pp=2, tp=2)
    for options in ({}, {"fold": True}):
        simulated = simulate(program, mesh=mesh, batch=12, **options, **ON)
        assert told(simulated) == told(simulate(PipelinedStep(program, mesh, 12), **options, **ON))
    equal = equal_devices(program, "dgx-h100", mesh=mesh, batch=12)
    assert equal.first.tolist() == equal_devices(PipelinedStep(program, mesh, 12), "dgx-h100").first.tolist()
    assert told(simulate(program, mesh=mesh, numbers={"B": 12}, **ON)) == told(simulate(program, mesh=mesh, batch=12, **ON))


@pytest.mark.takes_seconds
def test_what_says_the_sizes_of_a_pipelined_program_twice_or_not_at_all_is_refused():
    program, mesh = program_of(2, 3, inside=Mesh(tp=2)), Mesh(pp=2, tp=2)
    for wrong in ({}, {"batch": 12}):
        with pytest.raises(TypeError, match="a PipelinedProgram is simulated on a mesh: simulate"):
            simulate(program, **wrong, **ON)
    with pytest.raises(ValueError, match=r"@.*: nothing says what B is; .* simulate takes numbers={'B': 64}"):
        simulate(program, mesh=mesh, **ON)
    with pytest.raises(ValueError, match=r"B is given twice, as batch=12 and as numbers={'B': 8}"):
        simulate(program, mesh=mesh, batch=12, numbers={"B": 8}, **ON)
    step = PipelinedStep(program, mesh, 12)
    with pytest.raises(TypeError, match="are for programs with symbols; the sizes of the PipelinedStep are fixed"):
        simulate(step, batch=12, **ON)
    with pytest.raises(ValueError, match=r"the PipelinedStep is for .*, not for Mesh"):
        simulate(step, mesh=Mesh(pp=2), **ON)


@pytest.mark.takes_seconds
def test_a_straggler_is_nobodys_equal_and_every_op_is_told():
    from parallelism.hardware import Hardware

    hardware = Hardware.preset("dgx-h100").slow(rank=3, factor=2)
    step = PipelinedStep(program_of(2, 2, inside=Mesh(tp=2)), Mesh(pp=2, tp=2), 2)
    whole = simulate(step, hardware, priced_dtype="bfloat16")
    folded = simulate(step, hardware, priced_dtype="bfloat16", fold=True)
    assert folded.ranks == (0, 1, 2, 3) and told(folded) == told(whole)


@pytest.mark.takes_seconds
def test_equal_devices_are_found_where_only_the_priced_dtype_has_a_rate():
    step = PipelinedStep(program_of(2, 2), Mesh(pp=2, dp=2), 4)
    folded = simulate(step, "tpu-v5p:1x1x4", priced_dtype="bfloat16", fold=True, link_sharing=False)
    equal = equal_devices(step, "tpu-v5p:1x1x4", priced_dtype="bfloat16", link_sharing=False)
    assert folded.ranks == tuple(equal.first.tolist())
    with pytest.raises(ValueError, match="tpu-v5p has no rate for float64"):
        equal_devices(step, "tpu-v5p:1x1x4")


@pytest.mark.parametrize(("rows", "message"), [
    (5, "a batch of 5 rows cannot be dealt to 2 x 3 microbatches: some would have none"),
])
def test_a_batch_that_is_too_small_is_refused(rows, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        PipelinedStep(program_of(2, 3), Mesh(pp=2, dp=2), rows)


def test_symbols_need_numbers():
    function = models.mlp((ir.symbol("D"), 4, 3), B)
    program = PipelinedProgram(
        partition(function, 2, batch="B", sizes={"D": 8}), Pipeline(2, 2))
    with pytest.raises(ValueError, match="@mlp: nothing says what D is; in a run"):
        PipelinedStep(program, Mesh(pp=2), 4)
    assert len(simulate(PipelinedStep(program, Mesh(pp=2), 4, D=8), **ON)) > 0
