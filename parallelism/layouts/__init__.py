"""Layouts on programs: from a program of whole tensors to the program of one device.

`annotate` says how some values lie, `propagate` finds it for all others, `localize` makes the program of each device:
local shapes, and collectives where values change their layouts.  `partition` cuts a program and its gradient into the
stages of a pipeline.
"""

from parallelism.layouts.localization import Class, Localized, step_of
from parallelism.layouts.localization.localized import localize
from parallelism.layouts.propagation import Conflict, Devices
from parallelism.layouts.propagation.annotation import annotate, constrain
from parallelism.layouts.propagation.propagation import propagate
from parallelism.layouts.stages import StageFunctions, Stages
from parallelism.layouts.stages.microbatches import microbatched
from parallelism.layouts.stages.partition import partition

__all__ = [
    "Class", "Conflict", "Devices", "Localized", "StageFunctions", "Stages", "annotate", "constrain", "localize",
    "microbatched", "partition", "propagate", "step_of",
]
