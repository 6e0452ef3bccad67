"""The hardware that is planned for, and the memory of a device, as a user gives them."""

from __future__ import annotations

import re
from math import ceil, prod
from os import PathLike

from parallelism.hardware import Hardware

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def machine_of(hardware: Hardware | str | PathLike[str], devices: int | None) -> tuple[Hardware, int]:
    """The hardware, and the number of its devices that are planned for.

    ``dgx-h100:8`` says itself how large it is, as a `Hardware` and a file do; then ``devices`` must be that number, or
    None.  The name of a preset alone gets as many nodes as ``devices`` need.

    ``ValueError`` for a number that contradicts the hardware, and for a preset's name without any.
    """
    found = Hardware.of(hardware)
    if devices is not None and (type(devices) is not int or devices < 1):
        raise ValueError(f"devices must be an integer of at least 1, got {devices!r}")
    if not isinstance(hardware, str) or hardware not in Hardware.presets():
        if devices not in (None, found.ranks):
            raise ValueError(f"{found.name if not isinstance(hardware, str) else hardware} has {found.ranks} devices, "
                             f"not {devices}; leave devices= out, or resize the hardware")
        return found, found.ranks
    if devices is None:
        raise ValueError(f"say how many devices of {hardware} there are: devices=64, or {_sized(found, 8)} for some "
                         "nodes of it")
    inner = found.devices // found.links[-1].units
    if len(found.links[-1].extents) > 1:
        if devices != found.devices:
            raise ValueError(f"{hardware} has {found.devices} devices, not {devices}; say its extents, as in "
                             f"{_sized(found)}")
        return found, devices
    return found.resized(max(ceil(devices / inner), 1)), devices


def memory_of(memory: float | str | None, hardware: Hardware) -> float:
    """The bytes of memory of a device: a number, a text such as ``72GB`` or ``64GiB``, or None for the hardware's."""
    if memory is None:
        return hardware.memory_bytes
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]*)\s*", memory)
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(f"memory must be a number of bytes, or a text such as 72GB or 64GiB; got {memory!r}")
        memory = float(match[1]) * _UNITS[match[2].upper()]
    if isinstance(memory, bool) or not isinstance(memory, int | float) or not 0 < memory < float("inf"):
        raise ValueError(f"memory must be above 0 bytes and finite; got {memory!r}")
    return memory


def _sized(hardware: Hardware, nodes: int | None = None) -> str:
    extents = hardware.links[-1].extents if nodes is None else (nodes,)
    assert prod(extents)
    return f"{hardware.name.partition(':')[0]}:{'x'.join(map(str, extents))}"
