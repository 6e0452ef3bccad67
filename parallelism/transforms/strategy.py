"""Strategies: several transforms as one value, with a text that reads back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from parallelism.display.quantities import short_errors
from parallelism.ir.core import Function
from parallelism.mesh import Mesh
from parallelism.spelling import did_you_mean
from parallelism.transforms.data import ContextParallel, DataParallel
from parallelism.transforms.experts import ExpertParallel
from parallelism.transforms.local_layers import LocalLayers
from parallelism.transforms.overlap import Fused, Overlap, TensorOverlap
from parallelism.transforms.pipelines import Pipeline, Step
from parallelism.transforms.precision import MixedPrecision
from parallelism.transforms.recomputation import Recompute
from parallelism.transforms.sequence import SequenceParallel
from parallelism.transforms.tensor import TensorParallel
from parallelism.transforms.weight_report import WeightReport, report_of
from parallelism.transforms.words import SHORTHANDS, Word, read, read_all
from parallelism.transforms.zero import Zero


class Transform(Protocol):
    """A frozen value that takes a program and returns a program; a pipeline returns a `Step`."""

    phase: ClassVar[int]
    """In a `Strategy` transforms of a lower phase are applied first."""

    def __call__(self, function: Function) -> Function | Step: ...


@dataclass(frozen=True, init=False, repr=False)
class Strategy:
    """Several transforms, applied to a program one after the other.

    They are applied in the order that they need, whatever the order in which they are given; equal strategies are
    equal values.  Only of data parallelism over several axes the first one given is the outermost.  Of tensor
    parallelism in several regions, that whose regions have the fewest ops is applied first: an inner region's own
    strategy counts before that of the region around it.

    >>> strategy = Strategy(DataParallel("dp"), TensorParallel("tp"))
    >>> print(strategy)
    dp tp
    >>> Strategy.parse("tp dp") == strategy
    True

    ``ValueError`` if a transform is given twice.
    """

    transforms: tuple[Transform, ...]

    def __init__(self, *transforms: Transform) -> None:
        flat: list[Transform] = []
        for transform in transforms:
            if not callable(transform) or not hasattr(transform, "phase"):
                raise TypeError(f"a Strategy consists of transforms, got {transform!r}")
            flat.extend(transform.transforms if isinstance(transform, Strategy) else [transform])
        for place, transform in enumerate(flat):
            if transform in flat[:place]:
                raise ValueError(f"{transform!r} is given twice; a transform is applied once")
        object.__setattr__(self, "transforms", tuple(sorted(flat, key=_order)))

    phase: ClassVar[int] = 0

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline among the transforms; None if there is none."""
        return next((each for each in self.transforms if isinstance(each, Pipeline)), None)

    def with_pipeline(self, **changes: Any) -> Strategy:
        """The strategy with these fields of its pipelines changed; it is the same without a pipeline."""
        transforms = list(self.transforms)
        for place, each in enumerate(transforms):
            if isinstance(each, Pipeline):
                transforms[place] = replace(each, **changes)
        return Strategy(*transforms)

    def __call__(self, function: Function) -> Any:
        """The transformed program; with a pipeline, a `Step`.  ``ValueError`` of the transform that refuses it."""
        pipelines = [each for each in self._steps if isinstance(each, Pipeline)]
        again = [each for each in self._steps if pipelines and isinstance(each, Recompute)]
        for transform in self.in_order(function):
            function = transform(function)  # only a pipeline makes a Step
        if len(pipelines) > 1:
            raise ValueError(f"a step is cut into one pipeline, got {' and '.join(map(str, pipelines))}")
        return Step(function, pipelines[0], tuple(again)).warned() if pipelines else function

    @property
    def _steps(self) -> list[Any]:
        """The transforms, and the steps of those that have several, the last one first."""
        # Of one phase the last one is applied first: what is split over an axis later is split around it.
        steps = [step for each in self.transforms for step in getattr(each, "steps", (each,))]
        return sorted(steps, key=lambda each: -each.phase)

    def in_order(self, function: Function) -> list[Any]:
        """The transforms of a program, in the order in which they are applied to it: all but a pipeline, and but what runs
        again in one."""
        steps = self._steps
        apart = (Pipeline, Recompute) if any(isinstance(each, Pipeline) for each in steps) else ()
        order = [each for each in reversed(steps) if not isinstance(each, apart)]
        if len(tensors := [each for each in order if isinstance(each, TensorParallel)]) > 1:
            # A weight keeps its first layout, so that of the smallest region around it counts.
            sizes = {id(each): each.size(function) for each in tensors}
            order.sort(key=lambda each: (each.phase, sizes.get(id(each), 0)))
        return order

    def report(self, program: Function | Step) -> WeightReport:
        """How the weight of each product is split, or why it stays whole.

        ``program`` is the result of this strategy, or a function to which it is not applied yet.  Such a function has
        no layouts over the axes of the strategy.  ``ValueError`` if a transform refuses it.
        """
        if isinstance(program, Step):
            return report_of(self.transforms, program)
        axes = {_axis_of(each) for each in self.transforms}
        laid = {axis for value in program.values if value.layout for axis in value.layout.axes}
        return report_of(self.transforms, self(program) if laid.isdisjoint(axes) else program)

    def __str__(self) -> str:
        return " ".join(map(str, self.transforms))

    def __repr__(self) -> str:
        return f"Strategy({', '.join(map(repr, self.transforms))})"

    def _repr_html_(self) -> str:
        from parallelism.display.markup import figure, note, table

        rows = [
            (str(each), type(each).__name__, (type(each).__doc__ or "").split("\n")[0].replace("`", ""))
            for each in self.transforms
        ]
        return figure(
            table(rows, ("word", "transform", "what it does"), left=3) if rows else note("one device"),
            title=f"Strategy: {self}" if rows else "Strategy()",
        )

    @classmethod
    @short_errors
    def parse(cls, text: str) -> Strategy:
        """The strategy that ``text`` says: the words of its transforms, in any order, without sizes of axes.

        ``ValueError`` names the word that cannot be read.
        """
        return cls(*(_transform(word, sized=False)[0] for word in read_all(text)))

    @classmethod
    @short_errors
    def parse_on_mesh(cls, text: str) -> tuple[Strategy, Mesh]:
        """The strategy and the mesh of a text with the sizes of axes, as commands take it: ``tp=8 sp dp=4 zero=1``.

        The axes of the mesh lie in Megatron's order, whatever the order of the words: pipelines outermost, then data,
        experts, context and tensors.  Several of one kind lie in the order of the strategy.  If the stages of a
        pipeline have meshes of their own, these have the sizes: ``dp tp pp 1f1b:8,meshes=dp=2|dp=2.tp=4``.  Then the
        mesh is ``Mesh(devices=10)``, that of the devices of all stages.
        """
        found: list[Transform] = []
        sizes: dict[str, tuple[int, int]] = {}
        words = read_all(text)
        if any(word.schedule and word.schedule.meshes for word in words):
            return cls._on_own_meshes(words)
        for word in words:
            transform, size = _transform(word, sized=True)
            found.append(transform)
            if size is None:
                continue
            axis, order = _axis_of(transform), [*_SIZED].index(word.name)
            assert axis is not None, transform  # what has a size has an axis
            first, known = sizes.get(axis, (order, size))
            if known != size:
                raise ValueError(f"the axis {axis!r} is given twice, with {known} and with {size} devices")
            sizes[axis] = min(first, order), size
        if not sizes:
            raise ValueError(f"the strategy {text!r} names no axis with its size, such as dp=2")
        strategy = cls(*found)
        for transform in strategy.transforms:
            if (axis := _axis_of(transform)) not in (None, *sizes):
                raise ValueError(
                    f"{transform} needs an axis {axis!r}, which has no size; the axes with a size are "
                    f"{', '.join(f'{name}={size}' for name, (_, size) in sizes.items())}"
                )
        places = {
            _axis_of(transform): place for place, transform in reversed([*enumerate(strategy.transforms)])
        }
        ordered = sorted(sizes, key=lambda axis: (sizes[axis][0], places[axis]))
        return strategy, Mesh(**{axis: sizes[axis][1] for axis in ordered})

    @classmethod
    def _on_own_meshes(cls, words: Sequence[Word]) -> tuple[Strategy, Mesh]:
        """`parse_on_mesh` for stages that have meshes of their own."""
        for word in words:
            if word.name in _SIZED and word.value is not None:
                raise ValueError(
                    f"the meshes of the stages give the sizes of the axes; leave out ={word.value} behind "
                    f"{word.name!r}"
                )
        strategy = cls(*(_transform(word, sized=False)[0] for word in words))
        pipeline = strategy.pipeline
        assert pipeline is not None and pipeline.of_all is not None, words
        axes = dict.fromkeys(axis for mesh in pipeline.meshes for axis in mesh.axes)
        for transform in strategy.transforms:
            if transform != pipeline and _axis_of(transform) not in (None, *axes):
                raise ValueError(
                    f"{transform} needs an axis {_axis_of(transform)!r}, which no mesh of the stages has; "
                    f"their axes are {', '.join(axes)}"
                )
        return strategy, pipeline.of_all

    def text_on(self, mesh: Mesh) -> str:
        """The text with the sizes of the axes of ``mesh``, which `parse_on_mesh` reads back.

        ``ValueError`` for an axis that the mesh does not have, and if stages with meshes of their own have more or
        fewer devices than it.
        """
        if self.pipeline is not None and self.pipeline.meshes:
            self.pipeline.on(mesh)
            return str(self)
        return " ".join(self._sized(transform, mesh) for transform in self.transforms)

    def _sized(self, transform: Transform, mesh: Mesh) -> str:
        axis = _axis_of(transform)
        if axis is None:
            return str(transform)
        if axis not in mesh.shape:
            raise ValueError(
                f"{transform} needs an axis {axis!r}; the axes of {mesh!r} are "
                f"{', '.join(map(repr, mesh.axes))}"
            )
        first, *rest = str(transform).split()
        size = f"={mesh.shape[axis]}" if read(first).name in _SIZED else ""
        return " ".join([f"{first}{size}", *rest])


