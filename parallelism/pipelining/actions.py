"""The entries of a schedule: an `Action`, or an `Overlapped` pair of actions, and their notation.

The notation is that of ``torch.distributed.pipelining``.  ``2F0`` is the forward of microbatch 0 on stage 2,
``1SEND_F3`` sends the output of stage 1 for microbatch 3, and ``(0F7;7B3)OVERLAP_F_B`` runs a forward and a backward
together.

    F  forward                           SEND_F  the output goes to the next stage
    B  whole backward, I and W in one    RECV_F  the input comes from the stage before
    I  backward for the input            SEND_B  the gradient of the input goes to the stage before
    W  backward for the weights          RECV_B  the gradient of the output comes from the next stage
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from parallelism.display import shortened

KINDS = ("F", "B", "I", "W")
"""Forward; whole backward; backward for the input; backward for the weights."""

MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
"""Messages between ranks.  A schedule may leave them out, because they follow from the other actions."""

OVERLAPPED = "OVERLAP_F_B"

BEFORE = {"R": "F", "B": "F", "I": "F", "W": "I", "SEND_F": "F", "SEND_B": "I"}
"""For each kind of action the one that comes before it on its stage, for the same microbatch.  ``R`` computes dropped
values again."""
_TAKES = {"F": (-1, "F"), "RECV_F": (-1, "SEND_F"), "B": (1, "I"), "I": (1, "I"), "RECV_B": (1, "SEND_B")}
"""For each kind of action with an input from a neighbouring stage: the step to this stage, and what it does before."""

_ACTION = re.compile(r"\s*([0-9]+)([A-Z]|(?:SEND|RECV)_[A-Z])([0-9]+)\s*")
_PAIR = re.compile(rf"\s*\(([^();]*);([^();]*)\){OVERLAPPED}\s*")
_OF_PARAMETERS = re.compile(r"\s*[0-9]+(?:UNSHARD|RESHARD|REDUCE_GRAD)\s*")


class Action(NamedTuple):
    """One piece of work: ``str(Action(2, "F", 0)) == "2F0"``, and `parse` reads that back.

    >>> from parallelism import Action
    >>> action = Action.parse("2F0")
    >>> action.stage, action.kind, action.microbatch
    (2, 'F', 0)
    """

    stage: int
    kind: str
    microbatch: int

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action of a text such as ``2F0``: stage, kind, microbatch.  ``ValueError`` if it is not an action."""
        match = _ACTION.fullmatch(text)
        if not match or match[2] not in KINDS + MESSAGES:
            raise ValueError(
                f"an action is a stage, a kind ({', '.join(KINDS + MESSAGES)}) and a microbatch, as in '2F0'; "
                f"got {shortened(text)}"
            )
        return cls(int(match[1]), match[2], int(match[3]))

    @property
    def needs(self) -> tuple[Action, ...]:
        """The actions that must come before.  Ignore a stage after the last one; an ``I`` may be part of a ``B``."""
        stage, kind, k = self
        needs = (Action(stage, BEFORE[kind], k),) if kind in BEFORE else ()
        step, source = _TAKES.get(kind, (0, ""))
        return (*needs, Action(stage + step, source, k)) if step and stage + step >= 0 else needs

    @property
    def works(self) -> tuple[Action, ...]:
        """The action itself, as a tuple; see `Overlapped.works`."""
        return (self,)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Overlapped(NamedTuple):
    """A forward and a backward of two stages of a rank that run as one entry of the schedule.

    >>> from parallelism import Action, Overlapped
    >>> str(Overlapped(Action(0, "F", 5), Action(3, "B", 1)))
    '(0F5;3B1)OVERLAP_F_B'

    The computation of one hides the messages of the other.  Each starts when its inputs are there.  The replay and a
    device run the forward first.
    """

    forward: Action
    backward: Action

    @classmethod
    def parse(cls, text: str) -> Overlapped:
        """The pair of a text such as ``(0F7;7B3)OVERLAP_F_B``; ``ValueError`` if it is not a pair."""
        match = _PAIR.fullmatch(text)
        pair = match and cls(Action.parse(match[1]), Action.parse(match[2]))
        if not pair or pair.forward.kind != "F" or pair.backward.kind not in ("B", "I"):
            raise ValueError(
                f"an overlapped pair is an F and a B, as in '(0F7;7B3)OVERLAP_F_B'; got {shortened(text)}"
            )
        return pair

    @property
    def kind(self) -> str:
        """``OVERLAP_F_B``."""
        return OVERLAPPED

    @property
    def works(self) -> tuple[Action, ...]:
        """The two actions, forward first."""
        return self.forward, self.backward

    def __str__(self) -> str:
        return f"({self.forward};{self.backward}){OVERLAPPED}"


Step = Action | Overlapped
"""One entry of a rank's order."""

Written = Step | str | Iterable[object]
"""The forms in which an entry may be given: itself, text, ``(stage, kind, microbatch)``, or a pair of those."""


def parse_step(text: str) -> Step:
    """An action or an overlapped pair from its text."""
    return Overlapped.parse(text) if text.lstrip().startswith("(") else Action.parse(text)


def as_step(given: Written) -> Step:
    """The entry in any of its forms, as a value.  ``ValueError`` or ``TypeError`` if it is not an entry."""
    if type(given) is tuple and len(given) == 3:  # most are
        return Action(*given)  # type: ignore[arg-type]
    if isinstance(given, Action | Overlapped):
        return given
    if isinstance(given, str):
        return parse_step(given)
    fields = tuple(given) if isinstance(given, Iterable) else ()
    if len(fields) == 2:
        return Overlapped.parse(f"({';'.join(str(as_step(field)) for field in fields)}){OVERLAPPED}")  # type: ignore[arg-type]
    if len(fields) != 3:
        raise TypeError(
            f"an action is text such as '2F0', or (stage, kind, microbatch); got {shortened(given)}"
        )
    stage, kind, microbatch = fields
    return Action(stage, kind, microbatch)  # type: ignore[arg-type]


def is_about_parameters(text: str) -> bool:
    """Whether the text is one of torch's actions that gather or reduce a stage's parameters.  They are ignored."""
    return bool(_OF_PARAMETERS.fullmatch(text))


def earlier(kind: str) -> tuple[str, ...]:
    """The kinds of the actions that a microbatch has had on a stage before one of this kind, in order."""
    before = BEFORE.get(kind)
    return () if before is None else (*earlier(before), before)


def parts(kind: str) -> tuple[str, ...]:
    """The parts of a kind: a whole backward consists of ``I`` and ``W``; any other kind of itself."""
    return ("I", "W") if kind == "B" else (kind,)
