"""`Trace.on` of a simulated trace: a simulation there, or a refusal that says what to write instead."""

from __future__ import annotations

import copy
import os
import pickle
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st
from simulated_runs import told
from transformed import model_step

from parallelism import (
    Executable,
    Hardware,
    Mesh,
    Pipeline,
    PipelinedProgram,
    Trace,
    ir,
    models,
    simulate,
    step_parts,
)
from parallelism.layouts import partition
from parallelism.planning import find_plan
from parallelism.recorder import record
from parallelism.simulation import CannotFold, shared_channels
from parallelism.transforms import Adam, Strategy, train_step

B, = ir.symbols("B")
MANY = int(os.environ.get("VCLUSTER_REPRICINGS", "400"))
BATCH = 8
NAMES = (
    "dgx-h100:2", "dgx-a100:2", "dgx-1-v100", "pcie-v100", "tpu-v4:2x2x4", "tpu-v5e", "trainium2", "ethernet-cpu",
    "gb200-nvl72:1", "l40s-node", "mi300x-node:2", "h100-pcie-node", "dgx-a100:2+megatron-a100",
    "dgx-h100:2+megatron-h100",
)
"""Nodes of 2, 4, 8 and 72 devices, tori, rings and switches; two with software that fuses and overlaps."""
BEGINNINGS = ("", "dp=2 ", "dp=3 ", "tp=2 ", "dp=2 tp=2 ", "tp=2 sp ", "dp=2 tp=2 sp ", "dp=4 zero=1 ", "dp=2 zero=3 ",
              "dp=2 zero=2 overlap ", "dp=2 tp=2 overlap ", "dp=2 ep ", "cp=2 dp=2 ")
ENDS = ("", "", "pp=2 1f1b:4", "pp=2 gpipe:2", "pp=2 zero_bubble_h1:4", "pp=2 interleaved_1f1b:4x2")
MIDDLES = ("", "", "recompute=block.*.attention.core ", "recompute=block.* ", "fused ")


@dataclass(frozen=True)
class Drawn:
    """A step of a strategy on a mesh, and how it is simulated."""

    model: str
    text: str
    options: dict

    def simulated(self, hardware, **other):
        """The trace, or the words of a refusal."""
        return outcome(lambda: self.trace(hardware, **other))

    def trace(self, hardware, **other):
        """The trace; ``other`` options replace those that were drawn."""
        step, mesh = self.step
        return simulate(step, hardware, mesh=mesh, **self.options | other)

    @property
    def step(self):
        strategy, mesh = Strategy.parse_on_mesh(self.text)
        return strategy(model_step(self.model, B if self.batch else BATCH, Adam())), mesh or Mesh(dp=1)

    @property
    def batch(self):
        return self.options.get("batch")


def outcome(make):
    """What is made, or the words of the refusal."""
    try:
        return make()
    except ValueError as error:
        return str(error)


@st.composite
def programs(draw):
    model = draw(st.sampled_from(["mlp", "gpt", "llama", "mixture", "plain_gpt", "recurrent"]))
    end = draw(st.sampled_from(ENDS))
    text = draw(st.sampled_from(BEGINNINGS)) + draw(st.sampled_from(MIDDLES)) + end
    options = {
        "fold": draw(st.sampled_from([True, None, False])), "op_by_op": draw(st.booleans()),
        "link_sharing": draw(st.booleans()), "priced_dtype": draw(st.sampled_from([None, "bfloat16", "float32"]))}
    return Drawn(model, text.strip() or "dp=1", options | ({"batch": BATCH} if end else {}))


@st.composite
def hardwares(draw):
    """A preset, whole or with slow devices, faults of links, or ranks in another order."""
    hardware = Hardware.preset(draw(st.sampled_from(NAMES)))
    hurt = draw(st.sampled_from(["", "", "slow", "link", "both", "placed"]))
    rank, other = draw(st.permutations(range(8)))[:2]
    if hurt in ("slow", "both"):
        hardware = hardware.slow(rank=rank, factor=1.7)
    if hurt in ("link", "both"):
        hardware = hardware.fault(source=rank, target=draw(st.sampled_from([other, None])), bandwidth_factor=0.3,
                                  delay_seconds=draw(st.sampled_from([0.0, 2e-5])))
    if hurt == "placed":
        hardware = hardware.placed(draw(st.permutations(range(hardware.devices)))[:8])
    return hardware


