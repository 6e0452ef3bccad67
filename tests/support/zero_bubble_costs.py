"""What the zero-bubble paper measured, and the bubble rates that it prints beside that.

Qi, Wan, Huang and Lin, *Zero Bubble Pipeline Parallelism* (2023), table 5; the numbers are in
``tests/data/zero_bubble_costs.json``.
"""

from __future__ import annotations

import json

from paths import DATA

MEASURED = json.loads((DATA / "zero_bubble_costs.json").read_text(encoding="utf-8"))["rows"]
"""By row: ``ranks`` and ``microbatches``; milliseconds of F, I (backward of the input), W and of a message; the printed
bubble rates of 1F1B, ZB-H1 and ZB-H2."""
SCHEDULES = {"1f1b": "1F1B", "zero_bubble_h1": "ZB-H1", "zero_bubble_h2": "ZB-H2"}
"""The name that the paper prints, by ours."""


def costs_of(row):
    """The costs of a row by kind of action, in ms."""
    return {"F": row["F"], "B": row["I"] + row["W"], "I": row["I"], "W": row["W"], "message": row["message"]}


def printed(row, schedule):
    """The bubble rate that is printed for a schedule."""
    return row[SCHEDULES[schedule]]
