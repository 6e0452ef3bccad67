"""``python -m vcluster``: a list of the commands, and the commands on traces, hardware and this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from vcluster.demo import Parser, WrongWords
from vcluster.demo.command_line import accessing, nearest, serve, whole, writable

if TYPE_CHECKING:
    import argparse

    from parallelism.trace import Trace

PROGRAM = "python -m vcluster"

LIST = f"""vcluster: a cluster of real processes on this machine

  {PROGRAM}.demo              the demos, one line each
  {PROGRAM}.demo mlp --pp 4   train a perceptron as a pipeline
  {PROGRAM} show M.mlir       print a program, or that of one device
  {PROGRAM} simulate M.mlir   predict its time on described hardware
  {PROGRAM} simulate gpt ...  the same of a training step, by its flags
  {PROGRAM} plan gpt ...      the best split of a training step
  {PROGRAM} run M.mlir        run it on devices here, and compare
  {PROGRAM} shardings OP      every split of an operator over a mesh
  {PROGRAM} convert A B       a program as StableHLO, ONNX or our text
  {PROGRAM} report T.json     a recorded trace: summary, timeline, page
  {PROGRAM} compare A B       two traces: what got slower, and why
  {PROGRAM} playground        a page to try collectives and schedules
  {PROGRAM} doctor            what this machine lacks, and what to do
  {PROGRAM} hardware [NAME]   list described clusters, or print one
  {PROGRAM} calibrate         measure this machine, or a GPU
  {PROGRAM} completion bash   names completed by a shell
  {PROGRAM} --version         print the version

In Python:

  from vcluster import VirtualCluster
  with VirtualCluster(4) as cluster:
      run = cluster.run(lambda device: device.all_reduce(device.rank))
  print(run.outputs)
"""


def main(words: Sequence[str]) -> int:
    """Execute the command in ``words``, or print the list of commands. Returns the exit status."""
    if not words or words[0] in ("-h", "--help"):
        print(LIST, end="")
        return 0
    if words[0] == "--version":
        try:
            print("vcluster", version("vcluster"))
        except PackageNotFoundError:
            print("vcluster, from sources that are not installed")
        return 0
    if words[0] in COMMANDS:
        try:
            return COMMANDS[words[0]](words[1:])
        except SystemExit:  # argparse has printed the help
            return 0
        except WrongWords as error:
            error.command = words[0]
            raise
    hint = nearest(words[0], ("--version", "--help", *COMMANDS))
    raise WrongWords(f"there is no command {words[0]!r}{hint}")


def doctor(words: Sequence[str]) -> int:
    """Report what would cause problems on this machine. Returns 1 if there is a problem."""
    Parser(prog=f"{PROGRAM} doctor", description="""\
Reports what this machine offers and what would cause problems. The exit status
is 1 if there is a problem.""").parse(words)
    from vcluster.cli import doctor

    return doctor.run_checks()


def hardware(words: Sequence[str]) -> int:
    """Print the list of described hardware, or one of it."""
    name = Parser(
        {"name": {"nargs": "?", "metavar": "NAME | FILE.toml | FILE.json | host", "help": "the hardware to print"}},
        prog=f"{PROGRAM} hardware", description="""\
