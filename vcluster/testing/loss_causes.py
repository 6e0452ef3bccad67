"""The usual mistakes of a loss over many devices: what each would give, so that a wrong value tells which was made.

Nothing here knows the model.  The loss of any set of tokens is what the reference gives where only these are valid, and so
are gradients.  A mistake joins these values in another way than by the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import combinations, product
from typing import NamedTuple

import numpy as np

from vcluster.testing.losses import GRADIENT, Array, LossCase, Reference, Terms, near

LEVELS = {"dp": 0, "cp": 1, "microbatches": 2}
"""What a batch is cut into, and where `LossCase.owner` says it."""
WORDS = {"dp": "the ranks of dp", "cp": "the ranks of cp", "microbatches": "the microbatches"}

ByRank = Callable[[int], Array]


class Cause(NamedTuple):
    """A mistake, and what a rank would return with it."""

    words: str
    value: ByRank


class Facts:
    """One case on one device: what is right, and the values of parts of its batch."""

    def __init__(self, case: LossCase, reference: Reference) -> None:
        self.case, self._reference = case, reference
        self.sizes = dict(case.mesh.shape) | {"microbatches": case.microbatches}
        self._kept: dict[bytes, Terms] = {}

    @cached_property
    def names(self) -> list[str]:
        """The terms of the reference."""
        return list(self.of(self.case.whole.valid))

    def of(self, valid: Array) -> Terms:
        """The terms where these tokens are valid; of none, zeros."""
        key = valid.tobytes()
        if key not in self._kept:
            with np.errstate(all="ignore"):
                self._kept[key] = self._reference(self.case.values, replace(self.case.whole, valid=valid))
        return self._kept[key]

    def part(self, name: str, valid: Array) -> Array:
        """A term where these tokens are valid: of a tied weight the sum of its parts."""
        value = self.of(self.case.whole.valid if not valid.any() else valid)[name]
        total: Array = (
            np.sum([np.asarray(each) for each in value], axis=0)
            if isinstance(value, list)
            else np.asarray(value)
        )
        return total if valid.any() else np.zeros_like(total)

    def mask(self, **places: int) -> Array:
        """The valid tokens at these places of ``dp``, ``cp`` and the microbatches."""
        mask = self.case.whole.valid.copy()
        for level, place in places.items():
            mask &= self.case.owner[..., LEVELS[level]] == place
        return mask

    def whole(self, name: str) -> Array:
        """The right value of a term, whole."""
        if name == "norm":
            return np.asarray(
                np.sqrt(sum(float((self.gradient(each) ** 2).sum()) for each in self.gradients))
            )
        if name == "auxiliary":
            return self.mean_auxiliary
        if name.startswith(GRADIENT) and self.case.clip is not None:
            return self.gradient(name) * self.clipping(float(self.whole("norm")))
        return self.part(name, self.case.whole.valid)

    def right(self, name: str, rank: int) -> Array:
        """What a rank should return."""
        return self.piece(name, rank, self.whole(name))

    def piece(self, name: str, rank: int, value: Array) -> Array:
        """The piece of a term that a rank holds."""
        if not name.startswith(GRADIENT):
            return np.asarray(value)
        return np.asarray(value)[self.case.slices(name.removeprefix(GRADIENT), rank)]

    @property
    def gradients(self) -> list[str]:
        return [name for name in self.names if name.startswith(GRADIENT)]

    def gradient(self, name: str) -> Array:
        """A gradient before it is clipped."""
        return self.part(name, self.case.whole.valid)

    def clipping(self, norm: float) -> float:
        """What gradients of this norm are multiplied with."""
        clip = self.case.clip
        return 1.0 if clip is None else min(1.0, clip / max(norm, 1e-300))

    @cached_property
    def mean_auxiliary(self) -> Array:
        """The mean of the auxiliary losses of the microbatches of all replicas."""
        return _mean([self.auxiliary(dp, number) for dp, number in product(*self.replicas_and_microbatches)])

    @property
    def replicas_and_microbatches(self) -> tuple[range, range]:
        return range(self.sizes["dp"]), range(self.sizes["microbatches"])

    def auxiliary(self, dp: int, number: int) -> Array:
        """That of one microbatch of one replica."""
        return self.part("auxiliary", self.mask(dp=dp, microbatches=number))


class Evidence:
    """What the outputs of all cases say about the mistakes of one term."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._fitting: dict[str, None] = {}
        self._refuted: set[str] = set()

    def add(self, facts: Facts, got: Mapping[int, Array], rtol: float) -> None:
        """Take in what each rank returned in a case.

        A mistake that says something else than what came is refuted; one that changes nothing in a case is not.
        """
        of_kind = _of_norm if self.name == "norm" else _of_auxiliary if self.name == "auxiliary" else _of_mean
        for cause in of_kind(facts, self.name):
            values = {rank: facts.piece(self.name, rank, cause.value(rank)) for rank in got}
            if not all(near(got[rank], value, rtol) for rank, value in values.items()):
                self._refuted.add(cause.words)
            elif any(not near(value, facts.right(self.name, rank), rtol) for rank, value in values.items()):
                self._fitting.setdefault(cause.words)

    @property
    def cause(self) -> str:
        """The mistake that explains all cases; "" if none does."""
        return next((words for words in self._fitting if words not in self._refuted), "")


