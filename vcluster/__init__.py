"""A cluster on a laptop: every device a process, every shard a real array, every byte and second on record.

Every public name of `parallelism` is here too.  Names are loaded when they are first used, so that a device starts in
a process that has loaded only what it needs.  The stub `own_names.pyi` lists those of this package.
"""

import parallelism
from parallelism.faces import load_names

HOST = -1
"""The rank of the process that owns the cluster, as in ``device.channel(HOST)``."""

__version__ = "0.1.0"

_own, _, _own_names = load_names(__name__, __file__.replace("__init__.py", "own_names.pyi"))
__all__ = sorted({"HOST", *_own_names, *parallelism.__all__})


def __getattr__(name: str) -> object:
    return getattr(parallelism, name) if name in parallelism.__all__ else _own(name)


def __dir__() -> list[str]:
    return __all__
