from .choice import Seconds as Seconds, cheapest_product as cheapest_product
from .contraction import Contraction as Contraction
from .layer_plan import (
    LayerPlan as LayerPlan,
    Move as Move,
    Moves as Moves,
    Plan as Plan,
    moves_of as moves_of,
)
from .matmul import MatMul as MatMul
from .planned_operation import (
    Changes as Changes,
    Layer as Layer,
    Moving as Moving,
    PlannedOperation as PlannedOperation,
    Sharding as Sharding,
    check_shard as check_shard,
    check_tokens as check_tokens,
)
from .policies import MatMulSharding as MatMulSharding, MatMulShardingPolicy as MatMulShardingPolicy
from .product import (
    Axes as Axes,
    AxisOrAxes as AxisOrAxes,
    ByRank as ByRank,
    DType as DType,
    ProductPlan as ProductPlan,
    Shape as Shape,
    Task as Task,
    all_different as all_different,
    moved as moved,
    product_plan as product_plan,
    run_product as run_product,
)
