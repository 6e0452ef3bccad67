"""The algorithms of the collectives at one size, as data: which position sends which chunks to which, step by step.

`algorithm` makes an `Algorithm` from a record.  An `Algorithm` cuts the buffer of a collective into numbered *chunks*
and lists, step by step, the messages that move them.  It moves nothing itself.  `parallelism.collectives.buffers`
defines the chunks and the result of a message, vcluster runs the steps over channels, and
`parallelism.collectives.explanation` shows them.  Bytes and messages are counted from the steps.
`parallelism.algorithms.closed_forms` has the formulas of the textbooks.

    ring all_reduce over 4, step 1          each position adds what arrives; after 3 steps position j
    0 --[3]--> 1 --[0]--> 2 --[1]--> 3      has the whole sum of chunk j, and 3 more steps pass the
    ^-------------[2]----------------'      sums round the same way

All messages of a step are simultaneous: a source sends what it held before the step.

**Order of reduction.**  The reducing messages that reach a position in one step are combined with the
position's own value in order of position.  So `direct` and `naive` combine in group order;
`recursive_doubling`, `halving_doubling` and `tree` as one balanced tree over the group order; only `ring`
starts elsewhere (see `Algorithm.order`).  With each algorithm every position ends with the same bits.

Positions are places in a group, 0 to size-1.  Powers of two: `recursive_doubling`, `halving_doubling`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from parallelism.algorithms.direct import DIRECT, direct_of
from parallelism.algorithms.doublings import DOUBLINGS
from parallelism.algorithms.kinds import BLOCKS_OF_ALL, Pairs, kind_of
from parallelism.algorithms.patterns import Rotation, Stage
from parallelism.algorithms.records import CollectiveAlgorithm
from parallelism.algorithms.registry import ON_CHANGE, Registry
from parallelism.algorithms.rings import RINGS
from parallelism.algorithms.trees import TREES

ALGORITHMS: Registry[CollectiveAlgorithm] = Registry(
    "algorithm", lambda record: [(kind, record.name) for kind in record.kinds]
)
"""The records, by the names of kind and algorithm."""


ALGORITHMS.add_own(*DIRECT, *RINGS, *DOUBLINGS, *TREES)


class Transfer(NamedTuple):
    """One message: ``source`` sends ``chunks`` to ``target``, which adds them to its own or takes them over."""

    source: int
    target: int
    chunks: tuple[int, ...]
    reduce: bool = False


Step = tuple[Transfer, ...]


@dataclass(frozen=True)
class Algorithm:
    """The steps of one algorithm of one collective over ``size`` positions.  `algorithm` returns it.

    ``chunks`` is the number of pieces of the buffer.  ``order`` describes the order of its reductions (empty if it
    reduces nothing).  Frozen, hashable, picklable.

    >>> ring = algorithm("all_reduce", "ring", 4)
    >>> ring.chunks, len(ring.steps), ring.steps[0][0]
    (4, 6, Transfer(source=0, target=1, chunks=(3,), reduce=True))
    >>> ring.bytes_sent([10, 10, 10, 10])
    (60, 60, 60, 60)
    """

    collective: str
    name: str
    size: int
    root: int
    chunks: int
    order: str
    pairs: Pairs = ()
    record: CollectiveAlgorithm | None = field(default=None, repr=False)
    _stages: tuple[Stage, ...] = field(default=(), repr=False, compare=False)

    @property
    def chunks_of_buffer(self) -> int:
        """How many chunks the buffer S of the closed forms has; the chunks of an all_to_all are those of g buffers."""
        kind = kind_of(self.collective)
        if kind.paired:
            return 1
        return max(1, self.chunks // self.size if kind.unit == BLOCKS_OF_ALL else self.chunks)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Every message, step by step."""
        return self._within(range(self.size), range(self.size))

    def sends(self, position: int) -> tuple[Step, ...]:
        """For each step, the messages that ``position`` sends."""
        return _view(self, position, False)

    def receives(self, position: int) -> tuple[Step, ...]:
        """For each step, the messages that ``position`` receives, ordered by source."""
        return _view(self, position, True)

    def sources(self, position: int, chunk_nbytes: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """(source, bytes) for each position that sends ``position`` a message, by the byte sizes of the chunks."""
        return tuple((peer, _weight(chunks, chunk_nbytes)) for peer, chunks in _peers(self, position, True))

    def targets(self, position: int, chunk_nbytes: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """(target, bytes) for each position that gets a message from ``position``."""
        return tuple((peer, _weight(chunks, chunk_nbytes)) for peer, chunks in _peers(self, position, False))

    def bytes_sent(self, chunk_nbytes: Sequence[int]) -> tuple[int, ...]:
        """Bytes sent, by position."""
        return self._totals(0, lambda chunks: _weight(chunks, chunk_nbytes))

    def bytes_received(self, chunk_nbytes: Sequence[int]) -> tuple[int, ...]:
        """Bytes received, by position."""
        return self._totals(1, lambda chunks: _weight(chunks, chunk_nbytes))

    def messages_sent(self) -> tuple[int, ...]:
        """Messages sent, by position."""
        return self._totals(0, lambda chunks: 1)

    def moved(self, chunk_nbytes: Sequence[int]) -> dict[tuple[int, int], tuple[int, int]]:
        """By (source, target), how many messages go from one to the other, and their bytes."""
        everyone = range(self.size)
        moved = dict[tuple[int, int], tuple[int, int]]()
        rotations = [stage for stage in self._stages if isinstance(stage, Rotation)]
        if rotations:
            nbytes = np.array(chunk_nbytes, np.int64)
            around = np.zeros(self.size, np.int64)
            for rotation in rotations:
                around += np.roll(nbytes, rotation.k)
            moved.update(
                ((p, (p + 1) % self.size), (len(rotations), n)) for p, n in enumerate(around.tolist())
            )
        for stage in self._stages:
            if not isinstance(stage, Rotation):
                for source, target, chunks in stage.moves(everyone, everyone):
                    count, before = moved.get((source, target), (0, 0))
                    moved[source, target] = count + 1, before + _weight(chunks, chunk_nbytes)
        return moved

    def _within(self, sources: range, targets: range) -> tuple[Step, ...]:
        steps = []
        for stage in self._stages:
            steps.append(tuple(Transfer(*move, stage.reduce) for move in stage.moves(sources, targets)))
        return tuple(steps)

    def _totals(self, end: int, weigh: Callable[[tuple[int, ...]], int]) -> tuple[int, ...]:
        everyone, totals = range(self.size), [0] * self.size
        for stage in self._stages:
            for move in stage.moves(everyone, everyone):
                position: Any = move[end]
                totals[position] += weigh(move[2])
        return tuple(totals)

    def __reduce__(self) -> tuple[Any, ...]:  # functions cannot be pickled
        pairs = self.pairs if kind_of(self.collective).paired else None
        return _algorithm, (self.collective, self.name, self.size, self.root, pairs)


@lru_cache(maxsize=8192)
def _view(plan: Algorithm, position: int, arriving: bool) -> tuple[Step, ...]:
    here = range(position, position + 1)
    everyone = range(plan.size)
    return plan._within(everyone, here) if arriving else plan._within(here, everyone)


@lru_cache(maxsize=8192)
def _peers(plan: Algorithm, position: int, arriving: bool) -> tuple[tuple[int, tuple[int, ...]], ...]:
    peers: dict[int, tuple[int, ...]] = {}
    for transfer in chain.from_iterable(_view(plan, position, arriving)):
        peer = transfer.source if arriving else transfer.target
        peers[peer] = peers.get(peer, ()) + transfer.chunks
    return tuple(sorted(peers.items()))


def _weight(chunks: tuple[int, ...], chunk_nbytes: Sequence[int]) -> int:
    return chunk_nbytes[chunks[0]] if len(chunks) == 1 else sum(map(chunk_nbytes.__getitem__, chunks))


@lru_cache(maxsize=1024)
def records_of(kind: str, size: int) -> tuple[CollectiveAlgorithm, ...]:
    """The algorithms of a kind that apply to a size, in the order in which they were added."""
    added = [
        record
        for (own_kind, _), record in ALGORITHMS.records.items()
        if own_kind == kind and record.fits(size)
    ]
    return tuple(added if (kind, "direct") in ALGORITHMS.records else [direct_of(kind_of(kind)), *added])


ON_CHANGE.append(records_of.cache_clear)


def record_of(kind: str, name: str, size: int, *, run: bool = False) -> CollectiveAlgorithm:
    """The record; ``ValueError`` with the names that apply.  ``run``: only those that can be run."""
    applying: Iterable[CollectiveAlgorithm] = records_of(kind, size)
    if not run:
        applying = sorted(applying, key=lambda each: each.preference)
    for record in applying:
        if record.name == name and (record.steps is not None or not run):
            return record
    known = ALGORITHMS.records.get((kind, name))
    why = ""
    if known is not None:
        why = " (it is only priced)" if known.fits(size) else f" (it needs {known.needs})"
    names = ", ".join(each.name for each in applying if each.steps is not None or not run)
    raise ValueError(f"no algorithm {name!r} for {kind} over {size}{why}; these apply: {names}")


def algorithms(collective: str, size: int) -> tuple[str, ...]:
    """The names of the algorithms that run a collective over ``size`` positions; the first is the default."""
    return tuple(record.name for record in records_of(collective, size) if record.steps is not None)


def algorithm(
    collective: str,
    name: str | None,
    size: int,
    *,
    root: int = 0,
    pairs: Iterable[tuple[int, int]] | None = None,
) -> Algorithm:
    """An algorithm by name (None: ``direct``), for ``size`` positions; asked again, the same object.

    ``root`` is a position and belongs to broadcast, reduce, scatter and gather; ``pairs``, (source, target)
    positions with no source and no target twice, belong to permute.  Raises ``ValueError`` for a name that
    does not apply, naming those that do, and for a root or a pair outside the group.

    >>> algorithm("all_reduce", "rings", 3)
    Traceback (most recent call last):
    ValueError: no algorithm 'rings' for all_reduce over 3; these apply: direct, naive, ring, tree
    """
    return _algorithm(
        collective, name or "direct", size, root, None if pairs is None else tuple(map(tuple, pairs))
    )


@lru_cache(maxsize=256)
def _algorithm(collective: str, name: str, size: int, root: int, pairs: Pairs | None) -> Algorithm:
    if size < 1:
        raise ValueError(f"{collective} needs at least 1 position, got {size}")
    record = record_of(collective, name, size, run=True)
    kind = kind_of(collective)
    for is_wrong, reason in (
        (not 0 <= root < size, f"root of {collective} must be a position from 0 to {size - 1}, got {root}"),
        (root and not kind.rooted, f"{collective} has no root, got root={root}"),
        ((pairs is not None) != kind.paired, f"pairs belong to permute: {collective} got pairs={pairs}"),
    ):
        if is_wrong:
            raise ValueError(reason)
    if pairs:
        _check_pairs(pairs, size)
    assert record.steps is not None
    stages = tuple(record.steps(size, root, pairs or ())) if size > 1 else ()
    return Algorithm(
        collective, name, size, root, record.chunks(size), record.order, pairs or (), record, stages
    )


ON_CHANGE.append(_algorithm.cache_clear)


def _check_pairs(pairs: Pairs, size: int) -> None:
    for pair in pairs:
        if len(pair) != 2 or not all(0 <= p < size for p in pair):
            raise ValueError(
                f"a pair of permute is (source, target), positions from 0 to {size - 1}; got {pair}"
            )
    for end, word in enumerate(("source", "target")):
        counts = Counter(pair[end] for pair in pairs)
        twice = [position for position, count in counts.items() if count > 1]
        if twice:
            raise ValueError(f"permute has position {min(twice)} as {word} of more than one pair in {pairs}")
