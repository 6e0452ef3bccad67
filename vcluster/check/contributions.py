"""What a wrong result is made of: whose elements are in it, how often, and the mistake that explains this.

The elements have such values (`cases`) that every sum of them can be read back, digit by digit: which ranks
contributed to it, and with which elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from parallelism.operation import ranks_in_words
from vcluster.check.cases import BASE, Array, Case, agrees, same_values
from vcluster.check.failures import Finding

_MOST_LINES = 4


def made_of(value: Any, expected: Any, size: int) -> str:
    """A value in words: ``x0[2] + 2 x1[2]``, where x1[2] is element 2 of the array of rank 1.

    A multiple of what the rank contributes to ``expected`` counts as contributed so many times.
    """
    digits, wanted = digits_of(np.asarray(value), size), digits_of(np.asarray(expected), size)
    if digits is None or wanted is None:
        return str(value)
    terms = []
    for rank, (digit, number) in enumerate(zip(digits.tolist(), wanted.tolist(), strict=True)):
        times = digit // number if number and digit % number == 0 else 1
        if digit:
            terms.append(f"{f'{times} ' if times > 1 else ''}x{rank}[{digit // times - 1}]")
    return " + ".join(terms) or "0"


def digits_of(output: Array, size: int) -> Array | None:
    """By element and rank, the sum of the numbers of the elements that the rank contributed; None: not such a sum.

    The number of element e is e + 1.
    """
    if output.dtype.kind not in "iuf":
        return None
    values = output.astype(np.float64)
    if (
        not np.all(np.isfinite(values))
        or np.any(values < 0)
        or np.any(values != np.round(values))
        or np.any(values >= float(BASE) ** size)
    ):
        return None
    whole = values.astype(np.int64)
    return np.stack([whole // BASE**rank % BASE for rank in range(size)], axis=-1)


def finding_of(
    case: Case,
    outputs: Sequence[Any],
    received: Sequence[int],
    *,
    all_rounded: bool = False,
) -> Finding:
    """Which ranks return something else, and the mistake that explains it.

    ``received`` counts messages by rank.  ``all_rounded`` says that the results of all cases are right up to the
    precision of float32: on 4 ranks alone, a sum that lacks the small numbers of rank 0 looks the same.
    """
    wrong = [rank for rank in range(case.size) if not agrees(outputs[rank], case.expected[rank])]
    lines = tuple(_line(case, rank, outputs[rank], all_rounded) for rank in wrong[:_MOST_LINES])
    lines += (f"... and {len(wrong) - _MOST_LINES} more ranks",) if len(wrong) > _MOST_LINES else ()
    sentence = (
        f"{ranks_in_words(wrong)} of {case.size} {'returns' if len(wrong) == 1 else 'return'} a wrong result"
    )
    return Finding(sentence, lines, _likely(case, outputs, wrong, received, all_rounded))


def _line(case: Case, rank: int, output: Any, all_rounded: bool) -> str:
    expected = case.expected[rank]
    if isinstance(expected, list):
        return f"rank {rank} should return a list of {len(expected)} arrays, one of each rank"
    if output is None:
        return f"rank {rank} returns None and should return an array of shape {expected.shape}"
    if isinstance(output, list | tuple | dict):
        return f"rank {rank} returns a {type(output).__name__} and should return an array of shape {expected.shape}"
    array = np.asarray(output)
    if array.shape != expected.shape:
        return f"rank {rank} returns shape {array.shape} and should return shape {expected.shape}"
    if array.dtype != expected.dtype and same_values(array, expected, case.size, array.dtype):
        return f"rank {rank} returns {array.dtype} and should return {expected.dtype}"
    place = tuple(int(i) for i in np.argwhere(array != expected)[0])
    piece = ""
    if case.kind.unit == "pieces" and len(array) >= case.size:
        parts = np.array_split(np.arange(len(array)), case.size)
        of = next(number for number, part in enumerate(parts) if place[0] in part)
        piece = f"piece {of}, "
    where = f"[{', '.join(map(str, place))}]" if place else "()"
    if all_rounded:
        return f"rank {rank}, {piece}element {where}: should hold {expected[place]:.0f}, holds {array[place]:.0f}"
    return (
        f"rank {rank}, {piece}element {where}: should hold {made_of(expected[place], expected[place], case.size)}, "
        f"holds {made_of(array[place], expected[place], case.size)}"
    )


def _likely(
    case: Case,
    outputs: Sequence[Any],
    wrong: Sequence[int],
    received: Sequence[int],
    all_rounded: bool,
) -> str:
    kind, ranks = case.kind, range(case.size)
    got = [rank for rank in ranks if case.expected[rank] is not None]
    if all(outputs[rank] is None for rank in got):
        return "the function returns nothing: a return is missing"
    if silent := [rank for rank in got if outputs[rank] is None]:
        return f"{ranks_in_words(silent)} returns nothing: every path through the function needs its return"
    if all(isinstance(outputs[rank], list | tuple) for rank in wrong) and not isinstance(
        case.expected[wrong[0]], list
    ):
        return "the result is a list of pieces that are not joined to one array"
    if any(
        isinstance(outputs[rank], list | tuple | dict) or isinstance(case.expected[rank], list)
        for rank in wrong
    ):
        return "what is returned is not of the type that it should be"
    arrays = {rank: np.asarray(outputs[rank]) for rank in got}
    expected = {rank: case.expected[rank] for rank in got}
    if arrays[wrong[0]].dtype != expected[wrong[0]].dtype and all(
        same_values(arrays[rank], expected[rank], case.size, arrays[rank].dtype) for rank in got
    ):
        return (
            f"the dtype changes: {arrays[wrong[0]].dtype} comes out where {expected[wrong[0]].dtype} went in"
        )
    if all_rounded:
        return (
            f"values are rounded: on the way they are float32, which is less precise than "
            f"{expected[wrong[0]].dtype}"
        )
    if told := _short(case, arrays, wrong, received) or _shapes(case, arrays, wrong, received):
        return told
    if kind.reduces and all(np.allclose(arrays[rank] * case.size, expected[rank]) for rank in got):
        return "a mean stands for a sum: the result is divided by the number of ranks"
    digits = {rank: digits_of(arrays[rank], case.size) for rank in got}
    if any(each is None for each in digits.values()):
        return (
            "the result is no sum of elements of the inputs: memory that was never filled, a product, or values "
            "that were rounded"
        )
    held = {rank: each for rank, each in digits.items() if each is not None}
    return (
        _of_sum(case, arrays, held, wrong, received)
        if kind.reduces
        else _of_copies(case, arrays, held, wrong, received)
    )


def _short(case: Case, arrays: dict[int, Array], wrong: Sequence[int], received: Sequence[int]) -> str:
    """Of pieces that are joined and are too few: which are there, and how many messages came."""
    size = case.size
    if not case.kind.joins or case.kind.cuts or any(arrays[rank].ndim != 1 for rank in wrong):
        return ""
    digits = {
        rank: digits_of(arrays[rank], size)
        for rank in wrong
        if len(case.expected[rank]) // size < len(arrays[rank]) < len(case.expected[rank]) and any(received)
    }
    there = {rank: set(np.argmax(each, axis=1).tolist()) for rank, each in digits.items() if each is not None}
    if not there or any(len(pieces) == size for pieces in there.values()):
        return ""
    some = next(iter(there))
    came = received[some]
    if came < size - 1:
        return (
            f"{'off by one: a step too few' if came == size - 2 else 'the steps end too early'}. Rank {some} "
            f"receives {came} of {size - 1} messages, and lacks the array of "
            f"{ranks_in_words(sorted(set(range(size)) - there[some]))}"
        )
    if all(rank not in pieces for rank, pieces in there.items()):
        return "the own piece is overwritten: the place for what arrives is wrong, and in some step it is the own place"
    return (
        f"what arrives overwrites what arrived before: {came} messages come, and rank {some} has the arrays of "
        f"{ranks_in_words(sorted(there[some]))} only. The place must change from step to step"
    )


def _shapes(case: Case, arrays: dict[int, Array], wrong: Sequence[int], received: Sequence[int]) -> str:
    """Of results of a wrong shape."""
    off = [rank for rank in wrong if arrays[rank].shape != case.expected[rank].shape]
    if not off:
        return ""
    first = off[0]
    shape, wanted, given = arrays[first].shape, case.expected[first].shape, case.inputs[first]
    own = given is not None and shape == given.shape
    if case.kind.joins and not case.kind.cuts and own:
        return (
            "only one piece is returned: the pieces of all ranks are not joined, or what arrives takes the place "
            "of the own one"
            if any(received)
            else "nothing is sent: each rank has its own array only"
        )
    if len(shape) == len(wanted) + 1:
        return "the pieces are stacked along a new dim, in place of joined along dim 0"
    if case.kind.cuts and own:
        return "the whole array is returned, in place of one block of it"
    if len(shape) == len(wanted) and shape[0] > wanted[0]:
        if case.kind.reduces:
            return "the arrays are joined, in place of added up"
        return "there are too many pieces: one is there twice"
    if len(shape) == len(wanted) and shape[0] < wanted[0]:
        if case.kind.reduces and not case.kind.cuts:
            return "only a piece of the array is returned: the pieces of the other ranks are not joined to it"
        return "a piece is missing, or elements at the end are lost where the length does not divide by the ranks"
    if shape == () and wanted:
        return "one number is returned, and an array should be: np.sum needs axis=0"
    return "the result has another shape"


def _of_sum(
    case: Case,
    arrays: dict[int, Array],
    held: dict[int, Array],
    wrong: Sequence[int],
    received: Sequence[int],
) -> str:
    """Of reductions: how often each rank's element is in each sum."""
    size = case.size
    own = {rank: digits_of(np.asarray(case.expected[rank]), size) for rank in arrays}
    counts: dict[int, Array] = {}
    for rank in arrays:
        numbers = own[rank]
        assert numbers is not None
        if np.any(held[rank] % np.maximum(numbers, 1)):
            return _other_block(case, arrays, wrong)
        counts[rank] = (held[rank] // np.maximum(numbers, 1)).reshape(-1, size)
    if len(wrong) < len(arrays) and all(_is_own(counts[rank], rank) for rank in wrong):
        return (
            f"only {ranks_in_words(sorted(set(arrays) - set(wrong)))} has the sum: it does not come back to the "
            "others"
        )
    if case.kind.cuts and (told := _other_block(case, arrays, wrong, strict=True)):
        return told
    uniform = {rank: each[0] for rank, each in counts.items() if len(each) and np.all(each == each[0])}
    if all(rank in uniform for rank in wrong):
        return _of_counts({rank: uniform[rank] for rank in wrong}, size, received)
    complete = {rank: np.all(each == 1, axis=1) for rank, each in counts.items()}
    over = any(np.any(counts[rank] > 1) for rank in wrong)
    if over:
        return (
            "parts that are summed already are added once more: the second half of the algorithm adds where it "
            "should copy (sum in place of copy)"
        )
    if all(np.any(complete[rank]) for rank in wrong):
        shares = [float(np.mean(complete[rank])) for rank in wrong]
        if max(shares) < 2 / size + 1e-9:
            return (
                "each rank has the whole sum of one piece only: the second half, which brings the pieces to all "
                "ranks, is missing"
            )
        return (
            "some pieces are complete and some are not: the second half stops too early, or begins with the wrong "
            "piece (off by one)"
        )
    if received[wrong[0]] >= size:
        return (
            "the second half begins with the wrong piece (off by one): pieces that are not complete take the place "
            "of others"
        )
    return "no piece is complete: the piece that is sent, or the one that is added to, is off by one"


def _is_own(counts: Array, rank: int) -> bool:
    return bool(np.all(counts[:, rank] == 1) and np.all(np.delete(counts, rank, axis=1) == 0))


def _of_counts(counts: dict[int, Array], size: int, received: Sequence[int]) -> str:
    """The mistake, if all elements of a rank have the same contributions: ``counts[rank][source]``."""
    some, each = next(iter(counts.items()))
    relative = {tuple(np.roll(row, -rank).tolist()) for rank, row in counts.items()}
    if all(not row.any() for row in counts.values()):
        return "the result is still zero: nothing is added to it"
    if all(row[rank] == 1 and row.sum() == 1 for rank, row in counts.items()):
        return "each rank returns its own array: what it receives is not added, or nothing is received"
    if all(row[rank] == 0 and np.all(np.delete(row, rank) == 1) for rank, row in counts.items()):
        return "the own array is forgotten: the sum has all others only"
    if all(row.sum() == 1 for row in counts.values()):
        return "a copy stands for a sum: what arrives replaces the value, in place of being added to it"
    if len({tuple(row.tolist()) for row in counts.values()}) == 1 and len(set(each.tolist())) == 1:
        return f"every array is counted {each[0]} times: the sum is summed once more"
    if all(row[rank] == 2 and np.all(np.delete(row, rank) == 1) for rank, row in counts.items()):
        return (
            f"the own array is counted twice: one step too many, in which it comes back to its rank (a rank "
            f"receives {received[some]} messages)"
            if received[some] >= size
            else "the own array is counted twice: it is in the start value, and is added again"
        )
    if any(row.max() > 1 for row in counts.values()):
        if all(
            row[rank] == row.max() and np.all(np.delete(row, rank) == np.delete(row, rank)[0])
            for rank, row in counts.items()
        ):
            return "the own array is added in every step, in place of what arrives"
        if all(np.count_nonzero(row) <= 2 for row in counts.values()):
            return "the own array is sent in every step, and the same array arrives again and again"
        return (
            "some arrays are counted several times: a rank passes on its running total, in place of what has just "
            "arrived"
        )
    missing = {rank: [source for source in range(size) if row[source] == 0] for rank, row in counts.items()}
    if all(len(each) == 1 for each in missing.values()):
        if len({each[0] for each in missing.values()}) == 1:
            source = missing[some][0]
            return f"the array of rank {source} is in no result: off by one in a range of ranks"
        if len(relative) == 1:
            return (
                f"off by one: a step too few. Rank {some} lacks the array of rank {missing[some][0]}, the one that "
                "has the longest way"
            )
    if len(relative) == 1 and all(np.count_nonzero(row) == 2 for row in counts.values()):
        return (
            "each rank has only its own array and that of a neighbour: there is one step, and more are needed"
        )
    return f"arrays are missing: rank {some} lacks those of {ranks_in_words(missing[some])}, the steps end too early"


def _other_block(case: Case, arrays: dict[int, Array], wrong: Sequence[int], *, strict: bool = False) -> str:
    """Of reductions that are cut into blocks: whether each rank has the block of another one."""
    size = case.size
    for by in range(1, size):
        if case.kind.cuts and all(
            arrays[rank].shape == case.expected[(rank + by) % size].shape
            and np.array_equal(arrays[rank], case.expected[(rank + by) % size])
            for rank in arrays
        ):
            off = by if by <= size // 2 else by - size
            return (
                f"off by one: rank j has block j {'+' if off > 0 else '-'} {abs(off)}, and should have block j"
                if abs(off) == 1
                else f"rank j has the block of rank j {'+' if off > 0 else '-'} {abs(off)}"
            )
    if case.kind.cuts and all(np.array_equal(arrays[rank], arrays[wrong[0]]) for rank in arrays):
        return "all ranks have the same block"
    return (
        ""
        if strict
        else (
            "elements of different places are added to each other: sender and receiver mean different pieces"
        )
    )


def _of_copies(
    case: Case,
    arrays: dict[int, Array],
    held: dict[int, Array],
    wrong: Sequence[int],
    received: Sequence[int],
) -> str:
    """Of what is joined or copied: each element should be of one rank."""
    size, kind = case.size, case.kind
    if any(np.any(np.count_nonzero(held[rank], axis=-1) > 1) for rank in wrong):
        return "a sum stands for a copy: what arrives is added to what is there"
    if not kind.joins:
        if all(not held[rank].any() for rank in wrong):
            return f"{ranks_in_words(wrong)} still has zeros: the data of the root does not reach it"
        own = [
            rank
            for rank in wrong
            if held[rank].any() and set(np.flatnonzero(held[rank].any(axis=0))) == {rank}
        ]
        if own == list(wrong) and kind.gives == "all":
            return "a rank returns its own array"
        if own == list(wrong):
            return (
                f"{ranks_in_words(wrong)} {'returns' if len(wrong) == 1 else 'return'} the own array: that of the "
                "root does not come so far"
            )
        if kind.cuts and all(np.array_equal(arrays[rank], arrays[0]) for rank in arrays):
            return "all ranks get the same block"
        if kind.cuts:
            for by in range(1, size):
                if all(np.array_equal(arrays[rank], case.expected[(rank + by) % size]) for rank in arrays):
                    return f"off by one: rank j has the block of rank (j + {by}) modulo {size}"
        return "the array of another rank than the root arrives: is the number of the root used?"
    origin = {
        rank: [int(np.argmax(row)) if row.any() else -1 for row in held[rank].reshape(-1, size)]
        for rank in wrong
    }
    blocks = {rank: _blocks(case, origin[rank]) for rank in wrong}
    some = wrong[0]
    if any(-1 in each for each in origin.values()):
        if all(set(np.flatnonzero(np.array(blocks[rank]) == -1)) == {rank} for rank in wrong):
            return "the own piece is forgotten: its place is still empty"
        empty = [place for place, source in enumerate(blocks[some]) if source == -1]
        return (
            f"on rank {some} the places of {ranks_in_words(empty)} are still empty: the steps end too early"
        )
    if all(each == list(range(size)) for each in blocks.values()):
        return _wrong_elements(case, arrays, wrong)
    if all(sorted(each) == list(range(size)) for each in blocks.values()):
        if all(each == list(range(size))[::-1] for each in blocks.values()):
            return "the pieces are joined in reverse order"
        if all(each == [(2 * rank - place) % size for place in range(size)] for rank, each in blocks.items()):
            return (
                "the pieces are put on the wrong side of the own one: what comes from s ranks away on one side "
                "stands s places away on the other; on rank "
                f"{some} they come from {', '.join(map(str, blocks[some]))}"
            )
        return (
            "the pieces are joined in the order in which they arrive, and not in the order of ranks: on rank "
            f"{some} they come from {', '.join(map(str, blocks[some]))}"
        )
    if all(len(set(each)) == 1 and each[0] == rank for rank, each in blocks.items()):
        return "each rank has copies of its own piece only: nothing that arrives is used"
    if all(len(set(each)) <= 2 for each in blocks.values()):
        return "the own piece is sent in every step, in place of the one that has just arrived"
    return (
        f"a piece stands at the place of another one: on rank {some} they come from "
        f"{', '.join(map(str, blocks[some]))} (off by one in the number of the piece)"
    )


def _blocks(case: Case, origin: list[int]) -> list[int]:
    """The source of each block of a joined result; -2 for one that is mixed."""
    parts = np.array_split(np.array(origin), case.size)
    return [-2 if len(set(part.tolist())) > 1 else int(part[0]) if len(part) else -2 for part in parts]


def _wrong_elements(case: Case, arrays: dict[int, Array], wrong: Sequence[int]) -> str:
    """Each block is of the right rank, and is the wrong one."""
    if not case.kind.cuts:
        return "a piece has the elements of another place of its array"
    some = wrong[0]
    digits = digits_of(arrays[some], case.size)
    assert digits is not None
    numbers = [int(part.max()) - 1 for part in np.array_split(digits, case.size)]
    given = case.inputs[some]
    length = 1 if given is None else max(1, given.size // case.size)
    found = [number // length for number in numbers]
    if len(set(found)) > 1 and all(block == source for source, block in enumerate(found)):
        return "each sender keeps to the block of its own number: the block must depend on the rank that it is sent to"
    if len(set(found)) == 1 and found[0] == 0:
        return (
            "each sender sends its block 0 to all ranks: the block must depend on the rank that it is sent to"
        )
    return f"the wrong blocks arrive: rank {some} has blocks {', '.join(map(str, found))} of ranks 0, 1, ..."
