"""A resharding plan carried out in NumPy, on the list of all ranks' arrays, from what its steps say.

Written from the definitions of the moves alone.  A step joins only the ranks of one group along its axes; each takes
from the others, element by element, what it has not itself, and that is what it receives.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from layouts import OPS, blocks

IDENTITIES = {"sum": 0, "prod": 1}


def play(plan, arrays):
    """What every rank holds in the end; what each received and its largest array, in bytes; and each step's bytes."""
    itemsize = plan.dtype.itemsize
    peaks = [array.nbytes for array in arrays]
    received = []
    for step in plan.steps:
        before, after = (blocks(layout, plan.shape, plan.mesh) for layout in (step.before, step.after))
        got = [0] * plan.mesh.size
        results = list(arrays)
        for group in plan.mesh.groups(step.axes):
            held = {rank: dict(zip(before[rank].flat, arrays[rank].flat, strict=True)) for rank in group}
            wanted = {rank: after[rank].reshape(-1).tolist() for rank in group}
            for rank, (values, count) in _MOVES[step.kind](step, group, held, wanted).items():
                results[rank] = np.array(values, plan.dtype).reshape(after[rank].shape)
                got[rank] = count * itemsize
        arrays = results
        peaks = [max(peak, array.nbytes) for peak, array in zip(peaks, arrays, strict=True)]
        received.append(tuple(got))
    return arrays, received, peaks


def _slice(step, group, held, wanted):
    forgets = [axis for axis in step.after.partial if axis in step.axes]
    found = {}
    for rank in group:
        if any(step.mesh.index(rank)[axis] for axis in forgets):
            found[rank] = [IDENTITIES[step.after.op]] * len(wanted[rank]), 0
        else:
            found[rank] = [held[rank][i] for i in wanted[rank]], 0
    return found


def _taken(step, group, held, wanted):
    """all_gather, all_to_all, exchange: what a rank lacks, from whoever has it."""
    everything = {}
    for rank in reversed(group):
        everything.update(held[rank])
    return {
        rank: (
            [held[rank].get(i, everything[i]) for i in wanted[rank]], sum(i not in held[rank] for i in wanted[rank])
        )
        for rank in group
    }


def _permute(step, group, held, wanted):
    found, givers = {}, Counter()
    for rank in group:
        giver = step.donors[rank]
        assert giver in group
        if giver != rank:
            givers[giver] += 1
            assert list(held[giver]) == wanted[rank], "a whole block"
        found[rank] = [held[giver][i] for i in wanted[rank]], len(wanted[rank]) * (giver != rank)
    assert max(givers.values(), default=0) <= 1, "nobody gives twice"
    return found


def _reduce_scatter(step, group, held, wanted):
    others = len(group) - 1
    return {rank: (_reduced(step, group, held, wanted[rank]), others * len(wanted[rank])) for rank in group}


def _all_reduce(step, group, held, wanted):
    """Each reduces a piece for all, and gets the other pieces."""
    found = {}
    for position, rank in enumerate(group):
        piece = len(np.array_split(np.arange(len(wanted[rank])), len(group))[position])
        count = (len(group) - 1) * piece + len(wanted[rank]) - piece
        found[rank] = _reduced(step, group, held, wanted[rank]), count
    return found


def _reduced(step, group, held, wanted):
    op = OPS[step.before.op]
    values = [held[group[0]][i] for i in wanted]
    for rank in group[1:]:
        values = [op(value, held[rank][i]) for value, i in zip(values, wanted, strict=True)]
    return values


_MOVES = {
    "slice": _slice, "all_gather": _taken, "all_to_all": _taken, "exchange": _taken, "permute": _permute,
    "reduce_scatter": _reduce_scatter, "all_reduce": _all_reduce,
}
