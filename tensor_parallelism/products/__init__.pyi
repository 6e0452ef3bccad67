from .choice import Seconds as Seconds, cheapest_product as cheapest_product
from .contraction import Contraction as Contraction
from .layer_plan import LayerPlan as LayerPlan, Moves as Moves
from .layouts import check_layouts as check_layouts, check_shape as check_shape
from .matmul import MatMul as MatMul
from .planned_operation import (
    Layer as Layer,
    PlannedOperation as PlannedOperation,
    Shape as Shape,
    check_gradient as check_gradient,
    check_tokens as check_tokens,
)
from .policies import MatMulSharding as MatMulSharding, MatMulShardingPolicy as MatMulShardingPolicy
from .product import (
    Axes as Axes,
    ProductPlan as ProductPlan,
    Task as Task,
    product_plan as product_plan,
    run_product as run_product,
)
