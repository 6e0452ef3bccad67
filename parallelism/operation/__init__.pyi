from .array_calls import (
    ArrayCalls as ArrayCalls,
    Groups as Groups,
    ReduceOp as ReduceOp,
    Work as Work,
    typed_as as typed_as,
)
from .deadlock import Lane as Lane, Stuck as Stuck, deadlock_error as deadlock_error
from .errors import (
    ClusterError as ClusterError,
    CollectiveMismatchError as CollectiveMismatchError,
    DeadlockError as DeadlockError,
    Undelivered as Undelivered,
    UndeliveredMessageError as UndeliveredMessageError,
    ranks_in_words as ranks_in_words,
    undelivered_error as undelivered_error,
)
from .operation import (
    Device as Device,
    Operation as Operation,
    ShardedOperation as ShardedOperation,
)
from .unfinished import Unfinished as Unfinished
from .user_lines import (
    PACKAGES as PACKAGES,
    ROOT as ROOT,
    calling_line as calling_line,
    is_installed as is_installed,
    is_ours as is_ours,
    line_of as line_of,
)
