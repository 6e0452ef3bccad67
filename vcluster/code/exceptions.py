"""An exception as a value that crosses processes and is printed on the host with the user's own lines.

The device collects what is cheap: types, text, frames. The host formats the traceback, because it has the source files
and the cells of a notebook.
"""

import itertools
import linecache
import traceback
from collections.abc import Iterator
from contextlib import suppress
from types import CodeType, TracebackType
from typing import NamedTuple

from parallelism.display.quantities import cut
from parallelism.operation import is_installed, is_ours
from vcluster.code.call_sites import WORKER
from vcluster.code.called import called_or_not
from vcluster.code.errors import OperationCancelled
from vcluster.code.line_values import values_on_lines
from vcluster.code.pickling import dump, load, type_name

LONGEST_TRACEBACK = 200
"""Maximal number of frames that are kept of an endless recursion: half from each end."""

LONGEST_TEXT = 2_000
"""Characters of the text of an exception that cross to the host: three quarters of them from its beginning."""

LONGEST_WHOLE = 8_000
"""Characters of an exception that crosses whole because it has more in it than texts, which could be cut."""

MOST_MEMBERS = 16
"""Maximal number of exceptions of a group, and of notes, that cross to the host."""

DEEPEST_CHAIN = 16
"""Maximal number of causes that are followed from an exception."""


class Frame(NamedTuple):
    """One line of a traceback."""

    filename: str
    line: int
    end_line: int | None
    column: int | None
    end_column: int | None
    function: str
    first_line: int = 0
    """The first line of the function."""
    hidden: bool = False
    """Whether the function sets ``__tracebackhide__``, as helpers of tests do."""

    @property
    def place(self) -> str:
        """``file:line``."""
        return f"{self.filename}:{self.line}"


class Failure(NamedTuple):
    """An exception raised in a device, in the form in which it crosses to the host."""

    type_name: str
    text: str
    """``str`` of the exception."""
    summary: str
    """The last lines of its traceback: type and message, notes included."""
    frames: tuple[Frame, ...]
    """Outermost first. Frames of the library itself are left out, unless there are no others."""
    omitted: int
    """Number of frames left out in the middle of a very long traceback."""
    pickled: bytes | None
    """The pickled exception. None if it cannot be pickled."""
    cause: "Failure | None" = None
    explicit: bool = False
    """Whether the cause was given with ``raise ... from``."""
    members: "tuple[Failure, ...]" = ()
    """The exceptions of an ``ExceptionGroup``."""
    values: str = ""
    """The values of the variables on the user's innermost line."""
    members_omitted: int = 0
    """Number of exceptions of a large group that are not among its members."""

    @property
    def location(self) -> str | None:
        """``file:line`` of the user's innermost line, or of a library's innermost line if there is none."""
        users = [frame for frame in self.frames if not is_installed(frame.filename)]
        return next((frame.place for frame in reversed(users or self.frames)), None)

    def exception(self) -> BaseException:
        """The original exception with its causes. If it cannot be unpickled, a ``RuntimeError`` that names its type."""
        error: object = None
        if self.pickled is not None:
            with suppress(
                BaseException
            ):  # the constructor of a user's exception may raise anything, SystemExit too
                error = load(self.pickled)
        if not isinstance(error, BaseException):
            error = RuntimeError(f"{self.type_name}: {self.text}" if self.text else self.type_name)
        if self.cause is not None:
            before = self.cause.exception()
            with suppress(BaseException):  # so may its __setattr__
                setattr(error, "__cause__" if self.explicit else "__context__", before)
        return error

    def format(self) -> str:
        """The traceback as Python prints it. Source lines are looked up in this process."""
        text = ""
        if self.cause is not None:
            link = (
                "The above exception was the direct cause of the following exception:"
                if self.explicit
                else "During handling of the above exception, another exception occurred:"
            )
            text = f"{self.cause.format()}\n{link}\n\n"
        if self.frames:
            text += "Traceback (most recent call last):\n" + self._format_frames()
        text += self.summary
        for i, member in enumerate(self.members, start=1):
            body = "".join(f"  | {line}" for line in member.format().splitlines(keepends=True))
            count = len(self.members) + self.members_omitted
            text += f"  +---------------- {i} of {count} ----------------\n{body}"
        if self.members:
            text += "  +------------------------------------\n"
        return text + (f"with {self.values}\n" if self.values else "")

    @property
    def in_a_line(self) -> str:
        """The exception on one line, without its traceback."""
        return self.summary.strip().split("\n")[0] + (f", with {self.values}" if self.values else "")

    def _format_frames(self) -> str:
        for filename in {frame.filename for frame in self.frames}:
            linecache.checkcache(filename)
        summaries = [
            traceback.FrameSummary(
                frame.filename, frame.line, frame.function, lookup_line=False,
                end_lineno=frame.end_line, colno=frame.column, end_colno=frame.end_column,
            )
            for frame in self.frames
        ]  # fmt: skip
        if not self.omitted:
            return "".join(traceback.StackSummary.from_list(summaries).format())
        half = len(summaries) // 2
        first, last = (
            "".join(traceback.StackSummary.from_list(part).format())
            for part in (summaries[:half], summaries[half:])
        )
        return f"{first}  [{self.omitted} more calls]\n{last}"


