"""Checked command lines: an error is one line with the nearest valid words, and exit status 2."""

from __future__ import annotations

import argparse
import errno
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from parallelism.display.quantities import cut
from parallelism.mesh import Mesh
from parallelism.spelling import closest

if TYPE_CHECKING:
    from parallelism.hardware import Hardware

AXES = ("pp", "dp", "ep", "cp", "tp")
"""The axes of a mesh, outermost first. The order is that of Megatron: the ranks of a tp group are neighbours."""

MOST_DEVICES = 256
MOST_LISTED = 24
"""More options are not listed in an error."""
MOST_TOLD = 12
"""More wrong options are not named."""
NEAR = 0.8
"""How alike, of 1, an option must be to one of many that is suggested."""


Arguments = Mapping[str, Mapping[str, Any]]


class WrongWords(Exception):
    """The command line is invalid. The text is a message for the user."""

    command: str = ""
    """The command whose arguments are invalid."""


_REQUIRED = "the following arguments are required: "


def required(names: str) -> str:
    """The sentence about arguments that are left out, and where to look."""
    lists = "; the command `hardware` lists what there is" if "--hardware" in names else ""
    return f"{_REQUIRED}{names}; see --help{lists}"


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises `WrongWords`, accepts no abbreviations and keeps the line breaks of examples.

    ``arguments`` are the keyword arguments of ``add_argument``, by flag or positional argument.  ``hints`` have what is
    likely meant by a flag that is none; behind one that ends in ``=`` stands the value that was given.
    """

    def __init__(
        self, arguments: Arguments | None = None, hints: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)
        self._negative_number_matcher = re.compile(r"-\.?\d")  # -5GB is a value, too, as from Python 3.14 on
        self.hints = hints or {}
        for name, keywords in (arguments or {}).items():
            self.add_argument(name, **keywords)

    def error(self, message: str) -> NoReturn:
        if message.startswith(_REQUIRED):
            raise WrongWords(required(message.removeprefix(_REQUIRED)))
        raise WrongWords(message.removeprefix("argument "))

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """As usual; but argparse takes the value of ``--x=--`` for the end of the options, and gives an empty list."""
        if action.option_strings and arg_strings == ["--"]:
            raise argparse.ArgumentError(action, "expected one argument")
        return super()._get_values(action, arg_strings)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """The words as a namespace. Raises `WrongWords` for an unknown word, with the nearest known one."""
        if zero := next((word for word in words if "\0" in word), None):  # no shell passes one on
            raise WrongWords(f"a word cannot hold a zero byte, got {zero!r}")
        namespace, unknown = self.parse_known_args(words)
        if unknown and not unknown[0].startswith("-"):
            raise WrongWords(f"nothing is expected here: {unknown[0]!r}")
        if unknown:
            raise WrongWords(self._unknown(unknown))
        return namespace

    def _unknown(self, words: Sequence[str]) -> str:
        """The sentence about options that there are not, all of them, and what is likely meant."""
        meant: dict[str, str] = {}
        for number, each in enumerate(words):
            option, _, value = each.partition("=")
            if (
                option.startswith("-")
                and option not in meant
                and not self._negative_number_matcher.match(option)
            ):
                meant[option] = (
                    self._meant(option, value, words[number + 1 :]) if len(meant) < MOST_TOLD else ""
                )
        if len(meant) == 1:
            (option, told), *_ = meant.items()
            if not told:
                few = self._long_options if len(self._long_options) <= MOST_LISTED else ()
                told = f"; there is {', '.join(few)}" if few else "; see --help"
            return f"there is no option {option}{told}"
        told_each = []
        for option, told in [*meant.items()][:MOST_TOLD]:
            told_each.append(f"{option} ({told.removeprefix('; ')})" if told else option)
        more = f" and {len(meant) - MOST_TOLD:,} more" if len(meant) > MOST_TOLD else ""
        return f"there are no options {', '.join(told_each)}{more}"

    def _meant(self, option: str, value: str, following: Sequence[str]) -> str:
        """``; did you mean ...?`` of an option that there is not; empty if none is near."""
        if (hint := self.hints.get(option)) is not None:
            value = value or next((each for each in following[:1] if not each.startswith("-")), "...")
            return f"; did you mean {hint}{value * hint.endswith('=')}?"
        cutoff = 0.6 if len(self._long_options) <= MOST_LISTED else NEAR
        near = closest(option, self._long_options, cutoff=cutoff)
        return "" if near is None else f"; did you mean {near}?"

    @property
    def _long_options(self) -> list[str]:
        return [option for option in self._option_string_actions if option.startswith("--")]


def nearest(word: str, right: Sequence[str]) -> str:
    """The hint ``; did you mean ...?`` if one of the valid words is close, otherwise a list of all of them."""
    near = closest(word, right)
    return f"; did you mean {near}?" if near is not None else f"; there is {', '.join(right)}"


def whole(least: int = 1, most: int | None = None) -> Callable[[str], int]:
    """A type for argparse: an integer of at least ``least`` and at most ``most``."""
    expected = (
        f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"
    )

    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"needs {expected}, got {text!r}") from None
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"needs {expected}, got {number}")
        return number

    return convert


def positive(text: str) -> float:
    """A type for argparse: a finite number greater than 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"needs a number above 0, got {text!r}")
    return number


def wholes(text: str) -> tuple[int, ...]:
    """A type for argparse: integers of at least 1, separated by commas."""
    return tuple(whole()(part.strip()) for part in text.split(","))


