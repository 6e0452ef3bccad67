"""Planted failures: reproducible faults in the runs of a cluster, to test how a program handles them.

    with faults.plant(cluster, faults.Kill(rank=2, operation=5)):
        cluster.run(kernel)             # DeviceFailedError: rank 2 was ended by SIGKILL

A fault is a frozen description: `Kill`, `Exit`, `Raise`, `FlipBit`, `Drop`, `Duplicate`, `Reorder` or `Fill`. If a rank
or an operation is a range, or no bit is given, the seed chooses. In pytest, the mark
``@pytest.mark.faults(faults.Kill(rank=2, operation=5), seed=1)`` plants faults in the runs of a test.
"""

from vcluster.faults.kinds import Drop, Duplicate, Exit, Fault, Fill, FlipBit, Kill, Raise, Reorder
from vcluster.faults.plant import FaultNotReachedError, Planted, plant, plant_marks

__all__ = [
    "Drop",
    "Duplicate",
    "Exit",
    "Fault",
    "FaultNotReachedError",
    "Fill",
    "FlipBit",
    "Kill",
    "Planted",
    "Raise",
    "Reorder",
    "plant",
    "plant_marks",
]
