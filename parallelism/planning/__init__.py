"""The best split of a training run over a described cluster: plans, timed by the simulator, the best first."""

from parallelism.faces import load_names

__getattr__, __dir__, __all__ = load_names(__name__, __file__)
