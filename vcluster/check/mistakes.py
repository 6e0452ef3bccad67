"""What is wrong with the results of a collective, and the mistake that explains it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from parallelism.algorithms import CollectiveKind
from parallelism.operation import ranks_in_words
from vcluster.check.cases import Case, agrees, same_values
from vcluster.check.contributions import digits_of, made_of
from vcluster.check.failures import Finding
from vcluster.check.mistakes_in_sums import OF_SUMS
from vcluster.check.results import Mistake, Results, first_of, is_one_block, shift

_MOST_LINES = 4


def _returns(ranks: Sequence[int]) -> str:
    return "returns" if len(ranks) == 1 else "return"


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
    results = Results(case, outputs, wrong, received, all_rounded)
    return Finding(sentence, lines, first_of(_mistakes_in(case.kind), results))


def _mistakes_in(kind: CollectiveKind) -> tuple[Callable[[Results], str], ...]:
    """The mistakes that can be made in a collective of this kind, in the order in which they are looked for."""
    if kind.reduces:
        return _OF_ALL + OF_SUMS
    return _OF_ALL + (_OF_JOINED if kind.joins else _OF_COPIES)


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
        which = next(number for number, part in enumerate(parts) if place[0] in part)
        piece = f"piece {which}, "
    where = f"[{', '.join(map(str, place))}]" if place else "()"
    wanted, got = f"{expected[place]:.0f}", f"{array[place]:.0f}"
    if not all_rounded:
        wanted, got = (made_of(value[place], expected[place], case.size) for value in (expected, array))
    return f"rank {rank}, {piece}element {where}: should hold {wanted}, holds {got}"


# -- of any collective -------------------------------------------------------------------------------------------------


def _silent(results: Results) -> str:
    silent = [rank for rank in results.due if results.outputs[rank] is None]
    if silent == results.due:
        return "the function returns nothing: a return is missing"
    if silent:
        return f"{ranks_in_words(silent)} {_returns(silent)} nothing: every path through the function needs its return"
    return ""


def _other_type(results: Results) -> str:
    pairs = [(results.outputs[rank], results.case.expected[rank]) for rank in results.wrong]
    if all(isinstance(output, list | tuple) for output, _ in pairs) and not isinstance(pairs[0][1], list):
        return "the result is a list of pieces that are not joined to one array"
    if any(isinstance(output, list | tuple | dict) or isinstance(wanted, list) for output, wanted in pairs):
        return "what is returned is not of the type that it should be"
    return ""


def _other_dtype(results: Results) -> str:
    expected, arrays = results.case.expected, results.arrays
    came, went = arrays[results.wrong[0]].dtype, expected[results.wrong[0]].dtype
    if came != went and all(
        same_values(array, expected[rank], results.size, array.dtype) for rank, array in arrays.items()
    ):
        return f"the dtype changes: {came} comes out where {went} went in"
    if results.all_rounded:
        return f"values are rounded: on the way they are float32, which is less precise than {went}"
    return ""


def _too_few_pieces(results: Results) -> str:
    """Of pieces that are joined and are too few: which are there, and how many messages came."""
    size, kind, arrays = results.size, results.case.kind, results.arrays
    if not kind.joins or kind.cuts or any(arrays[rank].ndim != 1 for rank in results.wrong):
        return ""
    known = {}
    for rank in results.wrong if any(results.received) else ():
        whole = len(results.case.expected[rank])
        digits = digits_of(arrays[rank], size) if whole // size < len(arrays[rank]) < whole else None
        if digits is not None:
            known[rank] = set(np.argmax(digits, axis=1).tolist())
    if not known or any(len(pieces) == size for pieces in known.values()):
        return ""
    some = next(iter(known))
    came = results.received[some]
    if came < size - 1:
        return (
            f"{'off by one: a step too few' if came == size - 2 else 'the steps end too early'}. Rank {some} "
            f"receives {came} of {size - 1} messages, and lacks the array of "
            f"{ranks_in_words(sorted(set(range(size)) - known[some]))}"
        )
    if all(rank not in pieces for rank, pieces in known.items()):
        return "the own piece is overwritten: the place for what arrives is wrong, and in some step it is the own place"
    return (
        f"what arrives overwrites what arrived before: {came} messages come, and rank {some} has the arrays of "
        f"{ranks_in_words(sorted(known[some]))} only. The place must change from step to step"
    )


def _other_shape(results: Results) -> str:
    case, arrays = results.case, results.arrays
    first = next((rank for rank in results.wrong if arrays[rank].shape != case.expected[rank].shape), None)
    if first is None:
        return ""
    shape, wanted, given = arrays[first].shape, case.expected[first].shape, case.inputs[first]
    own = given is not None and shape == given.shape
    same_dims = len(shape) == len(wanted)
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


def _is_mean(results: Results) -> bool:
    pairs = ((array * results.size, results.case.expected[rank]) for rank, array in results.arrays.items())
    return results.case.kind.reduces and all(np.allclose(one, other) for one, other in pairs)


_OF_ALL: tuple[Callable[[Results], str], ...] = (
    _silent,
    _other_type,
    _other_dtype,
    _too_few_pieces,
    _other_shape,
    Mistake[Results](_is_mean, "a mean stands for a sum: the result is divided by the number of ranks"),
    Mistake[Results](
        lambda results: not results.held,
        "the result is no sum of elements of the inputs: memory that was never filled, a product, or values that were "
        "rounded",
    ),
)


# -- of what is copied or joined: each element should be of one rank ---------------------------------------------------


def _still_zero(results: Results) -> str:
    if any(results.held[rank].any() for rank in results.wrong):
        return ""
    return f"{ranks_in_words(results.wrong)} still has zeros: the data of the root does not reach it"


def _own_array(results: Results) -> str:
    wrong = results.wrong
    if any(
        np.flatnonzero(results.held[rank].reshape(-1, results.size).any(axis=0)).tolist() != [rank]
        for rank in wrong
    ):
        return ""
    if results.case.kind.gives == "all":
        return "a rank returns its own array"
    return f"{ranks_in_words(wrong)} {_returns(wrong)} their own array: that of the root never reaches them"


def _shifted(results: Results) -> str:
    by = shift(results) if results.case.kind.cuts else 0
    return f"off by one: rank j has the block of rank (j + {by}) modulo {results.size}" if by else ""


_SUMMED = Mistake[Results](
    lambda results: any(np.any(np.count_nonzero(results.held[rank], axis=-1) > 1) for rank in results.wrong),
    "a sum stands for a copy: what arrives is added to what is there",
)
_OF_COPIES: tuple[Callable[[Results], str], ...] = (
    _SUMMED,
    _still_zero,
    _own_array,
    Mistake[Results](is_one_block, "all ranks get the same block"),
    _shifted,
    Mistake[Results](
        lambda results: True,
        "the array of another rank than the root arrives: is the number of the root used?",
    ),
)


def _empty_places(results: Results) -> str:
    if not any(-1 in sources for sources in results.origin.values()):
        return ""
    empty = {}
    for rank, blocks in results.blocks.items():
        empty[rank] = [place for place, source in enumerate(blocks) if source == -1]
    if all(places == [rank] for rank, places in empty.items()):
        return "the own piece is forgotten: its place is still empty"
    some = next((rank for rank, places in empty.items() if places), None)
    if some is None:
        return "some places are still empty, and others of the same piece are not: only a part of it arrives"
    places = ranks_in_words(empty[some])
    return f"on rank {some} the places of {places} are still empty: the steps end too early"


def _wrong_elements(results: Results) -> str:
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


def _sources(results: Results) -> str:
    some = results.wrong[0]
    return f"on rank {some} they come from {', '.join(map(str, results.blocks[some]))}"


def _wrong_order(results: Results) -> str:
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


def _own_is_left(results: Results) -> str:
    """Each wrong place has the own block of the rank still, and others have what should have arrived."""
    missing = {}
    for rank, blocks in results.blocks.items():
        missing[rank] = [place for place, source in enumerate(blocks) if source != place]
        if {blocks[place] for place in missing[rank]} != {rank} or len(missing[rank]) > results.size - 2:
            return ""
    some = results.wrong[0]
    return (
        f"on rank {some} an own block still stands at the place of {ranks_in_words(missing[some])}, from where nothing "
        "is kept: a step too few, or in a range of ranks one is left out"
    )


_OF_JOINED: tuple[Callable[[Results], str], ...] = (
    _SUMMED,
    _empty_places,
    _wrong_elements,
    Mistake[Results](
        lambda results: results.joined_from(lambda rank: range(results.size)[::-1]),
        "the pieces are joined in reverse order",
    ),
    _wrong_order,
    Mistake[Results](
        lambda results: results.joined_from(lambda rank: [rank] * results.size),
        "each rank has copies of its own piece only: nothing that arrives is used",
    ),
    _own_is_left,
    Mistake[Results](
        lambda results: all(len(set(blocks)) <= 2 for blocks in results.blocks.values()),
        "the own piece is sent in every step, in place of the one that has just arrived",
    ),
    lambda results: (
        f"a piece stands at the place of another one: {_sources(results)} (off by one in the number of the piece)"
    ),
)
