"""The messages between the actions of a schedule: the result that each takes, where its own goes, and their tags."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from parallelism.arrays import Ints
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


def passed(pipeline: Pipeline, actions: Sequence[Action]) -> list[Passed]:
    """What each of these actions takes and gives.

    A tag says which action takes the result, so every result of a step has another.  It does not matter whether the
    stage that takes a gradient splits its backward.
    """
    return list(_passed(*_facts(pipeline), tuple(actions)))


def passed_columns(pipeline: Pipeline, actions: Sequence[Action]) -> Ints:
    """`passed` as an array: a row for each field of `Passed`, a column for each action."""
    return _columns(*_facts(pipeline), actions)


def _facts(pipeline: Pipeline) -> tuple[tuple[int, ...], int, tuple[str, ...]]:
    """What decides who passes what on: the rank of each stage, the number of microbatches, the kinds that pass on."""
    schedule = pipeline.schedule
    return schedule.placement, pipeline.microbatches, tuple(filter(schedule.passes_on, KINDS))


@lru_cache(maxsize=16)
def _passed(
    placement: tuple[int, ...], count: int, passing: tuple[str, ...], actions: tuple[Action, ...]
) -> tuple[Passed, ...]:
    """`passed`, found once: the steps of a training repeat their actions."""
    return tuple(map(Passed, *_columns(placement, count, passing, actions).tolist()))


def _columns(
    placement: tuple[int, ...], count: int, passing: tuple[str, ...], actions: Sequence[Action]
) -> Ints:
    ranks = np.array([*placement, NOBODY])  # also of the stage before the first, and of that after the last
    kinds = {kind: number for number, kind in enumerate((*KINDS, *MESSAGES))}
    step_of = np.where([kind[-1] == "F" for kind in kinds], 1, -1)
    passes = np.array([kind in MESSAGES or kind in passing for kind in kinds])
    takes = passes & [kind[0] != "S" for kind in kinds]
    gives = passes & [kind[0] != "R" for kind in kinds]
    stages, names, microbatches = zip(*actions, strict=True) if actions else ((), (), ())
    kind = np.array([kinds[name] for name in names], np.int64)
    stage, step = np.array(stages, np.int64), step_of[kind]
    tag = 2 * (stage * count + np.array(microbatches, np.int64)) + (step < 0)
    return np.stack(
        [
            np.where(takes[kind], ranks[stage - step], NOBODY),
            tag,
            np.where(gives[kind], ranks[stage + step], NOBODY),
            tag + 2 * count * step,
        ]
    )


def message_user(pipeline: Pipeline, tag: int) -> Action:
    """The action that receives the message with this tag: F, or B for any backward that takes a gradient."""
    stage, microbatch = divmod(tag // 2, pipeline.microbatches)
    return Action(stage, "B" if tag % 2 else "F", microbatch)


def free_tag(pipeline: Pipeline) -> int:
    """The first tag that no message between stages has."""
    return 2 * pipeline.stages * pipeline.microbatches
