"""Which usual mistake explains a wrong term in all cases: what each would give is compared with what came."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations, product

import numpy as np

from vcluster.losses.balance import of_balance
from vcluster.losses.cases import AUXILIARY, AXES, GRADIENT, LEVELS, Array
from vcluster.losses.facts import ByRank, Cause, Facts, near, same
from vcluster.losses.means import (
    factors,
    of_counting,
    of_experts,
    of_factors,
    of_joining,
    of_padding,
    of_parts_of_ranks,
    of_ties,
)
from vcluster.losses.norms import of_clipping, of_norm

AXIS = re.compile(rf"\b({'|'.join(AXES)})\b")
JOINS = {
    "tokens": "weighted by their numbers of tokens",
    "mean": "averaged",
    "some": "averaged without those that have no token",
    "sum": "summed",
    "last": "of which only the last counts",
    "first": "of which only the first counts",
    "own": "not joined",
}
"""How the values of parts can be put together, and in words."""
OF_LEVEL = {"microbatches": ("tokens", "mean", "some", "sum", "last", "first")}
OF_AXIS = ("tokens", "mean", "some", "sum", "own")


def cause_of(name: str, cases: Sequence[Facts], rtol: float) -> str:
    """The mistake of a term that explains what came in all cases; "" if none does.

    One mistake is looked for first, then parts that are joined in a wrong way at several levels, and then two mistakes.
    """
    levels = []
    for level in LEVELS:
        if any(level in facts.levels for facts in cases):
            levels.append(level)
    for facts in cases:
        facts.levels = levels
    compared = [facts for facts in cases if facts.got(name)]
    for causes in (_simple, _nested, _twofold):
        found = _fitting(name, compared, causes, rtol)
        if found:
            return found
    return ""


def _changes(
    cause: Cause, facts: Facts, name: str, right: Mapping[int, Array], tolerance: float
) -> bool | None:
    """Whether a mistake says something else than what is right, on any rank; None if it does not say what came."""
    changes = False
    for rank, value in facts.got(name).items():
        piece = cause.value(rank)
        would = piece if cause.is_piece else facts.piece(name, rank, piece)
        if not near(value, would, tolerance):
            return None
        changes = changes or not near(would, right[rank], tolerance)
    return changes


def _fitting(name: str, cases: Sequence[Facts], causes: object, rtol: float) -> str:
    """The first mistake that says what came in all cases, and in one of them something else than what is right."""
    assert callable(causes)
    fitting: dict[tuple[str, str], bool] = {}
    refuted: set[tuple[str, str]] = set()
    for facts in cases:
        tolerance = facts.tolerance(name, rtol)
        right = {rank: facts.right(name, rank) for rank in facts.got(name)}
        with np.errstate(all="ignore"):
            for cause in causes(facts, name):
                key = cause.words, cause.variant
                if key in refuted:
                    continue
                changes = _changes(cause, facts, name, right, tolerance)
                if changes is None:
                    refuted.add(key)
                else:
                    fitting[key] = fitting.get(key, False) or changes
    found = [key[0] for key, changes in fitting.items() if changes and key not in refuted]
    return _with_likes(found[0], found[1:]) if found else ""


def _with_likes(words: str, others: Sequence[str]) -> str:
    """A mistake, and the axes for which the same fits as well, since they are as long on every mesh."""
    if len(AXIS.findall(words)) != 1:
        return words
    same = [other for other in others if AXIS.sub("", other) == AXIS.sub("", words)]
    axes = dict.fromkeys(AXIS.findall(other)[0] for other in same)
    axis = AXIS.findall(words)[0]
    axes.pop(axis, None)
    if not axes:
        return words
    return f"{words} (or {' or '.join(axes)} in place of {axis}: these meshes do not tell them apart)"


def _simple(facts: Facts, name: str) -> Iterator[Cause]:
    """One mistake."""
    if name == "norm":
        yield from of_norm(facts)
    elif name == AUXILIARY:
        yield from of_balance(facts, name)
        yield from of_parts_of_ranks(facts, name)
    elif name.startswith(GRADIENT):
        yield from of_clipping(facts, name)
        yield from _of_gradient(facts, name)
        yield from of_parts_of_ranks(facts, name)
    else:
        yield from _of_mean(facts, name)
        yield from _with_balance(facts)
        yield from of_parts_of_ranks(facts, name)


def _of_mean(facts: Facts, name: str) -> Iterator[Cause]:
    for causes in (of_joining, of_padding, of_ties, of_factors, of_counting, of_experts):
        yield from causes(facts, name)


def _with_balance(facts: Facts) -> Iterator[Cause]:
    """The auxiliary loss in the loss, which are terms of their own here."""
    if AUXILIARY in facts.names:
        total = facts.whole("loss") + facts.whole(AUXILIARY)
        yield Cause("the auxiliary loss is added to it, which is a term of its own here", lambda rank: total)


def _of_gradient(facts: Facts, name: str) -> Iterator[Cause]:
    """The mistakes of a gradient: of that of the mean, of that of the auxiliary loss, and of both; clipped, if it is."""
    if f"{AUXILIARY}.{name}" not in facts.of(facts.case.whole.valid):
        for cause in _of_mean(facts, name):
            yield from _clipped(facts, name, cause)
        return
    added = facts.added(name)
    mean = facts.part(name, facts.case.whole.valid)
    for cause in _of_mean(facts, name):
        yield cause if cause.is_piece else Cause(cause.words, _sum(cause.value, added))
    for cause in of_balance(facts, f"{AUXILIARY}.{name}"):
        yield Cause(f"that of the auxiliary loss in it: {cause.words}", _sum(cause.value, mean))
    for words, factor in factors(facts, name):
        yield Cause(f"it is {words}", same((mean + added) * factor), "of both")


def _clipped(facts: Facts, name: str, cause: Cause) -> Iterator[Cause]:
    """A cause, and what is left of it where gradients are clipped: if only this gradient is wrong, so that the norm is
    right, and if all gradients have the same mistake, so that the norm has it too."""
    yield cause
    if facts.case.clip is None or cause.is_piece:
        return
    yield Cause(cause.words, _times(cause.value, facts.clipping(facts.norm)), "clipped")

    def by_own_norm(rank: int) -> Array:
        square = 0.0
        for each in facts.gradients:
            others = {other.words: other for other in _of_mean(facts, each)}
            value = others[cause.words].value(rank) if cause.words in others else facts.gradient(each)
            square += float((np.asarray(value) ** 2).sum())
        return np.asarray(cause.value(rank) * facts.clipping(float(np.sqrt(square))))

    yield Cause(cause.words, by_own_norm, "all clipped")


def _nested(facts: Facts, name: str) -> Iterator[Cause]:
    """Parts of the batch that are joined in another way at each level."""
    if name in ("norm", AUXILIARY):
        return
    for order in permutations(facts.levels):
        if "microbatches" in order[1:-1]:
            continue
        for ways in product(*(OF_LEVEL.get(level, OF_AXIS) for level in order)):
            plan = tuple(zip(order, ways, strict=True))
            if any(way != "tokens" for way in ways):
                yield Cause(_words_of(plan), _joined_by(facts, name, plan))


def _words_of(plan: Sequence[tuple[str, str]]) -> str:
    """From the inside out."""
    parts = [f"over {level} {JOINS[way]}" for level, way in reversed(plan)]
    return f"the means of parts are joined in a wrong way: they are {', then '.join(parts)}"


def _joined_by(facts: Facts, name: str, plan: Sequence[tuple[str, str]]) -> ByRank:
    def value(rank: int) -> Array:
        return _joined(facts, name, rank, plan, facts.case.whole.valid)[0] + facts.added(name)

    return value


def _joined(
    facts: Facts, name: str, rank: int, plan: Sequence[tuple[str, str]], mask: Array
) -> tuple[Array, int]:
    """The value of these tokens, and their number, joined level by level; the outermost one comes first."""
    if not plan:
        return facts.part(name, mask), int(mask.sum())
    (level, way), *inner = plan
    size = facts.sizes[level]
    chosen = {"last": [size - 1], "first": [0]}.get(way, range(size))
    if way == "own":
        chosen = [facts.case.mesh.index(rank)[level]]
    parts = [_joined(facts, name, rank, inner, mask & (facts.places(level) == place)) for place in chosen]
    counts = [count for _, count in parts]
    total = sum(counts)
    if way == "sum":
        return np.sum([value for value, _ in parts], axis=0), total
    if way == "tokens" and total:
        return np.sum([value * count for value, count in parts], axis=0) / total, total
    kept = [value for value, count in parts if count or way != "some"] or [parts[0][0]]
    return np.asarray(np.mean(kept, axis=0)), total


def _twofold(facts: Facts, name: str) -> Iterator[Cause]:
    """A mistake, and a factor."""
    if name == "norm":
        return
    first = of_balance(facts, name) if name == AUXILIARY else _of_mean(facts, name)
    joined: Mapping[str, Cause] = {cause.words: cause for cause in first if not cause.is_piece}
    for words, factor in factors(facts, name):
        for cause in joined.values():
            yield Cause(f"{cause.words}; and then it is {words}", _times(cause.value, factor))


def _times(value: ByRank, factor: float) -> ByRank:
    return lambda rank: np.asarray(value(rank) * factor)


def _sum(value: ByRank, other: Array) -> ByRank:
    return lambda rank: np.asarray(value(rank) + other)
