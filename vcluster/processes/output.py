"""What a device prints: it goes to the host by whole lines. What a fork of a device prints goes to its descriptors."""

import codecs
import io
import os
import sys
import warnings
from contextlib import suppress
from types import FrameType
from typing import Any, NamedTuple, Protocol

from parallelism.operation import is_ours
from vcluster.code.call_sites import WORKER


class Warned(NamedTuple):
    """A warning that a device has shown: what `warnings.warn_explicit` takes, with the class by name."""

    message: str
    category: tuple[str, str]
    """The module of the class, and its name."""
    filename: str
    lineno: int


class Printed(NamedTuple):
    stream: str
    text: str
    warned: Warned | None = None
    """The warning of which the text tells."""


class _Sender(Protocol):
    def send(self, message: Any) -> None: ...


class _Bytes(io.RawIOBase):
    """What a program gets that writes bytes, into ``sys.stdout.buffer``: they are shown as the text that they encode."""

    def __init__(self, output: "RankedOutput") -> None:
        self._output = output

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        encoded = bytes(data)
        self._output.write(self._output.decoder.decode(encoded))
        return len(encoded)


class RankedOutput(io.TextIOBase):
    """Standard output of a device. It sends whole lines to the host, which prints them with the rank in front."""

    def __init__(self, link: _Sender, stream: str) -> None:
        self._link = link
        self._stream = stream
        self._partial = ""
        self.decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @property
    def buffer(self) -> _Bytes:
        return _Bytes(self)  # not kept: the two would hold each other

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._partial += text
        if "\n" in text:
            lines, _, self._partial = self._partial.rpartition("\n")
            self._link.send(Printed(self._stream, lines + "\n"))
        return len(text)

    def warn(self, text: str, warned: Warned) -> None:
        """Send a warning to the host, which may show it as one of its own."""
        self.finish_line()
        self._link.send(Printed(self._stream, text, warned))

    def close(self) -> None:
        """A kernel may close its stream; that of the device stays open for later runs."""
        self.finish_line()

    def finish_line(self) -> None:
        """Send a last line that has no line end."""
        if self._partial:
            self.write("\n")


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    """In a device's process, in place of `warnings.showwarning`.

    What our code warns of, as NumPy does of an overflow in a sum, is a warning of the kernel's line that called us.
    """
    caller = _users_caller(filename) if is_ours(filename) else None
    if caller is not None:
        _warn_at(caller, message, category)
        return
    text = warnings.formatwarning(message, category, filename, lineno, line)
    stream = sys.stderr if file is None else file
    if isinstance(stream, RankedOutput):
        warned = Warned(str(message), (category.__module__, category.__qualname__), filename, lineno)
        stream.warn(text, warned)
    elif stream is not None:
        with suppress(OSError):
            stream.write(text)


def _users_caller(filename: str) -> FrameType | None:
    """The frame of the user's that called ours, which now warns in this file; None if a user's frame is not there.

    Ours forgets that it has warned: other lines of the user may come there.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != filename:
        frame = frame.f_back
    if frame is not None:
        frame.f_globals.get("__warningregistry__", {}).clear()
    while frame is not None and is_ours(frame.f_code.co_filename):
        frame = None if frame.f_code.co_filename == WORKER else frame.f_back
    return frame


def _warn_at(caller: FrameType, message: Warning | str, category: type[Warning]) -> None:
    """Warn at the line where ``caller`` is, as if the warning came from there: its filters and its registry hold."""
    warnings.onceregistry.pop((str(message), category), None)  # type: ignore[attr-defined]
    warnings.warn_explicit(
        message,
        category,
        caller.f_code.co_filename,
        caller.f_lineno,
        caller.f_globals.get("__name__"),
        caller.f_globals.setdefault("__warningregistry__", {}),
    )


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
    raise RuntimeError(f"breakpoint() in {_NO_TERMINAL}")


_NO_TERMINAL = (
    "a device's process has no terminal; run again with backend='thread', where it has one "
    "(in pytest: --vcluster-backend=thread)"
)


def explain_no_terminal(error: BaseException) -> None:
    """Add a note to the error of ``input()`` or ``pdb.set_trace()`` in a device's process."""
    if isinstance(error, EOFError) and error.args == ("EOF when reading a line",):
        error.add_note(f"input() in {_NO_TERMINAL}; or ask on the host, and give the answer to the kernel")
    elif type(error).__module__ == "bdb":
        error.add_note(f"a debugger in {_NO_TERMINAL}")
