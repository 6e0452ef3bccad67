from . import faults as faults, report as report
from .code import (
    ChannelClosedError as ChannelClosedError,
    ClusterError as ClusterError,
    ClusterTimeoutError as ClusterTimeoutError,
    CollectiveMismatchError as CollectiveMismatchError,
    DeadlockError as DeadlockError,
    DeviceFailedError as DeviceFailedError,
    HostWaitWarning as HostWaitWarning,
    OperationCancelled as OperationCancelled,
    PerDevice as PerDevice,
    ReplicasDifferWarning as ReplicasDifferWarning,
    Sharded as Sharded,
    UndeliveredMessageError as UndeliveredMessageError,
    UnusedResultWarning as UnusedResultWarning,
)
from .device import (
    VirtualDevice as VirtualDevice,
)
from .messages import (
    ChannelStatistics as ChannelStatistics,
    VirtualChannel as VirtualChannel,
)
from .runs import (
    Run as Run,
    VirtualCluster as VirtualCluster,
)
from .testing.communication import (
    assert_communication as assert_communication,
)
from .testing.kernels import (
    check_kernel as check_kernel,
)
from .testing.sharded import (
    assert_sharded_allclose as assert_sharded_allclose,
)
