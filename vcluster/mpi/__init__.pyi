from .crew import MpiCrew as MpiCrew
from .job import current as current, is_host as is_host
from .launcher import as_rank as as_rank
from .requirement import BACKENDS as BACKENDS, device_of as device_of, usual_backend as usual_backend
