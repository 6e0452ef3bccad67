"""What both ends of a channel say of a message and of each other."""

from collections.abc import Callable
from typing import Any, NamedTuple


def name_of(rank: int) -> str:
    """A rank in words."""
    return "the host" if rank < 0 else f"rank {rank}"


class Envelope(NamedTuple):
    """A message that has arrived: its description, and its content on request."""

    lane: int
    tag: int
    nbytes: int
    open: Callable[[], Any]
    """Returns the content. It may be called once."""
    taken: Callable[[], None]
    """Tells the sender that the message was taken."""


class Described:
    """A send or a receive in words, when they are asked for."""

    __slots__ = ("_name", "_peer", "_tag")

    def __init__(self, name: str, peer: int, tag: int) -> None:
        self._name, self._peer, self._tag = name, peer, tag

    def __str__(self) -> str:
        return (
            f"{self._name}({'to' if self._name == 'send' else 'from'} {name_of(self._peer)}, tag {self._tag})"
        )
