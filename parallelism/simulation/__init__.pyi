from .operations import PipelinedStep as PipelinedStep
from .simulator import equal_devices as equal_devices, simulate as simulate
