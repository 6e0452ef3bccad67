"""`plan --with`: a cluster of two kinds of nodes, or of two sites."""

from __future__ import annotations

import argparse
import json
import sys
from math import inf
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from parallelism.display import WIDTH, progress
from parallelism.display.quantities import count, plural, rate_in, seconds_in
from parallelism.hardware import Across, Hardware, MixedHardware, mixed
from parallelism.hardware.fields import shown
from parallelism.models import TransformerSpec
from vcluster.cli.command_line import Arguments, WrongWords
from vcluster.cli.megatron_words import searched_hardware, tell_remarks, tell_unchanging
from vcluster.cli.sweeps.question import Search

if TYPE_CHECKING:
    from parallelism.mixing import MixedPlans


def _across(text: str) -> Across:
    """A type for argparse: ``10Gb/s``, or with a latency ``10Gb/s:5ms``."""
    rate, colon, latency = text.partition(":")
    try:
        found = Across(rate_in(rate), seconds_in(latency) if colon else 0.0)
    except ValueError:
        found = Across(0.0)
    if not 0 < found.bytes_per_second < inf:
        raise argparse.ArgumentTypeError(
            f"needs a rate above 0 with a unit, and maybe a latency, as 10Gb/s or 10Gb/s:5ms; got {shown(text)}"
        )
    return found


MIXED: Arguments = {
    "--with": {
        "dest": "other",
        "metavar": "dgx-h100:4",
        "help": "a second kind of nodes, or a second site, beside --hardware, which is then as dgx-a100:4",
    },
    "--across": {
        "type": _across,
        "metavar": "10Gb/s",
        "help": "the one link between --hardware and --with, at two sites; with a latency: 10Gb/s:5ms (default: they "
        "are in one network)",
    },
}
"""The flags of mixed clusters."""
REFUSED = (
    *("tokens", "auto", "slices", "cache", "why_not", "save", "verify", "again", "html", "devices"),
    *("slow_links", "slow_devices", "lost_devices", "jitter"),
)
"""The fields of what is not told of mixed clusters."""


def check_mixed(arguments: argparse.Namespace) -> None:
    """`WrongWords` for words that do not go with ``--with``, and for ``--across`` without it."""
    if arguments.other is None:
        if arguments.across is not None:
            raise WrongWords("--across is the link to a second site; give --with, too, as --with dgx-h100:8")
        return
    for name in REFUSED:
        if getattr(arguments, name):
            option = name.replace("_", "-")
            if name == "devices":
                raise WrongWords(
                    "--devices is for one kind of nodes; with --with the names say how many, as dgx-a100:4"
                )
            raise WrongWords(f"--{option} is for one kind of nodes; leave it out with --with")


def tell_mixed(program: str, arguments: argparse.Namespace) -> int:
    """Find plans over both kinds of nodes, and on each alone, and tell them.  Returns 1 if nothing fits."""
    from parallelism.mixing import find_mixed

    try:
        arguments.devices = None
        search = Search.of(program, arguments)
        if not isinstance(search.model, TransformerSpec):
            raise ValueError(
                f"--with is for a Transformer by its name; {arguments.model} is a program in a file"
            )
        parts = [_part(arguments, search.model, option) for option in ("hardware", "other")]
        for part in parts:
            search.check_rate(part)
        both = mixed(*parts, across=arguments.across)
        with progress("listing the splits") as told:
            plans = find_mixed(
                search.model, hardware=both, batch=search.batch, progress=told, **search.options
            )
    except (ValueError, TypeError, OSError) as error:
        raise WrongWords(str(error)) from None
    tell_remarks(search.asked.model)
    tell_unchanging(arguments, search.asked.flags)
    if arguments.json:
        print(json.dumps(_document(search, both, plans, arguments.top), indent=1))
    else:
        print(_text(search, both, plans, arguments.top))
    if plans.best is None:
        print(f"no plan fits: {plans.alone[0].text}; {plans.alone[1].text}", file=sys.stderr)
    return int(plans.best is None)


def _part(arguments: argparse.Namespace, model: object, option: str) -> Hardware:
    """The hardware of an option.  ``ValueError`` if a preset is given without its number of nodes."""
    name = getattr(arguments, option)
    flag = "with" if option == "other" else option
    if name.partition("+")[0] in Hardware.presets():
        raise ValueError(
            f"--{flag} must say how many nodes there are, as {name.partition('+')[0]}:4; got {name}"
        )
    try:
        return Hardware.of(searched_hardware(name, model))
    except ValueError as error:
        raise ValueError(f"--{flag}: {error}") from None


def _document(search: Search, both: MixedHardware, plans: MixedPlans, top: int) -> dict[str, Any]:
    across = both.across
    return {
        "model": search.asked.name,
        "parameters": search.asked.parameters,
        "batch": search.batch,
        "devices": both.devices,
        "hardware": [
            {"name": part.name, "devices": part.devices, "stack": part.stack or None} for part in both.parts
        ],
        "across": None if across is None else across._asdict(),
        **plans.json(top),
    }


def _text(search: Search, both: MixedHardware, plans: MixedPlans, top: int) -> str:
    across = both.across
    link = f", {count(across.bytes_per_second * 8)}b/s between them" if across is not None else ""
    stacks = f"; the stacks {both.stack}" if both.stack else ""
    heading = (
        f"{search.asked.name}, {count(search.asked.parameters)} parameters, on {both.name}{link}; "
        f"{plural(search.batch, 'sequence')} a step{stacks}"
    )
    lines = [*wrap(heading, WIDTH), "", plans.text(top), "", f"{plans.verdict}."]
    if plans.found:
        first = plans.found[0]
        lines += ["", "The first as the text of a strategy:", f"  {first}"]
    return "\n".join(lines)
