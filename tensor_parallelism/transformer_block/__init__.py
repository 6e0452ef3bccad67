"""Attention and feed-forward behind norms and beside residuals, as one operation."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
