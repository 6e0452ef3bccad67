"""Worked strategies inside an operator: products and the layers of a Transformer, split over the devices of a mesh.

Names are imported when they are first used; the stub `__init__.pyi` lists them.
"""

from parallelism.faces import load_names

__getattr__, __dir__, __all__ = load_names(__name__, __file__)
