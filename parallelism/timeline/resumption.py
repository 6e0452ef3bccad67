"""The engine of a replay, put into the state in which it is when transfers begin to disturb each other.

Up to this moment the times are known (`parallelism.timeline.undisturbed`), so the engine does not find them again.  In
each lane it goes on with the first step that is not over by then: a step that ends later, or that started something
which does.  All that was started before is over, and on no link any more.
"""

import numpy as np

from parallelism.timeline.engine import Replay
from parallelism.timeline.matching import COLLECTIVE, RECV, SEND, Places
from parallelism.timeline.undisturbed import Steps, Times, Undisturbed


def resumed(engine: Replay, steps: Steps, known: Undisturbed) -> Times:
    """The known times without those of the steps that the ``engine`` goes on with.

    The engine has the same steps, and is not run yet.
    """
    starts, durations, clocks = known.times
    lane = np.repeat(np.arange(len(steps.lengths)), steps.lengths)
    first = _first_steps(steps, lane, known)
    again = np.arange(len(lane)) >= first[lane]
    engine.next = first.tolist()
    goes_on = first < np.cumsum(steps.lengths)
    next_starts = np.append(starts, 0)[first]
    engine.clock = np.where(goes_on, next_starts, clocks).tolist()

    # Messages that were sent before, and are received from now on.
    recvs = np.flatnonzero(again & (steps.roles == RECV))
    sends = np.flatnonzero(~again & (steps.roles == SEND))
    arrived = sends[np.isin(steps.keys[sends], steps.keys[recvs])]
    engine.sent = dict(zip(steps.keys[arrived].tolist(), known.over[arrived].tolist(), strict=True))

    # Operations that were started before, and are waited for from now on.
    waits = np.flatnonzero(again & (known.operation >= 0))
    waits = waits[~again[known.operation[waits]]]
    started = known.operation[waits]
    works = zip(lane[waits].tolist(), steps.works[waits].tolist(), strict=True)
    engine.issued = dict(zip(works, started.tolist(), strict=True))
    engine.over = dict(zip(started.tolist(), known.over[started].tolist(), strict=True))
    return Times(np.where(again, 0, starts), np.where(again, 0, durations), clocks)


def _first_steps(steps: Steps, lane: Places, known: Undisturbed) -> Places:
    """For each lane, the place of the step to go on with; that after its last step if all are over."""
    starts, durations, _ = known.times
    first: Places = np.cumsum(steps.lengths)
    later = np.flatnonzero(np.maximum(known.over, starts + durations) > known.disturbed)
    np.minimum.at(first, lane[later], later)
    # All members of a collective go on before it, or none.
    meets = np.flatnonzero(steps.roles == COLLECTIVE)
    group = np.unique(steps.keys[meets], return_inverse=True)[1]
    while True:
        again = np.bincount(group, meets >= first[lane[meets]])[group] > 0
        before = first.copy()
        np.minimum.at(first, lane[meets[again]], meets[again])
        if (first == before).all():
            return first
