"""A collective by messages: the steps of a named algorithm, run over channels.

`parallelism.algorithms.algorithms` defines the steps, and `parallelism.collectives.buffers` the state between them.
Here the messages really go from process to process, and each is recorded under its collective.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

from parallelism.arrays import Array
from parallelism.collectives import Message, Result
from parallelism.collectives.buffers import arrive, finish, outgoing, sources_held, start
from parallelism.collectives.results import joined
from vcluster.collectives.general import Way, deliver, write
from vcluster.collectives.group import Calls
from vcluster.messages import Steps, Wait, encode_message


@dataclass(slots=True, eq=False)
class ByMessages(Way):
    """One run of a call by messages."""

    x: Array | None = None
    result: Any = None
    """The array, or the list of them, that is left after the last step, or the `Result` that joins arrays."""
    dtype: np.dtype[Any] | None = None
    """The dtype of the result, of which NumPy's joining and adding keep all but the byte order."""
    terms: int = 0
    """The number of arrays that a reduction combines."""

    def prepare(self, x: Array | None, out: Array | None) -> None:
        """Keep ``x`` for the messages."""
        self.x = x if x is None or x.flags.c_contiguous else np.ascontiguousarray(x)

    def run(self) -> Generator[Wait, None, Calls]:
        """Meet the other members and exchange the messages.  Every member's call, in group order."""
        sequence = yield from self.group.post(self.call, None, 0, 0)
        calls = self.group.calls(sequence, self.call)
        yield from self.exchange(sequence, calls)
        return calls

    def exchange(self, sequence: int, calls: Calls) -> Steps:
        """Exchange the messages of the operation, which every member has posted."""
        call, group, x = self.call, self.group, self.x
        giver = next((other for other in calls if other.gives), call)
        steps, position = call.over(call.size), group.position
        held = start(steps, position, x, dim=call.dim, sizes=call.sizes or None)
        combine = None if self.reduction is None else self.reduction.combine
        for sends, receives in zip(steps.sends(position), steps.receives(position), strict=True):
            for transfer in sends:
                peer = group.ranks[transfer.target]
                encoded = encode_message(outgoing(held, transfer))
                self.on_message("send", peer, encoded.nbytes)
                yield from self.endpoint.mailbox(peer).sending(encoded, sequence, lane=group.key)
            messages = []
            for transfer in receives:
                peer = group.ranks[transfer.source]
                envelope = yield from self.endpoint.mailbox(peer).receiving(sequence, lane=group.key)
                self.on_message("recv", peer, envelope.nbytes)
                messages.append(Message(transfer.source, transfer.chunks, envelope.open(), transfer.reduce))
            held = arrive(held, messages, position, combine)
        yield from group.settle()
        kind = call.of_kind
        self.dtype = giver.dtype if kind.joins or kind.reduces else None
        self.terms = len(kind.sources_of(position, group.size, call.root))
        dim = call.concat_dim if kind.blocks_of_all else call.dim
        if kind.joins and kind.is_got_by(position, call.root):  # joined where the result lies
            whole = joined(sources_held(steps, position, held), dim)
            self.result = whole._replace(dtype=giver.dtype or whole.dtype)
        else:
            self.result = finish(steps, position, held, x, dim=dim, shape=giver.shape)

    def finish(self, out: Array | None) -> Steps:
        """The result, in ``out`` if it is given.  It may be a view of an input, or of a message, and is copied."""
        yield from ()
        parts = self.result
        results = [self._own(part) for part in parts] if isinstance(parts, list) else self._own(parts)
        return deliver(write(self.endpoint, self.call.kind, results, out), out)

    def _own(self, array: Any) -> Result | None:
        if array is None or isinstance(array, Result):
            return array
        array, reduction = np.asarray(array), self.reduction

        def fill(own: Array) -> None:
            np.copyto(own, array)
            if reduction is not None:
                reduction.finish(own, self.terms)

        return Result(array.shape, self.dtype or array.dtype, fill)
