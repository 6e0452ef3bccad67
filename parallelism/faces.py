"""The face of a room: the names in its stub, each loaded from its module when it is first used.

A stub `__init__.pyi` is what type checkers read. It holds nothing but lines as ``from .module import Name as Name``, so
a few splits read it. A device reads some thirty stubs as it starts, and a parser of Python takes seven times as long.
"""

from __future__ import annotations

import sys
from importlib import import_module
from os.path import dirname, exists

from parallelism.moved import renamed

TYPE_CHECKING = False  # that of `typing` has the same meaning, and takes 10 ms to import
if TYPE_CHECKING:
    from collections.abc import Callable


def load_names(package: str, stub: str) -> tuple[Callable[..., object], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package, from its stub.

    ``stub`` is the path of the stub, or that of the package's ``__init__.py``, with the stub beside it.
    """
    directory = dirname(stub)
    path = stub if stub.endswith("i") else f"{stub}i"
    with open(path, encoding="utf-8") as file:
        _, *imports = f"\n{file.read()}".split("\nfrom .")
    module_of: dict[str, str] = {}
    for module, _, names in (line.partition(" import ") for line in imports):
        for name in names.replace("(", "").replace(")", "").split(","):
            module_of[name.partition(" as ")[0].strip()] = module
    module_of.pop("", None)  # behind a comma at the end

    def load(name: str, stacklevel: int = 2) -> object:
        if name not in module_of:
            if (new := renamed(package, name, stacklevel)) is not None:
                return load(new)
            # ``from room import module`` asks here first, and imports the module then.
            if exists(f"{directory}/{name}.py"):
                raise AttributeError(f"module {package!r} has not loaded {name!r}", name=name)
            from parallelism.spelling import no_public_name

            no_public_name(package, name, every_name)
        module = module_of[name]
        loaded = import_module(f".{module or name}", package)
        value = getattr(loaded, name) if module else loaded
        setattr(sys.modules[package], name, value)  # found without this function from now on
        return value

    every_name = sorted(module_of)
    return load, every_name.copy, every_name
