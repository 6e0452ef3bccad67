"""The `Device` protocol, the operations written against it, and the errors that every device raises."""

from parallelism.faces import load_names

__getattr__, __dir__, __all__ = load_names(__name__, __file__)
