from .arena import (
    LINE as LINE,
    PAGE as PAGE,
    Arena as Arena,
    Heap as Heap,
    Loan as Loan,
    when_gone as when_gone,
)
from .core_affinity import HomeCore as HomeCore
from .layout import (
    CANCELLED as CANCELLED,
    CROWDED as CROWDED,
    DIRECTORY_BYTES as DIRECTORY_BYTES,
    DIRECTORY_ENTRIES as DIRECTORY_ENTRIES,
    EMPTIED as EMPTIED,
    EPOCH as EPOCH,
    GROUPS as GROUPS,
    REACHED as REACHED,
    WIRE_BYTES as WIRE_BYTES,
    Layout as Layout,
)
from .process_memory import Peers as Peers, address_of as address_of
from .signals import (
    NAPS_SECONDS as NAPS_SECONDS,
    NAPS_WITH_QUEUES_SECONDS as NAPS_WITH_QUEUES_SECONDS,
    SPINS as SPINS,
    SPINS_OF_A_THREAD as SPINS_OF_A_THREAD,
    STORES_IN_ORDER as STORES_IN_ORDER,
    Signals as Signals,
    give_way as give_way,
)
from .status import (
    BLOCKED as BLOCKED,
    FINISHED as FINISHED,
    LEFT as LEFT,
    RUNNING as RUNNING,
    LastSeen as LastSeen,
    Need as Need,
    Operation as Operation,
    State as State,
    Status as Status,
)
