"""The kinds of collectives: what each one computes, as one frozen record that every other module asks.

A kind defines which members give an array, which members get a result, and how a result is made of the arrays or of
their blocks.  An algorithm (`parallelism.algorithms.records`) defines how data moves.

                    from            part     result      at
    all_reduce      all members     whole    reduced     all members
    all_gather      all members     whole    joined      all members
    reduce_scatter  all members     a block  reduced     all members
    all_to_all      all members     a block  joined      all members
    broadcast       the root        whole    copied      all members
    reduce          all members     whole    reduced     the root
    scatter         the root        a block  copied      all members
    gather          all members     whole    joined      the root
    all_scatter     all members     whole    listed      all members
    permute         its source      whole    copied      all members
    barrier         -               -        nothing     -

`register_kind` adds a kind from outside, `device.collective(name, x)` runs it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from parallelism.algorithms.registry import Registry, refuse

Pairs = tuple[tuple[int, int], ...]

RESULTS = ("reduced", "joined", "copied", "listed", "nothing")
SOURCES = ("all", "root", "pairs")
MEMBERS = ("all", "root", "none")

PIECES, ARRAYS, BLOCKS, BLOCKS_OF_ALL, NOTHING = "pieces", "arrays", "blocks", "blocks of all", "nothing"
"""The meanings of the chunks of an algorithm: see `parallelism.collectives.buffers`."""


@dataclass(frozen=True, eq=False)
class CollectiveKind:
    """A collective over a group of g members, at positions 0 to g-1.  It is checked when it is registered.

    >>> from parallelism import CollectiveKind
    >>> scan = CollectiveKind(
    ...     "scan", "rank j gets the {op} of ranks 0 to j", "reduced", lambda position, size: range(position + 1))
    >>> list(scan.sources_of(position=2, size=4))
    [0, 1, 2]

    ``name``
        The name that calls and events carry.
    ``title``
        One sentence for people; ``{op}``, ``{root}``, ``{pairs}``, ``{cut}`` and ``{joined}`` (dims) are filled in.
    ``result``
        How the result is made of the arrays: ``"reduced"`` elementwise in group order, ``"joined"`` along a dim,
        ``"copied"`` (of one source; zeros where there is none), ``"listed"``, ``"nothing"``, or a function that takes
        the list of arrays and returns an array.
    ``sources``
        Whose arrays those are: of ``"all"`` members, of the ``"root"``, of the source that the ``"pairs"`` of the call
        name, or of the positions that a function ``(position, size)`` gives.
    ``gives``, ``gets``
        Whose array takes part, and which members get a result: ``"all"``, the ``"root"`` or ``"none"``.
    ``cuts``
        Each array is cut along a dim into g blocks, and the result at position p is made of block p of each array.
    ``alike``
        The members' arrays have one shape, apart from a dim along which they are joined.
    ``bus_factor``
        A function of g: the bus bandwidth divided by S / seconds, where S is the bytes of the buffer.  It follows
        doc/PERFORMANCE.md of NVIDIA's nccl-tests; None where they define no factor.
    """

    name: str
    title: str
    result: str | Callable[[list[Any]], Any]
    sources: str | Callable[[int, int], Sequence[int]] = "all"
    gives: str = "all"
    gets: str = "all"
    cuts: bool = False
    alike: bool = True
    bus_factor: Callable[[int], float] | None = None

    def sources_of(
        self, position: int, size: int, root: int = 0, pairs: Pairs | None = None
    ) -> Sequence[int]:
        """The positions of the arrays in the result at ``position``, in group order; none if it gets no result."""
        if self.gets == "none" or (self.gets == "root" and position != root):
            return ()
        if callable(self.sources):
            return self.sources(position, size)
        if self.sources == "root":
            return (root,)
        if self.sources == "pairs":
            return tuple(source for source, target in pairs or () if target == position)
        return range(size)

    def is_given_by(self, position: int, root: int) -> bool:
        """Whether the array at ``position`` takes part."""
        return self.gives == "all" or (self.gives == "root" and position == root)

    def is_got_by(self, position: int, root: int) -> bool:
        """Whether ``position`` gets a result."""
        return self.gets == "all" or (self.gets == "root" and position == root)

    @cached_property
    def rooted(self) -> bool:
        """Whether one member is the root."""
        return "root" in (self.gives, self.gets, self.sources)

    @cached_property
    def reduces(self) -> bool:
        """Whether arrays are combined elementwise."""
        return self.result == "reduced"

    @cached_property
    def joins(self) -> bool:
        """Whether arrays are joined along a dim."""
        return self.result == "joined"

    @cached_property
    def lists(self) -> bool:
        """Whether the result is a list of arrays."""
        return self.result == "listed"

    @cached_property
    def paired(self) -> bool:
        """Whether a call names pairs of source and target."""
        return self.sources == "pairs"

    @cached_property
    def moves(self) -> bool:
        """Whether any data moves."""
        return self.result != "nothing"

    @cached_property
    def function(self) -> Callable[[list[Any]], Any] | None:
        """The function that makes the result, where it is none of `RESULTS`."""
        return self.result if callable(self.result) else None

    @cached_property
    def copies(self) -> bool:
        """Whether a result is one member's value as it was: it may be a tree of arrays."""
        return self.result == "copied" and not self.cuts

    @cached_property
    def elementwise(self) -> bool:
        """Whether each member gets a reduction of whole arrays: their shape is that of the result."""
        return self.reduces and not self.cuts and self.gets == "all"

    @cached_property
    def sums_all(self) -> bool:
        """Whether that is the same reduction for all."""
        return self.elementwise and self.sources == "all"

    @cached_property
    def read_by_all(self) -> bool:
        """Whether each member needs the whole array of every giver."""
        return (
            (self.joins or self.lists or self.copies)
            and not self.cuts
            and self.gets == "all"
            and not self.paired
        )

    @cached_property
    def unit(self) -> str:
        """The meaning of the chunks of its algorithms."""
        if not self.moves:
            return NOTHING
        if self.cuts:
            return BLOCKS_OF_ALL if self.joins else BLOCKS
        return PIECES if self.reduces or self.gives == "root" else ARRAYS

    @cached_property
    def blocks_of_all(self) -> bool:
        """Whether every member has a block for every other, which it joins with its like: an exchange."""
        return self.cuts and self.joins

    @cached_property
    def in_shards(self) -> bool:
        """Whether S, in formulas of bytes, is the size of all members' arrays together; otherwise it is that of one."""
        return self.unit == ARRAYS and not self.paired


