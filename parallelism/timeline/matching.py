"""Matching: which events of a record belong together, and the role that each event plays in the replay.

A send belongs to the recv with the same source, destination, tag and sequence; the members of a collective have the
same group and sequence; a wait belongs to the operation of its rank with the same ``work``.  Nothing else in the
package pairs events.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Bools, Ints
from parallelism.events import ABSENT, HOST, Columns
from parallelism.events.columns import codes, combined

POINT, COMPUTE, WAIT, COLLECTIVE, SEND, RECV, OUTSIDE, CALL = range(8)
"""A point takes no time.  An event outside (a child of an operation, memory) only gets a place in time.  A call is an
asynchronous collective in a program of the engine; no event has this role."""

Places = Ints


class Messages(NamedTuple):
    """The sends and recvs between devices, without those inside a collective."""

    places: Places
    """Where they are in the record."""
    keys: Places
    """The same number for a send and its recv."""
    are_sends: Bools


class Roles(NamedTuple):
    """One entry for each event."""

    roles: npt.NDArray[np.uint8]
    keys: Places
    """The same number for a send and its recv, and for the members of a collective."""
    sizes: Places
    """The number of members of a collective; 0 for other events, -1 for a collective without a group."""


def sequences(events: Columns) -> Places:
    """Numbers the operations that are matched by order: for each rank its collectives of one group, its sends to one
    peer with one tag, and its recvs.  `ABSENT` for other events, and for messages inside a collective.
    """
    at = np.flatnonzero(
        events.isin("kind", {"collective"})
        | (events.isin("kind", {"send", "recv"}) & ~events.present("parent"))
    )
    fields = "rank", "kind", "group", "peer", "tag"
    key = events.only(*fields).take(at).key(*fields)
    order = np.argsort(key, kind="stable")
    key = key[order]
    count = np.arange(len(at))
    begins = np.maximum.accumulate(
        np.where(np.concatenate([[True], key[1:] != key[:-1]])[: len(at)], count, 0)
    )
    numbers = np.full(len(events), ABSENT)
    numbers[at[order]] = count - begins
    return numbers


def messages_of(events: Columns) -> Messages:
    """The messages between devices, with a key by which each send finds its recv."""
    places = np.flatnonzero(
        events.isin("kind", {"send", "recv"})
        & ~events.present("parent")
        & events.present("peer")
        & ~events.isin("peer", {HOST})
    )
    messages = events.only("kind", "rank", "peer", "tag", "sequence").take(places)
    sends = messages.isin("kind", {"send"})
    rank, peer = messages.numbers("rank"), messages.numbers("peer")
    keys = combined(
        codes(np.where(sends, rank, peer)),
        codes(np.where(sends, peer, rank)),
        messages.key("tag"),
        messages.key("sequence"),
    )
    return Messages(places, keys, sends)


def sends_of_recvs(events: Columns) -> tuple[Places, Places]:
    """The places of the recvs whose send is in the record, and the places of these sends."""
    places, keys, sends = messages_of(events)
    return _partners(places[~sends], keys[~sends], places[sends], keys[sends])


def operations_of_waits(events: Columns) -> tuple[Places, Places]:
    """The places of the waits whose operation is in the record, and the places of these operations."""
    at = np.flatnonzero(~events.present("parent") & events.present("work"))
    waits = events.isin("kind", {"wait"})[at]
    works = events.only("rank", "work").take(at).key("rank", "work")
    return _partners(at[waits], works[waits], at[~waits], works[~waits])


def collectives_of(events: Columns) -> tuple[Places, Places]:
    """The places of the collectives that are inside no other operation, and a key that their members share."""
    places = np.flatnonzero(~events.present("parent") & events.isin("kind", {"collective"}))
    return places, events.only("group", "sequence").take(places).key("group", "sequence")


def roles_of(events: Columns) -> Roles:
    """The role of each event, the key that its partners share, and the number of members that a collective has.

    An operation that cannot meet its partners, because they are not in the record, is a point.
    """
    outermost = ~events.present("parent")
    roles = np.full(len(events), OUTSIDE, np.uint8)
    roles[outermost & ~events.isin("kind", {"memory"})] = POINT
    roles[outermost & events.isin("kind", {"compute"})] = COMPUTE
    roles[outermost & events.isin("kind", {"wait"})] = WAIT
    keys, sizes = np.zeros(len(events), np.int64), np.zeros(len(events), np.int64)

    at, key = collectives_of(events)
    keys[at] = key
    sizes[at] = size = group_sizes(events.only("group").take(at))
    _, place, members = np.unique(key, return_inverse=True, return_counts=True)
    roles[at[(members[place] == size) & (size > 1)]] = COLLECTIVE

    at, key, sends = messages_of(events)
    keys[at] = key
    roles[at[sends]] = SEND
    roles[at[~sends & np.isin(key, key[sends])]] = RECV
    return Roles(roles, keys, sizes)


def group_sizes(collectives: Columns) -> Places:
    """The number of ranks in each event's group; -1 where there is none."""
    return collectives.mapped("group", lambda ranks: -1 if ranks is None else len(ranks), np.int64)


def with_children_at_parents(
    events: Columns, ends: Sequence[int], starts: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Start times in which everything inside an operation starts with it, whichever of the two was recorded first.

    ``ends[lane]`` is the place after the last event of a lane.
    """
    serials, parents = events.values("serial"), events.values("parent")
    begin = 0
    for end in ends:
        place = {serials[i]: i for i in range(begin, end)}
        seen: set[int] = set()
        for i in range(begin, end):
            path = []
            at: int | None = i
            while at is not None and at not in seen and parents[at] is not None:
                seen.add(at)
                path.append(at)
                at = place.get(parents[at])
            for child in path:
                starts[child] = starts[path[-1] if at is None else at]
        begin = end
    return starts


def _partners(places: Places, keys: Places, others: Places, other_keys: Places) -> tuple[Places, Places]:
    """The places whose key is among ``other_keys``, and for each the first of ``others`` with that key."""
    different, first = np.unique(other_keys, return_index=True)
    if not len(different):
        return places[:0], others[:0]
    index = np.minimum(np.searchsorted(different, keys), len(different) - 1)
    matched = different[index] == keys
    return places[matched], others[first[index[matched]]]
