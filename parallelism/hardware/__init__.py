"""A described cluster, as a value: its rates and links, and the path of a message."""

from parallelism.faces import load_names

__getattr__, __dir__, __all__ = load_names(__name__, __file__)
