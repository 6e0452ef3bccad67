"""How many layers each stage of a pipeline has: as even as can be, or as the flags of Megatron-LM say.

Stages are numbered along the model: stage s lies on rank ``s % ranks``.  A first stage without layers has the embedding
alone, a last one the head and the loss.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, groupby
from typing import TypeVar

from parallelism.display.quantities import plural, shortened
from parallelism.models import TransformerSpec

Item = TypeVar("Item")
MOST_LETTERS = 20_000
"""More are not written by a layout: ``((t*1000)*1000)*1000``."""


def longer_stages(layers: int, stages: int) -> range:
    """The stages that have one layer more than the others; none if all have equally many."""
    more = layers % stages
    before = (stages - more + 1) // 2 if more else 0
    return range(before, before + more)


def even(layers: int, stages: int) -> tuple[int, ...]:
    """The layers of each stage, of stages that have equally many or one fewer.

    Those with fewer come first and last, because there are the embedding and the head.

    >>> even(126, 16)
    (7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7)
    """
    few, longer = layers // stages, longer_stages(layers, stages)
    return tuple(few + (stage in longer) for stage in range(stages))


@lru_cache(maxsize=1024)
def balanced_ends(layers: int, stages: int, last: float, first: float = 0.0) -> tuple[int, ...]:
    """`even`, where the first and the last stage do the work of so many further layers.

    The stage with most work has as little as can be; where several ways do, the one with most layers at the ends.

    >>> balanced_ends(32, 4, 2.4)
    (9, 8, 9, 6)
    """
    if stages == 1:
        return (layers,)
    inner = stages - 2
    if layers - 2 < inner:
        return even(layers, stages)
    # An end that costs more than all layers has one of them, however much it costs.
    last, first = min(last, layers), min(first, layers)
    found: list[tuple[float, int, int]] = []
    for at_last in range(1, layers - inner if inner else layers):
        left = layers - at_last
        at_first = _most_at_first(left, inner, first, at_last + last) if inner else left
        work = max([at_first + first, at_last + last, _most_of(left - at_first, inner)])
        found.append((work, -at_last - at_first, at_first))
    work, ends, at_first = min(found)
    between = layers + ends
    return (at_first, *(even(between, inner) if inner else ()), -ends - at_first)


def _most_at_first(layers: int, inner: int, first: float, work: float) -> int:
    """The most layers of the first of some stages, which does the work of ``first`` more, with the others of ``inner``
    stages: none has more work than it must, or than ``work``, which another stage has anyway."""
    ways = range(1, layers - inner + 1)
    # The more layers the first one has, the fewer the others have.
    place = bisect_left(ways, True, key=lambda own: own + first >= _most_of(layers - own, inner))
    least = min(
        max(own + first, _most_of(layers - own, inner)) for own in ways[max(0, place - 1) : place + 1]
    )
    return max(1, bisect_right(ways, max(least, work), key=lambda own: own + first))


def _most_of(layers: int, stages: int) -> int:
    """The most layers of one of these stages; 0 of none."""
    return -(-layers // stages) if stages else 0


def first_layers(counts: Sequence[int]) -> tuple[int, ...]:
    """The first layer of each stage."""
    return 0, *accumulate(counts[:-1])


def head_layers(spec: TransformerSpec) -> float:
    """How many layers the product of the head costs, in floating-point operations."""
    one, two = (replace(spec, layers=layers).forward_flops(1) for layers in (1, 2))
    return (2 * one - two) / (two - one)


def begins_of(counts: Sequence[int], block: str = "block") -> tuple[str, ...]:
    """The regions at which all stages but the first begin.  ``ValueError`` for one in the middle without a layer."""
    layers = sum(counts)
    empty = [stage for stage, count in enumerate(counts[1:-1], 1) if count < 1]
    if empty:
        raise ValueError(
            f"stage {empty[0]} of {len(counts)} would have no layer: {layers} layers are too few"
        )
    firsts = first_layers(counts)[1:]
    return tuple("head" if first == layers else f"{block}.{first}" for first in firsts)


def counts_of(begins: Sequence[str], layers: int) -> tuple[int, ...] | None:
    """The layers of stages that begin at these regions; None if some are neither blocks nor the head."""
    firsts = [0]
    for begin in begins:
        name, _, number = begin.rpartition(".")
        if begin != "head" and not (name and number.isdecimal()):
            return None
        firsts.append(layers if begin == "head" else int(number))
    ends = [*firsts[1:], layers]
    return tuple(end - first for first, end in zip(firsts, ends, strict=True))


def runs_of(values: Iterable[Item]) -> list[tuple[Item, int]]:
    """The runs of equal values, each as the value and its length."""
    return [(value, len(list(same))) for value, same in groupby(values)]


def runs_text(counts: Sequence[int]) -> str:
    """The layers of stages in words.

    >>> runs_text([7, 8, 8, 8, 7])
    '7, 3 x 8, 7'
    """
    return ", ".join(f"{times} x {count}" if times > 1 else str(count) for count, times in runs_of(counts))


def remark_of(spec: TransformerSpec, begins: Sequence[str]) -> str:
    """The numbers of layers of all stages in words, if they differ, and why the last has fewer; empty if all are equal."""
    counts = counts_of(begins, spec.layers)
    if counts is None or len(set(counts)) == 1:
        return ""
    fewer = max(counts) - counts[-1]
    why = (
        f"; the last stage has {plural(fewer, 'layer')} fewer, the head costs {head_layers(spec):.2g} layers"
    )
    return f"layers of the {len(counts)} stages: {runs_text(counts)}" + why * bool(fewer)


# -- as Megatron-LM's flags say ----------------------------------------------------------------------------------------


def with_ends(layers: int, ranks: int, chunks: int, first: int | None, last: int | None) -> tuple[int, ...]:
    """The first and the last rank have so many layers, the others equally many, or one fewer: see `even`.

    Each rank deals its layers to its ``chunks`` stages.  ``ValueError`` where too few are left for the others.
    """
    given = (first or 0) + (last or 0)
    others = ranks - (first is not None) - (last is not None)
    if given > layers or (others == 0) != (given == layers) or layers - given < others:
        raise ValueError(
            f"--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers take {given} of {layers} layers, "
            f"which leaves {max(0, layers - given)} for the other {plural(others, 'rank')}"
        )
    inner = even(layers - given, others) if others else ()
    of_ranks = [*([first] if first is not None else []), *inner, *([last] if last is not None else [])]
    dealt = [even(count, chunks) for count in of_ranks]
    if last is not None:
        dealt[-1] = dealt[-1][::-1]  # the stage with fewer is the last one of all
    return tuple(of_rank[chunk] for chunk in range(chunks) for of_rank in dealt)


def with_counted_ends(layers: int, stages: int, *, embedding: bool, loss: bool) -> tuple[int, ...]:
    """`even`, where the embedding, and the head with the loss, count as a layer each."""
    counts = [*even(layers + embedding + loss, stages)]
    counts[0] -= embedding
    counts[-1] -= loss
    return tuple(counts)


_LAYOUT = re.compile(r"[EtmL|,()]|\*[0-9]{1,6}")
_REPEATED = re.compile(r"\(([^()]*)\)(?:\*([0-9]+))?|([EtmL|])\*([0-9]+)")


def layout_counts(text: str, layers: int, next_tokens: int = 0) -> tuple[int, ...]:
    """The layers of each stage in a ``--pipeline-model-parallel-layout``: stages are parted by ``|``, ``E`` is the
    embedding, ``t`` a layer, ``m`` a module that predicts one more token, ``L`` the head and the loss; ``*3`` repeats a
    letter or a parenthesis.

    ``ValueError`` for a text that is no layout, and for one of another model.

    >>> layout_counts("Et*2|(tt|)*2t|L", 7)
    (2, 2, 2, 1, 0)
    """
    written = f"--pipeline-model-parallel-layout {shortened(text, 60)}"
    stages = _expanded(text, written).split("|")
    letters = "".join(stages)
    if not re.fullmatch("Et*m*L", letters):
        raise ValueError(f"{written} must have E first, then t, one for each layer, and L last")
    if (given := (letters.count("t"), letters.count("m"))) != (layers, next_tokens):
        raise ValueError(
            f"{written} has {given[0]} layers and {given[1]} modules of further tokens, the model {layers} and {next_tokens}"
        )
    if empty := [stage for stage, letters in enumerate(stages) if not letters]:
        raise ValueError(f"{written} has nothing in stage {empty[0]}")
    if "m" in letters and "m" in "".join(stages[:-1]):
        raise ValueError(f"{written} must have modules of further tokens in the last stage, beside L")
    return tuple(each.count("t") for each in stages)


def _expanded(text: str, written: str) -> str:
    """The letters of a layout, with what is repeated written out."""
    if "".join(_LAYOUT.findall(text)) != text:
        raise ValueError(f"{written} has other letters than E, t, m, L, |, parentheses and *3")
    letters = text.replace(",", "")
    while (repeated := _REPEATED.search(letters)) is not None:
        group, group_times, letter, letter_times = repeated.groups()
        once, times = (group, int(group_times or 1)) if letter is None else (letter, int(letter_times))
        if len(letters) + len(once) * times > MOST_LETTERS:
            raise ValueError(f"{written} has more than {MOST_LETTERS:,} letters")
        letters = letters[: repeated.start()] + once * times + letters[repeated.end() :]
    if wrong := next((each for each in letters if each in "()*"), None):
        raise ValueError(f"{written} has a {wrong} that belongs to nothing")
    return letters


def layout_text(counts: Sequence[int]) -> str:
    """The ``--pipeline-model-parallel-layout`` of stages with so many layers.

    >>> layout_text([1, 2, 2, 2, 0])
    'Et|(t*2|)*3L'
    """
    *inner, last = [_repeated("t", count) for count in counts]
    if not inner:
        return f"E{last}L"
    middle = ""
    for stage, times in runs_of(inner[1:]):
        middle += _repeated(f"({stage}|)", times) if times > 1 else f"{stage}|"
    return f"E{inner[0]}|{middle}{last}L"


def _repeated(text: str, times: int) -> str:
    return f"{text}*{times}" if times > 1 else text * times