def choice(right: Sequence[str]) -> Callable[[str], str]:
    """A type for argparse: one of the valid words. Case does not matter, and - may replace _."""
    canonical = {word.lower().replace("-", "_"): word for word in right}

    def convert(text: str) -> str:
        key = text.lower().replace("-", "_")
        if key not in canonical:
            raise argparse.ArgumentTypeError(f"there is no {text!r}{nearest(key, right)}")
        return canonical[key]

    return convert


def mesh_arguments(**axes: str) -> Arguments:
    """``--mesh``, and a flag for each of the given axes with its help."""
    known = [axis for axis in AXES if axis in axes]
    return {
        **{f"--{axis}": {"type": whole(), "metavar": "N", "help": axes[axis]} for axis in known},
        "--mesh": {
            "metavar": "AXES",
            "help": "the whole mesh, outermost axis first, as " + ",".join(f"{axis}=2" for axis in known),
        },
    }


def mesh_of(
    arguments: argparse.Namespace, usual: Mesh, *, any_axes: bool = False, most: int | None = MOST_DEVICES
) -> Mesh:
    """The requested mesh: that of ``--mesh``, or the flags with pp outermost, then dp, cp, ep and tp.

    ``usual`` is the mesh if no axis is given. With ``any_axes``, ``--mesh`` may name axes that have no flag. ``most``
    limits the number of devices (None: no limit). Raises `WrongWords`.
    """
    flags = {axis: getattr(arguments, axis) for axis in AXES if getattr(arguments, axis, None) is not None}
    if arguments.mesh is not None:
        if flags:
            raise WrongWords(
                f"--mesh gives all axes; leave out {' and '.join('--' + axis for axis in flags)}"
            )
        flags = _axes_of(
            arguments.mesh, None if any_axes else [axis for axis in AXES if hasattr(arguments, axis)]
        )
    mesh = Mesh(**flags) if flags else usual
    if most is not None and mesh.size > most:
        raise WrongWords(f"{mesh!r} has {mesh.size} devices; at most {most} are run here")
    return mesh


def hardware_of(name: str | None, size: int | None = None) -> Hardware | None:
    """The hardware of ``--hardware``, with room for ``size`` devices (None: any number). Raises `WrongWords`."""
    if name is None:
        return None
    from parallelism.hardware import Hardware
    from parallelism.hardware.host import host_summary
    from parallelism.timeline import Pricing

    try:
        hardware = Hardware.of_host(size) if name == "host" else Hardware.of(name)
        if hardware is None:
            raise WrongWords(f"--hardware host: {host_summary()}")
        if size is not None:
            Pricing(hardware).for_devices(size)
    except (ValueError, OSError) as error:
        raise WrongWords(f"--hardware: {error}") from None
    return hardware


def _axes_of(text: str, known: Sequence[str] | None) -> dict[str, int]:
    extents: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, size = part.strip().partition("=")
        if not equals:
            raise WrongWords(f"--mesh needs axis=size pairs, as in --mesh pp=2,dp=2; got {text!r}")
        if known is None and not axis.isidentifier():
            raise WrongWords(
                f"--mesh: the name of an axis must consist of letters, digits and _, got {axis!r}"
            )
        if known is not None and axis not in known:
            raise WrongWords(f"--mesh has no axis {axis!r} here{nearest(axis, known)}")
        if axis in extents:
            raise WrongWords(f"--mesh names axis {axis!r} twice")
        try:
            extents[axis] = whole()(size)
        except argparse.ArgumentTypeError as error:
            raise WrongWords(f"--mesh: axis {axis!r} {error}") from None
    return extents


@contextmanager
def accessing(path: Path, verb: str = "written", option: str = "") -> Iterator[None]:
    """Turn an `OSError` into `WrongWords`: the file of an option cannot be written, or read."""
    try:
        yield
    except OSError as error:
        raise WrongWords(
            f"{option and f'--{option}: '}{path} cannot be {verb}: {error.strerror or error}"
        ) from None


def writable(path: Path, option: str = "") -> Path:
    """Check that ``path`` can be written, without changing it, and return it. Raises `WrongWords`."""
    with accessing(path, option=option):
        existed = path.exists()
        if path.is_fifo():  # opening it would wait for a reader
            raise WrongWords(
                f"{option and f'--{option}: '}{path} cannot be written: it is a pipe, not a file"
            )
        path.open("ab").close()
        if not existed:
            path.unlink()
    return path


def _in_one_line(
    usual: Callable[..., None],
    program: str,
    told: set[str],
    message: Warning | str,
    category: type[Warning],
    *place: Any,
) -> None:
    """Shows a warning about a transform in one line, because its place is in the library, and once, although several
    plans may give it; any other as ``usual``."""
    if category.__module__.startswith("parallelism.transforms."):
        if f"{message}" not in told:
            told.add(f"{message}")
            print(f"{program}: {message}", file=sys.stderr)
    else:
        usual(message, category, *place)


def _prepare_streams() -> None:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed, as by >&-
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):  # a terminal or file without box-drawing characters gets a "?"
            stream.reconfigure(errors="replace", line_buffering=True)


def serve(program: str, main: Callable[[Sequence[str]], int], words: Sequence[str] | None = None) -> int:
    """Run ``main`` on the words and return its exit status. For an invalid command line: one line on stderr, and 2."""
    _prepare_streams()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = partial(_in_one_line, warnings.showwarning, program, set[str]())
            return main(sys.argv[1:] if words is None else words)
    except WrongWords as error:
        print(
            f"{program} {error.command}".strip() + f": {cut(' '.join(str(error).split()))}", file=sys.stderr
        )
        return 2
    except KeyboardInterrupt:
        print(f"{program}: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output has stopped reading
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno == errno.ENOSPC:  # what was printed cannot be written
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        elif error.errno is None:
            raise
        print(f"{program}: {error.strerror}", file=sys.stderr)
        return 1
