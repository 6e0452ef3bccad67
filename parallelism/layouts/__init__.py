"""Layouts of programs: they turn a program of whole tensors into the program of each device.

`annotate` gives layouts to some values, and `propagate` derives them for all others.  `localize` returns the program of
each device, with local shapes and with collectives where values change their layouts.  `partition` cuts a program and
its gradient into the stages of a pipeline.
"""

from parallelism.layouts.annotation import annotate, constrain
from parallelism.layouts.conflicts import Conflict
from parallelism.layouts.devices import Devices
from parallelism.layouts.localized import Class, Localized, localize
from parallelism.layouts.microbatches import microbatched
from parallelism.layouts.moves import step_of
from parallelism.layouts.partition import partition
from parallelism.layouts.propagation import propagate
from parallelism.layouts.stages import StageFunctions, Stages

__all__ = [
    "Class", "Conflict", "Devices", "Localized", "StageFunctions", "Stages", "annotate", "constrain", "localize",
    "microbatched", "partition", "propagate", "step_of",
]
