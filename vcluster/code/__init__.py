"""How functions travel to devices, and how errors come back in the user's own lines."""

from parallelism.faces import load_names

__getattr__, __dir__, __all__ = load_names(__name__, __file__)
