"""A program takes sums that another one left under way, and waits for each before what reads it."""

from __future__ import annotations

import numpy as np

from parallelism import Mesh, ir
from parallelism.execution import TypedArray
from parallelism.execution.device_program import DeviceProgram
from parallelism.simulation.typed_device import TypedDevice

COUNT = 24


def test_an_op_waits_for_its_late_inputs_in_their_order() -> None:
    """And not in that of a set of their names, which is another one in each process."""
    types = [ir.TensorType("f32", (3 + number,)) for number in range(COUNT)]
    sums = ir.record(lambda *xs: [ir.apply("all_reduce", x, axes=["dp"], group=2, op="sum") for x in xs],
                     *types)
    reads = [*range(1, COUNT, 2), *range(0, COUNT, 2)]
    update = ir.record(lambda *xs: np.concatenate([xs[number] for number in reads]),
                       *types)
    first = DeviceProgram(sums, {}, calls=tuple((number,) for number in range(COUNT)),
                          left=frozenset(value.name for value in sums.outputs))
    device = TypedDevice(Mesh(dp=2), rank=0)
    late = first.run(device.device, [TypedArray.of(each) for each in types])
    DeviceProgram(update, {}).run(device.device, late)
    started = [row.work for row in device.events.rows if row.kind == "collective"]
    waits = [row.work for row in device.events.rows if row.kind == "wait"]
    assert waits == [started[number] for number in reads]
