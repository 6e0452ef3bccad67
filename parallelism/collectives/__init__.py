"""Calls of collectives: what a call says, how it is checked, what it moves, and what it gives."""

from parallelism.faces import load_names

__getattr__, __dir__, __all__ = load_names(__name__, __file__)
