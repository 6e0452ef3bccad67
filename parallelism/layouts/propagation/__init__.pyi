from .annotation import laid_out as laid_out
from .conflicts import Conflict as Conflict
from .devices import Axes as Axes, Devices as Devices
from .linearity import finite_constants as finite_constants
from .propagation import op_placement as op_placement
