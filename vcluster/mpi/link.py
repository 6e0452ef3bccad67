"""Commands and replies between the host and a device, with the blocks that they name.

A command or a reply may name a block in the shared memory of a cluster by its offset. Here the block travels along, and
the receiver puts it into its own arena and the new offset into the message.
"""

from __future__ import annotations

import marshal
import pickle
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vcluster.memory import Arena, give_way
from vcluster.messages import Encoded, encode_message
from vcluster.messages.blocks import BLOCK_NBYTES, HOLDER, NBYTES, lend_block, release
from vcluster.messages.encoding import HEADER_BYTES, decode
from vcluster.mpi.endpoint import MpiEndpoint
from vcluster.mpi.statuses import Counts
from vcluster.mpi.transport import REPLY, nap_seconds
from vcluster.processes import RunCommand
from vcluster.processes.command_link import WireLink

SPINS = 200
"""Polls of a rank that waits for a command, before it sleeps."""


def block_at(arena: Arena, offset: int, nbytes: int = 0) -> NDArray[np.uint8]:
    """A block in an arena; of ``nbytes`` bytes if its header does not say."""
    return np.frombuffer(arena.view, np.uint8, nbytes or arena.words(offset, 8)[BLOCK_NBYTES], offset)


def install(endpoint: MpiEndpoint, block: NDArray[np.uint8]) -> int:
    """Put a block that has arrived into the arena. Who adopts or releases it gives its memory back."""
    offset, header, _ = lend_block(endpoint, block.nbytes, endpoint.number)
    words = block[:HEADER_BYTES].view(np.int64)
    header[BLOCK_NBYTES], header[NBYTES] = int(words[BLOCK_NBYTES]), int(words[NBYTES])
    header[HOLDER] = endpoint.number
    endpoint.arena.view[offset + HEADER_BYTES : offset + block.nbytes] = block[HEADER_BYTES:].data
    return offset


def pack_command(arena: Arena, command: RunCommand | None) -> Encoded:
    """A command with the blocks that it names."""
    if command is None:
        return encode_message((pickle.dumps(None),))
    common = block_at(arena, command.common, command.common_block_nbytes)
    own = None if command.own is None else block_at(arena, command.own)
    kept = None if command.kept is None else block_at(arena, command.kept.place, command.kept.block_nbytes)
    return encode_message((pickle.dumps(command, 5), common, own, kept))


def unpack_reply(endpoint: MpiEndpoint, block: NDArray[np.uint8]) -> tuple[Any, Counts | None]:
    """A reply whose blocks lie in the arena now, and what its sender has sent and shown, if it was the last."""
    pickled, counts, blocks = decode(block)
    message = pickle.loads(pickled)
    if blocks:
        message = message._replace(**{name: install(endpoint, block) for name, block in blocks.items()})
    return message, None if counts is None else marshal.loads(counts)


class MpiLink(WireLink):
    """The connection of a device to the host."""

    def __init__(self, endpoint: MpiEndpoint, rank: int) -> None:
        super().__init__(_Wire(endpoint), rank)  # type: ignore[arg-type]
        self._endpoint = endpoint
        self._lent: list[int] = []
        """The blocks of the last command that the worker has copied."""

    def forked(self, *, keep: bool) -> None:
        """In a forked copy of the device: what it prints goes to its descriptors."""
        self._wire = None

    def _packed(self, message: Any) -> Any:
        arena, blocks, offsets = self._endpoint.arena, {}, []
        for name in ("place", "record"):
            offset = getattr(message, name, None)
            if type(offset) is int:
                offsets.append(offset)
                blocks[name] = block_at(arena, offset)
        counts = marshal.dumps(self._endpoint.counts()) if hasattr(message, "run") else None

        def then() -> None:
            for offset in offsets:
                release(arena, offset)

        return encode_message((pickle.dumps(message, 5), counts, blocks)), then

    def _unpacked(self, data: NDArray[np.uint8]) -> Any:
        while self._lent:
            release(self._endpoint.arena, self._lent.pop())
        pickled, *blocks = decode(data)
        command = pickle.loads(pickled)
        if command is None:
            return None
        common, own, kept = map(self._installed, blocks)
        self._lent += [offset for offset in (common, kept) if offset is not None]
        if command.kept is not None:
            command = command._replace(kept=command.kept._replace(place=kept))
        return command._replace(common=common, own=own)

    def _installed(self, block: NDArray[np.uint8] | None) -> int | None:
        return None if block is None else install(self._endpoint, block)


class _Wire:
    """What `WireLink` sends and receives with."""

    def __init__(self, endpoint: MpiEndpoint) -> None:
        self._endpoint = endpoint

    def send(self, data: Any) -> None:
        encoded, then = data
        self._endpoint.send(self._endpoint.layout.host, REPLY, encoded, lend=True, then=then)

    def receive(self) -> Any:
        endpoint, waiting = self._endpoint, Waiting()
        while not endpoint.control:
            endpoint.take_in()
            if not endpoint.control:
                waiting.rest()
        _, message = endpoint.control.pop(0)
        endpoint.next_generation = message.address.generation
        return message.block


class Waiting:
    """Rests between polls: it gives way at first, and then sleeps longer and longer."""

    def __init__(self) -> None:
        self._turns = 0
        self._since = time.monotonic()

    def rest(self, most_seconds: float = 1.0) -> None:
        """Let others run, for at most so long."""
        self._turns += 1
        if self._turns < SPINS:
            give_way()
        else:
            time.sleep(min(nap_seconds(time.monotonic() - self._since), most_seconds))
