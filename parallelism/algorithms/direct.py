"""``direct`` and ``naive``: every giver sends its array to each member that needs it, all at the same time.

`direct_of` derives the direct algorithm of a kind from its record.  So a registered kind can be run, explained and
priced immediately.  all_reduce has an algorithm of its own: a reduce_scatter and an all_gather.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain

import numpy as np

from parallelism.algorithms.kinds import ARRAYS, BLOCKS, BLOCKS_OF_ALL, KINDS, PIECES, CollectiveKind, Pairs
from parallelism.algorithms.patterns import (
    Listed,
    Pairwise,
    Phase,
    Rule,
    Stage,
    Turns,
    around,
    listed,
    with_root,
)
from parallelism.algorithms.records import CollectiveAlgorithm, Cost, alike

IN_GROUP_ORDER = "in group order"


@lru_cache(maxsize=256)
def direct_of(kind: CollectiveKind, name: str = "direct", preference: int = 2) -> CollectiveAlgorithm:
    """The direct algorithm of a kind: each member that gets a result receives its parts straight from their givers."""
    direct = _Direct(kind)
    return CollectiveAlgorithm(
        name,
        (kind.name,),
        _formula(kind),
        direct.closed_form,
        direct.steps,
        direct.chunks,
        direct.phases,
        IN_GROUP_ORDER if kind.reduces else "",
        turns=True,
        rounds=int(name == "direct"),
        preference=preference,
    )


@dataclass(frozen=True)
class _Direct:
    """What the direct algorithm of a kind does in a group of ``g`` members."""

    kind: CollectiveKind

    def whole(self, g: int) -> int:
        """The number of messages that carry S together: g if each carries a part, otherwise 1."""
        in_parts = self.kind.in_shards or self.kind.cuts
        return g if in_parts else 1

    def chunks(self, g: int) -> int:
        """The number of chunks of a buffer."""
        return {ARRAYS: g, PIECES: 1, BLOCKS: g, BLOCKS_OF_ALL: g * g}.get(self.kind.unit, 0)

    def sources(self, target: int, g: int, root: int, pairs: Pairs) -> Collection[int]:
        """The members from which one receives."""
        needed = self.kind.sources_of(target, g, root, pairs) if self.kind.moves else range(g)
        return frozenset(needed) if callable(self.kind.sources) else needed

    def message(self, source: int, target: int, g: int) -> tuple[int, ...]:
        """The chunks that one member sends to another."""
        of_unit = {ARRAYS: (source,), PIECES: (0,), BLOCKS: (target,), BLOCKS_OF_ALL: (source * g + target,)}
        return of_unit.get(self.kind.unit, ())

    def steps(self, g: int, root: int, pairs: Pairs) -> Iterable[Stage]:
        """All messages at once."""
        if self.kind.paired:
            return [Listed(tuple((s, t, (s,)) for s, t in sorted(pairs) if s != t))] if pairs else []
        needed = cache(lambda target: self.sources(target, g, root, pairs))
        return [Pairwise(lambda s, t: self.message(s, t, g) if s in needed(t) else None, self.kind.reduces)]

    def closed_form(self, g: int, root: int, pairs: Pairs) -> Cost:
        """The messages and bytes of each member."""
        needed = []
        for target in range(g):
            needed.append([source for source in self.sources(target, g, root, pairs) if source != target])
        sent = Counter(chain.from_iterable(needed))
        messages = tuple(sent[p] for p in range(g))
        part = int(self.kind.moves)
        used = not self.kind.paired or bool(pairs)
        return Cost(
            int(used),
            tuple(part * n for n in messages),
            tuple(part * len(mine) for mine in needed),
            messages,
            self.whole(g),
        )

    def phases(self, g: int, root: int, pairs: Pairs) -> Iterable[Rule]:
        """The messages by phases, in which each member sends to one other."""
        kind = self.kind
        if kind.paired:
            moved = [(s, t, 1) for s, t in sorted(pairs) if s != t]
            return [listed(moved, 1)] if moved else []
        if not kind.moves:
            return [Turns(g, 0, 1)]
        if callable(kind.sources):
            return self._phases_of_some(g, root, pairs)
        if kind.sources == "root" or kind.gets == "root":
            return [with_root(g, root, kind.sources == "root", self.whole(g))]
        return [Turns(g, 1, self.whole(g))]

    def _phases_of_some(self, g: int, root: int, pairs: Pairs) -> Iterator[Rule]:
        """`phases` where only some members receive from each other."""
        needed = np.zeros((g, g), np.bool_)
        for target in range(g):
            needed[list(self.sources(target, g, root, pairs)), target] = True
        for d in range(1, g):
            phase = around(g, d, 1, self.whole(g))
            some = needed[phase.sources, phase.targets]
            if some.any():
                yield Phase(1, phase.sources[some], phase.targets[some], phase.parts[some], phase.whole)


def _formula(kind: CollectiveKind) -> str:
    """The bytes that are received, in words."""
    if not kind.moves:
        return "0 (g-1 empty messages)"
    if kind.paired:
        return "S for each target"
    part = "S/g" if kind.in_shards or kind.cuts else "S"
    if callable(kind.sources):
        return f"{part} from each other source"
    if kind.sources == "root":
        return "(g-1)/g S from the root" if kind.cuts else "S each but the root"
    several = "(g-1)/g S" if part == "S/g" else "(g-1) S"
    return several if kind.gets == "all" else f"{several} at the root"


DIRECT = (
    CollectiveAlgorithm(
        "direct",
        ("all_reduce",),
        "2(g-1)/g S",
        lambda g, root, pairs: alike(g, 2, 2 * (g - 1), 2 * (g - 1), g),
        lambda g, root, pairs: [Pairwise(lambda s, t: (t,), True), Pairwise(lambda s, t: (s,))],
        lambda g: g,
        lambda g, root, pairs: (Turns(g, 1, g), Turns(g, 1, g)),
        IN_GROUP_ORDER,
        turns=True,
        rounds=2,
        preference=2,
    ),
    *(direct_of(kind) for kind in KINDS.records.values() if kind.name != "all_reduce"),
    CollectiveAlgorithm(
        "naive",
        ("all_reduce",),
        "(g-1) S",
        lambda g, root, pairs: alike(g, 1, g - 1, g - 1),
        lambda g, root, pairs: [Pairwise(lambda s, t: (0,), True)],
        phases=lambda g, root, pairs: (Turns(g, 1, 1),),
        order=IN_GROUP_ORDER,
        turns=True,
        preference=3,
    ),
    CollectiveAlgorithm(
        "naive",
        ("reduce_scatter",),
        "(g-1) S",
        lambda g, root, pairs: alike(g, 1, g - 1, g - 1),
        lambda g, root, pairs: [Pairwise(lambda s, t: tuple(range(g)), True)],
        lambda g: g,
        lambda g, root, pairs: (Turns(g, 1, 1),),
        IN_GROUP_ORDER,
        turns=True,
        preference=3,
    ),
    *(direct_of(KINDS.records[name], "naive", 3) for name in ("all_gather", "broadcast", "reduce")),
)
