"""Layouts of programs: they turn a program of whole tensors into the program of each device.

`annotate` gives layouts to some values, and `propagate` derives them for all others.  `localize` returns the program of
each device, with local shapes and with collectives where values change their layouts; `localize_symbolically` does so
once for any numbers of devices.  `partition` cuts a program and
its gradient into the stages of a pipeline.
"""

from parallelism.layouts.localization import Class, Localized, step_of
from parallelism.layouts.localization.borders import Border, Borders, borders
from parallelism.layouts.localization.localized import localize
from parallelism.layouts.localization.symbolic import localize_symbolically
from parallelism.layouts.propagation import Conflict, Devices
from parallelism.layouts.propagation.annotation import annotate, redistribute
from parallelism.layouts.propagation.propagation import propagate
from parallelism.layouts.stages import StageFunctions, Stages
from parallelism.layouts.stages.microbatches import microbatched
from parallelism.layouts.stages.partition import partition

__all__ = [
    "Border",
    "Borders",
    "Class",
    "Conflict",
    "Devices",
    "Localized",
    "StageFunctions",
    "Stages",
    "annotate",
    "borders",
    "localize",
    "localize_symbolically",
    "microbatched",
    "partition",
    "propagate",
    "redistribute",
    "step_of",
]
