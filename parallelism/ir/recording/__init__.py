"""NumPy functions recorded as programs, and the parts of NumPy that this supports."""

from parallelism.faces import load_names

__getattr__, __dir__, __all__ = load_names(__name__, __file__)
