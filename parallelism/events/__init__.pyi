from .columns import (
    ABSENT as ABSENT,
    DEFAULTS as DEFAULTS,
    NUMBERS as NUMBERS,
    Column as Column,
    Columns as Columns,
    Table as Table,
    as_values as as_values,
    column_of as column_of,
    whole_nanoseconds as whole_nanoseconds,
)
from .event import HOST as HOST, KINDS as KINDS, Event as Event
