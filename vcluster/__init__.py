"""A cluster on a laptop: every device a process, every shard a real array, every byte and second on record.

Every public name of `parallelism` is here too.  Names are loaded when they are first used, so that a device starts in
a process that has loaded only what it needs.  The stub `own_names.pyi` lists those of this package.
"""

import parallelism

try:
    from parallelism.faces import load_names
except ImportError as error:
    raise ImportError(
        f"vcluster brings a package parallelism of its own, and Python found another one, at {parallelism.__path__[0]}: "
        "take that away (python -m pip uninstall parallelism), install vcluster again (python -m pip install "
        "--force-reinstall --no-deps vcluster), and keep the two in environments of their own"
        if hasattr(parallelism, "__path__")
        else f"vcluster brings a package parallelism of its own, and Python found {parallelism.__file__}: "
        "give that file another name, or start Python in another folder"
    ) from error

HOST = -1
"""The rank of the process that owns the cluster, as in ``device.channel(HOST)``."""

__version__ = "0.2.0"

_own, _, _own_names = load_names(__name__, __file__.replace("__init__.py", "own_names.pyi"))
__all__ = sorted({"HOST", *_own_names, *parallelism.__all__})


def __getattr__(name: str) -> object:
    return getattr(parallelism, name) if name in parallelism.__all__ else _own(name, 3)


def __dir__() -> list[str]:
    return __all__
