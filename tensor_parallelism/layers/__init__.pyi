from .cross_entropy import CrossEntropy as CrossEntropy, CrossEntropySharding as CrossEntropySharding
from .dropout import Dropout as Dropout
from .embedding import Embedding as Embedding, EmbeddingSharding as EmbeddingSharding
from .layer import (
    Layer as Layer,
    PlannedOperation as PlannedOperation,
    Shape as Shape,
    check_gradient as check_gradient,
)
from .layer_plan import LayerPlan as LayerPlan, Moves as Moves
from .normalization import LayerNorm as LayerNorm, NormalizationSharding as NormalizationSharding, RMSNorm as RMSNorm
from .vocabulary_loss import VocabularyLoss as VocabularyLoss, VocabularyLossSharding as VocabularyLossSharding
