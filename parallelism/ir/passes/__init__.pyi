from .gradients import MARK as MARK, gradient as gradient
from .interpreter import Interpreted as Interpreted, checked_arrays as checked_arrays, interpret as interpret
from .memory import (
    freed_after as freed_after,
    live_bytes as live_bytes,
    owners as owners,
    owns_nothing as owns_nothing,
    peak_bytes as peak_bytes,
    unread_after as unread_after,
)
from .renaming import Form as Form, Renaming as Renaming
