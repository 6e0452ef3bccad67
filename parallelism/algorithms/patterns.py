"""The patterns that algorithms share: of messages (rings, doublings, trees, all to all), and of phases for pricing.

A `Stage` is the messages of one step; all of a stage either reduce or replace.  A `Phase` is messages as arrays, each
with its part of S.  Positions are 0 to g-1, d is a distance, k a step.  The records of the algorithms compose both.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from parallelism.arrays import Ints

Move = tuple[int, int, tuple[int, ...]]
"""(source, target, chunks)."""


class Listed(NamedTuple):
    """A step with few messages, one by one."""

    listed: tuple[Move, ...]
    reduce: bool = False

    def moves(self, sources: range, targets: range) -> Iterable[Move]:
        return [move for move in self.listed if move[0] in sources and move[1] in targets]


class Pairwise(NamedTuple):
    """A step in which up to every pair talks, as a rule: 256 positions have 65,280 pairs, and callers ask for few."""

    chunks: Callable[[int, int], tuple[int, ...] | None]
    reduce: bool = False

    def moves(self, sources: range, targets: range) -> Iterator[Move]:
        chunks = self.chunks
        for source in sources:
            for target in targets:
                if source != target and (sent := chunks(source, target)) is not None:
                    yield source, target, sent


class Rotation(NamedTuple):
    """A step of a ring of g positions: each position p passes chunk p - k on to p + 1."""

    g: int
    k: int
    reduce: bool = False

    def moves(self, sources: range, targets: range) -> Iterator[Move]:
        g = self.g
        senders = sources if len(sources) <= len(targets) else ((target - 1) % g for target in targets)
        for p in senders:
            if p in sources and (p + 1) % g in targets:
                yield p, (p + 1) % g, ((p - self.k) % g,)


Stage = Listed | Pairwise | Rotation
Stages = list[Stage]


class Phase(NamedTuple):
    """Messages by position that are sent together, ``times`` over; each carries its part of S over ``whole``.

    ``piped``: the phase stands for a chain that S goes down in pieces, so many at a time as suits.
    """

    times: int
    sources: Ints
    targets: Ints
    parts: Ints
    whole: int
    piped: bool = False

    @property
    def sendings(self) -> int:
        """How many times the messages carry their parts: once down a chain, in however many pieces."""
        return 1 if self.piped else self.times


def ring_reduce_scatter(g: int) -> Stages:
    """Chunk j starts at j+1 and gathers a term at every position on its way to j."""
    return [Rotation(g, k, True) for k in range(1, g)]


def ring_all_gather(g: int) -> Stages:
    """Each position passes on the chunk that came last, its own one first."""
    return [Rotation(g, k) for k in range(g - 1)]


def ring_all_to_all(g: int) -> Stages:
    """After k steps p holds the blocks from p-k, and passes on those for positions behind it."""
    stages: Stages = []
    for k in range(g - 1):
        moves = []
        for p in range(g):
            passed = tuple((p - k) % g * g + (p + further) % g for further in range(1, g - k))
            moves.append((p, (p + 1) % g, passed))
        stages.append(Listed(tuple(moves)))
    return stages


def lg(g: int) -> int:
    """The base-2 logarithm of g, rounded up."""
    return (g - 1).bit_length()


def distances(g: int) -> list[int]:
    """1, 2, 4, ... below g."""
    return [1 << k for k in range(lg(g))]


def recursive_doubling(g: int) -> Stages:
    """The whole buffer with the partner at distance 1, 2, 4, ...: blocks of neighbours, then of blocks."""
    return [_swapped(g, d, lambda p, d: (0,), reduce=True) for d in distances(g)]


def recursive_halving(g: int) -> Stages:
    """Rabenseifner's vector halving, distance doubling: p gives half of its chunks, those its partner has mod 2d."""
    return [
        _swapped(g, d, lambda p, d: range((p ^ d) % (2 * d), g, 2 * d), reduce=True) for d in distances(g)
    ]


def halving_undone(g: int) -> Stages:
    """Vector doubling, distance halving: the steps of `recursive_halving` backwards."""
    return [_swapped(g, d, lambda p, d: range(p % (2 * d), g, 2 * d)) for d in distances(g)[::-1]]


def block_doubling(g: int) -> Stages:
    """Each position gives all it has: blocks of 1, 2, 4, ... neighbours."""
    return [_swapped(g, d, lambda p, d: range(p - p % d, p - p % d + d)) for d in distances(g)]


def _swapped(g: int, d: int, chunks: Callable[[int, int], Iterable[int]], reduce: bool = False) -> Listed:
    """The step in which each position p gives these chunks to its partner at distance d."""
    return Listed(tuple((p, p ^ d, tuple(chunks(p, d))) for p in range(g)), reduce)


def binomial_broadcast(g: int, root: int) -> Stages:
    """Distance doubling, counted from the root: 0->1, then 0->2 1->3, then 0->4 1->5 2->6 3->7."""
    stages: Stages = []
    for d in distances(g):
        senders = range(root, root + min(d, g - d))
        stages.append(Listed(tuple((p % g, (p + d) % g, (0,)) for p in senders)))
    return stages


