"""Devices on the ranks of an MPI job: a transport of messages in place of shared memory, and a launcher."""

from parallelism.faces import load_names

__getattr__, __dir__, __all__ = load_names(__name__, __file__)
