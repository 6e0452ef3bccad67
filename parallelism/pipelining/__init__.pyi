from .actions import KINDS as KINDS, MESSAGES as MESSAGES, Action as Action, Overlapped as Overlapped
from .execution import (
    Stage as Stage,
    event_name as event_name,
    parts_of as parts_of,
    pipeline_axes as pipeline_axes,
    run_action as run_action,
)
from .generators import ScheduleKind as ScheduleKind
from .messages import (
    NOBODY as NOBODY,
    Passed as Passed,
    free_tag as free_tag,
    message_user as message_user,
    passed as passed,
    passed_columns as passed_columns,
)
from .pipeline import Pipeline as Pipeline, PipelineStage as PipelineStage, Status as Status
from .pipelined_operation import PipelinedOperation as PipelinedOperation
from .registration import register_schedule as register_schedule
from .schedule import Schedule as Schedule
from .staleness import weight_versions as weight_versions
