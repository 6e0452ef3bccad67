"""The usual mistakes of a norm over the gradients of all ranks, and of clipping by it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from vcluster.losses.cases import GRADIENT, Array
from vcluster.losses.facts import ByRank, Cause, Facts, later, same
from vcluster.losses.means import subsets

RANKED = ("tp", "pp", "ep", "cp", "dp")


def of_norm(facts: Facts) -> Iterator[Cause]:
    """The mistakes of a norm over the gradients of all ranks."""
    squares = {each: facts.gradient(each) ** 2 for each in facts.gradients}
    total = sum(float(each.sum()) for each in squares.values())
    axes = [axis for axis in RANKED if facts.case.mesh.shape[axis] > 1]
    over = {each: _copies(facts, each) for each in squares}

    def counted(chosen: Sequence[str], names: Sequence[str]) -> Array:
        """The norm if copies of these weights along these axes count each."""
        terms = []
        for name, each in squares.items():
            copies = np.prod([over[name][axis] for axis in chosen]) if name in names else 1
            terms.append(float(each.sum()) * copies)
        return np.asarray(np.sqrt(sum(terms)))

    for chosen in subsets(axes):
        where = " and ".join(chosen)
        yield Cause(
            f"weights that every rank of {where} holds count once for each of them",
            same(counted(chosen, list(squares))),
        )
    yield Cause(
        "it is of the rank's own pieces: the squares are not summed over the ranks that hold the others",
        lambda rank: _root(_own_square(facts, squares, rank)),
    )
    yield from _of_pieces(facts, squares, axes)
    yield Cause("it is the sum of squares: the root is missing", same(total))
    norms = [float(_root(_own_square(facts, squares, rank))) for rank in range(facts.case.mesh.size)]
    yield Cause("it is a sum of norms of ranks: squares are what adds up", same(np.sum(norms)))
    yield Cause(
        "it is a sum of norms of weights: squares are what adds up",
        same(np.sum([np.sqrt(each.sum()) for each in squares.values()])),
    )
    for axis in axes:
        yield Cause(
            f"the roots of the parts along {axis} are added: squares are what adds up",
            later(_roots, facts, squares, axis),
        )
    yield Cause("it is the largest norm of a rank", same(np.max(norms)))
    yield Cause(
        "it is the largest norm of a weight", same(np.max([np.sqrt(each.sum()) for each in squares.values()]))
    )
    if facts.case.clip is not None:
        yield Cause("it is the norm after clipping", same(facts.norm * facts.clipping(facts.norm)))
    for axis in ("dp", "ep", "cp"):
        yield Cause(
            f"it is of gradients that are not yet summed over {axis}",
            _before_sum(facts, [axis], shares=False),
        )
        yield Cause(
            f"it is of the rank's own shares of the gradients, before they are summed over {axis}",
            _before_sum(facts, [axis], shares=True),
        )
    yield from _of_lacking(facts, squares, over)
    for axis in axes:
        size = facts.case.mesh.shape[axis]
        yield Cause(
            f"it is divided by the root of the size of {axis}: squares are averaged, and not summed",
            same(facts.norm / np.sqrt(size)),
        )
        yield Cause(f"it is averaged over {axis}", same(facts.norm / size))
    yield Cause("it is divided by the number of all ranks", same(facts.norm / facts.case.mesh.size))


def _of_pieces(facts: Facts, squares: Mapping[str, Array], axes: Sequence[str]) -> Iterator[Cause]:
    """Pieces of split weights that are not counted, or own squares of all ranks summed whatever they hold."""
    for chosen in subsets(axes):
        where = " and ".join(chosen)

        def lacking(rank: int, chosen: Sequence[str] = chosen) -> Array:
            return _root(sum(_square(facts, name, each, rank, chosen) for name, each in squares.items()))

        def of_all(rank: int, chosen: Sequence[str] = chosen) -> Array:
            group = facts.case.mesh.group(rank, tuple(chosen))
            return _root(sum(_own_square(facts, squares, member) for member in group))

        yield Cause(
            f"the squares of pieces are not summed over {where}, whose ranks hold different ones", lacking
        )
        yield Cause(
            f"the squares of what each rank holds are summed over {where} alone: pieces on other axes are missing, and "
            f"weights that these ranks share count for each",
            of_all,
        )


def _of_lacking(
    facts: Facts, squares: Mapping[str, Array], over: Mapping[str, Mapping[str, int]]
) -> Iterator[Cause]:
    """Some weights that are not counted, or are counted twice."""
    split = [name for name in squares if facts.case.split_over(name.removeprefix(GRADIENT))]
    tied = [
        name
        for name in squares
        if over[name]["pp"] > 1 and facts.case.weights[name.removeprefix(GRADIENT)].stages
    ]
    whole = [name for name in squares if name not in split]
    for chosen, words in (
        (whole, "whole weights are not counted"),
        (split, "split weights are not counted"),
        (tied, "the tied weight is not counted"),
    ):
        left = sum(float(each.sum()) for name, each in squares.items() if name not in chosen)
        yield Cause(words, same(np.sqrt(left)))
    for name, each in squares.items():
        yield Cause(
            f"the weight {name.removeprefix(GRADIENT)!r} is not counted",
            same(np.sqrt(facts.norm**2 - float(each.sum()))),
        )
        yield Cause(
            f"the weight {name.removeprefix(GRADIENT)!r} counts twice",
            same(np.sqrt(facts.norm**2 + float(each.sum()))),
        )


def _before_sum(facts: Facts, axes: Sequence[str], *, shares: bool) -> ByRank:
    def value(rank: int) -> Array:
        mask = facts.mask_of(rank, axes)
        share = mask.sum() / facts.case.whole.valid.sum() if shares else 1.0
        return np.asarray(
            share * np.sqrt(sum(float((facts.part(name, mask) ** 2).sum()) for name in facts.gradients))
        )

    return value


def _roots(facts: Facts, squares: Mapping[str, Array], axis: str) -> Array:
    """The norms of the pieces along an axis of the weights that are split over it, and that of the others, added."""
    split = [name for name in squares if axis in facts.case.split_over(name.removeprefix(GRADIENT))]
    others = sum(float(squares[name].sum()) for name in squares if name not in split)
    norms = []
    for rank in facts.case.mesh.group(0, axis):
        own = sum(_square(facts, name, squares[name], rank, [axis]) for name in split)
        norms.append(_root(own))
    return np.asarray(np.sum(norms) + np.sqrt(others))


def _copies(facts: Facts, name: str) -> dict[str, int]:
    """Along each axis, how many ranks hold the same piece of a gradient."""
    weight = facts.case.weights[name.removeprefix(GRADIENT)]
    pp = facts.sizes["pp"]
    stages = pp if weight.stages is None else len({each % pp for each in weight.stages})
    copies = {axis: facts.sizes[axis] for axis in ("dp", "cp", "ep", "tp")} | {"pp": stages}
    return copies | dict.fromkeys(facts.case.split_over(name.removeprefix(GRADIENT)), 1)


def _square(facts: Facts, name: str, square: Array, rank: int, axes: Sequence[str]) -> float:
    """The sum of squares of a weight, with the rank's own pieces on these axes and all pieces on the others."""
    weight = name.removeprefix(GRADIENT)
    own = set(axes)
    if "pp" in own and not facts.case.holds(weight, rank):
        return 0.0
    split = facts.case.split_over(weight)
    others = tuple(axis for axis in split if axis not in own)
    members = facts.case.mesh.group(rank, others) if others else (rank,)
    return sum(float(facts.piece(name, member, square).sum()) for member in members)


