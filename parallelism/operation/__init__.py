"""The `Device` protocol, the operations written against it, and the errors that every device raises."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