def check_elsewhere(drawn, a, b, path):
    """The law, and what a file, a copy and a part of the trace do: they give the same, or refuse."""
    here = drawn.simulated(a)
    assume(isinstance(here, Trace))     # what a strategy or the first hardware refuses has no trace
    there = drawn.simulated(b)
    elsewhere = outcome(lambda: here.on(b))
    assert_same(elsewhere, there)
    here.save(path)
    for again in (Trace.load(path), copy.copy(here), here[:]):
        assert again == here
        priced = outcome(lambda again=again: again.on(b))
        if isinstance(priced, Trace):       # the first hardware had no equal devices, and the trace has all events
            assert_same(priced, drawn.simulated(b, fold=False))
        elif priced != there:
            assert "Write simulate(program, hardware, mesh=...)" in priced
    if isinstance(there, Trace):
        assert_same(elsewhere.on(a), here)


def assert_same(found, expected):
    if isinstance(expected, str):
        assert found == expected
        return
    assert isinstance(found, Trace), found
    assert (found.ranks, found.hardware, found.priced) == (expected.ranks, expected.hardware, expected.priced)
    for field in ("start_seconds", "duration_seconds"):
        np.testing.assert_allclose(found.columns.numbers(field), expected.columns.numbers(field), rtol=1e-9, atol=0)
    assert found.makespan_seconds == pytest.approx(expected.makespan_seconds, rel=1e-9)
    times = {"start_seconds": None, "duration_seconds": None}
    assert found.columns.with_columns(**times) == expected.columns.with_columns(**times)
    assert found.peaks() == expected.peaks()


@pytest.mark.slow
@settings(max_examples=3)
@given(programs(), hardwares(), hardwares())
def test_a_simulated_trace_elsewhere_is_a_simulation_there(tmp_path_factory, drawn, a, b):
    check_elsewhere(drawn, a, b, tmp_path_factory.getbasetemp() / "elsewhere.json")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=MANY)
@given(programs(), hardwares(), hardwares())
def test_many_simulated_traces_elsewhere_are_simulations_there(tmp_path_factory, drawn, a, b):
    check_elsewhere(drawn, a, b, tmp_path_factory.getbasetemp() / "elsewhere.json")


TRANSFORMER = models.TransformerSpec(layers=4, width=512, heads=8, vocabulary=1024, sequence=128)


@pytest.mark.slow
def test_a_plan_takes_elsewhere_what_its_step_takes_there():
    best = find_plan(TRANSFORMER, hardware="dgx-h100", devices=4, batch=8, recompute="none", zero=0, pp=4).best
    for fold in (None, False):
        elsewhere = best.simulate(fold=fold).on("dgx-a100")
        assert elsewhere == simulate(best.step, "dgx-a100", mesh=best.mesh, batch=8, fold=fold)
        assert f"{elsewhere.makespan_seconds * 1e3:.2f} ms" == "7.13 ms"
        assert elsewhere.on("dgx-h100").makespan_seconds == pytest.approx(best.seconds, rel=1e-9)


STEP = train_step(models.mlp((512, 2048, 512), 4096, dtype="float32"), Adam())


@pytest.mark.takes_seconds
@pytest.mark.sampled(2)
@pytest.mark.parametrize("damage", [
    lambda hardware, rank: hardware.slow(rank=rank, factor=2.0),
    lambda hardware, rank: hardware.fault(source=rank, target=None, bandwidth_factor=0.1),
], ids=["slow", "fault"])
@pytest.mark.parametrize("rank", [0, 5])
def test_a_folded_trace_hears_of_any_device(damage, rank):
    step, mesh, whole = Strategy.parse("dp")(STEP), Mesh(dp=8), Hardware.preset("dgx-h100:1")
    folded = simulate(step, whole, mesh=mesh, fold=True)
    hurt = folded.on(damage(whole, rank))
    assert folded.ranks == (0, 1) and hurt.makespan_seconds > folded.makespan_seconds
    everybody = simulate(step, damage(whole, rank), mesh=mesh)
    assert hurt.makespan_seconds == pytest.approx(everybody.makespan_seconds, rel=1e-9)
    assert hurt.on(whole) == folded


