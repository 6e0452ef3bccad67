"""The commands on what was recorded: `python -m vcluster report` and `compare` on traces, `hang` on dumps."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vcluster.cli.command_line import Parser, WrongWords, accessing, hardware_of, writable

if TYPE_CHECKING:
    from parallelism.trace import Trace


def report(program: str, words: Sequence[str]) -> int:
    """Print the summary and the timeline of a recorded trace, and write its page if requested."""
    arguments = Parser(
        {
            "trace": {
                "type": Path,
                "metavar": "TRACE.json",
                "help": "a file that Trace.save or a demo has written",
            },
            "--html": {"type": Path, "metavar": "FILE.html", "help": "write a page that needs no other file"},
            "--hardware": {
                "metavar": "NAME",
                "help": "hardware of the page's roofline: a preset, a file, or host (default: the trace's own)",
            },
        },
        prog=f"{program} report",
        description="A recorded trace: where its time goes, and when.",
    ).parse(words)
    trace = _loaded(arguments.trace)
    if arguments.hardware is not None and arguments.html is None:
        raise WrongWords("--hardware is an option of the page and needs --html")
    roof = hardware_of(arguments.hardware)
    page: Path | None = arguments.html
    _check_page(page, [arguments.trace], "the trace itself")
    from vcluster.report import html, timeline

    with _silent():
        print(trace.summary(), timeline(trace), sep="\n\n")
    if page is not None:
        with _silent(), accessing(page, option="html"):
            html(trace, page, hardware=roof)
        print(f"\nThe page is {page}")
    return 0


def compare(program: str, words: Sequence[str]) -> int:
    """Print what got slower from the first to the second of two recorded traces, and why."""
    arguments = Parser(
        {
            "a": {"type": Path, "metavar": "A.json", "help": "the trace before"},
            "b": {"type": Path, "metavar": "B.json", "help": "the trace after"},
            "--html": {
                "type": Path,
                "metavar": "FILE.html",
                "help": "write both on one time axis, as a page",
            },
        },
        prog=f"{program} compare",
        description="What is slower in B than in A, and why.",
    ).parse(words)
    traces = _loaded(arguments.a), _loaded(arguments.b)
    from vcluster.report import compare as compared

    page = arguments.html
    with _silent():
        found = compared(*traces)
    _check_page(page, [arguments.a, arguments.b], "a trace")
    print(found)
    if page is not None:
        from vcluster.report import comparison_html

        with _silent(), accessing(page, option="html"):
            comparison_html(found, page, titles=(arguments.a.name, arguments.b.name))
        print(f"\nThe page is {page}")
    return 0


def hang(program: str, words: Sequence[str]) -> int:
    """Print why a job hangs, from the dumps of its ranks, and write its page if requested."""
    arguments = Parser(
        {
            "dumps": {
                "type": Path,
                "metavar": "DUMP",
                "nargs": "+",
                "help": "flight-recorder dumps as JSON, one a rank, a folder of them, or what error.trace.save has written",
            },
            "--html": {
                "type": Path,
                "metavar": "FILE.html",
                "help": "write a page with the last calls of each rank",
            },
        },
        prog=f"{program} hang",
        description="Why a job hangs: who waits for whom, and which decision differed.",
    ).parse(words)
    from vcluster.hangs import DumpError, explain

    for path in arguments.dumps:
        with accessing(path, "read"):
            path.stat()
    page: Path | None = arguments.html
    _check_page(page, arguments.dumps, "a dump")
    try:
        explanation = explain(arguments.dumps)
    except DumpError as error:
        if "\n" not in str(error):
            raise WrongWords(str(error)) from None
        print(f"{program} hang: {error}", file=sys.stderr)  # the lines for a pickle are to be copied
        return 2
    print(explanation)
    if page is not None:
        with accessing(page, option="html"):
            explanation.html(page)
        print(f"\nThe page is {page}")
    return 0


def _check_page(page: Path | None, read: Sequence[Path], what: str) -> None:
    """Refuse a page that cannot be written, or that is one of the files that are ``read``."""
    if page is not None and writable(page, "html").exists() and any(page.samefile(path) for path in read):
        raise WrongWords(f"--html: {page} is {what}")


def _silent() -> np.errstate:
    """Without warnings of overflows: times in a forged file may add up to more than a float holds."""
    return np.errstate(all="ignore")


def _loaded(path: Path) -> Trace:
    from parallelism.trace import Trace

    try:
        with accessing(path, "read"):
            return Trace.load(path)
    except (ValueError, MemoryError) as error:
        raise WrongWords(str(error) or f"{path} needs more memory than this machine has") from None
