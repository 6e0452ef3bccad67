"""What is timed: one operation on arrays of one size, with the answer that every rank must find each time.

A case means the same to every system, so that figures compare.  This module is read by the peers' interpreters too,
which have NumPy but nothing of vcluster.

**The clock.** A round is two barriers, the call, a barrier, and a look at the answer.  The first barrier absorbs what
ranks did since the last call (checking 64 MiB takes one longer than another), the second lets them go together.  Each
rank notes `time.perf_counter` before and after its call; that clock is one for all processes of a machine.
`seconds_of` makes one figure of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

ITEM_BYTES = 4
"""Everything is float32, as in the peers' own benchmarks; the values are small integers, so sums are exact."""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier")
POINT_TO_POINT = ("round_trip", "stream")
OPERATIONS = (*COLLECTIVES, *POINT_TO_POINT)
COPY = "copy"
"""No operation, but what limits them: each of some processes copies its own array (`benchmarks.copying`)."""
MEMORIES = ("private", "shared")

LOOP_WARM = 20
"""Calls before those of a loop that are timed."""

STREAM_MESSAGES = 16
"""Messages that one round of ``stream`` sends, one after the other."""

Array = NDArray[np.float32]
Times = list[tuple[float, float]]
"""Start and end of each round on one rank, by the machine's clock."""


class WrongAnswerError(Exception):
    """A timed operation gave something else than it must."""