Lists all described clusters and stacks, one line each; or prints one cluster
with the sources of its numbers: a preset, a file, or host, which is this
machine if it is calibrated.""",
        epilog=f"""\
  {PROGRAM} hardware dgx-h100
  {PROGRAM} hardware dgx-h100:8       eight nodes of it
  {PROGRAM} hardware tpu-v4:4x4x8     a slice""").parse(words).name
    from vcluster.cli import hardware as hardware_shown

    try:
        print(hardware_shown.preset_list() if name is None else hardware_shown.description(name))
    except ValueError as error:
        raise WrongWords(str(error)) from None
    return 0


def _of_traces(command: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    """Silence overflow warnings in a command, because times in a forged file may add up to more than a float holds."""
    import numpy as np

    with np.errstate(all="ignore"):
        return command(words)


def report(words: Sequence[str]) -> int:
    """Print the summary and the timeline of a recorded trace, and write its page if requested."""
    arguments = Parser({
        "trace": {"type": Path, "metavar": "TRACE.json", "help": "a file that Trace.save or a demo has written"},
        "--html": {"type": Path, "metavar": "FILE.html", "help": "write a page that needs no other file"},
        "--hardware": {
            "metavar": "NAME",
            "help": "hardware of the page's roofline: a preset, a file, or host (default: the trace's own)"},
    }, prog=f"{PROGRAM} report", description="A recorded trace: where its time goes, and when.").parse(words)
    trace = _loaded(arguments.trace)
    if arguments.hardware is not None and arguments.html is None:
        raise WrongWords("--hardware is an option of the page and needs --html")
    from vcluster.demo import hardware_of

    roof = hardware_of(arguments.hardware)
    page: Path | None = arguments.html
    if page is not None and writable(page, "html").exists() and page.samefile(arguments.trace):
        raise WrongWords(f"--html: {page} is the trace itself")
    from vcluster.report import html, timeline

    print(trace.summary(), timeline(trace), sep="\n\n")
    if page is not None:
        with accessing(page, option="html"):
            html(trace, page, hardware=roof)
        print(f"\nThe page is {page}")
    return 0


def compare(words: Sequence[str]) -> int:
    """Print what got slower from the first to the second of two recorded traces, and why."""
    arguments = Parser({
        "a": {"type": Path, "metavar": "A.json", "help": "the trace before"},
        "b": {"type": Path, "metavar": "B.json", "help": "the trace after"},
        "--html": {"type": Path, "metavar": "FILE.html", "help": "write both on one time axis, as a page"},
    }, prog=f"{PROGRAM} compare", description="What is slower in B than in A, and why.").parse(words)
    traces = _loaded(arguments.a), _loaded(arguments.b)
    from vcluster.report import compare as compared

    found, page = compared(*traces), arguments.html
    if page is not None:
        for path in (arguments.a, arguments.b):
            if writable(page, "html").exists() and page.samefile(path):
                raise WrongWords(f"--html: {page} is a trace")
    print(found)
    if page is not None:
        from vcluster.report import comparison_html

        with accessing(page, option="html"):
            comparison_html(found, page, titles=(arguments.a.name, arguments.b.name))
        print(f"\nThe page is {page}")
    return 0


def playground(words: Sequence[str]) -> int:
    """Write the page on which collectives and schedules are tried out."""
    path: Path = Parser({
        "--html": {"type": Path, "default": Path("playground.html"), "metavar": "FILE.html",
                   "help": "the page to write (default: playground.html)"},
    }, prog=f"{PROGRAM} playground", description="""\