def _axis_of(transform: Transform) -> str | None:
    """The axis of a transform; None if it has none."""
    axis: str | None = getattr(transform, "axis", None)
    return axis


def _pipeline(word: Word) -> Pipeline:
    assert word.schedule is not None, word
    name, microbatches, chunks, recompute, batch, meshes, shares = word.schedule
    return Pipeline(
        word.axis or "",
        microbatches,
        name,
        chunks,
        word.regions,
        batch,
        recompute,
        tuple(map(_mesh, meshes.split("|"))) if meshes else (),
        tuple(map(int, shares.split("|"))) if shares else (),
    )


def _mesh(text: str) -> Mesh:
    """The mesh of a text such as ``dp=2.tp=3``."""
    pairs = [each.split("=") for each in text.split(".")]
    if not all(len(pair) == 2 and pair[1].isdecimal() for pair in pairs):
        raise ValueError(
            f"the mesh of a stage is written as its axes and their sizes, such as dp=2.tp=3; got {text!r}"
        )
    return Mesh(**{axis: int(size) for axis, size in pairs})


def _recompute(patterns: Iterable[str]) -> Recompute:
    """Patterns; those of regions to keep have a - in front."""
    given = [*patterns]
    return Recompute(
        [each for each in given if not each.startswith("-")],
        [each[1:] for each in given if each.startswith("-")],
    )


