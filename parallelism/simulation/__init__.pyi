from .folding import CannotFold as CannotFold
from .operations import PipelinedStep as PipelinedStep
from .parts import StepParts as StepParts
from .simulator import equal_devices as equal_devices, simulate as simulate, step_parts as step_parts
