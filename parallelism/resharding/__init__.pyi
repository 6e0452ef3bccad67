from .axis_numbers import blocks_of as blocks_of, state_of as state_of
from .execute import run_plan as run_plan, run_step as run_step
from .plan import (
    ReshardingPlan as ReshardingPlan,
    ReshardingStep as ReshardingStep,
    plan_resharding as plan_resharding,
)
