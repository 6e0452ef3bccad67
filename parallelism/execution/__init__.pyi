from .device_program import ACTIVATIONS as ACTIVATIONS, DeviceProgram as DeviceProgram
from .executable import Executable as Executable
from .op_profile import Profile as Profile
from .pipelined_program import PipelinedProgram as PipelinedProgram
from .stage_code import GRADIENTS as GRADIENTS, StagePrograms as StagePrograms
