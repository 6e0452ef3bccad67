"""`side_by_side`: works that need nothing of each other are done at the same time, on as many cores as there are."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import chain, pairwise
from math import inf
from pathlib import Path
from select import poll
from time import perf_counter
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")
Item = TypeVar("Item")

MOST_COPIES = 7
"""The most copies of this process that are made."""
PATIENCE, PATIENCE_SECONDS = 4, 10.0
"""A copy may take so many times as long as this process for its own share, and so many seconds more."""
HEAD = 8
"""The bytes of the length of a result."""
MOST_PIECES = 32_768
"""The most pieces of works that two processes take from both ends: a pipe holds a byte for each."""
PLACE = 2
"""The bytes of the place of a work: so a pipe holds those of 32,768."""
ROOM = 1 << 20
"""The bytes of results that a copy may have sent before this process reads them: until then it goes on working."""
UNSAFE = ("mpi4py.MPI",)
"""Libraries with connections of their own: a process that has loaded one of them is not copied.

Libraries with threads of their own may be loaded, as PyTorch and JAX.  A copy has none of their threads and calls none of
their functions.  If it waits for one all the same, it is stuck: it is ended, and its works are done here."""
STILL_SECONDS = 5.0
"""A copy that has sent nothing and computed nothing for so long is stuck."""


_ALONE: ContextVar[bool] = ContextVar("_ALONE", default=False)
"""Whether the cores are taken by works that are done side by side: further works are then done one by one."""


def side_by_side(
    works: Sequence[Callable[[], Result]],
    *,
    told: Callable[[int, int], object] | None = None,
    took: Callable[[int, Result], object] | None = None,
) -> list[Result]:
    """The results of all ``works``, in order.

    The works are dealt out to this process and to forked copies of it, one for each further core that it may use.  The
    results of a copy come back in pickles; whatever else a work changes there is lost.  Works that a copy does not do,
    because it fails, dies or takes too long, are done here afterwards, so that errors are those of a process alone.
    ``told(done, all)`` is called here before each work.

    For works of minutes there is ``took(place, result)``, called here for each result as soon as it is known, and for
    all that there are where an exception, such as `KeyboardInterrupt`, ends the work.  Then each process does works that
    stand beside each other, which may share what the process keeps, until all are taken; and copies may take as long as
    they need.

    Without copies, all works are done here: on one core, outside of Linux, beside Python threads that are no daemons, where
    a library of `UNSAFE` is loaded, and inside of a work.  A copy that is stuck is ended, however patient this process is.
    """
    count = _processes(works)
    if took is None:
        dealt = [range(place, len(works), count) for place in range(count)]
        return _Team(works, dealt, told, None, is_patient=False).done()
    parts = _parts(len(works), count)
    try:
        ends = [part.taken(from_front=is_front) for part in parts for is_front in (True, False)]
        shares = [chain.from_iterable(pieces) for pieces in ends[:count]]
        return _Team(works, shares, told, took, is_patient=True).done()
    finally:
        for part in parts:
            part.close()


def first_come(
    works: Sequence[Callable[[], Result]],
    *,
    told: Callable[[int, int], object] | None = None,
    took: Callable[[int, Result], object] | None = None,
) -> list[Result]:
    """The results of all ``works``, in order, for works that take unequally long.

    As `side_by_side` with ``took``, but each process begins the next work as soon as it has done one, so the longest should
    come first; and the patience with copies is that of short works.  This process does the first.
    """
    places = range(len(works))
    turns = _Turns(places[1:])
    try:
        shares: list[Iterable[int]] = [chain(places[:1], turns), *[turns] * (_processes(works) - 1)]
        return _Team(works, shares, told, took or (lambda place, result: None), is_patient=False).done()
    finally:
        turns.close()


def _processes(works: Sequence[object]) -> int:
    """How many processes do the works."""
    return min(max(len(works), 1), 1 + copies())


class _Turns:
    """The places of works, each of which one process takes, in order.  It is made before this process is copied."""

    def __init__(self, places: range) -> None:
        self._left, sending = os.pipe()
        os.write(sending, b"".join(place.to_bytes(PLACE, "little") for place in places))
        os.close(sending)

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        """The next place, for this process."""
        place = os.read(self._left, PLACE)
        if not place:
            raise StopIteration
        return int.from_bytes(place, "little")

    def close(self) -> None:
        """Ends it, also where places are left."""
        os.close(self._left)


class BothEnds(Generic[Item]):
    """Items that two processes take one by one, one from the front and one from the back, until all are taken.

    So both are done at about the same time, however long the work on each takes; and each has items that stand beside
    each other, for which it may keep what they share.  It is made before this process is copied.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items
        self._left, sending = os.pipe()
        os.write(sending, bytes(len(items)))  # whoever takes an item reads one of these
        os.close(sending)

    def taken(self, *, from_front: bool) -> Iterator[Item]:
        """The items that this process takes, each when it is asked for."""
        number = 0
        while os.read(self._left, 1):
            yield self.items[number if from_front else -1 - number]
            number += 1

    def close(self) -> None:
        """Ends it, also where items are left."""
        os.close(self._left)


