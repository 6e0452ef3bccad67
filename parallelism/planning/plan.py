"""A `Plan`: one way to split a training step over the devices, with its time and memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from parallelism.display.markup import facts, figure, inside
from parallelism.display.quantities import decimal_bytes, plural, seconds
from parallelism.hardware import Hardware, Software
from parallelism.ir import Function
from parallelism.mesh import Mesh
from parallelism.models import TransformerSpec
from parallelism.planning.dealing import axes_beside_experts, split_of_sequences
from parallelism.planning.explanation import Account, Need
from parallelism.planning.settings import AXES, MOST, SETTINGS, split_text, transforms_of
from parallelism.planning.trained import BATCH, TrainedModel
from parallelism.shared_results import shared_results
from parallelism.side_by_side import side_by_side
from parallelism.simulation import simulate
from parallelism.trace import Trace
from parallelism.training import Figures, TrainingRun, scaled_down
from parallelism.training.few_layers import layered_step
from parallelism.training.sequence_split import HEADS_AXIS
from parallelism.transforms import (
    ContextParallel,
    ExpertParallel,
    MixedPrecision,
    Overlap,
    Pipeline,
    Recompute,
    SequenceParallel,
    Step,
    Strategy,
    TensorOverlap,
    Zero,
)
from parallelism.transforms.words import REPLICA

if TYPE_CHECKING:
    from parallelism.planning.plans import Plans


@dataclass(frozen=True)
class Task:
    """What is planned: a model, trained on batches of so many rows, on a hardware."""

    model: TrainedModel
    batch: int
    hardware: Hardware
    devices: int

    def at(self, settings: Mapping[str, Any]) -> Task:
        """The task with the model as a plan computes it: see `TrainedModel.at`."""
        model = self.model.at(settings["tp"])
        return self if model is self.model else replace(self, model=model)

    def mesh(self, settings: Mapping[str, Any]) -> Mesh:
        """The mesh of a plan, in its order.  Axes of one device are left out, except that of the pipeline, and that
        of experts which are split over others alone."""
        sizes: dict[str, int] = {}
        for axis in settings["order"].split():
            size = settings[axis]
            if axis == "dp" and settings["instances"] > 1:
                sizes[REPLICA] = settings["instances"]
                size //= settings["instances"]
            split = split_of_sequences(self.model, settings) if axis == "cp" and size > 1 else None
            if split is not None:
                sizes |= {name: number for name, number in split.axes(size).items() if number > 1}
            elif size > 1 or axis == "pp" or (axis == "ep" and axes_beside_experts(self.model, settings)):
                sizes[axis] = size
        return Mesh(**sizes)

    def microbatches(self, settings: Mapping[str, Any]) -> int:
        """The number of microbatches of each replica."""
        return int(self.batch // (settings["dp"] * settings["ep"] * settings["microbatch"]))

    def strategy(self, settings: Mapping[str, Any]) -> Strategy:
        """The strategy of a plan."""
        begin = self.model.begin(settings["pp"] * settings["chunks"], balanced=settings["balanced"])
        pipeline = Pipeline(
            "pp", self.microbatches(settings), settings["schedule"], settings["chunks"], begin, BATCH
        )
        return Strategy(*transforms_of(self.model, settings), pipeline)

    def run(self, settings: Mapping[str, Any]) -> TrainingRun:
        """The training run of a plan."""
        model = self.model.at(settings["tp"]).model
        return TrainingRun(
            model, self.batch, self.strategy(settings), self.mesh(settings), self.model.optimizer
        )

    def simulate(
        self, settings: Mapping[str, Any], *, fold: bool | None = None, link_sharing: bool = True
    ) -> Trace:
        """The trace of a step of a plan.  If ``fold`` is None, it is folded unless equal devices share links."""
        run = self.run(settings)
        return simulate(run.step, self.hardware, link_sharing=link_sharing, fold=fold, **run.placed)

    def seconds_and_peak(self, settings: Mapping[str, Any]) -> tuple[float, int] | str:
        """The seconds and the peak of a plan, by simulation; or why its program does not allow it."""
        try:
            operation: Any = layered_step(self.run(settings), Software.of(self.hardware))
            if operation is None:
                trace = self.simulate(settings, link_sharing=False)
            else:
                trace = simulate(operation, self.hardware, link_sharing=False, fold=None)
        except ValueError as error:
            if isinstance(self.model.model, TransformerSpec):  # its spec says what it allows
                raise
            return str(error)
        return trace.makespan_seconds, max(trace.peaks().values())

    def all_seconds_and_peaks(
        self, plans: Sequence[Mapping[str, Any]], told: Callable[[int, int], None]
    ) -> Sequence[tuple[float, int] | str]:
        """`seconds_and_peak` of all plans, on all cores; ``told`` hears how many are done, and of how many."""
        with shared_results():
            return side_by_side(
                [partial(self.seconds_and_peak, settings) for settings in plans],
                told=told,
                took=lambda place, found: None,  # so that a process simulates plans that have most in common
            )


def plan_of(run: TrainingRun, hardware: Hardware) -> tuple[Task, dict[str, Any]] | None:
    """The task and the settings of a plan that is this run; None where there is no such plan, or no search has it."""
    model = None if run.clip or run.loss_scale or SETTINGS.registered else _trained_by(run)
    if model is None or run.batch > MOST["batch"] or not _has_axes_of_plans(run.mesh):
        return None
    task = Task(model, run.batch, hardware, run.mesh.size)
    for balanced in (0, 1):
        settings = _settings_of(run, model) | {"balanced": balanced}
        if task.run(settings) == run:
            return task, settings
    return None


def _trained_by(run: TrainingRun) -> TrainedModel | None:
    """The model of a run with its optimizer; None where it is no Transformer that is cut into stages."""
    spec, precision = run.model, _given(run, MixedPrecision)
    if not isinstance(spec, TransformerSpec) or run.pipeline is None:
        return None
    wanted = spec if precision is None else replace(spec, dtype=precision.dtype)
    return TrainedModel.of(wanted, run.optimizer, precision=precision)


def _has_axes_of_plans(mesh: Mesh) -> bool:
    """Whether plans have all axes of this mesh; stages with meshes of their own lie on a line of devices, say."""
    return set(mesh.shape) <= {REPLICA, HEADS_AXIS, *AXES}


def _given(run: TrainingRun, kind: type[Any]) -> Any:
    """The first transform of this kind in the strategy of a run; None if there is none."""
    return next((each for each in run.strategy.transforms if isinstance(each, kind)), None)


def _exchange_of(sequences: ContextParallel | None, heads: int) -> str:
    """How devices that split sequences exchange keys and values, of which ``heads`` devices split the heads."""
    if heads > 1:
        return "a2a+p2p"
    return "all_gather" if sequences is None else sequences.exchange


def _settings_of(run: TrainingRun, model: TrainedModel) -> dict[str, Any]:
    """The settings that come nearest to a run, whose stages have equally many blocks."""
    sizes = dict.fromkeys((REPLICA, HEADS_AXIS, *AXES), 1) | dict(run.mesh.shape)
    instances, heads = sizes.pop(REPLICA), sizes.pop(HEADS_AXIS)
    sizes["dp"], sizes["cp"] = instances * sizes["dp"], heads * sizes["cp"]
    pipeline, experts, sequences = run.pipeline, _given(run, ExpertParallel), _given(run, ContextParallel)
    assert pipeline is not None
    beside = () if experts is None else experts.beside
    again, zero = _given(run, Recompute), _given(run, Zero)
    return {
        **sizes,
        "schedule": pipeline.schedule,
        "chunks": pipeline.chunks,
        "microbatch": run.microbatch // sizes["ep"] or 1,
        "recompute": next(
            (name for name, path in model.recomputed.items() if again and Recompute(path or "none") == again),
            "none",
        ),
        "zero": 0 if zero is None else zero.stage,
        "exchange": _exchange_of(sequences, heads),
        "instances": instances,
        "overlap": int(_given(run, Overlap) is not None),
        "sp": int(_given(run, SequenceParallel) is not None),
        "tp_overlap": int(_given(run, TensorOverlap) is not None),
        "experts_over": "+".join(["ep", *(axis for axis in ("cp", "tp") if axis in beside)]),
        "order": " ".join(AXES),
    }


def step_key(settings: Mapping[str, Any], bound_seconds: float, peak_bytes: int) -> Hashable:
    """Plans of a task with equal keys run the same program: in a `Pipeline` Zero(2) does what Zero(1) does."""
    values = [SETTINGS[name].program_of(value) for name, value in settings.items()]
    return *values, float(bound_seconds), int(peak_bytes)


@dataclass(frozen=True)
class Plan:
    """One way to split a training step over the devices."""

    settings: Mapping[str, Any]
    """By the names of `parallelism.planning.SETTINGS`."""
    seconds: float
    """Of a step: those of the full simulation if ``is_simulated``, else ``bound_seconds``."""
    bound_seconds: float
    """Of a step in which nothing shares links, as in `Plans.bounds`: the step takes as long or longer."""
    peak_bytes: int
    """The memory of the fullest device."""
    is_simulated: bool
    plans: Plans = field(repr=False, compare=False)
    """The plans that this is one of."""

    @property
    def task(self) -> Task:
        """What is planned."""
        return self.plans.task

    @cached_property
    def strategy(self) -> Strategy:
        """The transforms that make the distributed step of the step on one device."""
        return self.task.strategy(self.settings)

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh, in the order in which its axes lie on the hardware."""
        return self.task.mesh(self.settings)

    @property
    def split(self) -> str:
        """The settings in a few words: those that are not usual, and the microbatch."""
        return split_text(self.settings)

    @property
    def program(self) -> Hashable:
        """Equal for the plans of a task that run the same program: `step_key`."""
        return step_key(self.settings, self.bound_seconds, self.peak_bytes)

    @property
    def microbatch(self) -> int:
        """The rows of a microbatch."""
        return int(self.settings["microbatch"])

    @property
    def microbatches(self) -> int:
        """The number of microbatches of each replica."""
        return self.task.microbatches(self.settings)

    @cached_property
    def run(self) -> TrainingRun:
        """The training run, before it is placed on the hardware."""
        return self.task.run(self.settings)

    @property
    def step(self) -> Step | Function:
        """The distributed step: ``simulate(plan.step, hardware, mesh=plan.mesh, batch=batch)`` is `simulate`."""
        return self.run.step

    def simulate(self, *, fold: bool | None = None, link_sharing: bool = True) -> Trace:
        """The trace of a step; the arguments are those of `parallelism.simulation.simulate`.

        If ``fold`` is None, one device stands for all equal ones, unless equal devices share links.
        """
        return self.task.simulate(self.settings, fold=fold, link_sharing=link_sharing)

    @cached_property
    def figures(self) -> Figures:
        """The time and the memory of a step by the full simulation: parts, use of the devices, links, categories."""
        return self.plans.figures_of(self)

    @property
    def memory(self) -> list[dict[str, int]]:
        """By position in the pipeline: what the fullest device holds when it holds most, by category."""
        return self.figures.memory

    @property
    def need(self) -> Need:
        """The memory of the fullest device."""
        stage = max(range(len(self.memory)), key=lambda i: sum(self.memory[i].values()))
        return Need(self.split, stage, self.memory[stage])

    @property
    def account(self) -> Account:
        """What is told of the plan where it is compared with another."""
        return Account(self.split, self.figures.seconds, self.figures.parts, self.figures.links)

    def scaled_down(self) -> TrainingRun:
        """The same strategy of a small model on at most 16 devices, to be run: `parallelism.training.scaled_down`.

        ``ValueError`` for a model that is no `TransformerSpec`.
        """
        if not isinstance(self.task.model.model, TransformerSpec):
            raise ValueError("only a TransformerSpec can be scaled down; the sizes of a program are its own")
        return scaled_down(self.run)

    def why(self) -> str:
        """Why the first plan beats the second, or why any other is beaten by the first, in a sentence.

        It says by how much, and in which parts of the step.
        """
        return self.plans.why(self)

    def why_not(self, **fixed: Any) -> str:
        """Why the best plan with these settings was not chosen before this one, in a sentence.

        It says what that plan costs more, part by part, and which links its collectives cross; of plans that do not fit
        what memory the smallest needs; or why there can be none.  Settings that were not searched are searched now.
        """
        return self.plans.why_not(self, **fixed)

    if not TYPE_CHECKING:  # a type checker reports the call itself

        def __call__(self, *args, **kwargs):
            """Raise ``TypeError`` for ``plans.best()``, with what to write."""
            raise TypeError("plans.best is no method: write plans.best, without (); a plan cannot be called")

    def __str__(self) -> str:
        return f"{self.strategy.text_on(self.mesh)}"

    def _repr_html_(self) -> str:
        task = self.task
        simulated = "simulated" if self.is_simulated else "where nothing shares links"
        return figure(
            facts(
                [
                    ("step", f"{seconds(self.seconds)} ({simulated})"),
                    ("memory of the fullest device", decimal_bytes(self.peak_bytes)),
                    ("mesh", repr(self.mesh)),
                    ("batch", f"{plural(task.batch, 'row')}, microbatches of {self.microbatch}"),
                    ("hardware", f"{plural(task.devices, 'device')} of {task.hardware.name}"),
                ]
            ),
            inside(self.strategy._repr_html_()),
            title=f"Plan: {self}",
        )
