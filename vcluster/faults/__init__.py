"""Failures on purpose, the same ones each time: who tests how a program takes them plants them around its runs.

    with faults.plant(cluster, faults.Kill(rank=2, operation=5)):
        cluster.run(kernel)             # DeviceFailedError: rank 2 was ended by SIGKILL

A fault is a frozen description: `Kill`, `Exit`, `Raise`, `FlipBit`, `Drop`, `Duplicate`, `Reorder`, `Fill`.  Where a
rank or an operation is given as a range, or no bit is named, the seed chooses.  In pytest, the mark
``@pytest.mark.faults(faults.Kill(rank=2, operation=5), seed=1)`` does the same around a test.
"""

from __future__ import annotations

from vcluster.faults.kinds import Drop, Duplicate, Exit, Fault, Fill, FlipBit, Kill, Raise, Reorder
from vcluster.faults.plant import FaultNotReachedError, Planted, plant, plant_marks

__all__ = [
    "Drop", "Duplicate", "Exit", "Fault", "FaultNotReachedError", "Fill", "FlipBit", "Kill", "Planted", "Raise",
    "Reorder", "plant", "plant_marks",
]
