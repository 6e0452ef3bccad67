"""Stages that differ in names alone are derived, laid out and run once: with the same programs and traces as each."""

import numpy as np
import pytest

from parallelism import Mesh, Pipeline, PipelinedProgram, PipelinedStep, Trace, ir, models, simulate
from parallelism.ir.passes import Form
from parallelism.layouts import annotate, partition
from parallelism.layouts.stages import StageFunctions, Stages
from parallelism.simulation.repeated_stages import RepeatingStage
from parallelism.transforms import Adam, Strategy, train_step

Found = tuple[list[str], list[str], list[Trace]]


def texts(stages: Stages) -> list[str]:
    """All functions of all stages, and the names that they exchange."""
    return [
        "".join(map(str, stage.functions)) + repr((
            stage.weights, stage.trained, stage.data, stage.received, stage.sent, stage.returned, stage.answered,
            stage.saved, stage.between))
        for stage in stages.functions]


def found(
    schedule: str, chunks: int | None, recompute: bool | set[int], inside: Mesh | None, rows: int, rate: float
) -> Found:
    """The programs of the stages before and after they are laid out, and traces of a step."""
    pipeline = Pipeline(4, 4 if chunks else 2, schedule, chunks or 1)
    layers = pipeline.stages
    batch = ir.symbol("B")
    function = models.TransformerSpec(
        layers=layers, width=8, heads=2, vocabulary=12, sequence=3, dropout=rate, dtype="float32", biases=False,
        norm="rms", activation="relu").function(batch)
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


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "chunks", "recompute", "inside", "rows", "rate"), [
    ("1f1b", None, False, Mesh(tp=2), 4, 0),
    pytest.param("zb_h1", None, False, None, 4, 0, marks=pytest.mark.slow),
    pytest.param("interleaved_1f1b", 2, {1, 2}, None, 9, 0, marks=pytest.mark.slow),
    ("1f1b", None, {1, 2}, None, 9, 0.1),       # each dropout has a seed of its own
    pytest.param(       # shards of different extents, so places differ
        "1f1b", None, True, Mesh(tp=3), 4, 0, marks=pytest.mark.slow),
])
def test_equal_to_each_stage_by_itself(
    schedule: str, chunks: int | None, recompute: bool | set[int], inside: Mesh | None, rows: int, rate: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = 0
    run = RepeatingStage._run

    def counted(self: RepeatingStage, *arguments: object) -> object:
        nonlocal runs
        runs += 1
        return run(self, *arguments)    # type: ignore[arg-type]

    monkeypatch.setattr(RepeatingStage, "_run", counted)
    shared, runs_of_shared = found(schedule, chunks, recompute, inside, rows, rate), runs
    monkeypatch.setattr(Form, "__eq__", lambda self, other: self is other)
    runs = 0
    alone = found(schedule, chunks, recompute, inside, rows, rate)
    assert runs_of_shared < runs
    assert shared[:2] == alone[:2]
    for one, other in zip(shared[2], alone[2], strict=True):
        assert one.makespan_seconds == other.makespan_seconds
        assert one.peaks() == other.peaks()
        assert list(one.events) == list(other.events)


@pytest.mark.slow
def test_the_masks_of_a_dropout_differ_between_microbatches_but_not_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = models.TransformerSpec(layers=2, width=8, heads=2, vocabulary=12, sequence=3, dropout=0.1)

    def step() -> PipelinedStep:
        program = PipelinedProgram(partition(spec.function(ir.symbol("B")), 2), Pipeline(2, 3, "1f1b"))
        return PipelinedStep(program, Mesh(pp=2, dp=2), 6)

    runs: list[str] = []
    run = RepeatingStage._run

    def counted(self: RepeatingStage, kind: str, *arguments: object) -> object:
        runs.append(kind)
        return run(self, kind, *arguments)      # type: ignore[arg-type]

    monkeypatch.setattr(RepeatingStage, "_run", counted)
    once = simulate(step(), "dgx-h100")
    assert len(runs) == 4 and len(step().classes[0]) == 2       # a forward and a backward of each stage
    runs.clear()
    monkeypatch.setattr(StageFunctions, "symbols_of_work", property(lambda self: self.symbols))
    each = simulate(step(), "dgx-h100")
    assert len(runs) == 2 * 2 * 2 * 3 and len(step().classes[0]) == 4
    assert once.peaks() == each.peaks()
    assert list(once.events) == list(each.events)


@pytest.mark.slow
def test_devices_differ_on_the_stages_only_whose_shards_differ() -> None:
    """An embedding of 13 rows cannot be cut in equal halves.  The blocks between embedding and head can be."""
    function = annotate(models.gpt(13, 8, 2, 4, 3, ir.symbol("B"), dtype=np.float32), {
        "p.tokens": "[tp, None]", **{f"p.{layer}.{name}": layout for layer in range(4) for name, layout in {
            "qkv": "[None, tp]", "up": "[None, tp]", "out": "[tp, None]", "down": "[tp, None]"}.items()}})
    stages = partition(function, [f"block.{layer}" for layer in range(1, 4)])
    step = PipelinedStep(PipelinedProgram(stages, Pipeline(4, 4, "1f1b"), Mesh(tp=2)), Mesh(pp=4, tp=2), 8)
    first, class_of = step.classes
    assert first == (0, 1, 2, 4, 6, 7) and class_of.tolist() == [0, 1, 2, 2, 3, 3, 4, 5]
    folded, whole = simulate(step, "dgx-h100", fold=True), simulate(step, "dgx-h100")
    assert folded.makespan_seconds == pytest.approx(whole.makespan_seconds, rel=1e-12)
    assert folded.peaks() == {rank: whole.peaks()[rank] for rank in folded.ranks}


@pytest.mark.takes_seconds
def test_replicas_whose_sums_differ_by_an_element_are_one_class() -> None:
    """The gradients of a stage cannot be cut in 3 equal pieces, so the first replica receives more in their all_reduce.
    It does not take longer for that."""
    strategy, mesh = Strategy.parse_on_mesh("pp=2 1f1b:2 dp=3")
    step = strategy(train_step(models.gpt(14, 8, 2, 2, 3, ir.symbol("B"), dtype=np.float32), Adam(0.1)))
    folded, whole = (simulate(step, "dgx-h100", mesh=mesh, batch=6, fold=fold) for fold in (True, False))
    sums = [event for event in whole if event.kind == "collective" and event.axes == ("dp",)]
    received = [[event.bytes_received for event in sums if event.rank == rank] for rank in (0, 1)]
    assert received[0] != received[1]
    assert folded.ranks == (0, 3)
    assert folded.makespan_seconds == pytest.approx(whole.makespan_seconds, rel=1e-12)
    assert {rank: folded.peaks()[rank // 3 * 3] for rank in range(6)} == whole.peaks()


@pytest.mark.slow
@pytest.mark.parametrize(("text", "classes"), [
    ("pp=2 1f1b:2 dp=3 zero=3", 4), ("pp=2 1f1b:2 dp=5 tp=2 sp zero=3", 4), ("pp=2 1f1b:2 tp=3", 4),
    ("pp=1 1f1b:2 dp=2 tp=3 zero=3 recompute=block.*", 4)])
def test_devices_whose_shards_are_uneven_are_as_many_classes_as_they_have_shapes(text: str, classes: int) -> None:
    """A vocabulary of 23 words over 3 devices: those that have 8 words are one class, though each has other words."""
    strategy, mesh = Strategy.parse_on_mesh(text)
    spec = models.TransformerSpec(layers=2, width=20, heads=4, vocabulary=23, sequence=6, dtype="float64")
    step = strategy(train_step(spec.function(ir.symbol("B")), Adam(0.1)))
    folded, whole = (simulate(step, "dgx-h100", mesh=mesh, batch=30, fold=fold) for fold in (True, False))
    assert len(folded.ranks) == classes <= mesh.size
    assert folded.makespan_seconds == pytest.approx(whole.makespan_seconds, rel=1e-12)
    assert set(folded.peaks().values()) == set(whole.peaks().values())
    assert {rank: folded.peaks()[rank] for rank in folded.ranks} == {rank: whole.peaks()[rank] for rank in folded.ranks}


@pytest.mark.slow
def test_a_vocabulary_that_512_devices_share_unevenly_is_folded_into_a_few() -> None:
    spec = models.TransformerSpec(layers=1, width=1024, heads=8, vocabulary=50432, sequence=8, dtype="float32")
    strategy, mesh = Strategy.parse_on_mesh("pp=1 1f1b:1 dp=512 zero=3 overlap precision=bf16")
    step = strategy(train_step(spec.function(ir.symbol("B")), Adam(0.1)))
    assert len(simulate(step, "dgx-h100:64", mesh=mesh, batch=512, fold=True).ranks) == 2
