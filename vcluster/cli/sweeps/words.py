"""The flags of a sweep, checked: tokens, days and prices."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, TypeVar

from parallelism.display.quantities import count_in, rate_in, seconds_in, short_errors
from parallelism.hardware.fields import shown
from vcluster.cli.command_line import Arguments, WrongWords, positive, whole, wholes

if TYPE_CHECKING:
    from parallelism.budgets import Budget, Failures

Value = TypeVar("Value")

MOST_CELLS = 1000


def _tokens(text: str) -> float:
    """A type for argparse: a number of tokens."""
    return _above_zero(text, count_in, "needs a number of tokens above 0, such as 1T or 300B")


def _duration(text: str) -> float:
    """A type for argparse: a time in seconds."""
    return _above_zero(text, seconds_in, "needs a time above 0 with a unit, such as 50000h or 10min")


def _rate(text: str) -> float:
    """A type for argparse: bytes per second."""
    return _above_zero(text, rate_in, "needs a rate above 0 with a unit, such as 10GB/s or 80Gb/s")


@short_errors
def _above_zero(text: str, read: Callable[[str], float], wanted: str) -> float:
    try:
        number = read(text)
    except ValueError:
        number = 0.0
    if not 0 < number < inf:
        raise argparse.ArgumentTypeError(f"{wanted}, got {shown(text)}")
    return number


def _prices(text: str) -> dict[str, float]:
    """A type for argparse: a price of all hardware, or prices by name."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = part.strip().rpartition("=")
        if name in found or (equals and not name):
            raise argparse.ArgumentTypeError(
                f"needs one price, or one for each name, as dgx-h100=2.50,h200-node=3; got {shown(text)}"
            )
        found[name] = positive(number)
    return found


ARGUMENTS: Arguments = {
    "--tokens": {
        "type": _tokens,
        "metavar": "1T",
        "help": "train on so many tokens: the best plan on each hardware with each number of devices (both may be "
        "lists, as --devices 64,128 --hardware dgx-h100,h200-node), and what the whole run takes and costs",
    },
    "--days": {"type": positive, "metavar": "DAYS", "help": "the days in which the tokens are to be done"},
    "--price": {
        "type": _prices,
        "metavar": "PRICE",
        "help": "what an hour of a device costs, in any currency: 2.50, or dgx-h100=2.50,h200-node=3.20",
    },
    "--carbon": {
        "type": positive,
        "metavar": "GRAMS",
        "help": "the grams of CO2 of a kWh: tells those of the run",
    },
    "--mtbf": {
        "type": _duration,
        "metavar": "50000h",
        "help": "the mean time between failures of a device: tells interruptions, checkpoints and the goodput",
    },
    "--storage": {
        "type": _rate,
        "metavar": "10GB/s",
        "help": "what all devices write to storage together, with --mtbf (default: 10GB/s)",
    },
    "--restart": {
        "type": _duration,
        "metavar": "10min",
        "help": "from a failure until a checkpoint is read, with --mtbf (default: 10min)",
    },
    "--row-tokens": {
        "type": whole(),
        "metavar": "N",
        "help": "the tokens of a row, of a program in a file",
    },
    "--devices": {
        "type": wholes,
        "metavar": "N",
        "help": "number of devices (default: all of the hardware); with --tokens a list, as 64,128,256",
    },
}
"""The flags that `plan` has for sweeps."""
ONLY_HERE = ("days", "price", "carbon", "mtbf", "storage", "restart", "row_tokens")
"""The fields of those that have no meaning without ``--tokens``."""
REFUSED = ("why_not", "save", "load", "verify", "again", "auto", "slices", "cache")
"""The fields of what is told of a single search."""


BATCH = "--global-batch-size"


def batches_in(words: Sequence[str]) -> tuple[list[str], tuple[int, ...]]:
    """The words with the first batch of a range, as 1024:4096, in its place; and the batches of the range, doubling.

    There are none if no range is given.  `WrongWords` for a range that cannot be.
    """
    found, batches = list(words), tuple[int, ...]()
    for place, word in enumerate(found):
        flag, equals, value = word.partition("=")
        if flag != BATCH:
            continue
        at, text = place, value
        if not equals:
            at += 1
            text = found[at] if at < len(found) else ""
        if ":" in text:
            batches = _doubled(text)
            found[at] = f"{BATCH}={batches[0]}" if equals else str(batches[0])
    return found, batches


