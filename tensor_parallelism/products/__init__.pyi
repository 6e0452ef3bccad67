from .choice import Seconds as Seconds, cheapest_product as cheapest_product
from .contraction import Contraction as Contraction
from .layouts import check_layouts as check_layouts, check_shape as check_shape
from .matmul import MatMul as MatMul
from .policies import MatMulSharding as MatMulSharding, MatMulShardingPolicy as MatMulShardingPolicy
from .product import (
    Axes as Axes,
    ProductPlan as ProductPlan,
    Shape as Shape,
    Task as Task,
    product_plan as product_plan,
    run_product as run_product,
)
