"""Devices on the ranks of an MPI job: messages between them, the memory that those of a node share, and a launcher."""

from parallelism.faces import load_names

__getattr__, __dir__, __all__ = load_names(__name__, __file__)
