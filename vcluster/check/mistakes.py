"""What is wrong with the results of a collective, and the mistake that explains it.

A mistake is a function that says its sentence if it explains all wrong results, and an empty text otherwise.  They stand
in lists, in the order in which they are tried: the first that explains the results is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np

from parallelism.operation import ranks_in_words
from vcluster.check.cases import Array, Case, agrees, same_values
from vcluster.check.contributions import digits_of, made_of
from vcluster.check.failures import Finding

_MOST_LINES = 4

Found = TypeVar("Found")


@dataclass(frozen=True)
class Mistake(Generic[Found]):
    """A mistake whose sentence is always the same."""

    explains: Callable[[Found], Any]
    sentence: str

    def __call__(self, found: Found) -> str:
        return self.sentence if self.explains(found) else ""


def first_of(mistakes: Iterable[Callable[[Found], str]], found: Found) -> str:
    """The sentence of the first mistake that explains what was found; empty if none does."""
    return next(filter(None, (mistake(found) for mistake in mistakes)), "")


@dataclass(frozen=True, eq=False)
class _Results:
    """What the ranks return, beside what they should."""

    case: Case
    outputs: Sequence[Any]
    wrong: Sequence[int]
    """The ranks whose results are wrong."""
    received: Sequence[int]
    """The number of messages, by rank."""
    all_rounded: bool

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.case.size

    @cached_property
    def arrays(self) -> dict[int, Array]:
        """The results of the ranks that should have one."""
        return {rank: np.asarray(self.outputs[rank]) for rank in self.due}

    @cached_property
    def due(self) -> list[int]:
        """The ranks that should have a result."""
        return [rank for rank in range(self.size) if self.case.expected[rank] is not None]

    @cached_property
    def held(self) -> dict[int, Array]:
        """The digits of the results; empty if one is no sum of elements."""
        digits = {rank: digits_of(array, self.size) for rank, array in self.arrays.items()}
        found = {rank: each for rank, each in digits.items() if each is not None}
        return found if len(found) == len(digits) else {}

    @cached_property
    def counts(self) -> dict[int, Array]:
        """By element and source, how often it is in a sum; empty if elements of different places are in one."""
        counts = {}
        for rank, held in self.held.items():
            numbers = digits_of(np.asarray(self.case.expected[rank]), self.size)
            assert numbers is not None
            numbers = np.maximum(numbers, 1)
            if np.any(held % numbers):
                return {}
            counts[rank] = (held // numbers).reshape(-1, self.size)
        return counts

    @cached_property
    def origin(self) -> dict[int, list[int]]:
        """Of what is joined: the source of each element; -1 where there is none."""
        sources = {}
        for rank in self.wrong:
            rows = self.held[rank].reshape(-1, self.size)
            sources[rank] = np.where(rows.any(axis=1), rows.argmax(axis=1), -1).tolist()
        return sources

    @cached_property
    def blocks(self) -> dict[int, list[int]]:
        """Of what is joined: the source of each block; -2 for one that is mixed."""
        return {
            rank: [_one_of(part) for part in np.array_split(of, self.size)]
            for rank, of in self.origin.items()
        }

    def joined_from(self, sources: Callable[[int], Sequence[int]]) -> bool:
        """Whether the blocks of each rank are of these sources."""
        return all(blocks == list(sources(rank)) for rank, blocks in self.blocks.items())


def _one_of(part: Array) -> int:
    return int(part[0]) if len(part) and np.all(part == part[0]) else -2


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
    sentence = f"{ranks_in_words(wrong)} of {case.size} {_returns(wrong)} a wrong result"
    results = _Results(case, outputs, wrong, received, all_rounded)
    mistakes = _OF_ALL + (_OF_SUMS if case.kind.reduces else _OF_JOINED if case.kind.joins else _OF_COPIES)
    return Finding(sentence, lines, first_of(mistakes, results))


def _returns(ranks: Sequence[int]) -> str:
    return "returns" if len(ranks) == 1 else "return"


def _line(case: Case, rank: int, output: Any, all_rounded: bool) -> str:
    expected = case.expected[rank]
    if isinstance(expected, list):
        return f"rank {rank} should return a list of {len(expected)} arrays, one of each rank"
    if output is None or isinstance(output, list | tuple | dict):
        what = "None" if output is None else f"a {type(output).__name__}"
        return f"rank {rank} returns {what} and should return an array of shape {expected.shape}"
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
    wanted, got = f"{expected[place]:.0f}", f"{array[place]:.0f}"
    if not all_rounded:
        wanted, got = (made_of(value[place], expected[place], case.size) for value in (expected, array))
    return f"rank {rank}, {piece}element {where}: should hold {wanted}, holds {got}"


# -- of any collective -------------------------------------------------------------------------------------------------


def _silent(results: _Results) -> str:
    silent = [rank for rank in results.due if results.outputs[rank] is None]
    if silent == results.due:
        return "the function returns nothing: a return is missing"
    if silent:
        return f"{ranks_in_words(silent)} {_returns(silent)} nothing: every path through the function needs its return"
    return ""


def _other_type(results: _Results) -> str:
    pairs = [(results.outputs[rank], results.case.expected[rank]) for rank in results.wrong]
    if all(isinstance(output, list | tuple) for output, _ in pairs) and not isinstance(pairs[0][1], list):
        return "the result is a list of pieces that are not joined to one array"
    if any(isinstance(output, list | tuple | dict) or isinstance(wanted, list) for output, wanted in pairs):
        return "what is returned is not of the type that it should be"
    return ""


def _other_dtype(results: _Results) -> str:
    expected, arrays = results.case.expected, results.arrays
    came, went = arrays[results.wrong[0]].dtype, expected[results.wrong[0]].dtype
    if came != went and all(
        same_values(array, expected[rank], results.size, array.dtype) for rank, array in arrays.items()
    ):
        return f"the dtype changes: {came} comes out where {went} went in"
    if results.all_rounded:
        return f"values are rounded: on the way they are float32, which is less precise than {went}"
    return ""


def _too_few_pieces(results: _Results) -> str:
    """Of pieces that are joined and are too few: which are there, and how many messages came."""
    size, kind, arrays = results.size, results.case.kind, results.arrays
    if not kind.joins or kind.cuts or any(arrays[rank].ndim != 1 for rank in results.wrong):
        return ""
    there = {}
    for rank in results.wrong if any(results.received) else ():
        whole = len(results.case.expected[rank])
        digits = digits_of(arrays[rank], size) if whole // size < len(arrays[rank]) < whole else None
        if digits is not None:
            there[rank] = set(np.argmax(digits, axis=1).tolist())
    if not there or any(len(pieces) == size for pieces in there.values()):
        return ""
    some = next(iter(there))
    came = results.received[some]
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


def _other_shape(results: _Results) -> str:
    case, arrays = results.case, results.arrays
    first = next((rank for rank in results.wrong if arrays[rank].shape != case.expected[rank].shape), None)
    if first is None:
        return ""
    shape, wanted, given = arrays[first].shape, case.expected[first].shape, case.inputs[first]
    own, same_dims = given is not None and shape == given.shape, len(shape) == len(wanted)
    if case.kind.joins and not case.kind.cuts and own:
        return (
            "only one piece is returned: the pieces of all ranks are not joined, or what arrives takes the place "
            "of the own one"
            if any(results.received)
            else "nothing is sent: each rank has its own array only"
        )
    if len(shape) == len(wanted) + 1:
        return "the pieces are stacked along a new dim, in place of joined along dim 0"
    if case.kind.cuts and own:
        return "the whole array is returned, in place of one block of it"
    if same_dims and shape[0] > wanted[0]:
        if case.kind.reduces:
            return "the arrays are joined, in place of added up"
        return "there are too many pieces: one is there twice"
    if same_dims and shape[0] < wanted[0]:
        if case.kind.reduces and not case.kind.cuts:
            return "only a piece of the array is returned: the pieces of the other ranks are not joined to it"
        return "a piece is missing, or elements at the end are lost where the length does not divide by the ranks"
    if shape == () and wanted:
        return "one number is returned, and an array should be: np.sum needs axis=0"
    return "the result has another shape"


def _is_mean(results: _Results) -> bool:
    pairs = ((array * results.size, results.case.expected[rank]) for rank, array in results.arrays.items())
    return results.case.kind.reduces and all(np.allclose(one, other) for one, other in pairs)


_OF_ALL: tuple[Callable[[_Results], str], ...] = (
    _silent,
    _other_type,
    _other_dtype,
    _too_few_pieces,
    _other_shape,
    Mistake[_Results](_is_mean, "a mean stands for a sum: the result is divided by the number of ranks"),
    Mistake[_Results](
        lambda results: not results.held,
        "the result is no sum of elements of the inputs: memory that was never filled, a product, or values that were "
        "rounded",
    ),
)


# -- of reductions: how often each rank's element is in each sum -------------------------------------------------------


def _other_block(results: _Results) -> str:
    """Of reductions that are cut into blocks: whether each rank has the block of another one."""
    size = results.size
    if not results.case.kind.cuts:
        return ""
    by = _shift(results)
    if by:
        off = by if by <= size // 2 else by - size
        other = f"j {'+' if off > 0 else '-'} {abs(off)}"
        if abs(off) == 1:
            return f"off by one: rank j has block {other}, and should have block j"
        return f"rank j has the block of rank {other}"
    return "all ranks have the same block" if _is_one_block(results) else ""


def _is_one_block(results: _Results) -> bool:
    first, *others = results.arrays.values()
    return results.case.kind.cuts and all(np.array_equal(array, first) for array in others)


def _shift(results: _Results) -> int:
    """By how many ranks all blocks are shifted; 0 if they are not."""
    for by in range(1, results.size):
        others = {rank: results.case.expected[(rank + by) % results.size] for rank in results.arrays}
        if all(np.array_equal(array, others[rank]) for rank, array in results.arrays.items()):
            return by
    return 0


def _not_brought_back(results: _Results) -> str:
    right = sorted(set(results.arrays) - set(results.wrong))
    for rank in results.wrong:
        own = np.arange(results.size) == rank
        if not right or np.any(results.counts[rank] != own):
            return ""
    return f"only {ranks_in_words(right)} has the sum: it does not come back to the others"


def _of_counts(results: _Results) -> str:
    """The mistake, if all elements of a rank have the same contributions."""
    rows = {}
    for rank in results.wrong:
        counts = results.counts[rank]
        if not len(counts) or np.any(counts != counts[0]):
            return ""
        rows[rank] = counts[0]
    return first_of(_OF_ROWS, _Rows(rows, results.size, results.received))


def _second_half(results: _Results) -> str:
    """Of an algorithm in two halves, whose pieces are summed in the first one and joined in the second."""
    size, some = results.size, results.wrong[0]
    shares = [float(np.mean(np.all(results.counts[rank] == 1, axis=1))) for rank in results.wrong]
    if all(shares):
        if max(shares) < 2 / size + 1e-9:
            return (
                "each rank has the whole sum of one piece only: the second half, which brings the pieces to all "
                "ranks, is missing"
            )
        return (
            "some pieces are complete and some are not: the second half stops too early, or begins with the wrong "
            "piece (off by one)"
        )
    if results.received[some] >= size:
        return (
            "the second half begins with the wrong piece (off by one): pieces that are not complete take the place "
            "of others"
        )
    return "no piece is complete: the piece that is sent, or the one that is added to, is off by one"


_OF_SUMS: tuple[Callable[[_Results], str], ...] = (
    _other_block,
    Mistake[_Results](
        lambda results: not results.counts,
        "elements of different places are added to each other: sender and receiver mean different pieces",
    ),
    _not_brought_back,
    _of_counts,
    Mistake[_Results](
        lambda results: any(np.any(results.counts[rank] > 1) for rank in results.wrong),
        "parts that are summed already are added once more: the second half of the algorithm adds where it should copy "
        "(sum in place of copy)",
    ),
    _second_half,
)


# -- ... if all elements of a rank have the same contributions ---------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Rows:
    """By rank, how often it has the element of each source."""

    rows: dict[int, Array]
    size: int
    received: Sequence[int]

    @property
    def some(self) -> int:
        """A rank whose result is wrong."""
        return next(iter(self.rows))

    @property
    def repeated(self) -> bool:
        """Whether an element is there several times."""
        return any(row.max() > 1 for row in self.rows.values())

    @property
    def alike(self) -> bool:
        """Whether all ranks have the same of themselves and of their neighbours."""
        return len({tuple(np.roll(row, -rank).tolist()) for rank, row in self.rows.items()}) == 1

    def each(self, holds: Callable[[int, Array], Any]) -> bool:
        """Whether something holds of all ranks: of how often they have their own elements, and those of others."""
        return all(holds(int(row[rank]), np.delete(row, rank)) for rank, row in self.rows.items())


def _summed_again(found: _Rows) -> str:
    times = {number for row in found.rows.values() for number in row.tolist()}
    return (
        f"every array is counted {times.pop()} times: the sum is summed once more" if len(times) == 1 else ""
    )


def _own_twice(found: _Rows) -> str:
    if not found.each(lambda own, others: own == 2 and np.all(others == 1)):
        return ""
    came = found.received[found.some]
    if came >= found.size:
        return (
            "the own array is counted twice: one step too many, in which it comes back to its rank (a rank receives "
            f"{came} messages)"
        )
    return "the own array is counted twice: it is in the start value, and is added again"


def _missing(found: _Rows) -> str:
    missing = {rank: np.flatnonzero(row == 0).tolist() for rank, row in found.rows.items()}
    some = max(missing, key=lambda rank: len(missing[rank]) > 0)  # the first one that lacks an array
    if all(len(each) == 1 for each in missing.values()):
        source = missing[some][0]
        if all(each == [source] for each in missing.values()):
            return f"the array of rank {source} is in no result: off by one in a range of ranks"
        if found.alike:
            return (
                f"off by one: a step too few. Rank {some} lacks the array of rank {source}, the one that has the "
                "longest way"
            )
    if found.alike and np.count_nonzero(found.rows[some]) == 2:
        return (
            "each rank has only its own array and that of a neighbour: there is one step, and more are needed"
        )
    return f"arrays are missing: rank {some} lacks those of {ranks_in_words(missing[some])}, the steps end too early"


_OF_ROWS: tuple[Callable[[_Rows], str], ...] = (
    Mistake[_Rows](
        lambda found: found.each(lambda own, others: own == 0 and not others.any()),
        "the result is still zero: nothing is added to it",
    ),
    Mistake[_Rows](
        lambda found: found.each(lambda own, others: own == 1 and not others.any()),
        "each rank returns its own array: what it receives is not added, or nothing is received",
    ),
    Mistake[_Rows](
        lambda found: found.each(lambda own, others: own == 0 and np.all(others == 1)),
        "the own array is forgotten: the sum has all others only",
    ),
    Mistake[_Rows](
        lambda found: found.each(lambda own, others: own + others.sum() == 1),
        "a copy stands for a sum: what arrives replaces the value, in place of being added to it",
    ),
    _summed_again,
    _own_twice,
    Mistake[_Rows](
        lambda found: (
            found.repeated
            and found.each(lambda own, others: own >= others.max() and np.all(others == others[0]))
        ),
        "the own array is added in every step, in place of what arrives",
    ),
    Mistake[_Rows](
        lambda found: found.repeated and all(np.count_nonzero(row) <= 2 for row in found.rows.values()),
        "the own array is sent in every step, and the same array arrives again and again",
    ),
    Mistake[_Rows](
        lambda found: found.repeated,
        "some arrays are counted several times: a rank passes on its running total, in place of what has just arrived",
    ),
    _missing,
)


# -- of what is copied or joined: each element should be of one rank ---------------------------------------------------


def _still_zero(results: _Results) -> str:
    if any(results.held[rank].any() for rank in results.wrong):
        return ""
    return f"{ranks_in_words(results.wrong)} still has zeros: the data of the root does not reach it"


def _own_array(results: _Results) -> str:
    wrong = results.wrong
    if any(
        np.flatnonzero(results.held[rank].reshape(-1, results.size).any(axis=0)).tolist() != [rank]
        for rank in wrong
    ):
        return ""
    if results.case.kind.gives == "all":
        return "a rank returns its own array"
    return f"{ranks_in_words(wrong)} {_returns(wrong)} the own array: that of the root does not come so far"


def _shifted(results: _Results) -> str:
    by = _shift(results) if results.case.kind.cuts else 0
    return f"off by one: rank j has the block of rank (j + {by}) modulo {results.size}" if by else ""


_SUMMED = Mistake[_Results](
    lambda results: any(np.any(np.count_nonzero(results.held[rank], axis=-1) > 1) for rank in results.wrong),
    "a sum stands for a copy: what arrives is added to what is there",
)
_OF_COPIES: tuple[Callable[[_Results], str], ...] = (
    _SUMMED,
    _still_zero,
    _own_array,
    Mistake[_Results](_is_one_block, "all ranks get the same block"),
    _shifted,
    Mistake[_Results](
        lambda results: True,
        "the array of another rank than the root arrives: is the number of the root used?",
    ),
)


def _empty_places(results: _Results) -> str:
    if not any(-1 in sources for sources in results.origin.values()):
        return ""
    empty = {
        rank: [place for place, of in enumerate(blocks) if of == -1]
        for rank, blocks in results.blocks.items()
    }
    if all(places == [rank] for rank, places in empty.items()):
        return "the own piece is forgotten: its place is still empty"
    some = next((rank for rank, places in empty.items() if places), None)
    if some is None:
        return "some places are still empty, and others of the same piece are not: only a part of it arrives"
    places = ranks_in_words(empty[some])
    return f"on rank {some} the places of {places} are still empty: the steps end too early"


def _wrong_elements(results: _Results) -> str:
    """Each block is of the right rank, and is the wrong one."""
    if not results.joined_from(lambda rank: range(results.size)):
        return ""
    if not results.case.kind.cuts:
        return "a piece has the elements of another place of its array"
    some = results.wrong[0]
    given = results.case.inputs[some]
    length = 1 if given is None else max(1, given.size // results.size)
    found = [(int(part.max()) - 1) // length for part in np.array_split(results.held[some], results.size)]
    should = "the block must depend on the rank that it is sent to"
    if len(found) > 1 and found == list(range(len(found))):
        return f"each sender keeps to the block of its own number: {should}"
    if not any(found):
        return f"each sender sends its block 0 to all ranks: {should}"
    return f"the wrong blocks arrive: rank {some} has blocks {', '.join(map(str, found))} of ranks 0, 1, ..."


def _sources(results: _Results) -> str:
    some = results.wrong[0]
    return f"on rank {some} they come from {', '.join(map(str, results.blocks[some]))}"


def _wrong_order(results: _Results) -> str:
    size = results.size
    if results.joined_from(lambda rank: [(2 * rank - place) % size for place in range(size)]):
        return (
            "the pieces are put on the wrong side of the own one: what comes from s ranks away on one side stands s "
            f"places away on the other; {_sources(results)}"
        )
    if all(sorted(blocks) == list(range(size)) for blocks in results.blocks.values()):
        return (
            "the pieces are joined in the order in which they arrive, and not in the order of ranks: "
            f"{_sources(results)}"
        )
    return ""


_OF_JOINED: tuple[Callable[[_Results], str], ...] = (
    _SUMMED,
    _empty_places,
    _wrong_elements,
    Mistake[_Results](
        lambda results: results.joined_from(lambda rank: range(results.size)[::-1]),
        "the pieces are joined in reverse order",
    ),
    _wrong_order,
    Mistake[_Results](
        lambda results: results.joined_from(lambda rank: [rank] * results.size),
        "each rank has copies of its own piece only: nothing that arrives is used",
    ),
    Mistake[_Results](
        lambda results: all(len(set(blocks)) <= 2 for blocks in results.blocks.values()),
        "the own piece is sent in every step, in place of the one that has just arrived",
    ),
    lambda results: (
        f"a piece stands at the place of another one: {_sources(results)} (off by one in the number of the piece)"
    ),
)
