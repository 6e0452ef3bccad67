"""Programs of inference: a Transformer that writes keys and values into a cache, and attends to what is there."""

from parallelism.faces import load_names

__getattr__, __dir__, __all__ = load_names(__name__, __file__)
