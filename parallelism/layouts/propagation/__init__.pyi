from .annotation import laid_out as laid_out
from .conflicts import Conflict as Conflict
from .devices import Axes as Axes, Devices as Devices
from .linearity import carries as carries, finite_constants as finite_constants
from .placement import Placement as Placement, placement_by as placement_by
from .propagation import op_placement as op_placement
from .relations import Relation as Relation, relation as relation
