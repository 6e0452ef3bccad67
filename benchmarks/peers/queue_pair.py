"""Two processes and a ``multiprocessing.Queue`` each way: ``python -m benchmarks.peers.queue_pair SOCKET``."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.cases import STREAM_MESSAGES, Case, Times, Trial, receive_stream, timed_rounds
from benchmarks.peers.link import serve


def main(path: str) -> None:
    """Serve both ranks.  This process has one thread as yet, so the other may be forked."""
    context = multiprocessing.get_context("fork")
    queues, barrier = (context.Queue(), context.Queue()), context.Barrier(2)
    other = context.Process(target=_serve, args=(path, 1, queues, barrier))
    other.start()
    _serve(path, 0, queues, barrier)
    other.join()


def _serve(path: str, rank: int, queues: tuple[Any, Any], barrier: Any) -> None:
    outgoing, incoming = queues[rank], queues[1 - rank]

    def rounds(case: Case, count: int) -> Times:
        trial = Trial(case, rank, 2)
        return timed_rounds(trial, count, barrier.wait, _call(trial, outgoing, incoming))

    serve(path, rank, f"python {sys.version.split()[0]}", rounds)


def _call(trial: Trial, outgoing: Any, incoming: Any) -> Callable[[], Any]:
    def round_trip() -> Any:
        if trial.rank == 0:
            outgoing.put(trial.x)
            return incoming.get()
        outgoing.put(incoming.get())
        return None

    def stream() -> Any:
        if trial.rank == 1:
            return receive_stream(incoming.get)
        for _ in range(STREAM_MESSAGES):
            outgoing.put(trial.x)
        return None

    return round_trip if trial.case.operation == "round_trip" else stream


if __name__ == "__main__":
    main(sys.argv[1])
