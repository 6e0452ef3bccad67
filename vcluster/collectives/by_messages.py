"""The collectives, message by message: the steps of a named algorithm, run over channels.

The steps are those of `parallelism.collectives.algorithms`, what a member holds between them is
`parallelism.collectives.buffers`; here the messages really go from process to process, each recorded under the
collective it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from parallelism.collectives import Message, Reduction
from parallelism.collectives.buffers import arrive, finish, outgoing, start
from vcluster.collectives.call import Call, agree
from vcluster.collectives.group import Group
from vcluster.messages import encode_message

if TYPE_CHECKING:
    from vcluster.messages import Endpoint, Wait

OnMessage = Callable[[str, int, int], None]
"""Called for every message with "send" or "recv", the peer's rank, and the bytes."""


def run_stepwise(
    endpoint: Endpoint, group: Group, call: Call, x: NDArray[Any] | None, reduction: Reduction | None,
    on_message: OnMessage,
) -> Generator[Wait, None, tuple[Any, list[Call]]]:
    """The result and everybody's call."""
    sequence = yield from group.post(call, None, 0, 0)
    told = group.disagreement(sequence, call)
    calls = [call] * group.size if told is None else agree(call, told)
    giver = next((c for c in calls if c.gives), call)
    steps, position = call.steps(), group.position
    held = start(steps, position, x, dim=call.dim, sizes=call.sizes or None)
    op = reduction.combine if reduction is not None else None
    for sends, receives in zip(steps.sends(position), steps.receives(position), strict=True):
        for transfer in sends:
            peer = group.ranks[transfer.target]
            encoded = encode_message(outgoing(held, transfer))
            on_message("send", peer, encoded.nbytes)
            yield from endpoint.mailbox(peer).sending(encoded, sequence, lane=group.key)
        messages = []
        for transfer in receives:
            peer = group.ranks[transfer.source]
            envelope = yield from endpoint.mailbox(peer).receiving(sequence, lane=group.key)
            on_message("recv", peer, envelope.nbytes)
            messages.append(Message(transfer.source, transfer.chunks, envelope.open(), transfer.reduce))
        held = arrive(held, messages, position, op)
    kind = call.of_kind
    dim = call.concat_dim if kind.blocks_of_all else call.dim
    result = finish(steps, position, held, x, dim=dim, shape=giver.shape)
    return _own(result, reduction, len(kind.sources_of(position, group.size, call.root))), calls


def _own(result: Any, reduction: Reduction | None, terms: int) -> Any:
    """A result may be a view of somebody's input, or of a message: make it the caller's own."""
    if result is None:
        return None
    if isinstance(result, list):
        return [np.array(array) for array in result]
    own = np.array(result, dtype=None if reduction is None else reduction.dtype)
    if reduction is not None:
        reduction.finish(own, terms)
    return own
