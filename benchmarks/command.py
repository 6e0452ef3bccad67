"""The command line: which suites, how much of them, and where the figures go."""

from __future__ import annotations

import re
import shlex
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import figures_page, page
from benchmarks.cases import COLLECTIVES, ITEM_BYTES, WrongAnswerError
from benchmarks.installed import missing
from benchmarks.machine import additions_seconds, in_a_line, machine, versions
from benchmarks.plan import Plan
from benchmarks.results import Results, speed_line, write_json
from benchmarks.suites import SUITES
from benchmarks.systems import Say, SystemFailedError
from benchmarks.tables import paragraph
from benchmarks.targets import Standing
from vcluster.cli.command_line import Parser, WrongWords, choice, whole, wholes, writable

PROGRAM = "python -m benchmarks"
MOST_DEVICES = 256
MOST_BYTES = 1 << 30

EXAMPLES = f"""examples:
  {PROGRAM} --quick                         everything, in about a minute
  {PROGRAM} collectives --devices 4 --sizes 8,64KiB,16MiB
  {PROGRAM} peers --peers peers/bin/python  peers that another environment has
  {PROGRAM} --json figures.json             also for programs to read
  {PROGRAM} peers --svg curves              also as pictures
  {PROGRAM} page figures.json               all tables and curves, as a page
  {PROGRAM} figures                         kept figures that have a target
"""


def main(words: Sequence[str]) -> int:
    """Run what the words ask for; the exit status: 1 if a timed operation gave a wrong answer or vcluster failed."""
    if words and words[0] in ("page", "figures"):
        return (page if words[0] == "page" else figures_page).main(words[1:])
    asked = _parser().parse(words)
    if asked.list:
        width = max(map(len, SUITES))
        for name, suite in SUITES.items():
            print(f"{name:{width}}  {suite.title}")
        return 0
    plan = plan_of(asked)
    path = None if asked.json is None else writable(Path(asked.json))
    draw = None if asked.svg is None else page.drawing("--svg")
    started = datetime.now(UTC).isoformat(timespec="seconds")
    about, results = machine(), Results(versions=versions())
    print(paragraph(in_a_line(about, results.versions), indent=""))
    status = 0
    for name in dict.fromkeys(asked.suites or SUITES):
        print(f"\n{name}: {SUITES[name].title}")
        skipped = set(results.skipped)
        say, done = _status()
        before = additions_seconds()
        try:
            SUITES[name].measure(plan, results, say)
        except (WrongAnswerError, SystemFailedError) as error:
            status = 1
            done()  # the line below would stand behind it
            print(f"{PROGRAM}: {error}", file=sys.stderr)
        finally:
            done()
        if any(results.of(name)):
            results.additions[name] = before, additions_seconds()
            print(f"\n{SUITES[name].report(results)}\n\n{paragraph(speed_line(results, name))}")
        for system, reason in results.skipped.items():
            if system not in skipped:
                print(paragraph(f"{system}: skipped, {reason}"))
    if path is not None:
        command = ["python", "-m", "benchmarks", *words]
        write_json(path, results.document(command, started, about) | Standing(results).plain())
        print(f"\n{path}: the figures of {shlex.join(command)}")
    if draw is not None:
        for picture in draw(results, Path(asked.svg)):
            print(picture)
    return status


def plan_of(asked: Namespace) -> Plan:
    """The plan for checked words.  Raises `WrongWords`."""
    if asked.peers is not None:
        try:
            missing(asked.peers)
        except ValueError as error:
            raise WrongWords(str(error)) from None
    for devices in asked.devices or ():
        if not 2 <= devices <= MOST_DEVICES:
            raise WrongWords(f"--devices needs numbers from 2 to {MOST_DEVICES}, got {devices}")
    return Plan(
        devices=asked.devices, sizes=asked.sizes, operations=asked.operations or COLLECTIVES,
        passes=asked.passes or (2 if asked.quick else 5), quick=asked.quick, peers_python=asked.peers,
    )


def nbytes_of(text: str) -> int:
    """A type for argparse: ``8``, ``64KiB``, ``16MiB``."""
    match = re.fullmatch(r"(\d+) ?(b|kib|mib|gib)?", text.strip().lower())
    if match is None:
        raise ArgumentTypeError(f"needs sizes such as 8, 64KiB or 16MiB, got {text!r}")
    nbytes = int(match[1]) << {"b": 0, "kib": 10, "mib": 20, "gib": 30}[match[2] or "b"]
    if not ITEM_BYTES <= nbytes <= MOST_BYTES or nbytes % ITEM_BYTES:
        raise ArgumentTypeError(f"needs sizes from {ITEM_BYTES} B to 1 GiB, multiples of {ITEM_BYTES} B, got {text!r}")
    return nbytes


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted({nbytes_of(part) for part in text.split(",")}))


def _devices(text: str) -> tuple[int, ...]:
    return tuple(sorted(set(wholes(text))))


def _operations(text: str) -> tuple[str, ...]:
    one = choice(COLLECTIVES)
    return tuple(dict.fromkeys(one(part.strip()) for part in text.split(",")))


def _parser() -> Parser:
    parser = Parser(prog=PROGRAM, description="Times vcluster, and its peers beside it.", epilog=EXAMPLES)
    add = parser.add_argument
    add("suites", nargs="*", type=choice(tuple(SUITES)), metavar="SUITE", help=f"{', '.join(SUITES)}; default: all")
    add("--list", action="store_true", help="the suites, one line each")
    add("--quick", action="store_true", help="fewer devices, sizes and rounds: a minute")
    add("--devices", type=_devices, metavar="N,N", help="numbers of devices, where a suite has a choice")
    add("--sizes", type=_sizes, metavar="SIZE,SIZE", help="sizes of buffers: 8,64KiB,16MiB")
    add("--operations", type=_operations, metavar="NAME,NAME", help="collectives, out of all")
    add("--passes", type=whole(1, 1000), metavar="N", help="how often all is gone through (5; quick: 2)")
    add("--peers", metavar="PYTHON", help="the interpreter that has mpi4py, jax, torch (default: this one)")
    add("--json", metavar="FILE", help="write the figures to a file, too")
    add("--svg", metavar="DIR", help="draw the curves of collectives and peers there, too")
    return parser


def _status() -> tuple[Say, Callable[[], None]]:
    """What is being done just now, on a terminal; and its end."""
    if not sys.stderr.isatty():
        return (lambda text: None), (lambda: None)

    def say(text: str) -> None:
        print(f"\r\x1b[K{text[:78]}", end="", file=sys.stderr, flush=True)

    def done() -> None:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    return say, done
