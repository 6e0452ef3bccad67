"""``python -m vcluster``: what there is, and recorded traces looked at."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from vcluster.demo.command_line import Parser, WrongWords, accessing, nearest, parsed, serve, whole, writable

if TYPE_CHECKING:
    from parallelism.trace import Trace

PROGRAM = "python -m vcluster"

LIST = f"""vcluster: a cluster of real processes on this machine

  {PROGRAM}.demo              the demos, one line each
  {PROGRAM}.demo mlp --pp 4   a perceptron trained as a pipeline
  {PROGRAM} show M.mlir       a program; with --mesh, that of a device
  {PROGRAM} simulate M.mlir   what it takes on described hardware
  {PROGRAM} run M.mlir        the same on devices here, and compared
  {PROGRAM} report T.json     a recorded trace: summary, timeline, page
  {PROGRAM} compare A B       of two traces: what got slower, and why
  {PROGRAM} doctor            what this machine lacks, and what to do
  {PROGRAM} hardware [NAME]   described clusters; one of them or a file
  {PROGRAM} calibrate         this machine, measured: what "host" means
  {PROGRAM} --version         which one this is

In Python:

  from vcluster import VirtualCluster
  with VirtualCluster(4) as cluster:
      run = cluster.run(lambda device: device.all_reduce(device.rank))
  print(run.outputs)
"""

SHORT = {
    "doctor": f"""usage: {PROGRAM} doctor

What this machine offers, and what would get in the way; exit status 1 if
something does.
""",
    "hardware": f"""usage: {PROGRAM} hardware [NAME | FILE.toml | FILE.json | host]

All clusters that are described, a line each; or one, with where its numbers
are from: a preset, a file, or host, this machine, if it is calibrated.

  {PROGRAM} hardware dgx-h100
  {PROGRAM} hardware dgx-h100:8       eight nodes of it
  {PROGRAM} hardware tpu-v4:4x4x8     a slice
""",
}
"""The help of commands that have no options."""


def main(words: Sequence[str]) -> int:
    """Prints what there is, or what was asked for; the exit status."""
    if not words or words[0] in ("-h", "--help"):
        print(LIST, end="")
        return 0
    if words[0] == "--version":
        try:
            print("vcluster", version("vcluster"))
        except PackageNotFoundError:
            print("vcluster, from sources that are not installed")
        return 0
    if words[0] in SHORT and [*words[1:]] in (["-h"], ["--help"]):
        print(SHORT[words[0]], end="")
        return 0
    if words[0] in COMMANDS:
        try:
            return COMMANDS[words[0]](words[1:])
        except WrongWords as error:
            error.command = words[0]
            raise
    if words[0] == "demo":
        raise WrongWords(f"the demos are {PROGRAM}.demo, with a dot")
    right = ("--version", "--help", "demo", *COMMANDS)
    raise WrongWords(f"there is no {words[0]!r}{nearest(words[0], right)}")


def doctor(words: Sequence[str]) -> int:
    """What would get in the way on this machine; 1 if something does."""
    if words:
        raise WrongWords(f"takes no more words, got {words[0]!r}")
    from vcluster.cli import doctor

    return doctor.show()


def hardware(words: Sequence[str]) -> int:
    """The hardware that is described: all, or one."""
    if len(words) > 1:
        raise WrongWords(f"takes the name of a preset or of a file, got {words[1]!r} too")
    from vcluster.cli import hardware as hardware_shown

    try:
        print(hardware_shown.one(words[0]) if words else hardware_shown.every())
    except ValueError as error:
        raise WrongWords(str(error)) from None
    return 0


def _of_traces(command: Callable[[Sequence[str]], int]) -> Callable[[Sequence[str]], int]:
    """A command for which times in a forged file may add up to more than a float holds."""

    def quietly(words: Sequence[str]) -> int:
        import numpy as np

        with np.errstate(all="ignore"):
            return command(words)

    return quietly


def report(words: Sequence[str]) -> int:
    """A recorded trace as a summary and a timeline, and as a page where that is asked for."""
    parser = Parser(prog=f"{PROGRAM} report", description="A recorded trace: where its time goes, and when.")
    parser.add_argument("trace", type=Path, metavar="TRACE.json", help="what Trace.save or a demo has written")
    parser.add_argument("--html", type=Path, metavar="FILE.html", help="write it as one page that needs nothing else")
    parser.add_argument("--hardware", metavar="NAME",
                        help="whose roof the page draws: a preset, a file, or host (what the trace names)")
    arguments = parsed(parser, words)
    if arguments is None:
        return 0
    trace = _loaded(arguments.trace)
    if arguments.hardware is not None and arguments.html is None:
        raise WrongWords("--hardware is for the page, --html")
    from vcluster.demo.elsewhere import hardware_of

    roof = hardware_of(arguments.hardware)
    if arguments.html is not None:
        _spared(arguments.html, arguments.trace)
    from vcluster.report import html, timeline

    print(trace.summary())
    print()
    print(timeline(trace))
    if arguments.html is not None:
        with accessing(arguments.html, option="html"):
            html(trace, arguments.html, hardware=roof)
        print(f"\nThe page is {arguments.html}")
    return 0


def compare(words: Sequence[str]) -> int:
    """Two recorded traces: what got slower from the first to the second, and why."""
    parser = Parser(prog=f"{PROGRAM} compare", description="What is slower in B than in A, and why.")
    parser.add_argument("a", type=Path, metavar="A.json", help="the trace before")
    parser.add_argument("b", type=Path, metavar="B.json", help="the trace after")
    arguments = parsed(parser, words)
    if arguments is None:
        return 0
    a, b = _loaded(arguments.a), _loaded(arguments.b)
    from vcluster.report import compare as compared

    print(compared(a, b))
    return 0


def _loaded(path: Path) -> Trace:
    from parallelism.trace import Trace

    try:
        with accessing(path, "read"):
            return Trace.load(path)
    except (ValueError, MemoryError) as error:
        raise WrongWords(str(error) or f"{path} needs more memory than there is") from None


def _spared(page: Path, trace: Path) -> None:
    """Refuses a page that cannot be written, or would be written over its own trace."""
    if writable(page, "html").exists() and page.samefile(trace):
        raise WrongWords(f"--html: {page} is the trace itself")


def calibrate(words: Sequence[str]) -> int:
    """This machine, measured, as a hardware file."""
    from parallelism.hardware import VARIABLE, host_file

    parser = Parser(
        prog=f"{PROGRAM} calibrate", description="""\
