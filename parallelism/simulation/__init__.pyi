from .device_events import Rows as Rows
from .event_classes import Templates as Templates
from .pipelined_step import PipelinedStep as PipelinedStep
from .simulator import equal_devices as equal_devices, simulate as simulate
