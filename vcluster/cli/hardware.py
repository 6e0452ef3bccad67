"""Described hardware as text for a terminal: `python -m vcluster hardware`."""

from collections.abc import Sequence
from textwrap import wrap

from parallelism.display import WIDTH
from parallelism.hardware import Hardware, read_stack, stack_names
from parallelism.hardware.host import host_summary
from parallelism.operation.errors import keys_by_value
from vcluster.cli.command_line import Parser, WrongWords


def preset_list() -> str:
    """The presets with their titles, and this machine; then the stacks, each behind a preset that it is made for."""
    presets = [(hardware.name, hardware.title) for hardware in map(Hardware.preset, Hardware.presets())]
    stacks = [(f"{_preset_for(name)}+{name}", str(read_stack(name)["title"])) for name in stack_names()]
    return "\n".join(
        [
            *_with_titles([*presets, ("host", host_summary())]),
            "",
            "A preset with a stack behind a +, which is what a software reaches on it:",
            *_with_titles(stacks),
        ]
    )


def _with_titles(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Lines of names and their titles; what a line does not hold of a title goes on below its beginning."""
    left = max(len(name) for name, _ in rows) + 2
    lines: list[str] = []
    for name, title in rows:
        lines += wrap(
            title,
            WIDTH,
            initial_indent=name.ljust(left),
            subsequent_indent=" " * left,
            break_on_hyphens=False,
        )
    return lines


def _preset_for(stack: str) -> str:
    """The preset that a stack is for, or the first of the device with which its name ends; the laptop for any machine."""
    if preset := read_stack(stack).get("hardware"):
        return str(preset)
    device = stack.rpartition("-")[2]
    return next((name for name in Hardware.presets() if name.endswith(f"-{device}")), "laptop")


def description(name: str) -> str:
    """One hardware as a table with the sources of its numbers. ``name`` is a preset, a file or ``host``.

    ``ValueError`` if there is no such hardware.
    """
    hardware = Hardware.of_host() if name == "host" else Hardware.of(name)
    if hardware is None:
        return f"host: {host_summary()}"
    lines = [str(hardware), *(["", "where the numbers are from"] if hardware.sources else [])]
    for source, fields in keys_by_value(hardware.sources).items():
        lines += wrap(
            ", ".join(fields), WIDTH, initial_indent="  ", subsequent_indent="  ", break_long_words=False
        )
        lines += wrap(
            source,
            WIDTH,
            initial_indent="      ",
            subsequent_indent="      ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def hardware(program: str, words: Sequence[str]) -> int:
    """Print the list of described hardware, or one of it."""
    name = (
        Parser(
            {
                "name": {
                    "nargs": "?",
                    "metavar": "NAME | FILE.toml | FILE.json | host",
                    "help": "the hardware to print",
                }
            },
            prog=f"{program} hardware",
            description="""\
Lists all described clusters and stacks; or prints one cluster with the sources
of its numbers: a preset, a file, or host, which is this machine if it is
calibrated.""",
            epilog=f"""\
  {program} hardware dgx-h100
  {program} hardware dgx-h100:8       eight nodes of it
  {program} hardware tpu-v4:4x4x8     a slice""",
        )
        .parse(words)
        .name
    )
    try:
        print(preset_list() if name is None else description(name))
    except ValueError as error:
        raise WrongWords(str(error)) from None
    return 0
