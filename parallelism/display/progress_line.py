"""Progress of long work: one line on a terminal, which is overwritten and gone at the end.  Elsewhere nothing."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic

Told = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is; 0 if nobody knows."""

_WIDTH = 30
_CLEAR = "\r\033[K"


@contextmanager
def progress(what: str = "", *, alone: bool = False) -> Iterator[Told]:
    """Yield what is to be called as the work goes on.  It writes to stderr if that is a terminal.

    With ``alone`` a thread tells the seconds, from the first on, for work of which nobody knows how much there is.  Not
    for work that forks processes.
    """
    stream = sys.stderr
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda what, done, count: None
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
