"""Describes, plans and predicts work on many devices.  Values only: nothing here starts a process.

Names are loaded when they are first used, so that a device starts in a process that has loaded only what it needs.
The stub `__init__.pyi` lists them.
"""

import lazy_loader

from parallelism import moved

moved.install()

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
