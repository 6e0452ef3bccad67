"""The page of plans: time against memory, the best by part, a table of all, what was refused, and the first one's step.

It has the data and scripts inside, as the page of a trace (`vcluster.report.page`), and its timeline and memory.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from parallelism.trace import STEP_PARTS, Trace
from parallelism.whole_files import written_whole
from vcluster.report.page import page
from vcluster.report.payload import payload

SECTIONS = {
    "notes": "plans.js",
    "front": "plans.js",
    "best": "plans.js",
    "plans": "plans.js",
    "answers": "plans.js",
    "refused": "plans.js",
    "timeline": "timeline.js",
    "memory": "memory.js",
}
LABELS = {
    "tp": "tp, exposed",
    "cp": "cp, exposed",
    "ep": "ep, exposed",
    "dp": "sums over dp, exposed",
    "zero": "ZeRO, exposed",
    "pp": "messages, exposed",
    "communication": "other communication",
    "bubble": "bubble: waits for others",
    "recompute": "computed again",
}
MOST_BARS = 5000


def plan_html(
    path: str | PathLike[str],
    *,
    title: str,
    verdict: Sequence[str],
    facts: Sequence[tuple[str, str]],
    plans: Mapping[str, Any],
    front: Sequence[int],
    rows: Sequence[Mapping[str, Any]],
    refused: Sequence[tuple[str, int]],
    answers: Sequence[tuple[str, str]] = (),
    notes: Sequence[str] = (),
    trace: Trace | None = None,
) -> None:
    """Write the page of plans to ``path``.  ``OSError`` if it cannot be written.

    ``plans`` has all plans as columns: ``names`` of settings, ``columns`` of numbers by name, ``words`` for those that
    are numbers of words, ``seconds``, ``peaks`` in bytes, and ``full``, whether the seconds are those of a full
    simulation.  ``front`` are plans on the front of time and memory.  ``rows`` are the best plans with their ``split``
    in words, ``seconds``, ``mfu``, ``peak_bytes`` and seconds of ``parts``.  ``answers`` are texts with a command each.
    ``notes``, on what was assumed, stand behind the first pictures.  ``trace`` is that of the first plan.
    """
    data: dict[str, Any] = {"title": title, "verdict": verdict, "facts": facts, "left_out": []}
    if trace is not None:
        shown = payload(trace, most_bars=MOST_BARS)
        kept = ("parts", "makespan", "ranks", "left_out", "timeline", "memory")
        data |= {key: shown[key] for key in kept if key in shown}
    used = {part for row in rows for part, seconds in row["parts"].items() if seconds > 0}
    names = [part for part in STEP_PARTS if part in used]
    data |= {
        "front": front if plans["seconds"] else None,
        "plans": plans if plans["seconds"] else None,
        "best": {"names": names, "labels": LABELS, "rows": rows} if rows else None,
        "refused": [[reason, f"{count:,}"] for reason, count in refused] or None,
        "answers": list(answers) or None,
        "notes": list(notes) or None,
    }
    with written_whole(path) as file:
        file.write(page(data, "plans.html", SECTIONS, ("page.css", "plans.css")))
