"""Training runs as values: a model, a batch, a strategy and a mesh; what Megatron-LM's flags say; and their figures.

`TrainingRun` is such a value, `figures` tells what it takes on a hardware, and `MegatronFlags` reads and writes it in
the flags of Megatron-LM.
"""

from parallelism.faces import load_names

__getattr__, __dir__, __all__ = load_names(__name__, __file__)
