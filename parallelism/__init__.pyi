from .algorithms import (
    CollectiveAlgorithm as CollectiveAlgorithm,
    CollectiveKind as CollectiveKind,
    RegistrationError as RegistrationError,
)
from .collectives import (
    Explanation as Explanation,
    explain as explain,
    register_algorithm as register_algorithm,
    register_kind as register_kind,
)
from .cost import (
    CollectiveCost as CollectiveCost,
    Costs as Costs,
)
from .execution import (
    Executable as Executable,
    PipelinedProgram as PipelinedProgram,
    Profile as Profile,
)
from .hardware import (
    Hardware as Hardware,
    HardwareFileError as HardwareFileError,
    HostLink as HostLink,
    Link as Link,
    LinkFault as LinkFault,
    Straggler as Straggler,
)
from .mesh import (
    Mesh as Mesh,
    MeshIndex as MeshIndex,
    replica_groups as replica_groups,
)
from .operation import (
    Device as Device,
    Operation as Operation,
    ShardedOperation as ShardedOperation,
)
from .pipelining import (
    Action as Action,
    Overlapped as Overlapped,
    Pipeline as Pipeline,
    PipelinedOperation as PipelinedOperation,
    PipelineStage as PipelineStage,
    Schedule as Schedule,
    ScheduleKind as ScheduleKind,
    Status as Status,
    register_schedule as register_schedule,
)
from .resharding import (
    ReshardingPlan as ReshardingPlan,
    ReshardingStep as ReshardingStep,
    plan_resharding as plan_resharding,
)
from .sharding import (
    DimSharding as DimSharding,
    TensorSharding as TensorSharding,
)
from .simulation import (
    PipelinedStep as PipelinedStep,
    StepParts as StepParts,
    equal_devices as equal_devices,
    simulate as simulate,
    step_parts as step_parts,
)
from .trace import (
    Event as Event,
    Trace as Trace,
)
