"""`side_by_side`: works that need nothing of each other are done at the same time, on as many cores as there are."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import pairwise
from math import inf
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
PLACE = 2
"""The bytes of the place of a work: so a pipe holds those of 32,768."""
ROOM = 1 << 20
"""The bytes of results that a copy may have sent before this process reads them: until then it goes on working."""
UNSAFE = "jax", "mpi4py.MPI", "torch"
"""Libraries with threads or connections of their own: a process that has loaded one of them is not copied."""


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
    stand beside each other, which may share what the process keeps, and copies may take as long as they need.

    Without copies, all works are done here: on one core, outside of Linux, beside threads that are no daemons, where a
    library of `UNSAFE` is loaded, and inside of a work.
    """
    count = min(max(len(works), 1), 1 + copies())
    return _Team(works, count, told, took, is_patient=took is not None).done()


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
    turns = _Turns(range(1, len(works)))
    found = dict[int, Result]()

    def following() -> tuple[int, Result] | None:
        place = next(turns, None)
        return None if place is None else (place, works[place]())

    def first() -> tuple[int, Result]:
        return 0, works[0]()

    def take(_: int, result: tuple[int, Result] | None) -> None:
        if result is not None:
            place, found[place] = result
            if took is not None:
                took(place, found[place])

    def tell(_: int, __: int) -> None:
        if told is not None and len(found) < len(works):
            told(len(found), len(works))

    count = min(max(len(works), 1), 1 + copies())
    try:
        turned = [following] * (len(works) * count - 1)
        _Team([first, *turned] if works else [], count, tell, take, is_patient=False).done()
    finally:
        turns.close()
    for place in range(len(works)):
        if place not in found:  # a copy had taken it that failed
            take(place, (place, works[place]()))
    return [found[place] for place in range(len(works))]


class _Turns:
    """The places of works, each of which one process takes, in order.  It is made before this process is copied."""

    def __init__(self, places: range) -> None:
        self._left, sending = os.pipe()
        os.write(sending, b"".join(place.to_bytes(PLACE, "little") for place in places))
        os.close(sending)

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


class _Team:
    """This process and its copies, which do some works together."""

    def __init__(
        self,
        works: Sequence[Callable[[], Any]],
        count: int,
        told: Callable[[int, int], object] | None,
        took: Callable[[int, Any], object] | None,
        *,
        is_patient: bool,
    ) -> None:
        self.works, self.count, self.told, self.took = works, count, told, took
        self.at_once, self.is_patient = took is not None, is_patient
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
        own, *others = _shares(len(self.works), self.count, beside=self.at_once)
        with suppress(OSError):  # the system allows no further process or descriptor
            for share in others:
                self.copies.append(_Copy([self.works[place] for place in share], share, at_once=self.at_once))
        start = perf_counter()
        with _others(self.count > 1):
            for number, place in enumerate(own):
                self._tell(number)
                self._take(place, self.works[place]())
                if self.at_once:
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
        if self.told is not None:
            count = len(self.works)
            self.told(len(self.found) if self.at_once else min(number * self.count, count), count)

    def _take(self, place: int, result: Any) -> None:
        self.found[place] = result
        if self.took is not None:
            self.took(place, result)


def _shares(works: int, count: int, *, beside: bool) -> list[Sequence[int]]:
    """The places of the works of each process: in turns, or in pieces that stand ``beside`` each other."""
    if not beside:
        return [range(place, works, count) for place in range(count)]
    bounds = [works * place // count for place in range(count + 1)]
    return [range(first, end) for first, end in pairwise(bounds)]


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

    def __init__(self, works: Sequence[Callable[[], Any]], places: Sequence[int], *, at_once: bool) -> None:
        self.places, self.taken, self.data = places, 0, bytearray()
        self.receiving, sending = _wide_pipe()
        life, self.life = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 warns of threads: those here are daemons, and a copy that waits for one is ended.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                self.pid = os.fork()
            except OSError:
                for descriptor in (self.receiving, sending, life, self.life):
                    os.close(descriptor)
                raise
        if self.pid == 0:
            os.close(self.receiving)
            os.close(self.life)
            _end_with_parent(life)
            _work(works, sending, at_once=at_once)
        os.close(sending)
        os.close(life)

    def read(self, patience_seconds: float, take: Callable[[int, Any], object]) -> None:
        """Takes its results, up to its last one or as far as they come in so many seconds."""
        end = perf_counter() + patience_seconds
        asked = poll()
        asked.register(self.receiving)
        while asked.poll(_milliseconds(end - perf_counter())):
            piece = os.read(self.receiving, 1 << 20)
            if not piece:
                return
            self.data += piece
            for result in self._whole():
                take(self.places[self.taken], result)
                self.taken += 1

    def _whole(self) -> Iterator[Any]:
        """The results that have come as a whole, each behind its length."""
        while len(self.data) >= HEAD:
            end = HEAD + int.from_bytes(self.data[:HEAD], "little")
            if len(self.data) < end:
                return
            with memoryview(self.data) as sent, sent[HEAD:end] as content:
                result = pickle.loads(content)  # noqa: S301  (from a copy of this process)
            del self.data[:end]
            yield result

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


def _milliseconds(seconds: float) -> float | None:
    """How long `poll` is to wait: None is without an end."""
    return None if seconds == inf else 1e3 * max(seconds, 0.0)


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


def _work(works: Sequence[Callable[[], Any]], sending: int, *, at_once: bool) -> None:
    """What a copy does.  It never returns, and it runs nothing that its parent wanted to run at the end."""
    data = bytearray()
    _ALONE.set(True)
    try:
        with suppress(Exception):  # the parent meets the same error
            for work in works:
                content = pickle.dumps(work(), pickle.HIGHEST_PROTOCOL)
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
