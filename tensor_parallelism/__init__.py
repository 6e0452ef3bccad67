"""Worked strategies inside an operator: products and the layers of a Transformer, split over the devices of a mesh.

Names are imported when they are first used; the stub `__init__.pyi` lists them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
