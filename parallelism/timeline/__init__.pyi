from .collective_pricing import FREE as FREE, CollectivePrice as CollectivePrice, way_of as way_of
from .fair_sharing import Way as Way
from .matching import COLLECTIVE as COLLECTIVE, POINT as POINT, Roles as Roles, roles_of as roles_of
from .priced import (
    Priced as Priced,
    UndeclaredComputeWarning as UndeclaredComputeWarning,
    warn_of_undeclared as warn_of_undeclared,
)
from .pricing import Prices as Prices, Pricing as Pricing, with_free_overhead as with_free_overhead
from .replay import Told as Told, replay_columns as replay_columns
