from .arguments import PerDevice as PerDevice, Sharded as Sharded
from .call_sites import call_site as call_site, code_of as code_of
from .environment import (
    Environment as Environment,
    apply_environment as apply_environment,
    apply_settings as apply_settings,
    refresh_modules as refresh_modules,
)
from .errors import (
    ChannelClosedError as ChannelClosedError,
    ClusterError as ClusterError,
    ClusterTimeoutError as ClusterTimeoutError,
    CollectiveMismatchError as CollectiveMismatchError,
    DeadlockError as DeadlockError,
    DeviceFailedError as DeviceFailedError,
    HostWaitWarning as HostWaitWarning,
    OperationCancelled as OperationCancelled,
    ReplicasDifferWarning as ReplicasDifferWarning,
    UndeliveredMessageError as UndeliveredMessageError,
    UnusedResultWarning as UnusedResultWarning,
    ranks_in_words as ranks_in_words,
)
from .exceptions import (
    Failure as Failure,
    Frame as Frame,
    describe_exception as describe_exception,
    where_cancelled as where_cancelled,
)
from .pickling import Pickler as Pickler
