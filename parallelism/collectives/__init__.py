"""Calls of collectives: what a call says, how it is checked, what it moves, and what it gives."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
