"""Attention and feed-forward behind norms and beside residuals, as one operation."""

from parallelism.faces import load_names

__getattr__, __dir__, __all__ = load_names(__name__, __file__)
