"""An algorithm of collectives as one frozen record: its steps, its closed form and its phases, for the kinds it serves.

    steps         (source, target, chunks) of each message, step by step: they run, and they are explained
    closed_form   what the textbook says it costs, independent of the steps
    phases        the same messages as arrays, for pricing; from the steps where there is no shorter rule

The records of this package are in `parallelism.algorithms.direct`, ``rings``, ``doublings`` and ``trees``;
`register_algorithm` adds one from outside.  `parallelism.collectives.registration` refuses a
record if its three parts disagree, or if its steps do not give the result of the kind.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from parallelism.algorithms.kinds import Pairs
from parallelism.algorithms.patterns import Phase, Rule, Stage

if TYPE_CHECKING:
    from fractions import Fraction

Phases = tuple[Phase, ...]
Made = TypeVar("Made")

HIERARCHICAL, TORUS = "hierarchical", "torus"
"""Names of algorithms that only `parallelism.cost` knows, because they follow from where a group lies on a hardware."""

MPI = "mpi"
"""What a call names that leaves the algorithm to the MPI library. It is counted and priced as a direct one."""


@dataclass(frozen=True)
class ClosedForm:
    """The cost of an algorithm by position: parts of S sent and received, over ``whole``; messages sent.

    ``formula`` is for the bytes received.
    """

    formula: str
    steps: int
    sent_parts: tuple[int, ...]
    received_parts: tuple[int, ...]
    messages: tuple[int, ...]
    whole: int = 1

    @property
    def sent(self) -> "tuple[Fraction, ...]":
        """Parts of S that each position sends."""
        return self._fractions(self.sent_parts)

    @property
    def received(self) -> "tuple[Fraction, ...]":
        """Parts of S that each position receives."""
        return self._fractions(self.received_parts)

    def bytes_sent(self, nbytes: int) -> tuple[float, ...]:
        """Bytes sent by each position for a buffer of ``nbytes``; whole numbers where the split is even."""
        return tuple(self._bytes(part, nbytes) for part in self.sent_parts)

    def bytes_received(self, nbytes: int) -> tuple[float, ...]:
        """Bytes received by each position."""
        return tuple(self._bytes(part, nbytes) for part in self.received_parts)

    def _fractions(self, parts: tuple[int, ...]) -> "tuple[Fraction, ...]":
        from fractions import Fraction  # devices need none

        return tuple(Fraction(part, self.whole) for part in parts)

    def _bytes(self, part: int, nbytes: int) -> float:
        return part * nbytes / self.whole if part * nbytes % self.whole else part * nbytes // self.whole


class Cost(NamedTuple):
    """What ``closed_form`` of a record returns: a `ClosedForm` without the formula."""

    steps: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    messages: tuple[int, ...]
    whole: int = 1


def alike(g: int, steps: int, part: int, messages: int, whole: int = 1) -> Cost:
    """The cost of an algorithm in which all positions send and receive the same."""
    return Cost(steps, (part,) * g, (part,) * g, (messages,) * g, whole)


@dataclass(frozen=True, eq=False)
class CollectiveAlgorithm:
    """One algorithm.  ``steps``, ``closed_form`` and ``phases`` are functions of (size, root, pairs), size at least 2.

    >>> from parallelism import CollectiveAlgorithm
    >>> from parallelism.algorithms import Cost
    >>> from parallelism.algorithms.patterns import Listed
    >>> swap = CollectiveAlgorithm(
    ...     "swap", ("all_gather",), "S/2, for two members",
    ...     closed_form=lambda size, root, pairs: Cost(1, (1, 1), (1, 1), (1, 1), 2),
    ...     steps=lambda size, root, pairs: [Listed(((0, 1, (0,)), (1, 0, (1,))))],
    ...     chunks=lambda size: 2, applies=lambda size: size == 2, needs="two members")
    >>> swap.closed_form(2, 0, ()).steps
    1

    ``name``, ``kinds``
        What calls name it by, and the names of the kinds that it serves in this way.
    ``formula``
        The bytes that a position receives, in S (the whole buffer), g (the size) and lg (base 2, rounded up).
    ``closed_form``
        Returns a `Cost`, for even splits.
    ``steps``
        Returns the steps, each a `parallelism.algorithms.patterns.Listed` or `Pairwise` of (source, target, chunks);
        all messages of a step are simultaneous, and all reduce or all replace.  None: the algorithm is priced and never
        run.
    ``chunks``
        By the size, the number of chunks that the buffer is cut into.
    ``phases``
        Yields a `Rule` after the other; None: each step is one.
    ``order``
        In words, the order in which it reduces; empty where nothing is reduced.
    ``applies``, ``needs``
        Whether it applies to a size, and in words what it needs: "a power of two".
    ``turns``
        Each position takes turns with all others, in as many phases as ranks: large groups are not priced by it.
    ``rounds``
        In so many phases, where every two ranks have a link of their own; 0: that changes nothing.
    ``preference``
        Of the algorithms that take as long, the lowest is chosen, and of those the first.
    """

    name: str
    kinds: tuple[str, ...]
    formula: str
    closed_form: Callable[[int, int, Pairs], Cost]
    steps: Callable[[int, int, Pairs], Iterable[Stage]] | None = None
    chunks: Callable[[int], int] = lambda g: 1
    phases: Callable[[int, int, Pairs], Iterable[Rule]] | None = None
    order: str = ""
    applies: Callable[[int], bool] | None = None
    needs: str = ""
    turns: bool = False
    rounds: int = 0
    preference: int = 0

    def fits(self, size: int) -> bool:
        """Whether it applies to a group of this size."""
        return self.applies is None or self.applies(size)


def by_size(function: Callable[[int], Made]) -> Callable[[int, int, Pairs], Made]:
    """A function of the size, for a field of a record that takes (size, root, pairs)."""
    return lambda g, root, pairs: function(g)


@by_size
def round_the_ring(g: int) -> Cost:
    """The cost of g - 1 steps, in each of which a position sends and receives S/g."""
    return alike(g, g - 1, g - 1, g - 1, g)


def power_of_two(size: int) -> bool:
    """Whether a size is a power of two."""
    return size & (size - 1) == 0
