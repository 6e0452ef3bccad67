from .commands import (
    Cancelled as Cancelled,
    DeviceSpec as DeviceSpec,
    Done as Done,
    Failed as Failed,
    RunCommand as RunCommand,
)
from .crew import Crew as Crew, Died as Died, ProcessCrew as ProcessCrew, ThreadCrew as ThreadCrew
from .device_process import (
    default_start_method as default_start_method,
    running_processes as running_processes,
    start_fork_server as start_fork_server,
)
from .forkserver import start_early as start_early
from .output import Printed as Printed, Warned as Warned
