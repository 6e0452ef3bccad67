"""A process that sends signals later, at a given moment, as `kill` from a terminal would."""

from __future__ import annotations

import heapq
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

INTERVAL_SECONDS = 0.002


class Hand:
    """The process, as its user sees it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__))], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is not meant for it
        )
        os.set_blocking(self._process.stdout.fileno(), False)
        self._left = 0

    def later(self, seconds: float, pid: int, number: int) -> None:
        """Send a signal after some time. A process that has ended by then is left alone."""
        self._left += 1
        os.write(self._process.stdin.fileno(), f"{seconds} {pid} {int(number)}\n".encode())

    def pending(self) -> bool:
        """Whether a signal was not sent yet."""
        with suppress(BlockingIOError):
            self._left -= len(os.read(self._process.stdout.fileno(), 4096))
        return self._left > 0

    def wait(self) -> None:
        """Wait until all signals were sent."""
        while self.pending():
            time.sleep(INTERVAL_SECONDS)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def main() -> None:
    due: list[tuple[float, int, int]] = []
    text = b""
    while True:
        timeout = max(0.0, due[0][0] - time.monotonic()) if due else None
        if select.select([0], [], [], timeout)[0]:
            more = os.read(0, 4096)
            if not more:
                break
            *lines, text = (text + more).split(b"\n")
            for line in lines:
                seconds, pid, number = line.split()
                heapq.heappush(due, (time.monotonic() + float(seconds), int(pid), int(number)))
        while due and due[0][0] <= time.monotonic():
            _, pid, number = heapq.heappop(due)
            with suppress(ProcessLookupError):
                os.kill(pid, number)
            os.write(1, b".")
    for _, pid, number in due:
        if number == signal.SIGCONT:  # nobody stays stopped
            with suppress(ProcessLookupError):
                os.kill(pid, number)


if __name__ == "__main__":
    main()