# -- means over tokens ----------------------------------------------------------------------------------------------------


def _of_mean(facts: Facts, name: str) -> Iterator[Cause]:
    """The mistakes of a mean over tokens: the loss, and each gradient."""
    if facts.case.clip is not None and name.startswith(GRADIENT):
        yield from _of_clipping(facts, name)
    for cause in (
        *_of_joining(facts, name),
        *_of_padding(facts, name),
        *_of_ties(facts, name),
        *_of_factors(facts, name),
    ):
        yield cause
        if facts.case.clip is not None and name.startswith(GRADIENT):
            scale = facts.clipping(float(facts.whole("norm")))
            yield Cause(cause.words, _scaled(cause.value, scale))


def _scaled(value: ByRank, factor: float) -> ByRank:
    return lambda rank: value(rank) * factor


def _of_joining(facts: Facts, name: str) -> Iterator[Cause]:
    """Parts of the batch joined in a wrong way, or not at all."""
    levels = [level for level in LEVELS if facts.sizes[level] > 1]
    for count in range(1, len(levels) + 1):
        for chosen in combinations(levels, count):
            where = " and ".join(WORDS[level] for level in chosen)
            yield Cause(
                f"a mean of means: the means of {where} count alike, and they have unequal numbers of valid tokens",
                _constant(_mean_of_means(facts, name, chosen, empty_counts=True)),
            )
            yield Cause(
                f"a mean of means over {where}, which leaves out those without a valid token",
                _constant(_mean_of_means(facts, name, chosen, empty_counts=False)),
            )
    if {"dp", "microbatches"} <= set(levels):
        yield Cause(
            "a mean of means: of the microbatches that have valid tokens on each rank, and then of the ranks of dp",
            _constant(_nested_means(facts, name)),
        )
    for level in levels:
        pieces = [facts.part(name, facts.mask(**{level: place})) for place in range(facts.sizes[level])]
        yield Cause(f"the means of {WORDS[level]} are summed", _constant(np.sum(pieces, axis=0)))
    if "microbatches" in levels:
        last = facts.sizes["microbatches"] - 1
        yield Cause(
            "only the last microbatch counts: each overwrites the one before",
            _constant(facts.part(name, facts.mask(microbatches=last))),
        )
        yield Cause(
            "only the first microbatch counts", _constant(facts.part(name, facts.mask(microbatches=0)))
        )
    yield from _of_own_parts(facts, name, levels)


def _of_own_parts(facts: Facts, name: str, levels: Sequence[str]) -> Iterator[Cause]:
    axes = [level for level in levels if level != "microbatches"]
    for count in range(1, len(axes) + 1):
        for chosen in combinations(axes, count):
            where = " and ".join(chosen)

            def own(rank: int, chosen: Sequence[str] = chosen) -> Array:
                index = facts.case.mesh.index(rank)
                return facts.part(name, facts.mask(**{axis: index[axis] for axis in chosen}))

            def share(rank: int, chosen: Sequence[str] = chosen) -> Array:
                index = facts.case.mesh.index(rank)
                mask = facts.mask(**{axis: index[axis] for axis in chosen})
                return np.asarray(facts.part(name, mask) * (mask.sum() / facts.case.whole.valid.sum()))

            yield Cause(f"it is of the rank's own tokens: it is not summed over {where}", own)
            yield Cause(
                f"it is the rank's own share: divided by all tokens, and not summed over {where}", share
            )


def _of_padding(facts: Facts, name: str) -> Iterator[Cause]:
    """Tokens that do not count, counted."""
    valid, owner = facts.case.whole.valid, facts.case.owner
    right = facts.part(name, valid)
    yield Cause(
        "padding counts as tokens: the sum is divided by the number of all of them",
        _constant(right * (valid.sum() / valid.size)),
    )
    everything = np.ones_like(valid)
    unmasked = facts.part(name, everything)
    yield Cause("the mask is not applied: padding has a loss, too", _constant(unmasked))
    yield Cause(
        "the mask is not applied to the sum: padding has a loss, too",
        _constant(unmasked * (valid.size / valid.sum())),
    )
    last = owner[..., 0] == facts.sizes["dp"] - 1
    counted = valid.sum() / (valid | last).sum()
    yield Cause("the padding of the last rank of dp counts as tokens", _constant(right * counted))
    yield Cause("the mask is not applied on the last rank of dp", _constant(facts.part(name, valid | last)))
    yield Cause(
        "the mask is not applied to the sum of the last rank of dp",
        _constant(facts.part(name, valid | last) / counted),
    )
    yield Cause("it is a sum over tokens: it is not divided by their number", _constant(right * valid.sum()))
    rows = valid.shape[0]
    yield Cause(
        "it is divided by the number of rows, and not of valid tokens",
        _constant(right * (valid.sum() / rows)),
    )


