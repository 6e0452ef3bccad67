from ..ir.passes.frozen import frozen as frozen
from .data import ContextParallel as ContextParallel, DataParallel as DataParallel
from .experts import ExpertParallel as ExpertParallel
from .local_layers import LocalLayers as LocalLayers
from .overlap import Fused as Fused, Overlap as Overlap, TensorOverlap as TensorOverlap
from .parts import Parts as Parts
from .pipelines import (
    Pipeline as Pipeline,
    Step as Step,
    UnusedParameters as UnusedParameters,
)
from .precision import MixedPrecision as MixedPrecision
from .recomputation import Recompute as Recompute
from .sequence import SequenceParallel as SequenceParallel
from .strategy import Strategy as Strategy, Transform as Transform
from .tensor import TensorParallel as TensorParallel, WholeWeights as WholeWeights
from .training import (
    SGD as SGD,
    Adam as Adam,
    AdamW as AdamW,
    carried as carried,
    categories as categories,
    first_state as first_state,
    following as following,
    train_step as train_step,
)
from .weight_report import ProductWeight as ProductWeight, WeightReport as WeightReport
from .zero import Zero as Zero
