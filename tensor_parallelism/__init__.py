"""Worked strategies inside an operator: products and the layers of a Transformer, split over the devices of a mesh.

Names are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensor_parallelism.attention import (
        Attention,
        AttentionPlan,
        AttentionSharding,
        AttentionShardingPolicy,
        zigzag_order,
    )
    from tensor_parallelism.experts import MixtureOfExperts, MixtureOfExpertsSharding
    from tensor_parallelism.feed_forward import (
        FeedForward,
        FeedForwardPlan,
        FeedForwardSharding,
        FeedForwardShardingPolicy,
    )
    from tensor_parallelism.layers import (
        CrossEntropy,
        CrossEntropySharding,
        Dropout,
        Embedding,
        EmbeddingSharding,
        LayerNorm,
        LayerPlan,
        NormalizationSharding,
        RMSNorm,
        VocabularyLoss,
        VocabularyLossSharding,
    )
    from tensor_parallelism.products import (
        Contraction,
        MatMul,
        MatMulSharding,
        MatMulShardingPolicy,
        ProductPlan,
        Seconds,
    )
    from tensor_parallelism.transformer_block import (
        TransformerBlock,
        TransformerBlockPlan,
        TransformerBlockPolicy,
        TransformerBlockSharding,
    )

_MODULES = {
    "attention": ("Attention",),
    "attention_plan": ("AttentionPlan",),
    "attention_policies": ("AttentionSharding", "AttentionShardingPolicy"),
    "attention_shares": ("zigzag_order",),
    "choice": ("Seconds",),
    "contraction": ("Contraction",),
    "cross_entropy": ("CrossEntropy", "CrossEntropySharding"),
    "dropout": ("Dropout",),
    "embedding": ("Embedding", "EmbeddingSharding"),
    "expert_layouts": ("MixtureOfExpertsSharding",),
    "experts": ("MixtureOfExperts",),
    "feed_forward": ("FeedForward",),
    "feed_forward_plan": ("FeedForwardPlan",),
    "feed_forward_policies": ("FeedForwardSharding", "FeedForwardShardingPolicy"),
    "layer_plan": ("LayerPlan",),
    "matmul": ("MatMul",),
    "normalization": ("LayerNorm", "NormalizationSharding", "RMSNorm"),
    "policies": ("MatMulSharding", "MatMulShardingPolicy"),
    "product": ("ProductPlan",),
    "transformer_block": ("TransformerBlock",),
    "transformer_block_plan": ("TransformerBlockPlan",),
    "transformer_block_policies": ("TransformerBlockPolicy", "TransformerBlockSharding"),
    "vocabulary_loss": ("VocabularyLoss", "VocabularyLossSharding"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Attention", "AttentionPlan", "AttentionSharding", "AttentionShardingPolicy", "Contraction", "CrossEntropy",
    "CrossEntropySharding", "Dropout", "Embedding", "EmbeddingSharding", "FeedForward", "FeedForwardPlan",
    "FeedForwardSharding", "FeedForwardShardingPolicy", "LayerNorm", "LayerPlan", "MatMul", "MatMulSharding",
    "MatMulShardingPolicy", "MixtureOfExperts", "MixtureOfExpertsSharding", "NormalizationSharding", "ProductPlan",
    "RMSNorm", "Seconds", "TransformerBlock", "TransformerBlockPlan", "TransformerBlockPolicy",
    "TransformerBlockSharding", "VocabularyLoss", "VocabularyLossSharding", "zigzag_order",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
