from .breakdown import (
    PARTS as PARTS,
    STEP_PARTS as STEP_PARTS,
    Split as Split,
    StepSplit as StepSplit,
    part_of as part_of,
    split as split,
    step_part_of as step_part_of,
    step_split as step_split,
)
from .by_operation import (
    ByOperation as ByOperation,
    Operation as Operation,
    OperationTotals as OperationTotals,
    totals_by_operation as totals_by_operation,
)
from .collectives import CollectiveRow as CollectiveRow
from .critical_path import PathStep as PathStep
from .trace import (
    HOST as HOST,
    Event as Event,
    Trace as Trace,
    UndeclaredComputeWarning as UndeclaredComputeWarning,
)
from .transfers import HOLDING as HOLDING, Moving as Moving
