"""The hardware that is planned for, and the memory of a device, as a user gives them."""

from __future__ import annotations

from os import PathLike

from parallelism.display.quantities import bytes_in
from parallelism.hardware import Hardware, sized_hardware


def machine_of(hardware: Hardware | str | PathLike[str], devices: int | None) -> tuple[Hardware, int]:
    """The hardware, and the number of its devices that are planned for.

    ``ValueError`` as from `sized_hardware`, and for the name of a preset without any number.
    """
    if devices is None and isinstance(hardware, str) and hardware in Hardware.presets():
        raise ValueError(f"say how many devices of {hardware} there are: devices=64, or a number of nodes behind a "
                         "colon, as in dgx-h100:8")
    found = sized_hardware(hardware, devices)
    return found, devices or found.ranks


def memory_of(memory: float | str | None, hardware: Hardware) -> float:
    """The bytes of memory of a device: a number, a text such as ``72GB`` or ``64GiB``, or None for the hardware's."""
    if memory is None:
        return hardware.memory_bytes
    if isinstance(memory, str):
        try:
            memory = bytes_in(memory)
        except ValueError:
            raise ValueError(
                f"memory must be a number of bytes, or a text such as 72GB or 64GiB; got {memory!r}") from None
    if isinstance(memory, bool) or not isinstance(memory, int | float) or not 0 < memory < float("inf"):
        raise ValueError(f"memory must be above 0 bytes and finite; got {memory!r}")
    return memory

