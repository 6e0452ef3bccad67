from .attention import (
    Attention as Attention,
    AttentionPlan as AttentionPlan,
    AttentionSharding as AttentionSharding,
    AttentionShardingPolicy as AttentionShardingPolicy,
    zigzag_order as zigzag_order,
)
from .experts import (
    MixtureOfExperts as MixtureOfExperts,
    MixtureOfExpertsSharding as MixtureOfExpertsSharding,
)
from .feed_forward import (
    FeedForward as FeedForward,
    FeedForwardPlan as FeedForwardPlan,
    FeedForwardSharding as FeedForwardSharding,
    FeedForwardShardingPolicy as FeedForwardShardingPolicy,
)
from .layers import (
    CrossEntropy as CrossEntropy,
    CrossEntropySharding as CrossEntropySharding,
    Dropout as Dropout,
    Embedding as Embedding,
    EmbeddingSharding as EmbeddingSharding,
    LayerNorm as LayerNorm,
    NormalizationSharding as NormalizationSharding,
    RMSNorm as RMSNorm,
    VocabularyLoss as VocabularyLoss,
    VocabularyLossSharding as VocabularyLossSharding,
)
from .products import (
    Contraction as Contraction,
    LayerPlan as LayerPlan,
    MatMul as MatMul,
    MatMulSharding as MatMulSharding,
    MatMulShardingPolicy as MatMulShardingPolicy,
    ProductPlan as ProductPlan,
    Seconds as Seconds,
)
from .transformer_block import (
    TransformerBlock as TransformerBlock,
    TransformerBlockPlan as TransformerBlockPlan,
    TransformerBlockPolicy as TransformerBlockPolicy,
    TransformerBlockSharding as TransformerBlockSharding,
)
