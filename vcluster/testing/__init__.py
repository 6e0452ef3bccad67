"""Tests on virtual devices: the implementation of the pytest plugin, and assertions for any test."""

from parallelism.faces import load_names

__getattr__, __dir__, __all__ = load_names(__name__, __file__)
