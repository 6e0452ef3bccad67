from .gradients import MARK as MARK
from .interpreter import Interpreted as Interpreted, checked_arrays as checked_arrays
from .memory import (
    freed_after as freed_after,
    live_bytes as live_bytes,
    owns_nothing as owns_nothing,
    peak_bytes as peak_bytes,
)
