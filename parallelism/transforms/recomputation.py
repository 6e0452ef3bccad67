"""Recomputation: regions run again in the backward, in place of keeping what they computed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from parallelism.ir.core import Function, Op, Value
from parallelism.ir.core.derived import repeated_op
from parallelism.ir.core.region_patterns import matching, paths, patterns
from parallelism.ir.core.regions import each, inside
from parallelism.ir.passes.gradients import MARK
from parallelism.transforms.parts import AGAIN, Parts, needed
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
            raise ValueError(
                f"{self}: @{function.name} has no backward; train_step(loss, optimizer) makes a training "
                "step of it"
            )
        again = self.of(parts.forward)
        backward = [op for op in function.ops if _runs_again(op)]
        if twice := [path for path in again.paths for op in backward if inside(op, f"{MARK}.{path}")]:
            raise ValueError(f"{self}: region {twice[0]!r} of @{function.name} runs again already")
        changed = again(function, parts.forward)
        if changed == function:
            raise ValueError(
                f"{self}: the regions of @{function.name} that match keep nothing for the backward"
            )
        return changed

    def of(self, forward: Function) -> RunAgain:
        """The regions of a forward that match.  ``ValueError`` for a pattern that no region matches."""
        kept = matching(forward, self.keep, f"{self}") if self.keep else {}
        return RunAgain(
            tuple(dict.fromkeys(matching(forward, self.regions, f"{self}").values())),
            tuple(dict.fromkeys(kept.values())),
        )

    def __str__(self) -> str:
        return word("recompute", value=",".join([*self.regions, *(f"-{pattern}" for pattern in self.keep)]))


@dataclass(frozen=True)
class RunAgain:
    """Regions that run again, by their ``paths``, but for those that are ``kept``."""

    paths: tuple[str, ...]
    kept: tuple[str, ...] = ()

    def mark(self, op: Op) -> str | None:
        """The path of the region that an op runs again with; None if its values are kept."""
        return None if _path(op, {*self.kept}) else _path(op, {*self.paths})

    def __call__(self, joint: Function, forward: Function) -> Function:
        """A function of a forward and its gradient, in which the gradients of the regions read new values."""
        first = {op.outputs for op in forward.ops}
        backward = [op for op in joint.ops if op.outputs not in first]
        kept, marks = {*self.kept}, {f"{MARK}.{path}" for path in self.paths}
        read: dict[str | None, set[Value]] = {}
        """By region: the values that its gradient reads."""
        for op in backward:
            read.setdefault(_path(op, marks), set()).update(op.inputs)
        before: dict[int, list[Op]] = {}
        """The ops that run again, by the id of the first op of the backward that needs them."""
        new: dict[str | None, dict[Value, Value]] = {}
        for path in self.paths:
            mark = f"{MARK}.{path}"
            ops = [op for op in forward.ops if inside(op, path)]
            saved = {value for op in ops if _path(op, kept) for value in op.outputs}.union(
                *(values for other, values in read.items() if other != mark)
            )
            wanted = (read.get(mark, set()) & {value for op in ops for value in op.outputs}) - saved
            again = needed(ops, wanted, saved)
            if not again:
                continue
            new[mark] = {
                value: replace(value, name=f"{AGAIN}{value.name}") for op in again for value in op.outputs
            }
            reader = next(op for op in backward if inside(op, mark) and not wanted.isdisjoint(op.inputs))
            before.setdefault(id(reader), []).extend(
                replace(
                    op,
                    inputs=each(op.inputs, new[mark]),
                    outputs=each(op.outputs, new[mark]),
                    region=f"{MARK}.{op.region}",
                )
                for op in again
            )
        changed = []
        for op in joint.ops:
            changed += before.get(id(op), [])
            inputs = each(op.inputs, new.get(_path(op, marks), {}))
            changed.append(op if inputs == op.inputs else repeated_op(op, inputs, op.outputs))
        return replace(joint, ops=tuple(changed))


def _runs_again(op: Op) -> bool:
    """Whether an op computes something of the forward once more."""
    return any(value.name.startswith(AGAIN) for value in op.outputs)


def _path(op: Op, regions: Collection[str]) -> str | None:
    """The outermost of these regions that an op is in; None if there is none."""
    return next((path for path in paths(op) if path in regions), None)
