"""Fusion: chains of elementwise ops run as one kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from parallelism.ir.core import Function, frozen_attributes
from parallelism.transforms.parts import Parts
from parallelism.transforms.words import word

_FUSED = "fused"


@dataclass(frozen=True)
class Fused:
    """On each device chains of elementwise ops and row reductions run as one kernel (`parallelism.ir.passes.fusion`).

    A chain, whose values in between have one user each, costs what it reads and what it writes for others, and has one
    launch; no memory holds the values in between.  Its flops are those of its ops, and its results are the same.
    Chains are found in the program of each device, so collectives end them.

    The program stays as it is, op by op: an attribute of the function says how devices run it.  A hardware with
    ``fused`` runs every program so.  ``ValueError`` for a program that is fused already.
    """

    phase: ClassVar[int] = 85

    def __call__(self, function: Function) -> Function:
        if not isinstance(function, Function):
            raise TypeError(
                f"a Function is transformed, got {type(function).__name__}; a Pipeline comes last"
            )
        if self.of(function) is not None:
            raise ValueError(f"{self}: @{function.name} is fused already; a transform is applied once")
        attributes = *function.attributes, (_FUSED, True)
        if isinstance(function.source, Parts):  # not derived yet
            return replace(function.source, attributes=frozen_attributes(attributes)).joined()
        return replace(function, attributes=attributes)

    @classmethod
    def of(cls, function: Function) -> Fused | None:
        """What the attributes of a function say; None if it is not fused."""
        return cls() if dict(function.attributes).get(_FUSED) else None

    def __str__(self) -> str:
        return word("fused")
