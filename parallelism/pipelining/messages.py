"""The messages between the actions of a schedule: the result that each takes, where its own goes, and their tags."""

from collections.abc import Iterable
from typing import NamedTuple

from parallelism.pipelining.actions import KINDS, MESSAGES, Action
from parallelism.pipelining.pipeline import Pipeline

NOBODY = -1
"""In place of a rank, where an action takes no result, or where no action takes its result."""


class Passed(NamedTuple):
    """The results of neighbouring stages that an action takes, and gives.

    A listed ``SEND`` only gives, and a listed ``RECV`` only takes.
    """

    source: int
    """The rank, in the pipeline, of the action whose result is taken; `NOBODY` if none is."""
    taken: int
    """The tag of this result; of no meaning where there is no source."""
    target: int
    """The rank of the action that takes the result; `NOBODY` if none does."""
    given: int
    """The tag of this result; of no meaning where there is no target."""


def passed(pipeline: Pipeline, actions: Iterable[Action]) -> list[Passed]:
    """What each of these actions takes and gives.

    A tag says which action takes the result, so every result of a step has another.  It does not matter whether the
    stage that takes a gradient splits its backward.
    """
    schedule, count = pipeline.schedule, pipeline.microbatches
    ranks = (*schedule.placement, NOBODY)       # also of the stage before the first, and of that after the last
    rules = {kind: (
        1 if kind[-1] == "F" else -1,
        kind[0] != "S" and (kind in MESSAGES or schedule.passes_on(kind)),
        kind[0] != "R" and (kind in MESSAGES or schedule.passes_on(kind))) for kind in (*KINDS, *MESSAGES)}
    found = []
    for stage, kind, microbatch in actions:
        step, takes, gives = rules[kind]
        tag = 2 * (stage * count + microbatch) + (step < 0)
        found.append(Passed(
            ranks[stage - step] if takes else NOBODY, tag, ranks[stage + step] if gives else NOBODY,
            tag + 2 * count * step))
    return found


def message_user(pipeline: Pipeline, tag: int) -> Action:
    """The action that receives the message with this tag: F, or B for any backward that takes a gradient."""
    stage, microbatch = divmod(tag // 2, pipeline.microbatches)
    return Action(stage, "B" if tag % 2 else "F", microbatch)


def free_tag(pipeline: Pipeline) -> int:
    """The first tag that no message between stages has."""
    return 2 * pipeline.stages * pipeline.microbatches
