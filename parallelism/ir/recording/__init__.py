"""NumPy functions recorded as programs, and the parts of NumPy that this supports."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
