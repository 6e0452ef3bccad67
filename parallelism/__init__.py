"""Describes, plans and predicts work on many devices.  Values only: nothing here starts devices.

Names are loaded when they are first used, so that a device starts in a process that has loaded only what it needs.
The stub `__init__.pyi` lists them.
"""

from parallelism import moved
from parallelism.faces import load_names

moved.install()

__getattr__, __dir__, __all__ = load_names(__name__, __file__)
