"""``algorithm="mpi"``: the collectives of the MPI library itself.

The members meet as for any other call, so that a mismatch is named before MPI is called. Then each starts the
nonblocking collective of MPI on a communicator of the group (`vcluster.mpi.communicators`), and polls until it is done:
a member that is cancelled meanwhile leaves it, with its memory, to the library. What MPI cuts or joins lies in one
buffer, in the order of the group, packed where the dim is not the first. MPI writes into the caller's ``out`` where
that will do: new memory costs more than the collective, since the kernel clears its pages.

The library chooses how it moves and combines: a sum may have other bits than that of the direct algorithm, and other
bits from library to library, and a maximum of NaN and a number is either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np

from parallelism.arrays import Array
from parallelism.collectives import Reduction
from parallelism.collectives.results import copy_of, joined
from vcluster.collectives import ByMessages, Call
from vcluster.collectives.general import deliver, write
from vcluster.collectives.group import Calls
from vcluster.messages import Steps, Wait
from vcluster.mpi.endpoint import MpiEndpoint
from vcluster.mpi.transport import SMALL_BYTES

_OPS = {
    "sum": "SUM",
    "mean": "SUM",
    "prod": "PROD",
    "max": "MAX",
    "min": "MIN",
    "and": "BAND",
    "or": "BOR",
    "xor": "BXOR",
}
"""The operation of MPI for each that has a name here; a mean is divided at the end."""

_KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "scatter",
    "gather",
    "all_scatter",
    "barrier",
)
"""The kinds that MPI has, each a method of `_Start`: an all_scatter is MPI's all_gather of arrays of any length."""

TESTS = 50
"""Tests of a request in one poll, for a large array: with each of them MPI moves a part."""

_REDUCED = "?bhilqBHILQfdgFDG"
"""The dtypes that every MPI reduces, by the characters of NumPy; bools as bytes."""


def check_library(call: Call, reduction: Reduction | None) -> None:
    """``ValueError`` or ``TypeError`` if MPI has no such collective."""
    if call.kind not in _KINDS:
        raise ValueError(f"MPI has no {call.kind}; algorithm='mpi' is for {', '.join(_KINDS)}")
    if reduction is None:
        return
    if reduction.ufunc is None:
        raise ValueError(
            f"algorithm='mpi' combines by MPI's own operations, op is one of {', '.join(_OPS)}; got the "
            f"function {reduction.name}"
        )
    if reduction.dtype.char not in _REDUCED:
        raise TypeError(
            f"not every MPI can reduce {reduction.dtype}; convert it, or leave out algorithm='mpi'"
        )


ShapeAndDtype = tuple[tuple[int, ...], np.dtype[Any]]
"""The shape and dtype of an array."""


@dataclass(slots=True, eq=False)
class OfLibrary(ByMessages):
    """One run of a call by the library."""

    out: Array | None = None
    """The caller's memory for the result."""

    def prepare(self, x: Array | None, out: Array | None) -> None:
        """Keep ``x`` and ``out`` for the library."""
        ByMessages.prepare(self, x, out)
        self.out = out

    def exchange(self, sequence: int, calls: Calls) -> Steps:
        """Start the collective of MPI, and wait until it is done."""
        if self.call.size == 1:
            yield from ByMessages.exchange(self, sequence, calls)
            return
        end = self.endpoint
        assert isinstance(end, MpiEndpoint)
        communicator = yield from end.communicators.of(self.call.ranks)
        start = _Start(communicator, end.transport.mpi, self.call, calls, self.x, self.out, self.reduction)
        getattr(start, self.call.kind)()

        tests = TESTS if max(call.nbytes for call in calls) > SMALL_BYTES else 1

        def is_done() -> bool:
            for _ in range(tests):
                if start.request.Test():
                    return True
            end.take_in()
            return False

        end.transport.collectives += 1
        try:
            if not is_done():
                yield Wait(is_done, list)  # all are in the call: nothing that a device does is missing
        except BaseException:
            end.communicators.leave(communicator)
            end.transport.leave(start.request, start.memory)
            raise
        finally:
            end.transport.collectives -= 1
        self.result = start.result()
        self.terms = self.call.size

    def finish(self, out: Array | None) -> Steps:
        """The result, in ``out`` if it is given."""
        if self.call.size == 1:
            return (yield from ByMessages.finish(self, out))
        result = self.result
        if isinstance(result, np.ndarray) and self.reduction is not None:
            self.reduction.finish(result, self.terms)
        if result is None or result is out:
            return result
        if out is None:
            return np.array(result) if result is self.x else result
        return deliver(write(self.endpoint, self.call.kind, copy_of(result), out), out)


