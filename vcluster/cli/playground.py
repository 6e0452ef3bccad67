"""The page on which collectives and schedules are tried out: `python -m vcluster playground`."""

from collections.abc import Sequence
from pathlib import Path

from vcluster.cli.command_line import Parser, accessing, writable


def playground(program: str, words: Sequence[str]) -> int:
    """Write the page on which collectives and schedules are tried out."""
    path: Path = (
        Parser(
            {
                "--html": {
                    "type": Path,
                    "default": Path("playground.html"),
                    "metavar": "FILE.html",
                    "help": "the page to write (default: playground.html)",
                },
            },
            prog=f"{program} playground",
            description="""\
Writes one page that needs no other file, no network and no Python. In it you
choose a collective and go through its messages step by step, or let two
schedules of a pipeline race on one time axis, with costs of your own.""",
            epilog=f"  {program} playground --html lesson.html",
        )
        .parse(words)
        .html
    )
    from vcluster.report.playground import playground as written

    writable(path, "html")
    with accessing(path, option="html"):
        written(path)
    print(f"The page is {path}")
    return 0
