"""The words in which strategies are written: ``tp``, ``tp:model``, ``tp@block.*=8``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

SHORTHANDS = ("fsdp", "hsdp")
"""Words that stand for several others."""
DEFAULT_AXIS = {
    "dp": "dp",
    "tp": "tp",
    "sp": "tp",
    "tp_overlap": "tp",
    "zero": "dp",
    "pp": "pp",
    "cp": "cp",
    "ring": "cp",
    "ulysses": "cp",
    "ep": "ep",
    **dict.fromkeys(SHORTHANDS, "dp"),
}
"""The axis that a word is about if it names none."""
REPLICA = "replica"
"""The axis of whole replicas around the devices that share the state, in hybrid sharding."""
_AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORD = re.compile(
    r"(?P<name>[a-z0-9_]+)(:(?P<axis>[A-Za-z_][A-Za-z0-9_]*(\+[A-Za-z_][A-Za-z0-9_]*)*))?(@(?P<regions>[^=]+))?(=(?P<value>.+))?"
)


_SCHEDULE = re.compile(
    r"(?P<name>[a-z0-9_]+):(?P<microbatches>[0-9]{1,18})(x(?P<chunks>[0-9]{1,18}))?"
    r"(?P<recompute>,recompute)?(,batch=(?P<batch>[A-Za-z_][A-Za-z0-9_]*))?(,meshes=(?P<meshes>[A-Za-z0-9_=.|]+))?"
    r"(,shares=(?P<shares>[0-9]{1,9}(\|[0-9]{1,9})*))?"
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
    """The meshes of the stages, if they have their own: ``dp=2.tp=2|dp=3``."""
    shares: str = ""
    """In what relation replicas have rows, if not equally many: ``1|3``."""

    def __str__(self) -> str:
        chunks = f"x{self.chunks}" if self.chunks > 1 else ""
        batch = f",batch={self.batch}" if self.batch != "B" else ""
        meshes = f",meshes={self.meshes}" if self.meshes else ""
        shares = f",shares={self.shares}" if self.shares else ""
        return (
            f"{self.name}:{self.microbatches}{chunks}{',recompute' * self.recompute}{batch}{meshes}{shares}"
        )


class Word(NamedTuple):
    """One word of a strategy's text."""

    name: str
    axis: str | None
    regions: tuple[str, ...]
    value: str | None
    schedule: ScheduleWord | None = None
    """The schedule of a pipeline."""


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
    words = spelled_out(words)
    pipelines = [each for each in words if each.name == "pp"]
    for found in schedules:
        schedule = ScheduleWord(
            found["name"],
            int(found["microbatches"]),
            int(found["chunks"] or 1),
            found["recompute"] is not None,
            found["batch"] or "B",
            found["meshes"] or "",
            found["shares"] or "",
        )
        words[words.index(pipelines[0])] = pipelines[0]._replace(schedule=schedule)
    return words


def spelled_out(words: Sequence[Word]) -> list[Word]:
    """The words with what ``fsdp=64`` and ``hsdp=8x8`` mean in their place.

    ``fsdp=64`` is ``dp=64 zero=3 overlap``: 64 devices share weights, gradients and state, gather them block by block, one
    block ahead, and reduce-scatter gradients (Zhao et al., *PyTorch FSDP*, 2023, arXiv:2304.11277).  ``hsdp=8x4`` is
    ``dp:replica=8 dp=4 zero=3 overlap``: 8 replicas of 4 devices that share; the parts of gradients are then all-reduced
    over the replicas (section 3.2.2).  Another overlap that is written beside them counts in place of theirs, as
    ``fsdp=64 overlap=ahead:2``.
    """
    found: list[Word] = []
    shorthands = [each for each in words if each.name in SHORTHANDS]
    overlapped = any(each.name == "overlap" for each in words)
    for each in words:
        if each not in shorthands:
            found.append(each)
            continue
        outer, inner = _extents(each)
        if each.name == "hsdp":
            found.append(Word("dp", REPLICA, each.regions, outer))
        found += [Word("dp", each.axis, each.regions, inner), Word("zero", each.axis, (), "3")]
        if not overlapped:
            found.append(Word("overlap", None, (), None))
            overlapped = True
    return found


def _extents(shorthand: Word) -> tuple[str | None, str | None]:
    """How many replicas there are, and how many devices share one, as texts.  ``fsdp`` gives only the second number."""
    if shorthand.name == "fsdp" or shorthand.value is None:
        return None, shorthand.value
    extents = re.fullmatch(r"([0-9]+)x([0-9]+)", shorthand.value)
    if extents is None:
        raise ValueError(
            "hsdp is followed by the number of replicas and that of the devices that share one, such as hsdp=8x4; got "
            f"{shorthand.value!r}"
        )
    return extents[1], extents[2]


def checked_axis(transform: Any) -> None:
    """``ValueError`` unless the axis of a transform is a name."""
    checked_name(transform.axis, type(transform).__name__)


def checked_name(axis: Any, transform: str) -> None:
    """``ValueError`` unless this is the name of an axis."""
    if not isinstance(axis, str) or not _AXIS.fullmatch(axis):
        other = (
            "; parallelism.Pipeline(stages, microbatches) is a schedule, and this is a transform of programs"
        )
        more = other if transform == "Pipeline" and isinstance(axis, int) else ""
        raise ValueError(f"the axis of {transform} must be the name of a mesh axis, got {axis!r}{more}")
