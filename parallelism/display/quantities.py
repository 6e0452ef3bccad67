"""Numbers with units, and text in the columns of a terminal: the one place where they are formatted.

Measured numbers have three significant digits, all of them shown (``1.50 ms``); those that were given, as on a data
sheet, are as short as they can be (``1.5 us``).
"""

import re
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import pairwise
from typing import Any, TypeVar

Called = TypeVar("Called", bound=Callable[..., Any])

WIDTH = 80
"""Columns of a terminal."""
MOST_TOLD = 1500
"""Characters of an error about a text, at most about."""

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_DURATIONS = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
_BYTES = tuple(
    (1024.0**power, unit) for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB"), (0, "B"))
)
_COUNTS = tuple(
    (1000.0**power, prefix) for power, prefix in zip(range(6, -1, -1), "EPTGMk", strict=False)
) + ((1.0, ""),)

_BEFORE_UNIT = re.compile(
    r"(?<=\d) (?=(?:[kMGTPE]|[kMGTPE]?(?:B|W|Wh|flops?|B/s|flop/s)|[KMGT]iB|[munp]?s|min|h|d|%|bytes?)(?![\w/]))"
)
_GIVEN_COUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:e\+?[0-9]+)?)\s*([kmgbt]|)\s*", re.IGNORECASE)
_GIVEN_SECONDS = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?)\s*(ns|us|ms|s|min|h|d|days?|y|years?)\s*")
_SECONDS = {
    "ns": 1e-9,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86_400.0,
    "y": 31_557_600.0,
}
_GIVEN_RATE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([kKMGTP]?)(B|b|bit)(?:/s|ps)\s*")
_GIVEN_BYTES = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?)\s*((?:[KMGT]i?)?B|)\s*", re.IGNORECASE)


def shortened(value: object, most: int = 200) -> str:
    """The ``repr`` of a value for an error; of a long text only its beginning."""
    if isinstance(value, str) and len(value) > most:
        return f"{value[:most]!r}... ({len(value)} characters)"
    text = repr(value)
    return text if len(text) <= 2 * most else f"{text[:most]}..."


def cut(text: str, most: int = MOST_TOLD) -> str:
    """A text in at most about so many characters: the beginning and the end of a longer one."""
    if len(text) <= most:
        return text
    first, last = most * 3 // 4, most // 4
    return f"{text[:first]} [{len(text) - first - last} more characters] {text[-last:]}"


def short_errors(read: Called) -> Called:
    """A decorator of what reads a text: its ``ValueError`` and ``TypeError`` are short, however long the text is."""

    @wraps(read)
    def reading(*args: Any, **options: Any) -> Any:
        try:
            return read(*args, **options)
        except (ValueError, TypeError) as error:
            if len(error.args) == 1 and len(str(error)) > MOST_TOLD:
                error.args = (cut(str(error)),)
            raise

    return reading  # type: ignore[return-value]  # wraps() keeps what it is called with


def seconds(value: float) -> str:
    """A measured time: ``12.3 ms``."""
    return "0 s" if value == 0 else _measured(value, _TIMES)


def nbytes(value: float) -> str:
    """A number of bytes in powers of two: ``1.50 MiB``, exact below a KiB."""
    return _measured(value, _BYTES)


def decimal_bytes(value: float) -> str:
    """A number of bytes in powers of ten, as the memory of devices is given: ``80 GB``, ``91.2 GB``."""
    return f"{_measured(value, _COUNTS[2:])}B"


def bytes_in(text: str) -> float:
    """The number of bytes that a text gives: ``72GB`` in powers of ten, ``64GiB`` in powers of two, ``512`` as it is.

    ``ValueError`` for any other text.

    >>> bytes_in("72GB"), bytes_in("1.5 KiB"), bytes_in("512")
    (72000000000.0, 1536.0, 512.0)
    """
    given = _GIVEN_BYTES.fullmatch(text)
    if given is None:
        raise ValueError(f"bytes must be a number with a unit, such as 72GB or 64GiB; got {shortened(text)}")
    power = "bkmgt".index(given[2][:1].lower() or "b")
    return float(given[1]) * (1024.0 if len(given[2]) == 3 else 1000.0) ** power


def count_in(text: str) -> float:
    """The number that a text gives: ``1T``, ``300B`` or ``300G``, ``1.5M``, ``2k``, ``1e12``, ``512``.

    ``ValueError`` for any other text.

    >>> count_in("15.6T"), count_in("300B"), count_in("1e9")
    (15600000000000.0, 300000000000.0, 1000000000.0)
    """
    given = _GIVEN_COUNT.fullmatch(text)
    if given is None:
        raise ValueError(f"it must be a number, such as 1T, 300B or 1e12; got {shortened(text)}")
    return float(given[1]) * 1000.0 ** {"": 0, "k": 1, "m": 2, "g": 3, "b": 3, "t": 4}[given[2].lower()]


