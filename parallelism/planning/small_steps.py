"""`SmallSteps`: sheets of a model's pieces, measured on the same model with one block and with two in a stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from parallelism.ir import Function
from parallelism.memoized import memoized
from parallelism.mesh import Mesh
from parallelism.models import TransformerSpec
from parallelism.planning.orders import FIRST, LAST, MIDDLE, ONLY
from parallelism.planning.sheets import Interpolated, Sheet, Unpriceable, divided, sections_of, whole
from parallelism.planning.trained import BATCH, TrainedModel
from parallelism.simulation.step_pieces import EndPieces, StagePieces, action_pieces, end_pieces
from parallelism.transforms import (
    ContextParallel,
    DataParallel,
    Pipeline,
    Recompute,
    SequenceParallel,
    Step,
    Strategy,
    TensorParallel,
    Zero,
)


class Pattern(NamedTuple):
    """A strategy without numbers."""

    in_stages: bool
    """Whether there are several stages."""
    split: bool
    """Whether backwards are split into halves."""
    tp: bool
    sp: bool
    cp: int
    recompute: str
    zero: int
    """For actions 0 or 1, because those of stages 1 and 2 are the same, as are all without sequence parallelism."""


@lru_cache(maxsize=2)
def small_steps(model: TrainedModel, tensor: tuple[int, ...], replicas: tuple[int, ...], *, fused: bool) -> SmallSteps:
    """`SmallSteps` with these arguments; those of another search for the same model are used again."""
    return SmallSteps(model, tensor, replicas, fused=fused)


class SmallSteps:
    """Sheets by pattern, rows of a microbatch, and devices of ``tp`` and ``dp``.  ``Unpriceable`` for uneven shards."""

    def __init__(self, model: TrainedModel, tensor: Sequence[int], replicas: Sequence[int], *, fused: bool) -> None:
        """``tensor`` and ``replicas`` are the extents of ``tp`` and of ``dp`` that sheets are wanted for.
        ``fused`` as for `parallelism.execution.operation_on`."""
        if not isinstance(model.model, TransformerSpec):
            raise Unpriceable("the pieces of a program are not known")
        self.model, self.weights, self.fused = model, model.model.weights, fused
        self.tensor = _ends([n for n in tensor if n > 1])
        most = self.tensor[1] if self.tensor else max(tensor, default=1)
        self.replicas = _ends([n for n in replicas if n > 1 and self._is_even(most * n)])
        self._programs: dict[Any, Function] = {}
        self._sheets: dict[Any, Interpolated] = {}

    def actions(self, pattern: Pattern, rows: int, tp: int) -> Sheet:
        """The actions of stages."""
        if pattern not in self._sheets:
            self._sheets[pattern] = Interpolated(
                partial(self._measure, pattern, action_pieces, 1), [(1, 2, whole), _line(self.tensor)])
        return self._sheets[pattern].at(rows, tp)

    def ends(self, pattern: Pattern, tp: int, dp: int) -> Sheet:
        """What a device holds during the step, and what it does at the end.  ``inputs`` are for one row."""
        lines = self._is_even(tp * dp) and [_line(self.tensor), _line(self.replicas) if dp > 1 else None]
        key: Any = pattern, bool(lines), dp > 1
        if key not in self._sheets:
            self._sheets[key] = Interpolated(partial(self._measured_end, pattern), lines or [None, None])
        return self._sheets[key].at(tp, dp)

    def _is_even(self, devices: int) -> bool:
        """Whether every dim that ZeRO may split is divided evenly."""
        return all(extent % devices == 0 for shape in self.weights.values() for extent in shape)

    def _measured_end(self, pattern: Pattern, tp: int, dp: int) -> Sheet:
        return self._measure(pattern, end_pieces, dp, 1, tp)

    def _measure(
        self, pattern: Pattern, pieces: Callable[..., Sequence[StagePieces | EndPieces]], dp: int, rows: int, tp: int
    ) -> Sheet:
        places = (FIRST, MIDDLE, LAST) if pattern.in_stages else (ONLY,)
        sections: list[Any] = []
        axes: Mapping[str, int] = {"pp": len(places), "dp": dp, "cp": pattern.cp, "tp": tp}
        mesh = Mesh(**{axis: n for axis, n in axes.items() if n > 1 or axis == "pp"})
        for blocks in (1, 2):
            step = self._step(pattern, len(places), blocks, replicated=dp > 1 or pattern.zero > 0)
            try:
                found = pieces(step, mesh, rows * dp, fused=self.fused)
            except ValueError as error:
                raise Unpriceable(str(error)) from error
            for place, each in zip(places, found, strict=True):
                sections += sections_of((place, blocks), each, mesh)
        return Sheet.of(sections)

    def _step(self, pattern: Pattern, stages: int, blocks: int, *, replicated: bool) -> Step:
        model = self.model.of_layers(stages * blocks)
        assert model is not None
        parts: list[Any] = [model.precision] if model.precision else []
        parts += [TensorParallel("tp")] * pattern.tp + [SequenceParallel("tp")] * pattern.sp
        parts += [ContextParallel("cp")] * (pattern.cp > 1) + [DataParallel("dp")] * replicated
        parts += [Zero(pattern.zero, "dp")] if pattern.zero else []
        key = stages * blocks, tuple(parts)
        if key not in self._programs:
            program: Any = Strategy(*parts)(self._step_of(stages * blocks))
            self._programs[key] = program
        schedule = "zero_bubble_h1" if pattern.split else "1f1b"
        pipeline = Pipeline("pp", 1, schedule, 1, model.begin(stages), BATCH)
        again = (Recompute(model.recomputed[pattern.recompute]),) if pattern.recompute != "none" else ()
        return Step(self._programs[key], pipeline, again)

    @memoized
    def _step_of(self, layers: int) -> Function:
        model = self.model.of_layers(layers)
        assert model is not None
        return model.step


def _ends(values: Sequence[int]) -> tuple[int, int] | None:
    """The two least values; None if there are no two."""
    different = sorted(set(values))
    return (different[0], different[1]) if len(different) > 1 else None


def _line(ends: tuple[int, int] | None) -> Any:
    return None if ends is None else (*ends, divided)
