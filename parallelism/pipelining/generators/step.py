"""What a generator of a schedule yields, and what it is called with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

Work = tuple[int, str, int]
"""A stage, the kind of its work (F forward, B backward, I backward for the input, W for the weights), a microbatch."""

Step = Work | tuple[Work, Work]
"""A piece of work, or a forward and a backward that overlap."""

Generator = Callable[..., Iterator[Step]]
"""``(rank, ranks, microbatches)`` -> the steps of that rank; ``chunks``, the stages on each rank, comes fourth
where it is more than 1."""


def only_first(microbatches: int, steps: Iterable[Step]) -> Iterator[Step]:
    """The steps without the microbatches from this one on; of an overlapped pair the one that is left."""
    for step in steps:
        works = [work for work in (step if len(step) == 2 else (step,)) if work[2] < microbatches]
        if works:
            yield works[0] if len(works) == 1 else (works[0], works[1])
