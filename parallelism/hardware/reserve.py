"""`Reserve`: the memory of a device that tensors cannot use."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from parallelism.display.quantities import bytes_in, decimal_bytes, short_errors
from parallelism.hardware import fields as checked

LEAST_BYTES = 1e6
"""A text of digits alone that says less has lost its unit."""


@dataclass(frozen=True)
class Reserve:
    """What a process of training needs on a device besides its tensors.

    >>> from parallelism import Hardware
    >>> reserve = Hardware.preset("dgx-h100").reserve
    >>> reserve.usable_bytes(80e9, communicators=3) < 80e9
    True
    """

    context_bytes: float = 0.0
    """The bytes of a process besides tensors: the context, the code of kernels, the workspaces of libraries."""
    communicator_bytes: float = 0.0
    """The buffers of each group that the device communicates in; it has one along each axis with several devices."""
    waste: float = 0.0
    """What the allocator holds and no tensor uses, as a part of what tensors hold."""

    def __post_init__(self) -> None:
        checked.check(
            self,
            context_bytes=_nbytes,
            communicator_bytes=_nbytes,
            waste=_part,
        )

    def __bool__(self) -> bool:
        return self != NO_RESERVE

    def usable_bytes(self, memory_bytes: float, communicators: Any) -> Any:
        """The bytes that tensors may use of the memory of a device in so many groups, which may be an array."""
        left = memory_bytes - self.context_bytes - self.communicator_bytes * communicators
        return left / (1 + self.waste)

    @property
    def text(self) -> str:
        """What is reserved, in words; empty if nothing is."""
        parts = [
            f"{decimal_bytes(self.context_bytes)} a process" if self.context_bytes else "",
            f"{decimal_bytes(self.communicator_bytes)} a communicator" if self.communicator_bytes else "",
            f"{100 * self.waste:.3g} % of what tensors hold" if self.waste else "",
        ]
        return ", ".join(part for part in parts if part)

    def json(self) -> dict[str, float]:
        """The fields by name."""
        return {
            "context_bytes": self.context_bytes,
            "communicator_bytes": self.communicator_bytes,
            "waste": self.waste,
        }


@short_errors
def memory_bytes_of(name: str, memory: float | str, *, zero: bool = False) -> float:
    """The bytes of memory that a number or a text says, as ``72GB``; ``ValueError`` for none, unless ``zero`` may be."""
    limit = f"{name} must be {'at least' if zero else 'above'} 0 bytes and finite"
    if isinstance(memory, str):
        text = memory
        try:
            memory = bytes_in(text)
        except ValueError:
            if text.strip().startswith("-"):
                raise ValueError(f"{limit}; got {text!r}") from None
            raise ValueError(
                f"{name} must be a number of bytes, or a text such as 72GB or 64GiB; got {text!r}"
            ) from None
        if text.strip().isdigit() and memory < LEAST_BYTES and not (zero and not memory):
            raise ValueError(
                f"{name} must have a unit, such as {text.strip()}GB; got {text!r}, which is bytes"
            )
    is_number = isinstance(memory, int | float) and not isinstance(memory, bool)
    if not is_number or not 0 <= memory < inf or not (memory or zero):
        raise ValueError(f"{limit}; got {memory!r}")
    return memory


def _nbytes(field: str, value: Any) -> float:
    return checked.number(field, value, "of bytes")


def _part(field: str, value: Any) -> float:
    return checked.number(field, value, most=1)


NO_RESERVE = Reserve()
"""The reserve of hosts, and of hardware whose reserve is not known."""


def checked_reserve(field: str, value: Any) -> Reserve:
    """A `Reserve`; ``TypeError`` for anything else."""
    if not isinstance(value, Reserve):
        raise TypeError(f"{field} must be a Reserve; got {checked.shown(value)}")
    return value
