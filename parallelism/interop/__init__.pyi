from .errors import (
    EvaluationWarning as EvaluationWarning,
    ExpertsWarning as ExpertsWarning,
    InteropError as InteropError,
    OwnDerivativeWarning as OwnDerivativeWarning,
    SizesWarning as SizesWarning,
    UnsupportedError as UnsupportedError,
)
from .onnx_models.programs import from_onnx as from_onnx
from .partitioned import Partitioned as Partitioned
from .pytorch import from_torch as from_torch
from .stablehlo.programs import from_jax as from_jax, from_stablehlo as from_stablehlo, mesh_of as mesh_of
from .written.onnx_models import to_onnx as to_onnx
from .written.stablehlo_modules import to_stablehlo as to_stablehlo
from .written.stages import StageModules as StageModules, stages_to_stablehlo as stages_to_stablehlo
