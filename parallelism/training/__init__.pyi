from .megatron import MegatronFlags as MegatronFlags
from .megatron_options import (
    ARGUMENTS as ARGUMENTS,
    OPTIONS as OPTIONS,
    UNCHANGING as UNCHANGING,
    Option as Option,
)
from .run_figures import Figures as Figures, figures as figures
from .scaling import scaled_down as scaled_down
from .script_flags import LaunchFlags as LaunchFlags, launch_flags as launch_flags
from .training_run import TrainingRun as TrainingRun
