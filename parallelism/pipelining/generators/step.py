"""The types of schedule generators and of the steps that they yield."""

from collections.abc import Callable, Iterable, Iterator

Work = tuple[int, str, int]
"""``(stage, kind, microbatch)``; the kind is F forward, B backward, I backward for the input, W for the weights."""

Slot = Work | tuple[Work, Work]
"""One piece of work, or a forward and a backward that overlap."""

Generator = Callable[..., Iterator[Slot]]
"""``(rank, ranks, microbatches) -> steps of that rank``.  A fourth argument ``chunks`` is the number of stages on each
rank, if it is more than 1."""


def only_first(microbatches: int, steps: Iterable[Slot]) -> Iterator[Slot]:
    """The steps of the first ``microbatches`` microbatches.  An overlapped pair may be reduced to one work."""
    for step in steps:
        pair = step if len(step) == 2 else (step,)
        works = [work for work in pair if work[2] < microbatches]
        if works:
            yield works[0] if len(works) == 1 else (works[0], works[1])