Writes one page that needs no other file, no network and no Python. In it you
choose a collective and go through its messages step by step, or let two
schedules of a pipeline race on one time axis, with costs of your own.""",
        epilog=f"  {PROGRAM} playground --html lesson.html").parse(words).html
    from vcluster.report.playground import playground as written

    writable(path, "html")
    with accessing(path, option="html"):
        written(path)
    print(f"The page is {path}")
    return 0


def _loaded(path: Path) -> Trace:
    from parallelism.trace import Trace

    try:
        with accessing(path, "read"):
            return Trace.load(path)
    except (ValueError, MemoryError) as error:
        raise WrongWords(str(error) or f"{path} needs more memory than this machine has") from None


def calibrate(words: Sequence[str]) -> int:
    """Measure this machine and write a hardware file."""
    from parallelism.hardware import VARIABLE, host_file

    arguments = Parser({
        "file": {"type": Path, "nargs": "?", "metavar": "FILE.json", "help": "the file to write"},
        "--check": {"action": "store_true", "help": "write nothing"},
        "--mpi": {"action": "store_true", "help": "measure the ranks of this MPI job, and what joins them"},
        "--published": {
            "metavar": "TABLE", "help": "fit the stack of a table of published runs to it, and tell the errors"},
        "--gpu": {"action": "store_true", "help": "measure a GPU through PyTorch, and write a stack to --output"},
        "--output": {"type": Path, "metavar": "FILE.toml", "help": "the stack file that --gpu writes"},
        "--seconds": {"type": whole(1), "metavar": "N", "help": "the time for --gpu (default: 300)"},
        "--gpu-device": {"metavar": "DEVICE", "help": "cuda (default), cuda:1, or cpu for a try without a GPU"},
        "--tables": {
            "metavar": "NAME", "help": "with --gpu: measure nothing, fit to what was measured once: tables that are "
                                       "kept, as h100, or a .json file beside a stack"},
        "--quick": {"action": "store_true", "help": "with --gpu: a little of everything, in seconds"},
        "--devices": {
            "type": whole(2, 64), "default": max(2, min(64, os.cpu_count() or 2)), "metavar": "N",
            "help": "number of devices that compute at the same time (default: the number of cores)"},
    }, prog=f"{PROGRAM} calibrate", description="""\