def _parts(works: int, processes: int) -> list[BothEnds[range]]:
    """The places of works, in a part for two processes each, or for the last one alone: in pieces that are taken whole."""
    length = 1 + works // MOST_PIECES
    bounds = [works * min(number, processes) // processes for number in range(0, processes + 2, 2)]
    parts = list[BothEnds[range]]()
    for first, end in pairwise(bounds):
        pieces = [range(begin, min(begin + length, end)) for begin in range(first, end, length)]
        parts.append(BothEnds(pieces))
    return parts


class _Team:
    """This process and its copies, which do some works together: each those at the places of its share, the first's here.

    Where somebody ``took`` results, copies send each as soon as they have it, else all of them at the end.
    """

    def __init__(
        self,
        works: Sequence[Callable[[], Any]],
        shares: Sequence[Iterable[int]],
        told: Callable[[int, int], object] | None,
        took: Callable[[int, Any], object] | None,
        *,
        is_patient: bool,
    ) -> None:
        self.works, self.shares, self.told, self.took = works, shares, told, took
        self.is_patient = is_patient
        self.copies: list[_Copy] = []
        self.found: dict[int, Any] = {}

    def done(self) -> list[Any]:
        """The results of all works, in order; then there are no copies any more."""
        try:
            return self._results()
        except BaseException:
            self.read(0.0)
            raise
        finally:
            self.end()

    def _results(self) -> list[Any]:
        own, *others = self.shares
        with suppress(OSError):  # the system allows no further process or descriptor
            for share in others:
                self.copies.append(_Copy(self.works, share, at_once=self.took is not None))
        start = perf_counter()
        with _others(len(self.shares) > 1):
            for number, place in enumerate(own):
                self._tell(number)
                self._take(place, self.works[place]())
                if self.took is not None:
                    self.read(0.0)
        self.read(inf if self.is_patient else PATIENCE * (perf_counter() - start) + PATIENCE_SECONDS)
        for place in range(len(self.works)):
            if place not in self.found:
                self._take(place, self.works[place]())
        return [self.found[place] for place in range(len(self.works))]

    def read(self, patience_seconds: float) -> None:
        """Takes what the copies have sent, and waits so long for each."""
        for copy in self.copies:
            copy.read(patience_seconds, self._take)

    def end(self) -> None:
        """Ends the copies."""
        for copy in self.copies:
            copy.end()

    def _tell(self, number: int) -> None:
        """Tells how many works are done, before the one with a number of this process: where nobody takes results as they
        come, copies are taken to be as fast."""
        if self.told is not None:
            count = len(self.works)
            done = len(self.found) if self.took is not None else number * len(self.shares)
            self.told(min(done, count), count)

    def _take(self, place: int, result: Any) -> None:
        self.found[place] = result
        if self.took is not None:
            self.took(place, result)


@contextmanager
def _others(are_there: bool) -> Iterator[None]:
    """What is done meanwhile has no copies of its own, if others work beside it."""
    before = _ALONE.set(_ALONE.get() or are_there)
    try:
        yield
    finally:
        _ALONE.reset(before)


def copies() -> int:
    """How many copies of this process may work beside it."""
    if _ALONE.get() or sys.platform != "linux" or any(name in sys.modules for name in UNSAFE):
        return 0
    current = threading.current_thread()
    if any(not thread.daemon for thread in threading.enumerate() if thread is not current):
        return 0  # one may hold a lock that a copy would wait for
    return min(len(os.sched_getaffinity(0)) - 1, MOST_COPIES)


class _Copy:
    """A forked copy of this process that does the works at some places and ends.

    With ``at_once`` it sends each result as soon as it has it, else all of them at the end: a pipe does not hold much.
    """

    def __init__(self, works: Sequence[Callable[[], Any]], places: Iterable[int], *, at_once: bool) -> None:
        self.data = bytearray()
        self.receiving, sending = _wide_pipe()
        life, self.life = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 and JAX warn of threads: a copy that waits for one is stuck, and ended.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", RuntimeWarning)
            try:
                self.pid = os.fork()
            except OSError:
                for descriptor in (self.receiving, sending, life, self.life):
                    os.close(descriptor)
                raise
        if self.pid == 0:
            gc.freeze()  # what the parent has made is not collected here: it may belong to threads of a library
            os.close(self.receiving)
            os.close(self.life)
            _end_with_parent(life)
            _work(works, places, sending, at_once=at_once)
        os.close(sending)
        os.close(life)

    def read(self, patience_seconds: float, take: Callable[[int, Any], object]) -> None:
        """Takes its results, up to its last one or as far as they come in so many seconds."""
        end = perf_counter() + patience_seconds
        while self._sends_until(end):
            piece = os.read(self.receiving, 1 << 20)
            if not piece:
                return
            self.data += piece
            for place, result in self._whole():
                take(place, result)

    def _sends_until(self, end: float) -> bool:
        """Waits until the copy sends something or ends.  It is False at the time ``end``, and where the copy is stuck."""
        asked = poll()
        asked.register(self.receiving)
        computed = -1.0  # nothing is known yet
        while not asked.poll(1e3 * max(min(end - perf_counter(), STILL_SECONDS), 0.0)):
            if perf_counter() >= end:
                return False
            before, computed = computed, self._computed_seconds()
            if computed == before:
                return False
        return True

    def _computed_seconds(self) -> float:
        """The time for which cores have worked for the copy; -1 where nothing says it."""
        try:
            said = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:  # the copy has ended
            return -1.0
        in_its_code, in_the_system = said.rpartition(")")[2].split()[11:13]
        return (int(in_its_code) + int(in_the_system)) / os.sysconf("SC_CLK_TCK")

    def _whole(self) -> Iterator[tuple[int, Any]]:
        """The results that have come as a whole, each with its place, behind the length of both."""
        while len(self.data) >= HEAD:
            end = HEAD + int.from_bytes(self.data[:HEAD], "little")
            if len(self.data) < end:
                return
            with memoryview(self.data) as sent, sent[HEAD:end] as content:
                place_and_result = pickle.loads(content)  # noqa: S301  (from a copy of this process)
            del self.data[:end]
            yield place_and_result

    def end(self) -> None:
        """Ends the copy, which may have ended before."""
        os.close(self.receiving)
        os.close(self.life)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):  # nobody is told of children where SIGCHLD is ignored
            os.waitpid(self.pid, 0)