def _of_ties(facts: Facts, name: str) -> Iterator[Cause]:
    """A weight that two stages share."""
    parts = facts.of(facts.case.whole.valid).get(name)
    if not isinstance(parts, list):
        return
    first, last = (np.asarray(part) for part in (parts[0], parts[-1]))

    def own(rank: int) -> Array:
        stage = facts.case.mesh.index(rank)["pp"]
        return first if stage == 0 else last

    if facts.sizes["pp"] > 1:
        yield Cause(
            "the gradients of the tied weight are not summed over its two stages: each has its own part", own
        )
    yield Cause("of the tied weight only the part of the first stage counts", _constant(first))
    yield Cause("of the tied weight only the part of the last stage counts", _constant(last))
    yield Cause("of the tied weight the part of the first stage counts twice", _constant(2 * first + last))
    yield Cause("of the tied weight the part of the last stage counts twice", _constant(first + 2 * last))


def _of_factors(facts: Facts, name: str) -> Iterator[Cause]:
    """A right value, multiplied or divided once too often."""
    right, sizes = facts.part(name, facts.case.whole.valid), facts.sizes
    world = facts.case.mesh.size
    for axis in ("tp", "pp", "cp", "dp"):
        if sizes[axis] > 1:
            yield Cause(
                f"it is summed over {axis}, where each rank has all of it", _constant(right * sizes[axis])
            )
            yield Cause(f"it is divided by the size of {axis} once too often", _constant(right / sizes[axis]))
    if sizes["microbatches"] > 1:
        number = sizes["microbatches"]
        yield Cause("it is multiplied by the number of microbatches", _constant(right * number))
        yield Cause("it is divided by the number of microbatches once too often", _constant(right / number))
    for axis in ("dp", "tp"):
        if sizes[axis] > 1:
            yield Cause(
                f"it is divided by the number of all ranks, and not by that of {axis}",
                _constant(right * sizes[axis] / world),
            )
    means = _mean_of_means(facts, name, ("dp",), empty_counts=True)
    yield Cause(
        "a sum of the means of dp is divided by the number of all ranks",
        _constant(means * sizes["dp"] / world),
    )
    yield Cause("it is divided by the number of all ranks", _constant(right / world))
    yield Cause("it is summed over all ranks", _constant(right * world))


def _mean_of_means(facts: Facts, name: str, levels: Sequence[str], *, empty_counts: bool) -> Array:
    """The mean of the means of all pieces at these levels."""
    values = []
    for places in product(*(range(facts.sizes[level]) for level in levels)):
        mask = facts.mask(**dict(zip(levels, places, strict=True)))
        if empty_counts or mask.any():
            values.append(facts.part(name, mask))
    mean: Array = np.mean(values, axis=0)
    return mean


def _nested_means(facts: Facts, name: str) -> Array:
    """The mean over ``dp`` of the means of the microbatches that have a valid token."""
    replicas, microbatches = facts.replicas_and_microbatches
    means = []
    for dp in replicas:
        masks = [facts.mask(dp=dp, microbatches=number) for number in microbatches]
        means.append(
            _mean([facts.part(name, mask) for mask in masks if mask.any()] or [facts.part(name, masks[0])])
        )
    return _mean(means)


def _mean(values: Sequence[Array]) -> Array:
    return np.asarray(np.mean(values, axis=0))


def _constant(value: Array) -> ByRank:
    return lambda rank: value


# -- norms and clipping ---------------------------------------------------------------------------------------------------


