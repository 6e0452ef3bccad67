"""From plans to a budget: on which cluster a training run takes how many days, and what it costs."""

from parallelism.faces import load_names

__getattr__, __dir__, __all__ = load_names(__name__, __file__)
