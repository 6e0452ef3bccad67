from .dropout import Dropout as Dropout, counted as counted
from .embedding import Embedding as Embedding, EmbeddingSharding as EmbeddingSharding
from .losses import (
    CrossEntropy as CrossEntropy,
    CrossEntropySharding as CrossEntropySharding,
    VocabularyLoss as VocabularyLoss,
    VocabularyLossSharding as VocabularyLossSharding,
)
from .normalization import (
    LayerNorm as LayerNorm,
    NormalizationSharding as NormalizationSharding,
    RMSNorm as RMSNorm,
)
