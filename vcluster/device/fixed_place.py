"""The place of a device in its mesh, which a kernel reads and cannot change, and its state, which stays a dict.

The library goes by them: a kernel that set them would break every later run of the cluster.
"""

from __future__ import annotations

from typing import Any, NoReturn

from parallelism.display import shortened
from parallelism.mesh import Mesh

_FIXED = ("mesh", "rank", "size", "index")


class FixedPlace:
    """A base class of devices: ``mesh``, ``rank``, ``size`` and ``index`` are set once."""

    mesh: Mesh
    rank: int

    def __repr__(self) -> str:
        return f"<VirtualDevice {self.rank} of {self.mesh!r}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a device stays in its process: send what a kernel needs of it, such as device.rank")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; raises for one that is fixed, and for a ``state`` that is no dict."""
        if name in _FIXED and name in self.__dict__:
            raise AttributeError(
                f"device.{name} is fixed: a kernel reads it, and cannot set it to {shortened(value)}"
            )
        if name == "state" and not isinstance(value, dict):
            raise TypeError(
                f"device.state is a dict that later runs find as it is left, and cannot be "
                f"{shortened(value)}; write device.state['name'] = value"
            )
        object.__setattr__(self, name, value)
