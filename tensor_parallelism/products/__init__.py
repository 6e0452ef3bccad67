"""Matrix products in any layout, and what all planned operations share."""

from parallelism.faces import load_names

__getattr__, __dir__, __all__ = load_names(__name__, __file__)
