"""Automatic sharding: the shardings of each op, and the layouts of a program that take the least time."""

from parallelism.faces import load_names

__getattr__, __dir__, __all__ = load_names(__name__, __file__)
