"""The flags about imperfect clusters: slow links, slow and lost devices, jitter."""

import argparse
import re
from fractions import Fraction

from parallelism.budgets.imperfect import Imperfections, SlowDevices, SlowLinks
from parallelism.hardware.fields import shown
from vcluster.cli.command_line import Arguments, whole

_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)%", re.ASCII)
_PART = re.compile(r"[01](?:\.[0-9]{1,9})?|\.[0-9]{1,9}", re.ASCII)


def _percent(text: str, wanted: str, whole_text: str) -> Fraction:
    given = _PERCENT.fullmatch(text)
    found = Fraction(given[1]) / 100 if given else Fraction(0)
    if not 0 < found <= 1:
        raise argparse.ArgumentTypeError(f"{wanted}, got {shown(whole_text)}")
    return found


def _part(text: str, wanted: str, whole_text: str) -> float:
    found = float(text) if _PART.fullmatch(text) else 0.0
    if not 0 < found <= 1:
        raise argparse.ArgumentTypeError(f"{wanted}, got {shown(whole_text)}")
    return found


def _slow_links(text: str) -> SlowLinks:
    """A type for argparse: ``10%:0.5`` are a tenth of the ports with half of their bandwidth.  A level may be named in
    front, as ``nvlink:10%:0.5``."""
    wanted = "needs a part of the ports and of their bandwidth, as 10%:0.5 or nvlink:10%:0.5"
    *level, share, factor = text.split(":") if text.count(":") in (1, 2) else ("", "", "")
    if level == [""]:
        raise argparse.ArgumentTypeError(f"{wanted}, got {shown(text)}")
    return SlowLinks(_percent(share, wanted, text), _part(factor, wanted, text), level[0] if level else None)


def _slow_devices(text: str) -> SlowDevices:
    """A type for argparse: ``1:0.8`` is one device with 0.8 of its speed."""
    wanted = "needs a number of devices and their part of the speed, as 1:0.8"
    count, _, speed = text.partition(":")
    if not (count.isascii() and count.isdecimal() and 0 < len(count) < 9 and int(count)):
        raise argparse.ArgumentTypeError(f"{wanted}, got {shown(text)}")
    return SlowDevices(int(count), _part(speed, wanted, text))


def _jitter(text: str) -> float:
    """A type for argparse: ``3%``, a part of the compute of a step, as a number."""
    return float(_percent(text, "needs a part of the compute of a step, as 3%", text))


SLOW: Arguments = {
    "--slow-links": {
        "type": _slow_links,
        "action": "append",
        "default": [],
        "metavar": "10%:0.5",
        "help": "every tenth port of the outermost links has half of its bandwidth; nvlink:10%%:0.5 names other links",
    },
    "--slow-devices": {
        "type": _slow_devices,
        "action": "append",
        "default": [],
        "metavar": "1:0.8",
        "help": "so many devices compute at this part of the speed",
    },
}
"""The flags that `simulate` has, too."""
IMPERFECT: Arguments = {
    **SLOW,
    "--lost-devices": {"type": whole(), "metavar": "N", "help": "so many of the devices are lost"},
    "--jitter": {
        "type": _jitter,
        "metavar": "3%",
        "help": "the compute of a step varies by so much from device to device, and the slowest is waited for",
    },
}


def imperfections_of(arguments: argparse.Namespace) -> Imperfections:
    """What is wrong with the cluster."""
    return Imperfections(
        tuple(arguments.slow_links),
        tuple(arguments.slow_devices),
        getattr(arguments, "lost_devices", None) or 0,
        getattr(arguments, "jitter", None) or 0.0,
    )


def words_of_faults(found: Imperfections) -> list[str]:
    """The words of `simulate` for slow links and devices."""
    words = []
    for links in found.slow_links:
        level = "" if links.level is None else f"{links.level}:"
        words.append(f"--slow-links={level}{float(100 * links.share):.9g}%:{links.bandwidth_factor:.9g}")
    return [*words, *(f"--slow-devices={each.count}:{each.speed:.9g}" for each in found.slow_devices)]