Measures this machine, describes it in a hardware file, and reports the error of
virtual time against wall time on cases that were not used for the fit. This
takes about a minute; run nothing else meanwhile.""",
        epilog=f"""Without a FILE, the hardware is written to the file that hardware="host" reads:
  $XDG_CONFIG_HOME/vcluster/host.json, or ~/.config/vcluster/host.json.
  {VARIABLE}=PATH names another file; if it is empty, there is none.""").parse(words)
    if arguments.published is not None:
        return _published(arguments.published)
    if arguments.gpu:
        return _of_gpu(arguments)
    for name in ("output", "seconds", "gpu_device", "quick", "tables"):
        if getattr(arguments, name):
            raise WrongWords(f"--{name.replace('_', '-')} is an option of --gpu")
    if arguments.check and arguments.file is not None:
        raise WrongWords(f"--check writes nothing; leave out {arguments.file}")
    path = None if arguments.check else arguments.file or host_file()
    if path is None and not arguments.check:
        raise WrongWords(f"{VARIABLE} is empty, so hardware='host' has no file; name a file, or use --check")
    if path is not None:
        with accessing(path):
            if arguments.file is None:
                path.parent.mkdir(parents=True, exist_ok=True)
            writable(path)
    from vcluster.calibration.calibrate import SHARED_MEMORY, calibrate as measured, over_mpi

    medium = SHARED_MEMORY
    if arguments.mpi:
        from vcluster.code import ClusterError
        from vcluster.mpi import current
        from vcluster.mpi.nodes import ranks_by_node

        try:
            job = current(arguments.devices)
            medium = over_mpi(len(ranks_by_node([job.places[rank] for rank in job.next_ranks(arguments.devices)])))
        except (ClusterError, ImportError) as error:
            raise WrongWords(str(error).replace("script.py", "-m vcluster calibrate --mpi FILE.json")) from None
    print(measured(arguments.devices, path, medium))
    if path is not None:
        print(f"\nwritten to {path}, for VirtualCluster(hardware={str(arguments.file or 'host')!r})")
    return 0


def _published(name: str) -> int:
    """Refit a stack to a table of published runs and print both."""
    from parallelism.display import progress
    from vcluster.calibration.published import Table, refitted

    try:
        table = Table.of(name)
    except ValueError as error:
        raise WrongWords(str(error)) from None
    with progress() as told:
        report = refitted(table, told)
    print(report)
    return 0


def _of_gpu(arguments: argparse.Namespace) -> int:
    """Measure a GPU through PyTorch and write a stack."""
    output: Path | None = arguments.output
    if arguments.tables is not None:
        return _of_tables(arguments.tables, output)
    if output is None or output.suffix != ".toml":
        raise WrongWords(f"--gpu needs --output FILE.toml, the stack to write; got {output}")
    for path in (output, output.with_suffix(".json")):
        writable(path, "output")
    from vcluster.calibration.gpu.command import run
    from vcluster.calibration.gpu.through_torch.torch_found import NoTorchError

    try:
        return run(arguments.gpu_device or "cuda", output, seconds=arguments.seconds or 300, quick=arguments.quick)
    except NoTorchError as error:
        raise WrongWords(str(error)) from None


def _of_tables(name: str, output: Path | None) -> int:
    """Fit a stack to what was measured of a GPU once, and print it."""
    from vcluster.calibration.gpu.kept import again

    if output is not None:
        writable(output, "output")
    try:
        with accessing(Path(name), "read", "tables"):
            print(again(name, output))
    except ValueError as error:
        raise WrongWords(f"--tables: {error}") from None
    return 0


def _of_models(name: str, words: Sequence[str]) -> int:
    """A command on a program in a file. Its module is loaded when the command is executed."""
    from vcluster.cli import programs as models

    return {"show": models.show, "simulate": models.simulated, "run": models.run}[name](PROGRAM, words)


def convert(words: Sequence[str]) -> int:
    """Write a program in another format."""
    from vcluster.cli import elsewhere

    return elsewhere.convert(PROGRAM, words)


def plan(words: Sequence[str]) -> int:
    """Find the best split of a training step."""
    from vcluster.cli.plan import planned

    return planned(PROGRAM, words)


def shardings(words: Sequence[str]) -> int:
    """List the ways to split an operator."""
    from vcluster.cli.shardings import shardings as listed

    return listed(PROGRAM, words)


def demo(words: Sequence[str]) -> int:
    """List the demos, or run one."""
    from vcluster.demo.__main__ import main as demonstrated

    return demonstrated(words)


def completion(words: Sequence[str]) -> int:
    """Print a script that completes the names of commands and demos in a shell."""
    shells = ("bash", "zsh")
    shell = Parser({"shell": {"metavar": "SHELL", "help": " or ".join(shells)}}, prog=f"{PROGRAM} completion",
                   description="Prints a script for a shell that completes commands and demos:\n"
                   '  eval "$(vcluster completion bash)"').parse(words).shell
    if shell not in shells:
        raise WrongWords(f"there is completion for {' and '.join(shells)}, got {shell!r}")
    from vcluster.demo.__main__ import DEMOS

    print(_COMPLETION.format(zsh="autoload -U +X bashcompinit && bashcompinit\n" * (shell == "zsh"),
                             commands=" ".join((*COMMANDS, "--version")), demos=" ".join(DEMOS)))
    return 0


_COMPLETION = """{zsh}_vcluster() {{
    local now=${{COMP_WORDS[COMP_CWORD]}} names=
    if [ "$COMP_CWORD" = 1 ]; then names="{commands}"
    elif [ "$COMP_CWORD" = 2 ] && [ "${{COMP_WORDS[1]}}" = demo ]; then names="{demos}"; fi
    COMPREPLY=($(compgen -W "$names" -- "$now"))
    if [ -z "$names" ]; then COMPREPLY=($(compgen -f -- "$now")); fi
}}
complete -F _vcluster vcluster"""


def command() -> None:
    """What the installed command `vcluster` runs."""
    sys.exit(serve("vcluster", main))


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    **{name: partial(_of_models, name) for name in ("show", "simulate", "run")},
    "report": partial(_of_traces, report), "compare": partial(_of_traces, compare), "playground": playground,
    "doctor": doctor,
    "hardware": hardware, "calibrate": calibrate, "plan": plan,
    "convert": convert, "shardings": shardings, "demo": demo, "completion": completion,
}
"""The commands, by name."""


if __name__ == "__main__":
    sys.exit(serve(PROGRAM, main))
