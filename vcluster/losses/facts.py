"""What is known of one case of `check_loss`: what is right, what each rank returned, and values of parts of the batch.

Nothing here knows the model.  The loss of any set of tokens is what the reference gives where only these are valid, and so
are gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from vcluster.losses.cases import AUXILIARY, GRADIENT, LEVELS, Array, LossCase, Reference, Terms

ByRank = Callable[[int], Array]


class Cause(NamedTuple):
    """A mistake, and what a rank would return with it."""

    words: str
    value: ByRank
    variant: str = ""
    """Mistakes of the same words that give other values differ in this."""
    is_piece: bool = False
    """Whether the value is the piece that the rank holds, and not the whole."""


class Facts:
    """One case: what each rank returned, and what one device gives for all tokens and for any of them."""

    def __init__(self, case: LossCase, reference: Reference, outputs: Sequence[Terms] = ()) -> None:
        self.case, self._reference, self.outputs = case, reference, outputs
        self.sizes = dict(case.mesh.shape) | {"microbatches": case.microbatches}
        self.levels = [level for level in LEVELS if self.sizes[level] > 1]
        """The levels at which the batch of this case, or of another one of the same check, is cut."""
        self._kept: dict[bytes, Terms] = {}

    @cached_property
    def names(self) -> list[str]:
        """The terms of the reference that a step may return."""
        return [name for name in self.of(self.case.whole.valid) if not name.startswith(f"{AUXILIARY}.")]

    def got(self, name: str) -> dict[int, Array]:
        """By rank, what was returned of a term."""
        return {
            rank: np.asarray(terms[name])
            for rank, terms in enumerate(self.outputs)
            if terms.get(name) is not None
        }

    def of(self, valid: Array) -> Terms:
        """The terms where these tokens are valid."""
        key = valid.tobytes()
        if key not in self._kept:
            with np.errstate(all="ignore"):
                self._kept[key] = self._reference(self.case.values, replace(self.case.whole, valid=valid))
        return self._kept[key]

    def part(self, name: str, valid: Array) -> Array:
        """A term where these tokens are valid: of a tied weight the sum of its parts; of no token zero."""
        value = self.of(self.case.whole.valid if not valid.any() else valid)[name]
        total: Array = (
            np.sum([np.asarray(each) for each in value], axis=0)
            if isinstance(value, list)
            else np.asarray(value)
        )
        return total if valid.any() else np.zeros_like(total)

    def mask(self, **places: int) -> Array:
        """The valid tokens at these places of the levels into which the batch is cut."""
        mask = self.case.whole.valid.copy()
        for level, place in places.items():
            mask &= self.case.owner[..., LEVELS[level]] == place
        return mask

    def mask_of(self, rank: int, axes: Sequence[str]) -> Array:
        """The valid tokens of a rank, if the batch were cut along these axes only."""
        index = self.case.mesh.index(rank)
        return self.mask(**{axis: index[axis] for axis in axes})

    def cut(self, levels: Sequence[str]) -> list[Array]:
        """The valid tokens of each piece of a batch that is cut at these levels."""
        ranges = [range(self.sizes[level]) for level in levels]
        return [self.mask(**dict(zip(levels, places, strict=True))) for places in product(*ranges)]

    def places(self, level: str) -> Array:
        """[rows, tokens]: the place of each token at a level."""
        owner: Array = self.case.owner[..., LEVELS[level]]
        return owner

    @property
    def gradients(self) -> list[str]:
        return [name for name in self.names if name.startswith(GRADIENT)]

    # -- what is right ----------------------------------------------------------------------------------------------------

    def whole(self, name: str) -> Array:
        """The right value of a term, whole."""
        if name == "norm":
            return np.asarray(self.norm)
        if name == AUXILIARY:
            return self.balanced(name)
        if name.startswith(GRADIENT):
            return self.gradient(name) * self.clipping(self.norm)
        return self.part(name, self.case.whole.valid)

    def right(self, name: str, rank: int) -> Array:
        """The value that a rank should return."""
        return self.piece(name, rank, self.whole(name))

    def piece(self, name: str, rank: int, value: Array) -> Array:
        """The piece of a term that a rank holds."""
        if not name.startswith(GRADIENT):
            return np.asarray(value)
        return np.asarray(value)[self.case.slices(name.removeprefix(GRADIENT), rank)]

    def tolerance(self, name: str, rtol: float) -> float:
        """By which part a term may differ: a clipped gradient more, as many add 1e-6 to the norm."""
        is_clipped = self.case.clip is not None and name.startswith(GRADIENT)
        return rtol + 2e-6 / max(self.norm, 1e-6) if is_clipped else rtol

    def gradient(self, name: str) -> Array:
        """A gradient before it is clipped, with that of the auxiliary loss."""
        return self.part(name, self.case.whole.valid) + self.added(name)

    def added(self, name: str) -> Array:
        """The right gradient of the auxiliary loss."""
        term = f"{AUXILIARY}.{name}"
        return self.balanced(term) if term in self.of(self.case.whole.valid) else np.asarray(0.0)

    @cached_property
    def norm(self) -> float:
        """The norm of all gradients before they are clipped."""
        return float(np.sqrt(sum(float((self.gradient(each) ** 2).sum()) for each in self.gradients)))

    def clipping(self, norm: float) -> float:
        """The factor by which clipping multiplies gradients of this norm."""
        clip = self.case.clip
        return 1.0 if clip is None else min(1.0, clip / max(norm, 1e-300))

    def balanced(self, name: str) -> Array:
        """An auxiliary loss, or a gradient of it: of the batch, or the mean of those of the microbatches of all replicas."""
        if self.case.auxiliary == "batch":
            return self.part(name, self.case.whole.valid)
        replicas, microbatches = self.replicas_and_microbatches
        return mean([self.of_microbatch(name, *each) for each in product(replicas, microbatches)])

    @property
    def replicas_and_microbatches(self) -> tuple[list[dict[str, int]], range]:
        """The places of the replicas on ``dp`` and ``ep``, and the numbers of the microbatches."""
        replicas = [{"dp": dp, "ep": ep} for dp in range(self.sizes["dp"]) for ep in range(self.sizes["ep"])]
        return replicas, range(self.case.microbatches)

    def of_microbatch(self, name: str, replica: Mapping[str, int], number: int) -> Array:
        """A term of one microbatch of one replica."""
        return self.part(name, self.mask(**replica, microbatches=number))


def near(value: Array, right: Array, rtol: float) -> bool:
    """Whether two values agree, up to a part of the largest of them."""
    if value.shape != right.shape:
        return False
    size = float(np.max(np.abs(right), initial=0.0))
    return bool(np.allclose(value, right, rtol=rtol, atol=rtol * max(size, 1e-9)))


def mean(values: Sequence[Array]) -> Array:
    return np.asarray(np.mean(values, axis=0))


def same(value: Any) -> ByRank:
    """The same value on each rank."""
    return lambda rank: np.asarray(value)


def later(function: Callable[..., Array], *args: Any, **options: Any) -> ByRank:
    """The same value on each rank, which is computed when it is asked for."""
    found: list[Array] = []

    def value(rank: int) -> Array:
        if not found:
            found.append(np.asarray(function(*args, **options)))
        return found[0]

    return value


__all__ = ["ByRank", "Cause", "Facts", "later", "mean", "near", "same"]
