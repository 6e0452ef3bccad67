"""`Software`: habits of the software on a hardware, by which programs run there with other ops, or other memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from parallelism.hardware.hardware import Hardware


class Software(NamedTuple):
    """How a software runs programs; the fields of a `Hardware` that have these names.

    `parallelism.execution.operation_on` takes them by name.
    """

    fused: bool | str = False
    overlapping: bool = False
    gradient_buffers: bool = False

    @classmethod
    def of(cls, hardware: Hardware | None) -> Software:
        """The software of a hardware; None is the host, which has none of these habits."""
        if hardware is None:
            return cls()
        return cls(hardware.fused, hardware.overlapping, hardware.gradient_buffers)
