"""``python -m vcluster``: a list of the commands, and the table that says where each is."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from collections.abc import Sequence
from importlib import import_module

from parallelism.rarely_collected import rarely_collected
from vcluster.cli.command_line import Parser, WrongWords, nearest, serve

PROGRAM = "python -m vcluster"

LIST = f"""vcluster: a cluster of real processes on this machine

  {PROGRAM}.demo              the demos, one line each
  {PROGRAM}.demo mlp --pp 4   train a perceptron as a pipeline
  {PROGRAM} show M.mlir       print a program, or that of one device
  {PROGRAM} simulate M.mlir   predict its time on described hardware
  {PROGRAM} simulate gpt ...  the same of a training step, by its flags
  {PROGRAM} plan gpt ...      the best split of a training step
  {PROGRAM} serve MODEL ...   how to serve a model, within limits
  {PROGRAM} run M.mlir        run it on devices here, and compare
  {PROGRAM} shardings OP      every split of an operator over a mesh
  {PROGRAM} convert A B       a program as StableHLO, ONNX or our text
  {PROGRAM} report T.json     a recorded trace: summary, timeline, page
  {PROGRAM} compare A B       two traces: what got slower, and why
  {PROGRAM} hang DUMP...      why a real job hangs, from its dumps
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

COMMANDS = {
    "show": "vcluster.cli.programs:show",
    "simulate": "vcluster.cli.programs:simulated",
    "run": "vcluster.cli.programs:run",
    "report": "vcluster.cli.traces:report",
    "compare": "vcluster.cli.traces:compare",
    "hang": "vcluster.cli.traces:hang",
    "playground": "vcluster.cli.playground:playground",
    "doctor": "vcluster.cli.doctor:doctor",
    "hardware": "vcluster.cli.hardware:hardware",
    "calibrate": "vcluster.cli.calibrate:calibrate",
    "plan": "vcluster.cli.plan:planned",
    "serve": "vcluster.cli.serving.command:served",
    "convert": "vcluster.cli.convert:convert",
    "shardings": "vcluster.cli.shardings:shardings",
    "demo": "vcluster.__main__:demo",
    "completion": "vcluster.__main__:completion",
}
"""By name, the module and the function of each command.  The function takes the program's name and the words behind the
command, and returns the exit status.  Its module is loaded when the command is executed."""


def main(words: Sequence[str]) -> int:
    """Execute the command in ``words``, or print the list of commands. Returns the exit status."""
    if not words or words[0] in ("-h", "--help"):
        print(LIST, end="")
        return 0
    if words[0] == "--version":
        from importlib.metadata import PackageNotFoundError, version

        try:
            print("vcluster", version("vcluster"))
        except PackageNotFoundError:
            print("vcluster, from sources that are not installed")
        return 0
    if words[0] not in COMMANDS:
        if words[0] == "help":
            named = words[1] if len(words) > 1 and words[1] in COMMANDS else ""
            raise WrongWords(
                f"there is no command 'help'; write {PROGRAM} {f'{named} --help' if named else '--help'}"
            )
        hint = nearest(words[0], ("--version", "--help", *COMMANDS))
        raise WrongWords(f"there is no command {words[0]!r}{hint}")
    module, _, function = COMMANDS[words[0]].partition(":")
    with rarely_collected():  # modules last, and the collector would look at them again and again
        executed = getattr(import_module(module), function)
    try:
        status: int = executed(PROGRAM, words[1:])
    except SystemExit:  # argparse has printed the help
        return 0
    except WrongWords as error:
        error.command = words[0]
        raise
    return status


def demo(program: str, words: Sequence[str]) -> int:
    """List the demos, or run one."""
    from vcluster.demo.__main__ import main as demonstrated

    return demonstrated(words)


def completion(program: str, words: Sequence[str]) -> int:
    """Print a script that completes the names of commands and demos in a shell."""
    from vcluster.demo.__main__ import DEMOS

    shells = ("bash", "zsh")
    shell = (
        Parser(
            {"shell": {"metavar": "SHELL", "help": " or ".join(shells)}},
            prog=f"{program} completion",
            description="Prints a script for a shell that completes commands and demos:\n"
            '  eval "$(vcluster completion bash)"',
        )
        .parse(words)
        .shell
    )
    if shell not in shells:
        raise WrongWords(f"there is completion for {' and '.join(shells)}, got {shell!r}")
    print(
        _COMPLETION.format(
            zsh="autoload -U +X bashcompinit && bashcompinit\n" * (shell == "zsh"),
            commands=" ".join((*COMMANDS, "--version")),
            demos=" ".join(DEMOS),
        )
    )
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
    ended(serve("vcluster", main))


def ended(status: int) -> None:
    """Ends this process, in which all is done, as `sys.exit` does; but its objects are left to the system.  To free each
    takes a third of a second after a large search, and the collector of cycles would look at them for seconds.
    """
    gc.freeze()
    if threading.active_count() > 1:
        sys.exit(status)  # it waits for threads that are no daemons
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(status)  # it tells what cannot be written
    os._exit(status)


if __name__ == "__main__":
    ended(serve(PROGRAM, main))