def _own_square(facts: Facts, squares: Mapping[str, Array], rank: int) -> float:
    held = [name for name in squares if facts.case.holds(name.removeprefix(GRADIENT), rank)]
    return sum(float(facts.piece(name, rank, squares[name]).sum()) for name in held)


def _root(square: float) -> Array:
    return np.asarray(np.sqrt(square))


def of_clipping(facts: Facts, name: str) -> Iterator[Cause]:
    """A gradient that is clipped by a wrong norm."""
    if facts.case.clip is None:
        return
    gradient = facts.gradient(name)
    for cause in of_norm(facts):
        words = cause.words.removeprefix("it is ")
        norm = cause.value

        def value(rank: int, norm: ByRank = norm) -> Array:
            return gradient * facts.clipping(float(norm(rank)))

        yield Cause(f"it is clipped by a wrong norm: {words}", value)
    yield Cause("it is not clipped", same(gradient))
    yield Cause(
        "it is scaled to the norm always, and not only where the norm is larger",
        same(gradient * facts.case.clip / facts.norm),
    )
    yield Cause(
        "each weight is clipped by its own norm",
        same(gradient * facts.clipping(float(np.linalg.norm(gradient)))),
    )
    largest = facts.case.clip
    yield Cause(
        "each number is cut to the limit: it is not the norm that is clipped",
        same(np.clip(gradient, -largest, largest)),
    )
