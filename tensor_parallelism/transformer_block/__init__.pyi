from .policies import (
    TransformerBlockPolicy as TransformerBlockPolicy,
    TransformerBlockSharding as TransformerBlockSharding,
)
from .transformer_block import (
    TransformerBlock as TransformerBlock,
    TransformerBlockPlan as TransformerBlockPlan,
)
