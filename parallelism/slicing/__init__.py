"""Slicing: a program's blocks cut into pipeline stages that lie on submeshes of different sizes, for the least time."""

from parallelism.faces import load_names

__getattr__, __dir__, __all__ = load_names(__name__, __file__)
