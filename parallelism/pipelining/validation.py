"""Validation of schedules: an action may be missing, doubled, too early, or on a second rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelism.pipelining.actions import KINDS, MESSAGES, OVERLAPPED, Action, parts

if TYPE_CHECKING:
    from parallelism.pipelining.schedule import Schedule

_OTHER_END = {
    "SEND_F": ("RECV_F", 1),
    "RECV_F": ("SEND_F", -1),
    "SEND_B": ("RECV_B", -1),
    "RECV_B": ("SEND_B", 1),
}
Places = dict[tuple[int, str, int], tuple[int, int]]
"""Rank and step of every action; a B is listed as I and W."""


def validate(schedule: Schedule) -> None:
    """Raise ``ValueError`` for the first mistake; see `Schedule.validate`."""
    places = _places(schedule)
    for rank, row in enumerate(schedule.actions):
        for step, entry in enumerate(row):
            for action in entry.works:
                _check_needs(schedule, places, rank, step, action)
    kinds = "FIW" if schedule.training else "F"
    for stage, rank in enumerate(schedule.placement):
        for k in range(schedule.microbatches):
            lacking = [kind for kind in kinds if (stage, kind, k) not in places]
            if lacking:
                action = Action(stage, "B" if lacking == ["I", "W"] else lacking[0], k)
                raise ValueError(
                    f"{_at(schedule, rank, len(schedule.actions[rank]))}, the end: {action} is missing"
                )
    schedule.timeline()


def _check_needs(schedule: Schedule, places: Places, rank: int, step: int, action: Action) -> None:
    at = _at(schedule, rank, step)
    if action.kind in MESSAGES:
        kind, by = _OTHER_END[action.kind]
        other = Action(action.stage + by, kind, action.microbatch)
        if not 0 <= other.stage < schedule.stages:
            raise ValueError(f"{at}: {action} has no stage {other.stage} at its other end")
        holder = schedule.placement[other.stage]
        if holder == rank:
            raise ValueError(f"{at}: {action} is between stages of one rank, which needs no message")
        if other not in places:
            raise ValueError(f"{at}: {action} is without its {other}, which is missing on rank {holder}")
    for need in schedule.needs(action):
        word = as_in(need, action)
        if need not in places:
            raise ValueError(
                f"{at}: {action} needs {word}, which is missing on rank {schedule.placement[need.stage]}"
            )
        owner, when = places[need]
        if owner == rank and when > step:
            raise ValueError(f"{at}: {action} is too early; {word} comes at step {when}")
        if owner == rank and when == step:
            raise ValueError(f"{at}: {action} needs {word}, which the same step runs; they cannot overlap")


def _put(schedule: Schedule, places: Places, rank: int, step: int, action: Action) -> None:
    """Notes the place of an action.  ``ValueError`` if it has one already."""
    stage, kind, k = action
    for part in parts(kind):
        first = places.setdefault((stage, part, k), (rank, step))
        if first != (rank, step):
            before = schedule.actions[rank][first[1]]
            raise ValueError(
                f"{_at(schedule, rank, step)}: {action} is doubled; {before} was at step {first[1]}"
            )


def _places(schedule: Schedule) -> Places:
    """The rank and step of every action.  ``ValueError`` for an action that is wrong by itself."""
    places: Places = {}
    owner: dict[int, int] = {}
    for rank, row in enumerate(schedule.actions):
        for step, entry in enumerate(row):
            for action in entry.works:
                _check_alone(schedule, rank, step, action)
                if owner.setdefault(action.stage, rank) != rank:
                    raise ValueError(
                        f"{_at(schedule, rank, step)}: {action} runs stage {action.stage}, which lies on "
                        f"rank {owner[action.stage]}"
                    )
                _put(schedule, places, rank, step, action)
            kinds = [action.kind for action in entry.works]
            if entry.kind == OVERLAPPED and (kinds[0] != "F" or kinds[1] not in ("B", "I")):
                raise ValueError(f"{_at(schedule, rank, step)}: {entry} should overlap an F with a B")
    for rank in range(schedule.ranks):
        held = sorted(stage for stage, holder in owner.items() if holder == rank)
        if len(held) != schedule.chunks:
            raise ValueError(
                f"schedule {schedule.name!r}, rank {rank} runs stages {held}, where chunks={schedule.chunks}"
            )
    return places


def _check_alone(schedule: Schedule, rank: int, step: int, action: Action) -> None:
    stage, kind, k = action
    at = f"{_at(schedule, rank, step)}: {action}"
    if kind not in KINDS + MESSAGES:
        raise ValueError(f"{at} is of kind {kind!r}; the kinds are {', '.join(KINDS)}")
    if not schedule.training and kind not in ("F", "SEND_F", "RECV_F"):
        raise ValueError(f"{at} is a backward; the schedule is one without training")
    for noun, number, count in (("stage", stage, schedule.stages), ("microbatch", k, schedule.microbatches)):
        if not 0 <= number < count:
            raise ValueError(f"{at} is of {noun} {number}; the schedule has {count}, counted from 0")


def as_in(need: Action, action: Action) -> Action:
    """The need, named as a reader expects it: a B needs a B, an I needs an I."""
    return need._replace(kind=action.kind) if need.kind == "I" and action.kind == "B" else need


def _at(schedule: Schedule, rank: int, step: int) -> str:
    return f"schedule {schedule.name!r}, rank {rank}, step {step}"
