from .columns import LONG as LONG, Packed as Packed, columns_of as columns_of, make_trace as make_trace
from .recorder import Record as Record, Recorder as Recorder
from .templates import (
    Row as Row,
    Template as Template,
    dtype_name as dtype_name,
    message_template as message_template,
)
