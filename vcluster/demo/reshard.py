"""The reshard demo: a tensor gets from one layout to another; the plan is drawn and executed."""

import argparse
from math import prod

import numpy as np

from parallelism.mesh import Mesh
from parallelism.resharding import plan_resharding
from parallelism.sharding import TensorSharding
from vcluster.cli.command_line import WrongWords, hardware_of, mesh_of
from vcluster.code import Sharded
from vcluster.demo.screen import Screen
from vcluster.demo.traffic import (
    run_here,
    show_devices,
    show_elsewhere,
    show_layouts,
    show_plan,
    verdict_of_bytes,
)
from vcluster.mpi import device_of

MOST_ELEMENTS = 1 << 22
SHAPE = (8, 6, 10, 4)
EXAMPLE = "[x, y]", "[y, x]"
"""The layouts if none are given."""


def prepare(arguments: argparse.Namespace) -> tuple[Mesh, TensorSharding, TensorSharding, tuple[int, ...]]:
    """The checked arguments. Raises `WrongWords`. Starts nothing."""
    if arguments.source is not None and arguments.target is None:
        raise WrongWords("the following arguments are required: TARGET; or none, for an example")
    if arguments.source is None:
        arguments.source, arguments.target = EXAMPLE
    requested = None if arguments.mesh is None else mesh_of(arguments, Mesh(x=1), any_axes=True)
    layouts = []
    for name in ("source", "target"):
        try:
            layouts.append(TensorSharding.parse(getattr(arguments, name), requested))
        except ValueError as error:
            needs_mesh = "the mesh is needed to read it: parse(text, mesh)"
            raise WrongWords(
                f"{name}: {str(error).replace(needs_mesh, 'it needs --mesh, as in --mesh x=2')}"
            ) from None
    source, target = layouts
    given = [len(layout.dims) for layout in layouts if layout.ellipsis is None]
    if len(set(given)) > 1:
        raise WrongWords(
            f"source and target are layouts of one tensor; source {source.short()} is of {given[0]} "
            f"dim{'s' * (given[0] != 1)}, target {target.short()} of {given[1]}"
        )
    axes = dict.fromkeys(axis for layout in layouts for axis in (*layout.axes, *layout.partial))
    mesh = requested or Mesh(**(dict.fromkeys(sorted(axes), 2) or {"x": 2}))
    ndim = max(len(source.dims), len(target.dims), int(None not in (source.ellipsis, target.ellipsis)))
    if not arguments.shape and ndim > len(SHAPE):
        raise WrongWords(f"a tensor of {ndim} dims needs its --shape")
    shape = tuple(arguments.shape or SHAPE[:ndim])
    if prod(shape) > MOST_ELEMENTS:
        raise WrongWords(f"--shape: a demo takes up to {MOST_ELEMENTS:,} elements, got {prod(shape):,}")
    try:
        plan_resharding(source, target, shape, np.float64, mesh)
    except ValueError as error:
        raise WrongWords(str(error)) from None
    return mesh, source, target, shape


def run_demo(arguments: argparse.Namespace, screen: Screen) -> None:
    """Run the demo. A verdict is bad if values or bytes differ from what is expected."""
    mesh, source, target, shape = prepare(arguments)
    hardware = hardware_of(arguments.hardware, mesh.size)
    device = device_of(arguments.backend)
    screen.line(f"reshard {source.short()} -> {target.short()} on {mesh!r}, each device a {device}", "bold")

    screen.heading("Before and after")
    show_layouts(screen, (("source", shape, source), ("target", shape, target)), mesh)

    x = np.arange(float(prod(shape))).reshape(shape)
    run = run_here(
        arguments,
        mesh,
        lambda device, shard: device.reshard(shard, source, target, shape=shape),
        Sharded(x, source),
    )

    screen.heading("Plan and traffic")
    plan = plan_resharding(source, target, shape, x.dtype, mesh)
    show_plan(screen, plan)
    screen.line(f"  largest array of a device during the plan: {max(plan.peak_bytes):,} bytes")
    show_devices(screen, run.trace, ("before", "after"), zip(source.shard(x, mesh), run.outputs, strict=True))

    screen.heading("Verdict")
    equal = np.array_equal(target.unshard(run.outputs, mesh), x) and all(
        out.shape == target.local_shape(shape, mesh, rank) for rank, out in enumerate(run.outputs)
    )
    screen.verdict(
        equal, "every device holds its shard of the target" if equal else "the shards are not the target's"
    )
    verdict_of_bytes(screen, run.trace, sum(plan.bytes_received))
    show_elsewhere(screen, run.trace, mesh, hardware)
