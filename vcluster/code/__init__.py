"""How functions travel to devices, and how errors come back in the user's own lines."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
