"""A machine or a GPU measured, and published runs fitted to: `python -m vcluster calibrate`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from parallelism.hardware import VARIABLE, host_file
from vcluster.cli.command_line import Parser, WrongWords, accessing, whole, writable

if TYPE_CHECKING:
    from vcluster.calibration.calibrate import Medium


def calibrate(program: str, words: Sequence[str]) -> int:
    """Measure this machine and write a hardware file."""
    arguments = Parser(
        {
            "file": {"type": Path, "nargs": "?", "metavar": "FILE.json", "help": "the file to write"},
            "--check": {"action": "store_true", "help": "write nothing"},
            "--mpi": {
                "action": "store_true",
                "help": "measure the ranks of this MPI job, and what joins them",
            },
            "--published": {
                "metavar": "TABLE",
                "help": "fit the stack of a table of published runs to it, and tell the errors",
            },
            "--gpu": {
                "action": "store_true",
                "help": "measure a GPU through PyTorch, and write a stack to --output",
            },
            "--output": {"type": Path, "metavar": "FILE.toml", "help": "the stack file that --gpu writes"},
            "--seconds": {"type": whole(1), "metavar": "N", "help": "the time for --gpu (default: 300)"},
            "--gpu-device": {
                "metavar": "DEVICE",
                "help": "cuda (default), cuda:1, or cpu for a try without a GPU",
            },
            "--tables": {
                "metavar": "NAME",
                "help": "with --gpu: measure nothing, fit to what was measured once: tables that are "
                "kept, as h100, or a .json file beside a stack",
            },
            "--quick": {"action": "store_true", "help": "with --gpu: a little of everything, in seconds"},
            "--devices": {
                "type": whole(2, 64),
                "default": max(2, min(64, os.cpu_count() or 2)),
                "metavar": "N",
                "help": "number of devices that compute at the same time (default: the number of cores)",
            },
        },
        prog=f"{program} calibrate",
        description="""\
Measures this machine, describes it in a hardware file, and reports the error of
virtual time against wall time on cases that were not used for the fit. This
takes about a minute; run nothing else meanwhile.""",
        epilog=f"""Without a FILE, the hardware is written to the file that hardware="host" reads:
  $XDG_CONFIG_HOME/vcluster/host.json, or ~/.config/vcluster/host.json.
  {VARIABLE}=PATH names another file; if it is empty, there is none.""",
    ).parse(words)
    if arguments.published is not None:
        return _published(arguments.published)
    if arguments.gpu:
        return _of_gpu(arguments)
    for name in ("output", "seconds", "gpu_device", "quick", "tables"):
        if getattr(arguments, name):
            raise WrongWords(f"--{name.replace('_', '-')} is an option of --gpu")
    path = _file_to_write(arguments)
    from vcluster.calibration.calibrate import SHARED_MEMORY, calibrate as measured

    medium = _medium(arguments.devices) if arguments.mpi else SHARED_MEMORY
    print(measured(arguments.devices, path, medium))
    if path is not None:
        print(f"\nwritten to {path}, for VirtualCluster(hardware={str(arguments.file or 'host')!r})")
    return 0


def _file_to_write(arguments: argparse.Namespace) -> Path | None:
    """The file for the hardware, which can be written; None with ``--check``."""
    if arguments.check:
        if arguments.file is not None:
            raise WrongWords(f"--check writes nothing; leave out {arguments.file}")
        return None
    path: Path | None = arguments.file or host_file()
    if path is None:
        raise WrongWords(f"{VARIABLE} is empty, so hardware='host' has no file; name a file, or use --check")
    with accessing(path):
        if arguments.file is None:
            path.parent.mkdir(parents=True, exist_ok=True)
        writable(path)
    return path


def _medium(devices: int) -> Medium:
    """What joins the ranks of this MPI job."""
    from vcluster.calibration.calibrate import over_mpi
    from vcluster.code import ClusterError
    from vcluster.mpi import current
    from vcluster.mpi.nodes import ranks_by_node

    try:
        job = current(devices)
        return over_mpi(len(ranks_by_node([job.places[rank] for rank in job.next_ranks(devices)])))
    except (ClusterError, ImportError) as error:
        raise WrongWords(str(error).replace("script.py", "-m vcluster calibrate --mpi FILE.json")) from None


def _published(name: str) -> int:
    """Refit a stack to a table of published runs and print both."""
    from parallelism.display import progress
    from vcluster.calibration.published import refitted
    from vcluster.calibration.published_tables import Table

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
        return run(
            arguments.gpu_device or "cuda", output, seconds=arguments.seconds or 300, quick=arguments.quick
        )
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
