"""Starting the processes of a peer in its own interpreter, and asking all its ranks for rounds.

The peer's end is `benchmarks.peers.link`.  What a peer prints goes to a file and is shown only as the reason of its
failure.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, TextIO

from benchmarks.cases import OPERATIONS, Case, Times, WrongAnswerError
from benchmarks.systems import SystemFailedError

ROOT = Path(__file__).parents[1]
START_SECONDS = 120.0
CASE_SECONDS = 120.0
END_SECONDS = 5.0


class _Line:
    """The connection to one rank."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(CASE_SECONDS)
        self.connection = connection
        self._stream: TextIO = connection.makefile("rw", encoding="utf-8")

    def fileno(self) -> int:
        return self.connection.fileno()

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a rank that has died is noticed as its answer is read
            self._stream.write(text + "\n")
            self._stream.flush()

    def hear(self) -> dict[str, Any] | None:
        """What the rank says; None if it has ended, or says nothing for too long."""
        try:
            text = self._stream.readline()
        except OSError:
            return None
        heard: dict[str, Any] | None = json.loads(text) if text else None
        return heard

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.close()
        self.connection.close()


class RemoteSystem:
    """The processes of one peer.  It starts in the constructor; `connect` waits until its ranks are there."""

    def __init__(
        self, name: str, devices: int, commands: Sequence[Sequence[str]], *, lines: int,
        operations: Sequence[str] = OPERATIONS,
    ) -> None:
        """``commands`` start its processes; ``{folder}`` in a word stands for a folder of its own.

        ``lines`` is how many ranks will call: fewer than ``devices`` where one process has them all.
        """
        self.name, self.devices = name, devices
        self.version = ""
        self._operations = operations
        self._count = lines
        self._lines: list[_Line] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self.folder = Path(tempfile.mkdtemp(prefix="bench-"))
        self._log = self.folder / "log"
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(str(self.folder / "line"))
            self._listener.listen(lines)
            with self._log.open("wb") as log:
                for command in commands:
                    self._processes.append(subprocess.Popen(
                        [word.replace("{folder}", str(self.folder)) for word in command], cwd=ROOT, env=_environment(),
                        stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                    ))
        except OSError as error:
            self.close()
            raise SystemFailedError(f"cannot be started: {error}") from None

    def connect(self) -> None:
        """Wait for all ranks.  Raises `SystemFailedError`, after ending what there is of it."""
        deadline = time.monotonic() + START_SECONDS
        self._listener.settimeout(0.2)
        by_rank: dict[int, _Line] = {}
        while len(by_rank) < self._count:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if time.monotonic() > deadline:
                    self._fail(f"not ready after {START_SECONDS:.0f} s")
                if any(process.poll() is not None for process in self._processes):
                    self._fail("ended while it started")
                continue
            line = _Line(connection)
            self._lines.append(line)
            hello = self._hear(line)
            by_rank[hello["rank"]] = line
            self.version = hello["version"]
        self._lines = [by_rank[rank] for rank in sorted(by_rank)]

    def supports(self, case: Case) -> bool:
        """Private arrays only, and results that are given: nobody else has others.  JAX's host has no loops."""
        return (
            case.memory == "private" and not case.fresh and case.operation in self._operations
            and not (case.in_a_loop and self.name == "jax")
        )

    def rounds(self, case: Case, count: int) -> list[Times]:
        """Start and end of each round, by rank."""
        for line in self._lines:
            line.say(json.dumps({"case": asdict(case), "count": count}))
        answers = self._hear_all()
        for answer in answers:
            if "wrong" in answer:
                self.close()
                raise WrongAnswerError(f"{self.name}: {answer['wrong']}")
        for answer in answers:
            if "failed" in answer:
                self._fail(answer["failed"])
        return [[(start, end) for start, end in answer["times"]] for answer in answers]

    def close(self) -> None:
        """End its processes: by itself where it listens, else by force; they are in sessions of their own."""
        for line in self._lines:
            line.close()
        self._lines = []
        self._listener.close()
        deadline = time.monotonic() + END_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._processes = []
        shutil.rmtree(self.folder, ignore_errors=True)

    def _hear_all(self) -> list[dict[str, Any]]:
        """An answer from every rank; as soon as one says that it failed, that alone: the others may wait for it."""
        waiting = set(self._lines)
        answers: dict[_Line, dict[str, Any]] = {}
        deadline = time.monotonic() + CASE_SECONDS
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail(f"no answer after {CASE_SECONDS:.0f} s")
            for line in ready:
                waiting.discard(line)
                answers[line] = answer = self._hear(line)
                if "times" not in answer:
                    return [answer]
        return [answers[line] for line in self._lines]

    def _hear(self, line: _Line) -> dict[str, Any]:
        heard = line.hear()
        if heard is None:
            self._fail("a rank ended")
        return heard

    def _fail(self, reason: str) -> NoReturn:
        said = self._log.read_text(errors="replace").split("\n") if self._log.exists() else []
        last = next((" ".join(line.split()) for line in reversed(said) if line.strip()), "")
        self.close()
        raise SystemFailedError(" ".join(f"{reason}{': ' + last if last else ''}".split())[:200])


def _environment() -> dict[str, str]:
    """The caller's, with this package to be found and one BLAS thread, as our devices have."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
