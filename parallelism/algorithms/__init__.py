"""The kinds of collectives and the algorithms that move their data: one record each."""

from parallelism.faces import load_names

__getattr__, __dir__, __all__ = load_names(__name__, __file__)