def _number(text: str | None) -> Any:
    """The number that a text is; the text if it is none, for the transform to refuse."""
    return int(text) if text and text.isdecimal() else text


def _order(transform: Transform) -> tuple[int, str]:
    """The order in which transforms are held: by phase, then by text, so that equal strategies are equal.

    Of data parallelism over several axes the first one given is the outermost.
    """
    return transform.phase, "" if isinstance(transform, DataParallel) else str(transform)


def _axes(word: Word) -> tuple[str, tuple[str, ...]]:
    """The axis of a word, and those beside it: ``ep+tp``."""
    first, *rest = (word.axis or "").split("+")
    return first, tuple(rest)


_SIZED: dict[str, Callable[[Word], Any]] = {
    "pp": _pipeline,
    "dp": lambda word: DataParallel(word.axis or ""),
    "ep": lambda word: ExpertParallel(*_axes(word)),
    "cp": lambda word: ContextParallel(word.axis or ""),
    "ring": lambda word: ContextParallel(word.axis or "", "p2p"),
    "ulysses": lambda word: ContextParallel(word.axis or "", "a2a"),
    "tp": lambda word: TensorParallel(word.axis or "", word.regions),
}
"""The words that may have the size of their axis, in the order of the axes of a mesh, outermost first."""
_OTHER: dict[str, Callable[[Word], Any]] = {
    "fused": lambda word: Fused(),
    "local": lambda word: LocalLayers((word.value or "").split(",")),
    "sp": lambda word: SequenceParallel(word.axis or ""),
    "precision": lambda word: MixedPrecision.parse(word.value or ""),
    "recompute": lambda word: _recompute((word.value or "").split(",")),
    "zero": lambda word: Zero(_number(word.value), word.axis or ""),
    "overlap": lambda word: Overlap.parse(word.value),
    "tp_overlap": lambda word: TensorOverlap(word.axis or ""),
}
_WITH_REGIONS = ("tp", "pp")
_WITH_VALUE = ("zero", "precision", "recompute", "local")
_WITH_ANY = ("overlap",)
"""The words that may name regions, those that have a value in any text, and those that may have one."""


def _transform(word: Word, *, sized: bool) -> tuple[Any, int | None]:
    """The transform of a word, and the size of its axis, which a word has if and only if the text is ``sized``."""
    make = _SIZED.get(word.name) or _OTHER.get(word.name)
    if make is None:
        known = (*_SIZED, *_OTHER, *SHORTHANDS)
        hint = did_you_mean(word.name, known, cutoff=0.5) or f"; they are {', '.join(known)}"
        raise ValueError(f"no transform is written {word.name!r}{hint}")
    if word.regions and word.name not in _WITH_REGIONS:
        raise ValueError(f"{word.name!r} has no regions, got @{','.join(word.regions)}")
    wants = word.name in _WITH_VALUE or (sized and word.name in _SIZED)
    if (word.value is not None) != wants and word.name not in _WITH_ANY:
        what = "the size of its axis" if word.name in _SIZED else "a value"
        raise ValueError(
            f"{word.name!r} must be followed by = and {what}"
            if wants
            else f"{word.name!r} has no value here, got {word.value!r}"
        )
    if word.name not in _SIZED or not sized:
        return make(word), None
    if not (word.value or "").isdecimal() or int(word.value or 0) < 1:
        raise ValueError(
            f"the size of the axis of {word.name!r} must be a number of at least 1, got {word.value!r}"
        )
    return make(word), int(word.value or 0)
