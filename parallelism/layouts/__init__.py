"""Layouts on programs: from a program of whole tensors to the program of one device.

`annotate` says how some values lie, `propagate` finds it for all others, `localize` makes the program of each device:
local shapes, and collectives where values change their layouts.
"""

from parallelism.layouts.annotation import annotate, constrain
from parallelism.layouts.conflicts import Conflict
from parallelism.layouts.devices import Devices
from parallelism.layouts.localized import Class, Localized, localize
from parallelism.layouts.moves import step_of
from parallelism.layouts.propagation import propagate

__all__ = ["Class", "Conflict", "Devices", "Localized", "annotate", "constrain", "localize", "propagate", "step_of"]
