"""Layouts on programs: from a program of whole tensors to the program of one device.

`annotate` says how some values lie, `propagate` finds it for all others, `localize` makes the program of each device:
local shapes, and collectives where values change their layouts.  `partition` cuts a program and its gradient into the
stages of a pipeline.
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