@dataclass(frozen=True)
class Case:
    """One operation at one size.

    ``nbytes`` is the whole buffer: the input of an all_reduce, a reduce_scatter, an all_to_all, a broadcast or a
    message, the output of an all_gather.  Where it is dealt to the ranks each gets the same, at least one element.
    ``memory`` is ``private`` (ordinary arrays) or ``shared`` (of `VirtualDevice.empty`, which only vcluster has).
    ``fresh``: without ``out=``, each result is a new array.  ``in_a_loop``: calls follow each other without barriers.
    """

    operation: str
    nbytes: int
    memory: str = "private"
    fresh: bool = False
    in_a_loop: bool = False

    def __post_init__(self) -> None:
        for what, got, right in (
            ("operation", self.operation, (*OPERATIONS, COPY)), ("memory", self.memory, MEMORIES)
        ):
            if got not in right:
                raise ValueError(f"the {what} of a case is one of {', '.join(right)}, got {got!r}")
        least = 0 if self.operation == "barrier" else ITEM_BYTES
        if self.nbytes < least:
            raise ValueError(f"a case of {self.operation} has at least {least} bytes, got {self.nbytes}")

    def part(self, size: int) -> int:
        """The elements that each of ``size`` ranks has of a buffer that is dealt out."""
        return max(1, self.nbytes // ITEM_BYTES // size)


_PERIOD = 1021  # a prime: no shift by a piece's length maps the pattern onto itself
_BLOCK = 1 << 15
_PATTERN = (np.arange(_BLOCK + _PERIOD) % _PERIOD).astype(np.float32)
_STEP = 64.0


@dataclass(frozen=True)
class _Piece:
    """Elements ``start`` to ``stop`` of the answer: scale * (index + shift) % 1021 + offset."""

    start: int
    stop: int
    shift: int
    scale: float
    offset: float

    def blocks(self) -> list[tuple[slice, Array]]:
        found = []
        for start in range(self.start, self.stop, _BLOCK):
            stop = min(start + _BLOCK, self.stop)
            place = (start + self.shift) % _PERIOD
            values = _PATTERN[place : place + stop - start] * np.float32(self.scale) + np.float32(self.offset)
            found.append((slice(start, stop), values))
        return found


class Trial:
    """The arrays of one rank for one case: ``x`` to give, ``out`` to be filled, and the answer to hold against it.

    Rank r's input is ``index % 1021 + 64 r``.  What a rank does not need is an empty array.
    """

    def __init__(self, case: Case, rank: int, size: int, empty: Callable[[int], Array] | None = None) -> None:
        """``empty(elements)`` makes the arrays; NumPy does if it is not given."""
        make = empty if empty is not None else lambda elements: np.empty(elements, np.float32)
        self.case, self.rank, self.size = case, rank, size
        part = case.part(size)
        dealt = part * size
        whole = max(1, case.nbytes // ITEM_BYTES)
        total = _STEP * (size * (size - 1) // 2)
        given, self._answer = {
            "all_reduce": (whole, [_Piece(0, whole, 0, size, total)]),
            "all_gather": (part, [_Piece(j * part, (j + 1) * part, -j * part, 1, _STEP * j) for j in range(size)]),
            "reduce_scatter": (dealt, [_Piece(0, part, rank * part, size, total)]),
            "all_to_all": (
                dealt, [_Piece(j * part, (j + 1) * part, (rank - j) * part, 1, _STEP * j) for j in range(size)]
            ),
            "broadcast": (whole, [_Piece(0, whole, 0, 1, 0.0)]),
            "barrier": (0, []),
            "round_trip": (whole, [_Piece(0, whole, 0, 1, 0.0)]),
            "stream": (whole, [_Piece(0, whole, 0, 1, 0.0)]),
            COPY: (whole, [_Piece(0, whole, 0, 1, _STEP * rank)]),
        }[case.operation]
        self.x = make(given)
        self.out = make(self._answer[-1].stop if self._answer else 0)
        for block, values in _Piece(0, given, 0, 1, _STEP * rank).blocks():
            self.x[block] = values

    def spoil(self) -> None:
        """Fill ``out`` with what no answer contains, so that no round can live on the one before."""
        self.out.fill(-1)

    def load(self) -> None:
        """Put ``x`` into ``out``, for a system that works in place."""
        np.copyto(self.out, self.x)

    def check(self, answer: Any) -> None:
        """Raise `WrongAnswerError` unless every element of ``answer`` is right.

        Ranks that only help (all but rank 0 in a round trip, but rank 1 in a stream) have none to give.
        """
        if not self._answer or self.rank != {"round_trip": 0, "stream": 1}.get(self.case.operation, self.rank):
            return
        found = np.asarray(answer).reshape(-1)
        if found.size != self._answer[-1].stop:
            raise self._wrong(f"{self._answer[-1].stop} elements were expected, {found.size} came")
        for piece in self._answer:
            for block, values in piece.blocks():
                if not np.array_equal(found[block], values):
                    at = int(np.flatnonzero(found[block] != values)[0])
                    raise self._wrong(f"element {block.start + at} must be {values[at]}, got {found[block][at]}")

    def _wrong(self, how: str) -> WrongAnswerError:
        case = self.case
        return WrongAnswerError(
            f"{case.operation} of {case.nbytes} bytes ({case.memory}) on rank {self.rank} of {self.size}: {how}"
        )


def timed_rounds(
    trial: Trial, count: int, barrier: Callable[[], object], call: Callable[[], Any],
    prepare: Callable[[], None] | None = None,
) -> Times:
    """``count`` rounds of ``call`` on this rank; each answer is checked, outside the clock, when everybody has one:
    where ranks share cores, who has finished would else take the core from those that have not.

    One more goes before them to warm up: two where results are fresh, since the last one lives while the next is made.
    """
    if trial.case.in_a_loop:
        return _loop(trial, count, barrier, call, prepare)
    warm = 2 if trial.case.fresh else 1
    make_ready = prepare if prepare is not None else trial.spoil
    times: Times = []
    for _ in range(warm + count):
        make_ready()
        barrier()
        barrier()
        start = time.perf_counter()
        answer = call()
        end = time.perf_counter()
        barrier()
        trial.check(answer)
        times.append((start, end))
    return times[warm:]


def _loop(
    trial: Trial, count: int, barrier: Callable[[], object], call: Callable[[], Any],
    prepare: Callable[[], None] | None,
) -> Times:
    """``count`` calls in a plain loop; the last answer is checked."""
    (prepare if prepare is not None else trial.spoil)()
    for _ in range(LOOP_WARM):
        call()
    barrier()
    times: Times = []
    start = time.perf_counter()
    for _ in range(count):
        answer = call()
        end = time.perf_counter()
        times.append((start, end))
        start = end
    barrier()
    trial.check(answer)
    return times


def receive_stream(receive: Callable[[], Array]) -> Array:
    """Take the messages of one ``stream`` round; looks into each as it comes, returns the last for a whole check."""
    message = np.empty(0, np.float32)
    for number in range(STREAM_MESSAGES):
        message = receive()
        if message[0] != 0.0 or message[-1] != (message.size - 1) % _PERIOD:
            raise WrongAnswerError(f"message {number} of a stream begins {message[0]} and ends {message[-1]}")
    return message


def seconds_of(operation: str, times: Sequence[Times]) -> list[float]:
    """One figure a round, from every rank's start and end.

    A collective: from the moment the last rank starts until the last has finished.  No system could have finished
    before the last rank came, so this leaves out little more than the ranks' way out of the barrier; calls made back to
    back, with no barrier, cost about as much.  A broadcast counts from the first start, since its root need not wait
    for anybody.  A round trip: rank 0's own.  A stream: from the sender's start to the receiver's end, a message.
    A copy: the slowest rank's own.
    """
    if operation == COPY:
        return [max(end - start for start, end in rounds) for rounds in zip(*times, strict=True)]
    if operation == "round_trip":
        return [end - start for start, end in times[0]]
    if operation == "stream":
        return [
            (received[1] - sent[0]) / STREAM_MESSAGES for sent, received in zip(times[0], times[1], strict=True)
        ]
    begin = min if operation == "broadcast" else max
    return [
        max(end for _, end in rounds) - begin(start for start, _ in rounds) for rounds in zip(*times, strict=True)
    ]


def seconds_in_a_loop(times: Sequence[Times]) -> list[float]:
    """One figure a call: from the moment the last rank had ended the call before.  Their sum is that of the loop."""
    ends = [max(end for _, end in rounds) for rounds in zip(*times, strict=True)]
    begin = max(rounds[0][0] for rounds in times)
    return [end - start for start, end in zip([begin, *ends], ends, strict=False)]


def seconds_from_first_start(operation: str, times: Sequence[Times]) -> list[float]:
    """As `seconds_of`, but a collective counts from the moment the first rank starts: its upper bound."""
    if operation in (*POINT_TO_POINT, COPY):
        return seconds_of(operation, times)
    return [
        max(end for _, end in rounds) - min(start for start, _ in rounds) for rounds in zip(*times, strict=True)
    ]
