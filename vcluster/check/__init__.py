"""Checks that teach: they run the function of a student, and say in a sentence what is wrong and the likely mistake."""

from parallelism.faces import load_names

__getattr__, __dir__, __all__ = load_names(__name__, __file__)