@pytest.mark.takes_seconds
def test_the_trace_of_the_parts_of_a_step_is_simulated_elsewhere():
    step, mesh = Strategy.parse("dp pp 1f1b:2")(train_step(models.mlp((64, 128, 64), B), Adam())), Mesh(pp=2, dp=2)
    here, there = (step_parts(step, name, mesh=mesh, batch=8) for name in ("dgx-h100", "dgx-a100"))
    assert here.trace.on("dgx-a100") == there.trace != here.trace


def pieces(hardware="dgx-h100", **options):
    stages = partition(models.mlp((64, 64, 64), B), 2)
    return simulate(PipelinedProgram(stages, Pipeline(2, 4)), hardware, mesh=Mesh(pp=2), batch=8, fold=True, **options)


def saved(trace, path):
    trace.save(path)
    return Trace.load(path)


BUFFERS = replace(Hardware.preset("dgx-h100"), gradient_buffers=True)
INSTEAD = (r"\. Write simulate\(program, hardware, mesh=...\) for that hardware, or trace\.on\(hardware\) before "
           r"trace\.save\(\) or trace\.filter\(\)$")
LOST = "^a folded trace that was loaded, filtered or copied cannot be priced on "


@pytest.mark.takes_seconds
@pytest.mark.sampled(4, 3)
@pytest.mark.parametrize("part", [
    lambda trace, path: saved(trace, path), lambda trace, path: pickle.loads(pickle.dumps(trace)),     # noqa: S301
    lambda trace, path: copy.copy(trace), lambda trace, path: trace.filter(rank=0), lambda trace, path: trace[:-1],
    lambda trace, path: saved(saved(trace, path), path), lambda trace, path: saved(trace.filter(kind="compute"), path),
], ids=["saved", "pickled", "copied", "filtered", "cut", "saved twice", "filtered and saved"])
def test_what_stands_for_several_ops_and_has_lost_them_is_refused(part, tmp_path):
    """All ranks are there; but an action of a stage is one event, whose seconds are those of the first hardware."""
    trace = pieces()
    assert trace.ranks == (0, 1) and trace.priced.pieces and not trace.priced.folded
    message = f"{LOST}dgx-a100: it has one event for several ops, and not the program{INSTEAD}"
    with pytest.raises(ValueError, match=message):
        part(trace, tmp_path / "trace.json").on("dgx-a100")
    assert trace.on("dgx-a100") == pieces("dgx-a100")


@pytest.mark.takes_seconds
def test_a_part_of_a_folded_trace_is_refused(tmp_path):
    folded = simulate(Strategy.parse("dp")(STEP), "dgx-h100", mesh=Mesh(dp=4), fold=True)
    assert folded.priced.folded and not folded.priced.pieces
    message = f"{LOST}dgx-a100: it has one device for all that are equal to it, and not the program{INSTEAD}"
    with pytest.raises(ValueError, match=message):
        saved(folded, tmp_path / "folded.json").on("dgx-a100")


