"""Mixing: the best split of a training run over a cluster of two kinds of nodes, or over two sites."""

from parallelism.faces import load_names

__getattr__, __dir__, __all__ = load_names(__name__, __file__)
