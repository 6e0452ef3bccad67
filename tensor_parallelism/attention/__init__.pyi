from .attention import Attention as Attention
from .plan import NAMES as NAMES, AttentionPlan as AttentionPlan
from .policies import (
    AttentionSharding as AttentionSharding,
    AttentionShardingPolicy as AttentionShardingPolicy,
    PolicyLayouts as PolicyLayouts,
)
from .shares import Runs as Runs, zigzag_order as zigzag_order
