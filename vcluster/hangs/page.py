"""The page of a hang: what the dumps tell, and a lane for each rank with its last calls. It needs no other file."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from parallelism.display.quantities import plural
from parallelism.operation import ranks_in_words
from parallelism.whole_files import written_whole
from vcluster.report.page import page
from vcluster.report.payload import packed

if TYPE_CHECKING:
    from vcluster.hangs.explanation import Explanation
    from vcluster.hangs.records import RankRecord, Records

MOST_CALLS = 50
"""Calls that a lane shows."""
SECTIONS = {"told": "hangs.js", "lanes": "hangs.js"}


def write(explanation: Explanation, path: str | PathLike[str]) -> None:
    """Write the page of an explanation to ``path``.  ``OSError`` if it cannot be written."""
    records = explanation.records
    text = str(explanation)
    facts = [
        ("dumps", f"{len(records.ranks):,}"),
        ("calls in them", f"{sum(map(len, records.ranks.values())):,}"),
    ]
    if records.missing:
        facts.append(("without a dump", ranks_in_words(records.missing)))
    if explanation.ranks:
        facts.append(("it is about", ranks_in_words(explanation.ranks)))
    data: dict[str, Any] = {
        "title": f"Why a job of {plural(len(records.ranks), 'rank')} hangs",
        "verdict": [explanation.cause],
        "facts": facts,
        "left_out": [],
        "told": text,
        "lanes": _lanes(explanation),
    }
    with written_whole(path) as file:
        file.write(page(data, "hangs.html", SECTIONS, ("page.css", "hangs.css")))


def _lanes(explanation: Explanation) -> dict[str, Any]:
    """The last calls of each rank, as columns; a lane is shifted so that what all made alike is in column 0."""
    records = explanation.records
    alike = {} if explanation.decision is None else explanation.decision.places
    start, call, site, state, column, number = [0], [], [], [], [], []
    texts: dict[str, int] = {}
    sites: dict[str, int] = {}
    for rank, record in records.ranks.items():
        first = max(0, len(record) - MOST_CALLS)
        zero = alike.get(rank, len(record) - 1)
        for at in range(first, len(record)):
            call.append(texts.setdefault(_text(records, record, at), len(texts)))
            site.append(sites.setdefault(records.site(rank, at).location, len(sites)))
            state.append(int(record.is_open[at]) + 2 * int(record.is_message[at]))
            column.append(at - zero)
            number.append(int(record.sequence[at]))
        start.append(len(call))
    return {
        "ranks": list(records.ranks),
        "waits": [rank for rank, record in records.ranks.items() if record.is_open.any()],
        "odd": min(alike, key=lambda rank: len(records.ranks[rank]) - alike[rank], default=-1),
        "alike": bool(alike),
        "calls": list(texts),
        "sites": list(sites),
        "first": min(column, default=0),
        "last": max(column, default=0),
        **{
            name: packed(np.array(values, np.int64))
            for name, values in (
                ("start", start),
                ("call", call),
                ("site", site),
                ("state", state),
                ("column", column),
                ("number", number),
            )
        },
    }


def _text(records: Records, record: RankRecord, at: int) -> str:
    return f"{records.text(record.rank, at)} in group {records.groups[int(record.group[at])]}"
