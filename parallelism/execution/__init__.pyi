from .device_calls import METHODS as METHODS
from .device_program import ACTIVATIONS as ACTIVATIONS
from .executable import Executable as Executable
from .op_profile import Profile as Profile
from .pipelined_program import PipelinedProgram as PipelinedProgram, Share as Share
from .placing import operation_on as operation_on
from .stage_code import StagePrograms as StagePrograms
from .stage_runner import ProgramStage as ProgramStage
from .trained_pipeline import TrainedPipeline as TrainedPipeline
from .typed_arrays import TypedArray as TypedArray
