"""What a device prints: it goes to the host by whole lines. What a fork of a device prints goes to its descriptors."""

import io
import os
import sys
from typing import Any, NamedTuple, Protocol


class Printed(NamedTuple):
    stream: str
    text: str


class _Sender(Protocol):
    def send(self, message: Any) -> None: ...


class RankedOutput(io.TextIOBase):
    """Standard output of a device. It sends whole lines to the host, which prints them with the rank in front."""

    def __init__(self, link: _Sender, stream: str) -> None:
        self._link = link
        self._stream = stream
        self._partial = ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._partial += text
        if "\n" in text:
            lines, _, self._partial = self._partial.rpartition("\n")
            self._link.send(Printed(self._stream, lines + "\n"))
        return len(text)

    def close(self) -> None:
        """A kernel may close its stream; that of the device stays open for later runs."""
        self.finish_line()

    def finish_line(self) -> None:
        """Send a last line that has no line end."""
        if self._partial:
            self.write("\n")


def print_in_fork(rank: int, message: Any) -> None:
    """Print the text of a message of a fork to a descriptor that the fork shares with its device."""
    text = getattr(message, "text", None)
    if text is not None:
        write_lines(1 if message.stream == "stdout" else 2, rank, text)


def write_lines(fd: int, rank: int, text: str) -> None:
    """Write lines to a descriptor, the rank in front of each."""
    lines = "".join(f"[rank {rank}] {line}\n" for line in text.rstrip("\n").split("\n"))
    os.write(fd, lines.encode(errors="backslashreplace"))


def refuse_debugger() -> None:
    """In a device's process ``breakpoint()`` raises, unless ``PYTHONBREAKPOINT`` names a debugger that needs no
    terminal."""
    if not os.environ.get("PYTHONBREAKPOINT"):
        sys.breakpointhook = _no_debugger


def _no_debugger(*args: object, **kwargs: object) -> None:
    raise RuntimeError(
        "breakpoint() in a device's process has no terminal; run again with backend='thread', where it has one "
        "(in pytest: --vcluster-backend=thread)"
    )