def _doubled(text: str) -> tuple[int, ...]:
    """The numbers from the first of a range to its last, each twice the one before."""
    first, _, last = text.partition(":")
    if not (_is_count(first) and _is_count(last) and 0 < int(first) <= int(last)):
        raise WrongWords(f"{BATCH} needs one number, or a range as 1024:4096; got {shown(text)}")
    found = [int(first)]
    while 2 * found[-1] <= int(last):
        found.append(2 * found[-1])
    return tuple(dict.fromkeys((*found, int(last))))


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


def take_apart(arguments: argparse.Namespace) -> None:
    """Makes lists of the hardware and the devices of a sweep, and single values without ``--tokens``."""
    hardware, devices = arguments.hardware, arguments.devices
    if arguments.tokens is None:
        for name in ONLY_HERE:
            if getattr(arguments, name) is not None:
                raise WrongWords(
                    f"--{name.replace('_', '-')} is for a budget; give --tokens, too, as --tokens 1T"
                )
        given = {
            "--devices": bool(devices and len(devices) > 1),
            "--hardware": _has_several(hardware),
            BATCH: bool(arguments.batches),
        }
        several = next((flag for flag, there_are in given.items() if there_are), "")
        if several:
            raise WrongWords(f"several {several} are a sweep; give --tokens, too, as --tokens 1T")
        arguments.devices = devices[0] if devices else None
        return
    for name in REFUSED:
        if getattr(arguments, name):
            raise WrongWords(f"--{name.replace('_', '-')} is for a single search; leave it out with --tokens")
    arguments.hardware = _once("--hardware", [each.strip() for each in (hardware or "").split(",")])
    arguments.devices = _once("--devices", devices or (None,))
    if len(arguments.hardware) * len(arguments.devices) * max(len(arguments.batches), 1) > MOST_CELLS:
        raise WrongWords(f"a sweep has at most {MOST_CELLS} searches")


def _has_several(hardware: str | None) -> bool:
    return hardware is not None and "," in hardware and not hardware.lower().endswith((".toml", ".json"))


def _once(option: str, values: Sequence[Value]) -> tuple[Value, ...]:
    if "" in values:
        raise WrongWords(f"{option} has an empty name between its commas")
    if len({*values}) < len(values):
        twice = next(each for each in values if values.count(each) > 1)
        raise WrongWords(f"{option} has {twice} twice")
    return tuple(values)


def budget_of(arguments: argparse.Namespace) -> Budget:
    """What is asked of the run.  `WrongWords` for prices that do not fit the hardware."""
    from parallelism.budgets.budget import Budget, names_of

    hardware = arguments.hardware
    known = {name for each in hardware for name in (each, *names_of(each))}
    for name in arguments.price or {}:
        if name and name not in known:
            raise WrongWords(
                f"--price names {shown(name)}, which is no --hardware here: {', '.join(hardware)}"
            )
    budget = Budget(arguments.tokens, arguments.days, arguments.price, arguments.carbon, _failures(arguments))
    if budget.prices and (without := next((each for each in hardware if budget.price(each) is None), None)):
        raise WrongWords(f"--price has no price of {without}")
    return budget


def _failures(arguments: argparse.Namespace) -> Failures | None:
    """How often devices fail.  `WrongWords` for what has no meaning without failures."""
    given = {
        "storage_bytes_per_second": arguments.storage,
        "restart_seconds": arguments.restart,
    }
    if arguments.mtbf is None:
        for flag in ("storage", "restart"):
            if getattr(arguments, flag) is not None:
                raise WrongWords(f"--{flag} is for failures; give --mtbf, too, as --mtbf 50000h")
        return None
    from parallelism.budgets import Failures

    return Failures(arguments.mtbf, **{name: value for name, value in given.items() if value is not None})
