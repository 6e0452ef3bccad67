from .operation import (
    Device as Device,
    Groups as Groups,
    Operation as Operation,
    ReduceOp as ReduceOp,
    ShardedOperation as ShardedOperation,
    Work as Work,
)
