"""What the zero-bubble paper measured, and the bubble rates that it prints beside that.

Qi, Wan, Huang and Lin, *Zero Bubble Pipeline Parallelism* (2023), table 5.
"""

from __future__ import annotations

SCHEDULES = ("1f1b", "zero_bubble_h1", "zero_bubble_h2")

MEASURED = (    # stages, microbatches; F, B (of the input), W, message in ms; printed: 1F1B, ZB-H1, ZB-H2
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242, 0.0837),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.124, 0.0674, 0.0444),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323, 0.0698),
    (8, 32, 29.802, 29.428, 19.53, 0.577, 0.1898, 0.1045, 0.0559),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554, 0.0294),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397, 0.0672),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.1088, 0.0516),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0576, 0.0266),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1421, 0.0641),
    (32, 128, 10.408, 10.204, 7.703, 0.408, 0.2168, 0.1106, 0.049),
    (32, 256, 10.402, 10.248, 7.698, 0.46, 0.1352, 0.0594, 0.0257),
)


def costs_of(row):
    """The costs of a row by kind of action, in ms."""
    _, _, f, i, w, message, *_ = row
    return {"F": f, "B": i + w, "I": i, "W": w, "message": message}


def printed(row, schedule):
    """The bubble rate that is printed for a schedule."""
    return row[6 + SCHEDULES.index(schedule)]
