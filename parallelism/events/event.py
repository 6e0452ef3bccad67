"""One thing that one rank did: `Event`, the element of a `parallelism.trace.Trace`."""

from __future__ import annotations

from dataclasses import dataclass

HOST = -1
"""The peer of a message between a device and the process that owns the cluster."""

KINDS = ("compute", "collective", "send", "recv", "wait", "h2d", "d2h", "memory")


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that one rank did.

    >>> from vcluster import VirtualCluster
    >>> with VirtualCluster(2, backend="thread") as cluster:
    ...     run = cluster.run(lambda device: device.all_reduce(1.0))
    >>> event = next(event for event in run.trace.events if event.kind == "collective")
    >>> event.rank, event.name, event.group, event.bytes_received
    (0, 'all_reduce', (0, 1), 8)

    ``start_seconds`` and ``duration_seconds`` are virtual time, filled in by `parallelism.timeline`;
    ``wall_*`` is measured by the machine's clock, from the start of the run.  The two are never mixed.
    """

    rank: int
    kind: str
    """One of `KINDS`."""
    name: str
    """The collective's name, the label of a compute block, the category of a memory event."""
    start_seconds: float = 0.0
    duration_seconds: float = 0.0
    wall_start_seconds: float = 0.0
    wall_duration_seconds: float = 0.0
    cpu_seconds: float = 0.0
    """CPU time of the device's thread (compute), or what ``seconds=`` declared."""
    bytes_sent: int = 0
    bytes_received: int = 0
    messages: int = 0
    """Messages this rank sent."""
    flops: float = 0.0
    nbytes: float = 0.0
    """Memory traffic declared for a compute; bytes held (negative: freed) for a memory event."""
    axes: tuple[str, ...] | None = None
    group: tuple[int, ...] | None = None
    """The ranks that took part, in group order."""
    peer: int | None = None
    """The other rank of a send or a recv; `HOST` (-1) is the host."""
    algorithm: str | None = None
    """The algorithm by which a collective was run."""
    stage: int | None = None
    microbatch: int | None = None
    phase: str | None = None
    """The pipeline action: F, B, I or W, or R for an op of a program that is computed again."""
    tag: int | None = None
    sequence: int | None = None
    """Which operation of its group (or message of its channel and tag) this is, from 0: what belongs together."""
    work: int | None = None
    """Number of the asynchronous operation that starts here; a ``wait`` event with the same number ends it."""
    parent: int | None = None
    """Number (``serial``) of the collective on this rank inside which this message was sent; such events are
    outside the totals."""
    serial: int = 0
    """Place in the record of this rank, from 0."""
    sources: tuple[tuple[int, int], ...] = ()
    """For a collective: (rank, bytes received from it)."""
    dtype: str | None = None
    """The dtype of the arrays that are computed with or sent."""
    shape: tuple[int, ...] | None = None
    """Of a compute that consists of products of matrices: (count, m, n, k), so many of m x k with k x n.  Of attention:
    (count, rows, keys, width, causal), so many heads, and 1 where a mask hides later keys."""
    location: str | None = None
    """``file:line`` of the user's code."""
    seconds: float | None = None
    """What ``seconds=`` declared as the price of a compute."""
    part: int = 0
    """Which piece of its compute block this is: calls of the library inside divide one.  Flops and bytes are the
    first one's."""
    payload_bytes: float | None = None
    """Of a collective: S, the bytes of the whole buffer (`parallelism.collectives.call`); None: it is not known."""
    root: int | None = None
    """Of a collective with a root: its position in the group."""
    pairs: tuple[tuple[int, int], ...] = ()
    """Of a permute: (source, target), positions in the group, of what moves."""
    priced_algorithm: str | None = None
    """By which a collective was priced, where it was: that of its run, or for a direct one the cheapest."""
    other_bytes: tuple[tuple[str, int], ...] = ()
    """Of ``nbytes``, those of arrays of other dtypes than ``dtype``: (dtype, bytes)."""
