"""The numbers of bytes and members that choose the way of a collective, and how its memory is read.

A module that a test may give other thresholds reads them as ``thresholds.NAME``.
"""

INLINE_BYTES = 1 << 16
"""Payloads up to this size are copied into the slot (`vcluster.collectives.group`); larger ones stay where they lie."""

SHARED_RESULT_BYTES = 1 << 14
"""A new result of at least so many bytes lies in shared memory: its pages are used again, and peers can read it."""

FEWEST_MEMBERS = 3
"""From so many members on, the last arriver makes the result of a small call for all (`last_arriver`); for fewer there
is nothing to save."""

SCATTERED_BYTES = 1 << 12
"""Up to so many bytes for each member the last arriver reduces all of a reduce_scatter; above, each its own part."""

PRIVATE_BYTES = 1 << 22
"""A payload of at least so many bytes in private memory is read there.  A smaller one, and one that many members read,
is copied into shared memory first: the system reads another process's memory at half the speed of a copy."""

SCATTERED_FACTOR = 16
"""A reduce_scatter reads private memory only from so many times `PRIVATE_BYTES` on; below, copying first is faster."""

OWNED_BYTES = 1 << 18
"""The least number of bytes in the slice of an owner, unless cores would idle: each piece costs a call per member."""

ALONE_BYTES = 1 << 20
"""Up to so many bytes of all members together each of up to 4 members reduces an all_reduce alone, if the owners cannot
store into its result."""

PIECE_BYTES = 1 << 17
"""The number of bytes that a reduction combines at a time."""

PRIVATE_PIECE_BYTES = 1 << 19
"""The same where the system moves a piece between processes: it has to find the pages each time."""