def _wide_pipe() -> tuple[int, int]:
    """The ends of a pipe that holds `ROOM`, or less where the system allows no more."""
    import fcntl  # copies are made on Linux alone

    receiving, sending = os.pipe()
    with suppress(OSError):
        fcntl.fcntl(sending, fcntl.F_SETPIPE_SZ, ROOM)
    return receiving, sending


def _end_with_parent(life: int) -> None:
    """The kernel kills this copy when the other end of ``life`` closes, as it does when the parent is killed: what the
    copy works on may take minutes, and nobody waits for it."""
    import fcntl  # copies are made on Linux alone

    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    asked = poll()
    asked.register(life)
    if asked.poll(0):  # it was killed before
        os._exit(1)


def _work(works: Sequence[Callable[[], Any]], places: Iterable[int], sending: int, *, at_once: bool) -> None:
    """What a copy does.  It never returns, and it runs nothing that its parent wanted to run at the end."""
    data = bytearray()
    _ALONE.set(True)
    try:
        with suppress(Exception):  # the parent meets the same error
            for place in places:
                content = pickle.dumps((place, works[place]()), pickle.HIGHEST_PROTOCOL)
                data += len(content).to_bytes(HEAD, "little") + content
                if at_once:
                    data = _sent(data, sending)
        _sent(data, sending)
    finally:
        os._exit(0)


def _sent(data: bytearray, sending: int) -> bytearray:
    """Sends all of the data.  Nothing is left."""
    while data:
        del data[: os.write(sending, data)]
    return data
