"""Stages that differ in names alone are derived, laid out and run once: with the same programs and traces as each."""

import numpy as np
import pytest

from parallelism import Mesh, Pipeline, PipelinedProgram, PipelinedStep, Trace, ir, models, simulate
from parallelism.ir.passes import Form
from parallelism.layouts import annotate, partition
from parallelism.layouts.stages import Stages
from parallelism.simulation.repeated_stages import RepeatingStage

Found = tuple[list[str], list[str], list[Trace]]


def texts(stages: Stages) -> list[str]:
    """All functions of all stages, and the names that they exchange."""
    return [
        "".join(map(str, stage.functions)) + repr((
            stage.weights, stage.trained, stage.data, stage.received, stage.sent, stage.returned, stage.answered,
            stage.saved, stage.between))
        for stage in stages.functions]


def found(
    schedule: str, chunks: int | None, recompute: bool | set[int], inside: Mesh | None, rows: int
) -> Found:
    """The programs of the stages before and after they are laid out, and traces of a step."""
    pipeline = Pipeline(4, 4, schedule, chunks or 1)
    layers = pipeline.stages
    function = models.gpt(12, 8, 2, layers, 3, ir.symbol("B"), dtype=np.float32)
    if inside is not None:
        layouts = {"qkv": "[None, tp]", "up": "[None, tp]", "out": "[tp, None]", "down": "[tp, None]"}
        function = annotate(function, {
            f"p.{layer}.{name}": layout for layer in range(layers) for name, layout in layouts.items()})
    stages = partition(function, [f"block.{layer}" for layer in range(1, layers)], recompute=recompute)
    program = PipelinedProgram(stages, pipeline, inside)
    mesh = Mesh(pp=pipeline.ranks, dp=2 if rows % 2 else 1, **(inside.shape if inside else {}))
    step = PipelinedStep(program, mesh, rows)
    hardware = f"dgx-h100:{-(-mesh.size // 8)}"
    return texts(stages), texts(program.stages), [
        simulate(step, hardware, fold=True), simulate(step, hardware, fold=True, op_by_op=True),
        simulate(step, hardware)]


@pytest.mark.parametrize(("schedule", "chunks", "recompute", "inside", "rows"), [
    ("1f1b", None, False, Mesh(tp=2), 4),
    ("zb_h1", None, False, None, 4),
    ("interleaved_1f1b", 2, {1, 2}, None, 9),
    pytest.param(       # shards of different extents, so places differ
        "1f1b", None, True, Mesh(tp=3), 4, marks=pytest.mark.slow),
])
def test_equal_to_each_stage_by_itself(
    schedule: str, chunks: int | None, recompute: bool | set[int], inside: Mesh | None, rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = 0
    run = RepeatingStage._run

    def counted(self: RepeatingStage, *arguments: object) -> object:
        nonlocal runs
        runs += 1
        return run(self, *arguments)    # type: ignore[arg-type]

    monkeypatch.setattr(RepeatingStage, "_run", counted)
    shared, runs_of_shared = found(schedule, chunks, recompute, inside, rows), runs
    monkeypatch.setattr(Form, "__eq__", lambda self, other: self is other)
    runs = 0
    alone = found(schedule, chunks, recompute, inside, rows)
    assert runs_of_shared < runs
    assert shared[:2] == alone[:2]
    for one, other in zip(shared[2], alone[2], strict=True):
        assert one.makespan_seconds == other.makespan_seconds
        assert one.peaks() == other.peaks()
        assert list(one.events) == list(other.events)
