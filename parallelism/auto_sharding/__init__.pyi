from .dual_prices import Dual as Dual, OtherMesh as OtherMesh, dual as dual, other_splits as other_splits
from .explanation import Alternative as Alternative, Why as Why
from .integer_program import NoLayoutFits as NoLayoutFits
from .mesh_shapes import (
    AutoPlans as AutoPlans,
    Refusal as Refusal,
    auto_plans as auto_plans,
    shapes_of as shapes_of,
)
from .op_sharding import WAITS as WAITS, OpSharding as OpSharding, op_shardings as op_shardings
from .prices import Connection as Connection, connect as connect
from .solution import AutoSharding as AutoSharding, auto_shard as auto_shard
