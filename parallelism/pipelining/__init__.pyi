from .actions import KINDS as KINDS, MESSAGES as MESSAGES, Action as Action, Overlapped as Overlapped
from .execution import (
    Stage as Stage,
    free_tag as free_tag,
    message_user as message_user,
    pipeline_axes as pipeline_axes,
)
from .pipeline import Pipeline as Pipeline, PipelineStage as PipelineStage, Status as Status
from .pipelined_operation import PipelinedOperation as PipelinedOperation
from .schedule import Schedule as Schedule
from .staleness import weight_versions as weight_versions