def seconds_in(text: str) -> float:
    """The seconds that a text gives: ``500ms``, ``50000h``, ``10 min``, ``2.5d``, ``5 years``.

    ``ValueError`` for any other text.

    >>> seconds_in("50000h"), seconds_in("10 min"), seconds_in("2.5d")
    (180000000.0, 600.0, 216000.0)
    """
    given = _GIVEN_SECONDS.fullmatch(text)
    if given is None:
        raise ValueError(f"it must be a time with a unit, such as 50000h or 10min; got {shortened(text)}")
    unit = given[2] if given[2] in _SECONDS else given[2][0]
    return float(given[1]) * _SECONDS[unit]


def rate_in(text: str) -> float:
    """The bytes per second that a text gives: ``10GB/s``, or in bits ``10Gb/s`` and ``400Gbps``.

    ``ValueError`` for any other text.

    >>> rate_in("10GB/s"), rate_in("400 Gb/s")
    (10000000000.0, 50000000000.0)
    """
    given = _GIVEN_RATE.fullmatch(text)
    if given is None:
        raise ValueError(f"it must be a rate with a unit, such as 10GB/s or 400Gb/s; got {shortened(text)}")
    power = "kmgtp".index(given[2].lower()) + 1 if given[2] else 0
    return float(given[1]) * 1000.0**power / (1.0 if given[3] == "B" else 8.0)


def rate(bytes_per_second: float | None) -> str:
    """A bandwidth in powers of ten, as nccl-tests and data sheets give it: ``12.5 GB/s``; ``-`` for none."""
    return "-" if bytes_per_second is None else _measured(bytes_per_second, _COUNTS[2:]) + "B/s"


def unbroken(text: str) -> str:
    """The text with no-break spaces between numbers and their units.

    >>> unbroken("3 devices for 12.5 ms")
    '3 devices for 12.5\\xa0ms'
    """
    return _BEFORE_UNIT.sub("\N{NO-BREAK SPACE}", text)


def count(value: float) -> str:
    """A measured number with a decimal prefix: ``4.20 G``, exact below ten thousand."""
    if abs(value) < 10_000 and value == int(value):
        return str(int(value))
    return _measured(value, _COUNTS).rstrip()


def duration(seconds: float) -> str:
    """A measured time of a run: ``2.05 h``, ``37.5 min``, ``0.250 s``."""
    size, unit = next((pair for pair in _DURATIONS if seconds >= pair[0]), _DURATIONS[-1])
    return f"{_digits(seconds / size)} {unit}"


def measured(value: float) -> str:
    """A measured number without a prefix, in three digits: ``31.2``."""
    return _digits(value)


def given(value: float) -> str:
    """A number that was given, with a decimal prefix.

    >>> given(3.12e14), given(80e9)
    ('312 T', '80 G')
    """
    size, prefix = next(((size, prefix) for size, prefix in _COUNTS[1:] if value >= size), (1.0, ""))
    return f"{value / size:.{4 if value >= 1 else 3}g} {prefix}"


def given_seconds(value: float) -> str:
    """A time that was given.

    >>> given_seconds(1.9e-6), given_seconds(0.0)
    ('1.9 us', '0 s')
    """
    size, unit = next(((size, unit) for size, unit in _TIMES if value >= size), _TIMES[0])
    return f"{value / size:.3g} {unit}"


def _measured(value: float, units: Sequence[tuple[float, str]]) -> str:
    """Three digits in the largest of the units, which fall, such that the next smaller one would not do."""
    full = 1023.5 if units is _BYTES else 999.5
    enough = (pair for pair, (smaller, _) in pairwise(units) if abs(value) >= full * smaller)
    size, unit = next(enough, units[-1])
    return f"{_digits(value / size)} {unit}"


def _digits(value: float) -> str:
    """Three significant digits, all of them shown; integers below 1024 exactly."""
    if abs(value) < 1024 and value == int(value):
        return str(int(value))
    return f"{value:.0f}" if 999.5 <= abs(value) < 99999.5 else f"{value:#.3g}".rstrip(".")


def plural(number: int, what: str) -> str:
    """``1 device``, ``2 devices``."""
    return f"{number} {what}{'s' * (number != 1)}"


def fit(text: str, width: int = WIDTH) -> str:
    """The text on one line of at most ``width`` columns, without what a terminal might obey."""
    if not text.isprintable():
        text = "".join(map(_printable, text))
    return text if len(text) <= width else text[: width - 3] + "..."


def _printable(character: str) -> str:
    return character if character.isprintable() else "?"


def in_columns(rows: Sequence[Sequence[str]], left: int, gap: str = "  ") -> list[str]:
    """A line for each row, columns as wide as their longest cell: the first ``left`` flush left, others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    justify = [*[str.ljust] * left, *[str.rjust] * (len(widths) - left)]
    lines = []
    for row in rows:
        cells = [side(cell, width) for side, cell, width in zip(justify, row, widths, strict=False)]
        lines.append(gap.join(cells).rstrip())
    return lines
