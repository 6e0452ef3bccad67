"""Recomputation: regions run again in the backward, in place of keeping what they computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from parallelism.ir.core import Function, Op, Value
from parallelism.ir.core.regions import each, inside
from parallelism.ir.passes.gradients import MARK
from parallelism.transforms.parts import AGAIN, Parts, needed
from parallelism.transforms.scope import matching, patterns
from parallelism.transforms.words import word


@dataclass(frozen=True)
class Recompute:
    """The ops of ``regions`` run again right before their gradient, which reads the new values instead of the old ones.

    Of a region only its inputs are kept then, and what other parts of the backward read anyway.  Regions are patterns;
    of nested regions that match, the outermost one runs again as a whole.  ``keep`` are patterns of regions inside,
    whose values are kept after all.  Dropout has the same masks again.  What runs again is in the region of the
    gradient, in values named ``again.x``, and sums over devices inside of it run again, too.

    ``Recompute("block.*")`` is full and ``Recompute("block.*.attention.core")`` selective recomputation (Korthikanti et
    al., *Reducing Activation Recomputation in Large Transformer Models*, 2022, arXiv:2205.05198, section 5).

    ``ValueError`` for a program without a backward, for a pattern that no region matches, for regions that run again
    already, and for regions that keep nothing for the backward.
    """

    regions: str | Sequence[str]
    keep: str | Sequence[str] = ()
    phase: ClassVar[int] = 60

    def __post_init__(self) -> None:
        for name in ("regions", "keep"):
            object.__setattr__(self, name, patterns(getattr(self, name), type(self).__name__))
        if not self.regions:
            raise ValueError("Recompute needs the patterns of regions, such as block.*")

    def __call__(self, function: Function) -> Function:
        parts = Parts.of(function)
        if parts.update is None:
            raise ValueError(f"{self}: @{function.name} has no backward; train_step(loss, optimizer) makes a training "
                             "step of it")
        forward = {op.outputs: op for op in function.ops if op in {*parts.forward.ops}}
        paths: dict[str, list[Op]] = {}
        for op, path in matching(parts.forward, self.regions, f"{self}").items():
            paths.setdefault(path, []).append(op)
        kept = {value for op in matching(parts.forward, self.keep, f"{self}") for value in op.outputs} \
            if self.keep else set()
        backward = [op for op in function.ops if op.outputs not in forward]
        if twice := [path for path in paths for op in backward
                     if inside(op, f"{MARK}.{path}") and any(v.name.startswith(AGAIN) for v in op.outputs)]:
            raise ValueError(f"{self}: region {twice[0]!r} of @{function.name} runs again already")
        before: dict[Op, list[Op]] = {}
        """The ops that run again, by the first op of the backward that needs them."""
        new: dict[tuple[str, Value], Value] = {}
        for path, ops in paths.items():
            first, again, values = self._again(path, ops, backward, kept)
            if first is not None:
                before.setdefault(first, []).extend(again)
                new.update(((path, old), value) for old, value in values.items())
        if not before:
            raise ValueError(f"{self}: the regions of @{function.name} that match keep nothing for the backward")
        changed = []
        for op in function.ops:
            changed += before.get(op, [])
            own = next((path for path in paths if inside(op, f"{MARK}.{path}")), "")
            mine = {value: new.get((own, value), value) for value in op.inputs}
            changed.append(replace(op, inputs=each(op.inputs, mine)))
        return replace(function, ops=tuple(changed))

    def _again(
        self, path: str, ops: Sequence[Op], backward: Sequence[Op], kept: set[Value]
    ) -> tuple[Op | None, list[Op], dict[Value, Value]]:
        """Of a region: the first op of the backward that reads its values, the ops that run again, and their values."""
        made = {value for op in ops for value in op.outputs}
        own = [op for op in backward if inside(op, f"{MARK}.{path}")]
        others = {value for op in backward if not inside(op, f"{MARK}.{path}") for value in op.inputs}
        wanted = {value for op in own for value in op.inputs if value in made} - kept - others
        first = next((op for op in own if not wanted.isdisjoint(op.inputs)), None)
        again = needed(ops, wanted, kept | others)
        values = {value: replace(value, name=f"{AGAIN}{value.name}") for op in again for value in op.outputs}
        return first, [
            replace(op, inputs=each(op.inputs, values), outputs=each(op.outputs, values),
                    region=f"{MARK}.{op.region}") for op in again
        ], values

    def __str__(self) -> str:
        return word("recompute", value=",".join([*self.regions, *(f"-{pattern}" for pattern in self.keep)]))
