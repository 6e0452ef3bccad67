"""What the textbook says a collective costs, beside the step lists and independent of them.

``S`` is the whole buffer in bytes, ``g`` the positions, ``lg`` the base-2 logarithm, rounded up.  S is what
everyone holds for all_reduce, reduce, broadcast, reduce_scatter and all_to_all, what the root holds for
scatter, all shards together for all_gather, gather and all_scatter, one array for permute.  Even splits.

Sources: Thakur, Rabenseifner and Gropp, *Optimization of Collective Communication Operations in MPICH* (2005)
for recursive doubling, halving-doubling, binomial trees and rings; Hensgen, Finkel and Manber (1988) for the
dissemination barrier; NVIDIA's nccl-tests, doc/PERFORMANCE.md, for 2(g-1)/g and (g-1)/g.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from parallelism.collectives.algorithms import Pairs, algorithm

Parts = tuple[Fraction, ...]


@dataclass(frozen=True)
class ClosedForm:
    """The cost of an algorithm: ``sent`` and ``received`` in parts of S by position, ``formula`` for the latter."""

    formula: str
    steps: int
    sent: Parts
    received: Parts
    messages: tuple[int, ...]

    def bytes_sent(self, nbytes: int) -> tuple[float, ...]:
        """Bytes sent by each position for a buffer of ``nbytes``; whole numbers where the split is even."""
        return tuple(_number(part * nbytes) for part in self.sent)

    def bytes_received(self, nbytes: int) -> tuple[float, ...]:
        """Bytes received by each position."""
        return tuple(_number(part * nbytes) for part in self.received)


def bytes_received_per_rank(
    collective: str, name: str | None, size: int, nbytes: int, *, root: int = 0, pairs: Pairs | None = None
) -> tuple[float, ...]:
    """The bytes each position receives, by the formula.

    >>> bytes_received_per_rank("all_reduce", "ring", 4, 4096)
    (6144, 6144, 6144, 6144)
    """
    return closed_form(collective, name, size, root=root, pairs=pairs).bytes_received(nbytes)


def closed_form(
    collective: str, name: str | None, size: int, *, root: int = 0, pairs: Pairs | None = None
) -> ClosedForm:
    """The closed form of an algorithm; names and errors are those of `communication.algorithm`."""
    name = algorithm(collective, name, size, root=root, pairs=pairs).name
    if collective in ("broadcast", "reduce"):
        return _one_buffer(collective, name, size, root)
    if collective in ("scatter", "gather"):
        return _shards(collective, name, size, root)
    if collective == "permute":
        moved = [(s, t) for s, t in pairs or () if s != t]
        sources, targets = {s for s, _ in moved}, {t for _, t in moved}
        sent = tuple(int(p in sources) for p in range(size))
        received = tuple(Fraction(p in targets) for p in range(size))
        return ClosedForm("S for each target", min(len(pairs or ()), 1), tuple(map(Fraction, sent)), received, sent)
    if (collective, name) == ("all_reduce", "tree"):
        up, down = _one_buffer("reduce", name, size, 0), _one_buffer("broadcast", name, size, 0)
        return ClosedForm(
            "2(g-1) S over the group", up.steps + down.steps, _add(up.sent, down.sent),
            _add(up.received, down.received), tuple(a + b for a, b in zip(up.messages, down.messages, strict=True)),
        )
    formula, steps, part, messages = _symmetric(collective, name, size)
    return ClosedForm(formula, steps if size > 1 else 0, (part,) * size, (part,) * size, (messages,) * size)


def _symmetric(collective: str, name: str, g: int) -> tuple[str, int, Fraction, int]:
    """Formula, steps, parts of S that each position sends and receives, messages it sends."""
    others, lg = g - 1, _lg(g)
    share = Fraction(others, g)
    match collective, name:
        case "barrier", "dissemination":
            return "0 (lg g empty messages)", lg, Fraction(0), lg
        case "barrier", _:
            return "0 (g-1 empty messages)", 1, Fraction(0), others
        case "all_reduce" | "reduce_scatter", "naive":
            return "(g-1) S", 1, Fraction(others), others
        case "all_reduce", "recursive_doubling":
            return "lg g S", lg, Fraction(lg), lg
        case "all_reduce", _:
            steps, messages = {"direct": (2, 2 * others), "ring": (2 * others,) * 2}.get(name, (2 * lg, 2 * lg))
            return "2(g-1)/g S", steps, 2 * share, messages
        case "all_to_all", "ring":
            return "(g-1)/2 S", others, Fraction(others, 2), others
        case _, "ring":
            return "(g-1)/g S", others, share, others
        case _, "recursive_doubling" | "halving_doubling":
            return "(g-1)/g S", lg, share, lg
    return "(g-1)/g S", 1, share, others


def _one_buffer(collective: str, name: str, g: int, root: int) -> ClosedForm:
    """broadcast and reduce: S crosses g-1 links; the algorithms differ in who serves whom."""
    lg = _lg(g)
    leaves = tuple(Fraction(p != root) for p in range(g))        # everybody but the root gets, or gives, S once
    if name == "ring":
        steps = g - 1
        serves = [int((p - root) % g < g - 1) for p in range(g)]
        if g == 1:
            serves = [0]
    elif name == "tree" and collective == "broadcast":
        steps = lg
        serves = [sum(1 << k > r and r + (1 << k) < g for k in range(lg)) for r in ((p - root) % g for p in range(g))]
    elif name == "tree":
        steps = lg
        serves = [sum(p + (1 << k) < g for k in range(_height(p, root))) for p in range(g)]
        serves[root] = sum(((root >> k) ^ 1) << k < g for k in range(lg))
    else:
        steps = min(g - 1, 1)
        serves = [(g - 1) * (p == root) for p in range(g)]
    served = tuple(map(Fraction, serves))
    if collective == "broadcast":
        return ClosedForm("S each but the root", steps, served, leaves, tuple(serves))
    formula = "(g-1) S at the root" if name in ("direct", "naive") else "(g-1) S over the group"
    return ClosedForm(formula, steps, leaves, served, tuple(int(part) for part in leaves))


def _shards(collective: str, name: str, g: int, root: int) -> ClosedForm:
    """scatter and gather: S/g each, straight to its place, or in a tree with the shards of one's block."""
    far, near, links = [], [], []                                # in S/g: towards the leaves' end, the root's; messages
    for p in range(g):
        if name == "direct":
            block, children = int(p != root), [1] * (g - 1) if p == root else []
        elif p == root:
            levels = [((root >> k) ^ 1) << k for k in range(_lg(g))]
            block, children = 0, [min(1 << k, g - first) for k, first in enumerate(levels) if first < g]
        else:
            height = _height(p, root)
            block = min(1 << height, g - p)
            children = [min(1 << k, g - p - (1 << k)) for k in range(height) if p + (1 << k) < g]
        far.append(Fraction(block, g))
        near.append(Fraction(sum(children), g))
        links.append(len(children))
    steps = min(g - 1, 1) if name == "direct" else _lg(g)
    where = "at the root" if collective == "gather" else "from the root"
    formula = f"(g-1)/g S {where}" if name == "direct" else "the shards of one's half, quarter, ... of the group"
    if collective == "scatter":
        return ClosedForm(formula, steps, tuple(near), tuple(far), tuple(links))
    return ClosedForm(formula, steps, tuple(far), tuple(near), tuple(int(p != root) for p in range(g)))


def _height(p: int, root: int) -> int:
    """Position p speaks for a block of 2**height in the tree: it starts at p and has not the root in it."""
    apart = (p ^ root).bit_length() - 1
    return apart if p == 0 else min((p & -p).bit_length() - 1, apart)


def _lg(g: int) -> int:
    return (g - 1).bit_length()


def _add(a: Parts, b: Parts) -> Parts:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _number(value: Fraction) -> float:
    return value.numerator if value.denominator == 1 else float(value)