def check_kind(kind: CollectiveKind) -> None:
    """Raises `RegistrationError` for a record that is incomplete or contradicts itself."""
    what = f"kind {kind.name!r}"
    refuse(
        what,
        (not (isinstance(kind.name, str) and kind.name.isidentifier()), "name must be an identifier"),
        (not (isinstance(kind.title, str) and kind.title), "title must be a sentence"),
    )
    for field, allowed in (("result", RESULTS), ("sources", SOURCES), ("gives", MEMBERS), ("gets", MEMBERS)):
        value = getattr(kind, field)
        function = " or a function" if field in ("result", "sources") else ""
        refuse(
            what,
            (
                value not in allowed and not (callable(value) and function),
                f"{field} must be one of {', '.join(allowed)}{function}, got {value!r}",
            ),
        )
    refuse(
        what,
        (
            kind.moves != (kind.gives != "none") or kind.moves != (kind.gets != "none"),
            f"result={kind.result!r} contradicts gives={kind.gives!r}, gets={kind.gets!r}",
        ),
        (
            kind.gives == "root" and kind.sources != "root",
            f"only the root gives an array, and sources={kind.sources!r} needs others",
        ),
        (
            kind.cuts and (kind.function is not None or kind.lists or not kind.moves),
            f"cuts=True needs a result that is reduced, joined or copied, got {kind.result!r}",
        ),
        (
            kind.result == "copied" and kind.sources == "all",
            "result='copied' takes one source, and sources='all' names several",
        ),
    )
    if callable(kind.sources):
        for size in (1, 2, 3, 5):
            for position in range(size):
                named = list(kind.sources(position, size))
                refuse(
                    f"{what}: sources({position}, {size})",
                    (
                        named != sorted(set(named) & set(range(size))),
                        f"expected positions from 0 to {size - 1} in order, got {named}",
                    ),
                    (not named and kind.result != "copied", "expected at least one position, got none"),
                    (
                        kind.reduces and position not in named,
                        f"a reduction includes the member's own array, got {named}",
                    ),
                )
    if kind.bus_factor is not None:
        factor = kind.bus_factor(4)
        refuse(what, (not factor > 0, f"bus_factor(4) must be above 0, got {factor!r}"))


