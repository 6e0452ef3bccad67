"""Serving: requests, an engine that batches them step by step, and the programs that it runs on the devices of a mesh."""

from parallelism.faces import load_names

__getattr__, __dir__, __all__ = load_names(__name__, __file__)