@pytest.mark.takes_seconds
@pytest.mark.sampled(3, 2)
@pytest.mark.parametrize(("here", "there", "words"), [
    ("dgx-h100", "dgx-a100+megatron-a100", "fuses other chains of elementwise ops"),
    ("dgx-a100+megatron-a100", "dgx-h100", "does not fuse chains of elementwise ops"),
    ("dgx-h100", BUFFERS, "has buffers for the gradients of a single microbatch"),
    (BUFFERS, "dgx-h100", "has no buffers for the gradients of a single microbatch"),
    (replace(BUFFERS, overlapping=True), BUFFERS, "does not run collectives of a backward beside products"),
])
def test_a_file_of_ops_that_depend_on_the_software_is_refused_where_this_differs(here, there, words, tmp_path):
    step = Strategy.parse("dp")(STEP)
    whole = simulate(step, here, mesh=Mesh(dp=2))
    trace = saved(whole, tmp_path / "trace.json")
    assert whole.on(there) == simulate(step, there, mesh=Mesh(dp=2))
    name = Hardware.of(there).name
    message = (f"a simulated trace that was loaded, filtered or copied cannot be priced on {name}: its ops are those "
               f"on {whole.hardware}, and software on {name} {words}")
    with pytest.raises(ValueError, match=f"^{re.escape(message)}{INSTEAD}"):
        trace.on(there)
    placed = simulate(Executable(step, Mesh(dp=2)), here)        # its ops are the same everywhere
    assert_same(saved(placed, tmp_path / "trace.json").on(there), simulate(Executable(step, Mesh(dp=2)), there))


@pytest.mark.takes_seconds
def test_the_ranks_of_a_filtered_trace_must_not_need_others():
    mesh = Mesh(dp=4)
    executable = Executable(Strategy.parse("dp")(STEP), mesh)
    trace = simulate(executable, "dgx-h100")
    message = ("^a trace of some ranks cannot be priced on dgx-a100: it has what ranks 1, 2 do together with rank 0, "
               r"and not what rank 0 does. Write trace.on\(hardware\) before trace.filter\(rank=...\)$")
    with pytest.raises(ValueError, match=message):
        trace.filter(rank=(1, 2)).on("dgx-a100")
    alone = trace.filter(rank=(1, 2), kind="compute").on("dgx-a100")
    there = trace.on("dgx-a100").filter(rank=(1, 2), kind="compute")
    assert alone.totals[1].compute_seconds == pytest.approx(there.totals[1].compute_seconds, rel=1e-9)


@pytest.mark.takes_seconds
def test_a_recorded_program_is_priced_by_its_ops():
    loss = models.mlp((4, 8, 4), 2)
    executable = Executable(loss, Mesh(dp=2))
    inputs = {value.name: np.ones(value.type.shape) for value in loss.inputs}
    recorded = record(executable, Mesh(dp=2), inputs).trace
    assert told(recorded.on("dgx-a100")) == told(simulate(executable, "dgx-h100").on("dgx-a100"))


@pytest.mark.takes_seconds
def test_what_cannot_be_folded_there_is_refused_or_simulated_whole(monkeypatch):
    """As by `simulate` with these arguments: on a torus, equal devices share links."""
    step = Strategy.parse("pp dp 1f1b:2")(train_step(models.mlp((64, 128, 64), B, dtype="float32"), Adam()))
    mesh = Mesh(pp=2, dp=8)
    torus = "tpu-v4:2x2x4"
    folded, chosen = (simulate(step, "dgx-h100", mesh=mesh, batch=16, fold=fold) for fold in (True, None))
    whole = simulate(step, torus, mesh=mesh, batch=16)
    assert folded.on(torus).makespan_seconds == pytest.approx(whole.makespan_seconds, rel=1e-9)
    monkeypatch.setattr(shared_channels, "MOST_TRANSFERS", 7)
    with pytest.raises(CannotFold, match=r"simulate (them )?all"):
        folded.on(torus)
    assert chosen == folded and chosen.on(torus) == whole


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "residual"])
def test_a_program_with_uneven_pieces_is_folded_where_each_link_is_of_one_device(model):
    """Some groups have no member that calls a collective in this way: they are not asked what they move."""
    strategy, mesh = Strategy.parse_on_mesh("zero=3 dp=4 tp=2")
    step, hardware = strategy(model_step(model, 4, Adam())), Hardware.preset("mi300x-node:1")
    whole = simulate(step, hardware, mesh=mesh)
    folded = simulate(step, hardware, mesh=mesh, fold=True)
    assert len(folded.ranks) < 8 and folded.makespan_seconds == pytest.approx(whole.makespan_seconds, rel=1e-9)
    assert simulate(step, hardware, mesh=mesh, fold=None).makespan_seconds == pytest.approx(
        whole.makespan_seconds, rel=1e-9)