def _of_others(g: int) -> float:
    """The part of the buffer that is not a member's own."""
    return (g - 1) / g


def _whole(g: int) -> float:
    return 1.0


KINDS: Registry[CollectiveKind] = Registry("kind", lambda kind: (kind.name,))

KINDS.add_own(
    CollectiveKind(
        "all_reduce", "each rank gets the {op} of all", "reduced", bus_factor=lambda g: 2 * (g - 1) / g
    ),
    CollectiveKind(
        "all_gather", "each rank gets all shards, joined along dim {joined}", "joined", bus_factor=_of_others
    ),
    CollectiveKind(
        "reduce_scatter",
        "rank j gets block j, along dim {cut}, of the {op} of all",
        "reduced",
        cuts=True,
        bus_factor=_of_others,
    ),
    CollectiveKind(
        "all_to_all",
        "rank j gets block j of each rank: cut along dim {cut}, joined along dim {joined}",
        "joined",
        cuts=True,
        bus_factor=_of_others,
    ),
    CollectiveKind(
        "broadcast",
        "each rank gets the array of rank {root}",
        "copied",
        "root",
        gives="root",
        bus_factor=_whole,
    ),
    CollectiveKind("reduce", "rank {root} gets the {op} of all", "reduced", gets="root", bus_factor=_whole),
    CollectiveKind(
        "scatter",
        "rank j gets block j, along dim {cut}, of the array of rank {root}",
        "copied",
        "root",
        gives="root",
        cuts=True,
        bus_factor=_of_others,
    ),
    CollectiveKind(
        "gather",
        "rank {root} gets all shards, joined along dim {joined}",
        "joined",
        gets="root",
        bus_factor=_of_others,
    ),
    CollectiveKind(
        "all_scatter",
        "each rank gets the arrays of all, not joined",
        "listed",
        alike=False,
        bus_factor=_of_others,
    ),
    CollectiveKind(
        "permute", "{pairs}; zeros where nothing comes", "copied", "pairs", alike=False, bus_factor=_whole
    ),
    CollectiveKind(
        "barrier", "no rank continues before all have arrived", "nothing", gives="none", gets="none"
    ),
)

COLLECTIVES = tuple(KINDS.records)
"""The names of the kinds of this package."""
ROOTED = tuple(name for name, kind in KINDS.records.items() if kind.rooted)
REDUCING = tuple(name for name, kind in KINDS.records.items() if kind.reduces)

NAMED_OTHERWISE = {"all_gather_object": "all_scatter", "broadcast_object": "broadcast"}
"""Names of events, and the kind that they are."""


def kind_of(name: str) -> CollectiveKind:
    """The kind of this name; ``ValueError`` with those that there are."""
    kind = KINDS.records.get(name)
    if kind is None:
        raise ValueError(f"no collective {name!r}; there are {', '.join(KINDS.records)}")
    return kind


def kind_of_event(name: str) -> CollectiveKind | None:
    """The kind that an event of this name is; None for an operation that is made of several collectives."""
    return KINDS.records.get(NAMED_OTHERWISE.get(name, name))


def bus_factor(name: str, size: int) -> float | None:
    """Bus bandwidth over S / seconds, as nccl-tests define it (doc/PERFORMANCE.md); None where they define none.

    That of permute is sendrecv's, that of all_scatter is all_gather's; a barrier moves nothing.

    >>> bus_factor("all_reduce", 8), bus_factor("all_gather", 8), bus_factor("broadcast", 8), bus_factor("barrier", 8)
    (1.75, 0.875, 1.0, None)
    """
    factor = kind_of(name).bus_factor
    return None if factor is None else factor(size)
