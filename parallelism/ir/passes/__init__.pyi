from .donation import (
    Donated as Donated,
    Kinds as Kinds,
    donations as donations,
    inputs_named as inputs_named,
    owners as owners,
    owns_nothing as owns_nothing,
)
from .fusion import chained as chained
from .gradients import MARK as MARK, gradient as gradient
from .interpreter import Interpreted as Interpreted, checked_arrays as checked_arrays, interpret as interpret
from .memory import (
    freed_after as freed_after,
    live_bytes as live_bytes,
    peak_bytes as peak_bytes,
    taken_by as taken_by,
    unread_after as unread_after,
    written_inputs as written_inputs,
)
from .renaming import Form as Form, Renaming as Renaming
from .room import with_room as with_room
from .shared_tables import tables as tables, with_tables_once as with_tables_once
from .stacked_weights import rows_of_stacks as rows_of_stacks, unstacked as unstacked
