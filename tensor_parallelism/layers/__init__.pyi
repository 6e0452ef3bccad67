from .cross_entropy import CrossEntropy as CrossEntropy, CrossEntropySharding as CrossEntropySharding
from .dropout import Dropout as Dropout
from .embedding import Embedding as Embedding, EmbeddingSharding as EmbeddingSharding
from .normalization import LayerNorm as LayerNorm, NormalizationSharding as NormalizationSharding, RMSNorm as RMSNorm
from .vocabulary_loss import VocabularyLoss as VocabularyLoss, VocabularyLossSharding as VocabularyLossSharding
