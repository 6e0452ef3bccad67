from .degradations import LinkFault as LinkFault, Straggler as Straggler
from .files import HardwareFileError as HardwareFileError
from .hardware import (
    ITEMSIZE as ITEMSIZE,
    Channel as Channel,
    Hardware as Hardware,
    LinkPath as LinkPath,
    rate_name as rate_name,
)
from .host import (
    CALIBRATED as CALIBRATED,
    VARIABLE as VARIABLE,
    host_file as host_file,
    is_calibrated as is_calibrated,
)
from .kernels import AttentionRate as AttentionRate, Kernel as Kernel
from .links import HostLink as HostLink, Link as Link, Piece as Piece
from .mixtures import Across as Across, MixedHardware as MixedHardware, mixed as mixed
from .power import Power as Power
from .rates import Products as Products, Reached as Reached
from .reserve import Reserve as Reserve, memory_bytes_of as memory_bytes_of
from .sized_presets import sized_hardware as sized_hardware
from .software import Software as Software
from .stacks import (
    MARKS as MARKS,
    fitted_on as fitted_on,
    on_stack as on_stack,
    read_stack as read_stack,
    stack_names as stack_names,
    with_usual_stack as with_usual_stack,
)
from .validation import (
    NOTHING as NOTHING,
    Validation as Validation,
    compared_in as compared_in,
    mfu_remark as mfu_remark,
    usual_error as usual_error,
    validation_json as validation_json,
    validation_text as validation_text,
)
