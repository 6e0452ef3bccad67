"""The words in which strategies are written: ``tp``, ``tp:model``, ``tp@block.*=8``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

DEFAULT_AXIS = {"dp": "dp", "tp": "tp", "sp": "tp", "zero": "dp", "pp": "pp", "cp": "cp", "ep": "ep"}
"""The axis that a word is about if it names none."""
_AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORD = re.compile(
    r"(?P<name>[a-z0-9_]+)(:(?P<axis>[A-Za-z_][A-Za-z0-9_]*))?(@(?P<regions>[^=]+))?(=(?P<value>.+))?"
)


_SCHEDULE = re.compile(
    r"(?P<name>[a-z0-9_]+):(?P<microbatches>[0-9]{1,18})(x(?P<chunks>[0-9]{1,18}))?"
    r"(?P<recompute>,recompute)?(,batch=(?P<batch>[A-Za-z_][A-Za-z0-9_]*))?(,meshes=(?P<meshes>[A-Za-z0-9_=.|]+))?"
)


class ScheduleWord(NamedTuple):
    """The schedule of a pipeline: ``1f1b:8``, ``interleaved_1f1b:8x2``, ``1f1b:8,recompute,batch=N``."""

    name: str
    microbatches: int
    chunks: int = 1
    """The stages on a rank."""
    recompute: bool = False
    batch: str = "B"
    meshes: str = ""
    """Those of the stages, if they have their own: ``dp=2.tp=2|dp=3``."""

    def __str__(self) -> str:
        chunks = f"x{self.chunks}" if self.chunks > 1 else ""
        batch = f",batch={self.batch}" if self.batch != "B" else ""
        return f"{self.name}:{self.microbatches}{chunks}{',recompute' * self.recompute}{batch}" + (
            f",meshes={self.meshes}" if self.meshes else ""
        )


class Word(NamedTuple):
    """One word of a strategy's text."""

    name: str
    axis: str | None
    regions: tuple[str, ...]
    value: str | None
    schedule: ScheduleWord | None = None
    """That of a pipeline."""


def word(name: str, axis: str | None = None, regions: Sequence[str] = (), value: Any = None) -> str:
    """The text of a word.  A default axis is not written."""
    text = name if axis in (None, DEFAULT_AXIS.get(name)) else f"{name}:{axis}"
    text += f"@{','.join(regions)}" if regions else ""
    return text if value is None else f"{text}={value}"


def read(text: str) -> Word:
    """The parts of a word, with its axis.  ``ValueError`` if it is none."""
    found = _WORD.fullmatch(text)
    if found is None:
        raise ValueError(
            f"a word of a strategy is a name, then :axis, @regions and =value as needed, such as "
            f"tp@block.*=8; got {text!r}"
        )
    name, regions = found["name"], found["regions"]
    return Word(
        name,
        found["axis"] or DEFAULT_AXIS.get(name),
        tuple(regions.split(",")) if regions else (),
        found["value"],
    )


def read_all(text: str) -> list[Word]:
    """The words of a strategy; that of a pipeline with its schedule, ``1f1b:8``, which is a word of its own."""
    if not isinstance(text, str):
        raise TypeError(f"a strategy is read from text, got {text!r}")
    written = text.split()
    schedules = [found for found in map(_SCHEDULE.fullmatch, written) if found]
    words = [read(each) for each in written if not _SCHEDULE.fullmatch(each)]
    pipelines = [each for each in words if each.name == "pp"]
    if len(schedules) != len(pipelines) or len(pipelines) > 1:
        raise ValueError(
            "a pipeline is written as pp and a schedule with its number of microbatches, such as pp "
            f"1f1b:8, once; got {len(pipelines)} pp and {len(schedules)} schedules in {text!r}"
        )
    for found in schedules:
        schedule = ScheduleWord(
            found["name"],
            int(found["microbatches"]),
            int(found["chunks"] or 1),
            found["recompute"] is not None,
            found["batch"] or "B",
            found["meshes"] or "",
        )
        words[words.index(pipelines[0])] = pipelines[0]._replace(schedule=schedule)
    return words


def checked_axis(transform: Any) -> None:
    """``ValueError`` unless the axis of a transform is a name."""
    if not isinstance(transform.axis, str) or not _AXIS.fullmatch(transform.axis):
        raise ValueError(
            f"the axis of {type(transform).__name__} must be the name of a mesh axis, got {transform.axis!r}"
        )