Measures this machine, describes it in a hardware file, and says how far virtual
time is from wall time in what it was not fitted to.  Takes about a minute; let
nothing else run meanwhile.""",
        epilog=f"""without a FILE it is written to where hardware="host" looks for it:
  $XDG_CONFIG_HOME/vcluster/host.json, or ~/.config/vcluster/host.json;
  {VARIABLE}=PATH names another file, and empty it names none""")
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE.json", help="where to")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--devices", type=whole(2, 64), default=max(2, min(64, os.cpu_count() or 2)), metavar="N",
                        help="devices that compute at the same time (as many as cores)")
    arguments = parsed(parser, words)
    if arguments is None:
        return 0
    if arguments.check and arguments.file is not None:
        raise WrongWords(f"--check writes nothing; leave out {arguments.file}")
    path = None if arguments.check else arguments.file or host_file()
    if path is None and not arguments.check:
        raise WrongWords(f"{VARIABLE} is empty, so there is no file for hardware='host'; name one, or --check")
    if path is not None:
        with accessing(path):
            if arguments.file is None:
                path.parent.mkdir(parents=True, exist_ok=True)
            writable(path)
    from vcluster.calibration.calibrate import calibrate as measured

    print(measured(arguments.devices, path))
    if path is not None:
        meant = "host" if arguments.file is None else str(path)
        print(f"\nwritten to {path}, for VirtualCluster(hardware={meant!r})")
    return 0


def _of_models(name: str) -> Callable[[Sequence[str]], int]:
    """A command on a program in a file; what it takes is loaded when it is asked for."""

    def command(words: Sequence[str]) -> int:
        from vcluster.cli import programs as models

        return {"show": models.show, "simulate": models.simulated, "run": models.run}[name](PROGRAM, words)

    return command


COMMANDS = {
    **{name: _of_models(name) for name in ("show", "simulate", "run")},
    "report": _of_traces(report), "compare": _of_traces(compare), "doctor": doctor, "hardware": hardware,
    "calibrate": calibrate,
}
"""By the word that names them."""


if __name__ == "__main__":
    sys.exit(serve(PROGRAM, main))
