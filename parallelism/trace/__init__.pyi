from .breakdown import PARTS as PARTS, Split as Split, part_of as part_of
from .collectives import CollectiveRow as CollectiveRow
from .critical_path import PathStep as PathStep
from .exposure import exposed_seconds as exposed_seconds
from .trace import HOST as HOST, Event as Event, Trace as Trace, UndeclaredComputeWarning as UndeclaredComputeWarning
from .transfers import HOLDING as HOLDING, Moving as Moving
