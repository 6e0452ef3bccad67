"""The usual mistakes of a mean over tokens: the loss, and each gradient.

Nothing here knows the model.  A mistake joins the values of parts of the batch in another way than by the number of their
tokens, counts other tokens, or multiplies what is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from math import prod

import numpy as np

from vcluster.losses.cases import GRADIENT, Array
from vcluster.losses.facts import Cause, Facts, later, mean, same

WORDS = {level: f"the ranks of {level}" for level in ("dp", "ep", "cp")} | {
    "microbatches": "the microbatches"
}
TIED_APART = "the gradients of the tied weight are not summed over its two stages: each has its own part"


def subsets(levels: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """All but the empty one, small ones first."""
    for count in range(1, len(levels) + 1):
        yield from combinations(levels, count)


def of_joining(facts: Facts, name: str) -> Iterator[Cause]:
    """Parts of the batch joined in a wrong way, or not at all."""
    for chosen in subsets(facts.levels):
        where = " and ".join(WORDS[level] for level in chosen)
        yield Cause(
            f"a mean of means: the means of {where} count alike, and they have unequal numbers of valid tokens",
            later(mean_of_means, facts, name, chosen, empty_counts=True),
        )
        yield Cause(
            f"a mean of means over {where}, which leaves out those without a valid token",
            later(mean_of_means, facts, name, chosen, empty_counts=False),
        )
    replicas = [level for level in facts.levels if level != "microbatches"]
    if replicas and "microbatches" in facts.levels:
        yield Cause(
            f"a mean of means: of the microbatches that have valid tokens on each rank, and then of the ranks of "
            f"{' and '.join(replicas)}",
            later(_nested_means, facts, name, replicas),
        )
    for chosen in subsets(facts.levels):
        where = " and ".join(WORDS[level] for level in chosen)
        yield Cause(f"the means of {where} are summed", later(_sum_of_means, facts, name, facts.cut(chosen)))
    if "microbatches" in facts.levels:
        for place, words in (
            (facts.case.microbatches - 1, "only the last microbatch counts: each overwrites the one before"),
            (0, "only the first microbatch counts"),
        ):
            yield Cause(words, later(facts.part, name, facts.mask(microbatches=place)))
    for chosen in subsets(replicas):
        words = f"what is summed up so far is summed over {' and '.join(chosen)} in each microbatch, and so more than once"
        yield Cause(words, later(_summed_again, facts, name, chosen))
    yield from _of_rows(facts, name)
    yield from _of_own_parts(facts, name, replicas)


def mean_of_means(facts: Facts, name: str, levels: Sequence[str], *, empty_counts: bool) -> Array:
    """The mean of the means of all pieces at these levels."""
    return mean([facts.part(name, mask) for mask in facts.cut(levels) if empty_counts or mask.any()])


def _sum_of_means(facts: Facts, name: str, masks: Sequence[Array]) -> Array:
    total: Array = np.sum([facts.part(name, mask) for mask in masks], axis=0)
    return total


def _nested_means(facts: Facts, name: str, replicas: Sequence[str]) -> Array:
    """The mean over replicas of the means of the microbatches that have a valid token."""
    means = []
    for whole in facts.cut(replicas):
        masks = [whole & facts.mask(microbatches=number) for number in range(facts.case.microbatches)]
        means.append(
            mean([facts.part(name, mask) for mask in masks if mask.any()] or [facts.part(name, masks[0])])
        )
    return mean(means)


def _summed_again(facts: Facts, name: str, axes: Sequence[str]) -> Array:
    """Sums over ranks of all microbatches so far, after each of them."""
    size = prod(facts.sizes[axis] for axis in axes)
    total: Array = np.zeros(())
    for number in range(facts.case.microbatches):
        mask = facts.mask(microbatches=number)
        total = total * size + facts.part(name, mask) * (mask.sum() / facts.case.whole.valid.sum())
    return total


def _of_rows(facts: Facts, name: str) -> Iterator[Cause]:
    """Sequences that count alike, however long they are."""
    valid = facts.case.whole.valid
    masks = [valid & (np.arange(len(valid)) == row)[:, None] for row in range(len(valid))]
    some = [mask for mask in masks if mask.any()]

    def averaged(chosen: Sequence[Array]) -> Array:
        return _sum_of_means(facts, name, chosen) / len(chosen)

    words = (
        "a mean of means: the means of the rows count alike, and they have unequal numbers of valid tokens"
    )
    yield Cause(words, later(averaged, masks))
    yield Cause(
        "a mean of means over the rows, which leaves out those without a valid token", later(averaged, some)
    )
    yield Cause("the means of the rows are summed", later(_sum_of_means, facts, name, masks))


def _of_own_parts(facts: Facts, name: str, axes: Sequence[str]) -> Iterator[Cause]:
    for chosen in subsets(axes):
        where = " and ".join(chosen)

        def own(rank: int, chosen: Sequence[str] = chosen) -> Array:
            return facts.part(name, facts.mask_of(rank, chosen))

        def share(rank: int, chosen: Sequence[str] = chosen) -> Array:
            mask = facts.mask_of(rank, chosen)
            return np.asarray(facts.part(name, mask) * (mask.sum() / facts.case.whole.valid.sum()))

        def of_first(rank: int, chosen: Sequence[str] = chosen) -> Array:
            return facts.part(name, facts.mask(**dict.fromkeys(chosen, 0)))

        yield Cause(f"it is of the rank's own tokens: it is not summed over {where}", own)
        yield Cause(f"it is the rank's own share: divided by all tokens, and not summed over {where}", share)
        yield Cause(f"it is that of the first rank of {where}: the tokens of the others are lost", of_first)


def of_counting(facts: Facts, name: str) -> Iterator[Cause]:
    """Sums that are divided by the number of other tokens."""
    valid = facts.case.whole.valid
    total = facts.part(name, valid) * valid.sum()
    for chosen in subsets(facts.levels):
        where = " and ".join(WORDS[level] for level in chosen)
        count = len(facts.cut(chosen))
        axes = [level for level in chosen if level != "microbatches"]

        last = {"microbatches": facts.case.microbatches - 1} if len(axes) < len(chosen) else {}

        def by_own(
            rank: int, axes: Sequence[str] = axes, count: int = count, last: dict[str, int] = last
        ) -> Array:
            own = (facts.mask_of(rank, axes) & facts.mask(**last)).sum()
            return np.asarray(total / max(own * count, 1))

        def by_own_alone(rank: int, axes: Sequence[str] = axes) -> Array:
            return np.asarray(total / max(facts.mask_of(rank, axes).sum(), 1))

        if len(axes) == len(chosen):
            yield Cause(
                f"the sum of all is divided by the rank's own number of tokens, which is not summed over "
                f"{' and '.join(axes)}",
                by_own_alone,
            )
        yield Cause(
            f"the sum of all is divided by the rank's own number of tokens, times the number of {where}: they have "
            f"unequal numbers",
            by_own,
        )
        largest = max(int(mask.sum()) for mask in facts.cut(chosen))
        yield Cause(
            f"the sum of all is divided by the largest number of tokens of {where}, times their number",
            same(total / (largest * count)),
        )
        yield Cause(
            f"the sum of all is divided by the number of {where}, and not of tokens", same(total / count)
        )


def of_padding(facts: Facts, name: str) -> Iterator[Cause]:
    """Tokens that do not count, counted."""
    valid = facts.case.whole.valid
    right = facts.part(name, valid)
    yield Cause(
        "padding counts as tokens: the sum is divided by the number of all of them",
        same(right * (valid.sum() / valid.size)),
    )
    unmasked = facts.part(name, np.ones_like(valid))
    yield Cause("the mask is not applied: padding has a loss, too", same(unmasked))
    yield Cause(
        "the mask is not applied to the sum: padding has a loss, too",
        same(unmasked * (valid.size / valid.sum())),
    )
    for axis in ("dp", "ep", "cp"):
        yield from _of_padding_on_last(facts, name, axis)
    yield Cause("it is a sum over tokens: it is not divided by their number", same(right * valid.sum()))
    rows = valid.shape[0]
    yield Cause(
        "it is divided by the number of rows, and not of valid tokens", same(right * (valid.sum() / rows))
    )
    yield from _of_ends(facts, name)


def _of_padding_on_last(facts: Facts, name: str, axis: str) -> Iterator[Cause]:
    valid = facts.case.whole.valid
    right = facts.part(name, valid)
    last = facts.places(axis) == facts.sizes[axis] - 1
    counted = valid.sum() / (valid | last).sum()
    yield Cause(f"the padding of the last rank of {axis} counts as tokens", same(right * counted))

    def unmasked(factor: float) -> Array:
        return facts.part(name, valid | last) * factor

    yield Cause(f"the mask is not applied on the last rank of {axis}", later(unmasked, 1.0))
    yield Cause(
        f"the mask is not applied to the sum of the last rank of {axis}", later(unmasked, 1 / counted)
    )


def _of_ends(facts: Facts, name: str) -> Iterator[Cause]:
    """Tokens at the ends of rows, or of the pieces of rows, that are lost: as where targets are shifted there."""
    valid = facts.case.whole.valid
    place = facts.places("cp")[0]
    ends = np.append(place[1:] != place[:-1], True)
    begins = np.append(True, place[1:] != place[:-1])
    last, first = (np.arange(len(place)) == each for each in (len(place) - 1, 0))
    for lost, words in (
        (ends, "the last token of each rank of cp"),
        (begins, "the first token of each rank of cp"),
        (last, "the last token of each row"),
        (first, "the first token of each row"),
        (ends & ~last, "the last token of each rank of cp but the last"),
        (begins & ~first, "the first token of each rank of cp but the first"),
    ):
        kept = valid & ~lost
        share = kept.sum() / valid.sum()
        yield Cause(f"{words} is left out", later(facts.part, name, kept))
        yield Cause(
            f"{words} is left out of the sum, and not of the number",
            later(_share_of, facts, name, kept, share),
        )


def _share_of(facts: Facts, name: str, mask: Array, share: float) -> Array:
    return facts.part(name, mask) * share


def of_ties(facts: Facts, name: str) -> Iterator[Cause]:
    """A weight that two stages share."""
    parts = facts.of(facts.case.whole.valid).get(name)
    if not isinstance(parts, list):
        return
    first, last = (np.asarray(part) for part in (parts[0], parts[-1]))

    def own(rank: int) -> Array:
        return first if facts.case.mesh.index(rank)["pp"] == 0 else last

    def alone(rank: int) -> Array:
        return own(rank) if facts.sizes["pp"] > 1 else first + last

    yield Cause(TIED_APART, alone)
    yield Cause("of the tied weight only the part of the first stage counts", same(first))
    yield Cause("of the tied weight only the part of the last stage counts", same(last))
    yield Cause("of the tied weight the part of the first stage counts twice", same(2 * first + last))
    yield Cause("of the tied weight the part of the last stage counts twice", same(first + 2 * last))
    yield Cause("the two parts of the tied weight are averaged, and not summed", same((first + last) / 2))


def of_factors(facts: Facts, name: str) -> Iterator[Cause]:
    """A right value, multiplied or divided once too often."""
    right = facts.part(name, facts.case.whole.valid)
    for words, factor in factors(facts, name):
        yield Cause(f"it is {words}", same(right * factor))
    world = facts.case.mesh.size
    for axis in ("dp", "tp"):
        yield Cause(
            f"it is divided by the number of all ranks, and not by that of {axis}",
            same(right * facts.sizes[axis] / world),
        )
    means = mean_of_means(facts, name, ("dp",), empty_counts=True)
    yield Cause(
        "a sum of the means of dp is divided by the number of all ranks",
        same(means * facts.sizes["dp"] / world),
    )


def factors(facts: Facts, name: str) -> Iterator[tuple[str, float]]:
    """What a term may be multiplied with by mistake."""
    weight = name.rpartition(GRADIENT)[2]
    split = facts.case.split_over(weight) if weight in facts.case.weights else set()
    for axis in ("tp", "pp", "cp", "ep", "dp"):
        size = facts.sizes[axis]
        yield (
            (
                f"multiplied by the size of {axis}"
                if axis in split
                else f"summed over {axis}, where each rank has all of it"
            ),
            size,
        )
        yield f"divided by the size of {axis} once too often", 1 / size
    number = facts.case.microbatches
    yield "multiplied by the number of microbatches", number
    yield "divided by the number of microbatches once too often", 1 / number
    yield "divided by the number of all ranks", 1 / facts.case.mesh.size
    yield "summed over all ranks", facts.case.mesh.size
    axes = [axis for axis in ("dp", "ep", "cp") if facts.sizes[axis] > 1]
    for first, second in combinations(axes, 2):
        both = facts.sizes[first] * facts.sizes[second]
        yield f"summed over {first} and {second}, where each rank has all of it", both
        yield f"divided by the sizes of {first} and {second} once too often", 1 / both


def of_parts_of_ranks(facts: Facts, name: str) -> Iterator[Cause]:
    """Values that are right if they are added up, or averaged, over the ranks of an axis."""
    got = facts.got(name)
    axes = [axis for axis, size in facts.case.mesh.shape.items() if size > 1]
    weight = facts.case.weights.get(name.removeprefix(GRADIENT))
    is_tied = weight is not None and weight.stages is not None and len(weight.stages) > 1
    joins: tuple[tuple[str, Callable[[float], float]], ...] = (
        ("summed", lambda size: 1.0),
        ("averaged", lambda size: size),
    )
    for (how, whole), axis in ((join, axis) for join in joins for axis in axes):

        def left(rank: int, axis: str = axis, whole: Callable[[float], float] = whole) -> Array:
            """What the right value leaves for a rank if the others are right to have what they have."""
            others = [
                got[other] for other in facts.case.mesh.group(rank, axis) if other != rank and other in got
            ]
            if name in facts.gradients and axis in facts.case.split_over(name.removeprefix(GRADIENT)):
                return np.full_like(got[rank], np.nan)
            return np.asarray(facts.right(name, rank) * whole(len(others) + 1) - sum(others))

        words = f"each rank of {axis} has its own part of it: they are not {how} over {axis}"
        if axis == "pp" and is_tied and how == "summed":
            words = TIED_APART
        yield Cause(words, left, is_piece=True)


def of_experts(facts: Facts, name: str) -> Iterator[Cause]:
    """The mistakes of gradients of experts: each rank of ``ep`` holds other experts."""
    weight = name.removeprefix(GRADIENT)
    if weight not in facts.case.weights or "ep" not in facts.case.split_over(weight):
        return
    right = facts.part(name, facts.case.whole.valid)

    def pieces(rank: int) -> list[Array]:
        return [facts.piece(name, other, right) for other in facts.case.mesh.group(rank, "ep")]

    def summed(rank: int) -> Array:
        shapes = {each.shape for each in pieces(rank)}
        return np.sum(pieces(rank), axis=0) if len(shapes) == 1 else np.full((), np.nan)

    yield Cause(
        "gradients of different experts are summed over ep: each rank there has experts of its own",
        summed,
        is_piece=True,
    )

    def averaged(rank: int) -> Array:
        return np.asarray(summed(rank) / facts.sizes["ep"])

    yield Cause(
        "gradients of different experts are averaged over ep: each rank there has experts of its own",
        averaged,
        is_piece=True,
    )

    def own_tokens(rank: int) -> Array:
        mask = facts.mask_of(rank, ["ep"])
        return np.asarray(facts.part(name, mask) * (mask.sum() / facts.case.whole.valid.sum()))

    yield Cause("experts learn from the tokens of their own rank of ep only", own_tokens)
