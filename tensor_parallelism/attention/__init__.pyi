from .attention import NAMES as NAMES, Attention as Attention, dtype_of as dtype_of
from .plan import AttentionPlan as AttentionPlan, Move as Move, moves_of as moves_of, table_of as table_of
from .policies import AttentionSharding as AttentionSharding, AttentionShardingPolicy as AttentionShardingPolicy
from .shares import Runs as Runs, zigzag_order as zigzag_order
