"""Automatic sharding: the ways to split each op of a program over a mesh, and what each of them costs."""

from parallelism.faces import load_names

__getattr__, __dir__, __all__ = load_names(__name__, __file__)
