from .crew import MpiCrew as MpiCrew
from .job import current as current, is_host as is_host
from .launcher import as_rank as as_rank
from .nodes import node_lines as node_lines, places_of_devices as places_of_devices
from .requirement import (
    BACKENDS as BACKENDS,
    alike_scripts as alike_scripts,
    device_of as device_of,
    usual_backend as usual_backend,
)
