"""The demo of plans: the best split of a small GPT over described devices, and a run of it on processes here."""

import argparse
from textwrap import wrap

from parallelism.display import WIDTH, progress
from parallelism.display.quantities import decimal_bytes, seconds
from parallelism.hardware import Hardware
from parallelism.models import TransformerSpec
from parallelism.planning import NoPlanFits, Plan, find_plan
from vcluster.cli.command_line import WrongWords
from vcluster.demo.screen import Screen
from vcluster.mpi import device_of
from vcluster.runs.verified import verified

SHOWN = 6
"""The number of plans in the table."""


def run_demo(arguments: argparse.Namespace, screen: Screen) -> None:
    """Run the demo. A verdict is bad if the run differs from its simulation, or its numbers from one process."""
    devices, batch = arguments.devices, arguments.rows
    spec = TransformerSpec(layers=arguments.layers, width=512, heads=8, vocabulary=1024, sequence=256)
    try:
        with progress("listing the splits") as told:
            plans = find_plan(
                spec,
                hardware=arguments.hardware,
                devices=devices,
                batch=batch,
                memory=arguments.memory,
                microbatch=1,
                schedule="1f1b",
                recompute="none",
                zero=[0, 1],
                sp=False,
                order="pp dp cp tp",
                progress=told,
            )
        best = plans.best
    except (NoPlanFits, ValueError, OSError) as error:
        raise WrongWords(str(error)) from None
    hardware = plans.task.hardware
    screen.line(f"The best split of a small GPT over {devices} devices of {hardware.name}", "bold")
    screen.line(
        f"  {spec.layers} layers, {spec.width} wide, {spec.parameters:,} parameters; {batch} sequences a step"
    )
    screen.line(
        f"  {plans.considered} combinations: {plans.timed} timed, {plans.simulated} simulated, "
        f"{sum(each.count for each in plans.refused.values())} refused"
    )

    screen.heading("The best plans")
    screen.table(
        ["step", "memory", "plan"],
        [(seconds(plan.seconds), decimal_bytes(plan.peak_bytes), plan.split) for plan in plans[:SHOWN]],
    )

    screen.heading("The step of the first, by part, on the device that waits least for others")
    parts = best.figures.parts
    for name, value in parts.items():
        share = value / best.figures.seconds
        screen.line(f"  {name:<12}{seconds(value):>9} {share:6.1%}  {'#' * round(40 * share)}".rstrip())
    screen.line()
    for line in wrap(f"Why the first: {best.why()}.", WIDTH):
        screen.line(line)

    if arguments.html is not None:
        screen.record = best.simulate(), None
    _run_small(best, hardware, arguments.backend, screen)
    screen.heading("More of it")
    screen.line("  python -m vcluster plan --help")


def _run_small(best: Plan, hardware: Hardware, backend: str, screen: Screen) -> None:
    """Run the plan of a smaller model, and tell where it differs from its simulation."""
    small = best.scaled_down()
    title = f"The first plan of a smaller model, run on {small.mesh!r}, each device a {device_of(backend)}"
    screen.heading("\n".join(wrap(title, WIDTH)))
    found = verified(small, hardware, backend=backend)
    screen.verdict(
        "numbers" not in found.differences,
        f"its numbers differ from those of one process by {found.apart:.1g} of the largest",
    )
    for what, figure in (
        ("time", seconds(found.seconds)),
        ("memory", "on each device"),
        ("communication", f"{found.received_bytes:,} bytes"),
    ):
        equal = what not in found.differences
        screen.verdict(equal, f"{what} ({figure}) {'equals' if equal else 'is not'} that of the simulation")