class _Start:
    """A collective that MPI is asked for: its request, its memory, and what makes the result of that."""

    def __init__(
        self,
        communicator: Any,
        mpi: Any,
        call: Call,
        calls: Calls,
        x: Array | None,
        out: Array | None,
        reduction: Reduction | None,
    ) -> None:
        self.communicator = communicator
        self.request: Any = None
        self.result: Callable[[], Any] = lambda: None
        self._mpi, self._call, self._calls, self._x, self._out = mpi, call, calls, x, out
        giver = next((each for each in calls if each.gives), call)
        self._giver, self._dtype = giver, giver.dtype or np.dtype(np.uint8)
        self._op = None if reduction is None else getattr(mpi, _OPS[reduction.name])
        self.memory: list[Any] = []
        """What MPI reads and writes until the request is done."""

    def barrier(self) -> None:
        self.request = self.communicator.Ibarrier()

    def all_reduce(self) -> None:
        own, out = self._own(), self._out
        if (
            out is not None and out.flags.carray and own.dtype.isnative and np.may_share_memory(own, out)
        ):  # are one
            given, total, self.result = self._mpi.IN_PLACE, self._terms(out), lambda: out
        else:
            given, (total, self.result) = self._terms(own), self._total(own.shape)
        self.request = self.communicator.Iallreduce(given, total, self._op)

    def reduce(self) -> None:
        given = self._terms(self._own())
        total = None
        at_root = self._call.position == self._call.root
        if at_root:
            total, self.result = self._total(self._own().shape)
        self.request = self.communicator.Ireduce(given, total, self._op, self._call.root)

    def reduce_scatter(self) -> None:
        blocks = self._blocks(self._own(), self._call)
        total, self.result = self._total(blocks[self._call.position].shape)
        given = self._terms(_packed(blocks, self._own(), self._call))
        self.request = self.communicator.Ireduce_scatter(
            given, total, [block.size for block in blocks], self._op
        )

    def broadcast(self) -> None:
        root = self._call.root
        array = self._own() if self._call.position == root else self._new(self._giver.shape or ())
        self.result = lambda: array
        self.request = self.communicator.Ibcast(self._bytes(array), root)

    def scatter(self) -> None:
        call = self._call
        block, given = self._new(_shape_of_block(self._giver, call.position)), None
        if call.gives:
            blocks = self._blocks(self._own(), call)
            given = self._bytes(_packed(blocks, self._own(), call), [each.nbytes for each in blocks])
        self.result = lambda: block
        self.request = self.communicator.Iscatterv(given, self._bytes(block), call.root)

    def gather(self) -> None:
        whole = None
        if self._call.position == self._call.root:
            whole, self.result = self._joined(self._sent(), self._calls[0].dim)
        self.request = self.communicator.Igatherv(self._bytes(self._own()), whole, self._call.root)

    def all_gather(self) -> None:
        whole, self.result = self._joined(self._sent(), self._calls[0].dim)
        self.request = self.communicator.Iallgatherv(self._bytes(self._own()), whole)

    def all_scatter(self) -> None:
        whole, parts = self._received(self._sent())
        self.result = lambda: [part.copy() for part in parts]
        self.request = self.communicator.Iallgatherv(self._bytes(self._own()), whole)

    def all_to_all(self) -> None:
        call = self._call
        blocks = self._blocks(self._own(), call)
        given = self._bytes(_packed(blocks, self._own(), call), [block.nbytes for block in blocks])
        blocks_here = [(_shape_of_block(each, call.position), self._dtype) for each in self._calls]
        whole, self.result = self._joined(blocks_here, call.concat_dim)
        self.request = self.communicator.Ialltoallv(given, whole)

    # -- buffers -------------------------------------------------------------------------------------------------------

    def _own(self) -> Array:
        assert self._x is not None
        return self._x

    def _new(self, shape: Sequence[int], dtype: np.dtype[Any] | None = None) -> Array:
        """An array for the result: ``out``, if it is such an array and lies apart from what is given, or a new one."""
        out, dtype = self._out, self._dtype if dtype is None else dtype
        if (
            out is None
            or (out.shape, out.dtype) != (tuple(shape), dtype)
            or not out.flags.carray
            or (self._x is not None and np.may_share_memory(out, self._x))
        ):
            return np.empty(shape, dtype)
        return out

    def _blocks(self, array: Array, call: Call) -> list[Array]:
        return [array[call.block(position)] for position in range(call.size)]

    def _bytes(self, array: Array, counts: Sequence[int] | None = None) -> list[Any]:
        """A buffer for MPI, of bytes; with ``counts``, in so many pieces."""
        flat = array.reshape(-1).view(np.uint8)
        self.memory.append(flat)
        how = flat.nbytes if counts is None else (counts, list(accumulate(counts, initial=0))[:-1])
        return [flat, how, self._mpi.BYTE]

    def _terms(self, array: Array) -> list[Any]:
        """A buffer for MPI, of numbers that it can combine."""
        array = array.astype(self._dtype.newbyteorder("="), copy=False)
        flat = array.reshape(-1)
        if flat.dtype == bool:
            flat = flat.view(np.uint8)
        self.memory.append(flat)
        return [flat, flat.size, self._mpi.Datatype.fromcode(flat.dtype.char)]

    def _total(self, shape: Sequence[int]) -> tuple[list[Any], Callable[[], Array]]:
        """A buffer for what MPI combines, and what gives it in the dtype of the terms."""
        total = self._new(shape, self._dtype.newbyteorder("="))
        return self._terms(total), lambda: total.astype(self._dtype, copy=False)

    def _sent(self) -> list[ShapeAndDtype]:
        """The shapes and dtypes of the arrays of all members."""
        return [(call.shape or (), call.dtype or self._dtype) for call in self._calls]

    def _joined(self, arrays: Sequence[ShapeAndDtype], dim: int) -> tuple[list[Any], Callable[[], Array]]:
        """A buffer for MPI in which arrays arrive one after the other, and what joins them."""
        shapes, dtypes = zip(*arrays, strict=True)
        if dim or not shapes[0] or len(set(dtypes)) > 1:
            whole, parts = self._received(arrays)
            return whole, lambda: _joined(parts, dim)
        result = self._new((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtypes[0])
        return self._bytes(result, [dtypes[0].itemsize * prod(shape) for shape in shapes]), lambda: result

    def _received(self, arrays: Sequence[ShapeAndDtype]) -> tuple[list[Any], list[Array]]:
        """A buffer for MPI in which arrays arrive one after the other, and these arrays."""
        counts = [dtype.itemsize * prod(shape) for shape, dtype in arrays]
        places = list(accumulate(counts, initial=0))
        whole = np.empty(places[-1], np.uint8)
        parts = [
            whole[a:b].view(dtype).reshape(shape)
            for (a, b), (shape, dtype) in zip(pairwise(places), arrays, strict=True)
        ]
        return self._bytes(whole, counts), parts


def _shape_of_block(call: Call, position: int) -> tuple[int, ...]:
    """The shape of what a call gives a member."""
    shape = list(call.shape or ())
    shape[call.dim] = call.sizes[position]
    return tuple(shape)


def _packed(blocks: Sequence[Array], array: Array, call: Call) -> Array:
    """The blocks of an array one after the other."""
    if call.dim == 0:
        return array.reshape(-1)
    packed = np.empty(array.size, array.dtype)  # NumPy's own would have another byte order
    return np.concatenate([block.reshape(-1) for block in blocks], out=packed)


def _joined(parts: Sequence[Array], dim: int) -> Array:
    shape, dtype, fill, _ = joined(parts, dim)
    array = np.empty(shape, dtype)
    fill(array)
    return array
