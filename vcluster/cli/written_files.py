"""Files that commands write beside what they tell: pages, traces, and traces for other simulators."""

import argparse
from pathlib import Path

from parallelism.trace import Trace
from vcluster.cli.command_line import Arguments, WrongWords

CHAKRA: Arguments = {
    "--chakra": {
        "type": Path,
        "metavar": "DIR",
        "help": "write the trace of each device in Chakra's format, for ASTRA-sim",
    }
}


def keep(arguments: argparse.Namespace, traces: dict[str, Trace]) -> None:
    """Write the page of one trace or of two side by side, and save the last trace."""
    from vcluster.report import beside, html  # of pages, which most commands need not

    trace = list(traces.values())[-1]
    try:
        if arguments.report is not None:
            if len(traces) == 2:
                beside(traces, arguments.report, hardware=arguments.hardware)
            else:
                html(trace, arguments.report, hardware=arguments.hardware)
            print(f"\nThe page is {arguments.report}")
        if arguments.save is not None:
            trace.save(arguments.save)
            print(f"\nThe trace is {arguments.save}")
    except OSError as error:
        raise WrongWords(f"{error.filename} cannot be written: {error.strerror or error}") from None
    if getattr(arguments, "chakra", None) is not None:
        print(f"\n{keep_for_chakra(trace, arguments.chakra)}")


def keep_for_chakra(trace: Trace, folder: Path) -> str:
    """Write a trace for Chakra. Returns a sentence that says where."""
    from vcluster.report import chakra

    try:
        paths = chakra(trace, folder)
    except OSError as error:
        raise WrongWords(f"--chakra: {folder} cannot be written: {error.strerror or error}") from None
    except (ImportError, ValueError) as error:
        raise WrongWords(f"--chakra: {error}") from None
    return f"The traces for Chakra are {paths[0]} to {paths[-1].name}"