def describe_exception(exception: BaseException, program: CodeType | None = None) -> Failure:
    """Describe an exception for the host. This never raises, whatever the exception's own methods do.

    ``program`` is the code that ran. If no line of the user's is in the traceback, the failure is reported at its first
    line.
    """
    with suppress(Exception):  # the hint is optional
        if hint := called_or_not(exception):
            exception.add_note(hint)
    try:
        return _describe(exception, frozenset(), program)._replace(values=_values(exception.__traceback__))
    except BaseException as error:  # its class may have no name, and its attributes may raise anything
        text = f"an exception that cannot be described: to ask for its parts raised {type(error).__name__}"
        return Failure("an exception", text, f"{text}\n", (), 0, None)


def where_cancelled(exception: BaseException) -> tuple[Frame, ...]:
    """The user's lines, outermost first, at which a kernel was when its run was cancelled."""
    error: BaseException | None = exception
    while error is not None and not isinstance(error, OperationCancelled):
        error = error.__context__  # the kernel caught the cancellation and raised another exception
    frames = [] if error is None else _frames(error.__traceback__)
    return tuple(frame for frame in frames if not is_installed(frame.filename))


def _describe(exception: BaseException, above: frozenset[int], program: CodeType | None = None) -> Failure:
    above |= {id(exception)}
    frames = _frames(exception.__traceback__)
    if (
        program is not None
        and all(is_ours(frame.filename) for frame in frames)
        and not is_ours(program.co_filename)
    ):
        first = program.co_firstlineno
        frames = [Frame(program.co_filename, first, None, None, None, program.co_name, first)]
    if program is None and all(frame.filename == WORKER for frame in frames):
        frames = []  # to call the program failed: it is built in, or the class of something
    omitted = max(0, len(frames) - LONGEST_TRACEBACK)
    if omitted:
        del frames[LONGEST_TRACEBACK // 2 : -(LONGEST_TRACEBACK // 2)]
    cause = exception.__cause__
    if cause is None and not exception.__suppress_context__:
        cause = exception.__context__
    follow = (
        cause is not None
        and id(cause) not in above
        and len(above) < DEEPEST_CHAIN
        and not _is_internal(cause)
    )
    members: tuple[BaseException, ...] = ()
    if isinstance(exception, BaseExceptionGroup) and len(above) < DEEPEST_CHAIN:
        members = tuple(member for member in exception.exceptions if id(member) not in above)
    members_omitted = max(0, len(members) - MOST_MEMBERS)
    name = type_name(type(exception))
    return Failure(
        type_name=name,
        text=_bounded(_text(exception)),
        summary=_summary(exception, name),
        frames=tuple(frames),
        omitted=omitted,
        pickled=_pickled(exception),
        cause=_describe(cause, above) if cause is not None and follow else None,
        explicit=exception.__cause__ is not None,
        members=tuple(_describe(member, above) for member in members[:MOST_MEMBERS]),
        members_omitted=members_omitted,
    )


def _frames(tb: TracebackType | None) -> list[Frame]:
    """The frames outside the library; all frames if the failure lies entirely inside the library."""
    frames = []
    for entry in entries_of(tb):
        code = entry.tb_frame.f_code
        hidden = "__tracebackhide__" in code.co_varnames and bool(
            entry.tb_frame.f_locals.get("__tracebackhide__")
        )
        frames.append(
            Frame(code.co_filename, entry.tb_lineno, *_span(entry), code.co_name, code.co_firstlineno, hidden)
        )
    return [frame for frame in frames if not is_ours(frame.filename)] or frames


def _values(tb: TracebackType | None) -> str:
    users = [entry for entry in entries_of(tb) if not is_installed(entry.tb_frame.f_code.co_filename)]
    if users:
        first = users[-1].tb_lineno
        with suppress(Exception):  # the values are optional
            return values_on_lines(users[-1].tb_frame, first, max(first, _span(users[-1])[0] or first))
    return ""


def _span(entry: TracebackType) -> tuple[int | None, int | None, int | None]:
    """The last line, the first column and the last column of the code that an entry of a traceback ran."""
    if entry.tb_lasti < 0:
        return None, None, None
    positions = itertools.islice(entry.tb_frame.f_code.co_positions(), entry.tb_lasti // 2, None)
    return next(positions, (None, None, None, None))[1:]


def entries_of(tb: TracebackType | None) -> Iterator[TracebackType]:
    """The entries of a traceback, outermost first."""
    while tb is not None:
        yield tb
        tb = tb.tb_next


def _is_internal(exception: BaseException) -> bool:
    """Whether the library itself raised and caught the exception, and then raised one that explains it."""
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(exception.__traceback__)]
    return bool(frames) and is_ours(frames[0]) and all(map(is_installed, frames))


def _text(exception: BaseException) -> str:
    try:
        return str.__str__(str(exception))  # a subclass of str may refuse to be pickled
    except BaseException as error:  # even KeyboardInterrupt: the user's __str__ raised it
        return f"<str() of the exception raised {type(error).__name__}>"


def _summary(exception: BaseException, name: str) -> str:
    text, notes = _text(exception), _notes(exception)
    if (
        len(text) > LONGEST_TEXT or sum(map(len, notes)) > LONGEST_TEXT
    ):  # Python would take seconds to lay it out
        return "".join(
            f"{line}\n" for line in (f"{name}: {_bounded(text)}", *map(_bounded, notes[:MOST_MEMBERS]))
        )
    try:
        summary = str.__str__("".join(traceback.format_exception_only(exception)))
    except BaseException:
        return f"{name}: {text}\n"
    return summary if len(summary) <= 2 * LONGEST_TEXT else f"{_bounded(summary)}\n"


def _notes(exception: BaseException) -> list[str]:
    """The notes of an exception; none if they are no list of texts, as Python has them."""
    try:
        notes = exception.__notes__
        return [note for note in notes if type(note) is str] if type(notes) is list else []
    except BaseException:
        return []


def _bounded(text: str) -> str:
    return cut(text, LONGEST_TEXT)


def _pickled(exception: BaseException) -> bytes | None:
    own = getattr(exception, "text", None) if isinstance(exception, SyntaxError) else None
    with suppress(BaseException):
        length = max(len(_text(exception)), len(own or ""), sum(map(len, _notes(exception))))
        if length > LONGEST_TEXT and (_has_texts_alone(exception) or length > LONGEST_WHOLE):
            exception = _shortened(exception)
        return dump(exception, "the exception")
    return None


def _has_texts_alone(exception: BaseException) -> bool:
    """Whether an exception is made of texts and numbers, and nothing else."""
    values = all(isinstance(value, str | int | float | None) for value in exception.args)
    return values and not {*vars(exception)} - {"__notes__"}


def _shortened(exception: BaseException) -> BaseException:
    """An exception of the same type with short texts.  Raises for one that has more in it than texts and numbers."""
    if not _has_texts_alone(exception):
        raise TypeError(f"{type(exception).__name__} has more than a text")
    args = list(exception.args)
    for i, value in enumerate(args):
        if isinstance(value, str):
            args[i] = _bounded(value)
    copied = type(exception).__new__(type(exception), *args)
    for note in _notes(exception)[:MOST_MEMBERS]:
        copied.add_note(_bounded(note))
    return copied
