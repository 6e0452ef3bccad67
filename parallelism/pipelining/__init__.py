"""Orders of pipelined work as values, and running one on a device."""

from parallelism.faces import load_names

__getattr__, __dir__, __all__ = load_names(__name__, __file__)
