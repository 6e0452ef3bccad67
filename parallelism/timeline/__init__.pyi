from .collective_pricing import FREE as FREE, CollectivePrice as CollectivePrice, route_of as route_of
from .engine import Program as Program, Replay as Replay
from .fair_sharing import Route as Route
from .matching import (
    COLLECTIVE as COLLECTIVE,
    COMPUTE as COMPUTE,
    POINT as POINT,
    RECV as RECV,
    SEND as SEND,
    WAIT as WAIT,
    Roles as Roles,
    collectives_of as collectives_of,
    operations_of_waits as operations_of_waits,
    roles_of as roles_of,
    sends_of_recvs as sends_of_recvs,
)
from .priced import (
    Priced as Priced,
    UndeclaredComputeWarning as UndeclaredComputeWarning,
    warn_of_undeclared as warn_of_undeclared,
)
from .pricing import (
    Prices as Prices,
    Pricing as Pricing,
    priced_scale as priced_scale,
    with_free_overhead as with_free_overhead,
)
from .replay import replay_columns as replay_columns
