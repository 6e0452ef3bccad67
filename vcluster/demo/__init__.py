"""The demos: small models and collectives, run on a cluster and explained."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
