"""Progress of long work: one line on a terminal, which is overwritten and gone at the end.  Elsewhere a line now and then,
if the work is long."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic

Told = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is; 0 if nobody knows."""

LONG_SECONDS = 10.0
"""Where there is no terminal, there is a line after so many seconds, and then as often."""
_WIDTH = 30
_CLEAR = "\r\033[K"


@contextmanager
def progress(what: str = "", *, alone: bool = False) -> Iterator[Told]:
    """Yield what is to be called as the work goes on.  It writes to stderr: on a terminal one line, which changes; in a
    file or a pipe a line every `LONG_SECONDS`.

    With ``alone`` a thread tells the seconds, from the first on, for work of which nobody knows how much there is.  Not
    for work that forks processes.
    """
    stream = sys.stderr
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        yield _Lines()
        return
    began, over = monotonic(), Event()

    def tell(what: str, done: int, count: int) -> None:
        bar = f" {done} of {count} [{'#' * (_WIDTH * done // count):<{_WIDTH}}]" if count else ""
        stream.write(f"{_CLEAR}{what}{bar} {monotonic() - began:.0f} s")
        stream.flush()

    def tick() -> None:
        while not over.wait(1):
            tell(what, 0, 0)

    clock = Thread(target=tick, daemon=True)
    if alone:
        clock.start()
    elif what:
        tell(what, 0, 0)
    try:
        yield tell
    finally:
        over.set()
        if alone:
            clock.join()
        stream.write(_CLEAR)
        stream.flush()


class _Lines:
    """Tells the progress in lines of their own, one after each `LONG_SECONDS`."""

    def __init__(self) -> None:
        self.began = self.last = monotonic()

    def __call__(self, what: str, done: int, count: int) -> None:
        now = monotonic()
        if now - self.last >= LONG_SECONDS:
            self.last = now
            how_far = f" {done} of {count}" if count else ""
            print(f"{what}{how_far}, {now - self.began:.0f} s", file=sys.stderr, flush=True)
