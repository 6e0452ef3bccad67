from .plan import TransformerBlockPlan as TransformerBlockPlan
from .policies import (
    TransformerBlockPolicy as TransformerBlockPolicy,
    TransformerBlockSharding as TransformerBlockSharding,
)
from .transformer_block import TransformerBlock as TransformerBlock
