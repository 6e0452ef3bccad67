from .batches import Part as Part, rows_of as rows_of
from .laid_out_stages import gradient_layout as gradient_layout
from .stages import GRADIENT as GRADIENT, StageFunctions as StageFunctions, Stages as Stages