def joins(g: int, root: int) -> list[list[tuple[int, int, range]]]:
    """Neighbouring blocks of positions join two by two; the root represents its block, the first position any other.

    Each level is a list of (source, target, the source's block).  The blocks are intervals, so a reduction has the
    order of the group for every root.
    """
    blocks = [(p, range(p, p + 1)) for p in range(g)]
    levels = []
    while len(blocks) > 1:
        level, joined = [], []
        for (left, a), (right, b) in zip(blocks[::2], blocks[1::2], strict=False):
            level.append((left, right, a) if right == root else (right, left, b))
            joined.append((level[-1][1], range(a.start, b.stop)))
        levels.append(level)
        blocks = joined + blocks[len(joined) * 2 :]
    return levels


def binomial_reduce(g: int, root: int) -> Stages:
    """The source of each join gives its term to the target, which adds it."""
    stages: Stages = []
    for level in joins(g, root):
        stages.append(Listed(tuple((source, target, (0,)) for source, target, _ in level), True))
    return stages


def binomial_gather(g: int, root: int) -> Stages:
    """The source of each join gives its block to the target."""
    stages: Stages = []
    for level in joins(g, root):
        stages.append(Listed(tuple((source, target, tuple(block)) for source, target, block in level)))
    return stages


def binomial_scatter(g: int, root: int) -> Stages:
    """The joins backwards: each target gives its source the block that it will give."""
    stages: Stages = []
    for level in reversed(joins(g, root)):
        stages.append(Listed(tuple((target, source, tuple(block)) for source, target, block in level)))
    return stages


def joined(g: int, root: int) -> list[tuple[Ints, Ints, Ints]]:
    """`joins` as arrays: by level the sources, the targets, and how many positions the block of each source has."""
    levels = []
    for d in distances(g):
        targets = np.arange(0, g - d, 2 * d)
        sources = targets + d
        blocks = np.minimum(d, g - sources)
        pair, place = divmod(root, 2 * d)
        if pair < len(targets):
            if place >= d:
                sources[pair], blocks[pair] = targets[pair], d
            targets[pair] = root
        levels.append((sources, targets, blocks))
    return levels


# -- phases: a message carries ``part`` of S over ``whole`` ------------------------------------------------------------


def around(g: int, distance: int, part: int, whole: int, times: int = 1) -> Phase:
    """A phase in which every position p sends to position p + distance."""
    here, there = _ends(g, distance)
    return Phase(times, here, there, np.full(g, part), whole)


@lru_cache(maxsize=64)
def _ends(g: int, distance: int) -> tuple[Ints, Ints]:
    """All positions, and those at a distance from them; read-only, because many phases share them."""
    here = np.arange(g)
    there = (here + distance) % g
    here.flags.writeable = there.flags.writeable = False
    return here, there


@dataclass(frozen=True, slots=True)
class Around:
    """The phases in which every position p sends to p + distance: one for each of the parts, ``times`` over."""

    g: int
    distance: int
    parts: Sequence[int]
    whole: int
    times: int = 1

    def __iter__(self) -> Iterator[Phase]:
        return (around(self.g, self.distance, part, self.whole, self.times) for part in self.parts)


@dataclass(frozen=True, slots=True)
class Swap:
    """The phase in which positions at a distance exchange.  Both g and the distance are powers of two."""

    g: int
    distance: int
    part: int
    whole: int

    def __iter__(self) -> Iterator[Phase]:
        here = np.arange(self.g)
        yield Phase(1, here, here ^ self.distance, np.full(self.g, self.part), self.whole)


@dataclass(frozen=True, slots=True)
class Turns:
    """The phases in which every position sends to every other, the nearest first: `around` at each distance."""

    g: int
    part: int
    whole: int

    def __iter__(self) -> Iterator[Phase]:
        return (around(self.g, distance, self.part, self.whole) for distance in range(1, self.g))


@dataclass(frozen=True, slots=True, eq=False)
class OneByOne:
    """The phases of single messages of one part, each after the one before."""

    sources: Ints
    targets: Ints
    whole: int

    def __iter__(self) -> Iterator[Phase]:
        part = np.ones(1, np.int64)
        return (
            Phase(1, self.sources[i : i + 1], self.targets[i : i + 1], part, self.whole)
            for i in range(len(self.sources))
        )


def with_root(g: int, root: int, away: bool, whole: int) -> OneByOne:
    """The root sends to one position after the other (``away``), or receives from them."""
    others = np.arange(root + 1, root + g) % g
    own = np.full(g - 1, root)
    return OneByOne(own, others, whole) if away else OneByOne(others, own, whole)


Rule = Phase | Around | Swap | Turns | OneByOne
"""A phase, or many by one rule."""


def each_phase(rules: Iterable[Rule]) -> Iterator[Phase]:
    """All phases in order: a rule that stands for many yields each of them."""
    for rule in rules:
        yield from (Phase._make(rule),) if isinstance(rule, tuple) else rule


def listed(moves: list[tuple[int, int, int]], whole: int, times: int = 1, piped: bool = False) -> Phase:
    """A phase of messages given one by one: (source, target, parts)."""
    ends = np.array(moves, np.int64).reshape(-1, 3)
    return Phase(times, ends[:, 0], ends[:, 1], ends[:, 2], whole, piped)
