"""The worker's end of the line between the benchmarks and a peer: JSON, a line each way for each case.

    worker                                   benchmarks
    {"rank": 2, "version": "..."}  ------->
                                   <-------  {"case": {...}, "count": 30}
    {"times": [[start, end], ...]} ------->  or {"wrong": "..."}, or {"failed": "..."}
                                   <-------  end of file: the worker ends

Every rank has a line of its own and sleeps on it between cases: an idle peer spins on no core while another is timed.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable

from benchmarks.cases import Case, Times, WrongAnswerError


def serve(path: str, rank: int, version: str, rounds: Callable[[Case, int], Times]) -> None:
    """Answer until the line is closed.  After a failure it is of no use any more, and ends."""
    line = socket.socket(socket.AF_UNIX)
    line.connect(path)
    with line, line.makefile("rw", encoding="utf-8") as stream:

        def say(values: dict[str, object]) -> None:
            stream.write(json.dumps(values) + "\n")
            stream.flush()

        say({"rank": rank, "version": version})
        for text in stream:
            asked = json.loads(text)
            try:
                say({"times": rounds(Case(**asked["case"]), asked["count"])})
            except WrongAnswerError as error:
                say({"wrong": str(error)})
                return
            except Exception as error:
                say({"failed": f"{type(error).__name__}: {error}"})
                return
