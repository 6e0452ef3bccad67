"""Transforms: a program of one device becomes a distributed one, by strategies that are values.

`train_step` makes the program of a training step from that of a loss.  Each transform is a frozen value that takes a
program and returns one; `Strategy` applies several.  What a program lacks is refused here, before anything runs.
"""

from parallelism.faces import load_names

__getattr__, __dir__, __all__ = load_names(__name__, __file__)
