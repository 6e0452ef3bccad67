"""An asynchronous receive: the operation of one message that is awaited, without a generator.

A device that has posted a receive looks for its message in every poll of every later call, so a look must be cheap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from parallelism.operation import Lane
from vcluster.code import ClusterError
from vcluster.messages.envelopes import Envelope
from vcluster.messages.tasks import Wait

if TYPE_CHECKING:
    from vcluster.messages.mailbox import Mailbox


class Receive:
    """A task that takes one message of a tag; ``open`` makes the result of what has arrived.

    It has what a `vcluster.messages.tasks.Task` has, without a generator.
    """

    __slots__ = ("_key", "_mailbox", "_open", "error", "finished", "lane", "location", "result", "what")

    def __init__(
        self, mailbox: Mailbox, lane: Lane, tag: int, open: Callable[[Envelope], Any], what: object, location: str
    ) -> None:
        self._mailbox, self._key, self._open = mailbox, (0, tag), open
        self.lane, self.what, self.location = lane, what, location
        self.finished = False
        self.result: Any = None
        self.error: BaseException | None = None

    @property
    def waits_for(self) -> Wait:
        """What it waits for."""
        return Wait(lambda: self._mailbox.may_take(self._key), lambda: self._mailbox.needs_message(self._key))

    def advance(self) -> bool:
        """Take the message if it is there. True if the operation is finished.

        What a handler of a signal raises while this only looks leaves the operation as it is.
        """
        if self.finished:
            return True
        try:
            if not self._mailbox.may_take(self._key):
                return False
        except ClusterError as error:
            self._end_with(error)
            return True
        try:
            self.result = self._open(self._mailbox.take(self._key))
        except BaseException as error:
            self._end_with(error)
        self.finished = True
        return True

    def _end_with(self, error: BaseException) -> None:
        """End with an error, which wait() raises again."""
        if isinstance(error, ClusterError):
            error.called_at = self.location
        self.error = error
        self.finished = True