def _of_norm(facts: Facts, name: str) -> Iterator[Cause]:
    """The mistakes of a norm over the gradients of all ranks."""
    sizes = facts.sizes
    squares = {each: facts.gradient(each) ** 2 for each in facts.gradients}
    total = sum(float(each.sum()) for each in squares.values())
    over = [_copies(facts, each) for each in squares]

    def counted(axes: Sequence[str]) -> float:
        """The sum of squares if copies along these axes count each."""
        factors = [np.prod([copies[axis] for axis in axes]) for copies in over]
        return sum(float(each.sum()) * factor for each, factor in zip(squares.values(), factors, strict=True))

    for count in (1, 2, 3, 4):
        for axes in combinations([axis for axis in ("tp", "pp", "cp", "dp") if sizes[axis] > 1], count):
            where = " and ".join(axes)
            yield Cause(
                f"weights that every rank of {where} holds count once for each of them",
                _constant(np.sqrt(counted(axes))),
            )

    def own(rank: int) -> Array:
        return np.asarray(np.sqrt(_own_square(facts, squares, rank)))

    yield Cause(
        "it is of the rank's own pieces: the squares are not summed over the ranks that hold the others", own
    )
    yield Cause("it is the sum of squares: the root is missing", _constant(np.asarray(total)))
    norms = [np.sqrt(_own_square(facts, squares, rank)) for rank in range(facts.case.mesh.size)]
    yield Cause("it is a sum of norms of ranks: squares are what adds up", _constant(np.sum(norms)))
    yield Cause(
        "it is a sum of norms of weights: squares are what adds up",
        _constant(np.sum([np.sqrt(each.sum()) for each in squares.values()])),
    )
    yield Cause("it is the largest norm of a rank", _constant(np.max(norms)))
    if facts.case.clip is not None:
        yield Cause(
            "it is the norm after clipping", _constant(np.sqrt(total) * facts.clipping(np.sqrt(total)))
        )
    for axis in ("dp", "cp"):
        if sizes[axis] > 1:
            yield Cause(f"it is of gradients that are not yet summed over {axis}", _before_sum(facts, axis))


def _before_sum(facts: Facts, axis: str) -> ByRank:
    def value(rank: int) -> Array:
        mask = facts.mask(**{axis: facts.case.mesh.index(rank)[axis]})
        parts = [facts.part(name, mask) for name in facts.gradients]
        return np.asarray(np.sqrt(np.sum([(part**2).sum() for part in parts])))

    return value


def _copies(facts: Facts, name: str) -> dict[str, int]:
    """Along each axis, how many ranks hold the same piece of a gradient."""
    weight = facts.case.weights[name.removeprefix(GRADIENT)]
    stages = (
        facts.sizes["pp"]
        if weight.stages is None
        else len({each % facts.sizes["pp"] for each in weight.stages})
    )
    copies = {axis: facts.sizes[axis] for axis in ("dp", "cp", "tp")} | {"pp": stages}
    for axis in copies:
        if axis in weight.layout:
            copies[axis] = 1
    return copies


def _own_square(facts: Facts, squares: Mapping[str, Array], rank: int) -> float:
    held = [name for name in squares if facts.case.holds(name.removeprefix(GRADIENT), rank)]
    return sum(float(facts.piece(name, rank, squares[name]).sum()) for name in held)


def _of_clipping(facts: Facts, name: str) -> Iterator[Cause]:
    """A gradient that is clipped by a wrong norm."""
    gradient = facts.gradient(name)
    for cause in _of_norm(facts, "norm"):
        words = cause.words.removeprefix("it is ")
        norm = cause.value

        def value(rank: int, norm: ByRank = norm) -> Array:
            return gradient * facts.clipping(float(norm(rank)))

        yield Cause(f"it is clipped by a wrong norm: {words}", value)
    yield Cause("it is not clipped", _constant(gradient))


# -- auxiliary losses -----------------------------------------------------------------------------------------------------


def _of_auxiliary(facts: Facts, name: str) -> Iterator[Cause]:
    """The mistakes of a loss that each microbatch of each replica has."""
    sizes, right = facts.sizes, facts.mean_auxiliary
    replicas, microbatches = facts.replicas_and_microbatches
    if sizes["dp"] > 1:
        yield Cause("it is summed over dp, and not averaged", _constant(right * sizes["dp"]))

        def own(rank: int) -> Array:
            dp = facts.case.mesh.index(rank)["dp"]
            return _mean([facts.auxiliary(dp, number) for number in microbatches])

        yield Cause("it is the replica's own: it is not averaged over dp", own)
    if sizes["microbatches"] > 1:
        yield Cause(
            "it is summed over the microbatches, and not averaged", _constant(right * sizes["microbatches"])
        )
        last = [facts.auxiliary(dp, microbatches[-1]) for dp in replicas]
        yield Cause("only that of the last microbatch counts", _constant(np.mean(last, axis=0)))
    yield Cause(
        "it is summed over dp and the microbatches, and not averaged",
        _constant(right * sizes["dp"] * sizes["microbatches"]),
    )
    if sizes["tp"] > 1:
        yield Cause("it is summed over tp, where each rank has all of it", _constant(right * sizes["tp"]))
    yield Cause("it is missing", _constant(np.zeros_like(right)))


__all__ = ["Evidence", "Facts"]
