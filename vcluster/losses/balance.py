"""The usual mistakes of an auxiliary loss, such as one that balances experts, and of its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np

from vcluster.losses.cases import Array
from vcluster.losses.facts import Cause, Facts, mean, same
from vcluster.losses.means import factors, subsets


def of_balance(facts: Facts, name: str) -> Iterator[Cause]:
    """The mistakes of ``auxiliary``, or of ``auxiliary.grad.NAME``."""
    sizes, right = facts.sizes, facts.balanced(name)
    replicas, microbatches = facts.replicas_and_microbatches
    for chosen in subsets([level for level in facts.levels if level != "cp"]):
        where = " and ".join(chosen).replace("microbatches", "the microbatches")
        number = prod(sizes[level] for level in chosen)
        yield Cause(f"it is summed over {where}, and not averaged", same(right * number))
        yield Cause(f"it is averaged once too often over {where}", same(right / number))
    for axes in subsets([axis for axis in ("dp", "ep") if axis in facts.levels]):

        def own(rank: int, axes: tuple[str, ...] = axes) -> Array:
            index = facts.case.mesh.index(rank)
            mine = replicas
            for axis in axes:
                mine = [each for each in mine if each[axis] == index[axis]]
            return mean([facts.of_microbatch(name, each, number) for each in mine for number in microbatches])

        yield Cause(f"it is the replica's own: it is not averaged over {' and '.join(axes)}", own)
    for place, which in ((-1, "last"), (0, "first")):
        alone = [facts.of_microbatch(name, each, microbatches[place]) for each in replicas]
        yield Cause(f"only that of the {which} microbatch counts", same(mean(alone)))
    yield from _of_extents(facts, name)
    for words, factor in factors(facts, name):
        yield Cause(f"it is {words}", same(right * factor))
    yield Cause("it is missing", same(np.zeros_like(right)))


def _of_extents(facts: Facts, name: str) -> Iterator[Cause]:
    """An auxiliary loss of more or of fewer tokens at a time, or weighted by their number."""
    replicas, microbatches = facts.replicas_and_microbatches
    pieces = [(each, number) for each in replicas for number in microbatches]
    masks = [facts.mask(**each, microbatches=number) for each, number in pieces]
    values = [facts.part(name, mask) for mask in masks]
    counts = [int(mask.sum()) for mask in masks]
    if facts.case.auxiliary == "batch":
        yield Cause(
            "it is the mean of those of the microbatches, and not that of the whole batch", same(mean(values))
        )
    else:
        yield Cause(
            "it is that of the whole batch, and not the mean of those of the microbatches",
            same(facts.part(name, facts.case.whole.valid)),
        )
    weighted = sum(value * count for value, count in zip(values, counts, strict=True)) / sum(counts)
    yield Cause("it is weighted by the number of valid tokens: each microbatch counts alike", same(weighted))
    yield Cause(
        "it is divided by the number of valid tokens, and not by that of the microbatches of all replicas",
        same(np.sum(values, axis=0) / sum(counts)),
    )
    some = [value for value, count in zip(values, counts, strict=True) if count]
    yield Cause("it is averaged over those with a valid token only", same(mean(some)))
    together = [facts.part(name, facts.mask(microbatches=number)) for number in microbatches]
    yield Cause(
        "it is of each microbatch over all replicas, and not of that of each replica", same(mean(together))
    )
    alone = [facts.part(name, facts.mask(**each)) for each in replicas]
    yield Cause("it is of all microbatches of each replica together", same(mean(alone)))
    cut = facts.cut(facts.levels)
    yield Cause(
        "it is of the tokens of each rank of cp alone", same(mean([facts.part(name, mask) for mask in cut]))
    )
    owner = np.ones_like(facts.case.whole.valid)
    unmasked = (
        [facts.part(name, owner & _place(facts, each, number)) for each, number in pieces]
        if facts.case.auxiliary == "microbatch"
        else [facts.part(name, owner)]
    )
    yield Cause("the mask is not applied: padding counts", same(mean(unmasked)))


def _place(facts: Facts, replica: dict[str, int], number: int) -> Array:
    """All tokens of a microbatch of a replica, valid or not."""
    inside: Array = facts.places("microbatches") == number
    for axis, place in replica.items():
        inside = inside & (facts.places(axis) == place)
    return inside
