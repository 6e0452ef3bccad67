"""The records of the devices travel to the host and become a trace.

A short record travels as it is. A long one is packed into arrays first, which go through shared memory: each template
once, and for each event its index, its line and its times.
"""

import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vcluster.tracing.recorder import ENTRIES, Record
from vcluster.tracing.templates import FIELDS, row_of

if TYPE_CHECKING:
    from parallelism.events import Columns
    from parallelism.timeline import Pricing
    from parallelism.trace import Trace

LONG = 1000 * ENTRIES
"""Number of entries from which a device packs its record."""


class Packed(NamedTuple):
    """The record of one device as columns."""

    descriptions: "Columns"
    """One row for each different description of an event, without the rank."""
    description: npt.NDArray[np.int32]
    """For each event, the index of its row in ``descriptions``."""
    own: "Columns"
    """The fields that differ between events: line and times. Wall times are added to those of the description."""


def pack(record: Record) -> Packed:
    """Pack a record into columns."""
    from parallelism.events import Columns, Table

    zero, entries = record
    descriptions, description = _numbered(entries[0::ENTRIES])
    places, place = _numbered(entries[1::ENTRIES])
    start, end = (np.array(entries[i::ENTRIES], np.int64) for i in (2, 3))
    return Packed(
        Columns.of_rows(map(row_of, descriptions), FIELDS),
        description,
        Columns(
            len(description),
            {
                "location": Table(tuple(places), place),
                "wall_start_seconds": np.where(start == 0, 0, start - zero) / 1e9,
                "wall_duration_seconds": (end - start) / 1e9,
                "cpu_seconds": np.array(entries[4::ENTRIES], np.float64),
            },
        ),
    )


def columns_of(records: Mapping[int, bytes | Packed]) -> "Columns":
    """The events in the records of some ranks, rank after rank."""
    from parallelism.events import Columns
    from parallelism.timeline.matching import sequences

    parts = list(map(_opened, records.values()))
    lengths = [len(part.description) for part in parts]
    first = np.cumsum([0, *(len(part.descriptions) for part in parts)])
    index = np.concatenate([part.description + start for part, start in zip(parts, first[:-1], strict=True)])
    events = Columns.joined([part.descriptions for part in parts]).take(index)
    own = dict(Columns.joined([part.own for part in parts]).columns)
    for name in {"wall_start_seconds", "wall_duration_seconds"}.intersection(events.columns, own):
        own[name] = events.numbers(name) + own[name]
    own["rank"] = np.repeat(np.array(list(records), np.int64), lengths)
    own["serial"] = np.concatenate([np.arange(length) for length in lengths])
    events = events.with_columns(**own)
    return events.with_columns(sequence=sequences(events))


def make_trace(
    records: Sequence[bytes | Packed],
    mesh_shape: dict[str, int],
    pricing: "Pricing | None" = None,
    *,
    declares_all: bool = False,
) -> "Trace":
    """The trace of a run, from the record of each rank: replayed in virtual time.

    ``declares_all``: every op of the program declared its cost, so other compute is the library's own and has no price.
    """
    from parallelism.timeline import replay_columns, with_free_overhead
    from parallelism.trace import Trace

    columns = columns_of(dict(enumerate(records)))
    if declares_all:
        columns = with_free_overhead(columns)
    trace = Trace(columns, size=len(records), mesh_shape=mesh_shape)
    if pricing is not None:
        return trace.priced_by(pricing)
    lengths = np.bincount(columns.numbers("rank"), minlength=len(records)).tolist()
    return Trace(replay_columns(columns, lengths), size=trace.size, mesh_shape=mesh_shape)


def _opened(record: bytes | Packed) -> Packed:
    opened = pickle.loads(record) if isinstance(record, bytes) else record
    return opened if isinstance(opened, Packed) else pack(opened)


def _numbered(objects: list[Any]) -> tuple[list[Any], npt.NDArray[np.int32]]:
    """The different objects, and for each element the index of its object."""
    place: dict[int, int] = {}
    index = np.array([place.setdefault(number, len(place)) for number in map(id, objects)], np.int32)
    return list({id(each): each for each in objects}.values()), index
